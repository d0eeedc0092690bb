"""Modules in the place of Transformer Engine's: their parameters are drawn under the random states that Megatron asks
for."""

import contextlib
from functools import partial

import pytest

from megatron_ext.megatron.engine_modules import GroupedLinear, Linear


@pytest.mark.parametrize("make", [partial(GroupedLinear, 2), Linear])
def test_replicas_of_an_expert_begin_alike_on_tensor_parallel_ranks(make):
    """The state of experts is the same on all ranks that hold an expert; the default state differs among them."""
    named = []

    class Tracker:
        def fork(self, name="tensor-parallel"):
            named.append(name)
            return contextlib.nullcontext()

    make(4, 4, get_rng_state_tracker=Tracker, rng_tracker_name="expert-parallel")
    assert {*named} == {"expert-parallel"}
    make(4, 4, get_rng_state_tracker=Tracker)
    assert named[-1] == "tensor-parallel"
