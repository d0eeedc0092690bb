"""Simulated and measured over each other in one Chrome trace."""

import json

from run_files import make_run

from megatron_ext import report
from megatron_ext.formats import trace
from megatron_ext.formats.trace import LANES, Event
from megatron_ext.report.timeline_panels import iterations_by_name
from megatron_ext.report.write_report import over_each_other, write


def processes(rows: list[dict]) -> dict[str, int]:
    return {row["args"]["name"]: row["pid"] for row in rows if row["name"] == "process_name"}


def test_the_traces_of_a_rank_stand_under_each_other(tmp_path):
    one, two = [Event(0, "gpu", "a", 1.0, 2.0), Event(1, "cpu", "b", 3.0, 4.0)], [Event(0, "gpu", "c", 5.0, 6.0)]
    events, names = over_each_other({"simulated": one, "measured": two})
    trace.save(tmp_path / "o.json", events, processes=names)
    rows = json.loads((tmp_path / "o.json").read_text())["traceEvents"]
    pids = processes(rows)
    assert sorted(pids, key=pids.get) == ["rank 0: simulated", "rank 0: measured", "rank 1: simulated"]
    assert len(set(pids.values())) == 3 and 0 not in pids.values()
    order = {row["pid"]: row["args"]["sort_index"] for row in rows if row["name"] == "process_sort_index"}
    assert sorted(order, key=order.get) == sorted(pids.values())
    spans = {row["name"]: row for row in rows if row["ph"] == "X"}
    assert (spans["c"]["pid"], spans["c"]["ts"], spans["c"]["dur"]) == (pids["rank 0: measured"], 5.0, 6.0)
    assert LANES[spans["b"]["tid"]] == "cpu"


def test_a_run_gives_four_traces_that_begin_together(tmp_path):
    make_run(tmp_path)
    built = report.build(report.load(tmp_path))
    traces = iterations_by_name(built)
    assert list(traces) == ["scheduled, simulated", "scheduled, measured", "stock, simulated", "stock, measured"]
    write(built)
    rows = json.loads((tmp_path / "overlay.trace.json").read_text())["traceEvents"]
    pids, spans = processes(rows), [row for row in rows if row["ph"] == "X"]
    assert len(spans) == sum(len(events) for events in traces.values())
    for name, events in traces.items():
        own = {pid for said, pid in pids.items() if said.endswith(f": {name}")}
        mine = [row["ts"] for row in spans if row["pid"] in own]
        assert len(mine) == len(events) and min(mine) == 0.0
