"""Command lines of public training scripts, cut to tiny sizes: described and planned as they are, or refused by name.

A checkout's own parser reads them: of MEGATRON_MIRROR, or that of the package index, with a script of ours.
"""

from pathlib import Path

import pytest
from adopting_page import RELEASE, add_script, make_checkout
from msgspec.structs import replace
from plans import made_up_table
from public_scripts import SCRIPTS, Script, command_line
from released import MIRROR
from variations import some
from warm_python import warm_children

from megatron_ext import planner
from megatron_ext.cost.cost_table import Compute, ExpertCurves
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import describe_from_checkout
from megatron_ext.megatron.describe_from_checkout import describe_command_line
from megatron_ext.megatron.gpt_arguments import batch_of, parallel_of, shape_of
from megatron_ext.megatron.ignored_options import parse
from megatron_ext.workload.gpt_shapes import gpt_workload
from megatron_ext.workload.workload_text import not_counted

OF_THE_CHECKOUT = ("pretrain_mamba.py", "pretrain_t5.py", "pretrain_bert.py")
"""Entry scripts that a clone has and the package has not."""

TRIED = [script for script in SCRIPTS if MIRROR or script.entry not in OF_THE_CHECKOUT]
TRIED = [script for script in TRIED if script.refused not in ("T5Model", "BertModel", "LLaVAModel")]
FIRST = [script for script in TRIED if "llama3_1" in script.path or "rampup" in script.options]

TRAINING = "--ckpt-format torch_dist --async-save --use-persistent-ckpt-worker".split()
"""What only training needs: environment variables, a package and a process of its own."""


@pytest.fixture(autouse=True, scope="module")
def torch_is_imported():
    with warm_children(describe_from_checkout, "torch"):
        yield


@pytest.fixture(scope="session")
def clone(made_once, request) -> Path:
    cache = getattr(request.config, "cache", None)

    def make(folder: Path) -> None:
        make_checkout(folder, folder / "core" if cache is None else cache.mkdir("megatron-core"))
        add_script(folder / "Megatron-LM")

    return made_once(f"public-scripts-{RELEASE}", make) / "Megatron-LM"


def name_of(script: Script) -> str:
    return f"{script.project.partition('/')[0]} {Path(script.path).stem}"


@pytest.mark.parametrize("script", some([*FIRST[::3], *(s for s in TRIED if s not in FIRST[::3])], 1), ids=name_of)
def test_a_public_script_is_described_and_planned(clone, script):
    entry = script.entry if script.entry in OF_THE_CHECKOUT else None
    options = [*command_line(script), *TRAINING, "--data-parallel-size", "4" if script.experts else "2"]
    if "--cross-entropy-loss-fusion" not in options:
        options.append("--deterministic-mode")
    if script.refused:
        with pytest.raises(InputError, match=script.refused):
            describe_command_line(clone, options, entry)
        return
    workload = describe_command_line(clone, options, entry).workload
    # Only a clone's script builds layers that predict further tokens.
    assert not_counted(workload) is None or ("--mtp-num-layers" in options and not MIRROR)
    assert bool(workload.ramp) == ("--rampup-batch-size" in options)
    kinds = {kind for chunk in workload.chunks for kind in chunk.layer_kinds}
    table = made_up_table()
    compute = tuple(Compute(layer_kind=kind, forward_us=200, backward_us=400) for kind in sorted(kinds))
    table = replace(table, compute=compute, reduce=table.routes.gpu)
    if script.experts:
        ranks = workload.parallel.ranks_of(True)
        table = replace(table, experts=ExpertCurves(ranks=ranks, gpu=table.routes.gpu, reduce=table.routes.gpu))
    planned = planner.plan(workload, table)
    assert planned.predicted is not None
    assert len(planner.plan_ramp(planned, workload, table)) == len(workload.ramp)


LLAMA = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --bf16
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0
    --attention-dropout 0 --position-embedding-type rope --micro-batch-size 1 --global-batch-size 4 --vocab-size 1023
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --train-iters 1 --lr 1
    --data-parallel-size 2 --transformer-impl transformer_engine"""


@pytest.mark.parametrize("unfused", some(["", "--no-bias-swiglu-fusion"], 1))
def test_layers_of_a_checkout_save_what_fit_counts(clone, unfused):
    options = f"{LLAMA} {unfused}".split()
    mocked = [*options, "--mock-data", "--tokenizer-type", "NullTokenizer"]
    (described,) = describe_command_line(clone, mocked).workload.chunks
    args = parse(options)
    (counted,) = gpt_workload(shape_of(args), parallel_of(args), batch_of(args), zero_stage=1).chunks
    assert sum(described.activation_bytes) == pytest.approx(sum(counted.activation_bytes), rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_that_have_to_stay_whole(clone, deferred):
    options = f"{LLAMA} --mock-data --tokenizer-type NullTokenizer --mtp-num-layers 1".split()
    if not deferred:
        assert describe_command_line(clone, options).workload.keeps_gradients
        return
    with pytest.raises(InputError, match="--defer-embedding-wgrad-compute: cannot be combined"):
        describe_command_line(clone, [*options, "--defer-embedding-wgrad-compute"])
