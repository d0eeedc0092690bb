"""Plans what ``timings.py`` trains, as a user does without a GPU: describe, estimate from a data sheet, plan.

``timed_plans.py FOLDER [--dry-run] [--engine]`` writes ``FOLDER/NUMBER.schedule.json`` for the planned ones of
``case_table.TIMINGS``. With ``--dry-run`` there is no limit of device bytes.
"""

import subprocess
import sys
from pathlib import Path

from case_table import DRY_TIMED, MICRO_BATCHES, TIMED, TIMINGS, Timed

HARDWARE = "h200-nvlink"
"""The data sheet: of the machine on which the figures were made that these are held against."""


def model_options(row: Timed, *, dry_run: bool, engine: bool) -> list[str]:
    """Options of ``describe``, and of the example."""
    text = f"{DRY_TIMED if dry_run else TIMED} --untie-embeddings-and-output-weights --bf16 --data-parallel-size 1 "
    text += "--transformer-impl transformer_engine " if engine else ""
    options = f"{text} {row.options}".split()
    micro_batch = int(options[options.index("--micro-batch-size") + 1])
    return [*options, "--global-batch-size", str(MICRO_BATCHES * micro_batch)]


def plan(folder: Path, number: int, row: Timed, *, dry_run: bool, engine: bool) -> None:
    """Write the schedule of a row."""
    workload, table, schedule = (folder / f"{number}.{kind}.json" for kind in ("workload", "table", "schedule"))
    options = model_options(row, dry_run=dry_run, engine=engine)
    sizes = [options[options.index(name) + at] for name in ("--seq-length", "--micro-batch-size") for at in (0, 1)]
    limit = [] if dry_run else ["--limit-device-bytes", str(row.limit_device_bytes)]
    for words in (
        ["describe", "--out", workload, *options, "--zero-stage", "3", *limit],
        ["cost", "estimate", "--hardware", HARDWARE, "--workload", workload, "--out", table, *sizes],
        ["plan", "--cost-table", table, "--workload", workload, "--out", schedule],
    ):
        subprocess.run([sys.executable, "-m", "megatron_ext", *map(str, words)], check=True)


if __name__ == "__main__":
    for number, row in enumerate(TIMINGS):
        if row.limit_device_bytes is not None:
            plan(Path(sys.argv[1]), number, row, dry_run="--dry-run" in sys.argv, engine="--engine" in sys.argv)
