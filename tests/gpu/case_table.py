"""What the tier for GPUs runs, as data: cases, the processes they share, and how long each may take.

[Note: Ten minutes]
Seconds are for one H200 with 16 cores, by what gpu_first_runs measured: a process takes 20 to 40 s to start, a small
case 1 s a training, 1B parameters with the optimizer on the host about 11. Trainings may share the device, in as many
lanes as there are processors for: that hides the starting of one behind the training of another, and makes copies
longer. Cases of one layout share a job, which saves starts. What is timed runs alone. With three lanes the set-up takes
30 s, plans, trainings and resuming 280, doctor 41, timings 70, measure 30, in sum 450 s; where all takes 15 % longer
520 s (tests/unit/gpu/test_lanes.py). Of a machine on which ranks that share the device are slower a second call
(``--resume``) does the rest. Jobs start in the order of this table, those that are spare last; a job for which there is
no memory beside what runs lets others pass. ``until`` is the part of the time behind the set-up in which a job's cases
begin, so that no kind of job takes the time of all others; what it left is tried once more before spare jobs.
Three of the five timed trainings are spare: nothing is judged by them, and benchmarks/gpu_offload.py times their like.
"""

from typing import Literal

import msgspec
from copy_rates import BYTES
from covering import Row, covering_rows
from timed_rows import CONTEXT_BYTES, TIMINGS, Timed

from megatron_ext.doctor.node_limits import LEAST_SHARED_BYTES

BUDGET_SECONDS = 570.0
"""Ten minutes, but for what ending and the last lines take."""

Size = Literal["small", "medium", "large"]

SIZES: dict[Size, str] = {
    # 1M, 134M and 1.07B parameters. Few tokens: copies take longer than what is computed beside them.
    "small": "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 1000",
    "medium": "--num-layers 4 --hidden-size 1536 --num-attention-heads 12 --seq-length 256 --vocab-size 6400",
    "large": "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 512 --vocab-size 32000",
}
DRY_SIZES: dict[Size, str] = {
    "small": "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 120",
    "medium": "--num-layers 4 --hidden-size 48 --num-attention-heads 2 --seq-length 16 --vocab-size 120",
    "large": "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --vocab-size 120",
}

PARAMETERS: dict[Size, int] = {"small": 1_060_000, "medium": 134_000_000, "large": 1_070_000_000}

ITERATIONS = 4
"""Of a training."""

LAYOUTS = {
    "1 rank": (1, "--data-parallel-size 1"),
    "2 ranks": (2, "--data-parallel-size 2"),
    "4 ranks": (4, "--data-parallel-size 4"),
    "PP2 VP2 DP2": (
        4,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --data-parallel-size 2",
    ),
    # Tensor-parallel ranks add up gradients of the norms of queries and keys after the last reduce.
    "TP2 DP2": (4, "--tensor-model-parallel-size 2 --qk-layernorm --data-parallel-size 2"),
}
"""By name: ranks, all on one device, and options."""

SECONDS = {"1 rank": 3.0, "2 ranks": 6.0, "4 ranks": 12.0, "PP2 VP2 DP2": 16.0, "TP2 DP2": 16.0}
"""Of a small case: its reference, and two trainings by the schedule. Processes that share a device take turns of
milliseconds, and a collective is done when each of its ranks has had one."""

FACTORS = {
    "layout": tuple(LAYOUTS)[:4],
    "route": ("gpu", "cpu", "nvme", "cpu_shard"),
    "zero_stage": ("3", "2", "1"),
    "gradients": ("whole", "sharded", "host"),
    "shards": ("device", "host"),
    "states": ("device", "host", "host and device", "drive"),
    "clip": ("active", "idle"),
    "mode": ("plain", "overflow", "delayed", "early", "early, overflow"),
    "cast": ("none", "host", "device"),
}
"""``layout``: all but that of tensor-parallel ranks, whose cases are named below.
``states``: of an optimizer on the device; of one on the host, in memory, with every second group on the device, or
with two of three groups on the drive. ``early``: steps during the backward; with ``clip`` active all are taken back.
``never whole``: with a limit that has no room for all parameters at once, not drawn with the others.
``cast``: step slots, and where parameters become 16-bit."""


