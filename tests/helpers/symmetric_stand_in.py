"""In place of torch's calls for symmetric memory: a communicator without thread blocks gathers in memory that all its
ranks have registered, at the same byte on each."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as memory

try:
    from megatron_ext.runtime.routes import symmetric_gather as symmetric
except ImportError:  # an older runtime, which old_code.py judges
    from megatron_ext.runtime import symmetric


class SymmetricStandIn:
    """Patches to enter.

    Attributes:
        registered: by communicator, in the order in which it was registered; of every rank alike.
        gathers: number of the registered memory and first byte of what each gather received and sent, None where it is
            not registered; of every rank alike.
    """

    def __init__(self):
        self.registered: dict[str, list[torch.Tensor]] = {}
        self.gathers: list[list[tuple[int, int] | None]] = []
        self._without_blocks: set[str] = set()
        self._new_group, self._gather = dist.new_group, dist.all_gather_into_tensor

    def patches(self):
        nccl = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2, Options=lambda **_: SimpleNamespace(config=SimpleNamespace()))
        yield mock.patch.object(symmetric.nccl, "version", lambda: (2, 28, 9))
        yield mock.patch.object(torch.version, "cuda", None)
        yield mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True)
        yield mock.patch.object(dist, "new_group", self._make_group)
        yield mock.patch.object(dist, "all_gather_into_tensor", self._gathered)
        yield mock.patch.object(memory, "get_backend", lambda device: "CUDA", create=True)  # torch 2.6 lacks them
        yield mock.patch.object(memory, "set_backend", lambda name: None, create=True)
        yield mock.patch.object(memory, "empty", lambda numel, dtype, device: torch.empty(numel, dtype=dtype))
        yield mock.patch.object(memory, "rendezvous", self._register)

    def _make_group(self, *args, pg_options=None, device_id=None, **kwargs):
        group = self._new_group(*args, **kwargs)
        if pg_options is not None and pg_options.config.cta_policy == 2 and isinstance(group, dist.ProcessGroup):
            self._without_blocks.add(group.group_name)
        if device_id is not None and isinstance(group, dist.ProcessGroup):  # torch makes its communicator at once
            self._gather(torch.zeros(group.size()), torch.zeros(1), group=group)
        return group

    def _register(self, tensor: torch.Tensor, group: str) -> None:
        self.registered.setdefault(group, []).append(tensor)

    def _gathered(self, output, shard, group=None, async_op=False):
        if getattr(group, "group_name", None) in self._without_blocks:
            self.gathers.append([self._offset(tensor, group.group_name) for tensor in (output, shard)])
        return self._gather(output, shard, group=group, async_op=async_op)

    def _offset(self, tensor: torch.Tensor, group: str) -> tuple[int, int] | None:
        for number, known in enumerate(self.registered.get(group, ())):
            begin = tensor.data_ptr() - known.data_ptr()
            if begin >= 0 and begin + tensor.nbytes <= known.nbytes:
                return number, begin
        return None
