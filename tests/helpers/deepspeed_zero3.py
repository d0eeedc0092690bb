"""How DeepSpeed is set for a GPT of Megatron's, by whatever compares with it. Imports deepspeed.

Transformer layers are leaf modules, so that a layer is gathered in one collective instead of one for each of its small
modules; Megatron's layers also use the bias of a linear module outside of it, which ZeRO-3 must know of. A layer is
prefetched ahead. Vectors stay whole: ``stage3_param_persistence_threshold`` has the value that DeepSpeed's integrations
choose, ten times the hidden size. At most half of the parameters may be live, as for our zero stage 3.
"""

import deepspeed
from deepspeed.utils import set_z3_leaf_modules
from megatron.core.transformer.transformer_layer import TransformerLayer


def pass_hidden_states_by_position() -> None:
    """DeepSpeed sees only positional inputs of a module; Megatron calls its layers by keywords, and DeepSpeed would
    reduce a layer's gradients before they are there."""
    call = TransformerLayer.__call__
    TransformerLayer.__call__ = lambda layer, *args, hidden_states=None, **kwargs: call(
        layer, *((hidden_states,) if hidden_states is not None else ()), *args, **kwargs
    )


def initialize(model, optimizer, args, zero: dict, **settings):
    """The engine of ``model``; ``zero`` and ``settings`` add to what is said above."""
    set_z3_leaf_modules(model, [TransformerLayer])
    layer = sum(parameter.numel() for parameter in model.decoder.layers[0].parameters())
    stage_3 = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": layer,
        "stage3_prefetch_bucket_size": layer,
        "stage3_param_persistence_threshold": 10 * args.hidden_size,
        "stage3_max_live_parameters": sum(parameter.numel() for parameter in model.parameters()) // 2,
        "stage3_max_reuse_distance": 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.num_microbatches,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": stage_3 | zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": args.bf16},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config | settings)[0]
