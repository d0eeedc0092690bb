"""Models and layouts that parity is tested on: four processes each, small enough for many cases."""

LAYOUTS = {
    "interleaved": ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2", "--data-parallel-size", "2"],
    "1f1b": ["--pipeline-model-parallel-size", "2", "--data-parallel-size", "2"],
    "no_pipeline": ["--data-parallel-size", "4"],
}

_SIZE = [
    "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16", "--vocab-size", "120",
    "--lr", "1e-2", "--log-interval", "1000",
]  # fmt: skip
_UNTIED = ["--untie-embeddings-and-output-weights"]

MODELS = {
    "fp32": [*_SIZE, *_UNTIED],
    "tied-recompute": [*_SIZE, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    "bf16-tied": [*_SIZE, "--bf16", "--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"],
    "bf16-selective": [*_SIZE, *_UNTIED, "--bf16", "--recompute-granularity", "selective"],
    "bf16-offload": [*_SIZE, *_UNTIED, "--bf16", "--optimizer-cpu-offload"],
    # The first steps overflow on purpose: they are skipped, and the next ones are not.
    "fp16": [*_SIZE, *_UNTIED, "--fp16", "--initial-loss-scale", str(2**24), "--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"],
}
"""Options by name."""
