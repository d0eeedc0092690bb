"""The oldest release that a schedule trains: scripts/test_checkouts.sh trains it, and its experts are described. Needs
MEGATRON_MIRROR."""

import subprocess
import sys

from default_arguments import EXPERTS
from places import ROOT
from released import MIRROR
from test_default_arguments import SIZES

from megatron_ext.megatron.describe_from_checkout import describe_command_line


def test_the_oldest_release_trains_by_a_schedule():
    assert MIRROR, "set MEGATRON_MIRROR to a clone of Megatron-LM"
    cells = "patch,check,scheduled,revert,bytes"
    command = [sys.executable, ROOT / "scripts" / "test_checkouts.py", MIRROR, "core_v0.10.0", "--cells", cells]
    done = subprocess.run([*command, "--iterations", "3"], capture_output=True, text=True)
    assert done.returncode == 0 and "equal, 65 tensors" in done.stdout, done.stdout + done.stderr


def test_its_experts_are_described(tmp_path):
    place = tmp_path / "Megatron-LM"
    subprocess.run(["git", "clone", "-q", "--depth=1", "-b", "core_v0.10.0", f"file://{MIRROR}", place], check=True)
    options = [*SIZES, *EXPERTS.split(), "--data-parallel-size", "4"]
    workload = describe_command_line(place, options).workload
    assert workload.parallel.ep == 2 and any("experts" in p.name for p in workload.chunks[0].parameters)
