"""Building a model whose parameters never fit whole: each group goes to where it rests as soon as it has its values.

[Note: Building late]
Megatron builds all layers on the device, DistributedDataParallel copies them into one buffer, and :mod:`buckets` copies
them into groups: twice all parameters at once. Where a schedule's limit has no room for them:
1. What a transformer layer is made of is parked when it is built: its values go to host memory, a single NaN stands in
   for each parameter. So does the rest of a GPTModel when it is complete. Random numbers are drawn as ever.
2. DistributedDataParallel gets no buffer of parameters.
3. Each group gets its storage, the parked values, and is freed behind its shard, which rests where the schedule says.
   Replicas get the values of the first of them.
4. Until training begins every call of torch's that uses parameters has their groups given bytes, with the rank's own
   part in its place, and the others freed; what was written to that part stays. So optimizers find their values, and
   checkpoints are loaded: see [Note: Reads between iterations].
"""

# Functions of Megatron are replaced here on purpose.
# pyright: reportAttributeAccessIssue=false

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.modules.module import register_module_module_registration_hook

from megatron_ext.runtime import free_host_memory
from megatron_ext.runtime.device import has_cuda
from megatron_ext.runtime.group import FreedGroup, Residency
from megatron_ext.runtime.param_reads import ParamReads
from megatron_ext.runtime.parked import Parked
from megatron_ext.schedule.user_defined_schedule import Schedule


