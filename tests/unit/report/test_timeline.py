"""What the picture shows, and the picture itself."""

import struct

import numpy
import pytest
from event_rows import events
from planning_cases import make_workload
from run_files import EPOCH_US, change, make_run
from variations import some

from megatron_ext import report
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.trace import END_NOT_KNOWN, Event
from megatron_ext.report import timeline, timeline_panels
from megatron_ext.report.parts import part_of
from megatron_ext.report.timeline_panels import MOST_RANKS, TimelineRow, rows, shown_ranks
from megatron_ext.workload.step_order import steps_of_ranks


def test_every_rank_is_shown_where_they_are_few():
    assert shown_ranks(make_workload().parallel, replicas=True) == [0, 1, 2, 3]
    assert shown_ranks(make_workload().parallel, replicas=False) == [0, 2]
    assert shown_ranks(make_workload(dp=4).parallel, replicas=True) == [0, 4]


def test_of_many_pipeline_ranks_an_even_choice_is_shown():
    parallel = make_workload(pp=16, dp=2, microbatches=16).parallel
    chosen = shown_ranks(parallel, replicas=True)
    assert len(chosen) == MOST_RANKS and chosen[0] == 0 and chosen[-1] == parallel.global_rank(15, 0)
    assert chosen == sorted(set(chosen))


def test_the_parts_of_a_step_become_one_bar():
    compute = events(0, "compute", ("0F0", 0.0, 5.0), ("0F0", 8.0, 2.0))
    waits = events(0, "wait", ("0F0 for 1", 5.0, 3.0))
    gathers = [*events(0, "gpu", ("1", 1.0, 7.0)), *events(1, "gpu", ("2", 0.0, 1.0))]
    thread, link = rows([*compute, *waits, *gathers], [0])
    assert thread == TimelineRow(
        0, "thread", [Event(0, "compute", "0F0", 0.0, 10.0), Event(0, "wait", "0F0 for 1", 5.0, 3.0)]
    )
    assert link == TimelineRow(0, "gpu", [Event(0, "gpu", "1", 1.0, 7.0)])
    assert thread.total_us("wait") == 3.0


@pytest.fixture
def built(tmp_path):
    make_run(tmp_path)
    return report.build(report.load(tmp_path))


