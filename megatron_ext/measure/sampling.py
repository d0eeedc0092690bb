"""Time an operation in several rounds, on every rank at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from megatron_ext.measure.device_time import DeviceTimer
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operation import Operation

MIN_ROUNDS, MAX_ROUNDS = 3, 20
IN_A_ROW, SHORT_BYTES = 8, 4 << 20


@dataclass(slots=True)
class Samples:
    """Times of one operation at one size on this rank, in microseconds."""

    us: list[float] = field(default_factory=list)
    issued_us: list[float] = field(default_factory=list)

    def add(self, later: Samples) -> None:
        """Append the samples of a later visit."""
        self.us += later.us
        self.issued_us += later.issued_us


def p95(us: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted(us)[min(int(len(us) * 0.95), len(us) - 1)]


def timed(
    fabric: Fabric, operation: Operation, size_bytes: int, round_index: int, timer: DeviceTimer | None
) -> tuple[float, float]:
    """(time until complete, time until issued) in microseconds. On CUDA the first is the time on the device, see
    device_time.py. Work of the host itself (a drive, another node) is timed by the host's clock on CUDA as well."""
    if timer is not None and not operation.by_host:
        return _on_device(timer, operation, size_bytes, round_index)
    start = perf_counter()
    handle = operation.issue(size_bytes, round_index)
    issued = perf_counter()
    handle.wait()
    fabric.device.settle()
    return (perf_counter() - start) * 1e6, (issued - start) * 1e6


def in_a_row(size_bytes: int) -> int:
    """The number of transfers of a size that are timed back to back on a device. For a single short transfer, events
    and waits would be most of the time."""
    return IN_A_ROW if size_bytes <= SHORT_BYTES else 1


def _on_device(timer: DeviceTimer, operation: Operation, size_bytes: int, round_index: int) -> tuple[float, float]:
    count = in_a_row(size_bytes)
    if operation.settles:  # else the host would wait for the spin, and each spin would be longer than the last
        timer = DeviceTimer()

    def call() -> float:
        handles = [operation.issue(size_bytes, round_index * count + index) for index in range(count)]
        issued = perf_counter()
        for handle in handles:
            handle.wait()
        return issued

    us, issued_us = timer.time((operation.name, size_bytes), call)
    return us / count, issued_us / count


def sample(
    fabric: Fabric,
    operation: Operation,
    size_bytes: int,
    seconds: float,
    *,
    warmups: int = 2,
    max_rounds: int = MAX_ROUNDS,
) -> Samples:
    """Rounds of ``operation`` for about ``seconds``, all ranks starting together.

    The first rounds are a warm-up, from which rank 0 computes how many more fit. Every rank runs that many: at
    least :data:`MIN_ROUNDS` (fewer only if the warm-up has used the time), and at most ``max_rounds``.
    """
    samples = Samples()
    messages, timer = operation.messages, DeviceTimer() if fabric.torch_device.type == "cuda" else None
    round_index = 0
    begin = perf_counter()
    for warm in range(warmups):
        fabric.barrier()
        us, _ = timed(fabric, operation, size_bytes, round_index, timer)
        round_index += 1
        if warm + 1 < warmups and fabric.agree(int(us > seconds * 1e6 / 4)):
            break  # so long that the setup in the first round does not matter
    if timer is not None:
        timer.agree()
    row = 1 if timer is None or operation.by_host else in_a_row(size_bytes)
    left = seconds - (perf_counter() - begin)
    fit = int(left * 1e6 / max(us * row, 1.0))
    rounds = fabric.agree(max(MIN_ROUNDS if left > 0 else 1, min(max_rounds, fit)))
    for _ in range(rounds):
        fabric.barrier()
        us, issued = timed(fabric, operation, size_bytes, round_index, timer)
        round_index += 1
        samples.us.append(us / messages)
        samples.issued_us.append(issued / messages)
    return samples
