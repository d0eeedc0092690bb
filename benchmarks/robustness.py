"""Attacks on all that a user or a machine can do to the program, and what it makes of them.

    sudo .venv/bin/python benchmarks/robustness.py [--parts fuzzing kills network disk clock jobs] [--kills 200]

Parts keep what they find in --folder as they go. One that was interrupted goes on (kills, fuzzing) or begins again; the
result is of all that is there. Needs what benchmarks/README.md says; atheris, where it is, fuzzes guided by coverage.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

import machine
import robustness_inputs
import robustness_jobs
import robustness_kills
import robustness_surroundings

from megatron_ext.cpubench import allocator
from megatron_ext.cpubench.forked_rank import restart_with
from megatron_ext.formats import json_files

SURROUNDINGS = ("network", "disk", "clock", "jobs")
PROGRAMS = {"kills": ("ip", "tc"), "network": ("ip", "tc", "iptables"), "disk": ("mkfs.ext4",), "clock": ("cc",)}
ENGINES = {"hypothesis": 2500, "atheris": 1200}
"""Changes that are drawn of every kind of input; inputs that were tried before do not count again."""

SECONDS_A_KIND = 45
NOTHING_FOUND = {"inputs": 0, "refused": 0, "slowest_s": 0.0, "counts": {}, "failures": {}}
CLEAN_ENVIRONMENT = {**allocator.rank_variables(), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def fuzz(folder: Path) -> None:
    """Every kind of input by every engine that is installed; what is in ``folder`` already is not done again."""
    folder.mkdir(exist_ok=True)
    engines = [name for name in ENGINES if not subprocess.run([sys.executable, "-c", f"import {name}"]).returncode]
    for engine in engines:
        for kind in robustness_inputs.NAMES:
            out = folder / f"{kind}.{engine}.json"
            if not out.exists():
                program = [sys.executable, str(ROOT / "benchmarks" / "robustness_fuzzing.py"), str(folder), engine]
                program += [str(ENGINES[engine]), str(SECONDS_A_KIND), kind]
                if code := subprocess.run(program, stderr=subprocess.DEVNULL).returncode:  # an input ended the program
                    found = json_files.load(out, dict) if out.exists() else NOTHING_FOUND
                    json_files.save(out, found | {"counts": found["counts"] | {f"ended with code {code}": 1}}, indent=1)


def fuzzing_summary(folder: Path) -> dict:
    """By engine: kinds, inputs, refused ones, failures, and the slowest input's processor seconds."""
    summary: dict[str, dict] = {}
    for path in sorted(folder.glob("*.json")):
        kind, engine = path.stem.rsplit(".", 1)
        found = json_files.load(path, dict)
        row = summary.setdefault(engine, {"kinds": {}, "inputs": 0, "refused": 0, "failures": {}, "slowest_s": 0.0})
        row["kinds"][kind] = found["inputs"]
        row["inputs"] += found["inputs"]
        row["refused"] += found["refused"]
        row["slowest_s"] = max(row["slowest_s"], found["slowest_s"])
        row["failures"] |= {f"{kind}: {said}": count for said, count in found["counts"].items()}
    return summary


def disturb(parts: list[str], args) -> None:
    """The parts that train, in namespaces of their own."""
    folder, corpus = args.folder, args.data_path.resolve()
    robustness_jobs.apart()
    robustness_jobs.prepare()

    def saving(part: str) -> Callable[[list], None]:
        return lambda found: json_files.save(folder / f"{part}.json", found, indent=1)

    for part in parts:
        place = folder / "now" / part
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        if part == "kills":
            known = json_files.load(folder / "kills.json", list) if (folder / "kills.json").exists() else []
            robustness_kills.kills(args.kills, args.seed, place, corpus, saving(part), known)
        else:
            getattr(robustness_surroundings, part)(place, corpus, saving(part), args.seed)
        shutil.rmtree(place)


def whole_result(folder: Path) -> dict:
    """The figures of everything that ``folder`` holds."""
    result: dict = {"fuzzing": fuzzing_summary(folder / "fuzzing")}
    if (folder / "kills.json").exists():
        found = json_files.load(folder / "kills.json", list)
        result["kills"] = robustness_kills.summary(found) | {"by signal and point": robustness_kills.by_point(found)}
    for part in SURROUNDINGS:
        if (folder / f"{part}.json").exists():
            rows = json_files.load(folder / f"{part}.json", list)
            kept = ("what", "setup", "code", "hangs", "leftovers", "ended_after_s", "said", "as expected", "named")
            result[part] = [{name: row[name] for name in kept if name in row} for row in rows]
    return result


def wrong(result: dict) -> list[str]:
    """What is not as it should be."""
    found = [f"{engine}: {said}" for engine, row in result["fuzzing"].items() for said in row["failures"]]
    kills = result.get("kills", {})
    found += [f"kills: {name}" for name in robustness_kills.NONE_OF if kills.get(name)]
    if kills and kills["rank named"] < 0.95 * kills["rank to be named"]:
        found.append("kills: the rank is not named")
    rows = [(part, row) for part in SURROUNDINGS for row in result.get(part, ())]
    return found + [f"{part}: {row['what']}, {row['setup']}" for part, row in rows if not row["as expected"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ["fuzzing", "kills", *SURROUNDINGS]
    parser.add_argument("--parts", nargs="*", choices=every, default=every)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-path", type=Path, default="runs/corpus/stdlib")
    parser.add_argument("--folder", type=Path, default="runs/robustness")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "robustness.json"))
    args = parser.parse_args()
    missing = {name for part in args.parts for name in PROGRAMS.get(part, ()) if shutil.which(name) is None}
    if missing:  # or it would end after minutes
        parser.error(f"not installed: {', '.join(sorted(missing))}")
    restart_with(CLEAN_ENVIRONMENT)
    load = os.getloadavg()[0]
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    if "fuzzing" in args.parts:
        fuzz(args.folder / "fuzzing")
    training = [part for part in args.parts if part != "fuzzing"]
    if training:
        disturb(training, args)
    result = {
        "command": f"python benchmarks/robustness.py --kills {args.kills} --seed {args.seed}",
        **whole_result(args.folder),
    }
    machine.write(args.out, result, load_before=load)
    for text in wrong(result):
        print(text)
    return 1 if wrong(result) else 0


if __name__ == "__main__":
    sys.exit(main())
