"""Trainings that the tier times: the same model by stock Megatron, by plans within less memory, by the settings that
``megatron-ext fit`` finds, by FSDP2 and by DeepSpeed.

The first five are the case whose figures docs/gpu.md has. The others are those of ``benchmarks/gpu_offload.py``.
"""

from typing import Literal, NamedTuple

SIZES = {
    # Layers and hidden size; 0.5B, 1.7B, 3.3B and 6.5B parameters.
    "0.5B": (8, 2048),
    "1.6B": (8, 4096),
    "3.3B": (16, 4096),
    "6.5B": (32, 4096),
}
DRY_SIZES = {"0.5B": (2, 32), "1.6B": (8, 32), "3.3B": (4, 32), "6.5B": (4, 32)}
TOKENS, MICRO_BATCH = 2048, 4
DRY_TOKENS, DRY_MICRO_BATCH = 16, 1

ON_HOST = "--optimizer-cpu-offload"
HOST_BYTES_PER_PARAMETER = 22
"""At most: three fp32 states, a 16-bit parameter, a gradient in fp32 and in 16 bits as slots of a step."""

CONTEXT_BYTES = 2_400_000_000
"""Of a device, for each rank besides PyTorch's blocks: with Transformer Engine, on one H200."""

DEVICE_BYTES_PER_PARAMETER = {"device": 24, "host": 12, "peers": 6, "least": 7}
"""That trainings of 1.6B parameters held there: stock Megatron's by where its optimizer steps, FSDP2's and ours."""

LEAST = 0
"""``percent`` of the least device bytes for which there is a plan."""


class Timed(NamedTuple):
    """One training.

    Attributes:
        options: of the example.
        overlapped: Megatron's host optimizer steps in parts, whose copies go at the same time
            (``--overlap-cpu-optimizer-d2h-h2d``).
        system: ``fit`` is a plan of ours, with the settings that ``megatron-ext fit`` finds for this model and batch.
        limit_device_bytes: of the plan by which it is trained.
        percent: the same, as a share of what stock Megatron holds with everything on the device.
        spare: run where time is left; its absence fails nothing.
    """

    name: str
    size: str = "1.6B"
    micro_batches: int = 4
    options: str = ""
    system: Literal["megatron", "ours", "fit", "fsdp2", "deepspeed"] = "megatron"
    overlapped: bool = False
    limit_device_bytes: int | None = None
    percent: int | None = None
    spare: bool = False

    @property
    def planned(self) -> bool:
        """Whether it is trained by a schedule."""
        return self.system in ("ours", "fit")

    @property
    def iterations(self) -> int:
        """The first is not counted, where blocks of memory are found, nor is the last, which has no next one."""
        return 3 if self.system in ("fsdp2", "deepspeed") else 6

    @property
    def on_host(self) -> bool:
        """Whether Megatron's host optimizer may be part of it."""
        return ON_HOST in self.options or self.percent is not None or self.system == "fit"

    @property
    def parameters(self) -> int:
        """About how many, on a GPU."""
        layers, hidden = SIZES[self.size]
        return 12 * layers * hidden**2

    @property
    def host_bytes(self) -> int:
        """At most, where anything rests there."""
        return HOST_BYTES_PER_PARAMETER * self.parameters if self.on_host or self.system != "megatron" else 0

    @property
    def device_bytes(self) -> int:
        """Of the device, as far as it is known before planning."""
        everything = DEVICE_BYTES_PER_PARAMETER["device"] * self.parameters
        if self.limit_device_bytes or self.percent:
            return CONTEXT_BYTES + (self.limit_device_bytes or everything * (self.percent or 0) // 100)
        if self.planned:
            kind = "least"
        elif self.system != "megatron":
            kind = "peers"
        else:
            kind = "host" if ON_HOST in self.options else "device"
        return CONTEXT_BYTES + DEVICE_BYTES_PER_PARAMETER[kind] * self.parameters

    def seconds(self) -> float:
        """It may take, on one H200: building, and its iterations at 3.3 times the time of stock Megatron, or with FSDP2
        at 26 times (docs/gpu.md), which DeepSpeed gets as well."""
        iteration = 0.65 * self.micro_batches / 4 * self.parameters / 1.6e9
        slower = 26.0 if self.system in ("fsdp2", "deepspeed") else 3.3
        return 8 + self.iterations * iteration * slower + 5 * self.parameters / 1.6e9


def _name(size: str, micro_batches: int, what: str) -> str:
    return f"offload: {size}, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}, {what}"


def _rows(size: str, micro_batches: int, percents: tuple[int, ...], *, peers: bool = False) -> list[Timed]:
    def row(what: str, **how) -> Timed:
        return Timed(_name(size, micro_batches, what), size, micro_batches, spare=True, **how)

    found = [row("stock"), row("stock, optimizer on the host", options=ON_HOST)]
    for percent in percents:
        what = f"ours within {percent} %" if percent else "ours, the least"
        found.append(row(what, system="ours", percent=percent))
    if peers:
        found += [row(f"fit within {percent} %", system="fit", percent=percent) for percent in (50, 15)]
        found += [row("FSDP2, CPU offload", system="fsdp2")]
        found += [row("stock, optimizer on the host, overlapped", options=ON_HOST, overlapped=True)]
        found += [row("DeepSpeed ZeRO-3, CPU offload", system="deepspeed")]
    return found


TIMINGS = (
    Timed("timing: stock, all on the device"),
    Timed("timing: stock, optimizer on the host", options=ON_HOST, spare=True),
    Timed(
        "timing: optimizer, gradients, shards on the host",
        options=ON_HOST,
        system="ours",
        limit_device_bytes=12_000_000_000,
    ),
    Timed(
        "timing: gradients, shards on the host, optimizer on the device",
        system="ours",
        limit_device_bytes=30_360_000_000,
        spare=True,
    ),
    Timed("timing: what fit finds within 12.1 GB", system="fit", limit_device_bytes=12_100_000_000, spare=True),
    *_rows("1.6B", 4, (100, 70, 50, 30, LEAST), peers=True),
    *_rows("1.6B", 16, (42, LEAST)),  # 16 GB
    *_rows("1.6B", 1, (50, LEAST)),
    *_rows("0.5B", 4, (50, LEAST)),
    *_rows("3.3B", 4, (50, LEAST)),
    *_rows("6.5B", 4, (50, LEAST)),
)


def model_options(row: Timed, *, dry_run: bool, engine: bool) -> list[str]:
    """Options of ``describe``, and of the example."""
    layers, hidden = (DRY_SIZES if dry_run else SIZES)[row.size]
    tokens, micro_batch = (DRY_TOKENS, DRY_MICRO_BATCH) if dry_run else (TOKENS, MICRO_BATCH)
    heads = max(2, hidden // 128)
    text = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {tokens} "
    text += f"--micro-batch-size {micro_batch} --global-batch-size {row.micro_batches * micro_batch} "
    text += "--untie-embeddings-and-output-weights --bf16 --data-parallel-size 1 "
    text += "--hidden-dropout 0 --attention-dropout 0 "  # as in the example
    text += f"--transformer-impl {'transformer_engine' if engine else 'local'} "  # fit has Megatron's default
    return [*text.split(), *row.options.split()]
