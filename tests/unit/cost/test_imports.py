"""Other tools' logs: what is read from them, and that a broken one is refused with its line."""

import json
from pathlib import Path

import logs
import pytest
from places import DATA_DIR

from megatron_ext.cli import main as cli
from megatron_ext.cost import importers
from megatron_ext.cost.curve import lookup
from megatron_ext.cost.estimates import Costs
from megatron_ext.formats.errors import InputError

DATA = DATA_DIR


def write(tmp_path, text: str) -> Path:
    path = tmp_path / "log.txt"
    path.write_text(text)
    return path


def test_nccl_tests_all_gather(tmp_path):
    table = importers.read("nccl-tests", write(tmp_path, logs.nccl_tests()))
    assert [(point.size_bytes, point.p50_us) for point in table.routes.gpu.points] == logs.ROWS
    assert table.metadata.world_sizes == {"data_parallel_size": 16}
    assert table.metadata.hardware == {"device": "NVIDIA H200", "devices": 8}
    assert table.metadata.software == {"nccl": "2.21.5"}
    assert "all_gather_perf" in table.routes.gpu.source and not table.metadata.synthetic


@pytest.mark.parametrize(
    ("program", "redop", "field"),
    [
        ("reduce_scatter_perf", "sum", "reduce"),
        ("all_reduce_perf", "sum", "all_reduce"),
        ("sendrecv_perf", "sum", "p2p"),
    ],
)
def test_other_collectives_are_no_gather_route(tmp_path, program, redop, field):
    table = importers.read("nccl-tests", write(tmp_path, logs.nccl_tests(program=program, redop=redop)))
    assert table.routes.gpu is None
    assert len(getattr(table, field).points) == len(logs.ROWS)


def test_log_that_does_not_name_its_program(tmp_path):
    assert importers.read("nccl-tests", write(tmp_path, logs.nccl_tests(program=""))).routes.gpu
    reduction = write(tmp_path, logs.nccl_tests(program="", redop="sum"))
    with pytest.raises(InputError, match="--collective"):
        importers.read("nccl-tests", reduction)
    assert importers.read("nccl-tests", reduction, collective="reduce_scatter").reduce


def test_older_header_without_redop_and_rows_without_bytes(tmp_path):
    text = logs.nccl_tests().replace("   redop    root  ", "  ").replace("    none      -1 ", " ")
    row = next(line for line in text.split("\n") if line.strip().startswith("1048576"))
    empty = row.replace("1048576", "0").replace("262144", "0").replace("13.15", "0.00")
    table = importers.read("nccl-tests", write(tmp_path, text.replace(row, empty + "\n" + row)))
    assert len(table.routes.gpu.points) == len(logs.ROWS)


LINES = logs.nccl_tests().split("\n")
FIRST = next(index for index, line in enumerate(LINES) if line.strip().startswith("1048576"))


def edited(number: int, old: str, new: str) -> str:
    assert old in LINES[number]
    return "\n".join([*LINES[:number], LINES[number].replace(old, new), *LINES[number + 1 :]])


