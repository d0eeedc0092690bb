"""Layers placed on pipeline stages by their cost, so that the slowest stage is as fast as possible.

Source: PipeDream (Narayanan et al., SOSP 2019), which cuts a model by dynamic programming over measured layers. Here a
stage also counts its gathers and has to fit the limit of device memory. Among all cuts with the same slowest stage, the
one with the least sum of squared stage costs is taken, and among those the one whose earlier stages are longer.

Rank ``r`` and chunk ``c`` give one of ``pp * vp`` stages. The limit of a rank is divided equally among its stages.
"""

import re
from collections.abc import Sequence
from functools import cache
from math import inf
from typing import NamedTuple

import msgspec

from megatron_ext.bounds.feasibility import usable_routes
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.estimates import STEP
from megatron_ext.formats.errors import InputError
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import kind_of
from megatron_ext.workload.workload import Parameter, Workload

LETTERS = {"embedding": "E", "transformer": "t", "moe": "t", "output": "L"}
"""Megatron's letters by kind of layer.

Source: Megatron-LM ``megatron/core/transformer/pipeline_parallel_layer_layout.py``, since core 0.13.
"""


class ModelLayer(NamedTuple):
    """One layer of the whole model: microseconds of a forward plus a backward of one micro-batch, and its
    parameters."""

    kind: str
    us: float
    parameters: tuple[Parameter, ...]

    @property
    def bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)


class Balanced(NamedTuple):
    """A placement: the number of layers of every stage and the cost of every stage in microseconds per micro-batch,
    next to the costs of the stages as the workload places the layers now."""

    counts: tuple[int, ...]
    stage_us: tuple[float, ...]
    present_us: tuple[float, ...]
    layout: str


def balance(workload: Workload, table: CostTable, *, extrapolate: bool = False) -> Balanced:
    """The placement of all layers with the fastest slowest stage.

    Raises:
        InputError: the workload names no ``layer_kinds``, or has a kind that Megatron's layout does not know; a layer
            is tied to another layer of its chunk; no placement fits the limits; or the table lacks a figure.
    """
    cost = StageCosts(workload, table, extrapolate=extrapolate)
    counts = place(len(cost.layers), workload.parallel.pp * workload.parallel.vp, cost)
    if counts is None:
        raise InputError(
            "cannot fit: no placement of the layers keeps it",
            field="limits.whole_parameter_bytes",
            value=workload.limits.whole_parameter_bytes,
        )
    present, now = (stage_costs(each, cost) for each in ([len(c.layer_kinds) for c in workload.chunks], counts))
    return Balanced(counts, now, present, layout_text(cost.layers, counts))


def _model_layers(workload: Workload, timing: Timing) -> list[ModelLayer]:
    """All layers of the model in execution order. Raises as :func:`balance`."""
    found = []
    for chunk in workload.chunks:
        where = f"chunks of pipeline rank {chunk.pp_rank}, model chunk {chunk.model_chunk_id}"
        if not chunk.layer_kinds and chunk.parameters:
            raise InputError(f"{where} name no layer_kinds", field="chunks")
        times = timing.layers[chunk.pp_rank][chunk.model_chunk_id]
        for number, kind in enumerate(chunk.layer_kinds):
            if kind not in LETTERS:
                raise InputError(
                    f"has no letter in Megatron's layout; known: {', '.join(LETTERS)}", field=where, value=kind
                )
            own = tuple(parameter for parameter in chunk.parameters if parameter.layer == number)
            if any(parameter.borrowed_by for parameter in own):
                raise InputError("tied embeddings within one chunk cannot be placed", field=where)
            found.append(ModelLayer(kind, times.forward[number] + times.backward[number], own))
    return found


