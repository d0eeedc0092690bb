"""Times according to a cost table. Planner, simulator and report get them only here."""

from collections.abc import Iterable, Sequence
from functools import cache
from math import prod

from msgspec.structs import replace

from megatron_ext.cost.cost_table import CHOSEN, Compute, CostTable, Curve, part_named
from megatron_ext.cost.curve import Estimate, has_points, lookup
from megatron_ext.formats.errors import InputError

STEP = "step"
"""The row of ``compute`` with this ``layer_kind`` is not a layer. It is the time of a step in addition to its
layers."""


class Costs:
    """Fast, cached look-ups in one cost table. All times are in microseconds, all sizes are bytes of the whole
    (gathered) group.

    Args:
        table: as :func:`megatron_ext.cost.cost_table.load` returns it.
        extrapolate: allow sizes outside the measured range.
        file: the table's path, named in errors.
    """

    def __init__(self, table: CostTable, extrapolate: bool = False, *, file=None) -> None:
        self.table, self.extrapolate, self.file = table, extrapolate, file
        self._estimates: dict[tuple, Estimate] = {}
        self._curve = cache(self._curve_of)
        self._by_place = {(row.pp_rank, row.model_chunk_id): row for row in table.compute if row.layer_kind is None}
        self._by_kind = {row.layer_kind: row for row in table.compute if row.layer_kind is not None}
        self._contention: dict[tuple[str, str], dict[int | None, float]] = {}
        for row in table.contention:
            by_size = self._contention.setdefault((row.measured, row.busy), {})
            by_size[row.size_bytes] = max(row.slowdown, 1.0, by_size.get(row.size_bytes, 1.0))

    # -- links ------------------------------------------------------------------------------

    def offers(self, what: str) -> bool:
        """Whether a curve by its field (``routes.cpu``, ``publish.cpu``, ...) has points. A route without any is not
        offered."""
        return has_points(self._curve(what, None))

    def issued_us(self, route: str, size_bytes: int) -> float | None:
        """Time for which issuing blocks the calling thread, at the nearest measured size that is not smaller. None if
        the table does not have it."""
        curve = getattr(self.table.routes, route)
        known = [point for point in (curve.points if curve else ()) if point.issued_us is not None]
        nearest = [point for point in known if point.size_bytes >= size_bytes] or known[-1:]
        return nearest[0].issued_us if nearest else None

    def while_busy(self, route: str, size_bytes: int, busy: Iterable[str], alone: Estimate) -> Estimate:
        """A transfer while the links named in ``busy`` work. ``alone`` is the same transfer without them.

        Raises:
            InputError: a pair was never measured.
        """
        factors = []
        for name in busy:
            if (route, name) not in self._contention:
                raise InputError(f"not measured: {route} while {name} is busy", file=self.file, field="contention")
            factors.append(self.slowdown(route, name, size_bytes))
        if not factors:
            return alone
        # Delays by several links add up. At best they overlap with each other.
        us, low_us = alone.us * (1 + sum(factor - 1 for factor in factors)), alone.low_us * max(factors)
        return alone._replace(us=us, low_us=low_us, high_us=alone.high_us * prod(factors))

    def slowdown(self, measured: str, busy: str, size_bytes: int | None = None) -> float:
        """The factor by which ``measured`` takes longer while ``busy`` works; 1.0 without a row.

        Between rows of several sizes the factor is linear. Outside of them the nearest row is used, because a ratio
        does not keep growing. Without ``size_bytes`` it is the row without a size, or else the
        largest factor of all rows.
        """
        by_size = self._contention.get((measured, busy))
        if by_size is None:
            return 1.0
        sizes = sorted(size for size in by_size if size is not None)
        if size_bytes is None or not sizes:
            return by_size[None] if None in by_size else max(by_size.values())
        if size_bytes <= sizes[0]:
            return by_size[sizes[0]]
        for left, right in zip(sizes, sizes[1:]):
            if size_bytes <= right:
                share = (size_bytes - left) / (right - left)
                return by_size[left] + share * (by_size[right] - by_size[left])
        return by_size[sizes[-1]]

    def estimate(self, what: str, size_bytes: int, algorithm: str | None = None, *, beyond: bool = False) -> Estimate:
        """The estimate from any curve by its field (``routes.gpu``, ``publish.cpu``, ``p2p``, ``reduce``, ...), with
        its interval and, if there are several, its algorithm.

        Args:
            algorithm: one of those that a schedule chooses (:data:`cost_table.CHOSEN`); None: all others.
            beyond: allow sizes outside the measured range, as with ``extrapolate``.

        Raises:
            InputError: the curve has no points, or the size is outside their range.
        """
        key = (what, size_bytes, algorithm, beyond)
        found = self._estimates.get(key)
        if found is None:
            curve, extrapolate = self._curve(what, algorithm), self.extrapolate or beyond
            found = lookup(curve, size_bytes, extrapolate=extrapolate, what=what, file=self.file)
            self._estimates[key] = found
        return found

    def _curve_of(self, what: str, algorithm: str | None) -> Curve:
        """The points that :meth:`estimate` reads."""
        curve = part_named(self.table, what) or Curve()
        if algorithm is not None:
            return Curve(points=curve.algorithms.get(algorithm, ()))
        others = {name: own for name, own in curve.algorithms.items() if name not in CHOSEN.get(what, ())}
        return replace(curve, algorithms=others)

    # -- compute ----------------------------------------------------------------------------

    def layer_us(
        self, pp_rank: int, model_chunk_id: int, layer_kinds: Sequence[str] = (), num_layers: int | None = None
    ) -> list[tuple[float, float]]:
        """(forward, backward) of each layer of a chunk in microseconds, in execution order.

        If the table has a row for the whole chunk, it is divided in proportion to the rows of the layers' kinds. Layers
        without a row share equally what the other layers leave. Without a row for the chunk, the rows of its layers'
        kinds are used, plus the row of kind :data:`STEP` if there is one.

        Raises:
            InputError: a layer kind has no row. The message names the chunk and the kind.
        """
        row = self._by_place.get((pp_rank, model_chunk_id))
        if row is None:
            layers = [(row.forward_us, row.backward_us) for row in self._rows(pp_rank, model_chunk_id, layer_kinds)]
            step = self._by_kind.get(STEP)
            if step is not None:  # work before the first layer of a forward and of a backward
                layers[0] = (layers[0][0] + step.forward_us, layers[0][1])
                layers[-1] = (layers[-1][0], layers[-1][1] + step.backward_us)
            return layers
        layers = [self._by_kind.get(kind) for kind in layer_kinds] or [None] * (num_layers or 1)
        of = lambda name: _shared_out(getattr(row, name), [layer and getattr(layer, name) for layer in layers])
        return [*zip(of("forward_us"), of("backward_us"))]

    def launches_us(
        self, pp_rank: int, model_chunk_id: int, layer_kinds: Sequence[str] = ()
    ) -> tuple[float, float] | None:
        """(forward, backward): microseconds for which launching one micro-batch through a chunk keeps the training
        thread busy; None if the table does not have it for all layers."""
        row = self._by_place.get((pp_rank, model_chunk_id))
        kinds = (*layer_kinds, STEP) if STEP in self._by_kind else layer_kinds
        rows = [row] if row is not None else [self._by_kind.get(kind) for kind in kinds]
        known = [
            (row.forward_launch_us, row.backward_launch_us)
            for row in rows
            if row is not None and row.forward_launch_us is not None and row.backward_launch_us is not None
        ]
        if not known or len(known) < len(rows):
            return None
        return sum(forward for forward, _ in known), sum(backward for _, backward in known)

    def _rows(self, pp_rank: int, model_chunk_id: int, layer_kinds: Sequence[str]) -> list[Compute]:
        missing = sorted(set(layer_kinds) - set(self._by_kind))
        if missing or not layer_kinds:
            why = f"none for layer_kind {', '.join(missing)}" if missing else "the workload names no layer_kinds there"
            said = f"no row for pp_rank {pp_rank}, model_chunk_id {model_chunk_id}, and {why}"
            said += f"; megatron-ext measure or cost estimate gives {'them' if missing else 'one'}"
            raise InputError(said, file=self.file, field="compute")
        return [self._by_kind[kind] for kind in layer_kinds]


def _shared_out(whole_us: float, known: Sequence[float | None]) -> list[float]:
    """Time of each layer of a chunk. None in ``known``: the layer's kind has no row. If the known layers leave no time,
    such a layer takes as much as their mean."""
    rows = [us for us in known if us is not None]
    missing = len(known) - len(rows)
    left_us = whole_us - sum(rows)
    each_us = left_us / missing if missing and left_us > 0 else sum(rows) / max(len(rows), 1)
    parts = [each_us if us is None else us for us in known]
    return [whole_us * us / sum(parts) for us in parts]
