"""The workload by arithmetic is the one that the modules give."""

import pytest
from cases import ALL_LAYOUTS, EXPERTS, LAYOUTS, MODELS, SHAPES, SIZES, model_options
from msgspec.structs import replace
from variations import some

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import gpt_arguments
from megatron_ext.megatron.ignored_options import parse
from megatron_ext.megatron.layer_options import require_known_layers
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.workload.gpt_shapes import gpt_workload


def by_arithmetic(options: list[str]):
    args = parse(options)
    return gpt_workload(
        gpt_arguments.shape_of(args),
        gpt_arguments.parallel_of(args),
        gpt_arguments.batch_of(args),
        zero_stage=args.zero_stage,
        limits=gpt_arguments.limits_of(args),
        optimizer=optimizer_settings(args),
    )


def without_activations(work):
    chunks = tuple(replace(chunk, activation_bytes=(), recompute_bytes=0) for chunk in work.chunks)
    return replace(work, chunks=chunks)


@pytest.mark.parametrize("layout", some([*LAYOUTS], 1))
def test_every_model_on_every_layout(workloads, layout):
    for name, options in MODELS.items():
        counted = without_activations(by_arithmetic([*LAYOUTS[layout], *model_options(options)]))
        assert counted == without_activations(workloads[layout, name]), name


@pytest.mark.nightly
def test_grouped_queries_gates_biases_and_tied_matrices(workloads):
    for name, options in SHAPES.items():
        counted = without_activations(by_arithmetic(f"{SIZES} {options}".split()))
        assert counted == without_activations(workloads["shapes", name]), name


@pytest.mark.nightly
def test_activations_of_local_layers(workloads):
    """As `fit` counts them, but for moments of norms, which a GPU keeps in 32 bits."""
    for name, options in SHAPES.items():
        counted, described = by_arithmetic(f"{SIZES} {options}".split()), workloads["shapes", name]
        for ours, theirs in zip(counted.chunks, described.chunks):
            assert sum(ours.activation_bytes) == pytest.approx(sum(theirs.activation_bytes), rel=0.02), name


@pytest.mark.parametrize(
    ("layout", "name"),
    some([("experts", "experts-bf16"), ("experts", "experts-fp32"), ("experts-tensor", "experts-bf16")], 2),
)
def test_layers_with_experts(workloads, layout, name):
    """Shared experts, gates, and parts of experts beside tensor parallelism; other sizes are not measured."""
    options = (*ALL_LAYOUTS[layout], *model_options(EXPERTS[name]))
    counted = by_arithmetic([*options])
    assert without_activations(counted) == without_activations(workloads[layout, name])
    require_known_layers(options, workloads[layout, name])
    with pytest.raises(InputError, match="measure cannot build this model's layers of kind 'moe'"):
        require_known_layers((*options, "--moe-ffn-hidden-size", "48"), workloads[layout, name])
