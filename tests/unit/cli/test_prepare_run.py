"""Under a launcher the first rank says whether a table is kept, whatever other nodes see of it."""

from types import SimpleNamespace

import pytest

from megatron_ext.cli import prepare_run
from megatron_ext.cli.prepare_run import Preparation
from megatron_ext.measure import cluster_launch


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
