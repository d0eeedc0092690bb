"""What the machines around a run can do to it: links that break, drives that are full or read-only, clocks that jump,
and other jobs on the same node."""

import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from emulated_nodes import INTERFACE
from robustness_jobs import Case, Job, differences, drawn, nodes_of, result, resumed, start
from robustness_kills import nodes_or_none

STEP_TIMEOUT = 5
"""Seconds after which a step that does not end is to end the run, where a link is cut."""

LOSS = 0.03
OTHERS = "other_program"
HOUR = 3600
JUMPS = (HOUR, -HOUR, 400 * 24 * HOUR, -2 * 24 * HOUR)
"""Seconds by which the time of day jumps; monotonic clocks go on."""

Outcome = dict
Save = Callable[[list], None]


def reached(job: Job, iteration: int) -> bool:
    """Wait for an iteration's end; False where the run ended before."""
    while job.iteration() < iteration:
        if not job.running():
            return False
        time.sleep(0.01)
    return True


def outcome(what: str, case: Case, job: Job, *, goes_on: bool, **more) -> Outcome:
    """What became of a run; ``goes_on``: the disturbance should not have ended it, else one line should say why."""
    began = time.monotonic()
    hangs = not job.wait()
    found = {"what": what, "setup": case.setup, "code": job.code, "hangs": hangs, "leftovers": job.leftovers(), **more}
    found["ended_after_s"] = round(time.monotonic() - began, 1)
    lines = [line for line in job.said().splitlines() if line.strip() and "socket.cpp" not in line]
    found["traceback"] = not goes_on and any(line.startswith("Traceback") for line in lines)
    found["said"] = lines[-1][:300] if lines else ""
    found["as expected"] = not hangs and not found["leftovers"] and (job.code == 0) == goes_on
    if job.code == 0:
        found["differences"] = differences(case.reference, result(job))
        found["as expected"] &= not found["differences"]
    if not found["as expected"]:
        found["log"] = "\n".join(lines[-60:])
    return found


def with_next_start(found: Outcome, case: Case, job: Job) -> Outcome:
    """The outcome with what the next start gives."""
    found["resumed"] = resumed(case, job)
    again = found["resumed"]
    found["as expected"] &= not (again["code"] or again["differences"] or again["leftovers"])
    return found


def network(folder: Path, corpus: Path, save: Save, seed: int) -> list[Outcome]:
    """A link that is cut for a moment and for good, packets that are lost, and a node that is gone."""
    results: list[Outcome] = []
    for number, setup in enumerate(("zero 1, two nodes", "zero 3, two nodes", "zero 3, two nodes, pipeline")):
        with nodes_or_none(nodes_of(setup)) as nodes:
            case = drawn(setup, seed + 100 + number, folder / f"{number}", corpus, nodes)
            results += _network_of(case, nodes.names, folder / f"{number} runs", number % 2)
            save(results)
    return results


def _network_of(case: Case, names: list[str], folder: Path, turn: int) -> list[Outcome]:
    def link(state: str) -> None:
        subprocess.run(["ip", "-n", names[1], "link", "set", INTERFACE, state], check=True)

    results = []
    job = start(case, folder / "moment", "--user-defined-schedule-step-timeout", "60")
    if reached(job, 2 + turn):
        link("down")
        time.sleep(1.0)
        link("up")
    results.append(outcome("link cut for 1 s", case, job, goes_on=True))

    job = start(case, folder / "cut", "--user-defined-schedule-step-timeout", str(STEP_TIMEOUT))
    if reached(job, 4 + turn):
        link("down")
    found = outcome("link cut for good", case, job, goes_on=False)
    link("up")
    results.append(with_next_start(found, case, job))

    drop = "OUTPUT -o net0 -m statistic --mode random --probability".split() + [str(LOSS), "-j", "DROP"]
    for name in names:
        subprocess.run(["ip", "netns", "exec", name, "iptables", "-A", *drop], check=True)
    job = start(case, folder / "loss")
    results.append(outcome(f"{LOSS:.0%} of packets lost", case, job, goes_on=True))
    for name in names:
        subprocess.run(["ip", "netns", "exec", name, "iptables", "-D", *drop], check=True)

    job = start(case, folder / "gone", "--user-defined-schedule-step-timeout", str(STEP_TIMEOUT))
    if reached(job, 4 + turn):
        ranks = job.ranks()
        link("down")  # first: a machine without power says no goodbye
        for pid in ranks[2:]:
            os.kill(pid, signal.SIGKILL)
        job.wait()
        named = [pid for pid in ranks[2:] if f"(process {pid}) was ended" in job.said()]
        found = outcome("a node gone", case, job, goes_on=False, named=bool(named))
        found["as expected"] &= bool(named)
        link("up")
        results.append(with_next_start(found, case, job))
    return results


def disk(folder: Path, corpus: Path, save: Save, seed: int) -> list[Outcome]:
    """A drive or a checkpoints' disk that is full, or becomes read-only, while training."""
    results: list[Outcome] = []
    setups = ("zero 1, interleaved", "zero 3, interleaved", "zero 3, 1f1b, optimizer on the host")
    for number, setup in enumerate(setups):
        case = drawn(setup, seed + 200 + number, folder / f"{number}", corpus, None)
        for disturb in (_checkpoints_full, _checkpoints_read_only, _drive_fills, _drive_too_small, _trace_read_only):
            results.append(disturb(case, folder / f"{number} {disturb.__name__}"))
            save(results)
    return results


