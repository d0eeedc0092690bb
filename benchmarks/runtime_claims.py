"""What the runtime costs and hides, each claim beside its alternative, in interleaved time slices of seconds.

    .venv/bin/python benchmarks/runtime_claims.py [--claims overhead nvme] [--iters 120]

overhead  a schedule of policy all-gpu beside stock Megatron: iteration time
nvme      every group read from the drive while training computes, beside a plain sequential reader
          of the same drive: bytes a second. The reader runs beside a training run too, one without
          reads; how fast it is while nothing else runs is told as well. At the begin of an iteration
          every rank publishes fresh parameters to the drive: what is read meanwhile is told apart,
          and held to the plain reader beside as many plain writers (plain_writer.py), in every other
          slice

Writes benchmarks/results/runtime_claims.json. Ends 0 if all hold: overhead at most 1 %, reading at
least 80 % of the plain reader's rate.
"""

import argparse
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from pathlib import Path
from statistics import median

import pictures
from interleaved_ab import Pair, Run, interleave, pairs, ratio_of, whole_iterations
from machine import about_this_machine
from msgspec.structs import replace
from peer_layouts import CORPUS, ROOT, Layout
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext.formats import json_files
from megatron_ext.formats import trace as traces
from megatron_ext.formats.trace import Event
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.runtime import drive
from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.user_defined_schedule import PublishGroup, Schedule, StageIn

WITHIN, READ_SHARE = 1.01, 0.80
READ_BYTES, BLOCK_BYTES = 64 << 20, 1 << 20


class Claims:
    """The benchmark's runs; ``folder`` holds their files."""

    def __init__(self, args, folder: Path, bar: Progress):
        self.args, self.folder, self.bar = args, folder, bar
        self.layouts: dict[str, Layout] = {}

    def layout(self, name: str) -> Layout:
        if name not in self.layouts:
            task = self.bar.add_task(f"measuring the cost table of {name}", total=None)
            self.layouts[name] = Layout(name, self.args, self.folder)
            self.layouts[name].measure()
            self.bar.update(task, visible=False)
        return self.layouts[name]

    def run(self, layout: Layout, name: str, iterations: int, *more: str) -> Run:
        command = [
            "examples/pretrain_gpt_hybrid.py",
            *layout.options(layout.folder / f"{name}.json", iterations),
            *more,
        ]
        return Run(name, command, 4, layout.folder / f"{name}.log")

    def train(self, what: str, runs: list[Run], between=None, begin=None) -> None:
        task = self.bar.add_task(what, total=None)

        def report(number: int) -> None:
            self.bar.update(task, description=f"{what}: slice {number + 1}")
            if begin is not None:
                begin(number)

        interleave(runs, self.args.slice, between, report)
        self.bar.update(task, visible=False)

    def iteration_us(self, layout: Layout, name: str) -> list[float]:
        return json_files.load(layout.folder / f"{name}.json", dict)["iteration_us"]

    def overhead(self) -> dict:
        found = {}
        for name in ("pp2", "dp4"):
            layout = self.layout(name)
            plan = layout.plan(1, None, "all-gpu")
            stock, scheduled = (
                self.run(layout, "stock", self.args.iters),
                self.run(layout, "all-gpu", self.args.iters, "--user-defined-schedule", str(plan)),
            )
            self.train(f"{name}: stock and all-gpu", [stock, scheduled])
            one, two = self.iteration_us(layout, "stock"), self.iteration_us(layout, "all-gpu")
            row = ratios(pairs((stock, one, one), (scheduled, two, two), self.args.slice))
            found[name] = row | {"holds": row["median"] <= WITHIN}
        return found | {"at_most": WITHIN, "holds": all(row["holds"] for row in found.values())}

    def nvme(self) -> dict:
        layout = self.layout("dp4")
        schedule = layout.folder / "nvme.schedule.json"
        schedule_file.save(schedule, nvme_schedule(layout.describe("nvme", 3, None)))
        where = str(self.args.nvme or self.folder)
        trace = layout.folder / "nvme.trace.json"
        more = [
            "--user-defined-schedule",
            str(schedule),
            "--user-defined-schedule-trace",
            str(trace),
            "--user-defined-schedule-nvme-path",
            where,
        ]
        reading, beside = self.run(layout, "nvme", self.args.iters, *more), self.run(layout, "beside", self.args.iters)
        sizes = {str(index): group.bytes for index, group in enumerate(schedule_file.decode(schedule).groups)}
        reader, alone = SequentialReader(where), []
        plain: dict[bool, dict[int, float]] = {
            False: {},
            True: {},
        }  # the reader's rates by slice, without and with writers

        def written(number: int) -> bool:
            return number // 2 % 2 == 1

        def between(number: int) -> None:
            if beside.slice == number:
                plain[written(number)][number] = reader.stop()
                writers.stop()
            if not alone or number % 4 == 0:  # while all runs are stopped
                reader.start()
                time.sleep(0.3)
                alone.append(reader.stop())

        def begin(number: int) -> None:
            if beside.slice == number:
                if written(number):
                    writers.start()
                reader.start()

        with Writers(where, max(sizes.values()), 4) as writers:
            self.train("reading while training", [reading, beside], between, begin)
        us = self.iteration_us(layout, "nvme")
        whole = whole_iterations(reading, us, self.args.slice)
        events, slice_of = (
            traces.load(trace)[0],
            {i: time_slice for time_slice, indices in whole.items() for i in indices},
        )
        found = {}
        for name, writing in (("reads", False), ("reads_beside_writes", True)):
            rates = reading_rates(events, sizes, slice_of, writing=writing)
            row = ratios(
                [
                    Pair(plain[writing][time_slice + 1], rate, (1, len(whole[time_slice])))
                    for time_slice, rate in sorted(rates.items())
                    if time_slice + 1 in plain[writing]
                ]
            )
            found[name] = row | {"holds": row["median"] >= READ_SHARE}
        holds = all(row["holds"] for row in found.values())
        return found | {
            "unit": "bytes a microsecond",
            "reader_alone": median(alone),
            "group_bytes": sorted(sizes.values()),
            "at_least": READ_SHARE,
            "holds": holds,
        }


