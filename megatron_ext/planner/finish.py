"""The passes that follow the search for gathers: step slots, rest states, host step."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.passes import rest_states
from megatron_ext.planner.passes.rest_states import rest_on_device, rest_on_drive
from megatron_ext.planner.passes.size_step_slots import size_step_slots, without_useless_slots
from megatron_ext.planner.passes.time_host_step import time_host_step

T = TypeVar("T")


def finished(given: Candidate) -> Candidate:
    """The candidate with optimizer states placed so that the simulated plan is fastest. States rest on the device if
    ``limits.device_bytes`` leaves room, and on the drive if ``limits.host_bytes`` asks for it. ``step_slots`` and
    steps during the backward are chosen as well.

    Raises:
        InputError: the limits cannot be kept.
    """
    found = those_that_can(rest_on_device(size_step_slots(given)), fastest_on_drive)
    best = min(found, key=Candidate.simulated_us)
    if len(found) > 1:
        times = ", ".join(f"{one.simulated_us() / 1e3:.3f}" for one in found)
        said = f"the fastest of {len(found)} choices, of which the first has no states on the device: {times} ms"
        best = best.decided(rest_states.NAME, said)
    return without_useless_slots(best)


def fastest_on_drive(given: Candidate) -> Candidate:
    """The fastest of the choices of states on the drive. Raises InputError if host memory is short."""
    return min(map(time_host_step, rest_on_drive(given)), key=Candidate.simulated_us)


def those_that_can(given: Iterable[T], finish: Callable[[T], T]) -> list[T]:
    """The results of ``finish`` for all of ``given`` that it does not refuse. If it refuses all, raises the first
    InputError."""
    found: list[T] = []
    reasons: list[InputError] = []
    for one in given:
        try:
            found.append(finish(one))
        except InputError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found
