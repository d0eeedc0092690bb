"""The program of one rank: every curve at every size in several passes with compute in between, then contention.

[Note: Passes]
The whole grid is measured several times, because a shared machine changes its speed for seconds: samples
of one size that lie far apart in time say more than the same number in a row. All samples count together. If the
medians of quarters of the time differ, the table has a note. After the first pass, sizes are added
where neighbours disagree. Every later pass has another order. The rounds of a visit are limited. If transfers are
short, time is left after these passes, and further passes use it. A visit that took far longer than its share
(a host step of a whole model makes its states again) is not repeated if less time than that is left. Host copies that
took less than ``SHORT_US`` in the first pass are visited ``SHORT_VISITS`` times in each later pass, with the same
number of rounds in all.

[Note: In the surroundings of the run]
The given modules are made before anything is measured. So the time that a framework adds to every call, and the
threads of its process groups, are present as in training.
"""

import faulthandler
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from megatron_ext.formats.facts import RANKS_PER_DEVICE
from megatron_ext.launch.launcher import START_SECONDS
from megatron_ext.measure import contention, host_memory_rate, kept_measurement, nvme_route, scaled_sizes, size_grid
from megatron_ext.measure.compute_rounds import ComputeRounds
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.layer_times import load_runners
from megatron_ext.measure.operation import Operation
from megatron_ext.measure.operations import OPERATIONS, TimedSymmetricGather
from megatron_ext.measure.options import MIB, MOST_OVER
from megatron_ext.measure.progress_bar import visit_text
from megatron_ext.measure.run_step import RunStep, RunStepCastOnDevice
from megatron_ext.measure.sampling import MAX_ROUNDS, Samples, sample
from megatron_ext.measure.timed_steps import DeviceStep, HostOptimizer, TimedHostStep
from megatron_ext.measure.visits import ISSUED, first_medians, merge_visits, rows_of_curves, shuffled
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.workload.route import SYMMETRIC

PASSES, MAX_PASSES = 5, 20
CONTENTION_SHARE, COMPUTE_SHARE, SWEEP_SHARE, MEMORY_SHARE = 0.25, 0.25, 0.1, 0.02
"""Shares of the time; the curves have the rest. Compute has a large share because it is most of an iteration."""

SHORT_US, SHORT_VISITS = 3000.0, 4
"""All rounds of a short copy in a row end within milliseconds, and so see only one state of a shared machine. Host
copies of 0.5 to 25 MB, interpolated from the other sizes of the same measurement, were up to 17 % off with visits of 20
rounds and up to 12 % off with four visits of 5 rounds, in three measurements of two models each. All-gathers of a
millisecond became worse with four visits."""

STOP, SKIP, MEASURE = range(3)
"""What rank 0 decides about the next size, so that all ranks do the same."""

Report = Callable[[int, int, str], None]
"""``report(done, total, what)``; called on rank 0 only."""


def run(
    fabric: Fabric, report: Report, so_far: Callable[[dict], None] = lambda raw: None, *, ends: bool = False
) -> dict | None:
    """Measure everything that the options ask for; the result on rank 0, None on the other ranks.

    If it takes ``MOST_OVER`` times as long as asked for and at least 10 s longer, or one part of starting more than
    ``START_SECONDS``, the stacks of all threads are written to standard error. With ``ends`` the process then ends
    with exit code 1.

    Args:
        report: its ``done`` is 0 until measuring begins.
        so_far: called with the results so far when the curves and compute are done, and later; on rank 0 only.
    """
    measurement = Measurement(fabric, report, ends)
    seconds = fabric.options.seconds  # 10 s more for short measurements: a busy machine may take them to free memory
    faulthandler.dump_traceback_later(max(MOST_OVER * seconds, seconds + 10), file=2, exit=ends)
    measurement.take_passes()
    result = measurement.finish(so_far)
    faulthandler.cancel_dump_traceback_later()
    return result


