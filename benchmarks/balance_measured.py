"""Stages balanced by measured cost, in a real checkout: iteration time before and after, predicted and measured.

    python benchmarks/balance_measured.py MIRROR [TAG]

A GPT with a large vocabulary on two pipeline stages, in a checkout from MIRROR, a git clone of Megatron-LM with tags.
`megatron-ext balance` places its layers from a cost table that is measured here; the layout that it prints is given to
the checkout's own pretrain_gpt.py, unchanged. Both placements train at once, in time slices, by Megatron's own gathers.
The initial values depend on the stage, so the losses differ. Writes benchmarks/results/balance_measured.json. Ends 0 if
the balanced placement is not slower than the other one by more than twice the standard error of the ratio.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import pictures
from checkout_under_test import extract
from interleaved_ab import Run, interleave, over_slices, ratio_of, ratios_to
from machine import about_this_machine

from megatron_ext.formats import json_files

MODEL = """--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2
    --untie-embeddings-and-output-weights --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 8191 --eval-interval 1000 --eval-iters 1
    --transformer-impl local""".split()
WORLD = 2
TABLES = {
    "own_processors": "a processor to each rank, as pipeline stages have GPUs of their own",
    "costs": "as many processors as measuring found free: other programs may have used them",
}
"""The costs that predictions rest on."""
ITERATION = re.compile(r"iteration +\d+/.*?elapsed time per iteration \(ms\): (\S+) .*?lm loss: (\S+)")


@dataclass
class Placement:
    """One placement of the layers: options of the script, the prediction, and what was measured."""

    name: str
    options: list[str]
    predicted_us: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TABLES, 0.0))
    run: Run = field(init=False)
    iteration_us: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def read(self, log: Path) -> None:
        rows = ITERATION.findall(log.read_text())
        self.iteration_us, self.losses = [float(ms) * 1e3 for ms, _ in rows], [float(loss) for _, loss in rows]
        del self.run.slices[len(rows) :]  # the line of the evaluation behind the last iteration


def command(*words, cwd: Path) -> dict:
    """One verb's JSON."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    answer = subprocess.run(
        [sys.executable, "-m", "megatron_ext", *map(str, words)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(answer.stdout) if "--json" in words else {}


def predict(placement: Placement, tree: Path, work: Path) -> None:
    workload = work / f"{placement.name}.json"
    command(
        *("describe", "--checkout", tree, "--out", workload, "--data-parallel-size", 1),
        *(*MODEL, "--train-iters", 1, *placement.options),
        cwd=work,
    )
    if not (work / "costs.json").exists():
        command(
            *("measure", "--checkout", tree, "--out", work / "costs.json", "--dp", 1, "--seconds", 30),
            *("--", *MODEL, "--train-iters", 1),
            cwd=work,
        )
        table = json_files.load(work / "costs.json", dict)
        json_files.save(
            work / "own_processors.json", {name: part for name, part in table.items() if name != "host_cpu"}
        )
    for name in placement.predicted_us:
        files = ("--cost-table", work / f"{name}.json", "--workload", workload)
        answer = command("simulate", *files, "--extrapolate", "--json", cwd=work)
        placement.predicted_us[name] = answer["iteration_time_us"]


def train(placements: list[Placement], tree: Path, work: Path, iterations: int, slice_s: float) -> None:
    """Both at once, in slices; fills in what was measured."""
    script = ["-m", "megatron_ext.megatron.cpu_compat", str(tree / "pretrain_gpt.py")]
    environment = {"PYTHONPATH": f"{tree}:{ROOT}", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for placement in placements:
        options = [*script, *MODEL, "--train-iters", str(iterations), *placement.options]
        placement.run = Run(placement.name, options, WORLD, work / f"{placement.name}.log", environment)
    interleave([placement.run for placement in placements], slice_s)
    for placement in placements:
        placement.read(work / f"{placement.name}.log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mirror", help="git clone or mirror of Megatron-LM with its tags")
    parser.add_argument("tag", nargs="?", default="core_v0.17.1")
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--slice-s", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/balance_measured.json")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch).resolve()
        tree = extract(options.mirror, options.tag, work / "tree")
        even = Placement("even", [])
        predict(even, tree, work)
        files = ("--cost-table", work / "costs.json", "--workload", work / "even.json")
        found = command("balance", *files, "--json", cwd=work)
        balanced = Placement("balanced", ["--pipeline-model-parallel-layout", found["layout"]])
        predict(balanced, tree, work)
        processors = json_files.load(work / "costs.json", dict)["host_cpu"]["processors_per_node"]
        train([even, balanced], tree, work, options.iterations, options.slice_s)
    figures = [over_slices(p.run, p.iteration_us, p.iteration_us, options.slice_s) for p in (even, balanced)]
    ratio = ratio_of(ratios_to(figures[0].of_slice, figures[1].of_slice))
    result = {
        **about_this_machine(load_before=load),
        "release": options.tag,
        "model": " ".join(MODEL),
        "layout": found["layout"],
        "slowest_stage_us": found["slowest_stage_us"],
        "processors_while_measured": processors,
        "predicted": {
            name: {
                "means": meaning,
                "even_us": even.predicted_us[name],
                "balanced_us": balanced.predicted_us[name],
                "ratio": balanced.predicted_us[name] / even.predicted_us[name],
            }
            for name, meaning in TABLES.items()
        },
        "measured_us": {p.name: median(figure.values) for p, figure in zip((even, balanced), figures)},
        "measured_ratio": ratio._asdict(),
        "losses": {p.name: {"first": p.losses[0], "last": p.losses[-1]} for p in (even, balanced)},
    }
    json_files.save(options.out, result, indent=1)
    pictures.draw(options.out)
    print(json.dumps(result, indent=1))
    return int(ratio.median - 2 * ratio.standard_error > 1)


if __name__ == "__main__":
    sys.exit(main())
