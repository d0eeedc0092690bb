"""What a setting costs: by a data sheet, by measured tables, or by a sheet that tables correct.

[Note: Micro-batch sizes]
What a layer takes for a micro-batch of any size (its weights read, its gradients added up, kernels launched) is in no
data sheet. Tables measured with several sizes show it: a sheet's times of layers are multiplied by a factor that lies
between those of the two nearest sizes, linearly in 1 / size, as it does where a layer takes a fixed time and one a
sample. Beyond the sizes that were measured it is that of the nearest.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.cost.hardware_sheet import Figure, HardwareSheet, drawn, figures
from megatron_ext.cost.perturbed_table import PerturbedTables
from megatron_ext.cost.scaled_table import Factors, factors_between, scaled
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.workload.workload import Workload

KINDS = ("compute", "gpu", "cpu", "publish", "p2p", "reduce", "optimizer", "host_step", "host_add")


class Costs(NamedTuple):
    """Attributes:
    sheet: of the machine; None where ``tables`` alone say what everything takes.
    tables: measured with the setting ``measured``, by micro-batch size.
    factors: by which the sheet's estimates are multiplied, by micro-batch size.
    """

    sheet: HardwareSheet | None = None
    tables: Mapping[int, CostTable] = {}
    factors: Mapping[int, Factors] = {}
    measured: Setting | None = None

    @classmethod
    def by(
        cls, sheet: HardwareSheet | None, tables: Sequence[CostTable], measured: Setting, workload: Workload
    ) -> "Costs":
        """The sheet's estimates times what ``tables`` are to them, or the tables alone. A table that does not say its
        micro-batch size was measured with that of ``measured``.

        Raises:
            InputError: two of the tables have the same micro-batch size.
        """
        by_size: dict[int, CostTable] = {}
        for table in tables:
            said = (table.metadata.model or {}).get("micro_batch_size")
            size = said if isinstance(said, int) and said > 0 else measured.batch.micro_batch_size
            if by_size.setdefault(size, table) is not table:
                raise InputError("two tables have this micro-batch size", field="--cost-table", value=size)
        if sheet is None:
            return cls(None, by_size, {}, measured)
        batches = {size: measured.batch._replace(micro_batch_size=size) for size in by_size}
        estimated = {size: estimate(sheet, workload, batch) for size, batch in batches.items()}
        factors = {size: factors_between(estimated[size], table, workload) for size, table in by_size.items()}
        return cls(sheet, by_size, factors, measured)

    @property
    def table(self) -> CostTable | None:
        """The first."""
        return next(iter(self.tables.values()), None)

    def of(self, setting: Setting, workload: Workload) -> CostTable:
        """The cost table of a setting. Raises InputError where the ranks do not fit the machine."""
        if self.sheet is None:
            return self.tables[setting.batch.micro_batch_size]
        estimated = estimate(self.sheet, workload, setting.batch)
        return scaled(estimated, self._factors(setting)) if self.factors else estimated

    def _factors(self, setting: Setting) -> Factors:
        """See [Note: Micro-batch sizes]."""
        assert self.measured is not None
        size, curves = setting.batch.micro_batch_size, next(iter(self.factors.values())).curves
        if setting.optimizer.on_host != self.measured.optimizer.on_host:
            curves = {name: factor for name, factor in curves.items() if name != "optimizer"}  # the other's step
        below = max((known for known in self.factors if known <= size), default=min(self.factors))
        above = min((known for known in self.factors if known >= size), default=max(self.factors))
        part = 0.0 if below == above else (1 / below - 1 / size) / (1 / below - 1 / above)
        ends = zip(self.factors[below][1:], self.factors[above][1:])
        return Factors(curves, *((1 - part) * first + part * last for first, last in ends))

    def drawn(self, setting: Setting, workload: Workload, count: int) -> Iterator[CostTable]:
        """Tables as likely as that one, the same draws for every setting: every figure of the sheet from its range, all
        at once (Latin hypercube sampling, McKay, Beckman and Conover 1979), half of the draws below its value; or the
        measured table as far as it may be wrong."""
        if self.sheet is None:
            return iter(PerturbedTables(self.of(setting, workload), KINDS).draw(count))
        return (self._replace(sheet=machine).of(setting, workload) for machine in _drawn_machines(self.sheet, count))

    def allows(self, setting: Setting) -> bool:
        """Whether the costs of a setting are known: tables alone hold for what they were measured with."""
        return self.sheet is not None or self._measured(setting, whole_layout=True)

    def with_activations(self, setting: Setting, workload: Workload) -> Workload:
        """The workload with activations as they were measured, where that was for its batch."""
        known = self._measured(setting)
        return with_activations(workload, self.tables[setting.batch.micro_batch_size]) if known else workload

    def _measured(self, setting: Setting, whole_layout: bool = False) -> bool:
        """Whether a table was measured with the setting's batch, and with its parallel sizes; of these at least the
        tensor-parallel size."""
        own, size = self.measured, setting.batch.micro_batch_size
        if own is None or size not in self.tables or setting.batch != own.batch._replace(micro_batch_size=size):
            return False
        same = replace(setting.parallel, num_microbatches=own.parallel.num_microbatches) == own.parallel
        one_tp = setting.parallel.tensor_model_parallel_size == own.parallel.tensor_model_parallel_size
        return same if whole_layout else one_tp


def _drawn_machines(sheet: HardwareSheet, count: int) -> Iterator[HardwareSheet]:
    draw = random.Random(0)
    strata = {field: draw.sample(range(count), count) for field, figure in figures(sheet) if figure.low is not None}
    for number in range(count):

        def choose(field: str, figure: Figure, number=number) -> float:
            if field not in strata:
                return figure.value
            part = (strata[field][number] + draw.random()) / count
            end = figure.ends[part > 0.5]
            return figure.value * (end / figure.value) ** abs(2 * part - 1)

        yield drawn(sheet, choose)
