"""Advice from model options and a machine's name: answers, intervals, memory, neighbours; without torch or Megatron."""

import json
import sys

import pytest

from megatron_ext.cli.main import main
from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import advice
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.quick_plan import FewRounds, quick_plans
from megatron_ext.planner.stock import OVERLAPPED
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import Limits

LLAMA_7B = GptShape(
    32, 4096, 11008, 32, 32, 32000, 128, gated=True, rms_norm=True, linear_bias=False, qkv_bias=False, tied=False
)
OPTIONS = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096
    --vocab-size 32000 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --use-rotary-position-embeddings --bf16 --micro-batch-size 1 --global-batch-size 64""".split()


def setting(*, pp=1, vp=1, dp=8, microbatches=4, zero_stage=1, recompute=None, shape=LLAMA_7B) -> advice.Setting:
    parallel = Parallel.of(pp=pp, vp=vp, dp=dp, microbatches=microbatches, gpus_per_node=8)
    return advice.Setting(shape, parallel, MicroBatch(4096, recompute=recompute), zero_stage)


def test_where_compute_is_the_limit_it_does_not_help():
    found = advice.advise(setting(pp=2, vp=2, dp=4, microbatches=64), hardware_sheet.load("h100-nvlink"))
    assert found.outcome.answer == "does not help" and found.outcome.interval.high < 0.01
    busy = found.outcome.best.times.busy_us
    assert max(busy, key=busy.get) == "compute" and found.outcome.short is None


def test_without_nvlink_and_with_little_memory_host_copies_help():
    found = advice.advise(setting(zero_stage=3, recompute="full"), hardware_sheet.load("l40s"))
    outcome = found.outcome
    assert outcome.gain > 0.1 and outcome.gain > 1 - outcome.gathers.times.iteration_time_us
    assert found.draws == advice.MOST_DRAWS
    assert outcome.best.times.exposed_us < outcome.other.times.exposed_us
    # Nobody has measured it: the interval is wide, and holds what the sheet's own values say.
    assert (
        found.outcome.interval.high - found.outcome.interval.low > 0.1
        and found.outcome.interval.low <= outcome.gain <= found.outcome.interval.high
    )
    # Another setting is judged on the same machines: it has an interval of its own.
    other = found.changed["--micro-batch-size 2"]
    assert isinstance(other, advice.Outcome) and other.interval.low < other.gain < other.interval.high
    assert found.iteration_us.high > 1.3 * found.iteration_us.low
    assert outcome.memory.host_bytes["host_copies"] > 0
    assert outcome.memory.device_total_bytes <= advice.DEVICE_PART * 48e9


def test_memory_by_hand():
    """Zero stage 1: whole parameters and gradients 2 + 4 bytes; main parameters and moments 4 + 8 over the replicas."""
    outcome = advice.judged(setting(), hardware_sheet.load("h100-nvlink"))
    numel, kinds = LLAMA_7B.numel, outcome.memory.device_bytes
    assert kinds["whole_parameters"] == pytest.approx(2 * numel, rel=1e-3)
    assert kinds["gradients"] == pytest.approx(4 * numel, rel=1e-3)
    assert kinds["main_parameters"] + kinds["optimizer_states"] == pytest.approx(12 * numel / 8, rel=1e-3)
    layer = 2 * 4096 * (4 * 4096 + (4 * 4096 + 3 * 11008))  # norms' and matrices' inputs, q, k, v, gate and its product
    output = 2 * 2 * 4096 * 4096 + 4 * 4096 * 32000
    assert kinds["activations"] == pytest.approx(32 * layer + output, rel=1e-3)


def test_a_limit_of_nothing_is_a_limit():
    none = setting()._replace(limits=Limits(device_bytes=0))
    assert none.device_bytes(hardware_sheet.load("l40s")) == 0


def test_what_does_not_fit_is_said():
    rtx = hardware_sheet.load("rtx4090")
    outcome = advice.judged(setting(), rtx)
    assert outcome.short is not None and "GiB) short" in outcome.short
    limit = int(advice.DEVICE_PART * rtx.device.memory_bytes.value)
    with pytest.raises(InputError, match=f"limits.device_bytes = {limit}: cannot fit: .* GiB. short"):
        advice.judged(setting(zero_stage=3), rtx)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_few_rounds_of_micro_batches_tell_the_time_of_many(zero_stage):
    sheet = hardware_sheet.load("l40s")
    many = setting(pp=2, vp=2, dp=4, microbatches=32, zero_stage=zero_stage, recompute="full")
    work = many.workload(sheet)
    table = estimate(sheet, work, many.batch)
    rounds = FewRounds(work)
    assert len(rounds.parts) == 2 and rounds.steps < 2 * 4 * 32 / 2
    stock = next(plan for plan in quick_plans(rounds, rounds.timings(table)) if plan.name == "all-gpu")
    whole = evaluate(work, table, bound_us=0.0)
    assert stock.times.iteration_time_us == pytest.approx(whole.iteration_time_us, rel=0.01)
    assert stock.times.busy_us["compute"] == pytest.approx(whole.busy_us["compute"], rel=0.01)


def test_neighbours_train_the_same_batch_on_the_same_gpus():
    given = setting(pp=2, vp=2, dp=4, microbatches=16)
    found = dict(advice.neighbours(given))
    assert set(found) == {
        "--zero-stage 3",
        "--micro-batch-size 2",
        "--pipeline-model-parallel-size 1",
        "--pipeline-model-parallel-size 4",
        "--num-virtual-stages-per-pipeline-rank 1",
        "--num-virtual-stages-per-pipeline-rank 4",
        "--recompute-granularity full",
    }
    for name, other in found.items():
        parallel = other.parallel
        samples = parallel.num_microbatches * other.batch.micro_batch_size * parallel.dp
        assert samples == 64 and parallel.world_size == 8 and other != given, name


def test_large_workloads_try_fewer_settings_and_say_so(monkeypatch):
    monkeypatch.setattr(advice, "EFFORT", 100)
    found = advice.advise(setting(), hardware_sheet.load("h100-nvlink"))
    assert found.draws == advice.FEWEST_DRAWS and len(found.changed) == 2
    assert "--zero-stage 3" in found.changed and "--recompute-granularity full" in found.left_out


@pytest.fixture
def without_torch():
    """The package imported anew, where neither torch nor Megatron can be imported."""
    ours = {name: sys.modules[name] for name in list(sys.modules) if name.partition(".")[0] == "megatron_ext"}
    hidden = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("torch", "megatron")
    }
    for name in ours:
        del sys.modules[name]
    sys.modules["torch"] = sys.modules["megatron"] = None
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron_ext", "torch", "megatron")]:
        del sys.modules[name]
    sys.modules.update(ours | hidden)


def test_the_command_on_a_laptop(without_torch, capsys, tmp_path):
    from megatron_ext.cli.main import main as command

    picture = tmp_path / "advice.png"
    assert command(["advise", "--hardware", "l40s", "--picture", str(picture), "--json", "--", *OPTIONS]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert said["estimated"] and said["answer"] in ("helps", "does not help", "cannot tell")
    assert said["gain_low"] <= said["gain"] <= said["gain_high"] and said["compared_with"] == OVERLAPPED
    assert {"whole_parameters", "gradients", "optimizer_states", "activations"} <= set(said["memory"]["device_bytes"])
    assert said["settings"]["--micro-batch-size 2"]["iteration_time_us"] > 0
    assert "ESTIMATED from a data sheet" in err and len(err.splitlines()) <= 24
    # A plan that does not fit is said where the answer is, beside what a run may fill.
    assert f"does not fit; {said['answer']}: gain over {OVERLAPPED}" in err
    parts = f"of it by host copies {said['gain_of_routes']:.1%}, by timing {said['gain'] - said['gain_of_routes']:.1%}"
    assert parts in err
    assert "of 42114.3 MiB that a run may fill of a device's 45776; DOES NOT FIT: " in err
    (refused,) = [line for line in err.splitlines() if line.startswith("--zero-stage 3")]
    assert refused.split(maxsplit=2)[2].endswith("bytes") and "cannot fit: pipeline rank 0 holds at least" in refused
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hardware", "h1000"], "hardware = 'h1000': is neither a file nor a known machine; known: a100-nvlink"),
        (["--hardware", "h100-nvlink", "--nodes", "2"], "nodes = 2: one node, 8 x H100 SXM, NVLink has no network"),
        (["--hardware", "l40s", "--picture", "/proc/nowhere/a.png"], "/proc/nowhere/a.png: cannot be written"),
        (["--hardware", "l40s", "--", "--hiden-size", "8"], "'--hiden-size': is not an option that advise knows; did"),
        (["--hardware", "l40s", "--", "--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size = 3"),
        (
            ["--hardware", "l40s", "--", "--data-parallel-size", "4"],
            "nodes = 1: gives 8 GPUs; the parallel sizes need 4",
        ),
        (["--hardware", "l40s", "--", "--num-experts", "8"], "then `cost estimate` and `plan`"),
        (["--hardware", "l40s", "--nodes", "0"], "--nodes"),
    ],
)
def test_wrong_options_are_refused_in_one_line(capsys, arguments, message):
    assert main(["advise", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said
