"""What the lines inserted into Megatron call. See patches/README.md for when each is called.

Without ``--user-defined-schedule`` (and without a trace) every hook returns at once.
"""

import os

from megatron_ext.megatron.arguments import add_arguments as add_arguments

_run = None
"""The active :class:`megatron_ext.megatron.run.Run`, or None: plain Megatron."""

_looked = False


class _Idle:
    """What a schedule function holds when nothing is scheduled."""

    __slots__ = ()

    def pre_forward(self, virtual_microbatch_id, model_chunk_id):
        """Nothing is scheduled."""

    def pre_backward(self, virtual_microbatch_id, model_chunk_id):
        """Nothing is scheduled."""

    def post_backward(self, virtual_microbatch_id):
        """Nothing is scheduled."""

    def end_iteration(self):
        """Nothing is scheduled."""


IDLE = _Idle()


def configure(schedule=None, trace=None, *, parallel=None):
    """Make a run active: gather by ``schedule`` (a path), write a trace to ``trace`` (a path).

    ``parallel`` (a :class:`megatron_ext.workload.parallel.Parallel`) lets a schedule for other
    sizes be refused at once, before processes have found each other.

    Call before models are built. With neither, Megatron stays plain. Returns the run or None.

    Raises:
        InputError: the schedule cannot be read, is not valid, or is for other parallel sizes.
    """
    global _run, _looked
    _looked = True
    if schedule is None and trace is None:
        return None
    from megatron_ext import files
    from megatron_ext.megatron.run import Run

    if trace is not None and int(os.environ.get("RANK", 0)) == 0:
        files.check_writable(trace)  # before hours of training whose trace would be lost
    _run = Run(schedule, trace, parallel)
    return _run


def active():
    """The active run, or None. A patched pretrain_gpt.py configures it from its options."""
    global _looked
    if not _looked:
        _looked = True
        import sys

        global_vars = sys.modules.get("megatron.training.global_vars")
        args = getattr(global_vars, "_GLOBAL_ARGS", None) if global_vars is not None else None
        if args is None:
            _looked = False
        else:
            _configure_from(args)
    return _run


def _configure_from(args) -> None:
    schedule, parallel = getattr(args, "user_defined_schedule", None), None
    if schedule is not None:
        from megatron_ext.megatron import start
        from megatron_ext.megatron.workload_of_run import parallel_of_megatron

        start.check_start(args)
        parallel = parallel_of_megatron(args)
    run = configure(schedule, getattr(args, "user_defined_schedule_trace", None), parallel=parallel)
    if schedule is not None and run.session.schedule.zero_stage == 3:
        start.refuse_at_zero_stage_3(args)


def on_pretrain() -> None:
    """Start of pretrain_gpt.py, before Megatron is imported."""
    from megatron_ext.megatron import cpu_compat

    cpu_compat.install()


def on_ddp_built(ddp) -> None:
    """End of DistributedDataParallel.__init__."""
    run = active()
    if run is not None:
        run.on_ddp_built(ddp)


def on_train_setup(args, model, optimizer, config) -> None:
    """Before the first iteration; everything is built and loaded."""
    run = active()
    if run is not None:
        run.on_train_setup(args, model, optimizer, config)


def on_train_end() -> None:
    """Training is over; evaluation and saving may follow, and find whole parameters."""
    if _run is not None:
        _run.make_whole()
        finish()


def on_params_updated(optimizer, update_successful: bool) -> None:
    """The distributed optimizer has written its shards of the parameters."""
    if _run is not None:
        _run.on_params_updated(optimizer, update_successful)


def begin_iteration(config, model, num_microbatches: int, forward_only: bool):
    """Start of an iteration of the interleaved schedule; returns what its steps call."""
    return IDLE if _run is None else _run.begin_iteration(num_microbatches, forward_only)


def begin_steps(config, model, num_microbatches: int, forward_only: bool):
    """The same for the schedules without interleaving; also returns the step functions."""
    from megatron.core.pipeline_parallel import schedules

    if _run is None:
        return IDLE, schedules.forward_step, schedules.backward_step
    calls = _run.begin_iteration(num_microbatches, forward_only)
    if calls is IDLE:
        return calls, schedules.forward_step, schedules.backward_step
    counts = [0, 0]

    def forward_step(*args, **kwargs):
        calls.pre_forward(counts[0], 0)
        counts[0] += 1
        return schedules.forward_step(*args, **kwargs)

    def backward_step(*args, **kwargs):
        calls.pre_backward(counts[1], 0)
        result = schedules.backward_step(*args, **kwargs)
        calls.post_backward(counts[1])
        counts[1] += 1
        return result

    return calls, forward_step, backward_step


def params_changed() -> None:
    """Call after parameters were changed by anything but the optimizer (a checkpoint loaded
    during training, for example): copies on the host are published again before they are used."""
    if _run is not None:
        _run.params_changed()


def make_whole() -> None:
    """Bring all parameters whole onto the device; collective. Evaluation and checkpoints of
    Megatron reach this by themselves."""
    if _run is not None:
        _run.make_whole()


def peak_bytes() -> int:
    """Most bytes of whole parameters on this rank's device in the last training iteration;
    0 without a schedule."""
    return _run.peak_bytes() if _run is not None else 0


def finish() -> None:
    """End of training: collective; writes the trace and frees threads and host memory."""
    global _run
    if _run is not None:
        run, _run = _run, None
        run.finish()
