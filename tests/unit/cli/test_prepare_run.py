"""Under a launcher the first rank says whether a table is kept, whatever other nodes see of it."""

from types import SimpleNamespace

import pytest
from planning_cases import make_workload

from megatron_ext.cli import prepare_run
from megatron_ext.cli.prepare_run import Preparation
from megatron_ext.measure import cluster_launch
from megatron_ext.workload import workload


@pytest.mark.parametrize(
    ("own", "first", "measured"), [("; other memory", None, False), (None, "; other memory", True)]
)
def test_a_rank_measures_where_the_first_does(monkeypatch, tmp_path, own, first, measured):
    """A node whose memory is a GiB more would wait in a measurement in which nobody else takes part."""
    begun = []
    steps = object.__new__(Preparation)
    steps.is_first, steps.kept, steps.table_path = False, [], tmp_path / "cost_table.json"
    steps.options = steps.script = steps.model = SimpleNamespace(seconds=1, world_size=2)
    for name in ("with_sizes", "for_workload"):
        monkeypatch.setattr(prepare_run, name, lambda options, other: options)
    monkeypatch.setattr(prepare_run.msgspec.structs, "replace", lambda options, **changes: options)
    monkeypatch.setattr(Preparation, "table_differs", lambda self, options: own)
    monkeypatch.setattr(cluster_launch, "said_by_first", lambda reason: first)
    monkeypatch.setattr("megatron_ext.measure.measure", lambda options: begun.append(options))
    assert steps.measure() is False and bool(begun) == measured


@pytest.mark.parametrize("other", [False, True])
def test_what_belongs_to_another_workload_is_taken_away(monkeypatch, tmp_path, other):
    """``report`` would answer the request of ``fit`` with costs of settings that it did not find."""
    found = SimpleNamespace(workload=make_workload(layers=8 if other else 4))
    monkeypatch.setattr("megatron_ext.megatron.describe_from_checkout.describe_command_line", lambda *given: found)
    steps = object.__new__(Preparation)
    steps.checkout = steps.arguments = steps.entry = None
    steps.is_first, steps.kept, steps.workload_path = True, [], tmp_path / "workload.json"
    steps.schedule_path, steps.schedules_path = tmp_path / "schedule.json", tmp_path / "schedules"
    workload.save(steps.workload_path, make_workload(layers=4))
    files = [tmp_path / name for name in ("fit.json", "schedule.json")]
    for file in files:
        file.write_text("{}")
    steps.describe()
    assert [file.exists() for file in files] == [not other] * 2 and bool(steps.kept) != other
    assert workload.load(steps.workload_path) == found.workload
