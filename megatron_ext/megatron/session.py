"""One training run under a user_defined_schedule: from its options to a running executor.

[Note: When things happen]
1. a DDP chunk is built: its buckets are laid out by the schedule's groups;
2. the optimizer takes its views of those buckets (Megatron);
3. ``finish_setup``: the real model is compared with the schedule, all ranks agree or all
   refuse, routes are prepared, the program is compiled, host copies are published;
4. every iteration: hooks walk the program.
An error in 1 is kept until 3: a single rank that gave up earlier would leave the others
waiting for it in a collective.
"""

import inspect
import os
import sys

import msgspec
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext import files
from megatron_ext.errors import InputError
from megatron_ext.megatron import buckets
from megatron_ext.megatron.describe import describe_chunk
from megatron_ext.megatron.prepare import prepare
from megatron_ext.megatron.recompute import check_recompute
from megatron_ext.megatron.start import elsewhere
from megatron_ext.runtime import faults
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.nvme_pool import ReadSettings
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule import match, validate
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.workload.model import Workload

STOCK_GATHER = "MEGATRON_EXT_STOCK_GATHER"
"""Set to 1: lay buckets out by the schedule but gather as Megatron does. The reference that a
scheduled run must equal to the last bit."""


class Session:
    """State of a scheduled run on this rank.

    Args:
        path: the schedule file.
        recorder: where to record what ran when, or None.

    Raises:
        InputError: the file cannot be read or is not a valid schedule.
    """

    def __init__(self, path, recorder: Recorder | None = None):
        self.path, self.recorder = path, recorder
        self.sha256 = files.sha256(path)
        self.schedule = validate.load(path)
        self.stock_gather = os.environ.get(STOCK_GATHER) == "1"
        self.faults = faults.from_environment()
        self.executor: Executor | None = None
        self._ddps: list = []
        self._bucket_groups: dict[int, object] = {}
        self._error: str | None = None
        self._optimizers_pending: set[int] = set()
        self._optimizers: list = []

    # While the model is built.

    def on_ddp_built(self, ddp) -> None:
        chunk = len(self._ddps)
        self._ddps.append(ddp)
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        groups = {
            index: group for index, group in enumerate(self.schedule.groups)
            if (group.pp_rank, group.model_chunk_id) == (pp_rank, chunk)
        }  # fmt: skip
        cls = buckets.upstream._ParamAndGradBucketGroup if self.stock_gather else buckets.ScheduledBucketGroup
        try:
            _refuse_unsupported(ddp)
            self._bucket_groups.update(buckets.lay_out(ddp, groups, file=self.path, bucket_group_class=cls))
        except InputError as error:
            self._error = self._error or str(error)
            return
        if not self.stock_gather:
            _replace_pre_hooks(ddp, self)

    # Once, before the first step.

    def finish_setup(self, workload_of_run, optimizer, nvme_path=None) -> None:
        """Agree over all ranks, then prepare everything.

        Args:
            workload_of_run: a Workload with this run's parallel sizes; its chunks are replaced by
                what all ranks really hold, its zero stage by the schedule's.
            optimizer: Megatron's optimizer of the run.
            nvme_path: directory for NVMe copies, or None.

        Raises:
            InputError: on every rank, with the same text.
        """
        if not self._ddps:
            self._error = "no model chunk passed the hook in DistributedDataParallel: is this Megatron patched?"
        error = self._error
        chunks = self._gather_chunks()
        if error is None:
            try:
                self._check_copies(nvme_path)
                workload = msgspec.structs.replace(_with_chunks(workload_of_run, chunks), zero_stage=self.schedule.zero_stage)
                match.match(self.schedule, workload, file=self.path)
                check_recompute(self.schedule, workload, self._ddps[0].config, file=self.path)
            except InputError as refused:
                error = str(refused)
        agree(error, ("schedule sha256", self.sha256), file=self.path)
        if self.stock_gather:
            return
        self._optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        error = None
        try:
            self.executor = prepare(self.schedule, self._ddps, self._bucket_groups, self._optimizers, self.faults, self.recorder, nvme_path)
        except InputError as refused:
            error = str(refused)
        except (OSError, RuntimeError) as failed:  # of one rank alone: memory that cannot be pinned, for example
            error = f"rank {dist.get_rank()} cannot prepare for {self.path}: {failed}".splitlines()[0]
        agree(error, ("schedule sha256", self.sha256), file=self.path)
        if dist.get_rank() == 0 and self.schedule.publish:
            need, limit = max(pinned_host_bytes(self.schedule)), self.schedule.limits.pinned_host_bytes
            allowed = "no limit" if limit is None else f"limit {limit / 2**20:.1f} MiB"
            print(f"{self.path}: host copies and staging slots take up to {need / 2**20:.1f} MiB a node ({allowed})", file=sys.stderr, flush=True)
        for bucket_group in self._bucket_groups.values():
            bucket_group.executor = self.executor
        warning = elsewhere(self.schedule, self.path) if dist.get_rank() == 0 else None
        if warning is not None:
            print(warning, file=sys.stderr, flush=True)
        # The initial parameters are whole everywhere; publishing them lets the first
        # iteration run like every other.
        self.executor.params_updated()
        if self.schedule.zero_stage == 3:
            self.executor.make_whole()  # Megatron may hash its weights before the first iteration

    def _check_copies(self, nvme_path) -> None:
        """Refuse copies that this run has no place for."""
        schedule = self.schedule
        if any("nvme" in entry.to for entry in schedule.publish) and nvme_path is None:
            raise InputError("the schedule publishes to nvme; say where", file=self.path, field="--user-defined-schedule-nvme-path", value=None)
        if schedule.publish:
            ReadSettings.of(schedule.metadata.options.get("nvme", {}), file=self.path)

    def _gather_chunks(self):
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        own = [describe_chunk(ddp, pp_rank, index) for index, ddp in enumerate(self._ddps)]
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, own)
        return [chunk for chunks in everybody for chunk in chunks]

    # Every iteration.

    def on_params_updated(self, optimizer) -> None:
        """One of the run's optimizers has written new shards; publish after the last one."""
        self._optimizers_pending.add(id(optimizer))
        if len(self._optimizers_pending) < len(self._optimizers):
            return
        self._optimizers_pending.clear()
        self.executor.params_updated()

    def make_whole(self) -> None:
        if self.executor is not None:
            self.executor.make_whole()

    def close(self) -> None:
        """Leave all parameters whole, and end threads and mappings; collective."""
        if self.executor is not None:
            self.executor.make_whole()
            self.executor.close()
            self.executor = None
            for bucket_group in self._bucket_groups.values():
                bucket_group.executor = None


