"""What all tests share: the patched Megatron tree, and a corpus to train on."""

import fcntl
import gc
import os
import sys
from pathlib import Path

import pytest

gc.disable()  # until all tests are collected: imports make a million objects of torch, Megatron and tests that stay

ROOT_DIR = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT_DIR / "tests" / "helpers"), str(ROOT_DIR / "examples")]
sys.path += [str(ROOT_DIR / "benchmarks"), str(ROOT_DIR / "scripts")]  # last: strict_device.py is in helpers too
sys.path += [str(ROOT_DIR / "tests" / "gpu")]

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # before anything looks for a device: the same tests on every machine

from places import MEGATRON, pinned_core
from variations import ALL

pytest_plugins = ["checkout_fixtures", "little_effort"]

TOGETHER = "tests/unit/project/"
"""A directory whose files share what takes long: all of the product's files parsed."""

if MEGATRON.is_dir():
    sys.path.insert(0, str(MEGATRON))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MEGATRON), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_modifyitems(config, items):
    """Deselect what is marked ``nightly``, but where all variations of a file are run."""
    chosen = [item for item in items if ALL or item.get_closest_marker("nightly") is None]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Where tests are not compiled yet, one process of pytest-xdist collects first: the others find them compiled."""
    with open(__file__) as lock:
        if not [*ROOT_DIR.glob("tests/unit/workload/__pycache__/test_*")]:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish():
    """Python's collector leaves alone what lives to the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadfile``, the files of :data:`TOGETHER` are for the scheduler as one."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def megatron_tree() -> Path:
    """The patched megatron-core tree that scripts/setup.sh makes; made here where it is not."""
    import core_tree

    release = pinned_core()
    with (MEGATRON.parent / ".megatron.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the processes of pytest-xdist one at a time looks at the tree
        core_tree.prepare(release, MEGATRON)
    return MEGATRON


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """One for all processes of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session", autouse=True)
def shared_servers(shared_folder):
    """Torch and Megatron are imported for forks once, not by every process of pytest-xdist."""
    from warm_python import WarmPython

    WarmPython.folder = shared_folder


@pytest.fixture(scope="session")
def made_once(shared_folder):
    """``made_once(name, make)``: a directory that ``make(directory)`` fills once, for all processes of pytest-xdist."""

    def directory(name: str, make) -> Path:
        folder, done = shared_folder / name, shared_folder / f"{name}.done"
        with (shared_folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return directory


@pytest.fixture(scope="session")
def corpus_prefix(megatron_tree, made_once) -> Path:
    """An indexed dataset of the standard library's source."""
    from training import run_warm

    def build(folder: Path) -> None:
        result = run_warm([sys.executable, "examples/corpus.py", str(folder / "stdlib")])
        assert result.returncode == 0, result.stderr

    return made_once("corpus", build) / "stdlib"
