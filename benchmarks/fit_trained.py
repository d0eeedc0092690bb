"""Is what `fit` chooses the fastest when it is trained, and does what it calls fitting fit? On processors.

    sudo .venv/bin/python benchmarks/fit_trained.py [--iters 40] [--slice 8] [--folder runs/fit_trained]

Costs of a GPT are measured with two micro-batch sizes and correct a data sheet of this machine; `fit` chooses within a
limit of device bytes. Its choice and the fastest that it found with other micro-batch sizes, kinds of recompute and
zero stages train by their schedules, some at a time and the choice beside them, in turns of a few seconds
(interleaved_ab.py). Each runs in a control group whose memory is what `fit` counted: the limit of the device, what it
keeps free besides the bill of a device whose size is known (libraries, within layers, gaps), and the setting's bytes in
host memory; and in place of a CUDA context what a process takes that trains next to nothing. Control groups (version 1)
need root. Files that lie in the folder are used again. Writes benchmarks/results/fit_trained.json.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pictures
import torch
from fit_truth import plan_less
from interleaved_ab import Run, interleave, over_slices, ratio_of, ratios_to
from machine import about_this_machine
from measuring import ROOT, measure_command, training_command

from megatron_ext.cost.device_reserve import CONTEXT_BYTES
from megatron_ext.cost.hardware_sheet import Figure
from megatron_ext.formats import json_files
from megatron_ext.planner.fit.estimate_setting import Choice
from megatron_ext.planner.fit.request import Request, ready
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.workload import Limits

HIDDEN, SEQ = 1024, 128
MODEL = f"--num-layers 4 --hidden-size {HIDDEN} --num-attention-heads 8 --seq-length {SEQ} --vocab-size 259 --bf16"
MODEL += " --micro-batch-size 2 --global-batch-size 4 --untie-embeddings-and-output-weights"
MODEL += " --optimizer-cpu-offload --data-parallel-size 1 --transformer-impl local"
SMALL = ["--num-layers", "1", "--hidden-size", "64"]
MEASURED = (1, 4)
"""Micro-batch sizes, the least and the most that divide the batch."""
CHANGED = ("--micro-batch-size", "--recompute", "--optimizer-cpu-offload")
"""Options of the example that a choice changes."""
DEVICE_BYTES = 350_000_000
"""Of 51M parameters the whole ones and their gradients take 310 MB: no room for all activations."""
GROUPS = Path("/sys/fs/cgroup/memory")
GIVES_BACK = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc's own; the launcher's keep what is freed (megatron_ext/cpubench/allocator.py), which no bill counts."""
NEIGHBOURS, TOGETHER, WITHIN = 8, 4, 0.10
OUT = ROOT / "benchmarks" / "results" / "fit_trained.json"


def sheet(path: str) -> None:
    """Write a data sheet of this machine: its rates of matrix products and of copies, by one thread, now."""

    def rate(amount: float, work) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return amount / min(times)

    def figure(value: float, part: float = 1.0) -> Figure:
        ends = {} if part == 1 else {"low": value * part, "high": value / part}
        return Figure(value=value, origin="measured", source="benchmarks/fit_trained.py", **ends)

    torch.set_num_threads(1)
    left, right = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((256, 1024), (1024, 4096)))
    source, target = torch.ones(1 << 26), torch.ones(1 << 26)
    flop = figure(rate(2 * 256 * 1024 * 4096, lambda: left @ right), 0.7)
    copied = rate(2 * source.nbytes, lambda: target.copy_(source))
    one, memory, moved = figure(1.0), figure(8e9), figure(copied, 0.7)
    host = {"memory_bytes": memory, "memory_bytes_per_s": moved, "cores": one, "core_bytes_per_s": moved}
    device = {"memory_bytes": memory, "memory_bytes_per_s": moved, "memory_efficiency": one}
    device |= {"flop_per_s": {"bfloat16": flop}, "flop_efficiency": one, "attention_efficiency": one}
    link = {"bytes_per_s": figure(copied / 2, 0.7), "efficiency": one, "pageable_efficiency": one, "pcie": None}
    about = {"schema_version": 2, "kind": "hardware_sheet", "title": "processors of this machine", "extends": "l40s"}
    json_files.save(path, {**about, "gpus_per_node": 1, "device": device, "host": host, "host_link": link})


def measure(path: str, given: Setting, micro_batch_size: int) -> None:
    sizes = {"hidden": HIDDEN, "seq": SEQ, "micro_batch_size": micro_batch_size, "seconds": 40}
    words = [*MODEL.split(), "--micro-batch-size", str(micro_batch_size)]
    command = measure_command(Path(path), given.workload(Limits()), words, **sizes)
    command.insert(command.index("--modules"), "--optimizer-on-host")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / '.megatron'}", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env=environment)


