"""Program of one rank: trains case after case in one process group.

Rank 0 reads cases (one JSON line each) from the Unix socket named in the first argument and
answers each with what the reference and the scheduled run computed. The other arguments are the
options of the layout. See ``parity_service.py``.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import socket
import sys
import traceback
from unittest import mock

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
import model_and_optimizer
import pretrain_gpt_hybrid
from engine_stand_in import FusedAdam
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from ran_again import ran_again

from megatron_ext.megatron import lifecycle
from megatron_ext.runtime import debug

ITERATIONS = 3
HANGS_AFTER = 80  # seconds; less than the service waits
IDLE = ("--distributed-timeout-minutes", "600")  # between two cases of its layout a rank waits in a broadcast
RAMP = [4, 4, 8]
"""As --rampup-batch-size takes it."""
TIMES_TOLD = {"silent": 0, "told": 1, "told twice": 2}


class Rows:
    """Random tokens, the same on every rank."""

    def __init__(self, args, count: int = 64):
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(0, args.vocab_size, (count, args.seq_length + 1), generator=generator)
        self._positions = torch.arange(args.seq_length)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict:
        row = self._tokens[index]
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": torch.ones(len(row) - 1),
            "position_ids": self._positions,
        }


@contextlib.contextmanager
def meddling(example, told: int):
    """Halve all parameters before the second iteration, and say so to the hooks ``told`` times; yields the
    hash of the parameters before the first."""
    run_schedule, hashes = example.run_schedule, []

    def run(args, model, iterators, forward_only: bool = False):
        if not forward_only and not hashes:
            example.force_param_sync(model, args)
            hashes.append(example.parameter_hash(model))
        elif not forward_only:
            hashes.append(None)
        if not forward_only and len(hashes) == 2:
            example.force_param_sync(model, args)
            with torch.no_grad():
                for chunk in model:
                    for parameter in chunk.parameters():
                        parameter.data.mul_(0.5)
            for _ in range(told):
                example.hooks.params_changed()
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.object(example, "run_schedule", run):
        yield hashes


@contextlib.contextmanager
def reading(example):
    """Read all parameters before every iteration, as a norm that is logged does and through views taken at the start;
    yields what was read and what they are when all are gathered."""
    run_schedule, reads, views = example.run_schedule, [], []

    def values(tensors) -> list[str]:
        return [tensor.sum().item().hex() for tensor in tensors]

    def run(args, model, iterators, forward_only: bool = False):
        parameters = [parameter for chunk in model for parameter in chunk.parameters()]
        views.extend([] if views else [parameter.data.view(-1) for parameter in parameters])
        if not forward_only:
            noticed = values(views if len(reads) % 2 else parameters)
            example.force_param_sync(model, args)
            reads.append((noticed, values(parameters)))
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.object(example, "run_schedule", run):
        yield reads


@contextlib.contextmanager
def evaluating(example):
    """A forward alone before every second iteration, for which nothing asks for parameters; yields the losses."""
    run_schedule, losses, count = example.run_schedule, [], 0

    def run(args, model, iterators, forward_only: bool = False):
        nonlocal count
        count += not forward_only
        if not forward_only and count % 2 == 0:
            with torch.no_grad():
                found = run_schedule(args, model, [example.batches_of(args, Rows(args)) for _ in model], True)
            losses.append([{name: value.tolist() for name, value in one.items()} for one in found])
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.object(example, "run_schedule", run):
        yield losses


@contextlib.contextmanager
def overflowing(example):
    """Before every third iteration set a loss scale at which gradients overflow, before the others one at which they do
    not; yields nothing."""
    run_schedule, build, optimizers, count = example.run_schedule, example.build_model_and_optimizer, [], 0

    def built(args):
        made = build(args)
        optimizers.extend(getattr(made[1], "chained_optimizers", [made[1]]))
        return made

    def run(args, model, iterators, forward_only: bool = False):
        nonlocal count
        if not forward_only:
            count += 1
            for optimizer in optimizers:
                optimizer.grad_scaler.scale.fill_(2.0**40 if count % 3 == 0 else 2.0**10)
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.multiple(example, run_schedule=run, build_model_and_optimizer=built):
        yield


@contextlib.contextmanager
def fused():
    """The optimizer of a host optimizer's parameters on the device is the stand-in of Transformer Engine's: it rounds
    otherwise than torch's on the host, and has its count of steps elsewhere; yields nothing."""
    with (
        mock.patch.object(megatron_optimizer, "Adam", FusedAdam),
        mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
        mock.patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ):
        yield


@contextlib.contextmanager
def split(example):
    """--overlap-param-gather-with-optimizer-step: the first chunk has an optimizer of its own, after whose step
    Megatron begins to gather it; yields nothing."""
    config = functools.partial(megatron_optimizer.OptimizerConfig, overlap_param_gather_with_optimizer_step=True)
    with mock.patch.object(model_and_optimizer, "OptimizerConfig", config):
        yield


@contextlib.contextmanager
def ramping(example):
    """--rampup-batch-size: Megatron's own calculator says before every iteration how many micro-batches it has; yields
    these numbers."""
    run_schedule, build, numbers, consumed = example.run_schedule, example.build_model_and_optimizer, [], 0

    def built(args):
        args.rampup_batch_size, sizes = RAMP, (args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
        calculator.init_num_microbatches_calculator(dist.get_rank(), RAMP, *sizes)
        return build(args)

    def run(args, model, iterators, forward_only: bool = False):
        nonlocal consumed
        if not forward_only:
            calculator.update_num_microbatches(consumed)
            consumed += calculator.get_current_global_batch_size()
            args.num_microbatches = calculator.get_num_microbatches()
            numbers.append(args.num_microbatches)
        return run_schedule(args, model, iterators, forward_only)

    try:
        with mock.patch.multiple(example, run_schedule=run, build_model_and_optimizer=built):
            yield numbers
    finally:
        calculator.unset_num_microbatches_calculator()


SURROUNDINGS = {
    "toy route": lambda example: importlib.import_module("toy_route").added(),  # older packages, too, run this file
    "evaluate": evaluating,
    "overflow": overflowing,
    "fused": lambda example: fused(),
    "split": split,
    "ramp": ramping,
    "again": ran_again,
}


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
