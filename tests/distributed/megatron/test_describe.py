"""A user's whole command line: read over, honoured, or refused by name; and read by a checkout's own script."""

import re
import sys
from pathlib import Path

import pytest
from made_checkout import made_checkout
from plans import LOCAL, command_line, made_up_table
from training import run, run_warm, verb
from variations import some

from megatron_ext import planner
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.ignored_options import parse
from megatron_ext.workload import workload as workload_file

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 8 --vocab-size 258 --untie-embeddings-and-output-weights
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --data-parallel-size 2""".split()
TRAINING = """--use-mcore-models --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --lr 6.0e-5
    --lr-decay-style cosine --lr-warmup-fraction .001 --weight-decay 0.1 --adam-beta1 0.9 --clip-grad 1.0
    --train-iters 500000
    --init-method-std 0.006 --attention-backend auto --data-path 0.3 one 0.7 two --split 949,50,1
    --tokenizer-type NullTokenizer
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --save there --load there --tensorboard-dir there
    --no-create-attention-mask-in-dataloader --num-workers 1 --ckpt-format torch_dist --timing-log-level 2
    --manual-gc""".split()


@pytest.fixture(scope="module")
def described(megatron_tree, tmp_path_factory):
    """``described(*options)``: the workload that the command writes."""
    folder = tmp_path_factory.mktemp("described")

    def described(*options) -> workload_file.Workload:
        result = command_line("describe", "--out", folder / "workload.json", *LOCAL, *options)
        assert result.returncode == 0, result.stderr
        return workload_file.load(folder / "workload.json")

    return described


def test_options_of_training_are_read_over(described):
    assert described(*MODEL, *TRAINING) == described(*MODEL)


def test_sizes_that_are_not_given_are_said(megatron_tree, tmp_path):
    out = tmp_path / "workload.json"
    few = "--num-layers 4 --hidden-size=64 --micro-batch-size 1 --data-parallel-size 2 --json".split()
    result = command_line("describe", "--out", out, *few)
    taken = "describe: not given, taken to be: --num-attention-heads 4, --seq-length 128, --vocab-size 259, "
    taken += "--transformer-impl transformer_engine, --hidden-dropout 0.1, --attention-dropout 0.1, --gpus-per-node 2\n"
    assert result.returncode == 0 and taken in result.stderr and "linear_qkv.layer_norm_weight" in out.read_text()
    said = ["--transformer-impl", "local", "--hidden-dropout", "0", "--attention-dropout", "0"]
    said += ["--gpus-per-node", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    result = command_line("describe", "--out", out, *MODEL, *said, "--fp8-format", "hybrid")
    assert (
        "not given" not in result.stderr
        and "Warning" not in result.stderr
        and "not counted: fp8 copies of weights" in result.stdout
    )


@pytest.mark.parametrize(
    "options, name, advice",
    [
        (["--lrr", "3"], "--lrr", "did you mean --lr?"),
        (["--frobnicate"], "--frobnicate", "--checkout DIR"),
        (["--pipeline-model-parallel-layout", "Ett|t*2L"], "--pipeline-model-parallel-layout", "--checkout DIR"),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp: cannot", "cannot be combined with a schedule"),
        (
            ["--num-distributed-optimizer-instances", "3"],
            "--num-distributed-optimizer-instances = 3",
            "does not divide the 2 data-parallel ranks",
        ),
        (["--optimizer", "muon"], "--optimizer", "cannot be combined with a schedule"),
        (
            ["--rampup-batch-size", "3", "1", "5859375"],
            "--rampup-batch-size = '3 1 5859375'",
            "reaches a batch of 3, which is not a multiple of micro-batch size 1 times data-parallel size 2",
        ),
        (["--num-query-groups", "3", "--group-query-attention"], "--num-query-groups", "does not divide"),
        (
            ["--num-virtual-stages-per-pipeline-rank", "2"],
            "--num-layers-per-virtual-pipeline-stage",
            "give one of them",
        ),
    ],
)
def test_what_is_refused_by_name(options, name, advice):
    with pytest.raises(InputError) as refused:
        parse([*MODEL, *TRAINING, *options])
    assert name in str(refused.value) and advice in str(refused.value)


def test_a_tokenizer_is_not_read_for_its_size():
    without_size = [word for word in MODEL if word not in ("--vocab-size", "258")]
    with pytest.raises(InputError, match="--vocab-file = 'v.json': is not read here; give --vocab-size"):
        parse([*without_size, "--vocab-file", "v.json", "--merge-file", "m.txt"])


@pytest.mark.parametrize(
    "options",
    [["--optimizer", "adam"], ["--context-parallel-size", "1"], ["--num-distributed-optimizer-instances", "1"]],
)
def test_values_that_change_nothing_are_accepted(options):
    parse([*MODEL, *TRAINING, *options])


SCRIPT = """
import argparse, os
from megatron.training import global_vars
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron_ext.megatron import gpt_arguments, gpt_model

