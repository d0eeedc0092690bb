"""Patch, train and revert releases of Megatron-LM, and print one table (see test_checkouts.sh).

For every release: take its tree, train it unpatched, patch it, verify every hook, train it without
our options (must equal the unpatched run to the last bit), train it by a schedule (must equal
Megatron's own gather at the same bucket layout to the last bit), revert, compare all bytes.
Losses (of evaluation as well), gradient norms, parameters and optimizer states are compared, the latter
two from checkpoints.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from megatron_ext import checkout
from megatron_ext.checkout.hook_table import FILES
from megatron_ext.checkout.verify import count_hooks
from megatron_ext.errors import InputError

TAGS = (
    "core_v0.10.0 core_v0.11.0 core_v0.12.3 core_v0.13.1 core_v0.14.0 core_v0.15.3 "
    "core_v0.16.1 core_v0.17.1 core_v0.18.2 core_v0.19.0 main"
).split()
PACKAGES = "0.12.3 0.13.1 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.0".split()
PACKAGE_CELLS = "patch check revert bytes".split()
CELLS = "stock patch check plain scheduled revert bytes".split()
BUILT_BY_MEGATRON = re.compile(r"helpers_cpp.*\.so$")
"""The dataset helper that Megatron compiles into its own tree when it first trains."""

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --vocab-size 258
    --attention-dropout 0.1 --hidden-dropout 0.1 --pipeline-model-parallel-size 2
    --untie-embeddings-and-output-weights""".split()
TRAIN = """--num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --clip-grad 1.0 --seed 1234
    --tokenizer-type NullTokenizer --split 98,2,0 --num-workers 0 --no-create-attention-mask-in-dataloader
    --eval-interval 1000 --eval-iters 1 --log-interval 1 --ckpt-format torch --distributed-backend gloo
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion""".split()
PROCESSES = 4


