"""Public training scripts of large models, as command lines of our own: the options that matter, at tiny sizes.

Sizes, data, tokenizers, checkpoints and logging are ours. Options that only a fork's own parser knows are left out.
"""

from typing import NamedTuple

SIZES = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --num-workers 0 --lr 1e-3
    --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --log-interval 1 --eval-interval 1000 --eval-iters 1"""

SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
BATCH = "--global-batch-size 16 --train-iters 3"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --group-query-attention --num-query-groups 2"
)
UNTIED = "--untie-embeddings-and-output-weights"
MIXTRAL = (
    f"{LLAMA} {UNTIED} {SHARDED} {BATCH} --bf16 --ffn-hidden-size 128 --no-masked-softmax-fusion "
    "--no-position-embedding --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
)
MLA = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm"
)
MIXTRAL_MLA = f"{MIXTRAL} {MLA}".replace("--group-query-attention --num-query-groups 2", "")
GPT3 = (
    "--fp16 --init-method-std 0.006 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --train-samples 64"
)


class Script(NamedTuple):
    """One public script.

    Attributes:
        project, path: where it is.
        options: its options that decide what is built, who holds it and when it is gathered; at tiny sizes.
        entry: it starts a script of its own, in place of pretrain_gpt.py.
        adds: options that a user adds to train by a schedule.
        experts: it has experts.
        refused: why it cannot be scheduled; empty where it can.
    """

    project: str
    path: str
    options: str
    entry: str = ""
    adds: str = ""
    experts: bool = False
    refused: str = ""


NVIDIA, ROCM, SWISS, PAI = (
    "NVIDIA/Megatron-LM",
    "ROCm/Megatron-LM",
    "swiss-ai/Megatron-LM",
    "alibaba/Pai-Megatron-Patch",
)
RAMP = "--global-batch-size 16 --rampup-batch-size 4 4 24"

SCRIPTS = (
    Script(NVIDIA, "examples/gpt3/train_gpt3_175b_distributed.sh", f"{GPT3} {RAMP}", adds=SHARDED),
    Script(ROCM, "examples/gpt3/train_gpt3_175b_distributed.sh", f"{GPT3} {RAMP}", adds=SHARDED),
    Script(SWISS, "examples/gpt3/train_gpt3_175b_distributed.sh", f"{GPT3} {RAMP}", adds=SHARDED),
    Script(
        NVIDIA,
        "examples/llama/train_llama3_8b_h100_fp8.sh",
        f"{LLAMA} {UNTIED} {SHARDED} --global-batch-size 16 --train-samples 48 --bf16 --kv-channels 16 "
        "--ffn-hidden-size 128 --rotary-base 1000000 --apply-layernorm-1p --grad-reduce-in-bf16 "
        "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
        "--decoupled-lr 5e-4 --decoupled-min-lr 4.5e-5 --sequence-parallel --context-parallel-size 1 "
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
    ),
    Script(NVIDIA, "examples/mixtral/train_mixtral_8x7b_distributed.sh", MIXTRAL, experts=True),
    Script(ROCM, "examples/mixtral/train_mixtral_8x7b_distributed.sh", MIXTRAL, experts=True),
    Script(SWISS, "examples/mixtral/train_mixtral_8x7b_distributed.sh", MIXTRAL, experts=True),
    Script(
        NVIDIA,
        "examples/gptoss/02_train.sh",
        f"{MIXTRAL} --fp8-format hybrid --fp8-param-gather",
        experts=True,
        refused="--fp8-param-gather",
    ),
    Script(
        NVIDIA,
        "examples/mamba/train.sh",
        f"{SHARDED} {BATCH} {UNTIED} --bf16 --disable-bias-linear --normalization RMSNorm "
        "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-override-pattern M-M* "
        "--position-embedding-type none --mamba-num-groups 2 --mamba-state-dim 16 --mamba-head-dim 16 "
        "--attention-dropout 0.0 --hidden-dropout 0.0",
        entry="pretrain_mamba.py",
    ),
    Script(NVIDIA, "examples/t5/train_t5_220m_distributed.sh", BATCH, "pretrain_t5.py", SHARDED, refused="T5Model"),
    Script(
        NVIDIA, "examples/bert/train_bert_340m_distributed.sh", BATCH, "pretrain_bert.py", SHARDED, refused="BertModel"
    ),
    Script(
        NVIDIA,
        "examples/multimodal/pretrain_mistral_clip.sh",
        BATCH,
        "examples/multimodal/train.py",
        "--overlap-grad-reduce --overlap-param-gather",
        refused="LLaVAModel",
    ),
    Script(
        PAI,
        "examples/llama3_1/run_mcore_llama3_1.sh",
        f"{LLAMA} {UNTIED} {SHARDED} {BATCH} --bf16 --transformer-impl transformer_engine --rotary-base 500000 "
        "--norm-epsilon 1e-05 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--recompute-activations --no-load-optim --no-load-rng --no-save-optim",
        "pretrain_llama.py",
    ),
    Script(
        PAI,
        "examples/llama2/run_mcore_llama2_70b.sh",
        f"{LLAMA} {UNTIED} {SHARDED} {BATCH} --bf16 --transformer-impl transformer_engine "
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --recompute-method uniform "
        "--recompute-num-layers 1 --recompute-granularity full --no-masked-softmax-fusion --attention-softmax-in-fp32",
        "../llama3_1/pretrain_llama.py",
    ),
    Script(
        PAI,
        "examples/qwen2_5/run_mcore_qwen.sh",
        f"{LLAMA} {SHARDED} {BATCH} --bf16 --transformer-impl transformer_engine --add-qkv-bias --rotary-percent 1.0 "
        "--rotary-base 1000000 --rotary-seq-len-interpolation-factor 1 --calculate-per-token-loss --eod-mask-loss",
        "../qwen2/pretrain_qwen2_moe.py",
    ),
    Script(
        PAI,
        "examples/qwen3/run_mcore_qwen3.sh",
        f"{LLAMA} {SHARDED} {BATCH} --bf16 --transformer-impl transformer_engine --qk-layernorm --kv-channels 16 "
        "--cross-entropy-loss-fusion --ckpt-format torch_dist --optimizer-cpu-offload --use-precision-aware-optimizer "
        "--optimizer-offload-fraction 1.0",
        "pretrain_qwen.py",
    ),
    Script(
        PAI,
        "examples/qwen3/run_mcore_qwen3_235b_chatlearn.sh",
        f"{MIXTRAL} --qk-layernorm --kv-channels 16 --moe-ffn-hidden-size 32 --moe-layer-freq ([1]*4) "
        "--expert-tensor-parallel-size 1",
        "pretrain_qwen.py",
        experts=True,
    ),
    Script(
        PAI,
        "examples/deepseek_v3/run_mcore_deepseek.sh",
        f"{MIXTRAL_MLA} --q-lora-rank 16 --moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 32 "
        "--moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--mtp-num-layers 1",
        "pretrain_deepseek.py",
        experts=True,
    ),
    Script(
        PAI,
        "examples/deepseek_v2/run_mcore_deepseek.sh",
        f"{MIXTRAL_MLA} --q-lora-rank 16 --moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 32 "
        "--moe-ffn-hidden-size 32",
        "pretrain_deepseek.py",
        experts=True,
    ),
    Script(
        PAI,
        "examples/moonlight/run_mcore_moonlight.sh",
        f"{MIXTRAL_MLA} --moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 32 "
        "--moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "../deepseek_v3/pretrain_deepseek.py",
        experts=True,
    ),
    Script(
        PAI,
        "examples/mistral/run_mcore_mistral.sh",
        f"{MIXTRAL} --transformer-impl transformer_engine --recompute-activations --ckpt-format torch",
        "pretrain_mcore_mistral.py",
        experts=True,
    ),
)


def command_line(script: Script) -> list[str]:
    """Its options in full, with those that a user adds."""
    return f"{SIZES} {script.options} {script.adds}".split()
