"""A cost table that is estimated from a data sheet and a workload, for machines that nobody has measured yet.

``p50_us`` uses the sheet's values, ``p95_us`` has every figure at the slow end of its range. The table is marked as
estimated (``metadata.synthetic``). `megatron-ext cost combine` replaces its parts by measured ones.
"""

from collections.abc import Callable, Iterable, Iterator
from math import inf

from msgspec.structs import replace

from megatron_ext.cost import cost_table
from megatron_ext.cost.environment import estimated_of, run_differences, world_sizes
from megatron_ext.cost.estimated_host import GRADIENT_BYTES, HostWork
from megatron_ext.cost.estimated_links import Line, SheetLinks
from megatron_ext.cost.hardware_sheet import HardwareSheet, drawn, slow_end
from megatron_ext.cost.layer_work import MODULES, Work, experts_share, forward_work, layer_parameters, recomputed_work
from megatron_ext.formats.errors import InputError, option_error
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.gpt_shapes import MicroBatch, p2p_bytes
from megatron_ext.workload.workload import SCHEMA_VERSION, Workload, expert_ranks

SIZES = tuple(1 << power for power in range(8, 41, 4))
"""256 bytes to 1 TiB. The curves are straight lines, so a few points define them."""

KERNELS = 20
"""Number of kernels in one layer's forward, and in an optimizer's step, whatever their size."""
TORCH_PASSES = 13
"""Number of additional passes over 32 bits of a parameter in PyTorch's AdamW, compared with a fused kernel. PyTorch
runs one operation after the other over lists of tensors (``_multi_tensor_adamw``): two passes over the parameter, one
over the gradient, ten over moments and their root. Scaling gradients takes two more. Megatron uses it if neither
Transformer Engine nor Apex is installed. Local layers are taken as a sign of this."""
LAYERS = (None, "transformer", "moe")
"""Kinds of layers that can be recomputed."""
DRAWN = (*cost_table.CURVES, "compute", "host_memory", "launches")
"""Parts of a table that differ from machine to machine."""
LEAST_US = 1.0
"""Time of a chunk without parameters."""


def estimate(sheet: HardwareSheet, workload: Workload, batch: MicroBatch, *, name: str = "") -> cost_table.CostTable:
    """The cost table of ``workload`` on the machine of ``sheet``.

    Args:
        name: name by which the sheet was given, for the table's source.

    Raises:
        InputError: the ranks do not fit the machine, or the sheet has no FLOP/s for the workload's dtype.
    """
    parallel, dtype = workload.parallel, _dtype(workload)
    middle, slow = (_Estimates(each, workload, batch, dtype) for each in (sheet, drawn(sheet, slow_end)))

    def points(line: Callable[["_Estimates"], Line | None]) -> tuple[cost_table.Point, ...]:
        fast_line, slow_line = line(middle), line(slow)
        if fast_line is None or slow_line is None:
            return ()
        times = [(size, fast_line.at(size), slow_line.at(size)) for size in SIZES]
        return tuple(cost_table.Point(size_bytes=s, p50_us=us, p95_us=max(us, most)) for s, us, most in times)

    def curve(line: Callable[["_Estimates"], Line | None], **algorithms) -> cost_table.Curve | None:
        found = points(line)
        return cost_table.Curve(points=found, algorithms=algorithms) if found else None

    joined, cast = points(lambda e: e.host.step("host")), points(lambda e: e.host.step("device"))
    ways = {cost_table.JOINED: joined, cost_table.CAST_ON_DEVICE: cast}
    return cost_table.check(
        cost_table.CostTable(
            schema_version=SCHEMA_VERSION,
            kind="cost_table",
            metadata=_metadata(sheet, workload, batch, name),
            routes=cost_table.Routes(
                gpu=curve(lambda e: e.links.gather(parallel.dp)),
                cpu=curve(lambda e: e.links.host_copy()),
                nvme=curve(lambda e: e.links.drive_read()),
            ),
            publish=cost_table.Publish(
                cpu=curve(lambda e: e.links.host_copy().scaled(1 / parallel.dp)),
                nvme=curve(lambda e: e.links.drive_write()),
                internode=curve(lambda e: e.links.between_nodes()),
            ),
            group_overhead=cost_table.GroupOverhead(call_us=sheet.call_us.value),
            contention=middle.links.contention(_exchanged(sheet, workload, batch, dtype)),
            compute=tuple(map(_with_p95, middle.compute(), slow.compute())),
            p2p=curve(lambda e: e.links.p2p()) or (),
            reduce=curve(lambda e: e.reduce(parallel.dp)),
            experts=_experts(workload, curve),
            optimizer=curve(lambda e: e.optimizer()),
            host_add=curve(lambda e: e.host.add()),
            host_step=curve(lambda e: e.host.own_step(), **ways),
            device_step=curve(lambda e: e.device_step()),
            launches=cost_table.Launches(
                reduce_us=sheet.call_us.value,
                tensor_us=sheet.host.tensor_us.value,
                slowest=sheet.host.layer_us.ends[1] / sheet.host.layer_us.value,
            ),
            host_memory=cost_table.HostMemory(
                bytes_per_s=middle.host.memory_bytes_per_s, slow_bytes_per_s=slow.host.memory_bytes_per_s
            ),
        )
    )