parser = argparse.ArgumentParser(allow_abbrev=False)
gpt_arguments.add_gpt_arguments(parser)
parser.add_argument("--lr", type=float, required=True)
parser.set_defaults(hidden_dropout=0.1, attention_dropout=0.1)  # as in Megatron
parser.add_argument("--seed", type=int)
parser.add_argument("--use-distributed-optimizer", action="store_true")
parser.add_argument("--overlap-param-gather", action="store_true")
parser.add_argument("--use-megatron-fsdp", action="store_true")
parser.add_argument("--data-path", nargs="*")
parser.add_argument("--no-rope-fusion", action="store_true")
parser.add_argument("--skip-train", action="store_true")
parser.add_argument("--optimizer-cpu-offload", action="store_true")
parser.add_argument("--log-max-attention-logit", action="store_true")
parser.add_argument("--enable-hyper-connections", action="store_true")
parser.add_argument("--spec", nargs="*")
parser.add_argument("--log-progress", action="store_true")
parser.add_argument("--config-logger-dir", default="")
parser.add_argument("--high-priority-stream-groups", nargs="*")
parser.add_argument("--nccl-communicator-config-path")
parser.add_argument("--record-memory-history", action="store_true")
args = global_vars._GLOBAL_ARGS = parser.parse_args()
assert args.no_rope_fusion
gpt_arguments.check(args, world_size=int(os.environ["WORLD_SIZE"]))
assert args.lr < 1
assert not args.record_memory_history, "PyTorch for CPUs cannot record"
assert not args.log_progress and not args.config_logger_dir, "describing would write to these files"
assert args.seed != 2 and not args.log_max_attention_logit, "is only supported with TE >= 2.9.0."
if args.seed == 3:
    os.kill(os.getpid(), 9)