class Failed(Exception):
    """A step that did not do what it should; the text is for the table's footnotes."""


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Environment of a program that uses the tree."""
    path = f"{tree}{os.pathsep}{Path(checkout.__file__).parents[2]}"
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | more


def run(command: list, log: Path, *, tree: Path, timeout_s: float = 600, **more: str) -> str:
    """Output of a command, also kept in ``log``.

    Raises:
        Failed: it ended with an error; with the line that says most.
    """
    try:
        result = subprocess.run(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment(tree, **more), cwd=log.parent, timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        log.write_bytes(error.stdout or b"")
        raise Failed(f"no end after {timeout_s:.0f} s; see {log.name}") from None
    log.write_text(result.stdout)
    if result.returncode:
        errors = re.findall(r"^(?:\[rank\d+\]: ?)?(\w*Error: .*)$", result.stdout, re.M)
        # gloo's own complaint is what the other ranks say when one has died.
        telling = [e for e in errors if "gloo" not in e] or errors or ["no reason given"]
        raise Failed(f"{telling[0][:160]} (exit {result.returncode}; see {log.name})")
    return result.stdout


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
    """

    def __init__(self, name: str, tree: Path, work: Path, data: Path | None, iterations: int):
        self.name, self.tree, self.work, self.data = name, tree, work, data
        self.iterations = iterations
        self.before = snapshot(tree)
        self.losses: dict[str, list] = {}

    def stock(self) -> str:
        """Train the unpatched tree."""
        return self.train("stock", ["-m", "megatron_ext.megatron.cpu_compat", self.tree / "pretrain_gpt.py"])

    def patch(self) -> str:
        """Apply, and apply again."""
        if checkout.apply(self.tree).state != "applied" or checkout.apply(self.tree).changed:
            raise Failed("apply is not the same twice")
        lines = sum(count_hooks((self.tree / f).read_text()) for f in FILES if (self.tree / f).is_file())
        return f"{lines} lines"

    def check(self) -> str:
        """The state, and every hook's place."""
        state, begin = checkout.check(self.tree).state, time.perf_counter()
        problems = checkout.verify_hooks(self.tree)
        if state != "applied" or problems:
            raise Failed(f"{state}: {problems}")
        return f"{1e3 * (time.perf_counter() - begin):.0f} ms"

    def plain(self) -> str:
        """Train the patched tree without our options: equal to stock."""
        self.train("plain", [self.tree / "pretrain_gpt.py"])
        return self.compare("stock", "plain")

    def scheduled(self) -> str:
        """Train by a schedule: equal to Megatron's own gather at the same bucket layout."""
        schedule = self.plan()
        script = [self.tree / "pretrain_gpt.py", "--user-defined-schedule", schedule]
        self.train("reference", script, MEGATRON_EXT_STOCK_GATHER="1")
        trace = self.work / "trace.json"
        self.train("scheduled", [*script, "--user-defined-schedule-trace", trace])
        if not trace.is_file():
            raise Failed("the scheduled run has written no trace")
        return self.compare("reference", "scheduled")

    def revert(self) -> str:
        """Revert, and revert again."""
        if checkout.revert(self.tree).state != "clean" or checkout.revert(self.tree).changed:
            raise Failed("revert is not the same twice")
        return "ok"

    def bytes(self) -> str:
        """All files are what they were."""
        after = snapshot(self.tree)
        changed = [f for f, digest in self.before.items() if after.get(f) != digest]
        new = [f for f in after if f not in self.before and not BUILT_BY_MEGATRON.search(f)]
        if changed or new:
            raise Failed(f"changed: {changed}, new: {new}")
        return f"{len(self.before)} files"

    def train(self, name: str, script: list, **more: str) -> str:
        """Train, keep losses and gradient norms, and save a checkpoint."""
        begin = time.perf_counter()
        save = self.work / name
        options = [*MODEL, *TRAIN, "--train-iters", self.iterations, "--data-path", self.data]
        options += ["--save", save, "--save-interval", self.iterations]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", PROCESSES]
        out = run([*launch, *script, *options], self.work / f"{name}.log", tree=self.tree, **more)
        found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)", out)
        if [int(n) for n, _, _ in found] != list(range(1, self.iterations + 1)):
            raise Failed(f"logged iterations {[n for n, _, _ in found]}; see {name}.log")
        if any(value in ("nan", "inf") for row in found for value in row):
            raise Failed(f"a loss is not finite; see {name}.log")
        # Evaluation after training reads parameters that the schedule was the last to gather.
        self.losses[name] = found + re.findall(r"validation loss at .*? lm loss value: (\S+)", out)
        if len(self.losses[name]) <= len(found):
            raise Failed(f"no evaluation; see {name}.log")
        return f"{time.perf_counter() - begin:.0f} s"

    def compare(self, one: str, two: str) -> str:
        """Losses, gradient norms and everything in the checkpoints are the same bits."""
        if one not in self.losses:
            raise Failed(f"there is no {one} run to compare with")
        if self.losses[one] != self.losses[two]:
            raise Failed(f"losses differ: {one} {self.losses[one]}, {two} {self.losses[two]}")
        command = [sys.executable, Path(__file__), "--compare", self.work / one, self.work / two]
        out = run(command, self.work / f"{one}_{two}.log", tree=self.tree)
        return f"equal, {json.loads(out.splitlines()[-1])['tensors']} tensors"

    def plan(self) -> Path:
        """Make a schedule of this release's model: both routes, by a made-up cost table."""
        command = [sys.executable, "-m", "megatron_ext"]
        sizes = ["--num-virtual-stages-per-pipeline-rank", 2, "--data-parallel-size", 2]
        workload, table, schedule = (self.work / f"{n}.json" for n in ("workload", "cost_table", "schedule"))
        run([*command, "describe", "--out", workload, *MODEL, *sizes], self.work / "describe.log", tree=self.tree)
        write_cost_table(table)
        options = ["--workload", workload, "--cost-table", table, "--out", schedule, "--policy", "random:7"]
        run([*command, "plan", *options], self.work / "plan.log", tree=self.tree)
        return schedule


def write_cost_table(place: Path) -> None:
    """A made-up table, in which both routes are worth something."""
    from megatron_ext.cost import model as cost

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
        schema_version=1, kind="cost_table", metadata=cost.Metadata(synthetic=True),
        routes=cost.Routes(gpu=line(50, 1e3), cpu=line(20, 8e2)), publish=cost.Publish(cpu=line(10, 2e3)),
        compute=tuple(compute), p2p=line(20, 1e3),
    )  # fmt: skip
    cost.save(place, cost.check(table))


