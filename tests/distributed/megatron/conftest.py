"""Helpers beside these tests are imported by name, also by the ranks that the tests start."""

import sys
from pathlib import Path

import pytest
from parity_service import ParityService
from places import HELPERS
from training import run_warm

from megatron_ext.workload import workload as workload_file


class Workloads(dict):
    """By layout and model; without the page of text that a failing test would print."""

    def __repr__(self) -> str:
        return f"{len(self)} workloads"


@pytest.fixture(scope="session")
def workloads(megatron_tree, made_once) -> Workloads:
    """Workloads of every model on every layout, and of ``describe_cases.SHAPES`` under ``shapes``."""

    def describe(folder: Path) -> None:
        program = [sys.executable, str(HELPERS / "describe_cases.py"), str(folder)]
        result = run_warm(program, timeout=200)
        assert result.returncode == 0, result.stderr

    folder = made_once("workloads", describe)
    return Workloads({tuple(path.stem.split(".")): workload_file.load(path) for path in folder.glob("*.json")})


@pytest.fixture(scope="session")
def services(megatron_tree):
    """``services(layout)``: ranks that are up, of one layout at a time."""
    running: list[ParityService] = []

    def service(layout: str) -> ParityService:
        if not running or running[0].layout != layout:
            while running:
                running.pop().close()
            running.append(ParityService(layout))
        return running[0]

    yield service
    while running:
        running.pop().close()