HOST_BYTES_PER_PARAMETER = {"host": 30, "device": 10}
"""At most, by where the optimizer steps: 1B parameters with the optimizer on the host took 30 GB on one H200."""

RANK_BYTES = 2_000_000_000
"""Of host memory, for each rank's libraries and pools."""

NCCL_BYTES = 5 * 33_000_000
"""Of /dev/shm, for each rank that shares a device with others: a few communicators, 33 MB each."""

DRIVE_BYTES_PER_PARAMETER = {"route": 10, "states": 16}
"""That an iteration of two micro-batches moves: whole parameters forward and backward for each, and the new ones back;
two of three of 12 bytes of states in both directions."""

ZeroStage = Literal[1, 2, 3]


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Trained by a schedule twice and by its reference once, and compared to the last bit; fields as in FACTORS."""

    name: str
    layout: str
    size: Size
    route: str
    zero_stage: str
    gradients: str
    shards: str
    states: str
    clip: str
    mode: str
    cast: str
    seconds: float
    limit: float

    @property
    def stage(self) -> ZeroStage:
        """The zero stage, as a workload has it."""
        stages: dict[str, ZeroStage] = {"1": 1, "2": 2, "3": 3}
        return stages[self.zero_stage]

    @property
    def needs_drive(self) -> bool:
        """Whether something of it is on the drive."""
        return self.route == "nvme" or self.states == "drive"

    @property
    def on_host(self) -> bool:
        """Whether the optimizer steps on the host."""
        return self.states != "device"

    @property
    def device_bytes(self) -> int:
        """Of the device, by all ranks at their peak: the reference's, which keeps more there than a schedule. By the
        parameter and rank as on one H200, where optimizers on the device step on gradients from host memory."""
        own = 13 + 4 / self.ranks if self.on_host else 10 + 32 / self.ranks
        return int(self.ranks * (own * PARAMETERS[self.size] + CONTEXT_BYTES))

    @property
    def ranks(self) -> int:
        """That train it."""
        return LAYOUTS[self.layout][0]

    @property
    def host_bytes(self) -> int:
        """Of host memory, by all ranks at most."""
        kind = "host" if self.on_host else "device"
        return HOST_BYTES_PER_PARAMETER[kind] * PARAMETERS[self.size] + self.ranks * RANK_BYTES

    @property
    def shared_bytes(self) -> int:
        """Of /dev/shm."""
        return self.ranks * NCCL_BYTES if self.ranks > 1 else 0

    @property
    def drive_bytes(self) -> int:
        """That both trainings read and write on the drive."""
        kinds = {"route": self.route == "nvme", "states": self.states == "drive"}
        each = sum(DRIVE_BYTES_PER_PARAMETER[kind] for kind, there in kinds.items() if there)
        return 2 * ITERATIONS * each * PARAMETERS[self.size]

    @property
    def needs_flags(self) -> bool:
        """Whether its schedule copies between host and device, for which streams have to wait for flags."""
        plain = self.route == "gpu" and self.gradients != "host" and self.states != "drive"
        return not plain or self.cast != "none" or self.mode.startswith(("early", "delayed"))


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A case that is no training. ``job_runs.py`` knows its command."""

    name: str
    seconds: float
    limit: float

    @property
    def timed(self) -> Timed | None:
        """What it times, if it is a training."""
        return next((row for row in TIMINGS if row.name == self.name), None)

    @property
    def ranks(self) -> int:
        """That run it."""
        return 2 if self.name == KILL_AND_RESUME or self.name.endswith(TWO_RANKS) else 1

    @property
    def on_host(self) -> bool:
        """Whether Megatron's host optimizer may be part of it."""
        return self.name == KILL_AND_RESUME or bool(self.timed and self.timed.on_host)

    @property
    def needs_drive(self) -> bool:
        """Whether it is nothing without one."""
        return self.name == KILL_AND_RESUME

    @property
    def needs_flags(self) -> bool:
        """As of a training; ``doctor`` and ``measure`` say themselves what is missing."""
        return self.name == KILL_AND_RESUME or bool(self.timed and self.timed.planned)

    @property
    def device_bytes(self) -> int:
        """Of the device; 0 where any that tests can run on has them."""
        if self.name == KILL_AND_RESUME:
            return KILLED.device_bytes
        return self.timed.device_bytes if self.timed else 0

    @property
    def host_bytes(self) -> int:
        """Of host memory at most; 0 where it is little, or keeps to what there is."""
        if self.name == KILL_AND_RESUME:
            return KILLED.host_bytes
        return self.timed.host_bytes if self.timed else LINKS_BYTES if self.name == LINKS else 0

    @property
    def shared_bytes(self) -> int:
        """Of /dev/shm; ``doctor`` judges its size."""
        if self.ranks > 1 and self.name.startswith("doctor"):
            return LEAST_SHARED_BYTES
        return self.ranks * NCCL_BYTES if self.ranks > 1 else 0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Cases that share processes, one after another.

    Attributes:
        layout: of ranks that train the cases, or time them; None where the only case is a program by itself, whose exit
            code says whether it passed.
        script: what the ranks run.
        alone: nothing else runs on the device meanwhile.
        until: part of the budget after which its cases are left for the end.
        spare: run where time is left; its absence fails nothing.
    """

    name: str
    cases: tuple[Training | Program, ...]
    layout: str | None = None
    script: str = "train_ranks.py"
    alone: bool = False
    until: float = 1.0
    spare: bool = False


def possible(row: Row) -> bool:
    """Whether a schedule can say it and a run takes it; see ``megatron_ext/schedule/validate.py``."""
    on_host, mode = row["states"] != "device", row["mode"]
    return not (
        (row["route"] == "cpu_shard" and row["shards"] == "device")
        or (row["zero_stage"] == "1" and row["gradients"] != "whole")
        or (row["shards"] == "host" and (row["zero_stage"] != "3" or row["route"] == "gpu"))
        or (not on_host and (mode not in ("plain", "overflow") or row["cast"] != "none"))
        or (row["states"] == "host and device" and (row["gradients"] == "host" or row["shards"] == "host"))
        or (mode == "delayed" and (row["states"] == "host and device" or row["cast"] != "none"))
        or ("overflow" in mode and on_host and row["gradients"] == "host")
    )


def _training(size: Size, seconds: float, row: Row) -> Training:
    said = [f"zero {row['zero_stage']}", row["route"], f"gradients {row['gradients']}", f"shards {row['shards']}"]
    said += [f"states {row['states']}", row["mode"]] + (["clip"] if row["clip"] == "active" else [])
    said += [f"cast on {row['cast']}"] if row["cast"] != "none" else []
    name = f"{size}, {row['layout']}: {', '.join(said)}"
    return Training(name=name, size=size, seconds=seconds, limit=60 + 3 * seconds, **row)


def _row(layout: str, route: str, *, zero: str = "3", gradients="host", shards="host", states="host", **more) -> Row:
    rest = {"clip": "active", "mode": "plain", "cast": "none"} | more
    return dict(layout=layout, route=route, zero_stage=zero, gradients=gradients, shards=shards, states=states, **rest)


KILL_AND_RESUME = "kill and resume"
KILLED = _training("small", 0, _row("2 ranks", "cpu_shard", states="drive", mode="early", clip="idle", cast="host"))
"""What ``kill_and_resume.py`` trains."""


def _small(layout: str, rows: list[Row]) -> tuple[Training, ...]:
    return tuple(_training("small", SECONDS[layout], row) for row in rows if row["layout"] == layout)


def _trained(name: str, layout: str, cases: tuple[Training, ...]) -> Job:
    return Job(name=name, cases=cases, layout=layout, until=0.7)


PLANS = "plans of what is timed"
TWO_RANKS = ", 2 ranks on the device"
"""Ends the names of programs that are run by so many."""
HOST_OPTIMIZER = ", optimizer on the host"
"""Ends the name of a measurement of it."""
MEASURE = "measure --seconds 20"


SPARE_PLANS = "plans of offload"
PLANNED = {row.name: SPARE_PLANS if row.spare else PLANS for row in TIMINGS if row.planned}
"""What cannot be timed without plans, and which they are. They last as long as one run of the tier."""

LINKS = "timing: host memory and copies"
LINKS_BYTES = 5 * BYTES


def _timings(*, spare: bool) -> tuple[Program, ...]:
    rows = [row for row in TIMINGS if row.spare is spare]
    return tuple(Program(name=row.name, seconds=row.seconds(), limit=60 + 3 * row.seconds()) for row in rows)


def jobs() -> list[Job]:
    """All jobs, the most important first."""
    rows = covering_rows(FACTORS, possible, lambda row: SECONDS[row["layout"]] ** 0.5)
    one, two = "1 rank", "2 ranks"
    large = [
        # First what takes most of the device: what comes after leaves room for other jobs.
        _training("large", 15, _row(one, "cpu", states="device")),
        # As plans choose it for one GPU; then as on the first one, where it was silently wrong, and where it hung.
        _training("large", 35, _row(one, "cpu_shard", cast="device", mode="early")),
        _training("large", 35, _row(one, "cpu")),
        _training("large", 60, _row(one, "nvme")),
    ]
    medium = [
        _training("medium", 10, _row(one, "cpu", cast="host")),
        _training("medium", 10, _row(one, "cpu_shard", cast="device", gradients="whole")),
        _training("medium", 10, _row(one, "cpu", mode="early", clip="idle")),
        _training("medium", 10, _row(one, "nvme", mode="delayed")),
        _training("medium", 10, _row(one, "cpu", mode="never whole")),
        _training("medium", 10, _row(one, "cpu", mode="overflow", gradients="sharded")),
        _training("medium", 15, _row(one, "cpu", states="drive", mode="early", cast="host")),
        _training("medium", 8, _row(one, "gpu", gradients="whole", shards="device", states="host and device")),
        _training("medium", 6, _row(one, "nvme", zero="2", gradients="sharded", shards="device", states="device")),
    ]
    shared = [
        _training("large", 60, _row(two, "cpu_shard")),
        _training("medium", 15, _row(two, "cpu_shard", states="device")),
        _training("medium", 15, _row(two, "gpu", shards="device", cast="host", mode="early", clip="idle")),
    ]
    tensor = [
        _row("TP2 DP2", "cpu_shard"),
        _row("TP2 DP2", "gpu", zero="2", gradients="sharded", shards="device", states="device"),
    ]
    program = lambda name, seconds, limit: (Program(name=name, seconds=seconds, limit=limit),)
    return [
        Job(name="plans", cases=program(PLANS, 30, 120)),  # of processors alone, beside the first trainings
        _trained("large, 1 rank", one, tuple(large)),
        _trained("2 ranks", two, (*shared, *_small(two, rows))),
        _trained("medium and small, 1 rank", one, (*medium, *_small(one, rows))),
        _trained("4 ranks", "4 ranks", _small("4 ranks", rows)),
        _trained("PP2 VP2 DP2", "PP2 VP2 DP2", _small("PP2 VP2 DP2", rows)),
        Job(name=KILL_AND_RESUME, cases=program(KILL_AND_RESUME, 60, 200), until=0.75),
        _trained("TP2 DP2", "TP2 DP2", _small("TP2 DP2", tensor)),
        Job(name="doctor", cases=program("doctor", 90, 180), alone=True, until=0.85),
        Job(
            name="timings",
            cases=(Program(name=LINKS, seconds=10, limit=60), *_timings(spare=False)),
            layout=one,
            script="timings.py",
            alone=True,
        ),
        Job(name="measure", cases=program(MEASURE, 50, 150), alone=True),
        *(
            Job(name=name, cases=program(name, 60, 180), alone=True, spare=True)
            for name in (f"{MEASURE}{HOST_OPTIMIZER}", f"doctor{TWO_RANKS}", f"{MEASURE}{TWO_RANKS}")
        ),
        Job(name="plans of offload", cases=program(SPARE_PLANS, 60, 240), alone=True, spare=True),
        Job(name="offload", cases=_timings(spare=True), layout=one, script="timings.py", alone=True, spare=True),
        Job(name="CPU suite", cases=program("CPU suite, devices hidden", 240, 900), alone=True, spare=True),
    ]