def compare_checkpoints(one: Path, two: Path) -> int:
    """Print the number of tensors that are the same in two checkpoint directories; 1 if any differs."""
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
    """(path, tensor) of everything in a nested checkpoint, random states left out."""
    import torch

    if isinstance(node, torch.Tensor):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            if key != "rng_state":  # holds the time of day at some releases
                yield from tensors(value, f"{path}/{key}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from tensors(value, f"{path}/{index}")


def build_corpus(tree: Path, work: Path) -> Path:
    """Real text, tokenized: the prefix of an indexed dataset."""
    prefix = work / "corpus" / "stdlib"
    prefix.parent.mkdir()
    code = (
        "import sys; from megatron_ext.megatron import cpu_compat; cpu_compat.install(); "
        "from megatron_ext.megatron import corpus; corpus.build(sys.argv[1])"
    )
    run([sys.executable, "-c", code, prefix], work / "corpus.log", tree=tree)
    return prefix


def trees(options, work: Path):
    """(name, tree) of every release asked for."""
    for name in options.tags or (PACKAGES if options.mirror == "pypi" else TAGS):
        tree = work / name / "tree"
        if options.mirror == "pypi":
            yield name, checkout.obtain(name, tree)
            continue
        tree.mkdir(parents=True)
        archive = ["git", "-C", options.mirror, "archive", "--format=tar", name]
        with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
            subprocess.run(["tar", "-x", "-C", str(tree)], stdin=packed.stdout, check=True)
        if packed.returncode:
            raise InputError("git cannot archive it", field="TAG", value=name)
        yield name, tree


def main() -> int:
    """Test every release; 1 if a cell of the table failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mirror", help="git clone or mirror of Megatron-LM with its tags, or pypi")
    parser.add_argument("tags", nargs="*", help="tags (or versions, for pypi); by default all we serve")
    parser.add_argument("--no-train", action="store_true", help="only patch, verify and revert")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--cells", help="run only these steps, e.g. patch,check,scheduled,revert,bytes")
    parser.add_argument("--keep", type=Path, help="keep trees, logs and checkpoints in this directory")
    options = parser.parse_args()
    core_only = options.mirror == "pypi"
    train = not (core_only or options.no_train)
    cells = CELLS if train else PACKAGE_CELLS
    if options.cells:
        unknown = set(options.cells.split(",")) - set(cells)
        if unknown:
            raise InputError(f"expected some of {','.join(cells)}", field="--cells", value=options.cells)
        cells = [cell for cell in cells if cell in options.cells.split(",")]
    rows, failures = [], []
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.keep or Path(scratch)).resolve()
        data = None
        for name, tree in trees(options, work):
            if train and data is None:
                data = build_corpus(tree, work)
            row = [name]
            tested = Checkout(name, tree, tree.parent, data, options.iterations)
            for cell in cells:
                try:
                    row.append(getattr(tested, cell)())
                except (Failed, InputError, AssertionError) as error:
                    row.append("FAILED")
                    failures.append(f"{name}, {cell}: {error}")
                print(f"{name}: {cell}: {row[-1]}", file=sys.stderr, flush=True)
            rows.append(row)
    print_table(["release", *cells], rows, failures, core_only)
    return 1 if failures else 0


def print_table(head, rows, failures, core_only: bool) -> None:
    """The table in Markdown, with what failed and what was not run."""
    # Paths of this machine say nothing to whoever reads the table elsewhere.
    words = ["MIRROR" if "/" in word else word for word in sys.argv[1:]]
    print(f"`scripts/test_checkouts.sh {' '.join(words)}`, ", end="")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC\n")
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()
    left_out = [cell for cell in CELLS if cell not in head]
    if left_out:
        why = " The packages have no pretrain_gpt.py to train with." if core_only else ""
        print(f"Not run: {', '.join(left_out)}.{why}")
    for failure in failures:
        print(f"FAILED: {failure}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.exit(compare_checkpoints(Path(sys.argv[2]), Path(sys.argv[3])))
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"test_checkouts: {error}")