def parts_on_machines(table: cost_table.CostTable, workload: Workload, machines: Callable) -> list[dict]:
    """The estimated parts of ``table``, by name, on each of the machines that ``machines(sheet)`` makes from their data
    sheet. A figure of the sheet moves all parts that depend on it. Parts that were measured or corrected since are not
    among them. If no part is estimated, one empty dictionary."""
    source = table.metadata.source
    if source is None or source.estimated_from is None or run_differences(table.metadata, workload):
        return [{}]
    sheet, batch = source.estimated_from
    try:
        own, *others = (estimate(each, workload, batch) for each in (sheet, *machines(sheet)))
    except InputError:  # a combined table: the ranks are those of its links, which are of another machine
        return [{}]
    same = [name for name in DRAWN if cost_table.part_named(table, name) == cost_table.part_named(own, name)]
    return [{name: part for name in same if (part := cost_table.part_named(other, name))} for other in others]


def refuse_batch(workload: Workload, batch: MicroBatch, *, file=None) -> None:
    """Refuse a batch that differs from the batch in the workload. Only the bytes of a message show a difference.

    Raises:
        InputError: no size of the model gives messages of this many bytes, a size is not positive, or a module to
            recompute is unknown.
    """
    counts = {"seq_length": batch.seq_length, "micro_batch_size": batch.micro_batch_size}
    for name, value in (counts | {"context_parallel_size": batch.context_parallel}).items():
        if value < 1:
            raise option_error(name, "expected 1 or more", value)
    if unknown := set(batch.recompute_modules) - {"core_attn", "moe_act", *MODULES}:
        known = ", ".join(("core_attn", "moe_act", *MODULES))
        raise option_error("recompute_modules", f"known modules: {known}", min(unknown))
    used = [parameter for chunk in workload.chunks for parameter in chunk.parameters]
    normed = [parameter for parameter in used if len(parameter.shape) == 1 and "norm" in parameter.name]
    sizes = {(side, ITEM_BYTES[parameter.dtype]) for parameter in normed or used for side in parameter.shape}
    described = workload.p2p_bytes
    if described and described not in {p2p_bytes(workload.parallel, batch, side, item) for side, item in sizes}:
        said = f"an activation of {batch.tokens} tokens (--micro-batch-size x --seq-length / --context-parallel-size) "
        said += "has another number of bytes: give these and --sequence-parallel as for describe"
        raise InputError(said, file=file, field="p2p_bytes", value=described)


def _experts(workload: Workload, curve: Callable[..., cost_table.Curve | None]) -> cost_table.ExpertCurves | None:
    """Collectives of experts, if they are sharded over other ranks. ``curve`` makes a curve from a line."""
    ranks = expert_ranks(workload)
    if ranks in (None, workload.parallel.dp):
        return None
    return cost_table.ExpertCurves(
        ranks=ranks, gpu=curve(lambda e: e.links.gather(ranks)), reduce=curve(lambda e: e.reduce(ranks))
    )


