"""What a setting costs: by a data sheet, by a measured table, or by a sheet that a table of one setting corrects."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.cost.hardware_sheet import Figure, HardwareSheet, drawn, figures
from megatron_ext.cost.perturbed_table import PerturbedTables
from megatron_ext.cost.scaled_table import Factors, factors_between, scaled
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.workload.workload import Workload

KINDS = ("compute", "gpu", "cpu", "publish", "p2p", "reduce", "optimizer", "host_step", "host_add")


class Costs(NamedTuple):
    """Attributes:
    sheet: of the machine; None where ``table`` alone says what everything takes.
    table: measured, with the setting ``measured``.
    factors: by which the sheet's estimates are multiplied.
    """

    sheet: HardwareSheet | None = None
    table: CostTable | None = None
    factors: Factors = Factors({}, 1.0, 1.0)
    measured: Setting | None = None

    @classmethod
    def corrected(cls, sheet: HardwareSheet, table: CostTable, measured: Setting, workload: Workload) -> "Costs":
        """The sheet's estimates times what ``table`` is to them for the setting for which it was measured."""
        factors = factors_between(estimate(sheet, workload, measured.batch), table, workload)
        return cls(sheet, table, factors, measured)

    def of(self, setting: Setting, workload: Workload) -> CostTable:
        """The cost table of a setting. Raises InputError where the ranks do not fit the machine."""
        if self.sheet is not None:
            curves = self.factors.curves
            if self.measured is not None and setting.optimizer.on_host != self.measured.optimizer.on_host:
                curves = {name: factor for name, factor in curves.items() if name != "optimizer"}  # the other's step
            return scaled(estimate(self.sheet, workload, setting.batch), self.factors._replace(curves=curves))
        assert self.table is not None
        return self.table

    def drawn(self, setting: Setting, workload: Workload, count: int) -> Iterator[CostTable]:
        """Tables as likely as that one, the same draws for every setting: every figure of the sheet from its range, all
        at once (Latin hypercube sampling, McKay, Beckman and Conover 1979), half of the draws below its value; or the
        measured table as far as it may be wrong."""
        if self.sheet is None:
            assert self.table is not None
            yield from PerturbedTables(self.table, KINDS).draw(count)
            return
        for machine in _drawn_machines(self.sheet, count):
            yield self._replace(sheet=machine).of(setting, workload)

    def allows(self, setting: Setting) -> bool:
        """Whether the costs of a setting are known: a table alone holds for what it was measured at."""
        known = self.measured is not None and setting.parallel == self.measured.parallel
        return self.sheet is not None or (known and self._same_batch(setting))

    def with_activations(self, setting: Setting, workload: Workload) -> Workload:
        """The workload with activations as they were measured, where that was for its batch."""
        same = self.table is not None and self._same_batch(setting)
        return with_activations(workload, self.table) if same and self.table is not None else workload

    def _same_batch(self, setting: Setting) -> bool:
        own = self.measured
        if own is None or setting.batch != own.batch:
            return False
        return setting.parallel.tensor_model_parallel_size == own.parallel.tensor_model_parallel_size


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
