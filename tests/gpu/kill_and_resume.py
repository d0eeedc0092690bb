"""Two ranks train, one is killed in the middle of an iteration, and training goes on from the last checkpoint.

``kill_and_resume.py FOLDER DRIVE [--dry-run] [--engine]`` starts the ranks, which run this file as well: once to be
killed, and once to train without a stop, to resume, and to compare both to the last bit. Nothing may be left on the
drive or in shared memory by those that were killed.
"""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

MAPPED = "mapped.txt"
"""In FOLDER: the files in shared memory that the killed rank had."""

SAVE_EVERY, KILLED_IN, LAST = 2, 3, 6
"""Iterations: a checkpoint after so many, the end of a rank in that one (from 0), and the last."""

OTHERS = ("nccl-", "cuda.shm.", "sem.", "torch_", "__KMP_REGISTERED_LIB_")
"""How names in shared memory begin that NCCL, CUDA and others leave where a process is killed."""

SHARED = "/dev/shm/"


def drive_ranks(folder: Path, drive: Path, words: list[str]) -> str:
    """Why it did not work; empty where it did."""

    def ranks(kind: str) -> int:
        fork = ["--fork"] if "--dry-run" in words else []
        command = [sys.executable, "-m", "megatron_ext.launch.launcher", *fork, "--nproc-per-node", "2", __file__]
        return subprocess.run([*command, str(folder), str(drive), *words, kind]).returncode

    if ranks("--killed") == 0:
        return "the rank that was to be killed ended well"
    latest = folder / "saved" / "latest_checkpointed_iteration.txt"
    if not latest.exists() or int(latest.read_text()) != SAVE_EVERY:
        return f"expected a checkpoint of iteration {SAVE_EVERY}"
    if not (folder / MAPPED).exists():
        return "ranks ended before one was to be killed"
    left = [*os.listdir(drive), *filter(os.path.exists, (folder / MAPPED).read_text().splitlines())]
    if left:
        return f"left behind by killed ranks: {', '.join(left)}"
    return "" if ranks("--resumed") == 0 else "the resumed training failed or differs, see its output"


def shared_files(maps: str) -> list[str]:
    """Named files in shared memory that a process has mapped, by its ``/proc/self/maps``: those of others, who use the
    machine as well, are none of ours."""
    paths = {line[line.index(SHARED) :] for line in maps.splitlines() if SHARED in line}
    names = {path.removeprefix(SHARED) for path in paths if not path.endswith(" (deleted)")}
    return sorted(f"{SHARED}{name}" for name in names if not name.startswith(OTHERS))


def train(folder: Path, drive: Path, words: list[str]) -> int:
    """In a rank."""
    from rank_setup import options_of, start

    import trained_model  # isort: skip - Megatron is imported by it
    from case_table import KILLED
    from placed_schedule import placed_schedule
    from train_ranks import differs

    from megatron_ext.schedule import user_defined_schedule

    case = KILLED
    options = options_of(case, dry_run="--dry-run" in words, engine="--engine" in words, drive=str(drive))
    options += ["--save", str(folder / "saved"), "--save-interval", str(SAVE_EVERY)]
    args = trained_model.parse(options)
    start(args)
    args.train_iters = LAST
    path = str(folder / f"schedule.{os.environ['RANK']}.json")
    user_defined_schedule.save(path, placed_schedule(case, trained_model.workload_of(args, case.stage)))
    if "--killed" in words:
        trained_model.train(args, path, stock=False, at_micro_batch=partial(die, folder))
    args.save = None
    whole = trained_model.train(args, path, stock=False)
    args.load = str(folder / "saved")
    resumed = trained_model.train(args, path, stock=False)
    begun = LAST - len(resumed.norms)
    rest = whole._replace(losses=whole.losses[begun:], norms=whole.norms[begun:])
    difference = differs(rest, resumed) if begun == SAVE_EVERY else f"resumed after {begun} iterations"
    print(f"kill and resume: {difference or 'equal to the last bit'}", flush=True)
    return int(bool(difference))


def die(folder: Path, iteration: int, micro_batch: int) -> None:
    """End the first rank in the middle of an iteration; say before what shared memory it has."""
    if os.environ["RANK"] == "0" and (iteration, micro_batch) == (KILLED_IN, 1):
        (folder / MAPPED).write_text("\n".join(shared_files(Path("/proc/self/maps").read_text())))
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    folder, drive, words = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    if "--killed" in words or "--resumed" in words:
        return train(folder, drive, words)
    drive = drive / "kill-and-resume"
    drive.mkdir(exist_ok=True)
    said = drive_ranks(folder, drive, words)
    print(said, flush=True)
    return int(bool(said))


if __name__ == "__main__":
    if "RANK" in os.environ:
        from rank_setup import leave

        leave(main)
    sys.exit(main())
