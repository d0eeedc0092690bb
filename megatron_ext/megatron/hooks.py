"""The functions that the lines inserted into Megatron call. See patches/README.md for when each is called.

Without ``--user-defined-schedule`` (and without a trace) every hook returns at once.
"""

import atexit
import itertools
import os
import sys
import traceback

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import arguments
from megatron_ext.runtime.step_calls import IDLE

_run = None
"""The active :class:`megatron_ext.megatron.lifecycle.Run`, or None: plain Megatron."""

_looked = False

ended = False
"""Whether a run has written its trace and the result of its equality check."""

started = False
"""Whether :func:`on_pretrain` was called, by a hook of the script or by the first one in megatron/."""


def configure(schedule=None, trace=None, *, parallel=None, check=None, delay=None, nvme_path=None):
    """Make a run active: gather by ``schedule`` (a path), write a trace to ``trace`` (a path), make or compare with
    the reference ``check`` (a path, see :mod:`megatron_ext.megatron.equality_check`). ``delay``: updates are delayed
    after so many iterations, see :mod:`megatron_ext.runtime.host_step.delayed`; with None, never.
    ``nvme_path``: directory on the drive for optimizer states that a checkpoint gives before training begins; with
    None, these are in memory until then.

    With ``parallel`` (a :class:`megatron_ext.workload.parallel.Parallel`), a schedule for other sizes is refused at
    once, before the processes have joined their group.

    Call this before models are built. With neither a schedule nor a trace, Megatron stays as it is. Returns the run or
    None.

    Raises:
        InputError: the schedule cannot be read, is not valid, or is for other parallel sizes.
    """
    global _run, _looked, ended
    _looked = True
    if check is not None and schedule is None:
        raise InputError("needs --user-defined-schedule", field="--user-defined-schedule-check", value=str(check))
    if delay is not None and (schedule is None or delay < 0):
        why = "needs --user-defined-schedule" if schedule is None else "expected 0 or more iterations"
        raise InputError(why, field="--delayed-parameter-update", value=delay)
    _end_reading()
    if schedule is None and trace is None:
        return None
    ended = False
    from megatron_ext.megatron.lifecycle import Run

    _run = Run(schedule, trace, parallel, check, delay, nvme_path)
    return _run


