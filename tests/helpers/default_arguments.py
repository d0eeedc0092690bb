"""What the nightly tier trains on real checkouts by their default arguments, see test_default_arguments.py."""

PIPELINE = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
MODERN = "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2"
EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 96 "
    "--disable-bias-linear --moe-shared-expert-intermediate-size 64 --swiglu --normalization RMSNorm "
    "--untie-embeddings-and-output-weights"
)
CASES = {
    "0.14.0 default": ("0.14.0", PIPELINE, 1, 1),
    "0.16.1 default": ("0.16.1", PIPELINE, 3, 2),
    "0.17.1 default": ("0.17.1", PIPELINE, 3, 3),
    "no pipeline": ("0.17.1", "--untie-embeddings-and-output-weights", 3, 4),
    "tensor and sequence parallel": ("0.17.1", "--tensor-model-parallel-size 2 --sequence-parallel", 3, 5),
    "precision-aware optimizer": ("0.17.1", f"{PIPELINE} --use-precision-aware-optimizer", 3, 6),
    "precision-aware optimizer, bfloat16 states": (
        "0.16.1",
        "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        3,
        7,
    ),
    "selective recompute": ("0.17.1", f"{PIPELINE} --recompute-granularity selective", 3, 8),
    "full recompute": (
        "0.17.1",
        f"{PIPELINE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        3,
        9,
    ),
    "grouped queries, RMSNorm, SwiGLU": (
        "0.17.1",
        f"{PIPELINE} {MODERN} --position-embedding-type rope --no-rope-fusion",
        3,
        10,
    ),
    "context parallel": ("0.17.1", "--context-parallel-size 2 --position-embedding-type rope --no-rope-fusion", 3, 13),
    "context parallel in a pipeline": ("0.16.1", f"{PIPELINE} --context-parallel-size 2", 1, 14),
    "softmax with an offset": (
        "0.19.0",
        f"{PIPELINE} {MODERN} --softmax-type learnable --position-embedding-type rope --no-rope-fusion "
        "--hidden-dropout 0 --attention-dropout 0",
        3,
        501,
    ),
    "experts": ("0.16.1", EXPERTS, 3, 16),
    "two instances of the optimizer": ("0.17.1", "--num-distributed-optimizer-instances 2", 1, 17),
    "multi-token prediction": (
        "0.16.1",
        "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion",
        3,
        18,
    ),
    "loss by token": ("0.17.1", f"{PIPELINE} --calculate-per-token-loss", 3, 19),
    "a rank's first chunk without parameters": (
        "0.17.1",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett||tt|L",
        3,
        37,
    ),
    "apex": (
        "0.17.1",
        f"{PIPELINE} --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion",
        3,
        11,
    ),
    "experts whose tokens a mask selects": ("0.12.3", EXPERTS, 3, 20),
    "the branch dev": ("dev", f"{PIPELINE} --recompute-activations", 2, 101),
}
"""Release (or ``dev``), options, zero stage, seed of the schedule; each on four processes."""