def nvme_schedule(work) -> Schedule:
    """Every layer from the drive whenever it is used, read ahead as far as the step goes."""
    schedule = stock_schedule(work)
    slot_of: dict[int, int] = {}
    for rank in range(work.parallel.pp):
        own = [index for index, group in enumerate(schedule.groups) if group.pp_rank == rank]
        slot_of |= {group: slot for slot, group in enumerate(own)}
    ranks = []
    for rank in schedule.ranks:
        steps = tuple(
            replace(
                entry,
                stage_in=tuple(StageIn(u.group, slot_of[u.group]) for u in entry.unshard),
                unshard=tuple(replace(u, route="nvme") for u in entry.unshard),
            )
            for entry in rank.steps
        )
        ranks.append(replace(rank, steps=steps))
    limits = replace(schedule.limits, nvme_slots=max(slot_of.values()) + 1)
    publish = tuple(PublishGroup(group=group, to=("nvme",)) for group in slot_of)
    schedule = validate.validate(replace(schedule, ranks=tuple(ranks), limits=limits, publish=publish))
    match.match(schedule, work)
    return schedule


class SequentialReader:
    """A plain reader: one file from its begin to its end and again, past the page cache, a block after the other."""

    def __init__(self, directory: str):
        descriptor = drive.create(directory, READ_BYTES)
        self.file = drive.DriveFile(
            f"/proc/{os.getpid()}/fd/{descriptor}", "the reader's file", block_bytes=BLOCK_BYTES, queue_depth=1
        )
        os.close(descriptor)
        self.memory = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self.file.write(os.urandom(1 << 20) * (READ_BYTES >> 20), 0, "reader")
        self.file.flush(0, READ_BYTES, "reader")
        self._thread = None

    def start(self) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Bytes a microsecond since :meth:`start`; 0 where it was not started."""
        if self._thread is None:
            return 0.0
        self._stopped = True
        self._thread.join()
        self._thread = None
        return self._rate

    def _read(self) -> None:
        start, done = time.perf_counter(), 0
        while not self._stopped:
            self.file.read(self.memory, done % READ_BYTES, "reader")
            done += BLOCK_BYTES
        self._rate = done / (time.perf_counter() - start) / 1e6


class Writers:
    """``count`` processes of plain_writer.py on one file, stopped but from :meth:`start` to :meth:`stop`."""

    def __init__(self, directory: str, block_bytes: int, count: int):
        self._file = drive.create(directory, READ_BYTES)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        numbers = lambda index: [str(n) for n in (index, count, drive.aligned(block_bytes), READ_BYTES)]
        self._writers = [
            subprocess.Popen([sys.executable, str(ROOT / "benchmarks/plain_writer.py"), path, *numbers(index)])
            for index in range(count)
        ]
        time.sleep(0.5)  # they have begun
        self.stop()

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *_) -> None:
        for writer in self._writers:
            writer.kill()
        ended = [writer.wait() for writer in self._writers]
        os.close(self._file)
        assert set(ended) == {-signal.SIGKILL}, f"plain writers ended with {ended}"

    def start(self) -> None:
        for writer in self._writers:
            writer.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for writer in self._writers:
            writer.send_signal(signal.SIGSTOP)


def reading_rates(
    events: list[Event], sizes: dict[str, int], slice_of: dict[int, int], *, writing: bool
) -> dict[int, float]:
    """By slice: bytes of all ranks over the time in which any of them was reading; of the time in
    which some rank was writing to the drive, or of the rest. A read's bytes come evenly through it."""
    writes = united((e.start_us, e.start_us + e.duration_us) for e in events if e.lane == "publish")
    spans: dict[int, list[tuple[float, float]]] = {}
    read: dict[int, float] = {}
    for event in events:
        if event.lane == "nvme" and event.iteration - 1 in slice_of:
            span = (event.start_us, event.start_us + event.duration_us)
            beside = both(span, writes)
            parts = beside if writing else without(span, beside)
            time_slice = slice_of[event.iteration - 1]
            spans.setdefault(time_slice, []).extend(parts)
            read[time_slice] = (
                read.get(time_slice, 0.0) + sizes[event.name.split()[-1]] * length(parts) / event.duration_us
            )
    return {time_slice: read[time_slice] / length(united(found)) for time_slice, found in spans.items() if found}


