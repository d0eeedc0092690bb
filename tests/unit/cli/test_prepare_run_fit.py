"""`prepare --fit` goes on with the winner's options, and keeps what was asked for `report`."""

import pytest

from megatron_ext.cli import prepare_run
from megatron_ext.cli.main import main
from megatron_ext.formats import json_files
from megatron_ext.planner.fit.request import Request

SCRIPT = """--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --vocab-size 1024 --bf16
    --micro-batch-size 1 --global-batch-size 32 --recompute-granularity selective --data-parallel-size 8""".split()


@pytest.fixture
def seen(monkeypatch) -> list[tuple[str, ...]]:
    given = []

    class Steps:
        is_first = True

        def __init__(self, checkout, out, arguments, **how):
            out.mkdir()
            given.append(tuple(arguments))

        def check_node(self) -> None: ...

        def describe(self) -> None: ...

        def measure(self) -> bool:
            return False  # as under a launcher on another rank

    monkeypatch.setattr(prepare_run, "Preparation", Steps)
    return given


def test_the_winner_is_what_is_prepared(seen, tmp_path):
    asked = ["prepare", "--fit", "--hardware", "l40s", "--fix", "zero-stage,optimizer-cpu-offload", "--checkout", "x"]
    assert main([*asked, "--out", str(tmp_path / "run"), "--", *SCRIPT]) == 0
    (words,) = seen
    request = json_files.load(tmp_path / "run" / "fit.json", Request)
    assert request.hardware == "l40s" and request.world_size == 8 and request.predicted_us
    chosen = request.chosen
    assert "--recompute-granularity" not in chosen and "--recompute-granularity" not in words
    size = words[words.index("--micro-batch-size") + 1] if "--micro-batch-size" in words else "1"
    assert size == chosen["--micro-batch-size"] and f"--zero-stage={chosen['--zero-stage']}" in words
    assert any(word.startswith("--limit-device-bytes=") for word in words) and "--use-distributed-optimizer" in words


def test_without_a_machine_it_is_refused(seen, tmp_path, capsys):
    assert main(["prepare", "--fit", "--checkout", "x", "--out", str(tmp_path / "run"), "--", *SCRIPT]) == 2
    assert "--hardware: is needed with --fit" in capsys.readouterr().err and not seen


@pytest.mark.parametrize("option", ["--hardware=l40s", "--fix=all", "--search-layout", "--allow-delayed-update"])
def test_what_only_a_search_reads_is_refused_without_one(seen, tmp_path, capsys, option):
    assert main(["prepare", option, "--checkout", "x", "--out", str(tmp_path / "run"), "--", *SCRIPT]) == 2
    assert f"{option.partition('=')[0]}: needs --fit" in capsys.readouterr().err and not seen
