"""The settings that are tried: all combinations that Megatron accepts, with the same model, global batch and
precision."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.workload.gpt_shapes import ExpertShape, MicroBatch
from megatron_ext.workload.parallel import Parallel, megatron_order

LAYOUT = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "data-parallel-size",
)
OTHERS = ("zero-stage", "optimizer-cpu-offload", "recompute", "micro-batch-size", "sequence-parallel")
EXPERTS = "expert-model-parallel-size"
NAMES = (*OTHERS, *LAYOUT, EXPERTS, "delayed-parameter-update")
"""Settings that can be fixed, each by the option that sets it."""

MOST_MICRO_BATCH = 32
"""The largest micro-batch size, in samples. Kernels use the device fully long before."""

MOST_CHUNKS = 8
"""The most model chunks of one pipeline rank."""


class Space(NamedTuple):
    """The changes that a search may make to a setting.

    Attributes:
        given: the user's own setting.
        fixed: names of :data:`NAMES` that do not change.
        layout: whether parallel sizes may change.
        delayed: whether updates may be delayed, which changes training.
        vocab: the padded vocabulary size by tensor-parallel size.
        sequence_parallel: whether sequence parallelism is always used with several tensor-parallel ranks. If not, both
            ways are tried there if parallel sizes may change.
    """

    given: Setting
    fixed: frozenset[str] = frozenset()
    layout: bool = False
    delayed: bool = False
    vocab: Callable[[int], int] | None = None
    sequence_parallel: bool = False

    def settings(self) -> list[Setting]:
        """All settings, the given one first.

        Raises:
            InputError: the options forbid every change that was asked for, or no layout divides the global batch.
        """
        sizes = LAYOUT if self.given.shape.experts is None else (*LAYOUT, EXPERTS)
        if self.layout and self.fixed.issuperset(sizes):
            raise InputError("all parallel sizes are fixed by --fix", field="--search-layout")
        layouts = list(self._layouts())
        if not layouts:
            raise InputError(
                "no parallel sizes and micro-batch size that are not fixed divide it",
                field="--global-batch-size",
                value=self.given.samples,
            )
        found = (setting for layout in layouts for setting in self._of_layout(*layout))
        return list(dict.fromkeys([self.given, *found]))

    def _values(self, name: str, own, all_of_them) -> list:
        return [own] if name in self.fixed else [own, *(value for value in all_of_them if value != own)]

    def _layouts(self) -> Iterator[tuple[Parallel, int]]:
        """Parallel sizes, with micro-batch sizes that divide the batch."""
        own, cp = self.given.parallel, self.given.batch.context_parallel
        for parallel in self._sizes() if self.layout else [own]:
            sizes = (1 << power for power in range(MOST_MICRO_BATCH.bit_length()))
            for size in self._values("micro-batch-size", self.given.batch.micro_batch_size, sizes):
                count, rest = divmod(self.given.samples * cp, size * parallel.data_parallel_size)
                if rest or not count:
                    continue
                changed = replace(parallel, num_microbatches=count, order=megatron_order(parallel.pp, parallel.vp))
                try:
                    changed.check()
                except InputError:  # Megatron refuses it
                    continue
                yield changed, size

    def _sizes(self) -> Iterator[Parallel]:
        """Parallel sizes that use all GPUs and divide the model, with the order of steps still open. Tensor-parallel
        ranks stay within a node. So do expert-parallel ranks, except for the given number of them."""
        own, shape = self.given.parallel, self.given.shape
        group = own.microbatch_group_size_per_vp_stage
        experts = shape.experts or ExpertShape(1, 1, 0, ())
        powers = [1 << power for power in range(own.world_size.bit_length())]
        for tp in self._values(LAYOUT[0], own.tensor_model_parallel_size, powers):
            matrices = (shape.heads, shape.query_groups, shape.ffn, experts.shared)
            etp = own.expert_tensor_parallel_size or tp
            if tp > own.node_size or any(size % tp for size in matrices) or experts.ffn % etp:
                continue
            spread = [ep for ep in powers if experts.number % ep == 0 and ep * etp <= own.node_size]
            for pp in self._values(LAYOUT[1], own.pp, powers):
                dp, rest = divmod(own.world_size, tp * pp)
                if rest or dp % self.given.batch.context_parallel:
                    continue
                if LAYOUT[3] in self.fixed and dp != own.data_parallel_size:
                    continue
                most_chunks = MOST_CHUNKS if pp > 1 else 1
                chunks = [own.vp] if LAYOUT[2] in self.fixed else range(1, most_chunks + 1)
                for vp, ep in product(chunks, self._values(EXPERTS, own.ep, spread)):
                    if self._layers_of_stages(pp, vp) and (pp > 1 or vp == 1):
                        yield replace(
                            own,
                            pipeline_model_parallel_size=pp,
                            virtual_pipeline_model_parallel_size=vp,
                            data_parallel_size=dp,
                            tensor_model_parallel_size=tp,
                            expert_model_parallel_size=ep,
                            microbatch_group_size_per_vp_stage=group if vp > 1 else None,
                        )

    def _layers_of_stages(self, pp: int, vp: int) -> tuple[int, ...]:
        """The number of layers of every stage. All stages have equally many, or the embedding and the loss count as one
        layer each, if only this way divides. Empty if neither way divides."""
        given, stages = self.given, pp * vp
        if (pp, vp) == (given.parallel.pp, given.parallel.vp):
            return given.shape.stage_layers
        if given.shape.layers % stages == 0:
            return (given.shape.layers // stages,) * stages
        each, rest = divmod(given.shape.layers + 2, stages)
        if rest or each < 2 or pp == 1:
            return ()
        return (each - 1, *[each] * (stages - 2), each - 1)

    def _of_layout(self, parallel: Parallel, micro_batch_size: int) -> Iterator[Setting]:
        given, tp = self.given, parallel.tensor_model_parallel_size
        shape = given.shape if self.vocab is None else given.shape._replace(vocab=self.vocab(tp))
        shape = shape._replace(stage_layers=self._layers_of_stages(parallel.pp, parallel.vp))
        places = [True, False] if shape.dtype != "float32" else [False]
        places = self._values("optimizer-cpu-offload", given.optimizer.on_host, places)
        delays = [True, False] if self.delayed else [False]
        delays = self._values("delayed-parameter-update", given.optimizer.delayed, delays)
        stages = self._values("zero-stage", given.zero_stage, (1, 2, 3))
        for batch in self._batches(parallel, micro_batch_size):
            for stage, on_host, delayed in product(stages, places, delays):
                together = batch.recompute == "full" and batch.recompute_method == "uniform"
                if delayed and not on_host:
                    continue
                if stage == 3 and together and batch.recompute_num_layers > 1:  # megatron/recompute.py
                    continue
                optimizer = given.optimizer.placed(on_host, delayed)
                yield Setting(shape, parallel, batch, stage, optimizer)

    def _batches(self, parallel: Parallel, micro_batch_size: int) -> Iterator[MicroBatch]:
        given, tp = self.given.batch, parallel.tensor_model_parallel_size
        own = given._replace(
            micro_batch_size=micro_batch_size,
            sequence_parallel=(given.sequence_parallel or self.sequence_parallel) and tp > 1,
            score_heads=self.given.shape.heads // tp if given.score_heads else 0,
        )
        more = self.layout and tp > 1 and given.seq_length // given.context_parallel % tp == 0
        for parts in self._values("sequence-parallel", own.sequence_parallel, [True] if more else []):
            if parts or tp == 1 or self.given.shape.experts is None:  # Megatron refuses experts without
                yield from self._recomputed(parallel, own._replace(sequence_parallel=parts))

    def _recomputed(self, parallel: Parallel, own: MicroBatch) -> Iterator[MicroBatch]:
        yield own
        if "recompute" in self.fixed:
            return
        layers = max(self._layers_of_stages(parallel.pp, parallel.vp))
        plain = own._replace(recompute=None, recompute_method="uniform", recompute_num_layers=1)
        yield plain
        if own.score_heads:
            yield plain._replace(recompute="selective")
        yield plain._replace(recompute="full")
        if parallel.pp > 1 and layers % 2 == 0:  # with many micro-batches in flight, recomputed bytes weigh less
            yield plain._replace(recompute="full", recompute_num_layers=2)
        for count in sorted({layers // 8, layers // 4, layers // 2, layers * 3 // 4} - {0}):
            yield plain._replace(recompute="full", recompute_method="block", recompute_num_layers=count)
