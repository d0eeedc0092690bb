"""What is trained while it is disturbed: small models by drawn schedules of all routes, and how runs are compared."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from cases import LAYOUTS, MODELS, model_options
from draw_schedule import prepared
from emulated_nodes import Nodes
from msgspec.structs import replace
from robustness_jobs import Job, run_verb

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.workload import workload as workload_file

ITERATIONS, SAVE_EVERY = 9, 3
SETUPS = {
    "zero 1, interleaved": (1, "interleaved", "fp32", 1),
    "zero 3, interleaved": (3, "interleaved", "fp32", 1),
    "zero 1, no pipeline": (1, "no_pipeline", "bf16-tied", 1),
    "zero 3, no pipeline": (3, "no_pipeline", "fp32", 1),
    "zero 3, 1f1b, optimizer on the host": (3, "1f1b", "bf16-offload", 1),
    "zero 1, two nodes": (1, "no_pipeline", "fp32", 2),
    "zero 3, two nodes": (3, "no_pipeline", "fp32", 2),
    "zero 3, two nodes, pipeline": (3, "1f1b", "fp32", 2),
}
"""Zero stage, layout, model and nodes; four ranks each."""


class Case(NamedTuple):
    """A setup with one drawn schedule, and what a run of it without a disturbance gives."""

    setup: str
    schedule: Path
    options: list[str]
    nodes: Nodes | None
    routes: list[str]
    reference: dict
    first_s: float
    """From the launch to the first iteration's end, seconds."""
    iteration_s: float


def drawn(setup: str, seed: int, folder: Path, corpus: Path, nodes: Nodes | None, iterations: int = ITERATIONS) -> Case:
    """A case of ``setup`` in a new ``folder``.

    Raises:
        RuntimeError: the run without a disturbance failed, or differs from Megatron's own gathers.
    """
    zero_stage, layout, model, node_count = SETUPS[setup]
    options = [*MODELS[model], "--vocab-size", "259", *LAYOUTS[layout], "--gpus-per-node", str(4 // node_count)]
    folder.mkdir(parents=True)
    given = ["--out", str(folder / "workload.json"), "--zero-stage", str(zero_stage)]
    if run_verb(["describe", *given, "--", *model_options(options)], folder / "describe.log"):
        raise RuntimeError((folder / "describe.log").read_text()[-2000:])
    work = workload_file.load(folder / "workload.json")
    on_host = "--optimizer-cpu-offload" in options
    work = replace(work, limits=workload_file.Limits(nvme_slots=2), optimizer=replace(work.optimizer, on_host=on_host))
    schedule = prepared(random.Random(seed), work, folder / "schedule.json")
    used = {unshard.route for rank in schedule.ranks for step in rank.steps for unshard in step.unshard}
    used |= {f"gradients {group.gradients}" for group in schedule.groups if group.gradients}
    used |= {f"states {group.states_rest}" for group in schedule.groups if group.states_rest}
    options += ["--data-path", str(corpus), "--log-interval", "1", "--train-iters", str(iterations)]
    options += ["--user-defined-schedule", str(folder / "schedule.json")]
    case = Case(setup, folder / "schedule.json", options, nodes, sorted(used), {}, 0.0, 0.0)
    first_s = 0.0
    job = start(case, folder / "reference")
    while job.running():
        if job.iteration() and not first_s:
            first_s = job.seconds()
        time.sleep(0.01)
    reference = result(job)
    stock = start(case, folder / "stock", environment={"MEGATRON_EXT_STOCK_GATHER": "1"})
    stock.wait()
    if differences(reference, result(stock)):
        raise RuntimeError(f"{setup}: the schedule does not train like Megatron's own gathers")
    shutil.rmtree(folder / "stock")
    shutil.rmtree(folder / "reference")
    return case._replace(
        reference=reference, first_s=first_s, iteration_s=sum(reference["iteration_us"]) / iterations / 1e6
    )


def start(case: Case, folder: Path, *more: str, environment: dict[str, str] | None = None, anew: bool = False) -> Job:
    """Train a case in ``folder``, from the checkpoint there if there is one, and save one every few iterations."""
    saved = folder / "checkpoints"
    options = [*case.options, "--metrics-path", str(folder / "metrics.json"), "--save", str(saved)]
    options += ["--save-interval", str(SAVE_EVERY), "--user-defined-schedule-nvme-path", str(folder / "drive")]
    options += ["--user-defined-schedule-trace", str(folder / "trace.json")]
    if (saved / "latest_checkpointed_iteration.txt").exists():
        options += ["--load", str(saved)]
    return Job(folder, [*options, *more], nodes=case.nodes, environment=environment, anew=anew)


def result(job: Job) -> dict:
    """The metrics of a job that has ended well; without an iteration where it was resumed behind the last one.

    Raises:
        RuntimeError: it has not.
    """
    if job.running() or job.code:
        raise RuntimeError(f"exit code {job.code}: {job.said()[-3000:]}")
    return json_files.load(job.folder / "metrics.json", dict)


def differences(reference: dict, found: dict) -> list[str]:
    """In what a run, which may have been resumed, differs from one from the start: to the last bit, by name."""
    names = [name for name in ("loss", "grad_norm") if not _ends_with(reference[name], found[name])]
    return names + ["parameters"] * (reference["parameter_sha256"] != found["parameter_sha256"])


def _ends_with(whole, part) -> bool:
    return json.dumps(whole[len(whole) - len(part) :]) == json.dumps(part)


def resumed(case: Case, job: Job) -> dict:
    """What the next start gives in the folder of a job that was disturbed: ``{code, differences, leftovers}``."""
    again = start(case, job.folder)
    hangs = not again.wait()
    if hangs or again.code:
        return {"code": again.code, "hangs": hangs, "said": again.said()[-3000:], "differences": [], "leftovers": []}
    try:
        differs = differences(case.reference, result(again))
    except (InputError, RuntimeError) as failed:
        differs = [str(failed)]
    return {"code": 0, "hangs": False, "differences": differs, "leftovers": again.leftovers()}


def nodes_of(setup: str) -> int:
    return SETUPS[setup][3]