def mount(place: Path, kibibytes: int) -> None:
    """Mount a new ext4 file system of that size; its file lies beside ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    image = place.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(kibibytes << 10)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    shutil.rmtree(place / "lost+found")


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=True)
    place.with_suffix(".image").unlink(missing_ok=True)


def read_only(place: Path) -> None:
    """Make what is under ``place`` read-only for whoever opens it from now on; files that are open stay so."""
    subprocess.run(["mount", "--bind", str(place), str(place)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)


def fill(place: Path) -> None:
    """Take all that is free, as another program."""
    with (place / OTHERS).open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1024)):  # ends: the place is small
                pass
        except OSError:
            return


def _checkpoints_spoiled(
    case: Case, folder: Path, what: str, spoil: Callable[[Path], None], said: str
) -> tuple[Outcome, Job]:
    """A run whose directory of checkpoints is spoiled from the fourth iteration on."""
    job = start(case, folder)
    if reached(job, 4):
        spoil(folder / "checkpoints")
    found = outcome(what, case, job, goes_on=False)
    found["as expected"] &= said in found["said"] and not found["traceback"]
    return found, job


def _checkpoints_full(case: Case, folder: Path) -> Outcome:
    saved = folder / "checkpoints"
    mount(saved, 32 << 10)
    said = "cannot be written: No space left"
    found, job = _checkpoints_spoiled(case, folder, "checkpoints' disk full", fill, said)
    (saved / OTHERS).unlink()
    found = with_next_start(found, case, job)
    unmount(saved)
    return found


def _checkpoints_read_only(case: Case, folder: Path) -> Outcome:
    saved = folder / "checkpoints"
    saved.mkdir(parents=True)
    found, job = _checkpoints_spoiled(case, folder, "checkpoints' disk read-only", read_only, "cannot be written")
    unmount(saved)
    return with_next_start(found, case, job)


def _drive_fills(case: Case, folder: Path) -> Outcome:
    drive = folder / "drive"
    mount(drive, 32 << 10)
    job = start(case, folder)
    if reached(job, 3):
        fill(drive)
    job.wait()
    (drive / OTHERS).unlink(missing_ok=True)
    found = outcome("drive filled by another program", case, job, goes_on=True)
    unmount(drive)
    return found


def _drive_too_small(case: Case, folder: Path) -> Outcome:
    drive = folder / "drive"
    mount(drive, 256)
    fill(drive)
    job = start(case, folder)
    on_drive = any("nvme" in route for route in case.routes)
    job.wait()
    (drive / OTHERS).unlink()
    found = outcome("drive too small from the start", case, job, goes_on=not on_drive, on_drive=on_drive)
    unmount(drive)
    if on_drive:
        found["as expected"] &= not found["traceback"]
        found = with_next_start(found, case, job)
    return found


def _trace_read_only(case: Case, folder: Path) -> Outcome:
    traces = folder / "traces"
    traces.mkdir(parents=True)
    job = start(case, folder, "--user-defined-schedule-trace", str(traces / "trace.json"))
    if reached(job, 3):
        read_only(traces)
    found = outcome("trace's place read-only", case, job, goes_on=True)
    found["as expected"] &= "trace.json" in job.said() and "cannot be written" in job.said()
    unmount(traces)
    return found


def clock(folder: Path, corpus: Path, save: Save, seed: int) -> list[Outcome]:
    """The time of day jumps while ranks start and while they train; a watch over steps is on."""
    results: list[Outcome] = []
    library = folder / "jumping_clock.so"
    source = Path(__file__).with_name("jumping_clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    setups = ("zero 1, interleaved", "zero 3, no pipeline")
    cases = [drawn(setup, seed + 300, folder / setup, corpus, None) for setup in setups]
    for number, jump in enumerate(JUMPS):
        for at, case in zip(("start", "iteration"), cases[:: 1 - 2 * (number % 2)]):
            place = folder / f"{number} {at} run"
            place.mkdir(parents=True)
            offset = place / "clock"
            offset.write_bytes(struct.pack("q", 0))
            environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}
            job = start(case, place, "--user-defined-schedule-step-timeout", "60", environment=environment, anew=True)
            if at == "iteration":
                reached(job, 3)
            else:
                time.sleep(3.0)
            with offset.open("r+b") as file:
                file.write(struct.pack("q", jump))
            found = outcome(f"clock {jump // HOUR:+} h at the {at}", case, job, goes_on=True)
            results.append(with_next_start(found, case, job))
            save(results)
    return results


def jobs(folder: Path, corpus: Path, save: Save, seed: int) -> list[Outcome]:
    """Two and four jobs at once on one node, and two that save to one directory."""
    results: list[Outcome] = []
    for number, (count, setup) in enumerate(((2, "zero 1, interleaved"), (4, "zero 3, interleaved"))):
        case = drawn(setup, seed + 400 + number, folder / f"{count}", corpus, None)
        running = [start(case, folder / f"{count} {job}") for job in range(count)]
        for job in running:
            job.wait()
        results += [outcome(f"{count} jobs on one node", case, job, goes_on=True) for job in running]
        save(results)
    case = drawn("zero 3, no pipeline", seed + 402, folder / "one", corpus, None)
    first = start(case, folder / "shared")
    reached(first, 1)
    ranks = first.ranks()
    for pid in ranks:  # or it might end before the second has started
        os.kill(pid, signal.SIGSTOP)
    second = Job(folder / "second", [*first.options], nodes=None)
    second.wait()
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    refused = second.code == 2 and "is in use by process" in second.said()
    found = outcome("two jobs that save to one directory", case, first, goes_on=True, refused=refused)
    found["as expected"] &= refused
    results.append(found)
    save(results)
    return results
