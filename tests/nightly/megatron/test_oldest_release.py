"""scripts/test_checkouts.sh trains the oldest release that a schedule trains. Needs MEGATRON_MIRROR."""

import subprocess
import sys

from places import ROOT
from released import MIRROR


def test_the_oldest_release_trains_by_a_schedule():
    assert MIRROR, "set MEGATRON_MIRROR to a clone of Megatron-LM"
    cells = "patch,check,scheduled,revert,bytes"
    command = [sys.executable, ROOT / "scripts" / "test_checkouts.py", MIRROR, "core_v0.10.0", "--cells", cells]
    done = subprocess.run([*command, "--iterations", "3"], capture_output=True, text=True)
    assert done.returncode == 0 and "equal, 65 tensors" in done.stdout, done.stdout + done.stderr
