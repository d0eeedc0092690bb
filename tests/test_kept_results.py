"""What benchmarks/results holds: every result says where and when it was measured, has its picture, and is one that the texts name."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from megatron_ext import files

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import pictures  # noqa: E402

ELSEWHERE = ("peers", "planner_scale", "simulated_clusters")
"""Benchmarks that draw by themselves, not by pictures.py."""

OF_A_RUN = {"timeline.png"}
"""What the texts name that a run writes into its own folder."""


def everything_named(value) -> dict:
    """All names at any depth of a JSON, with their last value."""
    found = {}
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        found |= {name: inner} | everything_named(inner)
    return found


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_machine_versions_and_date_and_has_a_picture(result):
    named = everything_named(files.load(result, dict))
    date, torch = named.get("date") or named["created_at"], named.get("versions", named)["torch"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]+\+00:00", date)
    assert torch and named["processors"] and named["kernel"]
    assert result.with_suffix(".png").stat().st_size > 5_000


@pytest.mark.parametrize("result", [path for path in RESULTS if not path.stem.startswith(ELSEWHERE)], ids=lambda path: path.stem)
def test_a_picture_is_drawn_from_its_result(result, tmp_path):
    copy = Path(shutil.copy(result, tmp_path))
    drawn = pictures.draw(str(copy))  # as options of benchmarks give it
    assert drawn == copy.with_suffix(".png") and drawn.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("text", ["README.md", "benchmarks/README.md"])
def test_every_result_named_in_a_text_is_kept(text):
    named = set(re.findall(r"`(?:benchmarks/)?(?:results/)?([a-z0-9_]+\.(?:json|png))`", (ROOT / text).read_text()))
    assert len(named) > 10
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert named - kept - OF_A_RUN == set()


def test_every_kept_result_is_named_in_a_text():
    texts = (ROOT / "README.md").read_text() + (ROOT / "benchmarks/README.md").read_text()
    assert [path.name for path in RESULTS if path.name not in texts and f"`{path.stem}`" not in texts] == []
