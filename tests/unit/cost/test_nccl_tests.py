"""nccl-tests' output: what is read from it, and that a broken one is refused with its line."""

import logs
import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table, importers
from megatron_ext.formats.errors import InputError
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.optimizer_settings import OptimizerSettings


def test_nccl_tests_all_gather(tmp_path):
    table = importers.read("nccl-tests", logs.write(tmp_path, logs.nccl_tests()))
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
    table = importers.read("nccl-tests", logs.write(tmp_path, logs.nccl_tests(program=program, redop=redop)))
    assert table.routes.gpu is None
    assert len(getattr(table, field).points) == len(logs.ROWS)


def test_log_that_does_not_name_its_program(tmp_path):
    assert importers.read("nccl-tests", logs.write(tmp_path, logs.nccl_tests(program=""))).routes.gpu
    reduction = logs.write(tmp_path, logs.nccl_tests(program="", redop="sum"))
    with pytest.raises(InputError, match="--collective"):
        importers.read("nccl-tests", reduction)
    assert importers.read("nccl-tests", reduction, collective="reduce_scatter").reduce


def test_older_header_without_redop_and_rows_without_bytes(tmp_path):
    text = logs.nccl_tests().replace("   redop    root  ", "  ").replace("    none      -1 ", " ")
    row = next(line for line in text.split("\n") if line.strip().startswith("1048576"))
    empty = row.replace("1048576", "0").replace("262144", "0").replace("13.15", "0.00")
    table = importers.read("nccl-tests", logs.write(tmp_path, text.replace(row, empty + "\n" + row)))
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
    "huge size": (edited(FIRST + 2, LINES[FIRST + 2].split()[0], "9" * 400), "not a plausible size", FIRST + 2),
    "beyond Python": (edited(FIRST + 2, LINES[FIRST + 2].split()[0], "9" * 5001), "not a plausible size", FIRST + 2),
    "largest size beyond Python": (
        logs.nccl_tests(summary=False).replace(f"maxBytes {logs.ROWS[-1][0]}", f"maxBytes {'9' * 5001}"),
        "not a plausible size",
        1,
    ),
    "empty": ("", "is empty", None),
    "white space": (" \n\n", "is empty", None),
    "another tool's": ("hello\n1 2 3\n", "no nccl-tests table", None),
    "no rows": ("\n".join(LINES[:FIRST] + LINES[FIRST + len(logs.ROWS) :]), "has no rows", None),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_nccl_tests_logs(tmp_path, case, capsys):
    text, message, index = BROKEN[case]
    path = logs.write(tmp_path, text)
    with pytest.raises(InputError, match=message) as error:
        importers.read("nccl-tests", path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    if index is not None:
        assert f"line {index + 1}" in str(error.value)
    out = tmp_path / "T.json"
    assert cli.main(["measure", "--import", "nccl-tests", str(path), "--out", str(out)]) == 2
    assert len(capsys.readouterr().err.strip().split("\n")) == 1 and not out.exists()


@pytest.mark.parametrize("label", ["[1,0]<stdout>:", " 0: "])
def test_lines_that_a_launcher_has_labelled(tmp_path, label):
    text = "".join(label + line + "\n" for line in logs.nccl_tests().rstrip("\n").split("\n"))
    assert len(importers.read("nccl-tests", logs.write(tmp_path, text)).routes.gpu.points) == len(logs.ROWS)


REDUCE_SCATTER = """\
# nThread 1 nGpus 8 minBytes 8388608 maxBytes 134217728 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  71012 on    node-1 device  0 [0x1b] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     8388608        262144     float     sum      -1    71.20  117.82  103.09      0    70.00  119.84  104.86      0
    33554432       1048576     float     sum      -1   148.10  226.57  198.25      0   150.00  223.70  195.73      0
   134217728       4194304     float     sum      -1   462.90  289.95  253.71      0   460.00  291.78  255.31      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 185.2
#
"""
BETWEEN = 70.0 + (150.0 - 70.0) / 3
"""Of 16 MiB, between 8 and 32."""


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "us"),
    [("bfloat16", "float32", 150.0), ("bfloat16", "bfloat16", BETWEEN), ("float32", "float32", BETWEEN)],
)
def test_a_reduce_scatter_is_read_at_the_bytes_of_the_gradients(tmp_path, dtype, gradient_dtype, us):
    """16 MiB of 16-bit parameters reduce 32 MiB of float32 gradients."""
    imported = importers.read("nccl-tests", logs.write(tmp_path, REDUCE_SCATTER), collective="reduce_scatter")
    cost_table.save(tmp_path / "T.json", imported)
    work = make_workload(dtypes=(dtype,), pp=1, vp=1, order="no_pipeline")
    work = replace(work, optimizer=OptimizerSettings(gradient_dtype=gradient_dtype))
    table = replace(make_table(work), reduce=cost_table.load(tmp_path / "T.json").reduce)
    assert Timing(work, table).reduce_us(1 << 24) == pytest.approx(us)
    measured = Timing(work, replace(table, reduce=replace(table.reduce, counts="parameters")))
    # Measured in float32, by bytes of parameters: gradients of 16 bits are half as many bytes.
    assert measured.reduce_us(1 << 24) == pytest.approx(BETWEEN if gradient_dtype == "float32" else 70.0)


