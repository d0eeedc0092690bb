"""Helpers beside these tests are imported by name, also by the ranks that the tests start."""

import sys
from pathlib import Path

import pytest
from cases import INSTANCES, MODELS, STRICT
from parity_service import ParityService
from places import HELPERS
from training import run_warm

from megatron_ext.workload import workload as workload_file

running: list[ParityService] = []
"""The ranks that are up."""


ALIKE = [{"no_pipeline", STRICT, INSTANCES}, {"experts", "experts-instances"}]
"""Layouts on which a layer saves the same: it is counted once where one process describes a model on all of them."""


class Workloads(dict):
    """By layout and model, or ``shapes`` and a name of ``cases.SHAPES``. The first use of a model describes it, on all
    layouts that are :data:`ALIKE`; tests use every model of the interleaved layout, so the first describes all."""

    def __init__(self, made_once):
        super().__init__()
        self._made_once = made_once

    def __missing__(self, key: tuple[str, str]):
        layout, name = key
        layouts = sorted(next((alike for alike in ALIKE if layout in alike), {layout}))
        names = [*MODELS] if layout == "interleaved" else [name]

        def describe(folder: Path) -> None:
            cases = [f"{one}.{model}" for one in layouts for model in names]
            result = run_warm([sys.executable, str(HELPERS / "describe_cases.py"), str(folder), *cases], timeout=200)
            assert result.returncode == 0, result.stderr

        folder = self._made_once(f"workloads.{layouts[0]}.{names[0]}", describe)
        self[key] = workload_file.load(folder / f"{layout}.{name}.json")
        return self[key]

    def __repr__(self) -> str:  # not the page of text that a failing test would print
        return f"{len(self)} workloads"


@pytest.fixture(scope="session")
def workloads(megatron_tree, made_once) -> Workloads:
    return Workloads(made_once)


@pytest.fixture(scope="session")
def services(megatron_tree):
    """``services(layout)``: ranks that are up, of one layout at a time."""

    def service(layout: str) -> ParityService:
        if not running or running[0].layout != layout:
            end_ranks()
            running.append(ParityService(layout))
        return running[0]

    yield service
    end_ranks()


def end_ranks() -> None:
    while running:
        running.pop().close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Ranks that nobody asks for next end: also while they wait, every thread of gloo wakes a hundred times a second,
    which for four ranks is a tenth of a processor."""
    if nextitem is None or (nextitem.path != item.path and "services" not in nextitem.fixturenames):
        end_ranks()
