"""Bill and census side by side, on the device and in host memory."""

from pathlib import Path
from types import SimpleNamespace

from megatron_ext.formats import rank_memory
from megatron_ext.formats.trace import AboutTraining
from megatron_ext.planner.last_lines import ComparedRun
from megatron_ext.planner.what_limits import LIMIT_UNKNOWN
from megatron_ext.report.report_text import cautions, ending, memory_rows, verdict_line
from megatron_ext.report.turn_ratio import TurnRatio

MIB = 1 << 20


def test_every_kind_of_both_places_has_a_row():
    bill = rank_memory.make({"shards": 2 * MIB}, {"gradients": 4 * MIB, "host_copies": 3 * MIB})
    census = rank_memory.make({"shards": 2 * MIB, "buffers": MIB}, {"gradients": 8 * MIB})
    found = memory_rows(SimpleNamespace(memory=((bill, census),)))
    assert found == [
        ("memory at the peak", "bill", "census", ""),
        ("  rank 0, shards, MiB", "2.00", "2.00", "1.000"),
        ("  rank 0, buffers, MiB", "0.00", "1.00", "0.000"),
        ("  rank 0, device in all, MiB", "2.00", "3.00", "0.667"),
        ("  rank 0, host gradients, MiB", "4.00", "8.00", "0.500"),
        ("  rank 0, host copies, MiB", "3.00", "0.00", ""),
        ("  rank 0, host in all, MiB", "7.00", "8.00", "0.875"),
    ]
    assert memory_rows(SimpleNamespace(memory=())) == []


def test_a_report_of_costs_of_a_shared_device_says_it():
    def report(**hardware):
        measured_on = SimpleNamespace(hardware=hardware)
        run = SimpleNamespace(
            schedule=SimpleNamespace(metadata=SimpleNamespace(options=SimpleNamespace(measured_on=measured_on))),
            scheduled_trace=SimpleNamespace(about=AboutTraining(schedule_sha256="0")),
        )
        one = SimpleNamespace(median_us=1.0)
        pair = SimpleNamespace(stock=one, scheduled=one)
        return SimpleNamespace(
            run=run,
            iteration_time_us=(one, one),
            predicted_iteration_time_us=SimpleNamespace(stock=1.0, scheduled=1.0),
            gather_us=pair,
            measured_ratio=1.0,
        )

    (note,) = cautions(report(device="NVIDIA H200", ranks_per_device=8))
    assert "shared device (8 ranks on one)" in note
    assert cautions(report(device="NVIDIA H200")) == []


FREE, HELD = SimpleNamespace(host_limit_bytes=None), SimpleNamespace(host_limit_bytes=1250 << 20)


def verdict_of(
    ours_us, predicted_us, ratio=None, host_bytes=None, turn_iterations=None, scheduled=FREE, stock_predicted_us=100.0
):
    limits = SimpleNamespace(host_bytes=host_bytes)
    return verdict_line(
        SimpleNamespace(
            verdict=SimpleNamespace(conclusion="helps. The whole interval lies above 1%"),
            measured_ratio=ratio,
            verdict_was="wrong",
            iteration_time_us=(SimpleNamespace(median_us=100.0), SimpleNamespace(median_us=ours_us)),
            predicted_iteration_time_us=(stock_predicted_us, predicted_us),
            run=SimpleNamespace(
                gathers_only=None,
                workload=SimpleNamespace(limits=limits),
                turn_iterations=turn_iterations,
                scheduled=scheduled,
                stock=FREE,
            ),
        )
    )