class Measurement:
    """One rank's part of a measurement: passes over the curves, with rounds of compute between them, then contention.

    Attributes:
        operations: by the name of the curve.
        visits: by pass, (curve, size) in the order in which they are visited.
        merged: see :func:`merge_visits`.
        refined: (curve, size) that the first pass did not have.
        short: (curve, size) that are visited ``SHORT_VISITS`` times in each pass after the first.
        overlong: seconds of visits that took more than twice their share, by (curve, size).
        spent: seconds by curve, for compute and for contention.
    """

    def __init__(self, fabric: Fabric, report: Report, ends: bool = False):
        self.fabric, self.report, self._ends, self._starts = fabric, report, ends, True
        self.done, self.total = 0, 1
        self.overlong: dict[tuple[str, int], float] = {}
        self.spent: defaultdict[str, float] = defaultdict(float)
        options = fabric.options
        modules = options.modules if "compute" in options.links else None
        self._say("making the layers")
        runners = load_runners(modules, list(options.module_args)) if modules is not None else {}
        kinds = dict(OPERATIONS)
        if options.optimizer_on_host:
            kinds |= {kind.name: kind for kind in (HostOptimizer, TimedHostStep, DeviceStep)}
            if not fabric.device.why_no_flags:  # a run does not step this way without flags either
                kinds |= {kind.name: kind for kind in (RunStep, RunStepCastOnDevice)}
        names = [name for name in size_grid.curves_asked(options) if name in kinds]
        symmetric, self.refused = TimedSymmetricGather.tried(fabric) if SYMMETRIC in names else (None, "")
        self.operations: dict[str, Operation] = {}
        for name in names:
            self._say(f"memory of {name}")
            operation = symmetric if name == SYMMETRIC else kinds[name](fabric)
            if operation is not None:
                self.operations[name] = operation
        names = list(self.operations)
        self.drive = None
        if "nvme" in options.links and options.has("nvme"):
            self._say("nvme: block size, queue depth")
            read = nvme_route.NvmeRead(fabric)
            self.operations |= {"nvme": read, "publish_nvme": nvme_route.NvmeWrite(read)}
            names += ["nvme", "publish_nvme"]
            self.drive = nvme_route.sweep(fabric, read, options.seconds * SWEEP_SHARE)
        self.grid = [(name, size) for name in names for size in size_grid.sizes_of(name, options)]
        self.merged, seconds_before = self._kept()
        self.visits = [sorted((visit for visit in self.grid if visit not in self.merged), key=lambda visit: visit[1])]
        self.visits += [shuffled(self.grid, number) for number in range(1, PASSES)]
        self.pairs = contention.pairs(fabric) if "contention" in options.links else []
        self.contention_seconds = options.seconds * CONTENTION_SHARE if self.pairs else 0.0
        self.needs: scaled_sizes.Needs = {}
        self.kept_at = monotonic()
        self.refined: set[tuple[str, int]] = set()
        self.short: set[tuple[str, int]] = set()
        self._count()
        # If only compute is measured, it has all of the time.
        share = COMPUTE_SHARE if names or self.pairs else 1.0
        compute_seconds = options.seconds * share if runners else 0.0
        self.compute_rounds = None
        if runners:
            self.compute_rounds = ComputeRounds(fabric, runners, compute_seconds, PASSES, self._say)
        # Time starts here: the time of making a large model must not be taken from the curves.
        sweep_seconds = options.seconds * SWEEP_SHARE if self.drive else 0.0
        curves = options.seconds * (1 - MEMORY_SHARE) - self.contention_seconds - compute_seconds - sweep_seconds
        self.curves_seconds = max(curves - seconds_before, curves / 2)
        self._first_use()
        self.ready, self.compute_taken = monotonic(), 0
        self.curves_end = self.ready + self.curves_seconds
        self.seconds_before, self.end = seconds_before, self.ready + options.seconds
        if self.compute_rounds is not None:
            self.compute_rounds.end = self.end
        self.done += 1
        self._starts = False
        self._say("ready")

    def take_passes(self) -> None:
        """Visit every curve at every size ``PASSES`` times, and more often while there is time."""
        for number in range(MAX_PASSES):
            if number == 1:
                self._refine()
            if number >= PASSES:
                if self.fabric.agree(int(self.curves_end < monotonic())):
                    break
                self.visits.append(shuffled(self.visits[-1], number))
                self._count()
            self._pass(number)
            if self.compute_rounds is not None:
                self._take_compute()

    def finish(self, so_far: Callable[[dict], None]) -> dict | None:
        """Measure the rest of compute, and contention; the result on rank 0, None on the other ranks."""
        fabric, found = self.fabric, {"compute": {}, "host_memory": None}
        if self.compute_rounds is not None:
            for part in range(self.compute_taken, PASSES):
                if not fabric.agree(int(monotonic() > self.end)):
                    self.compute_rounds.take(part)
            found["compute"] = self.compute_rounds.result()
        registered = self._free()

        def hand_on(rows: Sequence[dict] = ()) -> None:
            result = self._result(found | {"contention": list(rows)}, registered)
            if result is not None:
                so_far(result)

        hand_on()
        if "host_memory" in fabric.options.links:
            self._say("host_memory")
            found["host_memory"] = host_memory_rate.measure(fabric, fabric.options.seconds * MEMORY_SHARE)
            hand_on()
        found["contention"] = self._contention(hand_on)
        return self._result(found, registered)

    def _free(self) -> int:
        """Free the operations of the curves. Returns the bytes of a device that are registered for gathers."""
        self._say("freeing the memory of all curves")
        symmetric = self.operations.get(SYMMETRIC)
        for operation in self.operations.values():
            operation.close()
        self.operations.clear()
        self.fabric.device.close()
        return symmetric.gather.buffer_bytes if isinstance(symmetric, TimedSymmetricGather) else 0

    def _contention(self, so_far: Callable[[Sequence[dict]], None]) -> list[dict]:
        self._say("contention, each link alone")

        def say_pair(pair: tuple[str, str]) -> None:
            self.report(self.done + self.pairs.index(pair), self.total, f"{pair[0]} while {pair[1]} is busy")

        begun = monotonic()
        # No longer than the time that the curves have left.
        seconds = min(self.contention_seconds, self.end - begun)
        rows = contention.run(self.fabric, self.pairs, seconds, say_pair, so_far)
        self.spent["contention"] = monotonic() - begun
        self.done += len(self.pairs)
        return rows

    def _result(self, found: dict, registered: int) -> dict | None:
        """The whole result, with what was ``found`` after the curves; None on other ranks than 0. Collective."""
        fabric = self.fabric
        set_up = set_up_of(fabric) | outside_allocator(fabric, registered)
        if fabric.rank != 0:
            return None
        known = {(row["measured"], row["busy"]) for row in found["contention"]}
        return found | {
            "curves": self._curves(),
            "largest": dict(sorted(self.grid, key=lambda visit: visit[1])),
            "unmeasured_pairs": [pair for pair in self.pairs if pair not in known],
            "unsafe_pairs": contention.unsafe_pairs(fabric.torch_device.type) if self.pairs else [],
            "set_up": set_up,
            "symmetric_refused": self.refused if fabric.torch_device.type == "cuda" else "",
            "nvme": self.drive,
            RANKS_PER_DEVICE: fabric.ranks_per_device,
            "threads": torch.get_num_threads(),
            "seconds": {"asked": fabric.options.seconds, "taken": monotonic() - self.ready, "of": dict(self.spent)},
        }

    def _say(self, what: str) -> None:
        if self._starts:
            faulthandler.dump_traceback_later(START_SECONDS, file=2, exit=self._ends)
        if self.fabric.rank == 0:
            self.report(self.done, self.total, what)

    def _count(self) -> None:
        self.total = 1 + sum(map(len, self.visits)) + len(self.pairs)

    def _weight(self, visit: tuple[str, int]) -> float:
        """The weight of a visit in dividing the time: a round of a large size takes longer."""
        return (1.0 + min(visit[1] / (4 * MIB), 8.0)) / (SHORT_VISITS if visit in self.short else 1)

    def _refine(self) -> None:
        """After the first pass: add sizes between neighbours that disagree, and find the short copies."""
        medians = first_medians(self.merged)
        finer = _refined(self.fabric, self.grid, medians)
        self.refined = {*finer} - {*self.grid}
        self.short = {visit for visit, us in medians.items() if visit[0] == "cpu" and us < SHORT_US}
        finer = [visit for visit in finer for _ in range(SHORT_VISITS if visit in self.short else 1)]
        self.visits[1:] = [shuffled(finer, later) for later in range(1, PASSES)]
        self._count()

    def _pass(self, number: int) -> None:
        """Make one pass. Its samples are merged every few seconds."""
        own: dict[tuple[str, int], Samples] = {}
        for position, (name, size) in enumerate(self.visits[number]):
            need = scaled_sizes.needed(self.needs, name, size)
            self._say(visit_text(name, size, self.operations[name].made_bytes(size)[0], need))
            begun = monotonic()
            left = self.curves_end - begun
            next_one = MEASURE if left >= self.overlong.get((name, size), 0.0) else SKIP
            if number and (next_one := self.fabric.agree(STOP if left < 0 else next_one)) != MEASURE:
                if next_one == STOP:
                    break  # every size has been visited once; the table has a note
                continue
            new = (name, size) not in self.merged and (name, size) not in own
            if (name in ISSUED and size > self.fabric.arena_bytes) or (new and self._left_out(name, size, left)):
                self.done += 1
                continue
            later = (self.visits[number][position:], *self.visits[number + 1 :])
            still = sum(self._weight(visit) for visits in later for visit in visits)
            often = SHORT_VISITS if number and (name, size) in self.short else 1
            seconds, most = max(left, 0.0) * self._weight((name, size)) / still, MAX_ROUNDS // often
            found = sample(self.fabric, self.operations[name], size, seconds, max_rounds=most)
            own.setdefault((name, size), Samples()).add(found)
            if self.fabric.torch_device.type == "cuda":  # else a step's tensors stay: making them takes long
                self.operations[name].drop()
            taken = monotonic() - begun
            self.needs[name] = size, scaled_sizes.need_of(found, taken, self.operations[name].builds)
            self.spent[name] += taken
            if taken > 2 * seconds:
                self.overlong[name, size] = taken
            self.done += 1
            if self.fabric.agree(int(monotonic() > self.kept_at + kept_measurement.KEEP_SECONDS)):
                self._merge(own)
                own = {}
        self._merge(own)

    def _first_use(self) -> None:
        """Make communicators and load what each operation needs once. This is a part of starting and may take long."""
        for name, operation in self.operations.items():
            self._say(f"first use of {name}")
            self.fabric.barrier()
            operation.issue(min(size for own, size in self.grid if own == name), 0).wait()
            self.fabric.device.settle()

    def _merge(self, own: dict[tuple[str, int], Samples]) -> None:
        merge_visits(self.fabric, own, self.merged)
        begun = monotonic()
        if self.fabric.rank == 0 and begun >= self.kept_at:
            taken = begun - self.ready - self.spent["compute"]
            kept_measurement.write(self.fabric.options, self.merged, self.seconds_before + taken)
            self.kept_at = begun + 10 * (monotonic() - begun)  # of thousands of ranks, the others wait for seconds

    def _kept(self) -> tuple[kept_measurement.Visits, float]:
        """The visits of the grid that an earlier call has measured, and their seconds; the same on all ranks."""
        own = kept_measurement.read(self.fabric.options) if self.fabric.rank == 0 else ({}, 0.0)
        visits, seconds = gather_objects(own)[0]
        return {visit: passes for visit, passes in visits.items() if visit in self.grid}, seconds

    def _left_out(self, name: str, size: int, left: float) -> bool:
        """Whether a new size is left out: a rank has no room for it, or it needs too much time ([Note: What a visit
        needs])."""
        room = all(gather_objects(self.fabric.has_room(*self.operations[name].made_bytes(size))))
        need = scaled_sizes.needed(self.needs, name, size)
        most = min(max(left, 0.0), scaled_sizes.LONGEST_SHARE * self.fabric.options.seconds)
        return bool(self.fabric.agree(int(need > most or not room)))

    def _curves(self) -> dict[str, list[dict]]:
        """The rows of every curve, with scaled rows for sizes for which there was no time."""
        curves = rows_of_curves(self.merged, self.refined, self.fabric.torch_device.type == "cuda")
        for name, rows in curves.items():
            curves[name] = scaled_sizes.add_scaled(rows, [size for own, size in self.grid if own == name])
        return curves

    def _take_compute(self) -> None:
        """Take the rounds of compute that are due by now."""
        assert self.compute_rounds is not None
        begin, seconds = monotonic(), self.curves_seconds
        passed = 1.0 - (self.curves_end - begin) / seconds if seconds > 0 else 1.0
        due = self.fabric.agree(parts_due(passed))
        for part in range(self.compute_taken, due):
            self.compute_rounds.take(part)
        self.curves_end += monotonic() - begin
        self.spent["compute"] += monotonic() - begin
        self.compute_taken = max(self.compute_taken, due)