def of_2021(program: str, listed: int = 8, error: str = "0e+00", verdict: str = "0 OK", own: bool = True) -> str:
    """A log in the form that nccl-tests printed from June 2020 to 2022, of figures of our own; without ``own``, as
    before June 2020."""
    redop, ranks = "" if program == "all_gather" else "     sum", 8
    share = 1 if own else (ranks - 1) / ranks
    twice = 2 if program == "all_reduce" else 1
    lines = [
        "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 67108864 step: 4(factor) iters: 20 validation: 1",
        "#",
        "# Using devices",
        *(f"#   Rank {rank:2} Pid {rank:6} on       node device {rank:2} [0x1a] Tesla V100" for rank in range(listed)),
        "#",
        f"#                     {redop and '        '}            out-of-place                       in-place",
        f"#       size         count    type{redop and '   redop'}     time   algbw   busbw  error     time   algbw   "
        "busbw  error",
        "#        (B)    (elements)                   (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       ",
    ]
    for size, us in ((1 << 20, 32.1), (1 << 22, 66.4), (1 << 24, 182.7), (1 << 26, 610.2)):
        algbw = size * share / us / 1e3
        bus = algbw * twice * (ranks - 1) / ranks
        cells = f"{us:9.1f}  {algbw:6.2f}  {bus:6.2f}  {error}"
        lines.append(f"{size:12}  {size // 4:12}   float{redop}{cells}{cells}")
    return "\n".join([*lines, f"# Out of bounds values : {verdict}", "# Avg bus bandwidth    : 61.2 ", "#", ""])


@pytest.mark.parametrize("listed", [8, 2, 0])
@pytest.mark.parametrize(
    "program, error", [("all_gather", "0e+00"), ("reduce_scatter", "2e-07"), ("all_reduce", "1e-06")]
)
def test_a_log_of_2021_is_read_also_where_its_list_of_devices_is_short(tmp_path, program, error, listed):
    """Sums of floats are not exact: the results are not wrong."""
    path = logs.write(tmp_path, of_2021(program, listed, error))
    table = importers.read("nccl-tests", path, collective=program)
    curve = {"all_gather": table.routes.gpu, "reduce_scatter": table.reduce, "all_reduce": table.all_reduce}[program]
    assert [(point.size_bytes, point.p50_us) for point in curve.points][0::3] == [(1 << 20, 32.1), (1 << 26, 610.2)]
    assert table.metadata.world_sizes == {"data_parallel_size": 8}
    short = [note for note in table.metadata.notes if note.startswith(f"{listed} devices are listed")]
    assert len(short) == (listed == 2)
    assert (table.metadata.hardware or {}).get("devices") == (8 if listed == 8 else None)


@pytest.mark.parametrize(
    "text, why",
    [
        (of_2021("reduce_scatter", error="3e+00", verdict="7 FAILED"), "FAILED'?: the collective's results were wrong"),
        (of_2021("all_gather").replace("610.2", "6.102"), "another unit"),
        (of_2021("all_gather", own=False), "before June 2020"),
        (of_2021("all_gather") + of_2021("all_gather"), "rank 0 is listed twice: several runs in one log"),
        (
            "#      bytes             N    type     time  algbw  busbw      res     time  algbw  busbw      res\n",
            "in ms",
        ),
    ],
)
def test_a_log_that_cannot_be_read_says_the_true_reason(tmp_path, text, why):
    with pytest.raises(InputError, match=why):
        importers.read("nccl-tests", logs.write(tmp_path, text), collective="all_gather")


def test_ranks_are_those_of_the_rates_where_the_list_is_shorter(tmp_path):
    table = importers.read("nccl-tests", logs.write(tmp_path, REDUCE_SCATTER), collective="reduce_scatter")
    assert table.metadata.world_sizes == {"data_parallel_size": 8}
    assert "1 devices are listed, but busbw is that of 8 ranks" in table.metadata.notes
