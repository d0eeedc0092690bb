"""Program of one rank: trains the cases of a job, one after another.

``train_ranks.py FOLDER``: cases are read from ``FOLDER/job.json``; the first rank appends a line to
``FOLDER/progress.jsonl`` before and after each. A case that raises anything but an InputError ends the process: what
it has left behind on a device is not known.
"""

import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "helpers"), str(ROOT / "examples")]

from megatron_ext.megatron import cpu_compat

cpu_compat.install()  # does nothing where there is a CUDA device

import torch
import torch.distributed as dist
import trained_model
from case_table import DRY_SIZES, LAYOUTS, SIZES, Training
from megatron.core import parallel_state
from placed_schedule import placed_schedule
from shared_device import share_device

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.device import has_cuda
from megatron_ext.schedule import user_defined_schedule

ITERATIONS = 4


class TrainJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the ranks of one job are asked for.

    Attributes:
        layout: as in ``case_table.LAYOUTS``.
        dry_run: sizes for a machine without a GPU.
        drive: directory on the drive.
        engine: layers are Transformer Engine's.
        begin_by: by the system's clock; a case that would not end by then is not begun.
        hang: name of a case that hangs on purpose.
    """

    layout: str
    cases: tuple[Training, ...]
    dry_run: bool
    drive: str
    engine: bool
    begin_by: float
    hang: str = ""


def options_of(case: Training, job: TrainJob) -> list[str]:
    """The example's options for a case."""
    ranks, layout = LAYOUTS[case.layout]
    sizes = (DRY_SIZES if job.dry_run else SIZES)[case.size]
    text = f"{layout} {sizes} --untie-embeddings-and-output-weights --train-iters {ITERATIONS} --lr 1e-2 "
    text += "--fp16 --initial-loss-scale 1024 " if "overflow" in case.mode else "--bf16 "
    text += f"--clip-grad {'1e-2' if case.clip == 'active' else '1e9'} "
    text += "--optimizer-cpu-offload " if case.on_host else ""
    text += "--delayed-parameter-update 1 " if case.mode == "delayed" else ""
    text += "--transformer-impl transformer_engine " if job.engine else ""
    text += f"--gpus-per-node {ranks}"
    return [*text.split(), "--user-defined-schedule-nvme-path", job.drive]


def start(job: TrainJob):
    """Process groups of this rank; returns one of gloo, for objects. Collective."""
    args = trained_model.parse(options_of(job.cases[0], job))
    if has_cuda():
        share_device()
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if has_cuda() else "gloo", timeout=timedelta(minutes=5))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
    )
    return dist.new_group(backend="gloo")


class Cases:
    """The cases of a job on this rank.

    References are kept by all that they depend on, and are trained once; a second time where a case differs, to see
    whether this training is the same twice at all.
    """

    def __init__(self, folder: Path, job: TrainJob, everyone):
        self.folder, self.job, self.everyone = folder, job, everyone
        self._references: dict[str, trained_model.Trained] = {}
        self._workloads: dict[tuple, trained_model.Workload] = {}

    def run(self, case: Training) -> dict:
        """Status, one line and figures. Collective."""
        args = trained_model.parse(options_of(case, self.job))
        path = str(self.folder / f"schedule.{dist.get_rank()}.json")
        difference, figures = "", {}
        try:
            schedule = placed_schedule(case, self._workload(case, args))
            user_defined_schedule.save(path, schedule)
            figures = {
                "parameters": sum(p.numel for c in self._workload(case, args).chunks for p in c.parameters),
                "largest_group_bytes": max(group.bytes for group in schedule.groups),
                "groups": len(schedule.groups),
            }
            train = lambda stock: trained_model.train(args, path, stock=stock, overflow="overflow" in case.mode)
            key = _reference_key(case, args, schedule)
            if key not in self._references:
                self._references[key] = train(True)
            reference, runs = self._references[key], [train(False) for _ in range(2)]
            figures["train_seconds"] = round(runs[-1].seconds, 2)
            differences = [differs(reference, run) or says_nothing(case, run) for run in runs]
            difference = "; ".join(f"run {n}: {text}" for n, text in enumerate(differences, 1) if text)
            if any(self._of_all(difference)) and any(self._of_all(differs(reference, train(True)))):
                difference = "the reference differs from itself, so nothing can be compared"
        except InputError as error:
            difference = f"refused: {error}"
        said = [f"rank {rank}: {text}" for rank, text in enumerate(self._of_all(difference)) if text]
        if said:
            return {"status": "FAIL", "said": said[0], "figures": figures}
        return {"status": "pass", "said": f"{ITERATIONS} iterations, twice, equal to the last bit", "figures": figures}

    def _workload(self, case: Training, args) -> trained_model.Workload:
        key = (case.size, case.zero_stage, case.on_host, case.mode)
        if key not in self._workloads:
            self._workloads[key] = trained_model.workload_of(args, int(case.zero_stage))
        return self._workloads[key]

    def _of_all(self, value) -> list:
        values: list = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.everyone)
        return values

    def may_begin(self, case: Training) -> bool:
        """Whether the time is enough, by the first rank's clock. Collective."""
        return self._of_all(time.time() + case.seconds <= self.job.begin_by)[0]


