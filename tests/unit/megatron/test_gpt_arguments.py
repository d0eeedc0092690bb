"""Options of the model: values that cannot train are refused by name before anything is built."""

import argparse
from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import gpt_arguments, ignored_options
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.workload.gpt_shapes import gpt_workload


def parse(*options: str):
    parser = gpt_arguments.OneLineParser(prog="test")
    gpt_arguments.add_gpt_arguments(parser)
    gpt_arguments.add_plan_arguments(parser)
    args = parser.parse_args(list(options))
    gpt_arguments.check(args)
    return args


@pytest.mark.parametrize("name", [*gpt_arguments.LARGEST, *gpt_arguments.PARALLEL])
@pytest.mark.parametrize(("value", "said"), [(0, "must be at least 1"), (10**25, "must be at most [0-9]+")])
def test_sizes_beyond_any_model_are_refused(name, value, said):
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(InputError, match=f"^{option} = {value}: {said}$"):
        parse(option, str(value))


def test_the_defaults_train():
    assert isinstance(parse(), argparse.Namespace)


@pytest.mark.parametrize("fraction", ["0.5", 0.5, 0.0, "0", 0.999])
def test_states_on_the_host_in_part_are_not_billed_as_all_or_nothing(fraction):
    args = SimpleNamespace(bf16=True, fp16=False, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    with pytest.raises(InputError, match=f"--optimizer-offload-fraction = '?{fraction}'?: a part of the states .*1.0"):
        optimizer_settings(args)
    args.optimizer_offload_fraction = 1.0
    assert optimizer_settings(args).on_host
    args.optimizer_cpu_offload, args.optimizer_offload_fraction = False, fraction
    assert not optimizer_settings(args).on_host


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ("--bf16", "float32"),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "bfloat16"),
        ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16", "bfloat16"),
        ("--fp16", "float16"),
        ("--fp16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "float32"),
        ("", "float32"),
    ],
)
def test_gradients_are_summed_in_what_megatron_takes(options, dtype):
    assert optimizer_settings(ignored_options.parse(options.split())).gradient_dtype == dtype


AWARE = "--bf16 --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (AWARE, "int16"),
        (f"{AWARE} --fp8-recipe delayed --main-params-dtype fp32", "int16"),
        (f"{AWARE} --fp8-recipe blockwise", "float32"),  # Megatron itself keeps the main parameters
        (f"{AWARE} --main-params-dtype fp16", "float16"),
        (f"{AWARE} --optimizer-cpu-offload", "float32"),
        ("--fp16 --use-precision-aware-optimizer", "float32"),
        ("--bf16", "float32"),
    ],
)
def test_a_precision_aware_optimizer_keeps_what_bfloat16_parameters_lack(options, dtype):
    """Source: ``store_param_remainders`` in megatron/core/optimizer, core_v0.11 to main, and distrib_optimizer.py."""
    settings = optimizer_settings(ignored_options.parse(options.split()))
    assert settings.main_parameter_dtype == dtype
    assert settings.placed(on_host=settings.on_host) == settings
    assert settings.placed(on_host=True).main_item_bytes("bfloat16") == (2 if dtype == "float16" else 4)


def test_what_else_is_recomputed_is_not_counted_here():
    selective = "--recompute-granularity selective --recompute-modules".split()
    ignored_options.parse([*selective, "core_attn"])
    with pytest.raises(InputError, match="^--recompute-modules = '?core_attn mlp'?: changes which activations"):
        ignored_options.parse([*selective, "core_attn", "mlp"])


def test_no_plan_brings_layers_together_at_zero_stage_3():
    """Such a schedule was refused when its run began, after everything had been measured."""
    words = "--recompute-granularity full --recompute-num-layers 2 --zero-stage 3 --recompute-method".split()
    assert parse(*words, "block").zero_stage == 3
    with pytest.raises(InputError, match="^--recompute-num-layers = 2: no plan of zero stage 3 brings so many layers"):
        parse(*words, "uniform")


def test_a_batch_that_is_decreased_leaves_the_rest_out():
    sizes = "--data-parallel-size 2 --micro-batch-size 3 --global-batch-size 20".split()
    with pytest.raises(InputError, match="--global-batch-size = 20: is not a multiple"):
        ignored_options.parse(sizes)
    args = ignored_options.parse([*sizes, "--decrease-batch-size-if-needed"])
    assert (args.num_microbatches, args.global_batch_size) == (3, 18)
    with pytest.raises(InputError, match="--global-batch-size = 5: is not a multiple"):
        ignored_options.parse([*sizes[:-1], "5", "--decrease-batch-size-if-needed"])


