"""A directory belongs to one process at a time."""

import subprocess
import sys

import pytest

from megatron_ext.formats import directory_lock
from megatron_ext.formats.errors import InputError


def test_a_directory_in_use_is_refused(tmp_path):
    program = "import sys; from megatron_ext.formats import directory_lock as d; d.hold(sys.argv[1], field='--out'); "
    command = [sys.executable, "-c", f"{program}d.hold(sys.argv[1], field='--out'); print('held', flush=True); input()"]
    first = subprocess.Popen([*command, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=f"^--out = '{tmp_path}': is in use by process {first.pid}$"):
        directory_lock.hold(tmp_path, field="--out")
    first.communicate("\n")
    directory_lock.hold(tmp_path, field="--out")