class _Estimates:
    """Times from the values of one sheet."""

    def __init__(self, sheet: HardwareSheet, workload: Workload, batch: MicroBatch, dtype: str):
        if dtype not in sheet.device.flop_per_s:
            known = ", ".join(sheet.device.flop_per_s)
            raise InputError(f"{sheet.title} has no FLOP/s for this dtype; known: {known}", field="dtype", value=dtype)
        self.workload, self.batch, self.device = workload, batch, sheet.device
        self.links = SheetLinks(sheet, workload.parallel)
        self._item, self._layer_launch_us = ITEM_BYTES[dtype], sheet.host.layer_us.value
        self.host = HostWork(sheet, self.links, self._item)
        self._us_per_flop = 1e6 / sheet.device.flop_per_s[dtype].value / sheet.device.flop_efficiency.value
        attention = sheet.device.attention_efficiency or sheet.device.flop_efficiency
        self._us_per_score = 1e6 / sheet.device.flop_per_s[dtype].value / attention.value
        self._us_per_byte = 1e6 / sheet.device.memory_bytes_per_s.value / sheet.device.memory_efficiency.value
        self._all_reduce = self.links.tensor_all_reduce()
        self._exchange = self.links.sequence_gather(batch.context_parallel)
        self._share = experts_share(workload)

    def reduce(self, ranks: int) -> Line:
        """Reduce of a group that is sharded over ``ranks`` ranks, by bytes of its parameters."""
        return self.links.reduce(ranks).scaled(GRADIENT_BYTES / self._item)

    def optimizer(self) -> Line:
        """The optimizer's step of one rank's shards with norm and clipping, by bytes of the rank's whole parameters. In
        addition to the step, a gradient is read for the norm, read and written to be clipped, and zeroed."""
        around_bytes = (6 if self.batch.local else 4) * self.workload.optimizer.gradient_item_bytes
        if not self.workload.optimizer.on_host:
            return self._on_device(self._adam_bytes + around_bytes)
        around, step = self._on_device(around_bytes), self.host.own_step()
        return Line(around.us + step.us, around.us_per_byte + step.us_per_byte)

    def device_step(self) -> Line:
        """The step of a group's shard on the device, by bytes of the whole group."""
        return self._on_device(self._adam_bytes)

    @property
    def _adam_bytes(self) -> int:
        """Bytes moved per parameter: its main parameter and states are read and written. A 32-bit parameter is its own
        main parameter."""
        settings = self.workload.optimizer
        main = ITEM_BYTES[settings.main_parameter_dtype] if self._item < GRADIENT_BYTES else 0
        stepped = 2 * (settings.state_item_bytes + (main or self._item))
        passes = TORCH_PASSES if self.batch.local and len(settings.moment_dtypes) == 2 else 0
        return settings.gradient_item_bytes + stepped + 4 * passes + (main + self._item if main else 0)

    def _on_device(self, bytes_per_parameter: float) -> Line:
        moved = bytes_per_parameter / self._item / self.workload.parallel.dp
        return Line(self.device.kernel_us.value * KERNELS, moved * self._us_per_byte)

    def us(self, work: Work, again: int) -> float:
        """Time of one layer's forward or backward that has ``again`` times the kernels of a forward."""
        products = sum(max(flop * self._us_per_flop, size * self._us_per_byte) for flop, size in work.products)
        us_per_score = self._us_per_flop if self.batch.score_heads else self._us_per_score
        exchange_us = self._exchange.at(work.exchanged_bytes) if work.exchanged_bytes else 0.0
        scores = max(work.score_flop * us_per_score, work.score_bytes * self._us_per_byte, exchange_us)
        alone = products + scores + work.moved_bytes * self._us_per_byte
        between_ranks = ((self._all_reduce, work.reduced_bytes), *self._tokens(work.routed))
        return max(alone, again * KERNELS * self.device.kernel_us.value) + sum(
            line.at(size) for line, sizes in between_ranks for size in sizes
        )

    def _tokens(self, routed: tuple[float, ...]) -> Iterator[tuple[Line, tuple[float, ...]]]:
        """Times to bring tokens to their experts and back, with ``routed`` bytes each on the rank of an expert."""
        parallel = self.workload.parallel
        if parallel.ep > 1:
            yield self.links.all_to_all(), tuple(size / parallel.etp for size in routed)
        if parallel.etp > 1:
            yield self.links.expert_tensor_gather(), routed

    def _layer_us(self, kind: str | None, used, tp: int, recompute: str | None) -> tuple[float, float, float, float]:
        """Forward and backward of a layer: two times on the device, then two times of the thread that launches them."""
        work = forward_work(kind, used, self.batch, tp, self._share)
        again, launch_us = 2 if recompute == "full" else 1, self._layer_launch_us
        anew = recomputed_work(work, kind, used, self.batch._replace(recompute=recompute), tp, self._share)
        backward_us = self.us(work.backward(anew), 1 + again)
        return self.us(work, 1), backward_us, launch_us, again * launch_us

    def compute(self) -> list[cost_table.Compute]:
        """A row for every chunk and a row for every kind of layer. If layers of a kind differ, its row is their
        mean."""
        tp, rows, kinds, seen = self.workload.parallel.tensor_model_parallel_size, [], {}, {}
        for chunk in self.workload.chunks:
            times, number = [], 0
            if not chunk.parameters:
                times.append((LEAST_US, LEAST_US, 0.0, 0.0))
            for kind, used in layer_parameters(chunk) if chunk.parameters else ():
                recompute = self.batch.recompute_of(number) if kind in LAYERS else None
                number += kind in LAYERS
                key = kind, recompute, tuple((*p.name.split(".")[-2:], p.shape) for p in used)
                if key not in seen:
                    seen[key] = self._layer_us(kind, used, tp, recompute)
                times.append(seen[key])
                if kind is not None:
                    kinds.setdefault(kind, []).append(seen[key])
            rows.append(_row(map(sum, zip(*times)), pp_rank=chunk.pp_rank, model_chunk_id=chunk.model_chunk_id))
        for kind, times in kinds.items():
            rows.append(_row((sum(column) / len(times) for column in zip(*times)), layer_kind=kind))
        return rows


