"""A run that is scheduled, traced, or both: what the hooks talk to."""

import os

import torch.distributed as dist

from megatron_ext.megatron import stock_trace
from megatron_ext.megatron.hooks import IDLE
from megatron_ext.megatron.session import Session
from megatron_ext.runtime.device import has_cuda
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule import match
from megatron_ext.schedule import trace as trace_file


class Run:
    """Owns the session (if a schedule is given) and the recorder (if a trace is wanted)."""

    def __init__(self, schedule, trace, parallel=None):
        self.trace_path = trace
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        self.recorder = Recorder(rank, on_device=has_cuda()) if trace is not None else None
        self.session = Session(schedule, self.recorder) if schedule is not None else None
        if self.session is not None and parallel is not None:
            match.match_parallel(self.session.schedule, parallel, file=schedule)
        if self.recorder is not None:
            stock_trace.record_steps(self.recorder)

    def on_ddp_built(self, ddp) -> None:
        if self.session is not None:
            self.session.on_ddp_built(ddp)
        if self.recorder is not None and (self.session is None or self.session.stock_gather):
            stock_trace.record_gathers(ddp, self.recorder)

    def on_train_setup(self, args, model, optimizer, config) -> None:
        if self.session is not None:
            from megatron_ext.megatron.workload_of_run import workload_of_run

            self.session.finish_setup(workload_of_run(args), optimizer, getattr(args, "user_defined_schedule_nvme_path", None))
        if self.recorder is not None:
            stock_trace.record_optimizer(optimizer, self.recorder)

    def on_params_updated(self, optimizer, update_successful: bool) -> None:
        if self.session is not None and self.session.executor is not None and update_successful:
            self.session.on_params_updated(optimizer)

    def begin_iteration(self, num_microbatches: int, forward_only: bool):
        """Called by Megatron's schedules; returns the object its steps call."""
        executor = self.session.executor if self.session is not None else None
        if self.recorder is not None and not forward_only:
            self.recorder.iteration += 1
        if executor is None:
            if self.session is not None and not self.session.stock_gather and not forward_only:
                raise ScheduleError("training begins before megatron_ext.megatron.hooks.on_train_setup was called")
            return IDLE
        if forward_only:
            executor.make_whole()
            return IDLE
        executor.expect(num_microbatches)
        executor.begin_iteration()
        return executor

    def params_changed(self) -> None:
        if self.session is not None and self.session.executor is not None:
            self.session.executor.params_changed()

    def peak_bytes(self) -> int:
        """Most bytes of whole parameters on this rank's device in the last iteration; 0 where
        nothing is scheduled."""
        executor = self.session.executor if self.session is not None else None
        return executor.peak_bytes if executor is not None else 0

    def make_whole(self) -> None:
        if self.session is not None:
            self.session.make_whole()

    def finish(self) -> None:
        if self.session is not None:
            self.session.close()
        if self.recorder is not None:
            everybody = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, self.recorder.events())
            if dist.get_rank() == 0:
                events = [event for events in everybody for event in events]
                trace_file.save(self.trace_path, events, about={"kind": "measured", "scheduled": self.session is not None})
