"""Measure this machine twice in a row and say how well the two cost tables agree.

    python benchmarks/cost_repeatability.py [--seconds 90] [--max-bytes N] [--tables A.json B.json]

For every curve and size of 1 MiB and more: how far apart the two medians are, and whether a
table that is off by more than 10 % says so itself. Writes
benchmarks/results/cost_repeatability.json with date, machine and spread; ends 0 if every
difference is within 10 % or noted, 1 otherwise.
"""

import argparse
import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import pictures

from megatron_ext.cost import cost_table
from megatron_ext.cost.cost_table_text import all_curves
from megatron_ext.cost.curve import curves_of
from megatron_ext.formats import json_files
from megatron_ext.measure import Options, measure
from megatron_ext.measure.progress_bar import bar

RESULT = Path(__file__).parent / "results" / "cost_repeatability.json"
WITHIN = 0.10
MIB = 1 << 20


def differences(first: cost_table.CostTable, second: cost_table.CostTable) -> list[dict]:
    """One row for every curve and measured size of at least 1 MiB that both tables hold."""
    rows = []
    others = dict(all_curves(second))
    for what, curve in all_curves(first):
        if what not in others:
            continue
        after = {point.size_bytes: point for point in curves_of(others[what])[None]}
        for point in curves_of(curve)[None]:
            if point.size_bytes >= MIB and point.size_bytes in after:
                times = point.p50_us, after[point.size_bytes].p50_us
                rows.append(
                    {
                        "curve": what,
                        "size_bytes": point.size_bytes,
                        "first_us": times[0],
                        "second_us": times[1],
                        "apart": max(times) / min(times) - 1,
                    }
                )
    return rows


def said(what: str, tables) -> bool:
    """Whether a table itself warns of this curve, or of the machine as a whole."""
    names = {
        what.rpartition(".")[2],
        {"routes.gpu": "gpu", "routes.cpu": "cpu", "publish.cpu": "publish"}.get(what, what),
    }
    notes = [note for table in tables for note in table.metadata.notes]
    return any(
        note.startswith("other programs")
        or any(note.startswith(f"{name}:") for name in names)
        or ("one pass" in note and any(name in note for name in names))
        for note in notes
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--max-bytes", type=int, default=256 * MIB)
    parser.add_argument("--data-parallel-size", type=int, default=2)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=2)
    parser.add_argument("--tables", nargs=2, metavar="TABLE", help="Compare these instead of measuring.")
    arguments = parser.parse_args()
    took = []
    if arguments.tables:
        tables = [cost_table.load(path) for path in arguments.tables]
    else:
        options = Options(
            seconds=arguments.seconds,
            max_bytes=arguments.max_bytes,
            data_parallel_size=arguments.data_parallel_size,
            pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        )
        tables = []
        for _ in range(2):
            start = time.monotonic()
            with bar() as progress:
                tables.append(measure(options, progress))
            took.append(time.monotonic() - start)
    rows = differences(*tables)
    for row in rows:
        row["said"] = said(row["curve"], tables)
    off = [row for row in rows if row["apart"] > WITHIN]
    silent = [row for row in off if not row["said"]]
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "hardware": tables[0].metadata.hardware,
            "software": tables[0].metadata.software,
            "world_sizes": tables[0].metadata.world_sizes,
        },
        "measured_in_s": took,
        "sizes": len(rows),
        "within_10_percent": len(rows) - len(off),
        "off_and_said": len(off) - len(silent),
        "off_and_silent": len(silent),
        "median_apart": median(row["apart"] for row in rows) if rows else None,
        "notes": [list(table.metadata.notes) for table in tables],
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    json_files.write_atomically(RESULT, json.dumps(result, indent=1).encode() + b"\n")
    pictures.draw(RESULT)
    by_curve: dict[str, list[dict]] = {}
    for row in rows:
        by_curve.setdefault(row["curve"], []).append(row)
    print(f"{'curve':26} {'sizes':>5} {'median apart':>13} {'largest':>9}  said by the table")
    for what, its in by_curve.items():
        print(
            f"{what:26} {len(its):5} {median(row['apart'] for row in its):13.1%} "
            f"{max(row['apart'] for row in its):9.1%}  {'yes' if its[0]['said'] else 'no'}"
        )
    print(
        f"{len(rows) - len(off)} of {len(rows)} sizes of 1 MiB and more within 10 %; {len(off) - len(silent)} off and "
        f"said, {len(silent)} off and not said"
    )
    print(
        f"measured in {', '.join(f'{seconds:.0f} s' for seconds in took) or 'files given'}; written to "
        f"benchmarks/results/{RESULT.name}"
    )
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
