"""Are network, host link and drive busy at once? A schedule by all three routes over emulated links, simulated and run.

    sudo .venv/bin/python benchmarks/three_links.py [--network-mb 30 --host-link-mb 40 --drive-mb 40]

Two nodes of one rank each, zero stage 3. All three links are slow, so that an iteration is as long as its gathers: the
network's rate is bounded by the kernel (benchmarks/emulated_nodes.py); copies to the device and reads of the drive are
real and take the time of slow links (megatron_ext/runtime/slow_links.py). Costs are measured over the same links. The
example is chosen for overlap. Its schedule is a drawn one: of 400, that in which the simulation has all links busy at
once for longest, which is not the fastest; the network is so slow that its bytes alone take more than half of the
simulated iteration. Of every iteration it is said how long each link was busy, and how long all three were at the same
time, in the simulation and in the trace, by the same rule as in `megatron-ext report`. Needs root and iproute2. Writes
benchmarks/results/three_links.json and its picture.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import pictures
from emulated_nodes import Nodes
from machine import about_this_machine
from measuring import describe, measure_command, training_command
from msgspec.structs import replace

from megatron_ext.cost import cost_table as cost
from megatron_ext.cpubench.launcher import launch
from megatron_ext.formats import json_files
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.report.links_busy import busy, shares
from megatron_ext.report.measured_trace import MeasuredTrace
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.workload.workload import Limits

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, SEQ = 256, 32
MODEL = (
    f"--num-layers 8 --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQ} --micro-batch-size 1 "
    "--global-batch-size 16 --data-parallel-size 2 --gpus-per-node 1 --untie-embeddings-and-output-weights --bf16"
).split()
WARM_UP, SLOTS = 2, 4


class Links:
    """Two nodes, a host link and a drive; ``run`` starts a rank on each node."""

    def __init__(self, nodes: Nodes, args, folder: Path):
        self.folder = folder
        self.environment = {
            "PYTHONPATH": f"{ROOT}:{ROOT / '.megatron'}",
            "PYTHONWARNINGS": "ignore",
            "MEGATRON_EXT_FAULTS": f"host_link_mb={args.host_link_mb},drive_mb={args.drive_mb}",
        } | nodes.environment(1)

    def run(self, name: str, command: list[str]) -> None:
        log = self.folder / f"{name}.log"
        wrapped = ["benchmarks/enter_node.py", *([sys.executable] if command[0] == "-m" else []), *command]
        with open(log, "w") as out:
            code = launch([sys.executable, *wrapped], 2, stdout=out, environment=self.environment)
        if code:
            raise RuntimeError(f"{name} ended with exit code {code}; see {log}")


def run(links: Links, args, drive: Path) -> dict:
    """Measure, plan, simulate and train."""
    folder, where = links.folder, str(drive)
    work = describe(folder / "workload.json", MODEL, 3, None)
    size = sum(p.bytes for chunk in work.chunks for p in chunk.parameters)
    work = replace(work, limits=Limits(nvme_slots=SLOTS))
    sizes = dict(hidden=HIDDEN, seq=SEQ, micro_batch_size=1, max_bytes=size // 4)
    command = measure_command(folder / "table.json", work, MODEL, seconds=args.measure_seconds, **sizes)
    command[command.index("--threads") : 0] = ["--nvme-path", where]
    links.run("measure", ["-m", *command])
    table = cost.load(folder / "table.json")
    schedule = plan(work, table, policy=args.policy, extrapolate=True)
    schedule_file.save(folder / "schedule.json", schedule)
    predicted = evaluate(work, table, schedule, extrapolate=True, trace=True)
    more = ["--user-defined-schedule", str(folder / "schedule.json"), "--user-defined-schedule-nvme-path", where]
    more += ["--user-defined-schedule-trace", str(folder / "trace.json")]
    links.run("train", training_command(MODEL, args.iters, folder / "metrics.json", *more))
    trace = MeasuredTrace(folder / "trace.json", work.parallel, args.iters)
    windows = [(w.events, w.end_us, work.parallel) for w in map(trace.window, range(WARM_UP + 1, args.iters + 1))]
    found = [shares(*window) for window in windows]
    simulated = predicted.events or [], predicted.iteration_time_us, work.parallel
    us = json_files.load(folder / "metrics.json", dict)["iteration_us"][WARM_UP:]
    return {
        "routes_bytes": bytes_by_route(schedule),
        "iteration_us": median(us),
        "predicted_iteration_us": predicted.iteration_time_us,
        "measured": {name: median(row[name] for row in found) for name in found[0]},
        "simulated": shares(*simulated),
        "busy_us": {"measured": busy(*windows[-1])[0], "simulated": busy(*simulated)[0]},
    }


def bytes_by_route(schedule) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in (schedule.ranks[0].start, *schedule.ranks[0].steps):
        for action in entry.unshard:
            found[action.route] = found.get(action.route, 0) + schedule.groups[action.group].bytes
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--network-mb", type=float, default=30, help="MB/s of each node's network link, each way.")
    add("--host-link-mb", type=float, default=40, help="MB/s of copies to the device.")
    add("--drive-mb", type=float, default=40, help="MB/s of reads of the drive.")
    add("--policy", default="random:376", help="Of plan.")
    add("--iters", type=int, default=8)
    add("--measure-seconds", type=float, default=90)
    add("--keep", type=Path, default=None, help="Keep logs, plan and trace in this new folder.")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "three_links.json")
    args = parser.parse_args()
    args.keep, args.out = args.keep and args.keep.resolve(), args.out.resolve()
    os.chdir(ROOT)
    (ROOT / "runs").mkdir(exist_ok=True)
    about = about_this_machine(load_before=os.getloadavg()[0])
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        drive = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "runs")))
        nodes = stack.enter_context(Nodes(2, args.network_mb * 8 / 1e3))
        found = run(Links(nodes, args, folder), args, drive)
    options = {key: value for key, value in vars(args).items() if key not in ("out", "keep")}
    json_files.save(args.out, {"about": about, "options": options, **found}, indent=1)
    pictures.draw(args.out)
    for name in ("routes_bytes", "iteration_us", "predicted_iteration_us", "measured", "simulated"):
        print(name, found[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