class LateModel:
    """Of one rank, until training begins. Raises InputError: host memory is short of a node's parameters.

    Attributes:
        groups: those that have been laid out, by index.
        residency: counts their whole copies.
        reads: notices their uses.
        current: gives the one of the run; None: the model is not built late, or it is built.
    """

    current: Callable[[], "LateModel | None"] = staticmethod(lambda: None)

    def __init__(self, schedule: Schedule, pp_rank: int):
        whole = sum(group.bytes for group in schedule.groups if group.pp_rank == pp_rank)
        ranks = min(schedule.parallel.node_size, schedule.parallel.world_size)
        free_host_memory.require(
            ranks * whole, f"the parameters of {ranks} ranks, which never fit whole onto their devices,"
        )
        self.schedule, self.groups, self.residency = schedule, {}, Residency()
        self._parked = Parked("cuda" if has_cuda() else "cpu")
        self._of_storage: dict[int, FreedGroup] = {}
        self._held: list[FreedGroup] = []  # have bytes
        self.reads = ParamReads((), self._hold, self._missing)

    # While modules are built.

    def build(self, init: Callable, model: GPTModel, *args, **kwargs) -> None:
        """Run the constructor of ``model``."""
        handle = register_module_module_registration_hook(self._registered)
        try:
            init(model, *args, **kwargs)
        finally:
            handle.remove()
        self._park(model, model.config.params_dtype)

    def _registered(self, parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        if isinstance(parent, TransformerLayer) and module is not None:
            self._park(module, parent.config.params_dtype)

    def _park(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        # One of another dtype is converted by Float16Module, which reads it.
        self._parked.park(parameter for parameter in module.parameters() if parameter.dtype == dtype)

    # While chunks are wrapped.

    def set_values(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Give ``parameter``, of a model that is not wrapped yet, other values."""
        self._parked.put(parameter, values)

    def value_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The values of ``parameter``, wherever they are; they are asked for once."""
        return self._parked.take(parameter)

    def hold(self, index: int, whole: torch.Tensor, process_group, instances=None) -> None:
        """``whole`` has the values of group ``index``: keep this rank's shard. ``instances``: the process group of the
        ranks that hold it in other instances, where there are any."""
        for group in (instances, process_group):
            if group is not None and group.size() > 1:
                dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
        entry = self.schedule.groups[index]
        group = FreedGroup(
            *(index, f"chunk {entry.model_chunk_id}", whole, process_group.rank(), process_group.size()),
            *(self.residency, entry.shard_rests == "host"),
        )
        group.drop()
        self.groups[index], self._of_storage[whole.untyped_storage()._cdata] = group, group
        self.reads.storages = frozenset(self._of_storage)
        self.reads.open()

    # While optimizers are built, and checkpoints are loaded.

    def group_of(self, tensor: torch.Tensor) -> FreedGroup | None:
        """The group whose whole copy ``tensor`` is a part of."""
        return self._of_storage.get(tensor.untyped_storage()._cdata)

    def _missing(self, used: Collection[int]) -> bool:
        return any(self._of_storage[storage] not in self._held for storage in used)

    def _hold(self, place: str, used: Collection[int]) -> None:
        """Let the groups in the storages ``used`` have bytes, and no others."""
        wanted = [self._of_storage[storage] for storage in used]
        for group in self._held:
            if group not in wanted:
                group.shard.copy_(_own_part(group))
                group.resize(0)
        for group in wanted:
            if group not in self._held:
                group.resize(group.bytes)
                _own_part(group).copy_(group.shard)
        self._held = wanted

    def close(self) -> None:
        """Training begins."""
        self.reads.close()
        with torch.no_grad():
            self._hold("", ())

    def rest_of(self, index: int) -> torch.Tensor:
        """Where the optimizers find their part of group ``index``."""
        group = self.groups[index]
        return group.whole if group.on_host else group.shard

    def point_at_shards(self, views: Iterable[torch.Tensor]) -> None:
        """Optimizers' views of whole copies become views of shards, but for those that rest in host memory: Megatron
        looks where they lie until training begins."""
        with self.reads.suspended():
            for view in views:
                group = self.group_of(view)
                if group is not None and not group.on_host:
                    start = view.storage_offset() - group.shard_start
                    view.data = group.shard[start : start + view.numel()]


def _own_part(group: FreedGroup) -> torch.Tensor:
    """Of the whole copy, this rank's."""
    return group.whole.narrow(0, group.shard_start, group.shard.numel())


def install(current: Callable[[], LateModel | None]) -> None:
    """Let Megatron build late while ``current()`` gives something; replaces the ``current`` of an earlier call."""
    LateModel.current = staticmethod(current)
    if hasattr(GPTModel.__init__, "of_megatron"):
        return
    init, make_groups = GPTModel.__init__, DistributedOptimizer._build_model_and_main_param_groups
    make_states = HybridDeviceOptimizer.dummy_step

    @functools.wraps(init)
    def build(model, *args, **kwargs):
        late = LateModel.current() if type(model) is GPTModel else None  # who derives from it may read parameters
        if late is None:
            init(model, *args, **kwargs)
        else:
            late.build(init, model, *args, **kwargs)

    def make_of_shards(cls, *given):
        made = make_groups(*given)
        _, _, *shards, _ = made
        late = LateModel.current()
        if late is not None:
            late.point_at_shards(view for groups in shards for group in groups for view in group)
        return made

    vars(build)["of_megatron"] = init
    GPTModel.__init__ = build
    DistributedOptimizer._build_model_and_main_param_groups = classmethod(make_of_shards)
    HybridDeviceOptimizer.dummy_step = lambda hybrid: (
        make_states(hybrid) if LateModel.current() is None else make_states_only(hybrid)
    )
    dist_checkpointing.load = _without_freed(dist_checkpointing.load)


def _without_freed(load: Callable) -> Callable:
    """``load`` of dist_checkpointing, which reads parameters without bytes into host memory."""

    def load_to_host(sharded_state_dict, *args, **kwargs):
        late = LateModel.current()
        for entry in nested_values(sharded_state_dict) if late is not None else ():
            data = getattr(entry, "data", None)
            if isinstance(data, torch.Tensor) and late is not None and late.group_of(data) is not None:
                entry.data = torch.empty(data.shape, dtype=data.dtype, device="cpu")
        return load(sharded_state_dict, *args, **kwargs)

    return load_to_host


def make_states_only(hybrid, without: Container[torch.Tensor] = ()) -> None:
    """In place of Megatron's ``dummy_step``: make the states of a host optimizer by a step of gradients 0, but those of
    copies that are ``without``. No new parameters, for which there may be no place. As many random numbers are drawn as
    Megatron draws: where a checkpoint's random state is not loaded, dropout draws behind them."""
    for parameter in (parameter for group in hybrid.param_groups for parameter in group["params"]):
        torch.randn(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    for optimizer in hybrid.sub_optimizers:
        hooks, optimizer._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks, OrderedDict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.grad = None if parameter in without else torch.zeros_like(parameter)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        optimizer._optimizer_step_post_hooks = hooks
    hybrid._sync_sub_optimizers_state_to_hdo()
