"""Iteration time of a patched checkout without the flag, beside the same checkout unpatched.

    python benchmarks/patched_iteration_time.py MIRROR [TAG] [--rounds 10] [--out
    benchmarks/results/patched_iteration_time.json]

A round trains three times, each in a process of its own: unpatched, patched without our options, and
unpatched once more (the control: what two runs of the same code differ by). The order rotates from round
to round. A round gives two ratios of median iteration times, patched and control over unpatched, so that a
slow spell of the machine falls on both sides. Patched is within noise where the interval of its mean
ratio holds 1, or lies within the control's. Losses must be equal, and in the first round every tensor of
the checkpoints as well.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median, stdev

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import pictures
from checkout_under_test import MODEL, PROCESSES, Checkout, Failed, build_corpus, extract
from machine import about_this_machine

from megatron_ext import checkout
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError

KINDS = ("unpatched", "patched", "control")
T_95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
    2.09,
)
"""Student's t for a two-sided 95 % interval, by degrees of freedom from 1."""


def summarize(ratios: list[float]) -> dict:
    """Median, extremes, and a 95 % interval of the mean."""
    figures = {"median": median(ratios), "least": min(ratios), "most": max(ratios), "mean": mean(ratios)}
    if len(ratios) > 1:
        # What a difference would have to exceed to be seen.
        half = figures["resolution"] = T_95[min(len(ratios) - 1, len(T_95)) - 1] * stdev(ratios) / len(ratios) ** 0.5
        figures["mean_95"] = [figures["mean"] - half, figures["mean"] + half]
    return figures


def within_noise(patched: dict, control: dict) -> bool | None:
    """Whether nothing tells patched from unpatched; None with too few rounds to say."""
    if "mean_95" not in patched:
        return None
    low, high = patched["mean_95"]
    return low <= 1 <= high or (control["mean_95"][0] <= low and high <= control["mean_95"][1])


def measure(trees: dict[str, Checkout], rounds: int, warm_up: int) -> list[dict]:
    """Median iteration times of every round.

    Raises:
        Failed: a run failed, or its losses or tensors are not those of the unpatched tree.
    """
    found = []
    for number in range(rounds):
        first = number % len(KINDS)
        order = [*KINDS[first:], *KINDS[:first]]
        for kind in order:
            tested = trees[kind]
            tested.train(kind, ["-m", "megatron_ext.megatron.cpu_compat", tested.tree / "pretrain_gpt.py"])
            print(
                f"round {number + 1}: {kind}: {median(tested.iteration_times_ms[kind][warm_up:]):.1f} ms",
                file=sys.stderr,
                flush=True,
            )
        times = {kind: median(trees[kind].iteration_times_ms[kind][warm_up:]) for kind in KINDS}
        everything = {kind: trees[kind].losses[kind] for kind in KINDS}
        if any(everything[kind] != everything["unpatched"] for kind in KINDS):
            raise Failed(f"losses differ in round {number + 1}: {everything}")
        if number == 0:
            same = trees["unpatched"]
            same.losses |= everything
            equal = [same.compare("unpatched", kind) for kind in KINDS[1:]]
        found.append(
            {
                "order": order,
                "step_ms": times,
                "patched": times["patched"] / times["unpatched"],
                "control": times["control"] / times["unpatched"],
            }
        )
        for kind in KINDS:
            shutil.rmtree(trees[kind].work / kind)
    found[0]["checkpoints"] = dict(zip(KINDS[1:], equal, strict=True))
    return found


def main() -> int:
    """Measure and write the result; 1 if a run failed or anything is not equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mirror", help="git clone or mirror of Megatron-LM with its tags")
    parser.add_argument("tag", nargs="?", default="core_v0.19.0")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=10, help="iterations that are left out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/patched_iteration_time.json")
    options = parser.parse_args()
    if not 0 <= options.warm_up < options.iterations or options.rounds < 1:
        raise InputError("leaves no iteration to measure", field="--warm-up", value=options.warm_up)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch).resolve()
        unpatched, patched = (extract(options.mirror, options.tag, work / "trees" / name) for name in KINDS[:2])
        commit = subprocess.run(
            ["git", "-C", options.mirror, "rev-parse", f"{options.tag}^{{commit}}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        data = build_corpus(unpatched, work)
        checkout.apply(patched)
        trees = {
            kind: Checkout(kind, patched if kind == "patched" else unpatched, work, data, options.iterations)
            for kind in KINDS
        }
        rounds = measure(trees, options.rounds, options.warm_up)
    ratios = {kind: summarize([row[kind] for row in rounds]) for kind in KINDS[1:]}
    verdict = within_noise(ratios["patched"], ratios["control"])
    json_files.save(
        options.out,
        {
            **about_this_machine(load_before=load),
            "release": options.tag,
            "commit": commit,
            "processes": PROCESSES,
            "model": " ".join(MODEL),
            "iterations": options.iterations,
            "warm_up": options.warm_up,
            "losses_equal": True,
            "ratio": ratios,
            "within_noise": verdict,
            "rounds": rounds,
        },
        indent=1,
    )
    pictures.draw(options.out)
    for kind, figures in ratios.items():
        half = f" +- {figures['resolution']:.4f}" if "resolution" in figures else ""
        print(
            f"{kind:8} / unpatched: median {figures['median']:.4f}, mean {figures['mean']:.4f}{half}, "
            f"{figures['least']:.4f} to {figures['most']:.4f}"
        )
    print(
        f"losses equal in {len(rounds)} rounds; checkpoints: {rounds[0]['checkpoints']}; within noise: {verdict}; "
        f"{options.out}"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (InputError, Failed) as error:
        sys.exit(f"patched_iteration_time: {error}")
