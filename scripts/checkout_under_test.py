"""One release of Megatron-LM under test: patch, train, compare, revert.

Losses (also of evaluation), gradient norms, parameters and optimizer states are compared; the latter
two are read from checkpoints. Used by test_checkouts.py and edited_checkouts.py.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from megatron_ext import checkout
from megatron_ext.checkout.hook_table import FILES
from megatron_ext.checkout.verify import hook_numbers
from megatron_ext.formats.errors import InputError

BUILT_BY_MEGATRON = re.compile(r"helpers_cpp.*\.so$")
"""The dataset helper that Megatron compiles into its own tree at its first training."""

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --vocab-size 258
    --attention-dropout 0.1 --hidden-dropout 0.1 --untie-embeddings-and-output-weights""".split()
TRAIN = """--use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --clip-grad 1.0 --seed 1234
    --tokenizer-type NullTokenizer --split 98,2,0 --num-workers 0 --no-create-attention-mask-in-dataloader
    --eval-interval 1000 --eval-iters 1 --log-interval 1 --ckpt-format torch --distributed-backend gloo
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion""".split()
LAYOUTS = {
    "interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1".split(),
    "1f1b": "--pipeline-model-parallel-size 2".split(),
    "no_pipeline": "--pipeline-model-parallel-size 1".split(),
    "tensor": "--tensor-model-parallel-size 2".split(),
}
"""Megatron's three orders of steps, and tensor parallelism, each on :data:`PROCESSES` processes."""
PROCESSES = 4
DATA_PARALLEL = {"interleaved": 2, "1f1b": 2, "no_pipeline": 4, "tensor": 2}


class Failed(Exception):
    """A step failed. The text goes to the table's footnotes."""


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Environment of a program that uses the tree."""
    path = f"{tree}{os.pathsep}{Path(checkout.__file__).parents[2]}"
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | more


def run(command: list, log: Path, *, tree: Path, timeout_s: float = 600, **more: str) -> str:
    """Run a command and return its output, which is also written to ``log``.

    Raises:
        Failed: the command ended with an error. The text holds the most telling line of its output.
    """
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(tree, **more),
        cwd=log.parent,
    ) as process:
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            process.terminate()  # not kill: when it is terminated, the launcher ends its ranks
            out, _ = process.communicate()
            log.write_text(out)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"did not end within {timeout_s:.0f} s; see {log.name}") from None
            raise
    log.write_text(out)
    if process.returncode:
        errors = re.findall(r"^(?:\[rank\d+\]: ?)?(\w*Error: .*)$", out, re.M)
        # Errors of gloo come from the other ranks, after one rank has died.
        telling = [e for e in errors if "gloo" not in e] or errors or ["no reason given"]
        raise Failed(f"{telling[0][:160]} (exit {process.returncode}; see {log.name})")
    return out


def snapshot(tree: Path) -> dict[str, str]:
    """Digest of every file of the tree, without git's own and compiled Python."""
    return {
        str(place.relative_to(tree)): hashlib.sha256(place.read_bytes()).hexdigest()
        for place in sorted(tree.rglob("*"))
        if place.is_file() and not {".git", "__pycache__"} & set(place.relative_to(tree).parts)
    }


