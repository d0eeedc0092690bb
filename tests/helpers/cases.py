"""Models and layouts that parity is tested on: four processes each, small enough for many cases."""

LAYOUTS = {
    "interleaved": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --data-parallel-size 2",
    "1f1b": "--pipeline-model-parallel-size 2 --data-parallel-size 2",
    "no_pipeline": "--data-parallel-size 4",
}
LAYOUTS = {name: options.split() for name, options in LAYOUTS.items()}

STRICT = "two_replicas"
"""The layout on which the strict stand-in of a device trains, by two processes."""

EXPERT_LAYOUTS = {
    "experts": "--num-experts 4 --data-parallel-size 4 --expert-model-parallel-size 2",
    "experts-1f1b": "--pipeline-model-parallel-size 2 --data-parallel-size 2 --num-experts 4 "
    "--expert-model-parallel-size 2",
    "experts-tensor": "--tensor-model-parallel-size 4 --sequence-parallel --data-parallel-size 1 "
    "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "experts-instances": "--num-experts 4 --data-parallel-size 4 --expert-model-parallel-size 2 "
    "--num-distributed-optimizer-instances 2",
}
EXPERT_LAYOUTS = {name: options.split() for name, options in EXPERT_LAYOUTS.items()}
"""Of four processes, on which the models of ``EXPERTS`` train."""

INSTANCES = "two_instances"
"""The layout on which each half of four replicas has an optimizer of its own."""

TENSOR = "tensor_parallel"
"""The layout on which two replicas of a model are each cut over two ranks, which share the sequence as well."""

ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS | {STRICT: ["--data-parallel-size", "2"]}
ALL_LAYOUTS |= {INSTANCES: "--data-parallel-size 4 --num-distributed-optimizer-instances 2".split()}
ALL_LAYOUTS |= {TENSOR: "--tensor-model-parallel-size 2 --sequence-parallel --data-parallel-size 2".split()}

_SIZE = "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
_SIZE += " --vocab-size 120 --lr 1e-2 --log-interval 1000"
_UNTIED = f"{_SIZE} --untie-embeddings-and-output-weights"
_RECOMPUTE = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"

MODELS = {
    "fp32": _UNTIED,
    "tied-recompute": f"{_SIZE} {_RECOMPUTE} uniform",
    "bf16-tied": f"{_SIZE} --bf16 --swiglu --normalization RMSNorm --position-embedding-type rope --qk-layernorm",
    "bf16-selective": f"{_UNTIED} --bf16 --recompute-granularity selective",
    "bf16-offload": f"{_UNTIED} --bf16 --optimizer-cpu-offload",
    # The first two or three steps overflow on purpose: they are skipped, and the next ones are not.
    "fp16": f"{_UNTIED} --fp16 --initial-loss-scale {2**19} {_RECOMPUTE} block",
}
MODELS = {name: options.split() for name, options in MODELS.items()}
"""Options by name."""

_EXPERTS = (
    f"{_UNTIED} --num-attention-heads 4 --moe-ffn-hidden-size 32 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2"
)
EXPERTS = {
    "experts-fp32": _EXPERTS,
    # Every second layer is dense, as is a part of each layer of experts.
    "experts-bf16": f"{_EXPERTS} --bf16 --swiglu --normalization RMSNorm --moe-layer-freq 2 "
    "--moe-shared-expert-intermediate-size 32",
    "experts-offload": f"{_EXPERTS} --bf16 --optimizer-cpu-offload",
}
EXPERTS = {name: options.split() for name, options in EXPERTS.items()}

SHAPES = {
    "tied": "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "grouped-queries": "--bf16 --swiglu --normalization RMSNorm --use-rotary-position-embeddings --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "qkv-bias": "--fp16 --disable-bias-linear --add-qkv-bias --qk-layernorm --kv-channels 16 "
    "--max-position-embeddings 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2",
    "experts": "--bf16 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --data-parallel-size 4 "
    "--num-experts 8 --expert-model-parallel-size 2 --moe-router-topk 4 --moe-ffn-hidden-size 48 --moe-layer-freq 2 "
    "--moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type alltoall",
    "experts-tensor": "--bf16 --disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel --num-experts 4",
    "gate-with-bias": "--swiglu --ffn-hidden-size 96 --make-vocab-size-divisible-by 64 --micro-batch-size 3 "
    "--pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights",
    "gate-not-fused": "--swiglu --no-bias-swiglu-fusion --bf16 --disable-bias-linear --attention-dropout 0.1",
}
"""Models that are described and not trained, on layouts of their own."""

SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100"

TRAINING = {"--lr": 1, "--log-interval": 1, "--initial-loss-scale": 1, "--optimizer-cpu-offload": 0}
"""Options that only training knows, with the number of their values."""


def model_options(options: list[str]) -> list[str]:
    """Without the options that only training knows; the example sums gradients in fp32, and has no dropout."""
    kept, rest = "--accumulate-allreduce-grads-in-fp32 --hidden-dropout 0 --attention-dropout 0".split(), iter(options)
    for option in rest:
        if option in TRAINING:
            for _ in range(TRAINING[option]):
                next(rest)
        else:
            kept.append(option)
    return kept
