"""What tests of training with a host's optimizer share: models, delays, and one run of four ranks."""

from cases import MODELS

from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file

DELAYS = "step_delay_ms=3,reduce_delay_ms=2,publish_delay_ms=4"
BF16 = MODELS["bf16-offload"]
FP16 = [*MODELS["fp16"], "--optimizer-cpu-offload"]
THIRD_OF_FIVE = [False, False, True, False, False]
"""Iterations that overflow, of five, with ``meddle="overflow"``."""


def save(path, schedule, workload) -> None:
    """Write a schedule that training takes."""
    match.match(validate.validate(schedule), workload)
    schedule_file.save(path, schedule)


def train(services, options, schedule, *, iterations: int = 4, faults: str = DELAYS, debug: bool = False, **case):
    """The answer of :class:`parity_service.ParityService` to a case at the layout ``interleaved``."""
    environment = {"MEGATRON_EXT_FAULTS": faults} | ({"MEGATRON_EXT_DEBUG": "1"} if debug else {})
    case |= dict(options=options, schedule=schedule, iterations=iterations, environment=environment)
    return services("interleaved").run(**case)


def skipped(answer) -> list[bool]:
    """By iteration: it had no gradient norm that an optimizer steps by."""
    return [norm is None for norm in answer["scheduled"]["grad_norm"][0]]


def early_steps(answer) -> tuple[int, int]:
    """Early steps of all ranks, and those of them that were taken back."""
    taken, taken_back = zip(*answer["scheduled"]["early_steps"])
    return sum(taken), sum(taken_back)
