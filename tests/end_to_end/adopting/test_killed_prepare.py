"""``prepare`` that is killed leaves nothing, and the next call goes on from where it was."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from adopting_page import SMALLER, cpu_commands
from places import ROOT

pytestmark = pytest.mark.timeout(1800)  # the first one runs all commands: minutes, where others work


def start(work: Path, scratch: Path) -> subprocess.Popen:
    """The page's command, in a directory of its own."""
    (block,) = (block for block in cpu_commands(SMALLER) if "prepare" in block)
    command = block.replace("megatron-ext", f"{sys.executable} -m megatron_ext")
    command = command.replace("runs/first", "runs/killed")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(work / "torch_cache")  # torch's own: it stays in any case
    script = f". ./args.sh; exec {command}"
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(["bash", "-euc", script], cwd=work, env=environment, **pipes)


def started_with(scratch: Path) -> list[str]:
    """Processes in whose environment ``scratch`` is the directory for temporary files."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"TMPDIR={scratch}".encode() in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found


def kill_while(doing: str, processes: int, work: Path, scratch: Path) -> list[str]:
    """Start ``prepare``, kill it when it has said what it is doing and is that many ``processes``, and see that all of
    it is gone.

    Returns:
        What it said before.
    """
    process = start(work, scratch)
    said = []
    for line in process.stderr:
        said.append(line.strip())
        if line.startswith(f"prepare: {doing}"):
            break
    while len(started_with(scratch)) < processes:
        assert process.poll() is None, said
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 100
    while (left := started_with(scratch)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"killed while {doing}"
    assert not list(scratch.iterdir()), f"killed while {doing}"
    return said


def finish(work: Path, scratch: Path) -> list[str]:
    """What an undisturbed call says that it is doing."""
    process = start(work, scratch)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    return [line.removeprefix("prepare: ") for line in errors.splitlines() if line.startswith("prepare: ")]


@pytest.mark.nightly
def test_killed_prepare_leaves_nothing_and_goes_on(ran, tmp_path):
    work, _ = ran
    first, out, scratch = work / "runs/first", work / "runs/killed", tmp_path / "scratch"
    scratch.mkdir()

    def there() -> set[str]:
        return {path.name for path in out.iterdir()} - {".lock"}

    kill_while("describing", 3, work, scratch)  # the command, the script's process, and one rank of it
    assert there() == set()
    kill_while("measuring", 3, work, scratch)  # the command and two ranks
    assert there() == {"workload.json"}
    (out / ".cost_table.json.0123abcd").write_text("{")  # as a kill between two system calls leaves it
    shutil.copy(first / "cost_table.json", out)  # measured, so that only the plan is missing
    said = kill_while("planning", 1, work, scratch)
    assert [line for line in said if "kept" in line] == [
        f"prepare: kept: runs/killed/{name}.json" for name in ("workload", "cost_table")
    ]
    assert there() == {"workload.json", "cost_table.json"}

    kept = [f"kept: runs/killed/{name}.json" for name in ("workload", "cost_table", "schedule")]
    assert finish(work, scratch) == ["describing the model", *kept[:2], "planning (hybrid)"]
    for name in ("workload.json", "cost_table.json", "schedule.json"):
        assert (out / name).read_bytes() == (first / name).read_bytes(), "as without a kill"
    assert finish(work, scratch) == ["describing the model", *kept]
