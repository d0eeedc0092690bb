"""Measures compute of the given layers, on all ranks at once, in rounds that are spread over the measurement."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import median
from time import monotonic, perf_counter

import msgspec

from megatron_ext.cost.cost_table import TIMES, Compute
from megatron_ext.cost.environment import SEQUENCE_PARTS
from megatron_ext.measure.device_time import DeviceTimer
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.layer_times import Runner, measure_compute, micro_batch_us
from megatron_ext.runtime.objects import gather_objects

MIN_REPEATS, MAX_REPEATS = 2, 40
"""Limits of the micro-batches in a round, after one for warm-up."""
ROUNDS, MAX_ROUNDS = 4, 192
"""Limits of the number of rounds. There are more rounds if layers are short or there is much time, because a machine's
speed changes from second to second."""
LEAST_ROUNDS = 2
"""Rounds if a micro-batch takes seconds, so that there is no time for more."""


def counts_within(seconds: float, round_us: float, parts: int) -> tuple[int, int, int]:
    """(rounds, micro-batches per round, warm-up micro-batches per round) that take about ``seconds`` together.

    If a micro-batch is so long that there is no time for one in every round, there are few rounds and no warm-up.

    Args:
        round_us: one micro-batch on all ranks, by the clock.
        parts: the number of parts that the rounds are divided into. Each part has at least one round, unless
            micro-batches are long.
    """
    micro_batches, least = seconds * 1e6 / round_us, max(ROUNDS, parts)
    if micro_batches < least:
        return max(LEAST_ROUNDS, int(micro_batches)), 1, 0
    rounds = max(least, min(MAX_ROUNDS, int(micro_batches / (MIN_REPEATS + 1))))
    return rounds, max(MIN_REPEATS, min(MAX_REPEATS, int(micro_batches / rounds) - 1)), 1


class ComputeRounds:
    """Rounds in several parts, with other measurements in between, because a machine changes its speed for seconds.
    Every method is collective.

    Args:
        seconds: time for all rounds together.
        parts: the number of parts that they are divided into.
        report: ``report(what)``.

    Attributes:
        end: after this time (``monotonic``) no round begins, except the first few.
    """

    end = inf

    def __init__(
        self, fabric: Fabric, runners: Mapping[str, Runner], seconds: float, parts: int, report: Callable[[str], None]
    ):
        self._fabric, self._runners, self._report = fabric, runners, report
        self._timer = DeviceTimer()  # of all rounds: some have no warm-up
        report("compute, once")
        if fabric.torch_device.type == "cuda":
            self._round(1, 0)  # the first use loads kernels and makes communicators: do not time it
        begin = perf_counter()
        self._round(1, 1)
        once_us = max((perf_counter() - begin) * 1e6 / 2, 1.0)
        self._timer.agree()
        self._count, *self._repeats = map(fabric.agree, counts_within(seconds, once_us, parts))
        self._shares = [self._count * (part + 1) // parts - self._count * part // parts for part in range(parts)]
        self._rounds: list[list[Compute]] = []

    def _round(self, repeats: int, warmup: int) -> list[Compute]:
        self._fabric.barrier()
        return measure_compute(self._runners, repeats, warmup=warmup, timer=self._timer)

    def take(self, part: int) -> None:
        """Measure the rounds of one part."""
        for _ in range(self._shares[part]):
            if len(self._rounds) >= ROUNDS and self._fabric.agree(int(monotonic() > self.end)):
                break
            self._report(f"compute, all ranks at once ({len(self._rounds) + 1}/{self._count})")
            self._rounds.append(self._round(*self._repeats))

    def result(self) -> dict:
        """``{"rows", "model", "drift", "rounds"}`` on rank 0, empty on the others: the rows of all ranks and rounds,
        the model that was measured, how far rounds differ, and their number."""
        fabric = self._fabric
        everyone = gather_objects(self._rounds)
        if fabric.rank != 0:
            return {}
        own = [micro_batch_us(rows, self._runners) for rows in self._rounds]
        kinds = zip(*(rows for rounds in everyone for rows in rounds))
        return {
            "rows": [msgspec.to_builtins(middle(rows)) for rows in kinds],
            "model": self._model(),
            "drift": max(own) / min(own) - 1,
            "rounds": len(own),
        }

    def _model(self) -> dict:
        """Facts of the model that compute was measured with; a factory's runners may name their ``dtype``."""
        options = self._fabric.options
        shape = {name: getattr(options, name) for name in ("hidden_size", "seq_length", "micro_batch_size")}
        found = (getattr(runner, "dtype", None) for runner in self._runners.values())
        dtypes = sorted({dtype for dtype in found if dtype is not None})
        if options.sequence_parts > 1:
            shape[SEQUENCE_PARTS] = options.sequence_parts
        return shape | ({"dtype": dtypes[0]} if len(dtypes) == 1 else {})


def middle(rows: Sequence[Compute]) -> Compute:
    """One row for one layer kind that was measured several times: the median of each figure, the sum of the samples."""
    given = [name for name in TIMES if getattr(rows[0], name) is not None]
    medians = {name: median(getattr(row, name) for row in rows) for name in given}
    return msgspec.structs.replace(rows[0], **medians, samples=sum(row.samples for row in rows))