@pytest.mark.parametrize("name", "mtp-num-layers pipeline-model-parallel-layout q-lora-rank".split())
def test_one_of_a_kind_is_not_none(name):
    with pytest.raises(InputError, match=f"--{name} = '?1'?: changes parameters, what layers save or the order"):
        ignored_options.parse([f"--{name}", "1"])


def test_one_rank_of_a_kind_is_what_there_is():
    ignored_options.parse("--context-parallel-size 1 --expert-model-parallel-size 1".split())


def test_the_host_optimizer_takes_no_float32_parameters():
    args = SimpleNamespace(bf16=True, fp16=False, optimizer_cpu_offload=True)
    assert optimizer_settings(args).on_host
    with pytest.raises(InputError, match="--optimizer-cpu-offload: Megatron's host optimizer cannot step float32"):
        gpt_arguments.check(argparse.Namespace(**vars(parse()) | {"optimizer_cpu_offload": True}))


@pytest.mark.parametrize(
    ("options", "loss_fusion"),
    [
        ("", None),
        ("--cross-entropy-fusion-impl te", None),  # Megatron asks for the other option, too
        ("--cross-entropy-loss-fusion", "native"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "te"),
    ],
)
def test_what_fuses_the_loss(options, loss_fusion):
    assert gpt_arguments.batch_of(ignored_options.parse(options.split())).loss_fusion == loss_fusion


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ("--num-layers 8", [2, 2, 2, 2]),
        ("--num-layers 7 --decoder-first-pipeline-num-layers 1", [1, 2, 2, 2]),
        ("--num-layers 6 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", [1, 2, 2, 1]),
        (
            "--num-layers 14 --num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 2",
            [2, 2, 2, 1] * 2,
        ),
        ("--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [1, 2, 2, 1]),
        (
            "--num-layers 14 --num-virtual-stages-per-pipeline-rank 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            [1, 2, 2, 2, 2, 2, 2, 1],
        ),
        (
            "--num-layers 14 --num-layers-per-virtual-pipeline-stage 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            [1, 2, 2, 2, 2, 2, 2, 1],
        ),
        (
            "--num-layers 23 --num-layers-per-virtual-pipeline-stage 3 --account-for-loss-in-pipeline-split",
            [3, 3, 3, 3, 3, 3, 3, 2],
        ),
    ],
)
def test_layers_that_megatron_divides_unevenly(options, layers):
    """As core_v0.16's get_num_layers_to_build does."""
    args = parse("--pipeline-model-parallel-size", "4", "--global-batch-size", "8", *options.split())
    assert gpt_arguments.layers_of_stages(args) == layers
    work = gpt_workload(gpt_arguments.shape_of(args), gpt_arguments.parallel_of(args), gpt_arguments.batch_of(args))
    assert [chunk.layer_kinds.count("transformer") for chunk in work.chunks] == layers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--num-layers 9", "--num-layers = 9: does not divide into 4 stages$"),
        (
            "--num-layers 8 --decoder-first-pipeline-num-layers 1",
            "--num-layers = 8: .* 4 stages; with --decoder-first-pipeline-num-layers: 7 layers for 3 pipeline ranks",
        ),
        (
            "--num-layers 9 --account-for-loss-in-pipeline-split",
            "--num-layers = 9: .* 4 stages; with --account-for-loss-in-pipeline-split: 10 layers for 4 pipeline ranks",
        ),
        (
            "--num-layers 47 --num-layers-per-virtual-pipeline-stage 4",
            "--num-layers = 47: does not divide into 4 pipeline ranks",
        ),
        (
            "--num-layers 15 --num-layers-per-virtual-pipeline-stage 3 --account-for-loss-in-pipeline-split",
            "--num-layers-per-virtual-pipeline-stage = 3: does not divide the 4 layers of a pipeline rank",
        ),
        (
            "--num-layers 7 --decoder-first-pipeline-num-layers 1 --account-for-loss-in-pipeline-split",
            "--decoder-first-pipeline-num-layers = 1: cannot be combined",
        ),
    ],
)
def test_layers_that_do_not_divide_are_refused(options, said):
    with pytest.raises(InputError, match=f"^{said}"):
        parse("--pipeline-model-parallel-size", "4", *options.split())


@pytest.mark.parametrize("verb", ["describe", "fit", "measure"])
def test_dropout_that_is_not_given_is_megatrons(verb):
    def batch(*more: str):
        return gpt_arguments.batch_of(ignored_options.parse(more, verb=verb))

    dropped = "--hidden-dropout 0.1 --attention-dropout 0.1".split()
    assert batch() == batch(*dropped) != batch("--hidden-dropout", "0")
    words = "--seq-length 64 --num-attention-heads 4 --transformer-impl local".split()
    assert ignored_options.batch_of_words(words, 1) == ignored_options.batch_of_words([*words, *dropped], 1)
