"""The command that measures a cost table for a run of the example on this machine's processors."""

from pathlib import Path

from megatron_ext.workload.sizes import largest_group_bytes, largest_rank_bytes

LAYERS = "megatron_ext.megatron.layer_runners:layer_runners"
"""Who makes the layers whose compute is measured."""
CORPUS = "runs/corpus/stdlib"
"""The example's data set, which scripts/pretrain_gpt_hybrid.sh builds."""


def measure_command(out: Path, work, model: list[str], *, hidden: int, seq: int, micro_batch_size: int, seconds: float, links: str | None = None) -> list[str]:
    """What follows ``python -m``.

    Args:
        work: the run's workload, without limits.
        model: the example's options.
        links: what is measured, all by default.
    """
    return [
        "megatron_ext", "measure", "--out", str(out), "--device", "cpu", "--dp", str(work.parallel.dp), "--pp", str(work.parallel.pp),
        "--hidden-size", str(hidden), "--seq-length", str(seq), "--micro-batch-size", str(micro_batch_size),
        "--min-bytes", "512", "--max-bytes", str(largest_group_bytes(work)), "--max-rank-bytes", str(largest_rank_bytes(work)),
        "--seconds", str(seconds), "--threads", "1", *(["--links", links] if links else []),
        "--modules", LAYERS, "--", *model, "--data-path", CORPUS, "--num-workers", "0",
    ]  # fmt: skip
