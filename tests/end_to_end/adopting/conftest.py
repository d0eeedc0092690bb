"""The commands of docs/adopting.md, run once for all tests here."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from adopting_page import add_script, cpu_commands, make_checkout


@pytest.fixture(scope="session")
def ran(request, tmp_path_factory) -> tuple[Path, list[str]]:
    """Directory and output of the page's commands. The installed package is this one, so pip is left out, and costs are
    measured for less time."""
    cache = getattr(request.config, "cache", None)
    work = tmp_path_factory.mktemp("adopting")
    make_checkout(work, tmp_path_factory.mktemp("core") if cache is None else cache.mkdir("megatron-core"))
    environment = {key: value for key, value in os.environ.items() if key not in ("MEGATRON_PATH", "PYTHONPATH")}
    environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment["PATH"]])
    outputs = []
    for block in cpu_commands():
        if "git clone" in block or "pip install" in block:
            continue
        result = subprocess.run(
            ["bash", "-euc", f"[ -e args.sh ] && . ./args.sh; {block}"],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{block}\n{result.stdout[-3000:]}"
        if "patch apply" in block:
            add_script(work / "Megatron-LM")
        outputs.append(result.stdout)
    return work, outputs
