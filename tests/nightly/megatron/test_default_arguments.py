"""Real checkouts train by their default arguments, Transformer Engine's stand-in under them, scheduled as without.

Needs MEGATRON_MIRROR, a clone of Megatron-LM with its tags. What Megatron turns on by default stays on: fused modules,
FusedAdam, weight gradients that are added into ``main_grad`` inside backward.
"""

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import engine_stand_in
import faults
import pytest
from default_arguments import CASES, EXPERTS, PIPELINE
from draw_schedule import GRADIENTS, never_whole, prepared, states_on_device, states_on_drive
from places import HELPERS, ROOT
from released import MIRROR

from megatron_ext import checkout
from megatron_ext.cost import cost_table
from megatron_ext.megatron.describe_from_checkout import describe_command_line
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.bucket_layout import shard_parts
from megatron_ext.workload.workload import Workload
from megatron_ext.workload.workload_text import not_counted

SIZES = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --train-iters 3 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --eval-interval 1000
    --eval-iters 1 --log-interval 1 --num-workers 0 --bf16""".split()
PROCESSES = 4


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """``tree(release)``: a patched checkout."""
    trees = {}

    def tree(release: str) -> Path:
        assert MIRROR, "set MEGATRON_MIRROR to a clone of Megatron-LM"
        if release not in trees:
            trees[release] = place = tmp_path_factory.mktemp("trees") / release
            branch = release if release == "dev" else f"core_v{release}"
            subprocess.run(["git", "clone", "-q", "--depth=1", "-b", branch, f"file://{MIRROR}", place], check=True)
            checkout.apply(place)
        return trees[release]

    return tree


def drawn(seed: int, workload: Workload, path: Path, kinds: tuple) -> Schedule:
    """The first schedule, from ``seed`` on, of three groups or more, with gradients that come and go if they may."""
    for number in itertools.count(seed):
        schedule = prepared(random.Random(number), workload, path, routes=("gpu", "cpu"), gradients=kinds)
        come_and_go = any(group.gradients for group in schedule.groups)
        if len(schedule.groups) > 2 and (come_and_go or len(kinds) == 1 or workload.zero_stage == 1):
            return schedule
    raise AssertionError


class Trainer:
    """Trains one case in a directory of its own."""

    def __init__(self, tree: Path, folder: Path, options: list[str], zero_stage: int, seed: int, engine: bool):
        self.tree, self.folder = tree, folder
        self.options = [*SIZES, *options]
        cut = 1 + ("--pipeline-model-parallel-size" in options or "--tensor-model-parallel-size" in options)
        replicas = PROCESSES // cut // (1 + ("--context-parallel-size" in options))
        own = ["--data-parallel-size", str(replicas), "--zero-stage", str(zero_stage)]
        workload = describe_command_line(tree, [*self.options, *own]).workload
        assert not_counted(workload) is None
        self.workload = workload
        # Layers that predict further tokens use weights a second time: gradients that come and go are refused there.
        kinds = (None,) if "--mtp-num-layers" in options else GRADIENTS
        self.schedule = drawn(seed, workload, folder / "schedule.json", kinds)
        numels = {p.name: math.prod(p.shape) for chunk in workload.chunks for p in chunk.parameters}
        parts = [shard_parts([numels[name] for name in g.parameters], g.ranks) for g in self.schedule.groups]
        self.held = [[*map(sum, of_ranks)] for of_ranks in parts]
        packages = engine_stand_in.write_packages(folder / "packages", engine=engine)
        path = os.pathsep.join([str(tree), str(ROOT), packages])
        own = {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | own | {"PYTHONWARNINGS": "ignore"}

    def train(
        self, *more: str, check: str = "reference.json", scheduled: bool = True, **environment: str
    ) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "megatron_ext.launch.launcher", "--nproc-per-node", str(PROCESSES), "--fork"]
        command += [str(HELPERS / "train_checkout.py"), f"{self.tree}/pretrain_gpt.py", *self.options, *more]
        if scheduled:
            command += ["--user-defined-schedule", str(self.folder / "schedule.json")]
            command += ["--user-defined-schedule-check", str(self.folder / check)]
        return subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, cwd=self.folder, timeout=400
        )


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_trains_as_megatron_does(tree, tmp_path, case):
    release, options, zero_stage, seed = CASES[case]
    trainer = Trainer(tree(release), tmp_path, options.split(), zero_stage, seed, engine=case != "apex")
    for words in ("this was the reference", "equal to the reference"):
        result = trainer.train()
        said = result.stdout + result.stderr
        assert result.returncode == 0 and words in said, said[-4000:]
    assert "gradient_accumulation_fusion .................... True" in said
    assert "number of nan iterations:   0" in said


def saved_and_loaded(trainer, saved: Path, *how: str) -> tuple[list[str], str]:
    """Train, save and load by Megatron's own gather and by the schedule; the options to load, and what the last run
    printed."""
    save = ["--save", str(saved), "--save-interval", "2", "--ckpt-format", "torch_dist", *how]
    load = ["--load", str(saved), "--ckpt-format", "torch_dist", "--exit-interval", "6"]
    load += ["--train-iters", "6", "--override-opt_param-scheduler"]  # it was to end at the third
    said = ""
    for more, check, words in (
        ([], "first.json", "this was the reference"),
        (save, "first.json", "equal to the reference"),
        (load, "second.json", "this was the reference"),
        (load, "second.json", "equal to the reference"),
    ):
        result = trainer.train(*more, check=check)
        said = result.stdout + result.stderr
        assert result.returncode == 0 and words in said, said[-4000:]
    return load, said


@pytest.mark.parametrize(
    "how",
    [[], ["--async-save"], ["--dist-ckpt-optim-fully-reshardable"]],
    ids=["at once", "asynchronous", "fully reshardable"],
)
def test_distributed_checkpoints_go_on_as_they_would_have(tree, tmp_path, how):
    """Saved by the schedule in the middle, loaded by the schedule and by Megatron's own gather: equal again. An
    asynchronous save has copied what it needs before the next iteration frees it. A group of the schedule is so small
    that a rank's shard of it is padding alone.
    """
    trainer = Trainer(tree("0.17.1"), tmp_path, PIPELINE.split(), 3, 12, engine=True)
    assert any(0 in held for held in trainer.held)
    load, said = saved_and_loaded(trainer, tmp_path / "saved", *how)
    assert "iteration        4/       6" in said and "iteration        3/       6" not in said
    if "--dist-ckpt-optim-fully-reshardable" in how:
        result = trainer.train(*load, scheduled=False)
        said = result.stdout + result.stderr
        assert result.returncode == 0 and "iteration        6/       6" in said, said[-4000:]


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"iteration +[456]/ .*? lm loss: (\S+)", said)]


@pytest.mark.parametrize("how", [[], ["--dist-ckpt-optim-fully-reshardable"]], ids=["as it is", "fully reshardable"])
def test_experts_go_on_as_they_would_have(tree, tmp_path, how):
    """Two ranks share the shards of the same experts. On more expert-parallel ranks, the checkpoint that can be spread
    anew trains by a schedule as by Megatron's own gather, from the same model; the other one is refused by name.
    """
    trainer = Trainer(tree("0.17.1"), tmp_path, EXPERTS.split(), 3, 16, engine=True)
    assert {group.ranks for group in trainer.schedule.groups} == {2, 4}
    load, said = saved_and_loaded(trainer, tmp_path / "saved", *how)
    assert "iteration        4/       6" in said and "iteration        3/       6" not in said

    (tmp_path / "four").mkdir()
    options = EXPERTS.replace("--expert-model-parallel-size 2", "--expert-model-parallel-size 4")
    other = Trainer(tree("0.17.1"), tmp_path / "four", options.split(), 3, 16, engine=True)
    if how:
        for words in ("this was the reference", "equal to the reference"):
            result = other.train(*load)
            anew = result.stdout + result.stderr
            assert result.returncode == 0 and words in anew, anew[-4000:]
        assert len(losses(said)) == 3 and losses(anew) == pytest.approx(losses(said), rel=1e-3)
        files = (tmp_path / "second.json", other.folder / "reference.json")
        here, there = (float.fromhex(json.loads(file.read_text())["grad_norms"][0]) for file in files)
        assert there == pytest.approx(here, rel=1e-5)  # before an update has enlarged what differs in the last bits
    else:
        result = other.train(*load)
        anew = result.stdout + result.stderr
        first = next(i for i, group in enumerate(other.schedule.groups) if group.ranks == 1)
        assert result.returncode == 2, anew[-4000:]
        assert f"--expert-model-parallel-size = 4: {tmp_path}/saved was saved with 2" in anew
        assert f"(groups[{first}] and others)" in anew and "iteration        4/" not in anew


def test_instances_of_the_optimizer_go_on_as_they_would_have(tree, tmp_path):
    """Two ranks share shards. Megatron loads the checkpoint with one instance, too: it goes on from the same model."""
    trainer = Trainer(tree("0.17.1"), tmp_path, CASES["two instances of the optimizer"][1].split(), 3, 17, engine=True)
    assert {group.ranks for group in trainer.schedule.groups} == {2}
    load, said = saved_and_loaded(trainer, tmp_path / "saved")
    (tmp_path / "one").mkdir()
    one = Trainer(tree("0.17.1"), tmp_path / "one", [], 3, 17, engine=True)
    for words in ("this was the reference", "equal to the reference"):
        result = one.train(*load)
        anew = result.stdout + result.stderr
        assert result.returncode == 0 and words in anew, anew[-4000:]
    assert len(losses(said)) == 3 and losses(anew) == pytest.approx(losses(said), rel=1e-3)


def test_states_that_instances_exchange_as_they_load_reach_the_host(tree, tmp_path):
    """They go on as where each instance reads all for itself."""
    options = f"{CASES['two instances of the optimizer'][1]} --optimizer-cpu-offload --use-precision-aware-optimizer"
    options = [*options.split(), "--user-defined-schedule-nvme-path", str(tmp_path)]
    trainer = Trainer(tree("0.17.1"), tmp_path, options, 3, 17, engine=True)
    assert {"nvme"} < {group.states_rest for group in trainer.schedule.groups}
    load, said = saved_and_loaded(trainer, tmp_path / "saved")
    for words in ("this was the reference", "equal to the reference"):
        result = trainer.train(*load, "--ckpt-fully-parallel-load", check="third.json")
        exchanged = result.stdout + result.stderr
        assert result.returncode == 0 and words in exchanged, exchanged[-4000:]
    assert len(losses(said)) == 3 and losses(exchanged) == losses(said)


@pytest.mark.parametrize(
    ("options", "seed"),
    [(PIPELINE, 15), ("--grad-reduce-in-bf16", 39)],
    ids=["pipeline", "no pipeline, gradients in 16 bits"],
)
def test_distributed_checkpoints_of_states_on_the_drive_and_on_the_device(tree, tmp_path, options, seed):
    """Saved by the schedule, in the middle and behind its end, loaded by it and by Megatron's own gather with states of
    the drive in memory: equal."""
    options = [*options.split(), "--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    trainer = Trainer(tree("0.17.1"), tmp_path, options, 3, seed, engine=True)
    every = list(range(len(trainer.schedule.groups)))
    able = states_on_device(trainer.schedule, every)
    stepped = [i for i in every if able.groups[i].states_rest == "device"][::2]
    on_drive = [i for i in every if i % 4 != 3 and i not in stepped]
    schedule = states_on_device(states_on_drive(trainer.schedule, trainer.workload, on_drive, slots=3), stepped)
    assert {group.states_rest for group in schedule.groups} >= {"nvme", "device"}
    schedule_file.save(tmp_path / "schedule.json", validate.validate(schedule))
    (tmp_path / "drive").mkdir()
    drive = ["--user-defined-schedule-nvme-path", str(tmp_path / "drive")]
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "2", "--ckpt-format", "torch_dist"]
    load = ["--load", str(tmp_path / "saved"), "--ckpt-format", "torch_dist", "--exit-interval", "6"]
    load += ["--train-iters", "6", "--override-opt_param-scheduler"]
    for more, check, words in (
        ([], "first.json", "this was the reference"),
        (save, "first.json", "equal to the reference"),
        (load, "second.json", "this was the reference"),
        (load, "second.json", "equal to the reference"),
    ):
        result = trainer.train(*more, *drive, check=check)
        said = result.stdout + result.stderr
        assert result.returncode == 0 and words in said, said[-4000:]
    assert os.listdir(tmp_path / "drive") == []


@pytest.mark.parametrize("options", [PIPELINE, "--optimizer-cpu-offload --use-precision-aware-optimizer"])
def test_a_model_that_never_fits_whole_is_saved_and_loaded_by_groups(tree, tmp_path, options):
    """Tied embeddings, two chunks a rank, an evaluation and a checkpoint behind the end of training."""
    trainer = Trainer(tree("0.16.1"), tmp_path, options.split(), 3, 12, engine=True)
    never_whole(random.Random(1), trainer.workload, tmp_path / "schedule.json")
    _, said = saved_and_loaded(trainer, tmp_path / "saved")
    assert "evaluation and checkpoints bring them group by group" in said


def test_experts_go_from_their_arguments_to_a_checked_training(tree, tmp_path):
    """``prepare`` describes, measures and plans; one expert-parallel rank sends its tokens to the other."""
    trainer = Trainer(tree("0.16.1"), tmp_path, EXPERTS.split(), 3, 16, engine=True)
    words = [sys.executable, "-m", "megatron_ext", "prepare", "--checkout", str(trainer.tree), "--out", str(tmp_path)]
    sizes = ["--data-parallel-size", "4", "--zero-stage", "3", "--seconds", "15"]
    done = subprocess.run(
        [*words, *sizes, *trainer.options], env=trainer.environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "of these, experts (sharded among 2 ranks): " in done.stdout, (
        done.stdout + done.stderr
    )
    table = cost_table.load(tmp_path / "cost_table.json")
    assert {"transformer", "moe"} < {row.layer_kind for row in table.compute} and table.experts.ranks == 2
    for words in ("this was the reference", "equal to the reference"):
        result = trainer.train()
        said = result.stdout + result.stderr
        assert result.returncode == 0 and words in said, said[-4000:]


def test_a_missing_gather_is_seen(tree, tmp_path):
    """The control: one group that is never gathered makes another training."""
    trainer = Trainer(tree("0.17.1"), tmp_path, PIPELINE.split(), 3, 3, engine=True)
    assert trainer.train().returncode == 0
    result = trainer.train(**faults.asked("stale_group=0", trainer.environment["PYTHONPATH"]))
    assert result.returncode != 0 and "NOT EQUAL" in result.stdout + result.stderr
