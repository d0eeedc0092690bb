"""The ``user_defined_schedule`` file: by which route, when and for how long each group is whole.

One file serves all ranks. The data-parallel ranks of one pipeline rank run the same actions,
so the order of collectives is the same on all of them by construction.

Actions are short arrays, so that a large schedule stays small:

========== =============================== ==============================================
action     written as                      meaning
========== =============================== ==============================================
unshard    ``[group, route, need_by, at]`` issue; the compute of ``need_by`` waits for it
stage_in   ``[group, slot]``               read from NVMe into a staging slot
reshard    ``[group, at]``                 free the whole copy, keep the shard
========== =============================== ==============================================

``need_by`` is an index into the rank's steps. If it is left out (``-1``), it is the step of
the action. ``at`` is a layer of the step's chunk and may be left out. An unshard is issued
just before that layer's compute (``-1``: when the step begins), a reshard just after it
(``-1``: when the step ends). In a backward step layers run in descending order.

``start`` holds the actions that are issued as soon as fresh parameters are published after
the optimizer step, that is before the iteration's first step.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.facts import Facts
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.formats.versions import SCHEDULE_VERSION as SCHEDULE_VERSION
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.route import ROUTE_KINDS, Algorithm, Copy, Route, kind_of
from megatron_ext.workload.workload import Limits


class Unshard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bring ``group`` whole onto the device by ``route``; step ``need_by`` waits for it."""

    group: int
    route: Route
    need_by: int = -1
    at: int = -1

    def __post_init__(self) -> None:
        if self.route not in ROUTE_KINDS:
            raise ValueError(f"expected a route among {', '.join(ROUTE_KINDS)}, not {self.route!r}")


class StageIn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Read ``group`` from NVMe into staging slot ``slot`` of this rank."""

    group: int
    slot: int


class Reshard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, omit_defaults=True):
    """Free the whole copy of ``group``, keep the shard."""

    group: int
    at: int = -1


class StepActions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Actions of one step in issue order: stage_in, then unshard, then compute, then reshard."""

    step: str
    stage_in: tuple[StageIn, ...] = ()
    unshard: tuple[Unshard, ...] = ()
    reshard: tuple[Reshard, ...] = ()


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Actions that are issued when fresh parameters have been published, before the first step."""

    stage_in: tuple[StageIn, ...] = ()
    unshard: tuple[Unshard, ...] = ()


class Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """All steps of one pipeline rank, in Megatron's order."""

    pp_rank: int
    start: Start = Start()
    steps: tuple[StepActions, ...]

    @property
    def entries(self) -> "tuple[Start | StepActions, ...]":
        """The start and the steps, in order."""
        return (self.start, *self.steps)

    @property
    def unshards(self) -> list[Unshard]:
        """All unshards of the rank, in issue order."""
        return [action for entry in self.entries for action in entry.unshard]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Parameters that travel together: names as in the workload, in execution order.

    ``bytes`` is the whole bucket with Megatron's padding. A group lies in one chunk and has
    one dtype. The group's id is its index in ``groups``. ``ranks`` is the number of ranks that share its shards: the
    data-parallel ranks or, for a group of experts, the expert-data-parallel ranks (see :meth:`Parallel.replicas`). A
    group holds either only parameters of experts or none of them.

    ``algorithm`` is how route ``gpu`` gathers it: one all-gather over the data-parallel group
    (left out); ``hierarchical``, between nodes first, then inside each node; or ``symmetric``, by copy engines through
    registered memory, if these ranks share a node.

    ``states_rest`` is where the optimizer's own fp32 parameters and moments lie between its steps: where the
    optimizer steps (left out); on the drive (``nvme``), from which they pass through ``state_slots``; or on the device
    (``device``). In the last case the group is stepped there although the optimizer steps all others on the host.

    ``shard_rests`` is where the shard lies between the group's uses: on the device (left out), or in
    host memory. A group whose shard is in host memory comes only by ``cpu``, ``cpu_shard`` or ``nvme``, and nothing of
    it stays on the device after its reshard.

    ``gradients`` is what the group keeps of its gradient: the whole gradient through the iteration, as in Megatron
    (left out), or the reduced shard, on the device (``sharded``) or in host memory (``host``). In the latter two cases
    the whole gradient exists only from the group's backward to the end of its reduce-scatter. ``reduce_every`` is the
    number of backward steps of the chunk from one reduce to the next; the iteration's last backward step always
    reduces. A rank has one reduce in flight at a time: before the next reduce is issued, the previous one has ended and
    its whole gradient is freed. With ``alone`` this holds already before this group's whole gradient is allocated.
    """

    pp_rank: int
    model_chunk_id: int
    parameters: tuple[str, ...]
    bytes: int
    ranks: int
    algorithm: Algorithm | None = None
    shard_rests: Literal["host"] | None = None
    gradients: Literal["sharded", "host"] | None = None
    reduce_every: int = 1
    alone: bool = False
    states_rest: Literal["nvme", "device"] | None = None

    def algorithm_by(self, route: Route) -> Algorithm | None:
        """How ``route`` gathers it; None for one plain all-gather, or no all-gather."""
        return self.algorithm if kind_of(route).needs_device_shard else None

    def reduces(self, microbatches: int) -> int:
        """How often its gradient is reduced in an iteration of ``microbatches`` micro-batches."""
        return 1 if self.gradients is None else -(-microbatches // self.reduce_every)


class StateSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pinned host memory of each rank through which optimizer states on the drive pass: ``slots`` of ``slot_bytes``."""

    slots: int
    slot_bytes: int


class StepSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pinned host memory of each rank through which gradients arrive at the host's optimizer, for groups whose states
    are in host memory: ``slots`` of ``slot_bytes``, fp32.

    ``cast`` is where the new parameters become 16-bit: on the ``host``, in slots of half the size that are copied to
    the device; or on the ``device``, to which they are copied in fp32.
    """

    slots: int
    slot_bytes: int
    cast: Literal["host", "device"]


class PublishGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Write the updated shards of ``group`` to the host copy (``cpu``) and/or NVMe (``nvme``)."""

    group: int
    to: tuple[Copy, ...]


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What the simulator predicts for this schedule, under the cost table named in ``metadata``.

    ``peak_bytes`` maps ``device`` to one figure per pipeline rank and ``pinned_host`` to one per
    node. ``memory`` is the memory bill of each pipeline rank. ``exposed_us`` is one figure per pipeline
    rank. ``busy_us`` maps links to their largest busy time over ranks.
    """

    iteration_time_us: float
    exposed_us: tuple[float, ...]
    peak_bytes: dict[str, tuple[int, ...]]
    busy_us: dict[str, float]
    memory: tuple[RankMemory, ...] = ()
    bubble_rate: float | None = None
    lower_bound_us: float | None = None
    gather_us: float | None = None
    baselines_us: dict[str, float] = {}
    left_out: tuple[str, ...] = ()


class MeasuredOn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Hardware and software that the costs were measured on."""

    hardware: Facts | None = None
    software: Facts | None = None


class PlanOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Facts about the planning that a reader or a run needs.

    Attributes:
        seed: for policy ``random:SEED``.
        proven_gap: for policy ``exact``: (iteration time / proven bound) - 1.
        rule: for policy ``hybrid``: the baseline that this schedule is, if the search found nothing faster.
        search_failed: for policy ``hybrid``: why the search found no schedule at all.
        measured_on: where the costs were measured; a run on another machine warns.
        nvme: how the drive is read.
    """

    seed: int | None = None
    proven_gap: float | None = None
    rule: str | None = None
    search_failed: str | None = None
    measured_on: MeasuredOn | None = None
    nvme: DriveReads | None = None


class ScheduleMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Where the schedule comes from. It holds no time of day, so the same inputs give the same bytes."""

    planner: str = ""
    options: PlanOptions = PlanOptions()
    cost_table_sha256: str | None = None


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``fingerprint``: see :func:`megatron_ext.workload.workload.fingerprint`."""

    fingerprint: str


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A whole ``user_defined_schedule``.

    ``zero_stage`` 1: whole parameters and gradients stay. 2: whole parameters stay, gradients are kept as each group
    says. 3: whole parameters come and go, gradients are kept as each group says.

    ``rollback_bytes`` is host memory of each rank for the optimizer states from before a step during the backward. The
    host's optimizer steps a group as soon as its gradient is reduced, and steps it again if the gradient norm requires
    it. If the field is left out, the host's optimizer waits for the norm. States on the drive take none of this memory;
    the drive holds them twice.

    ``step_slots``: if it is left out, Megatron's host optimizer keeps a copy of all gradients in host memory.
    """

    schema_version: int
    kind: Literal["user_defined_schedule"]
    metadata: ScheduleMetadata = ScheduleMetadata()
    parallel: Parallel
    zero_stage: Literal[1, 2, 3]
    model: Model
    limits: Limits = Limits()
    groups: tuple[Group, ...]
    ranks: tuple[Rank, ...]
    publish: tuple[PublishGroup, ...] = ()
    state_slots: StateSlots | None = None
    step_slots: StepSlots | None = None
    rollback_bytes: int | None = None
    predicted: Predicted | None = None

    @property
    def unshards(self) -> list[Unshard]:
        """The unshards of all pipeline ranks."""
        return [action for rank in self.ranks for action in rank.unshards]

    @property
    def routes(self) -> set[Route]:
        """The routes that the groups use."""
        return {action.route for action in self.unshards}

    @property
    def uses_drive(self) -> bool:
        """Whether the schedule uses the drive, so that a run has to name a directory on it."""
        return "nvme" in {group.states_rest for group in self.groups}.union(*(entry.to for entry in self.publish))


def files_of(path) -> list[Path]:
    """The file ``path``, or the JSON files in the directory ``path``. Files named by numbers are in numeric order.

    Raises:
        InputError: the directory has no such file.
    """
    path = Path(path)
    if not os.path.isdir(path):  # Path.is_dir raises if the name is too long
        return [path]
    found = sorted(path.glob("*.json"), key=lambda file: (int(file.stem) if file.stem.isdecimal() else 0, file.name))
    if not found:
        raise InputError("holds no schedule: expected a .json file for every number of micro-batches", file=path)
    return found


def read_unchecked(path) -> Schedule:
    """Read a schedule file without checking it; see :func:`megatron_ext.schedule.validate.load`. From a directory, read
    the file for the most micro-batches."""
    return json_files.load(files_of(path)[-1], Schedule, versioned="user_defined_schedule")


def save(path, schedule: Schedule) -> None:
    """Write a schedule file."""
    json_files.save(path, schedule)