class StageCosts:
    """Microseconds per micro-batch of a stage with layers ``first`` to ``end - 1``; infinite if the stage does not fit.
    Raises as :func:`balance`."""

    def __init__(self, workload: Workload, table: CostTable, *, extrapolate: bool = False):
        self.workload = workload
        steps = [row for row in table.compute if row.layer_kind == STEP]  # what a step costs besides its layers
        alone = tuple(row for row in table.compute if row.layer_kind != STEP)
        self.timing = Timing(workload, msgspec.structs.replace(table, compute=alone), extrapolate=extrapolate)
        self.layers, self.routes = _model_layers(workload, self.timing), usable_routes(workload, self.timing)
        self.step_us = sum(row.forward_us + row.backward_us for row in steps)
        limit = workload.limits.whole_parameter_bytes
        self.headroom = inf if limit is None else limit / workload.parallel.vp

    def __call__(self, first: int, end: int) -> float:
        layers = self.layers[first:end]
        size, compute = sum(layer.bytes for layer in layers), sum(layer.us for layer in layers) + self.step_us
        if self.workload.zero_stage < 3:
            return compute if size <= self.headroom else inf
        if not size or not self.routes:
            return compute
        # Bytes that fit are gathered once per iteration, the rest for every forward and every backward.
        again = max(size - self.headroom, 0.0)
        us = sum(map(self._gather_us, layers))
        share = again / size
        return max(compute, us * (2.0 * share + (1.0 - share) / self.workload.parallel.num_microbatches))

    def _gather_us(self, layer: ModelLayer) -> float:
        us, routes = 0.0, [route for route in self.routes if len(self.routes) == 1 or not kind_of(route).staged]
        for expert in (False, True):
            own = self.timing.among(self.workload.parallel.ranks_of(expert))
            if size := sum(p.bytes for p in layer.parameters if p.expert is expert):
                us += min(own.fastest_us(route, size) for route in routes)
        return us


def place(num_layers: int, stages: int, cost) -> tuple[int, ...] | None:
    """Number of layers of each stage; None if no placement fits. The slowest stage is as fast as possible, then the sum
    of squares is least, then earlier stages are longer.

    The result is exact. Two dynamic programs run over (stages, layers placed), with ``stages * num_layers ** 2``
    operations each. A stage may have no layers.
    """
    cost = cache(cost)
    slowest = [[inf] * (num_layers + 1) for _ in range(stages + 1)]  # of the last n stages with the layers from i on
    slowest[0][num_layers] = 0.0
    for number in range(1, stages + 1):
        for first in range(num_layers + 1):
            slowest[number][first] = min(
                max(cost(first, end), slowest[number - 1][end]) for end in range(first, num_layers + 1)
            )
    most = slowest[stages][0]
    if most == inf:
        return None
    squares = [[inf] * (num_layers + 1) for _ in range(stages + 1)]
    choice = [[0] * (num_layers + 1) for _ in range(stages + 1)]
    squares[0][num_layers] = 0.0
    for number in range(1, stages + 1):
        for first in range(num_layers + 1):
            for end in range(num_layers, first - 1, -1):
                us = cost(first, end)
                if us > most * (1 + 1e-12):
                    continue
                total = us * us + squares[number - 1][end]
                if total < squares[number][first] * (1 - 1e-12):
                    squares[number][first], choice[number][first] = total, end
    counts, first = [], 0
    for number in range(stages, 0, -1):
        counts.append(choice[number][first] - first)
        first = choice[number][first]
    return tuple(counts)


def stage_costs(counts: Sequence[int], cost) -> tuple[float, ...]:
    """Cost of every stage of a placement."""
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return tuple(cost(end - count, end) for count, end in zip(counts, ends))


def layout_text(layers: Sequence[ModelLayer], counts: Sequence[int]) -> str:
    """Megatron's ``--pipeline-model-parallel-layout``, for example ``Et*3|t*4|t*3L``."""
    texts, first = [], 0
    for count in counts:
        letters = "".join(LETTERS[layer.kind] for layer in layers[first : first + count])
        texts.append(re.sub(r"t{2,}", lambda match: f"t*{len(match[0])}", letters))
        first += count
    return "|".join(texts)
