"""Options of a user's command line that the counts do not follow are refused under the name that the user typed."""

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import script_arguments
from megatron_ext.megatron.ignored_options import parse


@pytest.mark.parametrize("verb", ["fit", "describe"])
@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--quick-geglu", "changes parameters"),
        ("--padded-vocab-size 51200", "changes parameters"),
        ("--softmax-type learnable", "changes parameters"),
        ("--moe-layer-recompute", "changes parameters, what layers save"),
        ("--checkpoint-activations", "changes parameters, what layers save"),
        ("--encoder-seq-length 4096", "changes parameters, what layers save"),
        ("--model-parallel-size 2", "changes parameters"),
        ("--head-wise-attn-gate", "changes parameters"),
        ("--linear-attention-type gated_delta_net", "changes parameters"),
        ("--enable-hyper-connections", "changes parameters"),
        ("--use-nccl-ub", "cannot be combined with a schedule"),
        ("--cpu-offloading-num-layers 2", "cannot be combined with a schedule: its copies of activations"),
    ],
)
def test_what_changes_the_answer_is_refused(verb, option, why):
    with pytest.raises(InputError, match=f"^{option.partition(' ')[0]}.*: {why}"):
        parse(option.split(), verb=verb, passed_over=[])


@pytest.mark.parametrize("verb", ["fit", "describe"])
@pytest.mark.parametrize("options", ["--zero-stage 0 --deepspeed", "--deepspeed --deepspeed_config ds.json"])
def test_a_script_of_another_fork_is_refused_as_such(verb, options):
    """Whatever the fork means by an option that has the name of one of ours."""
    for read in (parse, script_arguments.read):
        with pytest.raises(InputError, match="^--deepspeed: Megatron-DeepSpeed shards parameters in its own way"):
            read(options.split(), verb=verb)


@pytest.mark.parametrize(
    "options, said",
    [
        ("--use-megatron-fsdp", "--use-megatron-fsdp: cannot be combined"),
        ("--bf16 --fp16", "--fp16: cannot be combined"),
        ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage = 2: needs --pipeline"),
        ("--num-virtual-stages-per-pipeline-rank 4", "--num-virtual-stages-per-pipeline-rank = 4: needs --pipeline"),
        ("--num-experts 4 --disable-bias-linear --swiglu --no-bias-swiglu-fusion", "--no-bias-swiglu-fusion: it is"),
    ],
)
def test_an_option_is_named_as_it_was_written(options, said):
    with pytest.raises(InputError, match=f"^{said}"):
        parse(options.split(), verb="fit", passed_over=[])


def test_an_option_of_gates_says_nothing_of_experts_without_gates():
    """Megatron reads --no-bias-swiglu-fusion only with --swiglu."""
    options = "--num-experts 4 --disable-bias-linear --no-bias-swiglu-fusion".split()
    assert parse(options, verb="fit", passed_over=[]).num_experts == 4


@pytest.mark.parametrize(
    "option",
    "--use-dist-ckpt|--override-opt-param-scheduler|--softmax-type vanilla|--moe-extended-tp|"
    "--encoder-tensor-model-parallel-size 1|--tensor-parallel-num-weight-shards 1|"
    "--cpu-offloading-num-layers 0|--data-path|--data-path 0.5 a 0.5 b".split("|"),
)
def test_what_changes_nothing_is_not_reported(option):
    passed_over: list[str] = []
    parse(option.split(), verb="fit", passed_over=passed_over)
    assert not passed_over
    parse(option.split())
