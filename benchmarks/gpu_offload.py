"""What offload costs on one GPU: iteration time over device bytes, for stock Megatron, our plans, FSDP2 and DeepSpeed.

    .venv/bin/python benchmarks/gpu_offload.py [--resume] [--budget 480]     # one GPU, 8 minutes
    .venv/bin/python benchmarks/gpu_offload.py --dry-run                     # the same in small on a CPU

Stock Megatron with everything on the device, and with the optimizer on the host, in whole and in parts that overlap;
plans within 100, 70, 50 and 30 % of stock's device bytes and within the least that fits; the settings that fit finds
within 50 and 15 %; FSDP2 with CPU offload, and
DeepSpeed ZeRO-3 with CPU offload where deepspeed is installed in .venv. Sizes from 0.5B to what the machine's memory
takes, 1, 4 and 16 micro-batches of 8,192 tokens. It is what
``scripts/test_gpu.sh --only offload:`` runs (tests/gpu/timed_rows.py): a row that hangs costs its own line, and
``--resume`` goes on with what found no time. Writes runs/gpu/offload.json, the report of the tier, and of it
benchmarks/results/gpu_offload.json and .png; a dry run writes both to runs/gpu-dry-run.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import pictures
from rich.console import Console
from rich.table import Table

from megatron_ext.formats import json_files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from timed_rows import TIMINGS

ROWS = {row.name: row for row in TIMINGS if row.spare}
LINES = {
    "ours": "ours",
    "fit": "ours, settings by fit",
    "fsdp2": "FSDP2, CPU offload",
    "deepspeed": "DeepSpeed ZeRO-3, CPU offload",
}


def rows_of(report: dict) -> list[dict]:
    """The rows that were timed, with what they kept of stock's throughput."""
    found = []
    for result in report["results"]:
        if result["status"] == "pass" and result["case"] in ROWS:
            row = ROWS[result["case"]]
            about = {"case": row.name, "size": row.size, "micro_batches": row.micro_batches}
            line = LINES.get(row.system, "Megatron" if not row.on_host else "Megatron, optimizer on the host")
            found.append(about | {"line": line} | result["figures"])
    for row in found:
        stock = next((one for one in found if one["line"] == "Megatron" and _same(one, row)), None)
        row["share_of_stock"] = stock and stock["iteration_ms"] / row["iteration_ms"]
    return found


def _same(one: dict, other: dict) -> bool:
    return all(one[name] == other[name] for name in ("size", "micro_batches"))


def result_of(report: dict) -> dict:
    """What is kept: machine and date, host memory and copies, rows, and why others are not there."""
    links = next((one["figures"] for one in report["results"] if one["case"].startswith("timing: host memory")), {})
    left = {
        one["case"]: f"{one['status']}: {one.get('said', '')}"
        for one in report["results"]
        if one["case"] in ROWS and one["status"] != "pass"
    }
    about = {name: report[name] for name in ("created_at", "commit", "machine", "dry_run")}
    return {"about": about, "links": links, "rows": rows_of(report), "left": left}


def show(result: dict) -> None:
    """Print the rows."""
    console = Console(width=150)
    table = Table("row", "ms", "predicted", "of stock", "tokens/s", "TFLOP/s", "device GB", "host GB")
    for row in result["rows"]:
        predicted, share = row.get("predicted_iteration_ms"), row["share_of_stock"]
        table.add_row(
            row["case"].removeprefix("offload: "),
            f"{row['iteration_ms']:.0f}",
            "" if predicted is None else f"{predicted:.0f}",
            "" if share is None else f"{share:.0%}",
            f"{row['tokens_per_s']:,}",
            f"{row['tflop_per_s']:.0f}",
            f"{row['device_peak_bytes'] / 1e9:.2f}",
            f"{row['host_bytes'] / 1e9:.2f}",
        )
    console.print(table)
    for case, why in result["left"].items():
        console.print(f"{case}: {why}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--resume", action="store_true", help="keep the rows that were timed with the same code")
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS")
    args = parser.parse_args()
    folder = ROOT / "runs" / ("gpu-dry-run" if args.dry_run else "gpu")
    out = (folder if args.dry_run else ROOT / "benchmarks" / "results") / "gpu_offload.json"
    report = folder / "offload.json"
    words = ["--out", report, "--only", "offload", "--only", "timing: host memory"]
    words += ["--dry-run"] if args.dry_run else ["--budget", args.budget]
    command = ["bash", "scripts/test_gpu.sh", *words, *(["--resume"] if args.resume else [])]
    code = subprocess.run(list(map(str, command)), cwd=ROOT).returncode
    if code == 2:
        return code
    result = result_of(json_files.load(report, dict))
    json_files.save(out, result, indent=1)
    if result["rows"]:
        pictures.draw(out)
    show(result)
    return code


if __name__ == "__main__":
    sys.exit(main())