def set_up_of(fabric: Fabric) -> dict[str, float]:
    """Microseconds per GiB of a node's host memory on the slowest rank: to make its pages, and on CUDA to page-lock
    it. Empty if no measured operation uses such memory. Collective."""
    everyone = gather_objects(fabric.set_up_seconds)
    if None in everyone:
        return {}
    pages, pin = (max(seconds) * 1e6 / (fabric.set_up_bytes / 2**30) for seconds in zip(*everyone))
    on_cuda = fabric.torch_device.type == "cuda"
    return {"pages_us_per_gib": pages} | ({"pin_us_per_gib": pin} if on_cuda else {})


def outside_allocator(fabric: Fabric, registered: int = 0) -> dict[str, int]:
    """Bytes of a device that a rank holds in addition to PyTorch's blocks, for the rank that holds the most. Ranks on
    one device count alike. ``registered`` is subtracted: bytes of our own buffers, which plans count. Empty without
    CUDA. Collective."""
    if fabric.torch_device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(fabric.torch_device)
    own = (total - free) // fabric.ranks_per_device - torch.cuda.memory_reserved(fabric.torch_device) - registered
    most = max(gather_objects(own))
    return {"beside_allocator_bytes": most} if most > 0 else {}


def parts_due(used: float) -> int:
    """How many of the :data:`PASSES` parts of compute are due when the share ``used`` of the curves' time has passed.
    The first is due after the first pass, the others follow as far apart as the time allows."""
    return min(PASSES, 1 + int(used * (PASSES - 1)))


def _refined(fabric: Fabric, visits: list, medians: dict) -> list:
    """The visits of a pass after the first, with sizes between neighbours that disagree (gathers and copies only)."""
    added = []
    for name in ("gpu", "cpu"):
        curve = {size: us for (own, size), us in medians.items() if own == name}
        added += [(name, fabric.options.rounded(size)) for size in size_grid.refinement(curve)]
    # All ranks have the same samples and the list is sorted, so they agree without communication.
    return sorted({*visits, *added}, key=lambda visit: (size_grid.CURVES.index(visit[0]), visit[1]))
