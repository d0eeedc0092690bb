"""Layers that are recomputed together, and what that means for actions between them.

With ``--recompute-method uniform`` and more than one layer, backward first runs the forward of
all layers of a block again, in ascending order, and then their backwards. All layers of the block must
be whole during this time: no group can be gathered or freed in between.
"""

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.workload import Chunk


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


def check_recompute(zero_stage: int, config) -> None:
    """Refuse to free groups if layers are recomputed together, or if hyper-connections are recomputed: Megatron does so
    for several layers at once, and before the actions of the backward at that place.

    Args:
        zero_stage: of the schedule.
        config: Megatron's TransformerConfig.

    Raises:
        InputError: naming the option.
    """
    if zero_stage == 3 and "mhc" in (getattr(config, "recompute_modules", None) or ()):
        why = "reads parameters before a schedule of zero stage 3 brings them; set --zero-stage 1 or 2, or leave it out"
        raise InputError(why, field="--recompute-modules", value="mhc")
    if config.recompute_granularity == "full":
        refuse_together(zero_stage, config.recompute_method, config.recompute_num_layers or 1)
