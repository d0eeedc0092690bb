"""scripts/pretrain_gpt_larger_than_memory.sh: the plan trains where stock Megatron is ended, and leaves nothing."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def groups_left() -> list[str]:
    return [name for top, names, _ in os.walk("/sys/fs/cgroup") for name in names if name.startswith("larger-than-")]


@pytest.mark.parametrize("limit_by", ["cgroup", "address-space"])
def test_the_plan_trains_where_stock_megatron_is_ended(tmp_path, limit_by):
    name = f"test-larger-{os.getpid()}-{limit_by}"
    run = ROOT / "runs" / name
    settings = {"NAME": name, "NVME": str(tmp_path), "LIMIT_BY": limit_by}
    try:
        done = subprocess.run(
            ["bash", str(ROOT / "scripts/pretrain_gpt_larger_than_memory.sh")],
            env=os.environ | settings,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "stock Megatron, optimizer on the host as in the plan: ended for lack of memory" in done.stderr
        in_cgroup = limit_by == "cgroup" and cgroups()
        device = "ended for lack of memory" if in_cgroup else ""
        assert f"stock Megatron, optimizer on the device: {device}" in done.stderr
        assert f"FSDP2 with CPU offload: {device}" in done.stderr and "losses are equal to the last bit" in done.stderr
        assert ("of address space for each rank" in done.stderr) != in_cgroup
        assert ("a checkpoint was saved and loaded within the limit" in done.stderr) == in_cgroup
        ours, reference = (
            json.loads((run / f"{kind}.metrics.json").read_text()) for kind in ("scheduled", "reference")
        )
        assert ours["loss"] == reference["loss"] and ours["parameter_sha256"] == reference["parameter_sha256"]
        schedule = json.loads((run / "schedule.json").read_text())
        assert sum(group.get("states_rest") == "nvme" for group in schedule["groups"]) > len(schedule["groups"]) // 2
        for title in ("host in all", "device in all", "states, drive read", "nvme: "):
            assert title in done.stdout
        assert (run / "timeline.png").exists()
        if "EMULATED links" in done.stderr:
            # All-gathers and states on the drive fill their links; how much goes by the host's is the plan's choice.
            busy = r"measured: gpu [1-9]\d*%, cpu \d+%, nvme [1-9]\d*%, all at once \d"
            assert re.search(busy, done.stdout), done.stdout
        assert os.listdir(tmp_path) == [] and groups_left() == []
    finally:
        shutil.rmtree(run, ignore_errors=True)


def cgroups() -> bool:
    """Whether this process may make a cgroup that limits memory, of version 1 or 2."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {line.split(":", 2)[1]: line.split(":", 2)[2].strip() for line in lines}
    version_1 = Path("/sys/fs/cgroup/memory") / own.get("memory", "").lstrip("/")
    controllers = Path("/sys/fs/cgroup") / own.get("", "").lstrip("/") / "cgroup.subtree_control"
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return os.access(controllers, os.W_OK) and "memory" in controllers.read_text()
    return (version_1 / "memory.limit_in_bytes").exists() and os.access(version_1, os.W_OK)
