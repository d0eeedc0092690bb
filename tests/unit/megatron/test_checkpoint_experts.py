"""A checkpoint of other expert-parallel sizes is refused before Megatron fails at shapes."""

import sys
from types import SimpleNamespace

import pytest
from megatron.core import dist_checkpointing

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.checkpoint_experts import refuse_other_experts

SIZES = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def optimizer_of(*, experts: bool):
    buckets = [SimpleNamespace(group=7), SimpleNamespace(group=4)]
    return SimpleNamespace(buffers=[SimpleNamespace(params=[SimpleNamespace(allreduce=not experts)], buckets=buckets)])


@pytest.fixture
def loads(tmp_path, monkeypatch):
    """``loads(**sizes)``: this run loads what was saved at iteration 12 with ``sizes``, and has :data:`SIZES`."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    args = SimpleNamespace(load=str(tmp_path), **SIZES)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))

    def load(**sizes):
        read = {str(tmp_path / "iter_0000012"): {"args": SimpleNamespace(**(SIZES | sizes))}}
        monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", read.__getitem__)

    return load


@pytest.mark.parametrize("name", SIZES)
def test_experts_that_were_spread_otherwise_are_refused(loads, name):
    loads(**{name: 4})
    with pytest.raises(InputError) as refused:
        refuse_other_experts(optimizer_of(experts=True))
    text = str(refused.value)
    assert text.startswith(f"--{name.replace('_', '-')} = {SIZES[name]}: ") and "iter_0000012 was saved with 4" in text
    assert "groups[4]" in text and "--dist-ckpt-optim-fully-reshardable" in text


def test_what_is_as_it_was_or_has_no_experts_is_loaded(loads):
    loads()
    refuse_other_experts(optimizer_of(experts=True))
    loads(expert_model_parallel_size=4)
    refuse_other_experts(optimizer_of(experts=False))
