"""Build a model whose parameters never fit whole: each group moves to where it rests as soon as it has its values.

[Note: Building late]
Megatron builds all layers on the device, DistributedDataParallel copies them into one buffer, and :mod:`buckets` copies
them into groups: all parameters are on the device twice. If a schedule's limit has no room for that:
1. The modules of a transformer layer are parked when they are built: their values go to host memory, and a single NaN
   stands in for each parameter. The rest of a GPTModel is parked when it is complete. Random numbers are as usual.
2. DistributedDataParallel gets no buffer of parameters.
3. Each group gets its storage and the parked values. It is freed after its shard is made, which rests where the
   schedule says. Replicas get the values of the first replica.
4. Until training begins, a torch call that uses parameters first gives bytes to their groups and frees the others. Only
   the rank's own part of these groups has its values, and values that are written to this part are kept. So optimizers
   find their values, and checkpoints can be loaded: see [Note: Reads between iterations].
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
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.modules.module import register_module_module_registration_hook

from megatron_ext.megatron.releases import host_optimizer_class
from megatron_ext.runtime import free_host_memory
from megatron_ext.runtime.device import has_cuda
from megatron_ext.runtime.group import FreedGroup, WholeBytes
from megatron_ext.runtime.param_reads import ParamReads
from megatron_ext.runtime.parked import Parked
from megatron_ext.schedule.user_defined_schedule import Schedule

HybridDeviceOptimizer = host_optimizer_class()


class LateModel:
    """The model of one rank that is built late, until training begins. Raises InputError if a node's parameters do not
    fit into host memory.

    Attributes:
        parked: the values of parameters that are in no group yet.
        groups: the groups that have been laid out, by index.
        residency: counts their whole copies.
        reads: notices uses of their parameters.
        current: returns the LateModel of the run; None if the model is not built late, or is already built.
    """

    current: Callable[[], "LateModel | None"] = staticmethod(lambda: None)

    def __init__(self, schedule: Schedule, pp_rank: int):
        whole = sum(group.bytes for group in schedule.groups if group.pp_rank == pp_rank)
        ranks = min(schedule.parallel.node_size, schedule.parallel.world_size)
        free_host_memory.require(
            ranks * whole, f"the parameters of {ranks} ranks, which never fit whole onto their devices,"
        )
        self.schedule, self.groups, self.residency = schedule, {}, WholeBytes()
        self.parked = Parked("cuda" if has_cuda() else "cpu")
        self._of_storage: dict[int, FreedGroup] = {}
        self._held: list[FreedGroup] = []  # the groups that have bytes
        self.reads = ParamReads((), self._hold, self._missing)

    # While modules are built.

    def build(self, init: Callable, model: GPTModel, *args, **kwargs) -> None:
        """Run the constructor ``init`` of ``model``, and park its parameters."""
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
        # Parameters of another dtype are not parked: Float16Module reads and converts them.
        self.parked.park(parameter for parameter in module.parameters() if parameter.dtype == dtype)

    # While chunks are wrapped.

    def hold(self, index: int, whole: torch.Tensor, process_group, instances=None) -> None:
        """Keep this rank's shard of group ``index``, whose values are in ``whole``. ``instances``: the process group of
        the ranks that hold the same shard in other optimizer instances, if there are any."""
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
        """The group of whose whole copy ``tensor`` is a part, or None."""
        return self._of_storage.get(tensor.untyped_storage()._cdata)

    def _missing(self, used: Collection[int]) -> bool:
        return any(self._of_storage[storage] not in self._held for storage in used)

    def _hold(self, place: str, used: Collection[int]) -> None:
        """Give bytes to the groups in the storages ``used``, and free all others."""
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
        """Free all groups, because training begins."""
        self.reads.close()
        with torch.no_grad():
            self._hold("", ())

    def rest_of(self, index: int) -> torch.Tensor:
        """The tensor in which the optimizers find their part of group ``index``."""
        group = self.groups[index]
        return group.whole if group.on_host else group.shard

    def point_at_shards(self, views: Iterable[torch.Tensor]) -> None:
        """Turn optimizers' views of whole copies into views of shards, except shards that rest in host memory: until
        training begins, Megatron checks on which device the views are."""
        with self.reads.suspended():
            for view in views:
                group = self.group_of(view)
                if group is not None and not group.on_host:
                    start = view.storage_offset() - group.shard_start
                    view.data = group.shard[start : start + view.numel()]


def _own_part(group: FreedGroup) -> torch.Tensor:
    """This rank's part of the whole copy."""
    return group.whole.narrow(0, group.shard_start, group.shard.numel())


def install(current: Callable[[], LateModel | None]) -> None:
    """Let Megatron build late while ``current()`` is not None; replaces the ``current`` of an earlier call."""
    LateModel.current = staticmethod(current)
    if hasattr(GPTModel.__init__, "of_megatron"):
        return
    init, make_groups = GPTModel.__init__, DistributedOptimizer._build_model_and_main_param_groups
    make_states = HybridDeviceOptimizer.dummy_step

    @functools.wraps(init)
    def build(model, *args, **kwargs):
        late = LateModel.current() if type(model) is GPTModel else None  # derived classes may read parameters
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
    """``load`` of dist_checkpointing, changed to read parameters that have no bytes into host memory."""

    def load_to_host(sharded_state_dict, *args, **kwargs):
        late = LateModel.current()
        for entry in nested_values(sharded_state_dict) if late is not None else ():
            data = getattr(entry, "data", None)
            if isinstance(data, torch.Tensor) and late is not None and late.group_of(data) is not None:
                entry.data = torch.empty(data.shape, dtype=data.dtype, device="cpu")
        return load(sharded_state_dict, *args, **kwargs)

    return load_to_host


def make_states_only(hybrid, without: Container[torch.Tensor] = ()) -> None:
    """Replaces Megatron's ``dummy_step``: make the states of a host optimizer by a step with zero gradients, except for
    copies in ``without``. Parameters are not written, because there may be no memory for them. As many random numbers
    are drawn as in Megatron, because dropout continues from them if a checkpoint's random state is not loaded."""
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