def test_simulated_stands_above_measured(built):
    drawn = timeline_panels.panels(built)
    assert ["SIMULATED" in panel.title for panel in drawn] == [True, False, False]
    assert drawn[0].step == (0.0, built.run.schedule.predicted.iteration_time_us)
    steps = steps_of_ranks(built.run.workload.parallel)
    for panel in drawn:
        for row in panel.rows:
            if row.lane == "thread":
                assert [bar.name for bar in row.bars if bar.lane == "compute"] == [
                    str(step) for step in steps[row.rank // 2]
                ]


def test_the_measured_iteration_time_is_that_of_the_metrics(built):
    scheduled = timeline_panels.panels(built)[1]
    # Of iterations 3 to 6, which take a microsecond longer each, the earlier middle one.
    assert "iteration 4 of 6" in scheduled.title
    assert scheduled.step[1] - scheduled.step[0] == pytest.approx(1004.0)
    assert scheduled.step[1] < EPOCH_US / 1e6


def test_gathers_in_a_small_share_are_shown_larger(built):
    drawn = timeline_panels.panels(built)
    gathers = [
        [bar for row in panel.rows if row.lane in timeline_panels.GATHERS for bar in row.bars] for panel in drawn[:2]
    ]
    longest = max(
        max(bar.start_us + bar.duration_us for bar in bars) - min(bar.start_us for bar in bars) for bars in gathers
    )
    whole = max(panel.end_us() for panel in drawn)
    assert (timeline_panels.zoom_us(drawn) is not None) == (longest < timeline_panels.ZOOM_BELOW * whole)
    early = [panel._replace(rows=[TimelineRow(0, "gpu", [Event(0, "gpu", "0", 0.0, 10.0)])]) for panel in drawn[:2]]
    late = [*early, drawn[2]._replace(rows=[TimelineRow(0, "thread", [Event(0, "compute", "0F0", 0.0, 1000.0)])])]
    assert timeline_panels.zoom_us(late) == pytest.approx(11.5)
    assert timeline_panels.zoom_us([*early, early[0]]) is None
    # Gathers that begin late in the iteration are looked at where they are.
    shifted = [panel._replace(rows=[TimelineRow(0, "gpu", [Event(0, "gpu", "0", 500.0, 10.0)])]) for panel in early]
    assert timeline_panels.zoom_us([*shifted, late[2]]) == pytest.approx(11.5) and shifted[0].first_gather_us() == 500.0


def size_of(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def pixels(path, color: str) -> int:
    """How many pixels have exactly this colour."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    image = numpy.rint(imread(path)[..., :3] * 255).astype(int)
    return int((image == numpy.rint(numpy.array(to_rgb(color)) * 255).astype(int)).all(axis=-1).sum())


SIZES = [
    {},
    {"vp": 1, "order": "1f1b"},
    {"pp": 10, "vp": 1, "order": "1f1b", "microbatches": 12, "dp": 1},
    {"pp": 4, "microbatches": 16, "dp": 1},
]


@pytest.mark.parametrize("sizes", some(SIZES, 2))
def test_the_picture_is_as_wide_as_promised_and_holds_every_kind(tmp_path, sizes):
    make_run(tmp_path, **sizes)
    built = report.build(report.load(tmp_path))
    timeline.save(built, tmp_path / "t.png")
    assert size_of(tmp_path / "t.png")[0] == timeline.WIDTH_PX
    used = {part_of(bar) for panel in timeline_panels.panels(built) for row in panel.rows for bar in row.bars}
    assert {"forward", "backward", "wait", "issue", "gpu", "optimizer"} <= used
    for kind in used:
        assert pixels(tmp_path / "t.png", timeline.KINDS[kind][0]) > 100, kind  # its legend alone has more


def test_a_longer_wait_is_more_red(tmp_path):
    def red(name: str, wait_us: float) -> int:
        make_run(tmp_path)

        def longer(trace):
            for row in trace["traceEvents"]:
                if row["ph"] == "X" and row["name"] == "wait 0":
                    row["dur"] = wait_us

        change(tmp_path / "scheduled.trace.json", longer)
        timeline.save(report.build(report.load(tmp_path)), tmp_path / name)
        return pixels(tmp_path / name, timeline.KINDS["wait"][0])

    assert red("long.png", 1000.0) > 2 * red("short.png", 10.0)


def test_every_kind_of_bar_has_a_colour_and_a_meaning():
    from megatron_ext.formats.trace import LANES

    kinds = {"forward", "backward"} | set(LANES) - {"compute", "launches"}  # one bar over the whole iteration
    assert kinds == set(timeline.KINDS)
    assert len({color for color, _ in timeline.KINDS.values()}) == len(kinds)


def test_a_place_that_cannot_be_written_is_named(built, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/t.png: cannot be written"):
        timeline.save(built, tmp_path / "file" / "t.png")


def test_a_gather_whose_end_is_not_known_is_hatched(tmp_path):
    def named(name: str):
        def rename(trace):
            for row in trace["traceEvents"]:
                if row["name"] == "unshard 0":
                    row["name"], row["dur"] = name, 600.0

        return rename

    def green(folder: str, name: str) -> int:
        (tmp_path / folder).mkdir()
        make_run(tmp_path / folder)
        change(tmp_path / folder / "stock.trace.json", named(name))
        timeline.save(report.build(report.load(tmp_path / folder)), tmp_path / f"{folder}.png")
        return pixels(tmp_path / f"{folder}.png", timeline.KINDS["gpu"][0])

    assert green("hatched", END_NOT_KNOWN) < 0.7 * green("filled", "unshard")


def test_where_runs_take_turns_no_iteration_that_begins_a_turn_is_drawn(tmp_path):
    make_run(tmp_path, iterations=8)

    def in_turns_of_two(metrics):
        metrics["turn_iterations"] = 2
        # The nearest to the median of all would be one that begins a turn.
        metrics["iteration_us"] = [5000.0, 5000.0, 1000.0, 900.0, 1000.0, 1100.0, 1000.0, 800.0]

    for which in ("stock", "scheduled"):
        change(tmp_path / f"{which}.metrics.json", in_turns_of_two)
    drawn = timeline_panels.panels(report.build(report.load(tmp_path)))[1:]
    found = [int(panel.title.split("iteration ")[1].split()[0]) for panel in drawn]
    assert len(found) == 2 and all(iteration % 2 == 0 for iteration in found)  # iterations are counted from 1