def test_a_verdict_beside_a_run_that_took_longer_says_so_in_its_line():
    slower = verdict_of(310.0, 100.0, host_bytes=1 << 30)
    assert slower.startswith("helps. The whole interval lies above 1%; not checked by the measured ratio")
    assert "this run took LONGER, 3.10 times stock's iteration time; it took 3.10 times the predicted time" in slower
    assert slower.endswith(LIMIT_UNKNOWN) and "cgroup" in slower
    assert "cgroup" not in verdict_of(310.0, 100.0)
    assert "the runs took no turns" in slower
    assert "the runs took too few turns" in verdict_of(310.0, 100.0, turn_iterations=2)
    taken = verdict_of(110.0, 100.0, TurnRatio(1.1, 0.01, 8))
    assert "measured 1.100 +- 0.010" in taken and "LONGER, 1.10 times" in taken and "predicted" not in taken
    assert "LONGER" not in verdict_of(90.0, 100.0, TurnRatio(0.9, 0.01, 8))


def test_a_limit_on_one_of_both_runs_is_said_in_the_verdict_s_line():
    held = verdict_of(310.0, 300.0, TurnRatio(3.1, 0.01, 8), scheduled=HELD)
    assert held.endswith(
        "stock's iteration time; measured within a limit of 1250 MiB, stock's without a limit on memory"
    )
    assert "limit" not in verdict_of(310.0, 300.0, TurnRatio(3.1, 0.01, 8))
    slow = dict(host_bytes=1 << 30, scheduled=HELD)
    assert verdict_of(310.0, 100.0, **slow).endswith(f"stock's 1.00 times its own. {LIMIT_UNKNOWN}")
    both = verdict_of(310.0, 100.0, **slow, stock_predicted_us=33.0)
    assert both.endswith("stock's 3.03 times its own, without a limit: the limit explains little of it")


def test_what_a_faster_run_by_all_gathers_held_in_host_memory_is_not_known():
    rule = SimpleNamespace(metadata=SimpleNamespace(planner="gathers-only"), uses_drive=True)
    report = SimpleNamespace(
        verdict=SimpleNamespace(
            conclusion="helps", runs=(ComparedRun("this schedule", 90.0, 1 << 30),), is_needed=True
        ),
        measured_ratio=None,
        iteration_time_us=(SimpleNamespace(median_us=100.0), SimpleNamespace(median_us=110.0)),
        predicted_iteration_time_us=(90.0, 90.0),
        run=SimpleNamespace(
            gathers_only=rule,
            schedule=None,
            turn_iterations=None,
            path=Path("runs/x"),
            scheduled=FREE,
            stock=FREE,
            workload=SimpleNamespace(ramp=()),
        ),
    )
    fastest, host, add, _ = ending(report)
    assert fastest.startswith("fastest: 0.100 ms, measured by the best plan by all-gathers alone")
    assert host == "host memory: not known"
    drive = "--user-defined-schedule-nvme-path DIRECTORY"
    assert add == f"add: --user-defined-schedule runs/x/gathers_only.schedule.json {drive}"


def test_a_schedule_that_was_faster_is_added_whatever_the_plan_said():
    """``does not help`` was wrong: the options that help are not kept back."""

    def added(was: str | None) -> str:
        pair = (SimpleNamespace(median_us=100.0), SimpleNamespace(median_us=50.0))
        schedule = SimpleNamespace(uses_drive=False)
        limits = SimpleNamespace(host_bytes=None)
        report = SimpleNamespace(
            verdict=SimpleNamespace(
                conclusion="does not help", runs=(ComparedRun("this schedule", 90.0, 1 << 30),), is_needed=False
            ),
            measured_ratio=TurnRatio(0.5, 0.01, 8),
            verdict_was=was,
            iteration_time_us=pair,
            predicted_iteration_time_us=(90.0, 90.0),
            run=SimpleNamespace(
                gathers_only=None,
                schedule=schedule,
                turn_iterations=2,
                path=Path("runs/x"),
                scheduled=FREE,
                stock=FREE,
                workload=SimpleNamespace(zero_stage=1, limits=limits, ramp=()),
            ),
        )
        return ending(report)[2]

    assert added("wrong") == "add: --user-defined-schedule runs/x/schedule.json"
    assert added("right") == added(None) == "add: nothing"