BROKEN = {
    "cut off in a row": ("\n".join(LINES)[: "\n".join(LINES).index("134217728") + 60], "cut off", FIRST + 7),
    "cut off between rows": ("\n".join(LINES[: FIRST + 5]) + "\n", "cut off", FIRST + 4),
    "zero time": (edited(FIRST + 2, "83.21", " 0.00"), "time must be positive", FIRST + 2),
    "negative time": (edited(FIRST + 2, "83.21", "-3.21"), "time must be positive", FIRST + 2),
    "not a number": (edited(FIRST + 2, "83.21", "  nan"), "time nan is not a number", FIRST + 2),
    "header in ms": (logs.nccl_tests(unit="ms", factor=1e-3), r"units are not \(B\) and \(us\)", FIRST - 1),
    "figures in ms": (logs.nccl_tests(factor=1e-2), "another unit", FIRST),
    "sizes in KB": ("\n".join(LINES).replace("(B)", "(KB)"), r"units are not \(B\)", FIRST - 1),
    "falling time": (logs.nccl_tests([*logs.ROWS[:4], (16777216, 70.0), *logs.ROWS[5:]]), "not monotone", FIRST + 4),
    "size twice": (logs.nccl_tests([*logs.ROWS[:3], *logs.ROWS[2:]]), "does not grow", FIRST + 3),
    "wrong results": (edited(FIRST + 1, "      0", "      7"), "results were wrong", FIRST + 1),
    "empty": ("", "is empty", None),
    "white space": (" \n\n", "is empty", None),
    "another tool's": ("hello\n1 2 3\n", "no nccl-tests table", None),
    "no rows": ("\n".join(LINES[:FIRST] + LINES[FIRST + len(logs.ROWS) :]), "has no rows", None),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_nccl_tests_logs(tmp_path, case, capsys):
    text, message, index = BROKEN[case]
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as error:
        importers.read("nccl-tests", path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    if index is not None:
        assert f"line {index + 1}" in str(error.value)
    out = tmp_path / "T.json"
    assert cli.main(["measure", "--import", "nccl-tests", str(path), "--out", str(out)]) == 2
    assert len(capsys.readouterr().err.strip().split("\n")) == 1 and not out.exists()


def test_unreadable_log(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        importers.read("nccl-tests", tmp_path / "missing")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        importers.read("nccl-tests", binary)
    with pytest.raises(InputError, match="known formats: nccl-tests, nvbandwidth, curves"):
        importers.read("csv", binary)


def test_nvbandwidth(tmp_path):
    table = importers.read("nvbandwidth", write(tmp_path, logs.nvbandwidth()))
    (cpu,), (publish,) = table.routes.cpu.points, table.publish.cpu.points
    assert cpu.size_bytes == 512 << 20
    assert cpu.p50_us == pytest.approx((512 << 20) / 55.3e3, rel=0.01)
    assert publish.size_bytes == 2 * (512 << 20)  # each of two ranks writes its shard
    assert Costs(table).slowdown("cpu", "publish") == pytest.approx(2.0, rel=0.01)
    half = lookup(table.routes.cpu, 256 << 20, extrapolate=True)
    assert half.us == pytest.approx(cpu.p50_us / 2) and half.extrapolated


def test_nvbandwidth_passes_over_tests_that_print_otherwise(tmp_path):
    other = """Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    276.07
 1    276.36       N/A

SUM device_to_device_memcpy_read_ce_total 552.43

Running host_device_latency_sm.
memory latency SM CPU(row) <-> GPU(column) (ns)
 0    772.58    772.62

"""
    table = importers.read("nvbandwidth", write(tmp_path, logs.nvbandwidth() + other))
    assert (
        table.routes.cpu.points == importers.read("nvbandwidth", write(tmp_path, logs.nvbandwidth())).routes.cpu.points
    )


@pytest.mark.parametrize("label", ["[1,0]<stdout>:", " 0: "])
def test_lines_that_a_launcher_has_labelled(tmp_path, label):
    text = "".join(label + line + "\n" for line in logs.nccl_tests().rstrip("\n").split("\n"))
    assert len(importers.read("nccl-tests", write(tmp_path, text)).routes.gpu.points) == len(logs.ROWS)


NV = logs.nvbandwidth()
BROKEN_NV = {
    "cut off": (NV[: NV.index("SUM device_to_host")], "cut off"),
    "cut off in a row": (NV[: NV.index("55.00")], "cut off"),
    "cut off in a test's name": (NV[: NV.index("device_to_host_memcpy_ce.") + 1], "line [0-9]+ = 'Running d'.*cut off"),
    "another unit": (logs.nvbandwidth(unit="MB/s"), r"not in \(GB/s\)"),
    "zero rate": (NV.replace("55.20", " 0.00"), "must be a positive number"),
    "negative rate": (NV.replace("55.20", "-5.20"), "must be a positive number"),
    "not a number": (NV.replace("55.40", "  nan"), "must be a positive number"),
    "a part missing": (logs.nvbandwidth(total=443.2), "a part is missing"),
    "empty": ("", "is empty"),
    "another tool's": ("hello\n", "no nvbandwidth results"),
}


@pytest.mark.parametrize("case", BROKEN_NV)
def test_broken_nvbandwidth_logs(tmp_path, case):
    text, message = BROKEN_NV[case]
    with pytest.raises(InputError, match=message):
        importers.read("nvbandwidth", write(tmp_path, text))


@pytest.mark.parametrize("placement", ["in_place", "out_of_place"])
def test_best_algorithm_changes_where_the_seed_notes_say(placement):
    path = DATA / "seed_allreduce_8gpu.json"
    table = importers.read("curves", path, placement=placement)
    curves = json.loads(path.read_text())["curves"]
    best = []
    for size in sorted({row["size_bytes"] for curve in curves for row in curve["points"]}):
        times = {
            curve["algorithm"]: row[f"{placement}_us"]
            for curve in curves
            for row in curve["points"]
            if row["size_bytes"] == size
        }
        estimate = lookup(table.all_reduce, size)
        assert estimate.us == min(times.values()) == times[estimate.algorithm]
        best.append(estimate.algorithm)
    assert len(set(best)) >= 3


def test_published_curves_by_system():
    path = DATA / "published_allgather_curves.json"
    with pytest.raises(InputError, match="several systems; choose by --system"):
        importers.read("curves", path)
    with pytest.raises(InputError, match="--system: 'mine'"):
        importers.read("curves", path, system="mine")
    table = importers.read("curves", path, system="2 nodes x 8 H100 (TCPXO)")
    assert len(table.routes.gpu.points) == 11 and "nccl-tests" in table.routes.gpu.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collective": "broadcast"}, "collective = 'broadcast'"),
        ({"curves": []}, "curves: is empty"),
        ({"curves": [{"points": []}]}, r"curves\[0\].points: is empty"),
        ({"curves": [{"points": [{"size_bytes": 4, "us": 0}]}]}, r"points\[0\].us = 0"),
        ({"curves": [{"points": [{"size_bytes": 4}]}]}, "neither us nor in_place_us"),
        ({"curves": [{"points": [{"size_bytes": 8, "us": 1}, {"size_bytes": 4, "us": 1}]}]}, "does not grow"),
        (
            {"curves": [{"points": [{"size_bytes": 4, "us": 9.0}, {"size_bytes": 8, "us": 2.0}]}]},
            r"points\[1\].us = 2.0: is below 9.0 us for 4 bytes: not monotone",
        ),
        ({"unit": "ms"}, "unknown field `unit`"),
    ],
)
def test_broken_curves_file(tmp_path, change, message):
    content = {
        "source": "a test",
        "collective": "all_gather",
        "curves": [{"points": [{"size_bytes": 4, "us": 1.0}]}],
    } | change
    with pytest.raises(InputError, match=message):
        importers.read("curves", write(tmp_path, json.dumps(content)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--import", "nvbandwidth", "LOG", "--dp", "8"],
            "--data-parallel-size: is not read with --import nvbandwidth",
        ),
        (["--import", "nccl-tests", "LOG", "--system", "a"], "--system: is not read with --import nccl-tests"),
        (["--import", "curves", "LOG", "--algorithm", "ring"], "--algorithm: is not read with --import curves"),
        (["--collective", "all_gather"], "--collective: is read with --import alone"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(tmp_path, options, message, capsys):
    out = tmp_path / "T.json"
    assert cli.main(["measure", *options, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()
