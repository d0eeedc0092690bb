"""The time that the training thread takes to issue an iteration, independent of the device.

[Note: Two paths]
On a device the training thread runs ahead: it launches the kernels of a layer while earlier layers compute. An
iteration takes as long as the device's path or the thread's path, whichever is longer. The thread's path is the
launches of all steps, in the order of the pipeline and with its messages, plus the calls of one rank (gathers, reduces)
and its optimizer, in which Megatron's Python visits the parameters tensor by tensor. Without launches in the cost table
the thread's path is 0.
"""

from collections.abc import Sequence

from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.engine import Engine
from megatron_ext.simulator.rank_programs import RUN, RankProgram
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload

LAUNCHES = "launches"
"""The name of the thread's path in ``busy_us``."""


def least_thread_us(workload: Workload, timing: Timing) -> float:
    """Microseconds of the thread for all steps and the optimizer under any schedule; 0 without launches in the
    table."""
    if timing.launches is None:
        return 0.0
    if timing.launch_path_us is None:
        timing.launch_path_us = _path_us(workload, timing) + visits_us(workload, timing)
    return timing.launch_path_us


def visits_us(workload: Workload, timing: Timing) -> float:
    """Microseconds of the thread in which the optimizer visits parameters."""
    return timing.tensor_us * max(_tensors(workload, rank) for rank in range(workload.parallel.pp))


def thread_us(schedule: Schedule, workload: Workload, timing: Timing, programs: Sequence[RankProgram]) -> float:
    """Microseconds of the thread under ``schedule``, lowered to ``programs``; 0 without launches in the table."""
    least_us = least_thread_us(workload, timing)
    return least_us and least_us + max(_calls_us(schedule, workload, timing, program) for program in programs)


def _path_us(workload: Workload, timing: Timing) -> float:
    """Microseconds of all launches in the order of the pipeline. If the device takes longer than the launches for every
    step, the device's path is longer in any case, so the launches of the busiest rank alone are returned."""
    assert timing.launches is not None
    of_device = [[(sum(times.forward), sum(times.backward)) for times in rank] for rank in timing.layers]
    pairs = [(a, b) for ours, theirs in zip(timing.launches, of_device) for a, b in zip(ours, theirs)]
    if all(ours <= theirs for a, b in pairs for ours, theirs in zip(a, b)):
        return workload.parallel.num_microbatches * max(sum(map(sum, of_rank)) for of_rank in timing.launches)
    programs = [RankProgram(rank) for rank in range(workload.parallel.pp)]
    for program, steps in zip(programs, steps_of_ranks(workload.parallel)):
        of_rank = timing.launches[program.pp_rank]
        for step in steps:
            backward = step.kind == "B"
            us = of_rank[step.stage // workload.parallel.pp][backward]
            program.steps.append((step.stage, backward, step.microbatch, ((RUN, us),)))
    nothing = [(0.0, 0.0, 0.0)] * len(programs)
    return Engine(programs, workload, timing, [[] for _ in programs], optimizer_us=nothing).run()


def _tensors(workload: Workload, pp_rank: int) -> int:
    """The number of parameters that one rank's optimizer visits: its part of the parameters of its pipeline rank."""
    own = [parameter.expert for chunk in workload.chunks_of_rank(pp_rank) for parameter in chunk.parameters]
    return sum(-(-own.count(expert) // workload.parallel.ranks_of(expert)) for expert in (False, True))


def _calls_us(schedule: Schedule, workload: Workload, timing: Timing, program: RankProgram) -> float:
    """Microseconds of the calls of gathers and reduces on one rank."""
    own = [group for group in schedule.groups if group.pp_rank == program.pp_rank]
    reduces = sum(group.reduces(workload.parallel.num_microbatches) for group in own)
    return sum(gather.call_us for gather in program.gathers) + reduces * timing.reduce_call_us
