"""A failure at every call site of every background thread: tests/distributed tries every third one."""

import os
import subprocess
import sys

from places import ROOT


def test_a_failure_at_every_call_site_ends_all_ranks():
    command = [sys.executable, "-m", "pytest", "tests/distributed/runtime/test_injected_failures.py"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {"MEGATRON_EXT_TEST_EVERY_SITE": "1"}, timeout=280)
    assert result.returncode == 0
