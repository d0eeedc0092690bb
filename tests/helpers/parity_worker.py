"""Program of one rank: trains case after case in one process group.

Rank 0 reads cases (one JSON line each) from the Unix socket named in the first argument and
answers each with what the reference and the scheduled run computed. The other arguments are the
options of the layout. See ``parity_service.py``.
"""

import contextlib
import faulthandler
import functools
import gc
import json
import os
import socket
import sys
import traceback

import faults
import orderings
import torch
import torch.distributed as dist
from places import ROOT

if orderings.VARIABLE in os.environ:
    orderings.install()

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

sys.path.insert(0, str(ROOT / "examples"))
import pretrain_gpt_hybrid
from meddling import SURROUNDINGS, TIMES_TOLD, meddling, reading
from random_rows import Rows

from megatron_ext.megatron import lifecycle
from megatron_ext.runtime import debug

ITERATIONS = 3
HANGS_AFTER = 240  # seconds; less than the service waits
IDLE = ("--distributed-timeout-minutes", "600")  # between two cases of its layout a rank waits in a broadcast


def train(
    example,
    options: list[str],
    schedule: str | None,
    environment: dict[str, str],
    iterations: int,
    meddle: str | None = None,
    trace: str | None = None,
) -> dict:
    """Train a new model; returns this rank's metrics. ``meddle``: ``told``, ``told twice`` (and once more at the end)
    or ``silent``, see :func:`meddling`; ``go on``: another iteration after training has been finished; ``leave``:
    nobody asks for parameters at the end, and then an evaluation does; ``replay``: the
    optimizer's hook is not called, as in the replay of a CUDA graph; ``overflow``: see :func:`overflowing`;
    ``evaluate``: see :func:`evaluating`;
    ``fused``: see :func:`fused`; ``ramp``: see :func:`ramping`; ``split``: see :func:`split`;
    ``read``: see :func:`reading`; ``again``: see :func:`ran_again`; ``gradients``: those of
    the first iteration are returned as the optimizer steps on them."""
    for name in (lifecycle.STOCK_GATHER, faults.VARIABLE, debug.VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = ["parity", "--data-path", "none", "--train-iters", str(iterations), *options]
    args = example.parse_args()
    example.gpt_arguments.check(args, world_size=int(os.environ["WORLD_SIZE"]))
    example.set_seeds(args)
    args.user_defined_schedule = schedule
    if meddle != "leave":
        args.metrics_path = args.metrics_path or "not written"  # hashes of parameters are wanted
    drive = args.user_defined_schedule_nvme_path
    surroundings = SURROUNDINGS[meddle](example) if meddle in SURROUNDINGS else contextlib.nullcontext()
    with faults.from_environment(), surroundings as noted:
        example.hooks.configure(schedule, trace, delay=args.delayed_parameter_update, nvme_path=drive)
        return _train_model(example, args, meddle) | {"microbatches": noted}


def _train_model(example, args, meddle: str | None) -> dict:
    model, optimizer, config = example.build_model_and_optimizer(args)
    rows = Rows(args)
    if meddle == "replay":
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            one.step_with_ready_grads = functools.partial(super(type(one), one).step_with_ready_grads)
    gradients: list[torch.Tensor] = []
    if meddle == "gradients":
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            one.step_with_ready_grads = functools.partial(_collect, gradients, one, one.step_with_ready_grads)
    if meddle in TIMES_TOLD:
        with meddling(example, TIMES_TOLD[meddle]) as hashes:
            metrics = example.train(args, model, optimizer, config, (rows, rows))
        metrics["parameter_sha256"] += hashes[0]
    elif meddle == "read":
        with reading(example) as reads:
            metrics = example.train(args, model, optimizer, config, (rows, rows))
        metrics["reads"] = reads
    else:
        metrics = example.train(args, model, optimizer, config, (rows, rows))
    executor = getattr(example.hooks.active(), "executor", None)
    # By its name: an older package has it in another place, see old_code.py.
    early = next((part for part in getattr(executor, "parts", ()) if type(part).__name__ == "EarlySteps"), None)
    metrics["early_steps"] = None if early is None else (early.taken, early.taken_back)
    if meddle == "told twice":  # what it publishes and issues is under way while everything is closed
        example.hooks.params_changed()
    example.hooks.finish(**({"read_later": False} if meddle == "leave" else {}))
    kept_open = example.hooks.active() is not None  # for later reads
    assert kept_open or not getattr(torch.cuda.MemPool, "alive", ())  # of the strict stand-in; the model is still there
    if meddle == "leave":
        assert any(p.untyped_storage().nbytes() == 0 for chunk in model for p in chunk.parameters())
        example.run_schedule(args, model, [example.batches_of(args, rows) for _ in model], forward_only=True)
    if meddle == "go on":
        for chunk in model:
            chunk.zero_grad_buffer()
        example.run_schedule(args, model, [example.batches_of(args, rows) for _ in model])
    del model, optimizer, config
    gc.collect()
    return metrics | {"gradients": gradients}


def _collect(gradients: list[torch.Tensor], optimizer, step):
    """Step, after the gradients of the optimizer's first step have been copied."""
    parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    gradients += [] if gradients else [p.grad.clone() for p in parameters if p.grad is not None]
    return step()


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest relative difference of a parameter's gradient, by norms."""
    assert len(ours) == len(theirs)
    return max((((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs) if b.norm()), default=0.0)


def train_strictly(strict: dict, *case) -> tuple[dict, dict]:
    """The same on the strict stand-in of a device; returns the metrics, and what the stand-in has found."""
    from happens_before import HappensBefore, said
    from strict_device import StrictDevice

    orderings.switch.off = strict.pop("off", None)
    orderings.switch.reached.clear()
    with StrictDevice(dist.get_rank(), **strict) as device:
        metrics = train(*case)
    everybody = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(device.findings(), everybody)
    if everybody is None:  # rank 0 answers: the logs of all are long, and are judged once
        return metrics, {}
    order = HappensBefore([found["entries"] for found in everybody])
    together = lambda kind: [one for found in everybody for one in found[kind]]
    return metrics, {
        "races": sorted(order.races),
        "circles": [said(circle, everybody[circle.rank]["stacks"]) for circle in order.circles],
        "stopped": together("stopped"),
        "stuck": order.stuck,
        "crossed": order.crossed,
        "errors": together("errors"),
        "misplaced": together("misplaced"),
        "host_waits": together("host_waits"),
        "dear": together("dear"),
        "dear_looked_at": [found["dear_looked_at"] for found in everybody],
        "symmetric_gathers": [found["gathers"] for found in everybody],
        "accesses": order.accesses,
        "reached": sorted(orderings.switch.reached),
    }


def run_case(example, layout: list[str], case: dict) -> dict:
    options = [*layout, *case["options"]]
    found, iterations, meddle = {}, case.get("iterations", ITERATIONS), case.get("meddle")
    if case.get("reference", True):
        path = case.get("reference_schedule", case["schedule"])
        found["reference"] = train(example, options, path, {lifecycle.STOCK_GATHER: "1"}, iterations, meddle)
    rest = (example, options, case["schedule"], case.get("environment", {}), iterations, meddle, case.get("trace"))
    judged = {}
    if "strict" in case:
        found["scheduled"], judged["strict"] = train_strictly(case["strict"], *rest)
    else:
        found["scheduled"] = train(*rest)
    gradients = [metrics.pop("gradients") for metrics in found.values()]
    found["scheduled"]["gradient_difference"] = _difference(gradients[-1], gradients[0])
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    return judged | {
        name: {
            "loss": everybody[0][name]["loss"],
            "eval_loss": everybody[0][name]["eval_loss"],
            "grad_norm": [rank[name]["grad_norm"] for rank in everybody],
            "parameter_sha256": [rank[name]["parameter_sha256"] for rank in everybody],
            "peak_bytes": [rank[name]["peak_bytes"] for rank in everybody],
            "census": [rank[name]["census"] for rank in everybody],
            "early_steps": [rank[name]["early_steps"] for rank in everybody],
            "gradient_difference": [rank[name].get("gradient_difference") for rank in everybody],
            "reads": [rank[name].get("reads") for rank in everybody],
            "microbatches": everybody[0][name]["microbatches"],
        }
        for name in found
    }


def share_loops() -> None:
    """One thread of gloo's transport for all groups of this rank. Each wakes again and again while a rank waits, and
    there would be one for every group."""
    for name in ("create_device", "create_default_device"):
        setattr(dist.ProcessGroupGloo, name, functools.cache(getattr(dist.ProcessGroupGloo, name)))


def main() -> int:
    address, *layout = sys.argv[1:]
    share_loops()
    example = pretrain_gpt_hybrid
    sys.argv = ["parity", "--data-path", "none", *IDLE, *layout]
    args = example.parse_args()
    example.gpt_arguments.check(args, world_size=int(os.environ["WORLD_SIZE"]))
    example.initialize(args)
    stream = None
    if dist.get_rank() == 0:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        stream = connection.makefile("rw")
    while True:
        case = [stream.readline() if stream is not None else None]
        dist.broadcast_object_list(case, src=0)
        if not case[0]:
            return 0
        # Say where every thread is before the service gives up on a case that hangs.
        faulthandler.dump_traceback_later(HANGS_AFTER)
        answer = run_case(example, layout, json.loads(case[0]))
        faulthandler.cancel_dump_traceback_later()
        if stream is not None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
