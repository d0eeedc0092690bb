"""The state of a chunk whose groups come and go: refused while groups are freed, or given one group after the other.

[Note: Reading in turn]
If all groups fit whole at the same time, Megatron's ``force_sync`` gathers them, and all later reads find whole
parameters, including ``state_dict`` and a deep copy. Otherwise (in_turn.py) a read of a parameter between two
iterations gathers its group, and no other group stays whole: see [Note: Reads between iterations]. A tensor that is
read later than it is taken must then be a copy in host memory: ``state_dict`` returns such copies, and
``dist_checkpointing.save`` writes them. All of these are collectives of the data-parallel ranks.
"""

import copy
from collections.abc import Callable, Iterable

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import free_host_memory
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.group import GroupState, RankGroup
from megatron_ext.runtime.param_reads import place_of_use


class _Whole:
    """Checks that groups are whole before a chunk gives its state, or is deep-copied. The copy has parameters of its
    own, which are never freed."""

    def __init__(self, groups: list[RankGroup], sharded_state_dict, reader: Executor | None = None):
        self.groups, self.inner, self.reader = groups, sharded_state_dict, reader

    def __deepcopy__(self, memo) -> "_Whole":
        # A module's hooks are copied before its children, so no parameter, whose memory may be freed, has been read
        # yet.
        self.check()
        return _Whole([], copy.deepcopy(self.inner, memo))

    def check(self, *state_dict_arguments) -> None:
        if self.reader is not None and any(group.state is not GroupState.WHOLE for group in self.groups):
            self.reader.read(())  # raises within an iteration
            return
        for group in self.groups:
            group.whole.detach()  # between two iterations such a use gathers all groups
            if group.state is not GroupState.WHOLE:
                raise InputError(
                    f"{place_of_use()} saves or copies parameters while {group} is {group.state.value}: do this on all "
                    "ranks between two iterations; for a copy after training, call "
                    "megatron_ext.megatron.hooks.finish() before the end of Megatron's train"
                )

    def fill(self, state_dict: dict) -> None:
        """Replace parameters in ``state_dict`` by copies in host memory."""
        if self.reader is not None:
            names = [name for name, value in state_dict.items() if isinstance(value, torch.Tensor)]
            state_dict.update(zip(names, host_copies(self.reader, [state_dict[name] for name in names]), strict=True))

    def sharded_state_dict(self, *args, **kwargs):
        self.check()
        return self.inner(*args, **kwargs)


def guard_state(module: torch.nn.Module, groups: list[RankGroup], reader: Executor | None = None) -> None:
    """Let ``state_dict`` and deep copies of a chunk find its groups whole between two iterations, and fail at other
    times while a group is freed: a file could be written but never loaded, and a copy would read freed memory. With
    ``reader``, which brings groups in turn, ``state_dict`` returns copies."""
    whole = _Whole(groups, getattr(module, "sharded_state_dict", None), reader)
    module.register_state_dict_pre_hook(whole.check)
    module.register_state_dict_post_hook(lambda module, state_dict, *_: whole.fill(state_dict))
    if whole.inner is not None:
        vars(module)["sharded_state_dict"] = whole.sharded_state_dict


def host_copies(reader: Executor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, with copies in host memory in place of those that are parts of groups; collective.

    Raises:
        InputError: the copies do not fit into host memory.
    """
    assert reader.in_turn is not None
    found, places = list(tensors), {}
    for place, tensor in enumerate(tensors):
        index = reader.in_turn.group_of(tensor)
        if index is not None:
            places.setdefault(index, []).append(place)
    need = sum(tensors[place].nbytes for own in places.values() for place in own)
    free_host_memory.require(need, "copies of parameters, which do not all fit onto the device,")
    for index in sorted(places):
        reader.read((index,))
        for place in places[index]:
            found[place] = tensors[place].detach().to("cpu", copy=True)
    if places:
        reader.read(())
    return found


def save_copies(reader: Executor) -> Callable[[], None]:
    """Let Megatron's checkpoint writer write copies of parameters; returns a function that ends this."""
    save = dist_checkpointing.save

    def of_copies(sharded_state_dict, *args, **kwargs):
        entries: Iterable = nested_values(sharded_state_dict)
        held = [entry for entry in entries if isinstance(getattr(entry, "data", None), torch.Tensor)]
        for entry, value in zip(held, host_copies(reader, [entry.data for entry in held]), strict=True):
            entry.data = value
        return save(sharded_state_dict, *args, **kwargs)

    dist_checkpointing.save = of_copies
    return lambda: setattr(dist_checkpointing, "save", save)