class Limited(Run):
    """Training in a control group of its own, which ``most_bytes`` limit."""

    def __init__(self, name: str, words: list[str], folder: Path, iterations: int, most_bytes: int | None, *more: str):
        self.group, self.metrics = GROUPS / f"megatron_ext_{name}", folder / f"{name}.metrics.json"
        self.group.mkdir()
        if most_bytes is not None:
            (self.group / "memory.limit_in_bytes").write_text(str(most_bytes))
        how = ["--data-cache-path", str(folder / name), "--clip-grad", "1000"]  # clipping takes early steps back
        command = training_command(words, iterations, self.metrics, *how, *more)
        super().__init__(name, command, 1, folder / f"{name}.log")
        (self.group / "cgroup.procs").write_text(str(self.process.pid))  # before it has started a rank

    def peak_bytes(self) -> int:
        """Of all that was in the group, once the run is over; removes the group."""
        self.process.wait()
        peak = int((self.group / "memory.max_usage_in_bytes").read_text())
        self.group.rmdir()
        return peak


def choose(folder: Path) -> list[dict]:
    """The fastest setting for each micro-batch size, recompute and zero stage, and of these the fastest; a row each,
    with its schedule in the folder."""
    words = (*MODEL.split(), "--limit-device-bytes", str(DEVICE_BYTES))
    hardware, tables = str(folder / "sheet.json"), [str(folder / f"micro_batch_{size}.json") for size in MEASURED]
    if not os.path.exists(hardware):
        sheet(hardware)
    given = ready(Request(words=words, hardware=hardware)).space.given
    for table, size in zip(tables, MEASURED):
        if not os.path.exists(table):
            measure(table, given, size)
    plan_less()
    best: dict[tuple, Choice] = {}
    problem = ready(Request(words=words, hardware=hardware, cost_tables=tuple(tables)))
    whole = problem._replace(limits=Limits())  # of a device whose size is known fit keeps a part free
    for choice in problem.search().tried:
        batch = choice.setting.batch
        best.setdefault((batch.micro_batch_size, batch.recompute, choice.setting.zero_stage), choice)
    rows = []
    for number, choice in enumerate(list(best.values())[: 1 + NEIGHBOURS]):
        assert len(choice.schedules) == 1, "few micro-batches: the quick plan is one of all of them"
        schedule_file.save(folder / f"choice{number}.json", validate(choice.schedules[0]))
        options = choice.setting.options().items()
        changed = [word for pair in options if pair[0].startswith(CHANGED) for word in pair if word]
        row = {
            "name": f"choice{number}",
            "setting": choice.setting.text(False),
            "words": [*MODEL.replace(CHANGED[-1], "").split(), *changed],
        }
        row |= {name: getattr(choice, name) for name in ("us", "device_bytes", "host_bytes")}
        room_bytes = whole.room(choice.setting, choice.rounds.parts[0][0])
        rows.append(row | {"reserve_bytes": whole.most_bytes - room_bytes - CONTEXT_BYTES})
    return rows


def train(rows: list[dict], base_bytes: int, folder: Path, iterations: int, slice_s: float) -> None:
    """Train all in turns; their figures go into the rows. ``base_bytes``: of a process that trains next to nothing.

    Raises:
        Ended: a run failed, as one does that runs out of memory.
    """
    runs = []
    for row in rows:
        row["limit_bytes"] = base_bytes + DEVICE_BYTES + row["reserve_bytes"] + row["host_bytes"]
        more = ["--user-defined-schedule", str(folder / f"{row['name']}.json")]
        runs.append(Limited(row["name"], row["words"], folder, iterations, row["limit_bytes"], *more))
    try:
        interleave(runs, slice_s, lambda number: None)
    finally:
        for row, run in zip(rows, runs):
            row["peak_bytes"] = run.peak_bytes()
    figures = []
    for row, run in zip(rows, runs):
        metrics = json_files.load(run.metrics, dict)
        figures.append(over_slices(run, metrics["iteration_us"], metrics["iteration_us"], slice_s))
        row |= {"iteration_us": median(figures[-1].values), "iterations": len(figures[-1].values)}
        row |= {"census_bytes": max(metrics["device_bytes"], default=None)}
    for row, figure in list(zip(rows, figures))[1:]:
        row["over_chosen"] = ratio_of(ratios_to(figures[0].of_slice, figure.of_slice))._asdict()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--slice", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "fit_trained")
    args = parser.parse_args()
    os.environ.update(GIVES_BACK)
    load, kept = os.getloadavg()[0], args.folder / "choices.json"
    args.folder.mkdir(parents=True, exist_ok=True)
    if not kept.exists():
        json_files.save(kept, choose(args.folder))
    rows = json_files.load(kept, list)
    base_bytes = Limited("small", [*MODEL.split(), *SMALL], args.folder, 3, None).peak_bytes()
    for first in range(1, len(rows), TOGETHER):
        others = rows[first : first + TOGETHER]
        if not all("over_chosen" in row for row in others):
            train([rows[0], *others], base_bytes, args.folder, args.iters, args.slice)
            json_files.save(kept, rows)
    over = 1 / min(1.0, *(row["over_chosen"]["median"] for row in rows[1:]))
    summary = {"trained": len(rows), "base_bytes": base_bytes, "chosen_over_fastest": over}
    summary["fullest"] = max(row["peak_bytes"] / row["limit_bytes"] for row in rows)
    json_files.save(OUT, {**about_this_machine(load_before=load), **summary, "rows": rows}, indent=1)
    pictures.draw(OUT)
    print(summary)
    return int(over > 1 + WITHIN)


if __name__ == "__main__":
    sys.exit(main())
