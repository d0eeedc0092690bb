"""What would fit if nothing fits: bytes, another GPU, or more of them."""

from math import inf

from msgspec.structs import replace

from megatron_ext.cost import hardware_sheet
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.fit.estimate_setting import least_bytes
from megatron_ext.planner.fit.request import FitProblem
from megatron_ext.planner.fit.search_settings import NothingFits
from megatron_ext.planner.fit.setting import Setting

MORE_GPUS = (2, 4, 8)
"""Multiples of the number of GPUs that are tried."""


def explained(problem: FitProblem, error: NothingFits) -> InputError:
    """The error ``error`` with a message that names what would fit."""
    limited = problem.limits.device_bytes is not None
    more = f"--limit-device-bytes {error.need_bytes}" if limited else f"{error.short_bytes} bytes more on each device"
    words = [more]
    gpus = _devices(problem, error.least, error.need_bytes)
    words += [f"a GPU with more memory ({', '.join(gpus)})"] if gpus and not limited else []
    times = _times(problem, error.least)
    words += [f"{times} times as many GPUs"] if times else []
    where = {"field": error.field, "value": error.value} if limited else {"field": "--hardware"}
    return InputError(f"{error.message}; what would fit: {', or '.join(words)}", **where)


def _devices(problem: FitProblem, setting: Setting, need: int) -> list[str]:
    """Names of sheets whose device has more memory and room for ``need`` bytes, the smallest devices first."""
    sheets = {name: hardware_sheet.load(name) for name in hardware_sheet.names()}
    work, ranks, found = setting.workload(problem.limits), setting.parallel.world_size, []
    for name, sheet in sorted(sheets.items(), key=lambda item: (item[1].device.memory_bytes.value, item[0])):
        joined, memory = sheet.network is not None or ranks <= sheet.gpus_per_node, sheet.device.memory_bytes.value
        if joined and problem.most_bytes < memory >= need + problem.reserve(setting, work, sheet):
            found.append(name)
    return found[:3]


def _times(problem: FitProblem, setting: Setting) -> int | None:
    """The factor by which the number of GPUs has to grow so that the setting fits, with data-parallel ranks that
    divide the batch; None if no factor works. Without a network all GPUs are on one node."""
    sheet = problem.sheet
    most = sheet.gpus_per_node if sheet is not None and sheet.network is None else inf
    for times in MORE_GPUS:
        parallel, batch = setting.parallel, setting.batch
        dp = parallel.data_parallel_size * times
        count, rest = divmod(setting.samples * batch.context_parallel, batch.micro_batch_size * dp)
        if rest or not count or setting.parallel.world_size * times > most:
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
