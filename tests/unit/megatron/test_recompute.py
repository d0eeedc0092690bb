"""Recompute that no schedule of zero stage 3 can serve is refused."""

from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.recompute import blocks_of, check_recompute


def test_recomputed_hyper_connections_are_refused_where_groups_are_freed():
    config = SimpleNamespace(recompute_granularity="selective", recompute_modules=["core_attn", "mhc"])
    check_recompute(2, config)
    check_recompute(3, SimpleNamespace(recompute_granularity=None))  # an older release
    with pytest.raises(InputError, match="--recompute-modules = 'mhc': reads parameters before"):
        check_recompute(3, config)


def test_layers_that_are_recomputed_together_are_refused_where_groups_are_freed():
    chunk = SimpleNamespace(num_layers=6, layer_kinds=("embedding", *["transformer"] * 4, "output"))
    how = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    together, alone = SimpleNamespace(**how), SimpleNamespace(**how | {"recompute_num_layers": 1})
    assert blocks_of(chunk, together) == [(0, 0), (1, 2), (1, 2), (3, 4), (3, 4), (5, 5)]
    assert blocks_of(chunk, alone) == [(layer, layer) for layer in range(6)]
    check_recompute(3, alone)
    check_recompute(2, together)
    with pytest.raises(InputError, match="^--recompute-num-layers = 2: no plan of zero stage 3 brings so many layers"):
        check_recompute(3, together)
