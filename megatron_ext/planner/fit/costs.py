"""The costs of a setting: from a data sheet, from measured tables, or from a sheet that is corrected by tables.

[Note: Micro-batch sizes]
No data sheet has the time that a layer takes for a micro-batch of any size (to read its weights, to add up its
gradients, to launch kernels). Tables that were measured with several sizes show it. The layer times of a sheet are
multiplied by a factor. Between the two nearest measured sizes the factor is linear in 1 / size, as it is if a layer
takes a fixed time plus a time per sample. Beyond the measured sizes it is the factor of the nearest size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.cost.hardware_sheet import HardwareSheet, drawn_machines
from megatron_ext.cost.perturbed_table import PerturbedTables
from megatron_ext.cost.scaled_table import Factors, factors_between, scaled
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.workload.workload import Workload

KINDS = ("compute", "gpu", "cpu", "publish", "p2p", "reduce", "optimizer", "host_step", "host_add")


class SettingCosts(NamedTuple):
    """Attributes:
    sheet: data sheet of the machine; None if ``tables`` alone give the costs.
    tables: measured with the setting ``measured``, by micro-batch size.
    factors: by micro-batch size, the factors that multiply the sheet's estimates.
    """

    sheet: HardwareSheet | None = None
    tables: Mapping[int, CostTable] = {}
    factors: Mapping[int, Factors] = {}
    measured: Setting | None = None

    @classmethod
    def by(
        cls, sheet: HardwareSheet | None, tables: Sequence[CostTable], measured: Setting, workload: Workload
    ) -> "SettingCosts":
        """Make costs from the sheet's estimates corrected by ``tables``, or from the tables alone. If a table does not
        name its micro-batch size, it was measured with the size of ``measured``.

        Raises:
            InputError: two of the tables have the same micro-batch size.
        """
        by_size: dict[int, CostTable] = {}
        for table in tables:
            size = _micro_batch_size(table) or measured.batch.micro_batch_size
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
        """The first table; None if there are no tables."""
        return next(iter(self.tables.values()), None)

    def of(self, setting: Setting, workload: Workload) -> CostTable:
        """The cost table of a setting. Raises InputError if the ranks do not fit the machine."""
        if self.sheet is None:
            return self.tables[setting.batch.micro_batch_size]
        estimated = estimate(self.sheet, workload, setting.batch)
        return scaled(estimated, self._factors(setting)) if self.factors else estimated

    def _factors(self, setting: Setting) -> Factors:
        """The factors for a setting, see [Note: Micro-batch sizes]."""
        assert self.measured is not None
        size, curves = setting.batch.micro_batch_size, next(iter(self.factors.values())).curves
        if setting.optimizer.on_host != self.measured.optimizer.on_host:
            curves = {name: factor for name, factor in curves.items() if name != "optimizer"}  # of the other step
        below = max((known for known in self.factors if known <= size), default=min(self.factors))
        above = min((known for known in self.factors if known >= size), default=max(self.factors))
        part = 0.0 if below == above else (1 / below - 1 / size) / (1 / below - 1 / above)
        ends = zip(self.factors[below][1:], self.factors[above][1:])
        return Factors(curves, *((1 - part) * first + part * last for first, last in ends))

    def drawn(self, setting: Setting, workload: Workload, count: int) -> Iterator[CostTable]:
        """Tables that are as likely as the table of :meth:`of`, with the same draws for every setting. With a sheet,
        they are estimates for drawn machines. Without a sheet, the measured table is perturbed as far as it may be
        wrong."""
        if self.sheet is None:
            table = self.of(setting, workload)
            kinds = (*KINDS, "nvme") if table.routes.nvme is not None else KINDS
            return iter(PerturbedTables(table, kinds).draw(count))
        return (self._replace(sheet=machine).of(setting, workload) for machine in drawn_machines(self.sheet, count))

    def allows(self, setting: Setting) -> bool:
        """Whether the costs of a setting are known. Tables alone are only valid for the setting that they were measured
        with."""
        return self.sheet is not None or self._measured(setting, whole_layout=True)

    def with_activations(self, setting: Setting, workload: Workload) -> Workload:
        """The workload with measured activations, if they were measured for its batch."""
        known = self._measured(setting)
        return with_activations(workload, self.tables[setting.batch.micro_batch_size]) if known else workload

    def _measured(self, setting: Setting, whole_layout: bool = False) -> bool:
        """Whether a table was measured with the setting's batch and with its tensor-parallel size, or with all of its
        parallel sizes if ``whole_layout``."""
        own, size = self.measured, setting.batch.micro_batch_size
        if own is None or size not in self.tables or setting.batch != own.batch._replace(micro_batch_size=size):
            return False
        same = replace(setting.parallel, num_microbatches=own.parallel.num_microbatches) == own.parallel
        one_tp = setting.parallel.tensor_model_parallel_size == own.parallel.tensor_model_parallel_size
        return same if whole_layout else one_tp


def _micro_batch_size(table: CostTable) -> int | None:
    """The micro-batch size that a table was measured or estimated with; None if it does not say."""
    source = table.metadata.source
    for facts in (table.metadata.model, source.options if source else None):
        size = (facts or {}).get("micro_batch_size")
        if isinstance(size, int) and size > 0:
            return size
    return None