args.num_residual_streams = 4
args.virtual_pipeline_model_parallel_size = vp = args.num_virtual_stages_per_pipeline_rank
args.microbatch_group_size_per_vp_stage = None
args.params_dtype = gpt_model.transformer_config(args).params_dtype
parallel_state.initialize_model_parallel(
    tensor_model_parallel_size=args.tensor_model_parallel_size,
    pipeline_model_parallel_size=args.pipeline_model_parallel_size, virtual_pipeline_model_parallel_size=vp,
    high_priority_stream_groups=args.high_priority_stream_groups,
    nccl_communicator_config_path=args.nccl_communicator_config_path,
)
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = gpt_model.transformer_config(args)
if args.seed != 1 and not args.skip_train:
    chunks = gpt_model.build_chunks(args, config)
    assert all(parameter.is_meta for chunk in chunks for parameter in chunk.parameters())
    [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    raise AssertionError("the model is built, and training goes on")
"""
"""A pretrain_gpt.py of our own, in the shape of Megatron's."""


@pytest.fixture(scope="module")
def checkout(megatron_tree, tmp_path_factory):
    """A checkout: the pinned core, and a training package of our own."""
    return made_checkout(tmp_path_factory.mktemp("checkout"), megatron_tree, SCRIPT)


THEIRS = [
    *MODEL,
    *"--lr 0.1 --use-distributed-optimizer --overlap-param-gather --transformer-impl local --data-path one two".split(),
    *"--log-progress --config-logger-dir there".split(),
]


def test_a_checkout_reads_the_command_line_itself(checkout, described):
    before = sorted(checkout.rglob("*"))
    ours = """--zero-stage 3 --limit-whole-parameter-bytes 1000000 --gpus-per-node 4 --tensor-model-parallel-size 2
        --sequence-parallel""".split()
    theirs = described("--checkout", checkout, *THEIRS, *ours, "--user-defined-schedule", "s.json", "--skip-train")
    assert theirs == described(*MODEL, *ours)
    assert sorted(checkout.rglob("*")) == before


def test_options_that_change_no_layer_are_followed(checkout, described):
    """Ours of a checkout that is not patched; logging that needs another Transformer Engine than the stand-in; residual
    streams, all of which a stage sends (schedules.py of the branch dev); settings of NCCL's groups."""
    ours = "--user-defined-schedule-step-timeout 60 --delayed-parameter-update 1".split()
    theirs = "--bf16 --optimizer-cpu-offload --log-max-attention-logit --enable-hyper-connections".split()
    theirs += "--record-memory-history --high-priority-stream-groups dp_cp --nccl-communicator-config-path /no".split()
    found = described("--checkout", checkout, *THEIRS, *theirs, *ours)
    assert found.optimizer is not None and found.optimizer.delayed
    assert found.p2p_bytes == 4 * 64 * 64 * 2


def test_a_loop_without_megatrons_arguments_is_refused(checkout, tmp_path):
    (tmp_path / "bridge.py").write_text(SCRIPT.replace("args = global_vars._GLOBAL_ARGS =", "args ="))
    asked = ["describe", "--out", tmp_path / "w.json", "--checkout", checkout, "--entry", tmp_path / "bridge.py"]
    result = command_line(*asked, *THEIRS)
    said = "bridge.py: does not use megatron.training's arguments (Megatron-Bridge, NeMo): not supported\n"
    assert result.returncode == 2 and result.stderr.endswith(said), result.stderr


@pytest.mark.parametrize(
    "options, said",
    some(
        [
            (["--lr", "2"], "Megatron refuses the options: AssertionError: assert args.lr < 1"),
            (["--hidden-size", "65"], "--num-attention-heads = 4: does not divide --hidden-size 65"),
            (["--seed", "2"], "TE >= 2.9.0. (describing uses a stand-in for it, of an older version"),
            (["--use-megatron-fsdp"], "--use-megatron-fsdp: cannot be combined"),
            (["--data-parallel-size", "0"], "--data-parallel-size = 0: must be at least 1"),
            (["--lrr", "3"], "unrecognized arguments: --lrr 3; if a fork has them, give its checkout\n"),
            (["--spec", "our_layers.of_kind", "layers"], "there is no Python package our_layers, which this checkout"),
            (["--seed", "1"], "without building a model"),
            (["--seed", "3"], "pretrain_gpt.py ended with 137: no reason given"),
            (["--inprocess-restart"], "--inprocess-restart: cannot be combined"),
            (["--delayed-parameter-update", "1"], "--delayed-parameter-update = 1: needs an optimizer that steps on"),
        ],
        3,
    ),
)
def test_what_the_checkout_refuses_is_one_line(checkout, options, said):
    result = command_line("describe", "--out", "/nowhere/w.json", "--checkout", checkout, *THEIRS, *options)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and said in result.stderr, result.stderr


OWN = SCRIPT.replace("config = gpt", "gpt_model.get_gpt_layer_local_spec = own_layers.SPEC\nconfig = gpt").replace(
    "chunks = gpt", "config.qk_layernorm = True; chunks = gpt"
)
"""A script of one's own, outside of the checkout: layers with a norm on queries and keys, from a module beside it."""

OWN_LAYERS = """
from functools import partial
from megatron_ext.megatron.gpt_model import get_gpt_layer_local_spec
SPEC = partial(get_gpt_layer_local_spec, qk_layernorm=True)
"""


def test_a_script_of_ones_own_builds_what_is_described_and_planned(checkout, described, tmp_path):
    (tmp_path / "train_own.py").write_text("import own_layers\n" + OWN)
    (tmp_path / "own_layers.py").write_text(OWN_LAYERS)
    own = described("--checkout", checkout, "--entry", tmp_path / "train_own.py", *THEIRS)
    names = {p.name.rpartition("self_attention.")[2] for chunk in own.chunks for p in chunk.parameters}
    assert {"q_layernorm.weight", "k_layernorm.weight"} <= names
    assert planner.plan(own, made_up_table()).predicted is not None


@pytest.mark.parametrize(
    "entry, said",
    [
        ("nowhere.py", "--entry = 'nowhere.py': no such file, neither here nor in the checkout"),
        ("pretrain_gpt.py", "--entry = 'pretrain_gpt.py': needs --checkout"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(checkout, entry, said):
    where = ["--checkout", checkout] if "neither" in said else []
    result = command_line("describe", "--out", "/nowhere/w.json", *where, "--entry", entry, *THEIRS)
    assert result.returncode == 2 and said in result.stderr, result.stderr


def test_a_checkout_that_hangs_at_import_is_given_up(tmp_path):
    """Its own ``sitecustomize`` shortens the time that it has."""
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "pretrain_gpt.py").write_text("import time; time.sleep(100)")
    (tmp_path / "sitecustomize.py").write_text(
        "import faulthandler as f; later = f.dump_traceback_later\n"
        "f.dump_traceback_later = lambda seconds, **how: later(seconds / 300, **how)\n"
    )
    result = run(verb("describe", "--out", tmp_path / "w.json", "--checkout", tmp_path, *THEIRS))
    assert result.returncode == 2 and result.stderr.count("megatron-ext: ") == 1, result.stderr
    assert "pretrain_gpt.py: importing Megatron or building a model takes more than 300 s" in result.stderr


def test_a_core_only_tree_has_no_script(tmp_path):
    result = command_line("describe", "--out", "/nowhere/w.json", "--checkout", tmp_path, *THEIRS)
    assert result.returncode == 2 and "has no pretrain_gpt.py" in result.stderr


def test_options_of_the_example_that_change_no_parameter_are_read_over():
    """The main job hands them to describe too, by EXTRA."""
    from megatron_ext.megatron.ignored_options import FLAGS, LISTS, VALUES

    example = Path(__file__).parents[3] / "examples/pretrain_gpt_hybrid.py"
    options = re.findall(r'training.add_argument\("--([a-z-]+)"', example.read_text())
    assert len(options) > 15 and set(options) <= {*FLAGS, *VALUES, *LISTS}


SELECTIVE_AND_FULL = """
import sys
from megatron_ext.megatron import cpu_compat
cpu_compat.install()
from megatron_ext.megatron.describe_model import describe_options
from megatron_ext.megatron.ignored_options import parse
by = "--recompute-granularity"
full = [by, "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
ways = {"none": [], "full": full, "pairs": [*full[:-1], "2"], "selective": [by, "selective"]}
kept = {}
for name, options in ways.items():
    (chunk,) = describe_options(parse([*sys.argv[1:], *options])).chunks
    kept[name] = sum(chunk.activation_bytes)
assert kept["pairs"] < kept["full"] < kept["selective"] < kept["none"], kept
"""


def test_recompute_is_counted_as_it_is_set(megatron_tree, tmp_path):
    """Four models described by one process: what was counted for one is not the other's."""
    small = MODEL[: MODEL.index("--pipeline-model-parallel-size")]
    (tmp_path / "ways.py").write_text(SELECTIVE_AND_FULL)
    small += ["--transformer-impl", "local", "--hidden-dropout", "0.1"]
    result = run_warm([sys.executable, str(tmp_path / "ways.py"), *small])
    assert result.returncode == 0, result.stderr
