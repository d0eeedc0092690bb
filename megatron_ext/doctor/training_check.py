"""A tiny GPT trained by every route, against Megatron's own gather, to the last bit.

The reference is trained twice: if it differs from itself, a difference says nothing about the schedule.
"""

import functools
import importlib
import itertools
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from msgspec.structs import replace

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.planner.random_plan import random_schedule
from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.runtime import host_threads
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.schedule import user_defined_schedule
from megatron_ext.schedule.group_facts import can_step_early, largest_gradient, largest_region, saved_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule, StateSlots, StepSlots
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

MEGATRON = "megatron-core"
SLOTS = 4
MOST_SEEDS = 50
"""The most schedules that are drawn until one uses the route; usually a few are enough."""


class Case(NamedTuple):
    """One training: a route and a zero stage; if the optimizer is on the host, also where its parameters are cast.

    ``all_on_host``: gradients and shards are also on the host, and gradients are clipped. On a device the model is so
    large that a copy or kernel that is not ordered after what it needs comes too late, which the comparison shows.
    """

    route: Route
    zero_stage: int
    cast: Literal["host", "device"] | None = None
    all_on_host: bool = False

    @property
    def check(self) -> str:
        """The name of the check in the report."""
        offload = f", optimizer on the host, casts on the {self.cast}" if self.cast is not None else ""
        offload += ", all on the host, clipped" if self.all_on_host else ""
        return f"training: {self.route}, zero stage {self.zero_stage}{offload}"


CASES = (
    *(Case("gpu", 1), Case("cpu", 1), Case("gpu", 3), Case("cpu", 3), Case("cpu_shard", 3), Case("nvme", 3)),
    *(Case("cpu", 3, all_on_host=True), Case("cpu", 3, "host"), Case("gpu", 1, "device")),
)

CLIP_GRAD = 1e-2
"""Value of --clip-grad for the case with everything on the host; gradient norms are larger."""


def check(place: Place, options: DoctorOptions, case: Case) -> list[Finding]:
    """Train a case on all ranks. Collective."""
    if megatron().status != "pass":
        return [not_tried(case.check, f"see {MEGATRON}")]
    try:
        return [_one(_training(), place, options, case)]
    except InputError as error:  # raised on all ranks, which agree before they refuse
        return [failed(case.check, str(error), "send this report")]


def ready() -> Finding:
    """Import and make what all cases need, which takes longer than a case. Collective."""
    if megatron().status == "pass":
        _training().initialize()
    return megatron()


def _training() -> ModuleType:
    return importlib.import_module("megatron_ext.megatron.tiny_training")


@functools.cache
def megatron() -> Finding:
    """Which Megatron this process imports, and whether our lines are in it."""
    from megatron_ext.megatron import cpu_compat, refusals

    cpu_compat.install()
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return not_tried(MEGATRON, "there is none here", "give --checkout DIR, the root of a Megatron tree")
    try:
        root = refusals.megatron_root()
    except Exception as error:  # of any kind: a package that it imports may be missing, or not fit this machine
        return failed(MEGATRON, f"cannot be imported: {one_line(repr(error), 300)}", "install what it needs")
    found = f"{importlib.import_module('megatron.core').__version__} in {root}"
    try:
        refusals.require_hooks(root)
    except InputError as error:
        return not_tried(MEGATRON, f"{found}: {error.message}", f"megatron-ext patch apply {root}")
    return passed(MEGATRON, f"{found}, patched")


def schedule_by_route(workload: Workload, route: Route) -> Schedule:
    """A random schedule of ``workload`` that uses ``route``; with ``nvme`` other groups use ``gpu``."""
    if route == "cpu_shard":
        return with_host_shards(by_cpu_shard(random_schedule(workload, ("gpu",), 0)), workload)
    routes: tuple[Route, ...] = ("nvme", "gpu") if route == "nvme" else (route,)
    drawn = (random_schedule(workload, routes, seed) for seed in range(MOST_SEEDS))
    return next(schedule for schedule in drawn if route in schedule.routes)


