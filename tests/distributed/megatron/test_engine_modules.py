"""A model of Transformer Engine's layers is described without Transformer Engine, with Megatron's names and shapes."""

import contextlib
import inspect
import os
import random
import sys
from functools import partial
from unittest import mock

import engine_stand_in
import pytest
import torch
from draw_schedule import prepared
from places import MEGATRON
from plans import command_line
from training import launch_training, run_warm
from variations import ALL, some

from megatron_ext.megatron import engine_modules, gpt_arguments
from megatron_ext.megatron.engine_modules import GroupedLinear, Linear
from megatron_ext.megatron.ignored_options import parse
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.gpt_shapes import gpt_workload

BASE = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --vocab-size 100
    --data-parallel-size 2 --transformer-impl transformer_engine --hidden-dropout 0 --attention-dropout 0""".split()


def published(hs: int, tp: int) -> dict:
    """Shapes of one layer, as Megatron's own test of its checkpoints has them: core_v0.17.1,
    tests/unit_tests/transformer/test_transformer_layer.py, ``get_tensor_shapes_for_tp``."""
    return {
        "mlp.linear_fc1.layer_norm_weight": (hs,),
        "mlp.linear_fc1.layer_norm_bias": (hs,),
        "mlp.linear_fc1.weight": (hs * 4 // tp, hs),
        "mlp.linear_fc1.bias": (hs * 4 // tp,),
        "mlp.linear_fc2.weight": (hs, hs * 4 // tp),
        "mlp.linear_fc2.bias": (hs,),
        "self_attention.linear_proj.weight": (hs, hs // tp),
        "self_attention.linear_proj.bias": (hs,),
        "self_attention.linear_qkv.layer_norm_weight": (hs,),
        "self_attention.linear_qkv.layer_norm_bias": (hs,),
        "self_attention.linear_qkv.weight": (hs * 3 // tp, hs),
        "self_attention.linear_qkv.bias": (hs * 3 // tp,),
    }


TENSOR_PARALLEL = some((2, 1), 1)
SAVE_MORE = {
    "usual": "",
    "parts of sequences": "--sequence-parallel",
    "unfused": "--attention-backend unfused",
    "context parallel": "--context-parallel-size 2",
    "attention dropout": "--attention-dropout 0.1",
    "hidden dropout": "--hidden-dropout 0.1",
    "norms": "--qk-layernorm",
    "fused loss": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
}
UNFUSED = "--attention-backend unfused --recompute-granularity selective"
FULL = "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method"
RECOMPUTE = {
    "scores": UNFUSED,
    "scores of groups": f"--group-query-attention --num-query-groups 2 --seq-length 256 {UNFUSED}",
    "every layer": f"{FULL} uniform --recompute-num-layers 1",
    "two layers together": f"{FULL} uniform --recompute-num-layers 2",
    "one layer": f"{FULL} block --recompute-num-layers 1",
}
MODELS = (
    {tp: f"--tensor-model-parallel-size {tp}" for tp in TENSOR_PARALLEL}
    | {
        "variants": "--swiglu --normalization RMSNorm --disable-bias-linear --use-rotary-position-embeddings "
        "--group-query-attention --num-query-groups 2 --ffn-hidden-size 96"
    }
    | {name: f"--bf16 --swiglu --use-rotary-position-embeddings {more}" for name, more in RECOMPUTE.items()}
    | {
        name: f"--bf16 --swiglu --normalization RMSNorm --tensor-model-parallel-size 2 {more}"
        for name, more in SAVE_MORE.items()
    }
)
"""Options by name."""

MANY = (
    "import sys; from megatron_ext.cli.main import main; sys.exit(sum(main(words.split()) for words in sys.argv[1:]))"
)
"""Several command lines, for which Megatron is imported once."""


@pytest.fixture(scope="module")
def chunks(megatron_tree, tmp_path_factory) -> dict:
    """The one chunk of each of :data:`MODELS`."""
    folder = tmp_path_factory.mktemp("described")
    files = {name: folder / f"{number}.json" for number, name in enumerate(MODELS)}
    words = [f"describe --out {files[name]} {' '.join(BASE)} {options}" for name, options in MODELS.items()]
    done = run_warm([sys.executable, "-c", MANY, *words], imported="torch")
    assert done.returncode == 0, done.stderr
    works = {name: workload_file.load(file) for name, file in files.items()}
    assert all(len(work.chunks) == 1 for work in works.values())
    return {name: work.chunks[0] for name, work in works.items()}


def second_layer(chunk) -> dict:
    """By name, the shapes of its parameters, in the order of the workload."""
    start = "decoder.layers.1."
    return {p.name.removeprefix(start): p.shape for p in chunk.parameters if p.name.startswith(start)}


def test_what_megatron_imports_in_one_go_is_there():
    """Or it takes Transformer Engine for absent. Source: ``megatron/core/extensions/transformer_engine.py``, of which
    core_v0.18.0 and later import the last name."""
    with mock.patch.dict(sys.modules):
        engine_modules.install()
        from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast, fp8_model_init
        from transformer_engine.pytorch.optimizers import FusedAdam
        from transformer_engine.pytorch.permutation import moe_permute_with_probs, moe_unpermute

        assert callable(moe_permute_with_probs) and callable(moe_unpermute)
        assert not [*Fp8Padding(4, align_size=16).parameters(), *Fp8Unpadding(4).parameters()]
        assert not FP8GlobalStateManager.is_fp8_enabled()
        aware = {"master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"}
        assert aware <= inspect.signature(FusedAdam).parameters.keys()  # or a precision-aware optimizer is refused
        with fp8_autocast(enabled=False), fp8_model_init(enabled=False):
            pass


@pytest.mark.parametrize("tp", TENSOR_PARALLEL)
def test_names_and_shapes_are_the_published_ones(chunks, tp):
    shapes = second_layer(chunks[tp])
    assert shapes == published(64, tp) and chunks[tp].activation_bytes[2] > 0
    # Order of registration: by it buckets are filled.
    assert list(shapes)[:6] == [
        f"self_attention.{name}"
        for name in (
            "linear_proj.weight",
            "linear_proj.bias",
            "linear_qkv.layer_norm_weight",
            "linear_qkv.layer_norm_bias",
            "linear_qkv.weight",
            "linear_qkv.bias",
        )
    ]


def test_variants_have_what_their_options_say(chunks):
    """A gate doubles fc1, RMSNorm has no bias, grouped queries have fewer keys and values (arXiv:2305.13245)."""
    assert second_layer(chunks["variants"]) == {
        "self_attention.linear_proj.weight": (64, 64),
        "self_attention.linear_qkv.layer_norm_weight": (64,),
        "self_attention.linear_qkv.weight": (64 + 2 * 2 * 16, 64),
        "mlp.linear_fc1.layer_norm_weight": (64,),
        "mlp.linear_fc1.weight": (2 * 96, 64),
        "mlp.linear_fc2.weight": (64, 96),
    }


def test_layers_save_what_is_counted_by_sizes(chunks):
    """As `advise` and `fit` count (arXiv 2205.05198), to a few bytes: one count for all verbs."""
    for name, options in MODELS.items():
        args = parse([*BASE, *options.split()])
        shape, parallel, batch = (getattr(gpt_arguments, f"{what}_of")(args) for what in ("shape", "parallel", "batch"))
        (counted,) = gpt_workload(shape, parallel, batch).chunks
        ours, theirs = counted.activation_bytes, chunks[name].activation_bytes
        if name == "two layers together":  # which have one input, kept once
            ours, theirs = (sum(ours),), (sum(theirs),)
        assert ours == pytest.approx(theirs, abs=16), (name, ours, theirs)
        assert counted.recompute_bytes == pytest.approx(chunks[name].recompute_bytes, abs=16), name


def test_layers_save_what_kernels_of_a_gpu_save(chunks):
    # In halves of what one activation between two matrices takes, beside tensor parallelism of two ranks.
    saved = {name: round(chunks[name].activation_bytes[1] / (32 * 64), 1) for name in SAVE_MORE}
    assert saved["parts of sequences"] == pytest.approx(saved["usual"] - 4)  # inputs and outputs of two norms
    assert saved["unfused"] == pytest.approx(saved["usual"] + 2, abs=0.2)  # 2 bytes for each of 32 x 32, of two heads
    assert saved["context parallel"] == pytest.approx(saved["usual"] / 2, abs=0.1)  # half of the tokens
    assert saved["attention dropout"] == saved["usual"]  # the state of a random generator
    assert saved["hidden dropout"] == saved["usual"] + 2  # two masks of one byte an element
    assert saved["norms"] == pytest.approx(saved["usual"] + 2)  # the norms' copies of queries and keys


if ALL:  # two trainings, each with imports of its own

    def test_a_plan_made_without_it_is_trained_with_it(corpus_prefix, tmp_path):
        """Fused modules of a stand-in that computes, FusedAdam, all routes: equal to Megatron's own gather.
        tests/nightly/megatron trains whole checkouts by their default arguments."""
        options = [*BASE, "--bf16", "--untie-embeddings-and-output-weights", "--vocab-size", "259"]
        out = tmp_path / "workload.json"
        assert command_line("describe", "--out", out, *options, "--zero-stage", "3").returncode == 0
        schedule = tmp_path / "schedule.json"
        prepared(random.Random(2), workload_file.load(out), schedule, routes=("gpu", "cpu"))
        path = os.pathsep.join([str(MEGATRON), engine_stand_in.write_packages(tmp_path / "packages")])
        train = [*options, "--data-path", corpus_prefix, "--train-iters", "4", "--user-defined-schedule", schedule]
        for words in ("this was the reference", "equal to the reference"):
            check = ["--user-defined-schedule-check", tmp_path / "reference.json"]
            result = launch_training([*train, *check], nproc=2, env={"PYTHONPATH": path})
            assert result.returncode == 0 and words in result.stderr + result.stdout, result.stderr[-3000:]


class TrainedExperts(engine_stand_in.Initialized, GroupedLinear):
    """With values, as a training by the stand-in has them."""


def test_layers_of_experts_compute_each_on_its_own_tokens():
    layers = TrainedExperts(2, 8, 4, params_dtype=torch.float32)
    assert [name for name, _ in layers.named_parameters()] == ["weight0", "bias0", "weight1", "bias1"]
    x = torch.randn(5, 8)
    expected = torch.cat([x[:3] @ layers.weight0.T + layers.bias0, x[3:] @ layers.weight1.T + layers.bias1])
    torch.testing.assert_close(layers(x, [3, 2]), expected)
    out, biases = GroupedLinear(2, 8, 4, params_dtype=torch.float32, return_bias=True)(x, [0, 5])
    assert out.shape == (5, 4) and len(biases) == 2


@pytest.mark.parametrize(
    "make", [partial(TrainedExperts, 2), type("Trained", (engine_stand_in.Initialized, Linear), {})]
)
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
