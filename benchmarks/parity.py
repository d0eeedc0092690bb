"""Train 300 random valid schedules and Megatron's own gathers, and count the differences.

    python benchmarks/parity.py [--cases 300] [--seed 0] [--out benchmarks/results/parity.json]

Cases are drawn as in ``tests/distributed/megatron/test_parity.py``: model, precision, recompute, tied
embeddings, zero stage, micro-batches, groups, routes (gpu, cpu, cpu_shard, nvme), issue, need_by, keep or free down to
single layers, where shards, gradients and optimizer states rest, visits between two reduces, nodes, and delays put
into publishing, copying, reading and reducing. Each case trains both ways, in debug mode, and must be equal to the
last bit in losses, gradient norms and parameters, with the promised peak of whole parameters. Where gradients come and
go, the reference is plain PyTorch that adds them in the same order. After every tenth case another is trained with a
safeguard switched off (shards not waited for, a stale copy, a stale shard, a group left out, a reduce left out, a
gradient added behind all others): that must be seen.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import machine
from cases import LAYOUTS, MODELS
from draw_schedule import from_shards, hosted, prepared, reduced
from msgspec.structs import replace
from parity_service import Died, ParityService, differences
from training import environment

from megatron_ext.schedule import footprint
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.optimizer_settings import OptimizerSettings

DELAYS = (
    "",
    "publish_delay_ms=8,copy_delay_ms=4,read_delay_ms=4,reduce_delay_ms=3",
    "publish_delay_ms=20",
    "copy_delay_ms=8,reduce_delay_ms=6",
    "read_delay_ms=12",
)
BLOCK = 50
"""Cases of one layout between two launches; results are saved after each."""

SETTINGS = ("shard_rests", "gradients", "reduce_every", "states_rest")
"""Fields of a group that are drawn, counted by cases in which any group has them."""


def _hosted(zero_stage: int):
    return "fp32", lambda workload, path: hosted(workload, zero_stage, path)


def _reduced(zero_stage: int, kind: str):
    return "fp32", lambda workload, path: reduced(workload, zero_stage, path, kind)


CONTROLS = (
    *[
        (fault, *_hosted(zero_stage))
        for zero_stage in (1, 3)
        for fault in ("publish_delay_ms=60,no_wait=1", "stale_group={largest}", "skip_group=0")
    ],
    *[
        (fault, *_reduced(zero_stage, kind))
        for zero_stage, kind in ((2, "host"), (3, "sharded"), (2, "sharded"), (3, "host"))
        for fault in ("skip_reduce={largest}", "late_add={largest}")
    ],
    ("stale_group={largest}", "bf16-selective", from_shards),
)
"""The fault, the model, and a function that makes the schedule."""


def describe(folder: Path) -> None:
    program = ROOT / "tests" / "helpers" / "describe_cases.py"
    subprocess.run([sys.executable, str(program), str(folder)], env=environment(), check=True)


def parity(service: ParityService, draw: random.Random, workloads: Path, folder: Path) -> dict:
    """One case; returns what was drawn and what differed."""
    name, zero_stage = draw.choice(sorted(MODELS)), draw.choice((3, 2, 3, 1))
    routes = draw.choice((("gpu", "cpu", "nvme"), ("gpu", "cpu"), ("nvme",), ("gpu",), ("cpu",)))
    gpus_per_node, delays, evaluate = draw.choice((4, 2, 1)), draw.choice(DELAYS), draw.random() < 0.3
    microbatches = draw.choice((2, 4))
    workload, batch = with_microbatches(workload_file.load(workloads / f"{service.layout}.{name}.json"), microbatches)
    workload = replace(
        workload,
        zero_stage=zero_stage,
        optimizer=OptimizerSettings(on_host="offload" in name),
        limits=workload_file.Limits(nvme_slots=draw.choice((1, 2, 4))),
        parallel=replace(workload.parallel, gpus_per_node=gpus_per_node),
    )
    schedule = prepared(draw, workload, folder / "schedule.json", routes)
    options = [*MODELS[name], *batch, "--gpus-per-node", str(gpus_per_node)]
    options += ["--user-defined-schedule-nvme-path", str(folder)]
    options += ["--eval-interval", "2", "--eval-iters", "1"] if evaluate else []
    case = dict(layout=service.layout, model=name, zero_stage=zero_stage, microbatches=microbatches)
    case |= dict(gpus_per_node=gpus_per_node, delays=delays, evaluate=evaluate, routes=routes_of(schedule))
    case |= {field: sorted({str(getattr(group, field)) for group in schedule.groups}) for field in SETTINGS}
    try:
        answer = service.run(
            options=options,
            schedule=folder / "schedule.json",
            iterations=4 if name == "fp16" else 3,  # its first steps are skipped
            environment={"MEGATRON_EXT_FAULTS": delays, "MEGATRON_EXT_DEBUG": "1"},
        )
    except Died as died:
        return {**case, "differences": [f"died: {str(died)[-600:]}"]}
    found = differences(answer)
    peaks = footprint.device_peaks(schedule)
    if answer["scheduled"]["peak_bytes"] != [peak for peak in peaks for _ in range(4 // len(peaks))]:
        found.append("peak_bytes")
    return {**case, "differences": found}


def with_microbatches(workload, number: int) -> tuple[workload_file.Workload, list[str]]:
    """The workload with so many micro-batches, and the options that say so."""
    parallel = replace(workload.parallel, num_microbatches=number)
    return replace(workload, parallel=parallel), ["--global-batch-size", str(number * parallel.dp)]


def routes_of(schedule) -> list[str]:
    """Routes by which any group comes."""
    entries = [entry for rank in schedule.ranks for entry in (rank.start, *rank.steps)]
    return sorted({action.route for entry in entries for action in entry.unshard})


def control(service: ParityService, number: int, workloads: Path, folder: Path) -> dict:
    """A negative control; ``seen`` must be true."""
    fault, model, make = CONTROLS[number % len(CONTROLS)]
    workload, batch = with_microbatches(workload_file.load(workloads / f"{service.layout}.{model}.json"), 4)
    schedule = make(workload, folder / "schedule.json")
    largest = max(range(len(schedule.groups)), key=lambda index: schedule.groups[index].bytes)
    fault = fault.format(largest=largest) + f",seed={number}"
    try:
        seen = bool(
            differences(
                service.run(
                    options=[*MODELS[model], *batch],
                    schedule=folder / "schedule.json",
                    environment={"MEGATRON_EXT_FAULTS": fault},
                )
            )
        )
    except Died:
        seen = True
    gradients = sorted({str(group.gradients) for group in schedule.groups})
    return dict(layout=service.layout, zero_stage=schedule.zero_stage, fault=fault, gradients=gradients, seen=seen)


def main() -> int:
    args = machine.options(__doc__, cases=300, seed=0, out="benchmarks/results/parity.json")
    draw, begin = random.Random(args.seed), time.time()
    cases, controls, load = [], [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as workloads:
        describe(Path(workloads))
        for first in range(0, args.cases, BLOCK):
            layout = sorted(LAYOUTS)[first // BLOCK % len(LAYOUTS)]
            service = ParityService(layout, case_seconds=900)
            for n in range(first, min(first + BLOCK, args.cases)):
                with tempfile.TemporaryDirectory() as folder:
                    cases.append(parity(service, draw, Path(workloads), Path(folder)))
                    if n % 10 == 9:
                        controls.append(control(service, len(controls), Path(workloads), Path(folder)))
                        if not controls[-1]["seen"]:
                            print(f"not seen: {controls[-1]}", file=sys.stderr, flush=True)
                if cases[-1]["differences"]:
                    print(f"case {n}: {cases[-1]}", file=sys.stderr, flush=True)
            service.close()
            result = summary(cases, controls)
            command = f"python benchmarks/parity.py --cases {args.cases} --seed {args.seed}"
            seconds = round(time.time() - begin)
            machine.write(args.out, {"command": command, **result, "seconds": seconds}, load_before=load)
            print(
                f"{result['equal']} of {len(cases)} cases equal, {result['controls_seen']} of {len(controls)} "
                f"controls seen, {time.time() - begin:.0f} s",
                flush=True,
            )
    return 1 if result["different"] or result["controls_unseen"] else 0


def summary(cases: list[dict], controls: list[dict]) -> dict:
    """Counts, what differed, and how often each choice was drawn."""
    different = [case for case in cases if case["differences"]]
    unseen = [one for one in controls if not one["seen"]]
    drawn = {}
    for key in (name for name in cases[0] if name != "differences"):
        values = [value if isinstance(value := case[key], list) else [value] for case in cases]
        drawn[key] = dict(sorted(Counter(str(value) for found in values for value in found).items()))
    return {
        "cases": len(cases),
        "equal": len(cases) - len(different),
        "different": different,
        "controls": len(controls),
        "controls_seen": len(controls) - len(unseen),
        "controls_unseen": unseen,
        "faults": dict(sorted(Counter(one["fault"].partition("=")[0] for one in controls).items())),
        "drawn": drawn,
    }


if __name__ == "__main__":
    sys.exit(main())
