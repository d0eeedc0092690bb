"""Files and command lines that a user could get wrong: drawn changes of good ones, and who reads each of them.

Both fuzzing engines (robustness_fuzzing.py) make their inputs by :func:`mutated`.
"""

import functools
import gc
import json
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "examples"), str(ROOT / ".megatron")]

import logs
from planning_cases import make_table, make_workload, random_case
from run_files import make_run

from megatron_ext import planner, report
from megatron_ext.cli import main as cli
from megatron_ext.cost import hardware_sheet
from megatron_ext.formats import json_files

NUMBERS = (0, -1, 1, 2, 0.5, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 1e-308, 1e-12, 1e13, 1e308)
VALUES = (*NUMBERS, None, True, "", "x", "0F0", "1B0", "gpu", "nvme", "host", "\x00", "ä" * 300, [], {}, [[]], [None])
TEXTS = ("1e400", "NaN", "-Infinity", "9" * 400, "9" * 5000, "0" * 50, "1e-400", "-0", "0x1f", '"\\ud800"', "1_0", "١")
"""Numbers as text that JSON's or Python's readers take differently or not at all."""


def mutated(draw: random.Random, data: bytes) -> bytes:
    """``data`` with one to three drawn changes: of values where it is JSON, of numbers, lines and bytes where not."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        try:
            value = json.loads(data) if draw.random() < 0.75 else None
        except (ValueError, RecursionError):
            value = None
        data = (_changed_value if isinstance(value, (dict, list)) else _changed_bytes)(draw, value, data)
    return data


def _changed_value(draw: random.Random, value, data: bytes) -> bytes:
    places = list(_places(value))
    if not places:
        return b"[]"
    holder, key = draw.choice(places)
    old, kind = holder[key], draw.random()
    if kind < 0.1:
        del holder[key]
    elif kind < 0.2 and isinstance(holder, list):
        holder.insert(key, draw.choice(holder))
    elif kind < 0.25 and isinstance(holder, dict):
        holder[draw.choice(("colour", "", f"{key}s"))] = old
    elif kind < 0.4:  # something that is well formed, of another place
        other, where = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[where]))
    elif kind < 0.65 and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = draw.choice((old + 1, old - 1, -old, old * 2, old * 1e6, old / 1e6, old * 1000, float(old)))
    elif kind < 0.7 and isinstance(old, list):
        holder[key] = draw.choice((old * 2, old[:1], old[::-1], old * 50))
    else:
        holder[key] = draw.choice(VALUES)
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return data


def _places(value):
    """(container, key) of everything inside, in order."""
    waiting = [value]
    while waiting:  # ends: a value of JSON has no circles
        holder = waiting.pop()
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])


def _changed_bytes(draw: random.Random, value, data: bytes) -> bytes:
    kind, lines = draw.randrange(8), data.split(b"\n")
    numbers = list(re.finditer(rb"-?\d[\d.e+-]*", data))
    if kind < 3 and numbers:
        found = draw.choice(numbers)
        text = draw.choice((*TEXTS, *map(str, NUMBERS)))
        return data[: found.start()] + text.encode() + data[found.end() :]
    at = draw.randrange(len(data) + 1)
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if kind == 5:
        return data[:at] + data[at + draw.randrange(1, 40) :]
    line = draw.randrange(len(lines))
    if kind == 6:
        lines.insert(draw.randrange(len(lines) + 1), lines[line])
    else:
        del lines[line]
    return b"\n".join(lines)


NAMES = (
    "cost table",
    "workload",
    "schedule",
    "hybrid plan",
    "hardware sheet",
    "curves",
    "nccl-tests",
    "nvbandwidth",
    "command line",
    "stock.trace",
    "scheduled.trace",
    "stock.metrics",
    "scheduled.metrics",
    "checkpoint",
    "checkpoint's mark",
    "checkpoint's digest",
    "corpus index",
)
"""Of :func:`kinds` and :func:`with_torch`."""


class Kind(NamedTuple):
    """A kind of input: good ones, where they lie in the folder, and what a user does with one."""

    seeds: tuple[bytes, ...]
    name: str
    use: Callable[[Path, bytes], int | None]


def kinds(folder: Path) -> dict[str, Kind]:
    """Every kind, by name, with its good neighbours written into ``folder``."""
    make_run(folder / "run")
    work, work3 = make_workload(), random_case(3)[0]
    table, table3 = make_table(work), random_case(3)[1]
    schedule = planner.plan(work, table, policy="all-gpu", extrapolate=True)
    good = {"w": work, "t": table, "s": schedule}
    for name, value in good.items():
        json_files.save(folder / f"{name}.json", value)
    t, w, s, out = (str(folder / f"{name}.json") for name in ("t", "w", "s", "out"))
    inputs = ["--cost-table", t, "--workload", w]
    path = functools.partial(json_files.encode)

    def run(*commands: list[str]) -> Callable[[Path, bytes], int]:
        """The first of ``commands`` that is refused, or all of them."""
        return lambda file, data: next((code for command in commands if (code := cli.main(command))), 0)

    def reported(file: Path, data: bytes) -> None:
        report.build(report.load(folder / "run"), extrapolate=True)

    everything = {
        "cost table": Kind(
            (path(table), path(table3)),
            "t.json",
            run(
                ["cost", "show", t],
                ["plan", *inputs, "--out", out, "--policy", "all-gpu"],
                ["simulate", *inputs, "--json"],
            ),
        ),
        "workload": Kind(
            (path(work), path(work3)),
            "w.json",
            run(["simulate", *inputs, "--extrapolate"], ["plan", *inputs, "--out", out, "--policy", "all-cpu"]),
        ),
        "schedule": Kind(
            (path(schedule), path(planner.plan(work, table, policy="random:1"))),
            "s.json",
            run(["show", s], ["simulate", *inputs, "--schedule", s]),
        ),
        "hybrid plan": Kind((path(table), path(table3)), "t.json", run(["plan", *inputs, "--out", out])),
        "hardware sheet": Kind(
            tuple(path(hardware_sheet.load(name)) for name in ("h100-rdma", "l40s")),
            "sheet.json",
            lambda file, data: cli.main(
                ["cost", "estimate", "--hardware", str(file), "--workload", w, "--out", out, "--seq-length", "64"]
            ),
        ),
        **_imported(out),
        "command line": Kind(_command_lines(t, w, s, out), "argv.json", _command_line),
    }
    for name in ("stock.trace.json", "scheduled.trace.json", "stock.metrics.json", "scheduled.metrics.json"):
        if (folder / "run" / name).exists():
            everything[name.removesuffix(".json")] = Kind(
                ((folder / "run" / name).read_bytes(),), f"run/{name}", reported
            )
    return everything


def _imported(out: str) -> dict[str, Kind]:
    """What ``measure --import`` reads, by the name that it has there."""
    texts = {
        "curves": [(ROOT / "tests/data/seed_allreduce_8gpu.json").read_text()],
        "nccl-tests": [logs.nccl_tests(), logs.nccl_tests(summary=False)],
        "nvbandwidth": [logs.nvbandwidth(), f"Buffer Size: 64 MiB\n{logs.nvbandwidth()}"],
    }

    def importing(name: str) -> Callable[[Path, bytes], int]:
        return lambda file, data: cli.main(["measure", "--out", out, "--import", name, str(file)])

    return {
        name: Kind(tuple(text.encode() for text in seeds), f"{name}.imported", importing(name))
        for name, seeds in texts.items()
    }


def _command_lines(t: str, w: str, s: str, out: str) -> tuple[bytes, ...]:
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split()
    lines = (
        ["cost", "predict", t, "--route", "gpu", "--bytes", "1000", "--busy", "cpu"],
        ["plan", "--cost-table", t, "--workload", w, "--out", out, "--policy", "random:1"],
        ["plan", "--cost-table", t, "--workload", w, "--out", out, "--limit-whole-parameter-bytes", "100000"],
        ["simulate", "--cost-table", t, "--workload", w, "--schedule", s],
        ["cost", "compare", t, t],
        ["cost", "check", t, "--workload", w],
        ["fit", "--hardware", "h100-rdma", "--nodes", "2", "--fix", "all", "--", *model, "--micro-batch-size", "1"],
        [
            "fit",
            "--hardware",
            "l40s",
            *"--fix recompute --".split(),
            *model,
            *"--tensor-model-parallel-size 2 --bf16".split(),
        ],
    )
    return tuple(json.dumps(line).encode() for line in lines)


def _command_line(file: Path, data: bytes) -> int:
    try:
        words = json.loads(data)
    except ValueError:
        return 2
    words = [str(word) for word in words] if isinstance(words, list) else []
    if words[:1] not in (["cost"], ["plan"], ["simulate"], ["fit"]) or any("\x00" in word for word in words):
        return 2  # no other verbs: they start processes or change trees; no process can be given a zero byte
    try:
        return cli.main(words)
    finally:
        gc.enable()


def with_torch(folder: Path) -> dict[str, Kind]:
    """Kinds that need torch and megatron-core: the example's checkpoints and its indexed datasets."""
    import torch
    import torch.distributed as dist

    from megatron_ext.megatron import cpu_compat

    cpu_compat.install()
    import checkpoint
    import corpus

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    optimizer = SimpleNamespace(chained_optimizers=[])
    model = [SimpleNamespace(module=torch.nn.Linear(4, 4, bias=False))]
    checkpoint.save(folder / "ckpt", 7, model, optimizer)
    state = folder / "ckpt" / "iter_0000007" / "rank_00000.pt"
    digest, latest = state.with_suffix(".sha256"), folder / "ckpt" / checkpoint.LATEST

    def load(file: Path, data: bytes) -> None:
        if file == state:  # as who changes both would have it: what lies behind the digest is to hold as well
            digest.write_text(checkpoint.file_digest(state))
        checkpoint.load(folder / "ckpt", model, optimizer)

    built = folder / "corpus"
    corpus.build(built)
    return {
        "checkpoint": Kind((state.read_bytes(),), str(state.relative_to(folder)), load),
        "checkpoint's mark": Kind((latest.read_bytes(),), str(latest.relative_to(folder)), load),
        "checkpoint's digest": Kind((digest.read_bytes(),), str(digest.relative_to(folder)), load),
        "corpus index": Kind(
            (Path(f"{built}.idx").read_bytes(),),
            "corpus.idx",
            lambda file, data: corpus.check(built, 64, corpus.VOCAB_SIZE),
        ),
    }


def scratch() -> str:
    """Where files of an input are written: in memory, because every file written is synchronised."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else "."
