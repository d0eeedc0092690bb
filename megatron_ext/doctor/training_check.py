"""A tiny GPT trained by every route, against Megatron's own gather, to the last bit.

The reference is trained twice: where it differs from itself, a difference says nothing of the schedule.
"""

import importlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.random_plan import random_schedule
from megatron_ext.schedule import user_defined_schedule
from megatron_ext.schedule.host_shards import by_cpu_shard, with_host_shards
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

SLOTS = 4
MOST_SEEDS = 50
"""Schedules that are drawn until one uses the route; a few are enough."""


class Case(NamedTuple):
    """One training: a route, and the zero stage."""

    route: Route
    zero_stage: int

    @property
    def check(self) -> str:
        """Its name in the report."""
        return f"training: {self.route}, zero stage {self.zero_stage}"


CASES = (Case("gpu", 1), Case("cpu", 1), Case("gpu", 3), Case("cpu", 3), Case("cpu_shard", 3), Case("nvme", 3))


def check(place: Place, options: DoctorOptions) -> list[Finding]:
    """Train every case of :data:`CASES` on all ranks. Collective."""
    megatron = _megatron()
    if megatron.status != "pass":
        return [megatron, *(not_tried(case.check, "see megatron-core") for case in CASES)]
    training = importlib.import_module("megatron_ext.megatron.tiny_training")
    training.initialize()
    return [megatron, *(_tried(training, place, options, case) for case in CASES)]


def _megatron() -> Finding:
    """Which Megatron this process imports, and whether our lines are in it."""
    from megatron_ext.megatron import cpu_compat

    name = "megatron-core"
    cpu_compat.install()
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return not_tried(name, "there is none here", "say where Megatron is: --checkout DIR")
    from megatron_ext.megatron import refusals

    root = refusals.megatron_root()
    found = f"{importlib.import_module('megatron.core').__version__} in {root}"
    try:
        refusals.require_hooks(root)
    except InputError as error:
        return not_tried(name, f"{found}: {error.message}", f"megatron-ext patch apply {root}")
    return passed(name, f"{found}, patched")


def schedule_of(workload: Workload, route: Route) -> Schedule:
    """A schedule of ``workload`` in which groups go by ``route`` wherever it can bring them."""
    if route == "cpu_shard":
        return with_host_shards(by_cpu_shard(random_schedule(workload, ("gpu",), 0)), workload)
    routes: tuple[Route, ...] = ("nvme", "gpu") if route == "nvme" else (route,)
    drawn = (random_schedule(workload, routes, seed) for seed in range(MOST_SEEDS))
    return next(schedule for schedule in drawn if route in routes_of(schedule))


def routes_of(schedule: Schedule) -> set[str]:
    """Routes by which groups go."""
    entries = [entry for rank in schedule.ranks for entry in (rank.start, *rank.steps)]
    return {action.route for entry in entries for action in entry.unshard}


def _tried(training, place: Place, options: DoctorOptions, case: Case) -> Finding:
    try:
        return _one(training, place, options, case)
    except InputError as error:  # on all ranks: a run agrees before it refuses
        return failed(case.check, str(error), "send this report")


def _one(training, place: Place, options: DoctorOptions, case: Case) -> Finding:
    if case.route == "nvme" and options.nvme is None:
        return not_tried(case.check, "no directory on a drive is given")
    if case.route == "cpu_shard" and place.world_size == 1:
        return not_tried(case.check, "one rank gathers from nobody")
    engine = place.on_cuda and find_spec("transformer_engine") is not None
    args = training.arguments(
        place.world_size,
        place.ranks_per_node,
        zero_stage=case.zero_stage,
        engine=engine,
        nvme=options.nvme if case.route == "nvme" else None,
    )
    schedule = schedule_of(training.workload_of(args, SLOTS if case.route == "nvme" else 0), case.route)
    with tempfile.TemporaryDirectory(prefix="megatron_ext.") as folder:
        path = str(Path(folder) / "schedule.json")
        user_defined_schedule.save(path, schedule)
        first, second = (training.train(args, path, stock=True) for _ in range(2))
        scheduled = training.train(args, path, stock=False)
        # A rank that is ahead would remove what another still opens by this rank's /proc.
        everyone: list = [None] * place.world_size
        dist.all_gather_object(everyone, (first == second, first == scheduled), group=place.everyone)
    layers = "Transformer Engine's layers" if engine else "local layers"
    return judged(case, layers, everyone, len(first.grad_norms))


def judged(case: Case, layers: str, everyone: list[tuple[bool, bool]], iterations: int) -> Finding:
    """The finding of a case.

    Args:
        everyone: by rank, whether the two references are equal, and whether the schedule equals the first.
        iterations: how many were trained.
    """
    if not all(same for same, _ in everyone):
        return failed(
            case.check,
            f"{layers}: Megatron's own gather trains otherwise the second time, so nothing can be compared",
            "set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, NCCL_NVLS_ENABLE=0, CUBLAS_WORKSPACE_CONFIG=:4096:8",
        )
    wrong = [rank for rank, (_, equal) in enumerate(everyone) if not equal]
    if wrong:
        ranks = ", ".join(map(str, wrong))
        return failed(case.check, f"{layers}: NOT EQUAL to Megatron's own gather on ranks {ranks}", "send this report")
    return passed(case.check, f"{layers}: {iterations} iterations equal Megatron's own gather to the last bit")
