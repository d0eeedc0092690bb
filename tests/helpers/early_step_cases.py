"""A model of one rank whose host steps the optimizer layer by layer, for the simulator; also with states on a drive."""

from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.group_facts import saved_bytes
from megatron_ext.schedule.memory_bill import states_on_drive_bytes
from megatron_ext.schedule.user_defined_schedule import StateSlots
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.optimizer_settings import OptimizerSettings

LAYERS, LAYER_US, NORM_US = 4, 200.0, 50.0
ON_HOST = OptimizerSettings(on_host=True)


def case(step_us: float, *, save_us=0.01, groups: float = LAYERS, gradients=None, contention=(), microbatches=2):
    """A layer's backward takes 200 us. The host's step of a layer takes ``step_us``, one that does not wait as long and
    ``save_us`` more; there is memory for so many ``groups``."""
    how = dict(order="no_pipeline", layers=LAYERS, zero_stage=2 if gradients else 1, p2p_bytes=0)
    work = replace(make_workload(pp=1, vp=1, microbatches=microbatches, **how), optimizer=ON_HOST)
    schedule = stock_schedule(work, layer_buckets)
    size = schedule.groups[0].bytes
    table = make_table(work, gpu=(0.001, 1e9), forward=400.0, backward=LAYERS * LAYER_US, contention=contention)
    table = replace(
        table,
        reduce=line(0.0, size / 1e-3),
        host_step=line(0.0, size / step_us),
        host_add=line(0.0, size / (save_us / 3)),  # of a float32 shard: as many bytes as two ranks' parameters have
        optimizer=line(NORM_US, size / step_us),
    )
    room = int(groups * saved_bytes(schedule.groups[0], work))
    kept = tuple(replace(group, gradients=gradients) for group in schedule.groups)
    return work, table, validate(replace(schedule, groups=kept, rollback_bytes=room))


def on_drive(read_us: float, write_us: float, groups=range(LAYERS), **how):
    """Layers whose host's step takes 150 us and whose states the drive reads and writes in so long; those of ``groups``
    stand there, and there is no memory for the states of others. A rank writes the shard of a group, and reads all."""
    work, table, schedule = case(150.0, **how)
    (piece,) = {states_on_drive_bytes([replace(group, states_rest="nvme")], work) for group in schedule.groups}
    table = replace(
        table,
        routes=replace(table.routes, cpu=None, nvme=line(0.0, piece / read_us)),
        publish=replace(table.publish, nvme=line(0.0, work.parallel.dp * piece / write_us)),
    )
    rest = tuple(replace(g, states_rest="nvme" if i in groups else None) for i, g in enumerate(schedule.groups))
    slots = StateSlots(slots=3, slot_bytes=piece)
    return work, table, validate(replace(schedule, groups=rest, state_slots=slots, rollback_bytes=0))
