"""Recompute that no schedule of zero stage 3 can serve is refused."""

from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.recompute import check_recompute


def test_recomputed_hyper_connections_are_refused_where_groups_are_freed():
    workload, parallel = SimpleNamespace(chunks=()), SimpleNamespace(pp=1)
    config = SimpleNamespace(recompute_granularity="selective", recompute_modules=["core_attn", "mhc"])
    check_recompute(SimpleNamespace(zero_stage=2, parallel=parallel), workload, config)
    schedule = SimpleNamespace(zero_stage=3, parallel=parallel)
    check_recompute(schedule, workload, SimpleNamespace(recompute_granularity=None))  # an older release
    with pytest.raises(InputError, match="schedule.json: --recompute-modules = 'mhc': reads parameters before"):
        check_recompute(schedule, workload, config, file="schedule.json")