def agree(error: str | None, fact: tuple[str, str], *, file) -> None:
    """Collective: go on only if no rank has an error and all hold the same fact.

    Raises:
        InputError: on every rank, with the text of the lowest rank that has one.
    """
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (error, fact[1]))
    for rank, (message, _) in enumerate(everybody):
        if message is not None:
            raise InputError(message)
    for rank, (_, value) in enumerate(everybody):
        if value != everybody[0][1]:
            raise InputError(f"rank {rank} and rank 0 read different files", file=file, field=fact[0], value=value[:12])


def _with_chunks(workload: Workload, chunks) -> Workload:
    by_stage = {(chunk.model_chunk_id, chunk.pp_rank): chunk for chunk in chunks}
    return msgspec.structs.replace(workload, chunks=tuple(by_stage[key] for key in sorted(by_stage)))


def _refuse_unsupported(ddp) -> None:
    """Features that change what a bucket is or who gathers it."""
    config = ddp.ddp_config
    refused = {
        "use_megatron_fsdp": False, "nccl_ub": False, "fp8_param_gather": False,
        "reuse_grad_buf_for_mxfp8_param_ag": False, "num_distributed_optimizer_instances": 1,
    }  # fmt: skip
    for name, allowed in refused.items():
        value = getattr(config, name, allowed)
        if value != allowed:
            raise InputError("cannot be combined with --user-defined-schedule", field="--" + name.replace("_", "-"), value=value)
    if not config.use_distributed_optimizer:
        raise InputError("--user-defined-schedule needs --use-distributed-optimizer", field="--use-distributed-optimizer", value=False)
    if not config.overlap_param_gather:
        # By it, Megatron asks for whole parameters before it evaluates, saves and hashes.
        raise InputError("--user-defined-schedule needs --overlap-param-gather", field="--overlap-param-gather", value=False)


def _replace_pre_hooks(ddp, session: Session) -> None:
    """Take Megatron's module pre-hooks off a chunk: the program waits for groups instead.

    Callers that switch the hooks off (evaluation, checkpoints) mean "all parameters whole".
    """
    if ddp.use_forward_hook:
        # 0.10 has no param_sync and always synchronises, which our bucket groups ignore so far.
        accepted = inspect.signature(ddp.disable_forward_pre_hook).parameters
        ddp.disable_forward_pre_hook(**({"param_sync": False} if "param_sync" in accepted else {}))

    def enable() -> None:
        """The program is always on."""

    def disable(param_sync: bool = True) -> None:
        if param_sync:
            session.make_whole()

    ddp.enable_forward_pre_hook, ddp.disable_forward_pre_hook = enable, disable
