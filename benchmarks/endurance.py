"""Train 10,000 iterations by a schedule that uses every route, and watch what each rank holds.

    python benchmarks/endurance.py [--iterations 10000] [--zero-stage 3] [--layout two_replicas] [--save-interval 50]

Ranks train a tiny GPT by a drawn schedule with the routes gpu, cpu and nvme, and save a checkpoint every few
iterations, of which the last ones are kept. Resident anonymous memory, open files and threads of every rank are read
from /proc all along. Growth is the difference between the medians of the second and the last quarter of the run.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import pictures
from cases import ALL_LAYOUTS, SIZE, STRICT
from draw_schedule import prepared
from machine import about_this_machine
from msgspec.structs import replace
from training import environment, ranks_command

from megatron_ext.formats import json_files
from megatron_ext.workload import workload as workload_file

KEPT_CHECKPOINTS = 3
MAY_GROW = {"anonymous_bytes": 1.01, "open_files": 1.0, "threads": 1.0}
MODEL = [*SIZE, "--untie-embeddings-and-output-weights"]
NAMES = ("anonymous_bytes", "open_files", "threads")


def look(pid: int) -> tuple[int, int, int] | None:
    """Resident bytes, open files and threads of a process; None once it is gone.

    Only anonymous memory counts: pages of the corpus are resident as they are read.
    """
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return (
            int(status["RssAnon"].split()[0]) * 1024,
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
        )
    except (OSError, KeyError):
        return None


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def growth(samples: list[tuple[int, int, int]]) -> dict:
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return {
        name: {"early": median(s[n] for s in early), "late": median(s[n] for s in late)} for n, name in enumerate(NAMES)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--layout", choices=ALL_LAYOUTS, default=STRICT)
    parser.add_argument("--save-interval", type=int, default=50)
    parser.add_argument("--zero-stage", type=int, choices=(1, 3), default=3)
    parser.add_argument("--data-path", default="runs/corpus/stdlib")
    parser.add_argument("--out", default="benchmarks/results/endurance.json")
    args = parser.parse_args()
    about = about_this_machine(load_before=os.getloadavg()[0])
    with tempfile.TemporaryDirectory() as folder:
        given = ["--out", f"{folder}/workload.json", "--zero-stage", str(args.zero_stage)]
        layout, saved = ALL_LAYOUTS[args.layout], Path(folder, "checkpoints")
        describe = [sys.executable, "-m", "megatron_ext", "describe", *given, *layout, *MODEL]
        subprocess.run(describe, env=environment(), check=True)
        workload = replace(workload_file.load(f"{folder}/workload.json"), limits=workload_file.Limits(nvme_slots=2))
        prepared(random.Random(5), workload, f"{folder}/schedule.json")
        options = [*layout, *MODEL, "--train-iters", str(args.iterations)]
        options += ["--log-interval", str(max(args.iterations // 10, 1))]
        options += ["--data-path", args.data_path, "--metrics-path", f"{folder}/metrics.json"]
        options += ["--user-defined-schedule", f"{folder}/schedule.json", "--user-defined-schedule-nvme-path", folder]
        options += ["--save", str(saved), "--save-interval", str(args.save_interval)]
        begin = time.time()
        world = 2 if args.layout == STRICT else 4
        command = ranks_command(str(ROOT / "examples/pretrain_gpt_hybrid.py"), options, world)
        run = subprocess.Popen(command, cwd=ROOT, env=environment())
        samples: dict[int, list] = {}
        while run.poll() is None:
            time.sleep(1)
            for old in sorted(saved.glob("iter_*"))[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
            for pid in children(run.pid) if run.poll() is None else ():
                seen = look(pid)
                if seen is not None:
                    samples.setdefault(pid, []).append(seen)
        if run.returncode:
            return run.returncode
        left = sorted(path.name for path in Path(folder).iterdir() if path != saved)
        iteration_us = json_files.load(f"{folder}/metrics.json", dict)["iteration_us"]
    ranks = [growth(found) for found in samples.values() if len(found) > 8]
    result = {
        "command": f"python benchmarks/endurance.py --iterations {args.iterations} --zero-stage {args.zero_stage} "
        f"--layout {args.layout} --save-interval {args.save_interval}",
        "machine": about,
        "iterations": args.iterations,
        "save_interval": args.save_interval,
        "files": left,
        "seconds": round(time.time() - begin),
        "samples": min(map(len, samples.values())),
        "iteration_us": {
            "early": median(iteration_us[len(iteration_us) // 4 : len(iteration_us) // 2]),
            "late": median(iteration_us[-len(iteration_us) // 4 :]),
        },
        "ranks": ranks,
    }
    json_files.save(args.out, result, indent=1)
    pictures.draw(args.out)
    grown = [name for rank in ranks for name in NAMES if rank[name]["late"] > rank[name]["early"] * MAY_GROW[name]]
    for number, rank in enumerate(ranks):
        print(
            f"rank {number}: "
            + ", ".join(f"{name} {rank[name]['early']:.0f} -> {rank[name]['late']:.0f}" for name in NAMES)
        )
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