def _exchanged(sheet: HardwareSheet, workload: Workload, batch: MicroBatch, dtype: str) -> float:
    """The share of compute in which ranks exchange activations over the host link: what compute saves if collectives on
    this link take no time for their bytes."""
    link = sheet.host_link
    efficiency = replace(link.collective_efficiency, value=inf)
    boundless = replace(sheet, host_link=replace(link, collective_efficiency=efficiency))
    rows = (_Estimates(each, workload, batch, dtype).compute()[: len(workload.chunks)] for each in (sheet, boundless))
    us, least_us = (sum(row.forward_us + row.backward_us for row in each) for each in rows)
    return 1 - least_us / us


def _row(times: Iterable[float], **place) -> cost_table.Compute:
    names = ("forward_us", "backward_us", "forward_launch_us", "backward_launch_us")
    return cost_table.Compute(**place, **dict(zip(names, times)))


def _with_p95(row: cost_table.Compute, slow: cost_table.Compute) -> cost_table.Compute:
    forward_us, backward_us = max(row.forward_us, slow.forward_us), max(row.backward_us, slow.backward_us)
    return replace(row, forward_p95_us=forward_us, backward_p95_us=backward_us)


def _dtype(workload: Workload) -> str:
    return next((p.dtype for chunk in workload.chunks for p in chunk.parameters), "bfloat16")


def _metadata(sheet: HardwareSheet, workload: Workload, batch: MicroBatch, name: str) -> cost_table.Metadata:
    facts = {"hardware": name or sheet.title, "micro_batch_size": batch.micro_batch_size}
    notes = [f"estimated from the data sheet of {sheet.title}; nothing here was measured"]
    if any("mamba" in chunk.layer_kinds for chunk in workload.chunks):
        notes.append("layers of kind mamba: only the products of their matrices are counted, not the scan between them")
    return cost_table.Metadata(
        synthetic=True,
        hardware={"title": sheet.title},
        world_sizes=dict(world_sizes(workload.parallel)),
        model=estimated_of(workload),
        source=cost_table.Source(program=cost_table.ESTIMATE, options=facts, estimated_from=(sheet, batch)),
        notes=tuple(notes),
    )