class Checkout:
    """One release under test.

    Args:
        name: tag or version, for the table.
        tree: root of its tree, unpatched.
        work: directory for logs, checkpoints and schedules of this release.
        data: prefix of the corpus, or None where there is no training.
        iterations: length of every training run.
        timeout_s: longest time of one training; a longer one has failed.
    """

    def __init__(self, name: str, tree: Path, work: Path, data: Path | None, iterations: int, timeout_s: float = 600):
        self.name, self.tree, self.work, self.data = name, tree, work, data
        self.iterations, self.timeout_s = iterations, timeout_s
        self.before = snapshot(tree)
        self.losses: dict[str, list] = {}
        self.iteration_times_ms: dict[str, list[float]] = {}

    def stock(self) -> str:
        """Train the unpatched tree."""
        return self.train("stock", ["-m", "megatron_ext.megatron.cpu_compat", self.tree / "pretrain_gpt.py"])

    def patch(self) -> str:
        """Apply the patch twice; the second time must change nothing."""
        if checkout.apply(self.tree).state != "applied" or checkout.apply(self.tree).changed:
            raise Failed("a second apply changed something")
        lines = sum(len(hook_numbers((self.tree / f).read_text())) for f in FILES if (self.tree / f).is_file())
        return f"{lines} lines"

    def check(self) -> str:
        """Check the state and every hook's place."""
        state, begin = checkout.check(self.tree).state, time.perf_counter()
        problems = checkout.verify_hooks(self.tree)
        if state != "applied" or problems:
            raise Failed(f"{state}: {problems}")
        return f"{1e3 * (time.perf_counter() - begin):.0f} ms"

    def plain(self) -> str:
        """Train the patched tree without our options; must equal stock. The hook leaves such a training alone, so here
        something else has to let it train on the CPU."""
        self.train("plain", ["-m", "megatron_ext.megatron.cpu_compat", self.tree / "pretrain_gpt.py"])
        return self.compare("stock", "plain")

    def scheduled(self, layout: str = "interleaved", zero_stage: int = 1) -> str:
        """Train by a schedule; must equal Megatron's own gather with the same bucket layout."""
        end = "" if (layout, zero_stage) == ("interleaved", 1) else f"_{layout}_{zero_stage}"
        schedule = self.plan(layout, zero_stage, end)
        script = [self.tree / "pretrain_gpt.py", "--user-defined-schedule", schedule]
        self.train(f"reference{end}", script, layout, MEGATRON_EXT_STOCK_GATHER="1")
        trace = self.work / f"trace{end}.json"
        self.train(f"scheduled{end}", [*script, "--user-defined-schedule-trace", trace], layout)
        if not trace.is_file():
            raise Failed("the scheduled run wrote no trace")
        return self.compare(f"reference{end}", f"scheduled{end}")

    def revert(self) -> str:
        """Revert twice; the second time must change nothing."""
        if checkout.revert(self.tree).state != "clean" or checkout.revert(self.tree).changed:
            raise Failed("a second revert changed something")
        return "ok"

    def bytes(self) -> str:
        """Check that all files are as they were."""
        after = snapshot(self.tree)
        changed = [f for f, digest in self.before.items() if after.get(f) != digest]
        new = [f for f in after if f not in self.before and not BUILT_BY_MEGATRON.search(f)]
        if changed or new:
            raise Failed(f"changed: {changed}, new: {new}")
        return f"{len(self.before)} files"

    def options(self, layout: str = "interleaved") -> list:
        """The command line of pretrain_gpt.py."""
        return [*MODEL, *LAYOUTS[layout], *TRAIN, "--train-iters", self.iterations, "--data-path", self.data]

    def train(self, name: str, script: list, layout: str = "interleaved", **more: str) -> str:
        """Train, keep losses and gradient norms, and save a checkpoint."""
        begin = time.perf_counter()
        options = [*self.options(layout), "--save", self.work / name, "--save-interval", self.iterations]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", PROCESSES]
        out = run(
            [*launch, *script, *options], self.work / f"{name}.log", tree=self.tree, timeout_s=self.timeout_s, **more
        )
        row = r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): (\S+) .*?lm loss: (\S+) .*?grad norm: (\S+)"
        rows = re.findall(row, out)
        found = [(number, loss, norm) for number, _, loss, norm in rows]
        if [int(n) for n, _, _ in found] != list(range(1, self.iterations + 1)):
            raise Failed(f"logged iterations {[n for n, _, _ in found]}; see {name}.log")
        if any(value in ("nan", "inf") for row in found for value in row):
            raise Failed(f"a loss is not finite; see {name}.log")
        # Evaluation after training reads parameters that the schedule gathered last.
        self.losses[name] = found + re.findall(r"validation loss at .*? lm loss value: (\S+)", out)
        if len(self.losses[name]) <= len(found):
            raise Failed(f"no evaluation; see {name}.log")
        self.iteration_times_ms[name] = [float(milliseconds) for _, milliseconds, _, _ in rows]
        return f"{time.perf_counter() - begin:.0f} s"

    def compare(self, one: str, two: str) -> str:
        """Check that losses, gradient norms and everything in the checkpoints are equal to the last bit."""
        if one not in self.losses:
            raise Failed(f"there is no {one} run to compare with")
        if self.losses[one] != self.losses[two]:
            raise Failed(f"losses differ: {one} {self.losses[one]}, {two} {self.losses[two]}")
        command = [sys.executable, Path(__file__), self.work / one, self.work / two]
        out = run(command, self.work / f"{one}_{two}.log", tree=self.tree)
        return f"equal, {json.loads(out.splitlines()[-1])['tensors']} tensors"

    def plan(self, layout: str, zero_stage: int, end: str) -> Path:
        """Make a schedule for this release's model that uses both routes, from a made-up cost table."""
        command = [sys.executable, "-m", "megatron_ext"]
        workload, table, schedule = (self.work / f"{n}{end}.json" for n in ("workload", "cost_table", "schedule"))
        # The whole command line: the release's own script reads it.
        ours = ["--data-parallel-size", DATA_PARALLEL[layout], "--zero-stage", zero_stage]
        describe = ["describe", "--out", workload, "--checkout", self.tree, *ours, *self.options(layout)]
        run([*command, *describe], self.work / f"describe{end}.log", tree=self.tree)
        write_cost_table(table)
        options = ["--workload", workload, "--cost-table", table, "--out", schedule, "--policy", "random:7"]
        run([*command, "plan", *options], self.work / f"plan{end}.log", tree=self.tree)
        return schedule


