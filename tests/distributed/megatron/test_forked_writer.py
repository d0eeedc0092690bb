"""Before core_v0.17 forked processes write checkpoints of format torch_dist. They do not see page-locked memory."""

import os
import subprocess
import sys

from places import HELPERS, MEGATRON, ROOT


def test_a_parameter_that_fills_its_memory_is_saved(tmp_path):
    """Megatron itself copies only parameters that share memory with others."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, MEGATRON)))}
    command = [sys.executable, str(HELPERS / "forked_writer.py"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
