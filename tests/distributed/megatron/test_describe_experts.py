"""Models with experts, as a checkout's own script builds them: which parameters are experts', and plans for them."""

import pytest
from made_checkout import made_checkout
from plans import command_line

from megatron_ext.workload import workload as workload_file

SCRIPT = """
import argparse, os
from megatron.training import global_vars
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_ext.megatron import gpt_arguments, gpt_model

parser = argparse.ArgumentParser(allow_abbrev=False)
gpt_arguments.add_gpt_arguments(parser)
for name in ("lr", "use-distributed-optimizer", "overlap-param-gather", "no-rope-fusion"):
    parser.add_argument(f"--{name}", action="store_true")
args = global_vars._GLOBAL_ARGS = parser.parse_args()
gpt_arguments.check(args, world_size=int(os.environ["WORLD_SIZE"]))
args.virtual_pipeline_model_parallel_size = args.microbatch_group_size_per_vp_stage = None
args.params_dtype = gpt_model.transformer_config(args).params_dtype
gpt_model.initialize_parallel(args)
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = gpt_model.transformer_config(args)
spec = get_gpt_decoder_block_spec(config, use_transformer_engine=args.transformer_impl == "transformer_engine")
first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
chunk = GPTModel(config, spec, 128, 64, first, last, share_embeddings_and_output_weights=False)
DistributedDataParallel(config, DistributedDataParallelConfig(), chunk)
raise AssertionError("the model is built, and training goes on")
"""

OPTIONS = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64 --swiglu
    --micro-batch-size 1 --vocab-size 128 --untie-embeddings-and-output-weights --disable-bias-linear --bf16
    --pipeline-model-parallel-size 2 --num-experts 8 --lr --use-distributed-optimizer --overlap-param-gather
    --transformer-impl transformer_engine --gpus-per-node 8 --moe-layer-freq ([0,1]*2) --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --moe-permute-fusion""".split()


@pytest.fixture(scope="module")
def describe(megatron_tree, tmp_path_factory):
    root = made_checkout(tmp_path_factory.mktemp("checkout"), megatron_tree, SCRIPT)

    def describe(out, *options):
        return command_line("describe", "--out", out, "--checkout", root, *OPTIONS, *options)

    return describe


def test_experts_are_marked_counted_and_planned(describe, tmp_path):
    out, table, plan = (tmp_path / name for name in ("w.json", "t.json", "s.json"))
    sizes = "--data-parallel-size 8 --expert-model-parallel-size 4 --moe-shared-expert-intermediate-size 32".split()
    result = describe(out, *sizes, "--zero-stage", "3")
    assert result.returncode == 0, result.stderr
    assert "8 experts over EP 4 x ETP 1, sharded among 2" in result.stdout
    work = workload_file.load(out)
    assert work.experts == workload_file.Experts(num_experts=8, router_topk=2)
    first = work.chunks[0]
    assert first.layer_kinds == ("embedding", "transformer", "moe")
    experts = {p.name.partition("layers.1.")[2]: p.shape for p in first.parameters if p.expert}
    matrices = {"linear_fc1": (2 * 128, 64), "linear_fc2": (64, 128)}
    assert experts == {
        f"mlp.experts.{name}.weight{number}": shape for name, shape in matrices.items() for number in (0, 1)
    }
    assert {"mlp.router.weight", "mlp.shared_experts.linear_fc1.weight"} <= {
        p.name.partition("layers.1.")[2] for p in first.parameters if not p.expert
    }
    # 2 copies of 64 tokens go into each matrix, and half of what leaves the first comes out of its activation.
    saved = dict(zip(first.layer_kinds, first.activation_bytes))
    assert saved["moe"] > saved["transformer"] + 2 * 64 * (64 + 2 * 128 + 128)
    estimate = ["cost", "estimate", "--hardware", "h100-ethernet", "--workload", out, "--out", table]
    assert command_line(*estimate, "--seq-length", "64").returncode == 0
    result = command_line("plan", "--cost-table", table, "--workload", out, "--out", plan)
    assert result.returncode == 0, result.stderr
    assert "of these, experts (sharded among 2 ranks): " in result.stdout


@pytest.mark.nightly
def test_padded_experts_save_their_capacity(describe, tmp_path):
    def saved(*options):
        result = describe(tmp_path / "w.json", "--data-parallel-size", "2", *options)
        assert result.returncode == 0, result.stderr
        first = workload_file.load(tmp_path / "w.json").chunks[0]
        return first.activation_bytes[first.layer_kinds.index("moe")]

    padded = "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor".split()
    # 64 more tokens go into both matrices and out of the first one.
    assert saved(*padded, "1.5") - saved(*padded, "1.0") >= 2 * 64 * (64 + 2 * 128 + 128)


@pytest.mark.nightly
def test_a_tensor_parallel_size_of_their_own(describe, tmp_path):
    sizes = "--data-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1".split()
    sizes.append("--sequence-parallel")
    result = describe(tmp_path / "w.json", *sizes, "--expert-model-parallel-size", "2")
    assert result.returncode == 0, result.stderr
    work = workload_file.load(tmp_path / "w.json")
    assert (work.parallel.etp, work.parallel.expert_dp) == (1, 2)
    shapes = {p.name.rpartition("experts.")[2]: p.shape for p in work.chunks[0].parameters if p.expert}
    assert shapes["linear_fc1.weight3"] == (2 * 128, 64) and len(shapes) == 2 * 4