def with_states_spread(
    schedule: Schedule, workload: Workload, cast: Literal["host", "device"], drive: bool
) -> Schedule:
    """The schedule with optimizer states on the device, in host memory and, if there is a ``drive``, on the drive. The
    host steps during the backward, and gradients and parameters pass through slots."""
    places = itertools.cycle((None, "device", "nvme") if drive else (None, "device"))
    groups = tuple(replace(group, states_rest=place) for group, place in zip(schedule.groups, places))
    schedule = replace(schedule, groups=groups)
    gradients = [largest_gradient(group, workload) for group in groups if group.states_rest is None]
    regions = [largest_region(group, workload) for group in groups if group.states_rest == "nvme"]
    return replace(
        schedule,
        step_slots=StepSlots(slots=2, slot_bytes=max(gradients), cast=cast),
        state_slots=StateSlots(slots=2, slot_bytes=max(regions)) if regions else None,
        rollback_bytes=sum(saved_bytes(group, workload) for group in groups if can_step_early(group, workload)),
    )


def with_all_on_host(schedule: Schedule, workload: Workload) -> Schedule:
    """The schedule with gradients and shards in host memory."""
    schedule = with_host_shards(schedule, workload)
    return replace(schedule, groups=tuple(replace(group, gradients="host") for group in schedule.groups))


def _one(training, place: Place, options: DoctorOptions, case: Case) -> Finding:
    if case.route == "nvme" and options.nvme is None:
        return not_tried(case.check, "no directory on a drive was given")
    engine = place.on_cuda and find_spec("transformer_engine") is not None
    on_host, large = case.cast is not None or case.all_on_host, case.all_on_host and place.on_cuda
    if on_host and place.on_cuda and not engine:
        return not_tried(case.check, "Megatron's host optimizer needs Transformer Engine")
    drive = options.nvme is not None and (case.route == "nvme" or case.cast is not None)
    args = training.arguments(
        place.world_size,
        place.ranks_per_node,
        zero_stage=case.zero_stage,
        engine=engine,
        nvme=options.nvme if drive else None,
        on_host=on_host,
        large=large,
        clip_grad=CLIP_GRAD if case.all_on_host else 1.0,
    )
    workload = training.workload_of(args, SLOTS if case.route == "nvme" else 0)
    schedule = schedule_by_route(workload, case.route)
    if case.cast is not None:
        schedule = with_states_spread(schedule, workload, case.cast, drive)
    if case.all_on_host:
        schedule = with_all_on_host(schedule, workload)
    if large:  # also for the reference's step: with one thread it would take most of the time
        host_threads.use(place.ranks_per_node, place.ranks_per_node)
    # In the folder of the process that started the ranks, if there is one: it is removed even if this rank is ended.
    with tempfile.TemporaryDirectory(prefix="megatron_ext.", dir=options.stacks or None) as folder:
        path = str(Path(folder) / "schedule.json")
        user_defined_schedule.save(path, schedule)
        first, second = (training.train(args, path, stock=True) for _ in range(2))
        scheduled = training.train(args, path, stock=False)
        # A rank that is ahead would otherwise remove what another rank still opens through its /proc.
        everyone = gather_objects((first == second, first == scheduled), place.everyone)
    layers = "Transformer Engine's layers" if engine else "local layers"
    return judged(case, layers, everyone, len(first.grad_norms))


def judged(case: Case, layers: str, everyone: list[tuple[bool, bool]], iterations: int) -> Finding:
    """The finding of a case.

    Args:
        everyone: by rank, whether the two references are equal, and whether the scheduled run equals the first.
        iterations: the number of trained iterations.
    """
    if not all(same for same, _ in everyone):
        return failed(
            case.check,
            f"{layers}: a second training with Megatron's own gather differs, so nothing can be compared",
            "set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, NCCL_NVLS_ENABLE=0, CUBLAS_WORKSPACE_CONFIG=:4096:8",
        )
    wrong = [rank for rank, (_, equal) in enumerate(everyone) if not equal]
    if wrong:
        ranks = ", ".join(map(str, wrong))
        return failed(case.check, f"{layers}: NOT EQUAL to Megatron's own gather on ranks {ranks}", "send this report")
    return passed(case.check, f"{layers}: {iterations} iterations equal Megatron's own gather to the last bit")