def _reference_key(case: Training, args, schedule) -> str:
    """All that Megatron's own gather at a schedule's bucket layout depends on."""
    groups = [(g.parameters, g.gradients, g.reduce_every, g.states_rest == "device") for g in schedule.groups]
    how = (case.size, args.fp16, args.clip_grad, case.mode.replace("early, ", ""), case.mode == "delayed", case.on_host)
    return repr((how, groups)) if case.mode != "early" else repr(((*how[:3], "plain", *how[4:]), groups))


def differs(reference: trained_model.Trained, run: trained_model.Trained) -> str:
    """The first difference in one line; empty where there is none. Not-a-numbers count as equal to themselves."""
    for name in ("losses", "norms"):
        pairs = zip(getattr(reference, name), getattr(run, name))
        for iteration, (theirs, ours) in enumerate(pairs, 1):
            if repr(theirs) != repr(ours):
                return f"NOT EQUAL: {name} of iteration {iteration}: reference {theirs!r}, this run {ours!r}"
    wrong = [name for name, value in reference.digests.items() if run.digests.get(name) != value]
    return f"NOT EQUAL: {len(wrong)} of {len(reference.digests)} parameters, {wrong[0]} first" if wrong else ""


def says_nothing(case: Training, run: trained_model.Trained) -> str:
    """Why equality of this run proves little; empty where it does not."""
    if not all(math.isfinite(loss) for losses in run.losses for loss in losses):
        return "a loss is not finite, so equality says nothing"
    skipped = sum(norm is None for norm in run.norms)
    if "overflow" in case.mode:
        return "" if 0 < skipped < len(run.norms) else f"{skipped} of {len(run.norms)} steps overflowed: expected some"
    return f"{skipped} steps were skipped: expected none" if skipped else ""


def main() -> None:
    folder = Path(sys.argv[1])
    job = json_files.load(folder / "job.json", TrainJob)
    cases = Cases(folder, job, start(job))
    with open(folder / "progress.jsonl" if dist.get_rank() == 0 else os.devnull, "a", buffering=1) as progress:
        for case in job.cases:
            if not cases.may_begin(case):
                break
            progress.write(json.dumps({"begun": case.name, "at": time.time()}) + "\n")
            if case.name == job.hang:
                hang()
            print(f"== {case.name}", flush=True)
            result = cases.run(case)
            progress.write(json.dumps({"ended": case.name, **result}) + "\n")


def hang() -> None:
    """Never return, and keep the interpreter's lock meanwhile, as a call of a driver may."""
    import ctypes

    ctypes.PyDLL(None).sleep(100_000)


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking process groups down in order takes seconds and nothing of them is needed again
