"""Optimizer states in checkpoints: shards of a bucket that hold no parameter, and formats that gather all states.

[Note: A shard that is padding alone]
A group is a bucket of its own, and a bucket is padded to a multiple of lcm(DP, 128) elements. If a group is one bias of
64 elements, the second of two ranks holds only padding. Megatron's ``dp_reshardable`` format, the default of
``--ckpt-format torch_dist``, asserts that every rank has a parameter in every bucket ("empty bucket
encountered"), although what it writes of a bucket ends where the parameters end. Megatron's own buckets are never that
small.

Here such a shard gets an entry without tensors, of the kind that Megatron uses for padding between two parameters.
After the assertion the entry is removed again, and buckets are stored in a dictionary by number instead of in a list:
when states are loaded, Megatron merges lists of tensors and of other objects only if both have equally many items. The
files are the same.
Source: Megatron-LM ``distrib_optimizer.py``, ``sharded_param_state_dp_reshardable``; ``dict_utils.py``, ``merge``.

[Note: States that are not loaded in place]
With this format and with ``--ckpt-format torch``, Megatron sets the loaded values as states of its host optimizer, but
does not copy them to the parameters that the host steps. These parameters are right if the states were read in place.
They stay those of the initial model with local checkpoints, with format torch, and if ranks exchange what they have
read (``--ckpt-fully-parallel-load`` with several instances of the optimizer); training then continues from them without
a warning. Here the loaded values are copied, as Megatron does for its other formats. So a run by a schedule and its
reference are right, while a run without a schedule is not.
With format torch, Megatron also makes the states after the model was loaded, by a step with random gradients from the
initial model. This step overwrites the loaded parameters, so they are written again here.
The number of steps, by which torch's AdamW corrects its bias, is wrong too. With ``torch_dist`` Megatron overwrites the
loaded number with that of the initial states, 1. With format torch, without Transformer Engine or Apex, it gives all
parameters one count, which each of them advances. The loaded number is still in the parameter groups, and here it is
set again for each parameter.
Source: Megatron-LM ``distrib_optimizer.py``, ``_set_main_param_and_optimizer_states``, core_v0.16 to core_v0.19.

[Note: States of padded buckets]
For ``--dist-ckpt-optim-fully-reshardable`` Megatron gathers the states of a buffer without the padding after each
bucket, but then reads the states of a parameter at its place in the buffer with padding. After the first padded bucket
it writes the states of other elements, and at the end of the buffer it warns of data corruption. The groups of a
schedule are buckets of their own, most of them padded. Here Megatron is given the places of parameters without padding.
Source: Megatron-LM ``distrib_optimizer.py``, ``sharded_param_state_fully_reshardable``, core_v0.15 to main.

[Note: Formats that gather all states]
``--dist-ckpt-optim-fully-reshardable`` and ``--ckpt-format torch`` gather the states of all data-parallel ranks in host
memory, when they save and when they load. If states rest on a drive because they do not fit, this would end the
process, so it is refused, with the number of missing bytes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_ext.formats.errors import option_error
from megatron_ext.megatron.releases import has_all
from megatron_ext.runtime import free_host_memory

GATHERED = ("param", "exp_avg", "exp_avg_sq")
"""Names of the fp32 tensors that Megatron gathers for every parameter."""

OTHER_GROUPS = (
    "the checkpoint stores optimizer states by bucket, and this schedule has other buckets: load it as it was saved "
    "(same schedule, or none), and save it once with --dist-ckpt-optim-fully-reshardable; or add --no-load-optim"
)


def _replace(name: str, ours: Callable[[Callable], Callable], owner: object = DistributedOptimizer) -> None:
    """Replace the method ``name`` of distributed optimizers, or of another ``owner``, by ``ours(method)``, if it exists
    and was not replaced before."""
    if has_all(owner, name) and not hasattr(method := getattr(owner, name), "of_megatron"):
        replaced = ours(method)
        vars(replaced)["of_megatron"] = method
        setattr(owner, name, replaced)


def install() -> None:
    """Let distributed optimizers write and load states if a rank's shard of a bucket holds no parameter, and write
    fully reshardable states from their right places. States of other groups are refused."""
    _replace("sharded_param_state_fully_reshardable", _without_padding)
    _replace("load", _of_these_groups(), dist_checkpointing)
    _replace("load_parameter_state_from_dp_zero", lambda load: _of_these_groups()(_then(_write_model)(load)))
    _replace("get_parameter_state_dp_reshardable", _then(fill_empty_shards))
    _replace("sharded_param_state_dp_reshardable", _then(number_shards))
    _replace("load_parameter_state_from_dp_reshardable", _with_empty)


def _then(change: Callable) -> Callable:
    return lambda take: lambda optimizer, *args, **kwargs: change(optimizer, take(optimizer, *args, **kwargs))


@contextmanager
def _of_these_groups() -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # torch's CheckpointException, which all ranks raise, is not an Exception
        if ".bucket_idx_" in str(error) or "unpadded elements" in str(error):
            raise option_error("load", f"{OTHER_GROUPS} ({str(error).splitlines()[0][:200]})") from None
        raise


def _with_empty(load):
    def with_empty(optimizer, state: dict):
        for number, ranges in enumerate(optimizer.gbuf_ranges):
            for dtype, buckets in ranges.items():
                shards = state.setdefault(number, {}).setdefault(dtype, {})
                if isinstance(shards, dict):
                    shards.update({index: () for index in range(len(buckets)) if index not in shards})
        return load(optimizer, state)

    return _of_these_groups()(_then(_take_over)(with_empty))


def _take_over(optimizer, loaded) -> None:
    """Copy what was loaded as states of the host optimizer to the parameters that the host steps."""
    for group in (inner := optimizer.optimizer).param_groups:
        for own in (inner.state.get(parameter, {}) for parameter in group["params"]):
            if "step" in own and "step" in group:
                own["step"] = torch.full_like(own["step"], group["step"])
    getattr(inner, "_sync_hdo_state_to_sub_optimizers", lambda: None)()


@torch.no_grad()
def _write_model(optimizer, loaded) -> None:
    """Copy the loaded parameters also to the model."""
    _take_over(optimizer, loaded)
    for parameter, stepped in getattr(optimizer.optimizer, "param_to_inner_param", {}).items():
        parameter.copy_(stepped)


def _without_padding(write):
    def without_padding(optimizer, *args, **kwargs):
        with ExitStack() as stack:
            for buffer in optimizer.buffers:
                stack.enter_context(mock.patch.object(buffer, "param_index_map", _places_without_padding(buffer)))
            return write(optimizer, *args, **kwargs)

    return without_padding


def _places_without_padding(buffer) -> dict:
    """For each parameter, its ``(start, end, bucket)`` in elements of a buffer whose buckets have no padding."""
    padding, end = [], 0
    for (begin, _), bucket in zip(buffer.bucket_indices, buffer.buckets, strict=True):
        padding.append(begin - end)
        end += bucket.numel_unpadded
    places = buffer.param_index_map.items()
    return {parameter: (start - padding[at], end - padding[at], at) for parameter, (start, end, at) in places}


def fill_empty_shards(optimizer, state: dict) -> dict:
    """Give every shard without parameters in ``state`` an entry of padding.

    Args:
        optimizer: Megatron's DistributedOptimizer.
        state: what its ``get_parameter_state_dp_reshardable`` returned; changed in place.
    """
    rank, ranks = optimizer.data_parallel_group.rank(), optimizer.data_parallel_group.size()
    for number, buffer in enumerate(optimizer.buffers):
        for shards in state[number].values():
            like = next((shard[0] for shard in shards if shard), {})
            for shard, bucket in zip(shards, buffer.buckets, strict=True):
                if not shard:
                    numel = bucket.grad_data.numel() // ranks
                    shard.append(_padding(like, numel, between=rank * numel < bucket.numel_unpadded))
    return state


def _padding(like: dict, numel: int, between: bool) -> dict:
    """An entry of padding of ``numel`` elements. ``between`` parameters it has tensors like ``like``; these are
    written."""
    entry = {"gbuf_local_start": 0 if between else numel, "gbuf_local_end": numel, "padding": True}
    return entry | {name: value.new_zeros(numel) for name, value in like.items() if between and torch.is_tensor(value)}


def number_shards(optimizer, state: dict) -> dict:
    """Change ``state``, which ``sharded_param_state_dp_reshardable`` returned, in place and return it: every buffer's
    shards are in a dictionary by bucket number, without the shards that hold no parameter."""
    for number, ranges in enumerate(optimizer.gbuf_ranges):
        for dtype in ranges:
            shards = enumerate(state[number][dtype])
            state[number][dtype] = {index: shard for index, shard in shards if any(len(entry) > 1 for entry in shard)}
    return state


def refuse_without_room() -> None:
    """Let distributed optimizers raise InputError if a checkpoint's format needs more memory than there is."""
    _replace("get_parameter_state_dp_zero", _if_there_is_room)


def _if_there_is_room(gather):
    def gather_if_there_is_room(optimizer, *args, **kwargs):
        if kwargs.get("return_on_all_ranks") or optimizer.data_parallel_group.rank() == 0:
            need = len(GATHERED) * sum(buffer.numel_unpadded for buffer in optimizer.buffers) * torch.float32.itemsize
            what = "optimizer states of all data-parallel ranks, gathered for this checkpoint format,"
            free_host_memory.require(need, what)
        return gather(optimizer, *args, **kwargs)

    return gather_if_there_is_room
