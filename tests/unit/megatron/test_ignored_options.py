"""Options of a user's command line that the counts do not follow are refused under the name that the user typed."""

import pytest

from megatron_ext.formats.errors import InputError
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
