"""Verdicts held to what was measured: every pair of runs of the kept emulated clusters.

    python benchmarks/verdict_measured.py

benchmarks/results/emulated_cluster*.json hold, for shaped links of several rates, the cost table that was measured
there and how long training took by every policy beside the baseline, as interleaved A/B. Here every policy is planned
again from that table and judged; the measured ratio says whether the verdict was right. Writes
benchmarks/results/verdict_measured.json. Ends 0 if no verdict is wrong.
"""

import argparse
import os
import sys
import tempfile
from math import sqrt
from pathlib import Path

import msgspec
import pictures
from emulation import ROOT, workload_of
from machine import about_this_machine

from megatron_ext import planner
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.report.verdict_check import UNDECIDED, WRONG, check_verdict

RESULTS = ROOT / "benchmarks" / "results"
RESULT = RESULTS / "verdict_measured.json"


def rows_of(kept: Path) -> list[dict]:
    """One row a policy and rate of one kept result."""
    result = json_files.load(kept, dict)
    options = argparse.Namespace(**result["options"])
    with tempfile.TemporaryDirectory() as folder:
        work = workload_of(options, Path(folder))
    rows = []
    for rate in result["rates"]:
        table = cost.check(msgspec.convert(rate["cost_table"], cost.CostTable))
        for row in rate["rows"]:
            if row["policy"] == row["baseline"]:
                continue
            try:
                planned = planner.plan(work, table, policy=row["policy"], extrapolate=True)
            except InputError:  # a control that no policy plans
                continue
            judged = planner.verdict(work, table, planned, extrapolate=True, as_trained=True).figures
            ratio = row["ratio"], row[next(name for name in row if name.startswith("ratio_of"))]["standard_error"]
            rows.append(
                {
                    "kept": kept.name,
                    "gbit_s": rate["gbit_s"],
                    "zero_stage": work.zero_stage,
                    "policy": row["policy"],
                    "baseline": row["baseline"],
                    **{name: judged[name] for name in ("answer", "compared_with", "gain", "gain_low", "gain_high")},
                    "measured_gain": 1 - ratio[0],
                    "standard_error": ratio[1],
                    "was": check_verdict(judged["answer"], *ratio),
                }
            )
    return rows


def summarize(rows: list[dict]) -> dict:
    def inside(row: dict, errors: float = 0.0) -> bool:
        slack = errors * row["standard_error"]
        return row["gain_low"] - slack <= row["measured_gain"] <= row["gain_high"] + slack

    errors = [row["measured_gain"] - (row["gain_low"] + row["gain_high"]) / 2 for row in rows]
    return {
        "pairs": len(rows),
        "answers": {answer: sum(row["answer"] == answer for row in rows) for answer in {row["answer"] for row in rows}},
        "wrong": sum(row["was"] == WRONG for row in rows),
        "undecided": sum(row["was"] == UNDECIDED for row in rows),
        "covered": sum(map(inside, rows)) / len(rows),
        "covered_within_two_standard_errors": sum(inside(row, 2.0) for row in rows) / len(rows),
        "rms_error_of_centre": sqrt(sum(error * error for error in errors) / len(errors)),
        "rms_standard_error": sqrt(sum(row["standard_error"] ** 2 for row in rows) / len(rows)),
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.chdir(ROOT)
    load = os.getloadavg()[0]
    rows = [row for kept in sorted(RESULTS.glob("emulated_cluster*.json")) for row in rows_of(kept)]
    summary = summarize(rows)
    json_files.save(RESULT, {**about_this_machine(load_before=load), "summary": summary, "rows": rows}, indent=1)
    pictures.draw(RESULT)
    for row in rows:
        interval = f"{row['gain_low']:7.1%} to {row['gain_high']:6.1%}"
        measured = f"measured {row['measured_gain']:6.1%} +- {2 * row['standard_error']:.1%}"
        print(
            f"{row['gbit_s']:5g} Gbit/s  {row['policy']:13s} {row['answer']:13s} {interval}  {measured}  {row['was']}"
        )
    for name, value in summary.items():
        print(f"{name:24s} {value}")
    return int(summary["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
