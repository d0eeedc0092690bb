"""What would fit if nothing fits: bytes, another GPU, or more nodes."""

from msgspec.structs import replace

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.device_reserve import device_reserve, temporary_bytes
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.fit.estimate_setting import least_bytes
from megatron_ext.planner.fit.request import FitProblem
from megatron_ext.planner.fit.search_settings import NothingFits
from megatron_ext.planner.fit.setting import Setting

MORE_NODES = (2, 4, 8)
"""Multiples of the number of nodes that are tried."""


def explained(problem: FitProblem, error: NothingFits) -> InputError:
    """The error ``error`` with a message that names what would fit."""
    limited = problem.limits.device_bytes is not None
    more = f"--limit-device-bytes {error.need_bytes}" if limited else f"{error.short_bytes} bytes more on each device"
    words = [more]
    gpus = _devices(problem, error.least, error.need_bytes)
    words += [f"a GPU with more memory ({', '.join(gpus)})"] if gpus and not limited else []
    nodes = _nodes(problem, error.least)
    words += [f"{nodes} times as many nodes"] if nodes else []
    where = {"field": error.field, "value": error.value} if limited else {"field": "--hardware"}
    return InputError(f"{error.message}; what would fit: {', or '.join(words)}", **where)


def _devices(problem: FitProblem, setting: Setting, need: int) -> list[str]:
    """Names of sheets whose device has room for ``need`` bytes, the smallest devices first."""
    sheets = {name: hardware_sheet.load(name) for name in hardware_sheet.names()}
    found, layer = [], temporary_bytes(setting.workload(problem.limits))
    for name, sheet in sorted(sheets.items(), key=lambda item: (item[1].device.memory_bytes.value, item[0])):
        layers = setting.shape.layers
        reserve = device_reserve(sheet, setting.parallel, layers=layers, activation_bytes=0, within_layer=layer)
        if need + reserve.total_bytes <= sheet.device.memory_bytes.value:
            found.append(name)
    return found[:3]


def _nodes(problem: FitProblem, setting: Setting) -> int | None:
    """The factor by which the number of nodes has to grow so that the setting fits, with data-parallel ranks that
    divide the batch; None if no factor works."""
    for times in MORE_NODES:
        parallel, batch = setting.parallel, setting.batch
        dp = parallel.data_parallel_size * times
        count, rest = divmod(setting.samples * batch.context_parallel, batch.micro_batch_size * dp)
        if rest or not count:
            continue
        more = setting._replace(parallel=replace(parallel, data_parallel_size=dp, num_microbatches=count))
        try:
            more.parallel.check()
        except InputError:
            continue
        work = more.workload(problem.limits)
        if least_bytes(work) <= problem.room(more, work):
            return times
    return None
