"""Drawn schedules by what they place where, each as a function of the workload."""

import random
from collections.abc import Callable

from draw_schedule import draw_schedule, states_on_device, states_on_drive, with_gradients, with_step_slots
from msgspec.structs import replace

from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.workload import Workload

Make = Callable[[Workload], Schedule]

SEED = 11
"""Of eight groups, with everything that is asked for."""


def everything(routes, kinds=("host", "sharded"), shards: bool = False) -> Make:
    """With these routes, gradients of these kinds, and where asked for shards that rest on the host."""

    def make(workload: Workload) -> Schedule:
        schedule = draw_schedule(random.Random(SEED), workload, ("gpu",) if routes == ("cpu_shard",) else routes)
        schedule = by_cpu_shard(schedule) if routes == ("cpu_shard",) else schedule
        schedule = with_host_shards(schedule, workload) if shards else schedule
        return with_gradients(random.Random(SEED), schedule, workload, kinds)

    return make


def slots(cast: str, make: Make) -> Make:
    return lambda workload: with_step_slots(make(workload), workload, slots=2, cast=cast)


def on_drive(make: Make) -> Make:
    return lambda workload: states_on_drive(schedule := make(workload), workload, [*range(len(schedule.groups))], 2)


def beside_backward(make: Make) -> Make:
    return lambda workload: replace(make(workload), rollback_bytes=1 << 21)


def some_on_device(make: Make) -> Make:
    return lambda workload: states_on_device(schedule := make(workload), [*range(0, len(schedule.groups), 2)])


ALL = everything(("gpu", "cpu", "nvme"))
SHARDS = everything(("cpu", "nvme"), shards=True)
