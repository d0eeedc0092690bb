"""A made-up run directory, written through the modules that real runs are written with."""

import json
from pathlib import Path

from planning_cases import make_table, make_workload

from megatron_ext import planner
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats import trace as traces
from megatron_ext.formats.trace import Event
from megatron_ext.schedule import user_defined_schedule as schedule
from megatron_ext.workload import workload
from megatron_ext.workload.step_order import steps_of_ranks

EPOCH_US = 1_760_000_000_000_000.0
"""Measured times are since the epoch, where a double counts quarters of a microsecond."""

PERIOD_US, STEP_US, OPTIMIZER_US = 10_000.0, 50.0, 200.0


def make_metrics(iterations: int, world: int, *, loss: float = 5.0, step_us: float = 1000.0) -> dict:
    """Falling losses; iteration ``i`` (from 1) takes ``step_us + i``."""
    return {
        "loss": [loss / (i + 1) for i in range(iterations)],
        "grad_norm": [1.0 / (i + 3) for i in range(iterations)],
        "iteration_us": [step_us + i + 1 for i in range(iterations)],
        "eval_loss": [],
        "parameter_sha256": [f"{rank:064x}" for rank in range(world)],
    }


def make_events(parallel, iterations: int, *, issue_us, wait_us, evaluated: int | None = None) -> list[Event]:
    """What a run records: per rank and iteration one issue, all steps one after another with one
    wait inside the first, an optimizer step, and inside its end an issue that publishes.

    ``issue_us(iteration, rank)``, ``wait_us(iteration, rank)`` give microseconds. After the last
    iteration, and after ``evaluated``, there is what is no training.
    """
    events = []
    steps = steps_of_ranks(parallel)
    for rank in range(parallel.world_size):
        mine = steps[rank // (parallel.dp * parallel.tensor_model_parallel_size)]

        def add(lane, name, start, duration, iteration, rank=rank):
            events.append(Event(rank, lane, name, start, duration, iteration))

        add("issue", "publish", EPOCH_US, 3.0, 0)
        for i in range(1, iterations + 1):
            now = EPOCH_US + i * PERIOD_US
            add("issue", "unshard 0 gpu", now, issue_us(i, rank), i)
            add("gpu", "unshard 0", now, 20.0, i)
            now += issue_us(i, rank)
            for index, step in enumerate(mine):
                add("compute", step.kind, now, STEP_US, i)
                if index == 0:
                    add("wait", "wait 0", now + 1, wait_us(i, rank), i)
                now += STEP_US
            add("optimizer", "step", now, OPTIMIZER_US, i)
            now += OPTIMIZER_US
            add("issue", "publish", now - 2, 1.0, i)
            add("publish", "publish 1", now + 5, 30.0, i + rank % 2)  # a thread may see the next number
            if i in (iterations, evaluated):
                add("issue", "unshard 0 gpu", now + 100, 7777.0, i)
                add("wait", "wait", now + 200, 8888.0, i)
            if i == evaluated:
                for place in range(3):
                    add("compute", "F", now + 300 + place, 1.0, i)
    return events


def make_run(
    path: Path,
    *,
    iterations: int = 6,
    stock_issue_us: float = 40.0,
    reference: bool = True,
    evaluated: int | None = None,
    **sizes,
):
    """Write every file of a run; returns its workload. Rank 0 of the scheduled run issues for
    ``i`` and waits for ``2 i`` microseconds in iteration ``i``, the others for none."""
    work = make_workload(**sizes)
    table = make_table(work)
    cost.save(path / "cost_table.json", table)
    workload.save(path / "workload.json", work)
    planned = planner.plan(work, table, policy="hybrid", cost_table_sha256=json_files.sha256(path / "cost_table.json"))
    schedule.save(path / "schedule.json", planned)
    world = work.parallel.world_size
    json_files.save(path / "stock.metrics.json", make_metrics(iterations, world, loss=5.0 + 1e-6, step_us=2000.0))
    json_files.save(path / "scheduled.metrics.json", make_metrics(iterations, world))
    if reference:
        json_files.save(path / "reference.metrics.json", make_metrics(iterations, world))
    for name, issue, wait in (
        ("stock", lambda i, rank: stock_issue_us, lambda i, rank: 10.0 * rank),
        ("scheduled", lambda i, rank: float(i) * (rank == 0), lambda i, rank: 2.0 * i * (rank == 0)),
    ):
        events = make_events(work.parallel, iterations, issue_us=issue, wait_us=wait, evaluated=evaluated)
        by = json_files.sha256(path / "schedule.json") if name == "scheduled" else None
        about = traces.AboutTraining(scheduled=by is not None, schedule_sha256=by)
        traces.save(path / f"{name}.trace.json", events, about=about)
    return work


def change(path: Path, function) -> None:
    """Rewrite a JSON file with what ``function`` makes of it, in place or as a new value."""
    value = json.loads(path.read_text())
    changed = function(value)
    path.write_text(json.dumps(value if changed is None else changed))
