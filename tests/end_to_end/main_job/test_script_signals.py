"""Whatever ends scripts/pretrain_gpt_hybrid.sh, nothing goes on that it started. One runs at a time in a directory."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plans import describe, made_up_table, make_schedule
from training import SMALL, environment
from variations import some

from megatron_ext.cost import cost_table

ROOT = Path(__file__).parents[3]
SETTINGS = dict(
    NAME="run", PP="1", LAYERS="4", HIDDEN="64", SEQ="64", ITERS="100000", TURN_ITERS="1", MICRO_BATCHES="4"
)

MEGATRON_EXT = """#!/usr/bin/env bash
# In place of the command: files that are there already are quicker than measured ones.
case "$1 $2" in
    describe*) cp workload.json "$3" ;;
    measure*) [ -z "${SLOW:-}" ] || exec sleep 1000.5; cp cost_table.json "$3" ;;
    plan*) cp schedule.json runs/run/schedule.json ;;
esac
"""


@pytest.fixture(scope="module")
def planned(megatron_tree, tmp_path_factory):
    """A directory with what the command would make."""
    folder = tmp_path_factory.mktemp("planned")
    cost_table.save(folder / "cost_table.json", made_up_table())
    make_schedule(
        folder / "schedule.json",
        describe(folder / "workload.json", [*SMALL, "--data-parallel-size", "2", "--global-batch-size", "8"]),
    )
    return folder


@pytest.fixture
def tree(tmp_path, planned, megatron_tree, corpus_prefix):
    """A directory in which the script finds what it needs, and what it makes."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/pretrain_gpt_hybrid.sh").write_text((ROOT / "scripts/pretrain_gpt_hybrid.sh").read_text())
    for path, text in (
        ("scripts/setup.sh", "#!/bin/sh\n"),
        (".venv/bin/megatron-ext", MEGATRON_EXT),
        (".venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    for name in ("examples", "megatron_ext"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".megatron").symlink_to(megatron_tree)
    (tmp_path / "runs/corpus").mkdir(parents=True)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"runs/corpus/stdlib{suffix}").symlink_to(f"{corpus_prefix}{suffix}")
    for file in planned.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def start(tree: Path, **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(tree / "scripts/pretrain_gpt_hybrid.sh")],
        env=environment(SETTINGS | {"MARKER": str(tree)} | more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def started_by(tree: Path) -> list[str]:
    """Command lines of processes with the run's variable in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if f"MARKER={tree}\0".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return [line for line in found if line]


def wait_for(condition):
    """What it says as soon as that is true; a machine that is busy has minutes."""
    deadline = time.monotonic() + 240
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize(
    ("number", "code"), some([(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)], 1)
)
def test_a_signal_ends_the_command_that_runs(tree, number, code):
    script = start(tree, SLOW="1")
    assert wait_for(lambda: any("sleep 1000.5" in line for line in started_by(tree)))
    second = start(tree, SLOW="1")
    said, _ = second.communicate(timeout=240)
    assert second.returncode == 2 and f"runs/run is in use by process {script.pid}" in said
    script.send_signal(number)
    assert script.wait(timeout=240) == code
    assert wait_for(lambda: not started_by(tree)), started_by(tree)
    script.stdout.close()


def test_a_setpriv_that_is_older_than_its_option_is_done_without(tree):
    """util-linux 2.32, of RHEL 8. A signal still ends the command, only the end by SIGKILL is missed."""
    old = tree / "old" / "setpriv"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho \"setpriv: unrecognized option '$1'\" >&2\nexit 1\n")
    old.chmod(0o755)
    script = start(tree, SLOW="1", PATH=f"{old.parent}{os.pathsep}{os.environ['PATH']}")
    assert wait_for(lambda: script.poll() is not None or any("sleep 1000.5" in line for line in started_by(tree)))
    script.send_signal(signal.SIGTERM)
    said, _ = script.communicate(timeout=240)
    assert script.returncode == 143 and "unrecognized" not in said, said
    assert wait_for(lambda: not started_by(tree)), started_by(tree)


def test_a_kill_ends_training_and_frees_the_directory(tree):
    script = start(tree)
    metrics = tree / "runs/run/turns/turn"
    assert wait_for(metrics.exists), script.communicate(timeout=5)[0]
    assert wait_for(lambda: len(started_by(tree)) > 6), started_by(tree)  # two trainings of two ranks
    script.kill()
    script.wait()
    assert wait_for(lambda: not started_by(tree)), started_by(tree)
    assert wait_for(lambda: is_free(tree / "runs/run/.lock"))  # a process that ends loses its files last
    script.stdout.close()
