"""Experts by Megatron's options: in which layers they are, what cannot train, and what `measure` builds of them."""

from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import expert_options, ignored_options
from megatron_ext.megatron.layer_options import options_of_layers

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --data-parallel-size 2".split()


def parse(options: str):
    return ignored_options.parse([*MODEL, *options.split()])


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ("", [0, 0, 0, 0]),
        ("--num-experts 4", [1, 1, 1, 1]),
        ("--num-experts 4 --moe-layer-freq 2", [1, 0, 1, 0]),
        ("--num-experts 4 --moe-layer-freq ([0]*1+[1]*3)", [0, 1, 1, 1]),
    ],
)
def test_the_layers_that_have_experts(options, layers):
    assert expert_options.pattern(parse(options)) == layers


def test_a_shorter_model_has_every_kind_of_layer():
    deep = [0] * 3 + [1] * 58
    assert expert_options.fewer_layers(deep, 1) == expert_options.fewer_layers(deep, 2)[:2] == [0, 1]
    assert expert_options.fewer_layers(deep, 61) == deep
    assert expert_options.fewer_layers([1, 1], 1) == [1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size = 2: needs --num-experts"),
        ("--num-experts 6 --expert-model-parallel-size 4", "--num-experts = 6: does not divide into 4 expert"),
        ("--num-experts 4 --expert-model-parallel-size 0", "--expert-model-parallel-size = 0: must be at least 1"),
        ("--num-experts 4 --expert-model-parallel-size 4", "--expert-model-parallel-size = 4: world_size"),
        ("--num-experts 2 --moe-router-topk 4", "--moe-router-topk = 4: there are 2 experts"),
        ("--num-experts 0", "--num-experts = 0: must be at least 1"),
        ("--num-experts 4 --moe-layer-freq [1]*3", "--moe-layer-freq = .*: the model has 4 layers"),
        ("--num-experts 4 --moe-layer-freq [1]*10**9", "argument --moe-layer-freq: invalid"),
        ("--num-experts 4 --moe-layer-freq exit()", "argument --moe-layer-freq: invalid"),
        ("--num-experts 4 --moe-layer-freq [1)", "argument --moe-layer-freq: invalid"),
        ("--num-experts 4 --tensor-model-parallel-size 2", "--sequence-parallel: is needed"),
    ],
)
def test_experts_that_cannot_train_are_refused_by_name(options, said):
    with pytest.raises(InputError, match=said):
        parse(options)


def test_layers_are_built_by_what_megatron_made_of_the_options():
    """Of one pipeline rank; later releases have lists of what was one value."""
    args = parse(
        "--num-experts 4 --expert-model-parallel-size 2 --moe-layer-freq [0,1]*2 --moe-grouped-gemm "
        "--ffn-hidden-size 64 --kv-channels 8 "
        "--moe-router-topk 1 --moe-shared-expert-intermediate-size 48 --tensor-model-parallel-size 2 "
        "--sequence-parallel"
    )
    sizes = dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None)
    theirs = SimpleNamespace(**vars(args) | sizes | {"moe_aux_loss_coeff": [0.5], "moe_router_dtype": None})
    again = ignored_options.parse([*options_of_layers(theirs), "--data-parallel-size", "2"])
    assert again.num_layers == 2 and again.moe_layer_freq == [0, 1] and again.moe_aux_loss_coeff == 0.5
    for name in expert_options.OPTIONS:
        if name not in ("moe_layer_freq", "moe_aux_loss_coeff"):
            assert getattr(again, name) == getattr(args, name), name