def both(span: tuple[float, float], others: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of ``span`` inside ``others``, which are in order and apart."""
    first = max(bisect_right(others, span[0], key=lambda other: other[0]) - 1, 0)
    found = []
    for start, stop in others[first:]:
        if start >= span[1]:
            break
        if stop > span[0]:
            found.append((max(start, span[0]), min(stop, span[1])))
    return found


def without(span: tuple[float, float], parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is left of ``span`` between ``parts``, which are in order inside it."""
    edges = [span[0], *(edge for part in parts for edge in part), span[1]]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2]) if stop > start]


def length(spans: list[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)


def united(spans) -> list[tuple[float, float]]:
    """The union of intervals, in order."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def ratios(found: list[Pair]) -> dict:
    """Second over first of all pairs: median, spread, and the standard error of the median."""
    ratio = ratio_of([pair.ratio for pair in found])
    return {
        "median": ratio.median,
        "p10": ratio.p10,
        "p90": ratio.p90,
        "standard_error": ratio.standard_error,
        "pairs": ratio.slices,
        "first": median(p.first for p in found),
        "second": median(p.second for p in found),
        "iterations": [sum(p.iterations[n] for p in found) for n in (0, 1)],
    }


CLAIMS = {"overhead": Claims.overhead, "nvme": Claims.nvme}


def show(found: dict) -> None:
    table = Table("claim", "ratio", "10th to 90th percentile", "+- of the median", "pairs", "limit", "holds")
    for name, claim in found.items():
        limit = f"at most {claim['at_most']:.2f}" if "at_most" in claim else f"at least {claim['at_least']:.2f}"
        for title, row in ((f"{name} {part}", row) for part, row in claim.items() if isinstance(row, dict)):
            table.add_row(
                title,
                f"{row['median']:.3f}",
                f"{row['p10']:.3f} to {row['p90']:.3f}",
                f"{2 * row['standard_error']:.3f}",
                str(row["pairs"]),
                limit,
                "yes" if row["holds"] else "NO",
            )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS))
    parser.add_argument("--iters", type=int, default=120)
    parser.add_argument("--slice", type=float, default=5.0, help="seconds of a slice")
    parser.add_argument("--nvme", type=Path, help="a directory on the drive; default: where temporary files are")
    for name, default in (
        ("layers", 8),
        ("hidden", 256),
        ("heads", 4),
        ("seq", 128),
        ("micro-batch-size", 2),
        ("global-batch-size", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--measure-seconds", type=float, default=30)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--keep", type=Path, help="keep the runs' files in this folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/runtime_claims.json")
    args = parser.parse_args()
    os.chdir(ROOT)
    if not Path(f"{CORPUS}.idx").exists():
        raise SystemExit("there is no corpus yet: run scripts/pretrain_gpt_hybrid.sh first")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary, Progress(console=Console(stderr=True)) as bar:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        claims = Claims(args, folder, bar)
        found = {name: CLAIMS[name](claims) for name in args.claims}
    options = {key: value for key, value in vars(args).items() if key not in ("out", "keep", "nvme")}
    json_files.save(args.out, {"about": about_this_machine(load_before=load), "options": options, **found}, indent=1)
    pictures.draw(args.out)
    show(found)
    return 0 if all(claim["holds"] for claim in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
