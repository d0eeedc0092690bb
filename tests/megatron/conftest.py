"""Helpers beside these tests are imported by name, also by the ranks that the tests start."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import LAYOUTS, MODELS
from parity_service import ParityService
from training import environment

from megatron_ext.workload import model as workload_file


class Workloads(dict):
    """By layout and model; without the page of text that a failing test would print."""

    def __repr__(self) -> str:
        return f"{len(self)} workloads"


@pytest.fixture(scope="session")
def workloads(megatron_tree, tmp_path_factory) -> Workloads:
    """Workloads of every model on every layout."""
    folder = tmp_path_factory.mktemp("workloads")
    program = Path(__file__).with_name("describe_cases.py")
    result = subprocess.run([sys.executable, str(program), str(folder)], env=environment(), capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return Workloads({(layout, name): workload_file.load(folder / f"{layout}.{name}.json") for layout in LAYOUTS for name in MODELS})


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