def write_cost_table(place: Path) -> None:
    """Write a made-up table in which both routes are worth using."""
    from megatron_ext.cost import cost_table as cost

    def line(latency_us: float, bytes_per_us: float) -> cost.Curve:
        sizes = [4**n for n in range(2, 16)]
        points = (cost.Point(size_bytes=s, p50_us=latency_us + s / bytes_per_us) for s in sizes)
        return cost.Curve(points=tuple(points))

    compute = [
        cost.Compute(pp_rank=rank, model_chunk_id=chunk, forward_us=500.0, backward_us=1000.0)
        for rank in range(2)
        for chunk in range(2)
    ]
    table = cost.CostTable(
        schema_version=cost.SCHEMA_VERSION,
        kind="cost_table",
        metadata=cost.Metadata(synthetic=True),
        routes=cost.Routes(gpu=line(50, 1e3), cpu=line(20, 8e2)),
        publish=cost.Publish(cpu=line(10, 2e3)),
        compute=tuple(compute),
        p2p=line(20, 1e3),
        reduce=line(50, 1e3),
        optimizer=line(10, 1e4),
    )
    cost.save(place, cost.check(table))


def build_corpus(tree: Path, work: Path) -> Path:
    """Tokenize real text, and return the prefix of the indexed dataset."""
    prefix = work / "corpus" / "stdlib"
    prefix.parent.mkdir(parents=True)
    program = Path(__file__).parents[1] / "examples" / "corpus.py"
    run([sys.executable, program, prefix], work / "corpus.log", tree=tree)
    return prefix


def extract(mirror: str, tag: str, tree: Path) -> Path:
    """Extract the tree of a tag from a git clone or mirror.

    Raises:
        InputError: git cannot archive it.
    """
    tree.mkdir(parents=True)
    archive = ["git", "-C", mirror, "archive", "--format=tar", tag]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
        unpacked = subprocess.run(["tar", "-x", "-C", str(tree)], stdin=packed.stdout, check=False)
    if packed.returncode or unpacked.returncode:
        raise InputError("git cannot archive it", field="TAG", value=tag)
    return tree


def compare_checkpoints(one: Path, two: Path) -> int:
    """Print the number of equal tensors in two checkpoint directories. Returns 1 if any tensor differs."""
    from megatron_ext.megatron import cpu_compat

    cpu_compat.install()
    import torch

    names = [sorted(str(f.relative_to(root)) for f in root.rglob("*.pt")) for root in (one, two)]
    if names[0] != names[1] or not names[0]:
        print(f"Error: other files: {names}")
        return 1
    count = 0
    for name in names[0]:
        states = [dict(tensors(torch.load(root / name, weights_only=False))) for root in (one, two)]
        if states[0].keys() != states[1].keys():
            print(f"Error: {name}: other keys")
            return 1
        for key, tensor in states[0].items():
            if tensor.dtype != states[1][key].dtype or not torch.equal(tensor, states[1][key]):
                print(f"Error: {name}: {key} differs")
                return 1
        count += len(states[0])
    print(json.dumps({"tensors": count}))
    return 0 if count else 1


def tensors(node, path=""):
    """(path, tensor) for everything in a nested checkpoint except random states."""
    import torch

    if isinstance(node, torch.Tensor):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            if key != "rng_state":  # holds the time of day in some releases
                yield from tensors(value, f"{path}/{key}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from tensors(value, f"{path}/{index}")


if __name__ == "__main__":  # in the tree's own environment: checkpoints hold Megatron's objects
    sys.exit(compare_checkpoints(Path(sys.argv[1]), Path(sys.argv[2])))
