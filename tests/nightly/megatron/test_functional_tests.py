"""Megatron's own functional tests that set both options: described as they are, or refused by the name of one option.

Needs MEGATRON_MIRROR, a clone of Megatron-LM with its tags. docs/supported.md has the figures.
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from functional_tests import COUNTED, FunctionalTest, functional_tests
from released import MIRROR

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.describe_from_checkout import describe_command_line

NEEDED = 0.8
"""Of the tests of all releases together."""


@pytest.mark.parametrize("counted", COUNTED, ids=lambda counted: counted.release)
@pytest.mark.timeout(3600)
def test_megatrons_functional_tests_are_described_or_refused_by_name(tmp_path, counted):
    tree = tmp_path / "Megatron-LM"
    subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", MIRROR, tree], check=True)
    subprocess.run(["git", "-C", tree, "checkout", "-q", counted.commit], check=True)
    tests = functional_tests(counted.commit)
    assert len(tests) == counted.tests
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
        said = dict(zip((test.name for test in tests), pool.map(lambda test: refusal(tree, test), tests)))
    refused = {name: why for name, why in said.items() if why}
    expected = {name: why for why, names in counted.refused.items() for name in names}
    wrong = {name: why for name, why in refused.items() if not why.startswith(expected.get(name, "nothing"))}
    assert wrong == {} and refused.keys() == expected.keys()
    assert not any("\n" in why for why in refused.values())


def test_few_of_them_are_refused():
    assert sum(one.described for one in COUNTED) >= NEEDED * sum(one.tests for one in COUNTED)


def refusal(tree: Path, test: FunctionalTest) -> str:
    """Why a test is refused, behind the name of the script; empty where it is described."""
    entry = test.entry(tree)
    try:
        workload = describe_command_line(tree, test.options, entry).workload
    except InputError as error:
        return str(error).removeprefix(f"{tree / entry}: ")
    assert workload.chunks
    return ""
