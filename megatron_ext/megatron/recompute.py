"""Layers that are recomputed together, and what that means for actions between them.

With ``--recompute-method uniform`` and more than one layer, backward first runs the forward of
all layers of a block again, in ascending order, and then their backwards. All layers of the block must
be whole during this time: no group can be gathered or freed in between.
"""

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.workload import Chunk, Workload


def blocks_of(chunk: Chunk, config) -> list[tuple[int, int]]:
    """For every layer of a chunk, the first and last layer that backward runs together with it.

    Args:
        chunk: the chunk, with the kinds of its layers.
        config: Megatron's TransformerConfig.
    """
    blocks = [(layer, layer) for layer in range(chunk.num_layers)]
    if config.recompute_granularity != "full" or config.recompute_method != "uniform":
        return blocks
    size = config.recompute_num_layers or 1
    transformer = [layer for layer, kind in enumerate(chunk.layer_kinds) if kind not in ("embedding", "output")]
    for start in range(0, len(transformer), size):
        members = transformer[start : start + size]
        for layer in members:
            blocks[layer] = (members[0], members[-1])
    return blocks


def refuse_together(zero_stage: int, method: str | None, layers: int) -> None:
    """Refuse to plan at zero stage 3 for ``layers`` that are recomputed together, because plans gather and free layers
    one by one.

    Raises:
        InputError: more than one layer is recomputed at a time.
    """
    if zero_stage == 3 and method == "uniform" and layers > 1:
        why = "no plan of zero stage 3 brings so many layers together; set 1, or --zero-stage 1 or 2"
        raise InputError(why, field="--recompute-num-layers", value=layers)


def check_recompute(schedule: Schedule, workload: Workload, config, *, file=None) -> None:
    """Refuse actions in the middle of layers that backward runs together, and freed groups with hyper-connections that
    are recomputed: Megatron does so for several layers at once, and before the actions of the backward at that place.

    Raises:
        InputError: naming the action.
    """
    if schedule.zero_stage == 3 and "mhc" in (getattr(config, "recompute_modules", None) or ()):
        why = "reads parameters before a schedule of zero stage 3 brings them; set --zero-stage 1 or 2, or leave it out"
        raise InputError(why, file=file, field="--recompute-modules", value="mhc")
    pp = schedule.parallel.pp
    blocks = {(chunk.pp_rank, chunk.model_chunk_id): blocks_of(chunk, config) for chunk in workload.chunks}
    if all(first == last for of_chunk in blocks.values() for first, last in of_chunk):
        return
    for rank in schedule.ranks:
        for index, entry in enumerate(rank.steps):
            if "B" not in entry.step:
                continue
            of_chunk = blocks[rank.pp_rank, int(entry.step.partition("B")[0]) // pp]
            for kind, end in (("unshard", 1), ("reshard", 0)):
                for n, action in enumerate(getattr(entry, kind)):
                    if action.at >= 0 and of_chunk[action.at][end] != action.at:
                        first, last = of_chunk[action.at]
                        said = f"layers {first} to {last} are recomputed together in step {entry.step}; place it at "
                        said += f"layer {of_chunk[action.at][end]}, or set --recompute-num-layers 1"
                        field = f"ranks[{rank.pp_rank}].steps[{index}].{kind}[{n}].at"
                        raise InputError(said, file=file, field=field, value=action.at)
