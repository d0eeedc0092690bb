"""Modules in the place of Transformer Engine's."""

from contextlib import nullcontext
from types import SimpleNamespace

from megatron_ext.megatron.engine_modules import GroupedLinear


def test_experts_are_initialized_under_the_random_state_that_megatron_names():
    """Under another one, ranks that share the shards of an expert would begin with different weights."""
    forked = []
    tracker = SimpleNamespace(fork=lambda name="of tensor-parallel ranks": nullcontext(forked.append(name)))
    GroupedLinear(2, 4, 4, bias=False, get_rng_state_tracker=lambda: tracker, rng_tracker_name="of experts")
    GroupedLinear(1, 4, 4, bias=False, get_rng_state_tracker=lambda: tracker)
    assert forked == ["of experts", "of experts", "of tensor-parallel ranks"]
