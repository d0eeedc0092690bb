"""What ranks find in their environment."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import pytest
from training import run_warm
from variations import some
from warm_python import warm_children

from megatron_ext.cpubench import allocator
from megatron_ext.launch import device_sharing, launcher
from megatron_ext.launch.launcher import launch

SAY = "import os, sys; open(sys.argv[1], 'w').write(os.environ['MALLOC_ARENA_MAX'])"


FAULTS = """
import resource, sys
from statistics import median
def new():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"1" * (size << 20) for size in (26, 8, 26)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(5): new()
open(sys.argv[1], "w").write(str(median([new() for _ in range(11)])))
"""


@pytest.mark.parametrize(("given", "kept"), some([(None, True), ("65536", False)], 1))
def test_blocks_that_were_freed_cost_no_page_faults(monkeypatch, tmp_path, given, kept):
    for name in allocator.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_MMAP_MAX_", given)
    assert launch([sys.executable, "-c", FAULTS, str(tmp_path / "faults")], 1) == 0
    # The median: a small block may come to lie where a large one was, and the heap grows once more.
    assert (int((tmp_path / "faults").read_text()) < 100) == kept


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("7", "7")])
def test_one_arena_unless_the_user_says_otherwise(monkeypatch, tmp_path, given, found):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", given)
    assert launch([sys.executable, "-c", SAY, str(tmp_path / "said")], 1) == 0
    assert (tmp_path / "said").read_text() == found


def test_ranks_that_may_have_a_cuda_device_keep_the_hosts_own_allocator(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(allocator, "CUDA_DEVICES", (tmp_path,))
    assert allocator.rank_variables() == allocator.rank_variables("cuda") == {}
    assert allocator.rank_variables("cpu") == allocator.ENVIRONMENT
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert allocator.rank_variables() == allocator.ENVIRONMENT


def test_a_module_is_launched_as_python_does(monkeypatch, tmp_path):
    (tmp_path / "said.py").write_text(
        "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(' '.join(sys.argv[2:]))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = [sys.executable, "-m", "megatron_ext.launch.launcher", "--nproc-per-node", "2"]
    assert run_warm([*command, "-m", "said", str(tmp_path / "rank"), "-m", "--out", "x"]).returncode == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["-m --out x"] * 2


PLACE = (
    "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(f'{os.getsid(0)} {os.getpgid(0) "
    "== os.getpid()} {sys.stdin.read()!r}')"
)


def test_ranks_share_a_session_and_are_signalled_each(tmp_path):
    assert launch([sys.executable, "-c", PLACE, str(tmp_path / "rank")], 2) == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [f"{os.getsid(0)} True ''"] * 2


STARTING = """
import os, subprocess, sys, time
place = sys.argv[1]
if os.environ["RANK"] == "0":
    print(subprocess.Popen(["sleep", "600"]).pid, file=open(place + "~", "w"))
    os.rename(place + "~", place)
    time.sleep(600)
while not os.path.exists(place): time.sleep(0.01)
sys.exit(1)
"""


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    """The first rank is ended because the second one failed."""
    assert launch([sys.executable, "-c", STARTING, str(tmp_path / "child")], 2) == 1
    with contextlib.suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(int((tmp_path / "child").read_text()))], [], [], 10)[0]


@pytest.mark.parametrize("how", [[], ["--fork"]])
def test_what_ranks_have_started_ends_with_a_killed_launcher(tmp_path, how):
    (tmp_path / "starting.py").write_text(
        f"if __name__ == '__main__':\n    exec({STARTING.replace('sys.exit(1)', '')!r})"
    )
    bystander = subprocess.Popen(["sleep", "60"])
    command = [sys.executable, "-m", "megatron_ext.launch.launcher", "--nproc-per-node", "2", *how]
    command += [str(tmp_path / "starting.py"), str(tmp_path / "child")]
    started = subprocess.Popen(command, env={**os.environ, "all": str(bystander.pid)})
    while not (tmp_path / "child").exists() and started.poll() is None:
        time.sleep(0.01)
    child = os.pidfd_open(int((tmp_path / "child").read_text()))
    started.kill()
    assert started.wait() == -signal.SIGKILL and select.select([child], [], [], 10)[0]
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


LISTENING = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier(dist.new_group([0, 1]))
sockets = {os.readlink(f"/proc/{process}/fd/{fd}") for process in (os.getpid(), sys.argv[2])
           for fd in os.listdir(f"/proc/{process}/fd") if os.path.exists(f"/proc/{process}/fd/{fd}")}
found = set()
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in list(open(table))[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and f"socket:[{rest[5]}]" in sockets:
            found.add(local.partition(":")[0])
open(sys.argv[1] + os.environ["RANK"], "w").write(" ".join(sorted(found)))
dist.barrier()
"""


def test_nothing_listens_where_another_machine_could_reach_it(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with warm_children(launcher, "torch"):
        assert launch([sys.executable, "-c", LISTENING, str(tmp_path / "rank"), str(os.getpid())], 2) == 0
    loopback = "0100007F"  # 127.0.0.1, as the kernel writes it
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [loopback] * 2


OWN = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ.get('NCCL_HOSTID', 'none'))"


@pytest.mark.parametrize(("devices", "ids"), [(1, ["rank0", "rank1"]), (2, ["none", "none"]), (0, ["none", "none"])])
def test_ranks_that_share_a_device_are_hosts_of_their_own(monkeypatch, capfd, tmp_path, devices, ids):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(allocator, "CUDA_DEVICES", (tmp_path,))
    monkeypatch.setattr(device_sharing, "visible_devices", lambda: devices)
    assert launch([sys.executable, "-c", OWN, str(tmp_path / "rank")], 2) == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ids
    assert capfd.readouterr().err.count("2 ranks share 1 CUDA device: ") == (devices == 1)


def test_ranks_whose_devices_are_hidden_share_none(monkeypatch, tmp_path):
    monkeypatch.setattr(allocator, "CUDA_DEVICES", (tmp_path,))
    monkeypatch.setattr(device_sharing, "visible_devices", lambda: 1)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert launch([sys.executable, "-c", OWN, str(tmp_path / "rank")], 2, environment=hidden) == 0
    assert (tmp_path / "rank1").read_text() == "none"
