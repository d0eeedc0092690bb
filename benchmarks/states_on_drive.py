"""Optimizer states on a drive: rates, equality, ZeRO-Infinity beside ours, and a model larger than the memory.

    .venv/bin/python benchmarks/states_on_drive.py [--parts rate equal infinity larger] [--nvme DIR]

rate      the steps of an optimizer whose states rest on the drive, beside one plain reader and one plain writer of the
          same drive at the same time (plain_writer.py), and beside the same steps with states in memory, in time
          slices: bytes a second, past the page cache for both
equal     a run with all states on the drive beside the same run with states in memory: losses and parameters
infinity  DeepSpeed's ZeRO-Infinity (parameters and optimizer states on the drive) beside ours: iteration time in turns,
          and the memory of the process above what it holds before the model is built
larger    three iterations of a model whose states exceed the memory of the machine; it is ended where it holds more
          than --memory-gib

Writes benchmarks/results/states_on_drive.json, each part by itself: parts that were not run are kept. Ends with 1 where
a part does not hold: a rate below 0.8 of the plain pair's, losses that differ, more than 0.9 of ZeRO-Infinity's
iteration time or more memory, a file left on the drive.
"""

import argparse
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import peer_packages
import pictures
import torch
from machine import about_this_machine
from measuring import CORPUS, describe, training_command
from msgspec.structs import replace

from megatron_ext.formats import json_files
from megatron_ext.formats import trace as traces
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.runtime import drive
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.host_step.after_norm import AfterNorm
from megatron_ext.runtime.host_step.drive_states import DriveStates, DriveUnit
from megatron_ext.runtime.host_step.room import Link
from megatron_ext.runtime.host_step.unit import Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.state_placement import LARGE_SLOT_BYTES, SLOTS, largest_region
from megatron_ext.schedule.user_defined_schedule import StateSlots
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.drive_reads import DriveReads

ROOT = Path(__file__).resolve().parents[1]
RATE, TIME = 0.8, 0.9
RECOMPUTE = "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
# Freed memory goes back to the system, or what is needed before the first iteration would count for the whole run.
TRIM = {"MALLOC_MMAP_MAX_": "1000000", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "1048576"}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Model:
    """A GPT on one rank, and its schedule: every layer a group, whose gradient comes and goes and is added up in host
    memory, all optimizer states on the drive."""

    def __init__(self, folder: Path, layers: int, hidden: int, heads: int, seq: int, micro_batches: int = 1):
        self.folder = folder
        sizes = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {seq}"
        batch = f"--micro-batch-size 1 --global-batch-size {micro_batches} --untie-embeddings-and-output-weights"
        self.plain = [*sizes.split(), *batch.split(), "--bf16"]
        self.options = [*self.plain, *RECOMPUTE[1:], "--optimizer-cpu-offload"]
        work = describe(folder / "workload.json", [*self.options, "--data-parallel-size", "1"], 1, None)
        schedule = stock_schedule(work, layer_buckets)
        work = replace(work, zero_stage=2)
        groups = tuple(replace(group, states_rest="nvme", gradients="host") for group in schedule.groups)
        largest = max(largest_region(schedule, work, index) for index in range(len(groups)))
        slots = StateSlots(slots=SLOTS, slot_bytes=max(largest, LARGE_SLOT_BYTES))
        self.schedule = validate.validate(replace(schedule, zero_stage=2, groups=groups, state_slots=slots))
        self.parameters = sum(p.numel for chunk in work.chunks for p in chunk.parameters)
        self.bill = memory_bill(self.schedule, work)[0].memory
        self.path = folder / "schedule.json"
        schedule_file.save(self.path, self.schedule)

    def command(self, name: str, iterations: int, *more: str) -> list[str]:
        cache = ["--data-cache-path", str(self.folder / f"{name}.cache"), "--init-by-name", *more]
        return training_command(self.options, iterations, self.folder / f"{name}.json", *cache)

    def by_schedule(self, nvme) -> list[str]:
        return ["--user-defined-schedule", str(self.path), "--user-defined-schedule-nvme-path", str(nvme)]


class Ended(RuntimeError):
    """A run ended with an error, or held more memory than it may."""


