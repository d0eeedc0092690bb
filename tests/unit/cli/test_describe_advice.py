"""``describe`` sends nobody to a verb that refuses the model."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from parallel_sizes import sized

from megatron_ext.cli import checkout_model
from megatron_ext.cli.describe import who_counts
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import gpt_arguments, ignored_options
from megatron_ext.workload.gpt_shapes import gpt_workload

OPTIONS = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100".split()


@pytest.fixture
def model():
    args = ignored_options.parse(OPTIONS)
    work = gpt_workload(gpt_arguments.shape_of(args), sized(microbatches=1), gpt_arguments.batch_of(args))
    return SimpleNamespace(layer_options=tuple(OPTIONS), workload=work)


def script(context_parallel_size=1):
    return SimpleNamespace(sizes=SimpleNamespace(context_parallel_size=context_parallel_size))


def test_a_plain_model_is_measured(model):
    assert who_counts(model) == who_counts(None) == "; `measure` counts them"


def test_other_layers_are_not_measured_and_nobody_is_sent_there(model):
    """Layers of experts and of multi-token prediction have parameters that no layer of ours has."""
    (chunk,) = model.workload.chunks
    first, *rest = chunk.parameters
    expert = replace(chunk, parameters=(replace(first, shape=(first.numel * 8,), bytes=first.bytes * 8), *rest))
    other = SimpleNamespace(layer_options=model.layer_options, workload=replace(model.workload, chunks=(expert,)))
    line = who_counts(other)
    assert "`measure` counts" not in line and "`measure` refuses it (" in line
    assert "cost estimate --hardware NAME`, which needs no layers" in line and "--limit-device-bytes" in line


def test_parts_of_sequences_are_measured_on_a_gpu_alone(monkeypatch):
    given = script(2)
    monkeypatch.setattr(checkout_model.script_arguments, "refuse_none", lambda script: None)
    given.transformer_impl = "local"
    with pytest.raises(
        InputError, match="--context-parallel-size = 2: on a CPU measure can time only .*cost estimate --hardware NAME"
    ):
        checkout_model.refuse_script(given, "measure")
