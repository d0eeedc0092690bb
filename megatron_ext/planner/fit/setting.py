"""One choice of the settings that trade memory for time, and the options by which Megatron trains with it."""

from typing import Literal, NamedTuple

from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import Limits, Workload

OFFLOAD = ("--optimizer-cpu-offload", "--optimizer-offload-fraction", "--use-precision-aware-optimizer")
RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")
COUNT_ENDS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
OTHER_NAMES = {"--recompute-granularity": "--recompute-activations"}
"""Options of Megatron that are a short form of another option."""
DELAY_AFTER = "100"
"""Number of iterations before updates are delayed (docs/planning.md)."""


class Setting(NamedTuple):
    """The model and how it is trained."""

    shape: GptShape
    parallel: Parallel
    batch: MicroBatch
    zero_stage: Literal[1, 2, 3]
    optimizer: OptimizerSettings = OptimizerSettings()

    def workload(self, limits: Limits) -> Workload:
        """The workload of this setting. Raises InputError if the layers cannot be divided into stages."""
        return gpt_workload(
            self.shape, self.parallel, self.batch, zero_stage=self.zero_stage, limits=limits, optimizer=self.optimizer
        )

    @property
    def samples(self) -> int:
        """The global batch size in samples."""
        return self.parallel.num_microbatches * self.batch.micro_batch_size * self.replicas

    @property
    def replicas(self) -> int:
        """Megatron's data-parallel size, which does not count ranks that share a sequence."""
        return self.parallel.data_parallel_size // self.batch.context_parallel

    @property
    def tokens(self) -> int:
        """Tokens of one iteration."""
        return self.samples * self.batch.seq_length

    @property
    def counts_ends(self) -> bool:
        """Whether the first and the last stage each have one layer less than all other stages."""
        layers = self.shape.stage_layers
        return layers[:1] == layers[-1:] and {*layers[1:-1]} == {each + 1 for each in layers[:1]}

    def options(self) -> dict[str, str]:
        """Values by option of Megatron or of ``describe``. The value is "" for an option that takes none. Options that
        are not listed are not given."""
        parallel, batch = self.parallel, self.batch
        found = {"--zero-stage": str(self.zero_stage), "--micro-batch-size": str(batch.micro_batch_size)}
        found["--tensor-model-parallel-size"] = str(parallel.tensor_model_parallel_size)
        found |= {"--pipeline-model-parallel-size": str(parallel.pp), "--data-parallel-size": str(self.replicas)}
        found |= {"--sequence-parallel": ""} if batch.sequence_parallel else {}
        found |= {"--context-parallel-size": str(batch.context_parallel)} if batch.context_parallel > 1 else {}
        found |= {"--expert-model-parallel-size": str(parallel.ep)} if self.shape.experts is not None else {}
        found |= dict.fromkeys(COUNT_ENDS, "") if self.counts_ends else {}
        found |= {"--num-virtual-stages-per-pipeline-rank": str(parallel.vp)} if parallel.vp > 1 else {}
        found |= {"--recompute-granularity": batch.recompute} if batch.recompute is not None else {}
        recomputed = zip(RECOMPUTE[1:], (batch.recompute_method, str(batch.recompute_num_layers)))
        found |= dict(recomputed) if batch.recompute == "full" else {}
        found |= dict(zip(OFFLOAD, ("", "1.0", ""))) if self.optimizer.on_host else {}
        return found | ({"--delayed-parameter-update": DELAY_AFTER} if self.optimizer.delayed else {})

    def text(self, layout_too: bool = True) -> str:
        """The setting in a few words."""
        parallel, batch = self.parallel, self.batch
        recompute = batch.recompute or "no recompute"
        if batch.recompute == "full":
            layers = "all layers" if batch.recompute_method == "uniform" else f"{batch.recompute_num_layers} a chunk"
            together = batch.recompute_method == "uniform" and batch.recompute_num_layers > 1
            recompute = f"recompute {layers}" + (f", {batch.recompute_num_layers} together" if together else "")
        elif batch.recompute:
            recompute = "recompute attention"
        place = "host" + (", delayed" if self.optimizer.delayed else "") if self.optimizer.on_host else "device"
        micro = f"micro-batch {batch.micro_batch_size}"
        layout = f"TP {parallel.tensor_model_parallel_size} PP {parallel.pp} VP {parallel.vp} "
        layout = layout.replace(" PP", " SP PP") if batch.sequence_parallel else layout
        layout += f"CP {batch.context_parallel} " if batch.context_parallel > 1 else ""
        layout += f"EP {parallel.ep} " if self.shape.experts is not None else ""
        layout = f"{layout}DP {self.replicas}, " if layout_too else ""
        return f"{layout}zero stage {self.zero_stage}, optimizer on the {place}, {recompute}, {micro}"


def changes(given: dict[str, str], chosen: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Options to add to a launch script that gives the options ``given``, and options to take out of it, so that it
    trains with ``chosen``."""
    add = {name: value for name, value in chosen.items() if given.get(name) != value}
    return add, [name for name in given if name not in chosen]


def as_words(options: dict[str, str]) -> str:
    """Options as one writes them in a command."""
    return " ".join(f"{name} {value}".strip() for name, value in options.items())