def run(name: str, command: list[str], folder: Path, environment: dict[str, str], most_bytes: int | None = None) -> int:
    """Run a rank of its own; the most bytes of memory that it held.

    Raises:
        Ended: with the end of its log.
    """
    log = folder / f"{name}.log"
    with open(log, "w") as out:
        shared = {"PYTHONPATH": str(ROOT / ".megatron"), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        environment = os.environ | shared | ALONE | {"MASTER_PORT": str(free_port())} | environment
        process = subprocess.Popen([sys.executable, *command], stdout=out, stderr=out, cwd=ROOT, env=environment)
        held = 0
        try:
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")  # before anybody else on this machine
            while process.poll() is None:
                held = max(held, resident_bytes(process.pid))
                if most_bytes is not None and held > most_bytes:
                    raise Ended(f"{name} holds {held} bytes, more than {most_bytes}")
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise Ended(f"{name} ended with {process.returncode}: {log.read_text()[-1500:]}")
    return held


def resident_bytes(pid: int) -> int:
    """The most memory that a process has held; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


# Rate.


class Steps:
    """Steps of Adam whose states pass through slots; and of the first units with their states in memory."""

    def __init__(self, directory, size_bytes: int, piece_bytes: int):
        count = max(size_bytes // piece_bytes, SLOTS + 1)
        ours = [torch.zeros(piece_bytes // 12) for _ in range(count)]
        gradient = torch.full((piece_bytes // 12,), 1e-3)
        self.optimizers = [torch.optim.AdamW([one], lr=1e-3, fused=True) for one in ours]
        self.link, shard = Link(HostDevice(), HostDevice.device), torch.zeros(piece_bytes // 12, dtype=torch.bfloat16)
        how = dict(settings=DriveReads(), link=self.link, issuer=Issuer())
        self.states, self.after_norm = DriveStates(directory, moments=2, slots=SLOTS, **how), AfterNorm(self.link)
        for one, optimizer in zip(ours, self.optimizers):
            piece = Piece(one, lambda: gradient, shard, gradient_on_host=True, shard_on_host=True)
            self.states.units.append(DriveUnit(0, optimizer, [piece], self.states))
        self.states.open()
        self.bytes, self.in_memory = 2 * self.states.bytes, [torch.zeros_like(gradient) for _ in range(SLOTS)]
        for one in self.in_memory:
            one.grad = gradient
        self.others = [torch.optim.AdamW([one], lr=1e-3, fused=True) for one in self.in_memory]
        self.step()  # makes the moments
        self.step()

    def step(self) -> float:
        """Seconds of a step of all units."""
        start = time.monotonic()
        self.states.expect(self.states.units)
        self.after_norm.expect([*self.states.units])
        for optimizer in self.optimizers:
            optimizer.step()
        return time.monotonic() - start

    def step_in_memory(self) -> float:
        """Seconds that a step of all units would take with their states in memory."""
        start = time.monotonic()
        for optimizer in self.others:
            optimizer.step()
        return (time.monotonic() - start) * len(self.optimizers) / len(self.others)


class Plain:
    """A plain reader or writer of a file of its own, see plain_writer.py; stopped but for its time slices."""

    def __init__(self, directory, direction: str, size_bytes: int, block_bytes: int):
        self.size_bytes, self.file = size_bytes, drive.create(directory, size_bytes)
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        script = [sys.executable, str(ROOT / "benchmarks/plain_writer.py"), path]
        block = str(block_bytes)
        subprocess.run([*script, "fill", block, str(size_bytes)], check=True)  # what was never written is not read
        self.process = subprocess.Popen([*script, direction, block, str(size_bytes)])
        while not self.moved():
            time.sleep(0.01)
        self.process.send_signal(signal.SIGSTOP)

    def begin(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def moved(self) -> int:
        """Bytes that the process has moved past the page cache, by the kernel's count."""
        counted = dict(line.split(": ") for line in Path(f"/proc/{self.process.pid}/io").read_text().splitlines())
        return int(counted["read_bytes"]) + int(counted["write_bytes"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.file)


def plain_rate(pair: list[Plain], seconds: float) -> float:
    """Bytes a second of both together."""
    before, start = sum(one.moved() for one in pair), time.monotonic()
    for one in pair:
        one.begin()
    time.sleep(seconds)
    for one in pair:
        one.end()
    return (sum(one.moved() for one in pair) - before) / (time.monotonic() - start)


def rate(args, folder: Path) -> dict:
    size, block = args.rate_mib << 20, DriveReads().block_bytes
    steps = Steps(args.nvme, size, args.piece_mib << 20)
    pair = [Plain(args.nvme, direction, size, block) for direction in ("read", "write")]
    rows = []
    try:
        for _ in range(args.slices):
            plain = plain_rate(pair, args.slice)
            steps.step()  # what was read ahead before the slice is not counted
            count = max(1, round(args.slice * plain / steps.bytes))
            start = time.monotonic()
            for _ in range(count):
                steps.step()
            found = {"plain": plain, "steps": count * steps.bytes / (time.monotonic() - start)}
            steps.step_in_memory()
            rows.append(found | {"in_memory": steps.bytes / median(steps.step_in_memory() for _ in range(3))})
    finally:
        for one in pair:
            one.close()
        steps.states.close()
        steps.link.close()
    ratios = [row["steps"] / row["plain"] for row in rows]
    found = {"slices": rows, "ratio": median(ratios), "spread": [min(ratios), max(ratios)], "at_least": RATE}
    # Where the arithmetic takes longer than the plain pair, reads and writes are hidden behind it.
    found["to_slower"] = median(row["steps"] / min(row["plain"], row["in_memory"]) for row in rows)
    return found | {"piece_bytes": args.piece_mib << 20, "block_bytes": block, "holds": found["to_slower"] >= RATE}


# Runs by the example.


def train(model: Model, name: str, iterations: int, *more: str, most_bytes: int | None = None) -> tuple[dict, int]:
    """The metrics of a run by the example, and the most memory that it held."""
    stock = {"MEGATRON_EXT_STOCK_GATHER": "1"} if name.startswith("memory") else {}
    held = run(name, model.command(name, iterations, *more), model.folder, TRIM | stock, most_bytes)
    return json_files.load(model.folder / f"{name}.json", dict), held


def equal(args, folder: Path) -> dict:
    model = Model(folder, layers=4, hidden=512, heads=8, seq=32)
    on_drive, _ = train(model, "drive", 6, *model.by_schedule(args.nvme))
    in_memory, _ = train(model, "memory", 6, *model.by_schedule(args.nvme))
    same = all(on_drive[name] == in_memory[name] for name in ("loss", "grad_norm", "parameter_sha256"))
    return {"parameters": model.parameters, "loss": on_drive["loss"], "holds": same and not os.listdir(args.nvme)}


def larger(args, folder: Path) -> dict:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    layers = args.layers or memory * 1.025 // (12 * 12 * args.hidden**2) + 1
    model = Model(folder, layers=int(layers), hidden=args.hidden, heads=args.hidden // 128, seq=8)
    trace = folder / "larger.trace.json"
    more = [*model.by_schedule(args.nvme), "--user-defined-schedule-trace", str(trace)]
    start = time.monotonic()
    metrics, held = train(model, "larger", 3, *more, most_bytes=int(args.memory_gib * (1 << 30)))
    seconds = time.monotonic() - start
    finite = all(math.isfinite(loss) for loss in metrics["loss"])
    found = {
        "parameters": model.parameters,
        "states_bytes": model.bill.nvme_bytes,
        "memory_bytes": memory,
        "most_resident_bytes": held,
        "bill_device": model.bill.device_bytes,
        "bill_host": model.bill.host_bytes,
        "loss": metrics["loss"],
        "iteration_us": metrics["iteration_us"],
        "seconds": seconds,
        "rates": drive_rates(traces.load(trace)[0], model.bill.nvme_bytes),
        "left_on_drive": os.listdir(args.nvme),
    }
    return found | {"holds": finite and not found["left_on_drive"] and (args.layers or found["states_bytes"] > memory)}


def united(spans) -> list[tuple[float, float]]:
    """The union of intervals, in order."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def drive_rates(events: list, size_bytes: int) -> dict[str, float]:
    """Bytes a second of the last iteration's reads, writes, and both, each over the time in which any was under way."""
    last = max(event.iteration for event in events)
    spans = {
        name: [
            (event.start_us, event.start_us + event.duration_us)
            for event in events
            if event.lane == "nvme" and event.name == name and event.iteration == last
        ]
        for name in ("states read", "states write")
    }
    busy = lambda parts: sum(stop - start for start, stop in united(parts)) / 1e6
    both = busy([span for parts in spans.values() for span in parts])
    return {name: size_bytes / busy(parts) for name, parts in spans.items()} | {"both": 2 * size_bytes / both}


# ZeRO-Infinity.


def infinity(args, folder: Path) -> dict:
    model = Model(folder, layers=8, hidden=1024, heads=16, seq=64)
    peer = peer_packages.environment() | {"PEER_NVME": str(args.nvme)}
    rows = []
    for number in range(args.rounds):
        row = {}
        for name in ("ours", "infinity") if number % 2 == 0 else ("infinity", "ours"):
            if name == "ours":
                metrics, held = train(model, name, args.iters, *model.by_schedule(args.nvme))
            else:
                command = training_command(model.plain, args.iters, folder / f"{name}.json", "--init-by-name")
                held = run(name, ["benchmarks/peer_deepspeed.py", "infinity", *command[1:]], folder, TRIM | peer)
                metrics = json_files.load(folder / f"{name}.json", dict)
            us = metrics["iteration_us"][2:]
            row[name] = {"iteration_us": us, "held_bytes": held, "loss": metrics["loss"]}
        row["ratio"] = median(row["ours"]["iteration_us"]) / median(row["infinity"]["iteration_us"])
        rows.append(row)
    ratios = [row["ratio"] for row in rows]
    held = {name: max(row[name]["held_bytes"] for row in rows) for name in ("ours", "infinity")}
    found = {
        "parameters": model.parameters,
        "rounds": rows,
        "ratio": median(ratios),
        "spread": [min(ratios), max(ratios)],
    }
    holds = found["ratio"] <= TIME and held["ours"] <= held["infinity"]
    return found | {"held_bytes": held, "at_most": TIME, "holds": holds}


PARTS = {"rate": rate, "equal": equal, "infinity": infinity, "larger": larger}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--nvme", type=Path, default=None, help="A directory on the drive; default: where temporary files are.")
    add("--rate-mib", type=int, default=1536, help="States whose steps are timed.")
    add("--piece-mib", type=int, default=LARGE_SLOT_BYTES >> 20, help="Of them, what is read and written at once.")
    add("--slices", type=int, default=8)
    add("--slice", type=float, default=5.0, help="Seconds of a slice.")
    add("--rounds", type=int, default=3, help="Of ours and ZeRO-Infinity in turns.")
    add("--iters", type=int, default=6)
    add("--layers", type=int, default=None, help="Of the larger model; default: its states exceed the memory.")
    add("--hidden", type=int, default=1024)
    add("--memory-gib", type=float, default=15.5, help="Ends the larger run where it holds more.")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "states_on_drive.json")
    args = parser.parse_args()
    args.out = args.out.resolve()
    os.chdir(ROOT)
    if not Path(f"{CORPUS}.idx").exists():
        print(f"states_on_drive: {CORPUS} is not there yet: scripts/pretrain_gpt_hybrid.sh builds it", file=sys.stderr)
        return 2
    result = json_files.load(args.out, dict) if args.out.exists() else {}
    with tempfile.TemporaryDirectory(dir=args.nvme, prefix="states-on-drive.") as where:
        args.nvme = Path(where) / "drive"
        for name in args.parts:
            folder = Path(where) / name
            folder.mkdir()
            args.nvme.mkdir(exist_ok=True)
            load = os.getloadavg()[0]
            result[name] = PARTS[name](args, folder)
            shutil.rmtree(args.nvme)
            options = {key: value for key, value in vars(args).items() if key not in ("out", "nvme", "parts")}
            result[name] |= {"about": about_this_machine(load_before=load), "options": options}
            result["about"] = result[name]["about"]
            json_files.save(args.out, result, indent=1)
            print(
                name, {key: value for key, value in result[name].items() if key not in ("about", "options", "slices")}
            )
    pictures.draw(args.out)
    return 0 if all(result[name]["holds"] for name in args.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