def require_end() -> None:
    """Fail a process that ends without an error before its trace, or its equality check, is written."""
    args = arguments.of_run()
    wanted = [getattr(args, f"user_defined_schedule_{name}", None) for name in ("trace", "check")]
    nothing_to_write = ended or not any(wanted) or getattr(args, "skip_train", False)
    if nothing_to_write or getattr(sys, "last_value", None) is not None:
        return
    if int(os.environ.get("RANK", 0)) == 0:
        text = f"{wanted[0] or wanted[1]} was not written: the process ended before the end of training"
        print(f"megatron-ext: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def active():
    """The active run, or None. A patched pretrain_gpt.py configures it from its options, at the first call. That call
    is collective if there is a schedule: where one node cannot read it, all ranks refuse."""
    from torch import distributed as dist

    global _looked
    if not _looked:
        args = arguments.of_run()
        _looked = args is not None
        schedule = getattr(args, "user_defined_schedule", None)
        if schedule is not None and dist.is_initialized():
            from megatron_ext.megatron.agreement import agree, refusal

            agree(refusal(_configure_from, args), ("", ""), file=schedule)  # their contents are compared later
        elif _looked:
            _configure_from(args)
    return _run


def _configure_from(args) -> None:
    if getattr(args, "skip_train", False):  # models are not wrapped then, so there is nothing to schedule
        return
    schedule, parallel = getattr(args, "user_defined_schedule", None), None
    if schedule is not None:
        from megatron_ext.megatron import refusals
        from megatron_ext.megatron.workload_of_run import parallel_of_megatron

        refusals.refuse_unsupported(args)
        refusals.require_hooks(refusals.megatron_root())
        parallel = parallel_of_megatron(args)
    of_us = ("trace", "check", "nvme_path")
    trace, check, nvme_path = (getattr(args, f"user_defined_schedule_{name}", None) for name in of_us)
    delay = getattr(args, "delayed_parameter_update", None)
    configure(schedule, trace, parallel=parallel, check=check, delay=delay, nvme_path=nvme_path)


def add_arguments(parser):
    """Add our options at the end of Megatron's. Models are built next, late if a schedule says so. A script without a
    hook of its own (``--entry``) begins here, when Megatron is already imported. That is too late to prepare a machine
    without a GPU; use `megatron-ext run-on-cpu` there."""
    of_megatron = "megatron.training" in sys.modules
    if not started and of_megatron:
        _start(early=False)
    arguments.add_arguments(parser)
    if of_megatron and any(a.startswith("--user-defined-schedule") for a in sys.argv):
        from megatron_ext.megatron import late_model

        if any(a.startswith("--yaml-cfg") for a in sys.argv):
            raise InputError("with it Megatron ignores --user-defined-schedule", field="--yaml-cfg")
        late_model.install(_late)
    return parser


def _late():
    return getattr(active(), "late", None)


def set_values(parameter, values) -> None:
    """Call this instead of ``parameter.copy_(values)`` after the constructor of a model and before
    DistributedDataParallel wraps it, because the parameter may have no bytes on the device."""
    late = _late()
    if late is None:
        parameter.data.copy_(values)
    else:
        late.parked.put(parameter, values)


def on_pretrain() -> None:
    """Start of pretrain_gpt.py, before Megatron is imported."""
    _start(early=True)


def _start(early: bool) -> None:
    global started
    from megatron_ext.cpubench import parser_options
    from megatron_ext.megatron import cpu_compat, device_environment, one_line_end

    started = True
    if of_us := any(a.startswith(("--user-defined-schedule", "--delayed-parameter-update")) for a in sys.argv):
        one_line_end.install()
    variables = device_environment.prepare(sys.argv[1:], os.environ)
    atexit.register(require_end)
    text = None
    if not cpu_compat.is_installed():  # run-on-cpu installs it, and imports Megatron
        text = device_environment.said_of_early_import(variables, list(sys.modules))
        if early and of_us and cpu_compat.install():
            parser_options.without_a_gpu()
            text = "torch sees no CUDA device, so this trains on the CPU, as `megatron-ext run-on-cpu` does"
    # The first rank of each node: one may have no GPU, where others have.
    if text is not None and os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        print(f"megatron-ext: {text}", file=sys.stderr, flush=True)


def on_ddp_built(ddp) -> None:
    """End of DistributedDataParallel.__init__."""
    if (run := active()) is not None:
        run.on_ddp_built(ddp)


def on_train_setup(args, model, optimizer, config) -> None:
    """Before the first iteration; everything is built and loaded."""
    if (run := active()) is not None:
        run.on_train_setup(args, model, optimizer, config)


def on_train_end() -> None:
    """Training is over. Parameters are made whole only if saving or evaluation may follow, because gathering all of
    them takes time, and more memory than training."""
    finish(any(getattr(arguments.of_run(), name, True) for name in ("save", "do_valid", "do_test")))


def on_params_updated(optimizer, update_successful: bool) -> None:
    """The distributed optimizer has written its shards of the parameters."""
    if _run is not None:
        _run.on_params_updated(optimizer, update_successful)


def begin_iteration(config, model, num_microbatches: int, forward_only: bool):
    """Start of an iteration of the interleaved schedule; returns the object that its steps call."""
    return IDLE if _run is None else _run.begin_iteration(num_microbatches, forward_only)


def begin_steps(config, model, num_microbatches: int, forward_only: bool):
    """The same for the schedules without interleaving; also returns the step functions."""
    from megatron.core.pipeline_parallel import schedules

    calls = begin_iteration(config, model, num_microbatches, forward_only)
    if calls is IDLE:
        return calls, schedules.forward_step, schedules.backward_step
    forwards, backwards = itertools.count(), itertools.count()

    def forward_step(*args, **kwargs):
        calls.pre_forward(next(forwards), 0)
        return schedules.forward_step(*args, **kwargs)

    def backward_step(*args, **kwargs):
        number = next(backwards)
        calls.pre_backward(number, 0)
        result = schedules.backward_step(*args, **kwargs)
        calls.post_backward(number)
        return result

    return calls, forward_step, backward_step


def params_changed() -> None:
    """Call this after anything but the optimizer has changed parameters (a checkpoint loaded
    during training, for example): host copies are published again before they are used."""
    if _run is not None:
        _run.params_changed()


def unshard_all() -> None:
    """Bring all parameters whole onto the device; collective. Megatron's evaluation and checkpoints
    do this by themselves."""
    if _run is not None:
        _run.unshard_all()


def peak_bytes() -> int:
    """The peak of whole parameters on this rank's device in the last training iteration, in bytes;
    0 without a schedule."""
    return _run.peak_bytes() if _run is not None else 0


def census():
    """Bytes that this rank held at the peak of the last training iteration, by kind, as a
    :class:`megatron_ext.formats.rank_memory.RankMemory`; None without a schedule. It visits all of the
    optimizer's states."""
    return _run.census() if _run is not None else None


def finish(read_later: bool = True) -> None:
    """End of training: writes the trace, ends threads and frees host memory; collective. With ``read_later`` parameters
    are whole when this returns. If they never fit whole, later reads bring one group after the other, and threads and
    host memory stay until the process ends."""
    global _run, ended
    if _run is not None:
        failed = sys.exc_info()[1]
        if failed is not None and not isinstance(failed, InputError):  # else it stays unseen if other ranks do not come
            traceback.print_exception(failed)
        run, _run = _run, None
        if run.finish(read_later):
            _run = run
            atexit.register(_end_reading)
        ended = True


def _end_reading() -> None:
    """Close a run that has ended but was kept open for later reads of its parameters."""
    global _run
    if _run is not None and ended:
        run, _run = _run, None
        run.close()
