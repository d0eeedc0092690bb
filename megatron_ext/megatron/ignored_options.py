"""Megatron's options that ``describe`` meets in a user's command line and does not need.

Without a checkout there is no Megatron parser to ask. So this file lists the options that are not in
``gpt_arguments``. Some change neither which parameters a rank holds nor the order of steps, and are
ignored. Others do so in ways that only Megatron itself can work out, and are refused by name. An option
in neither list may be misspelt, and is refused too. With a checkout, see ``describe_from_checkout``.
"""

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

from megatron_ext.formats.errors import InputError, flag, option_error
from megatron_ext.megatron import gpt_arguments, releases
from megatron_ext.megatron.refusals import NEUTRAL, REASONS
from megatron_ext.workload.gpt_shapes import MicroBatch

FLAGS = """
    accumulate-allreduce-grads-in-fp32 apply-layernorm-1p apply-query-key-layer-scaling
    apply-residual-connection-post-layernorm apply-wd-to-qk-layernorm async-save attention-softmax-in-fp32
    auto-detect-ckpt-format calculate-per-token-loss check-for-large-grads check-for-spiky-loss
    ckpt-assume-constant-structure ckpt-fully-parallel-load ckpt-fully-parallel-save cross-entropy-loss-fusion
    data-parallel-random-init ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw
    decrease-batch-size-if-needed deterministic-mode disable-gloo-process-groups dist-ckpt-optim-fully-reshardable
    distribute-saved-activations eod-mask-loss exit-on-missing-checkpoint exit-signal-handler fim-data finetune
    flash-decode fp16-lm-cross-entropy grad-reduce-in-bf16 init-model-with-meta-device log-device-memory-used log-energy
    log-max-attention-logit log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress log-straggler
    log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard manual-gc
    mock-data no-async-tensor-model-parallel-allreduce no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
    no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save no-create-attention-mask-in-dataloader
    no-gradient-accumulation-fusion no-load-optim no-load-rng no-log-loss-scale-to-tensorboard no-manual-gc-eval
    no-masked-softmax-fusion no-mmap-bin-files no-persist-layer-norm no-position-embedding no-rope-fusion no-save-optim
    no-save-rng no-scatter-gather-tensors-in-pipeline no-use-tokenizer-model-from-checkpoint-args optimizer-cpu-offload
    overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce overlap-p2p-communication-warmup-flush overlap-param-gather
    overlap-param-gather-with-optimizer-step override-opt_param-scheduler profile reset-attention-mask
    reset-position-ids rotary-interleaved skip-train squared-relu te-rng-tracker test-mode tp-comm-overlap
    use-checkpoint-opt_param-scheduler use-cpu-initialization use-distributed-optimizer use-flash-attn use-mcore-models
    use-persistent-ckpt-worker use-precision-aware-optimizer use-pytorch-profiler use-ring-exchange-p2p use-rope-scaling
    use-sharp verify-integrity moe-extended-tp moe-router-enable-expert-bias moe-shared-expert-overlap
    override-opt-param-scheduler use-checkpoint-opt-param-scheduler use-dist-ckpt init-by-name no-overlap-param-gather
""".split()
"""Options without a value. Only examples/pretrain_gpt_hybrid.py has the last two."""

VALUES = """
    adam-beta1 adam-beta2 adam-eps async-strategy check-weight-hash-across-dp-replicas-interval ckpt-format ckpt-step
    clip-grad cross-entropy-fusion-impl data-cache-path dataloader-type ddp-bucket-size decoupled-lr decoupled-min-lr
    dist-ckpt-format dist-ckpt-strictness empty-unused-memory-level end-weight-decay error-injection-rate
    error-injection-type eval-global-batch-size eval-interval eval-iters exit-duration-in-mins exit-interval
    exp-avg-dtype exp-avg-sq-dtype fim-rate fim-spm-rate fp8-amax-compute-algo fp8-amax-history-len fp8-format
    fp8-margin fp8-recipe hysteresis init-method-std initial-loss-scale load local-rank log-interval loss-scale
    loss-scale-window lr lr-decay-iters lr-decay-samples lr-decay-style lr-warmup-fraction lr-warmup-init
    lr-warmup-iters lr-warmup-samples lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style main-grads-dtype
    main-params-dtype manual-gc-interval mask-prob mid-level-dataset-surplus min-loss-scale min-lr
    non-persistent-save-interval norm-epsilon num-workers one-logger-project one-logger-run-name
    optimizer-offload-fraction per-split-data-args-path pretrained-checkpoint profile-step-end profile-step-start
    rerun-mode rotary-base rotary-percent rotary-seq-len-interpolation-factor save save-interval save-retain-interval
    seed sgd-momentum split start-weight-decay straggler-ctrlr-port straggler-minmax-count tensorboard-dir
    tensorboard-log-interval tensorboard-queue-size tiktoken-num-special-tokens tiktoken-pattern timing-log-level
    timing-log-option tp-comm-bootstrap-backend tp-comm-overlap-cfg train-iters train-samples train-sync-interval
    wandb-entity wandb-exp-name wandb-project wandb-save-dir weight-decay weight-decay-incr-style wgrad-deferral-limit
    user-defined-schedule user-defined-schedule-nvme-path user-defined-schedule-trace metrics-path progress-bar
    delayed-parameter-update moe-router-group-topk moe-router-num-groups moe-z-loss-coeff persistent-save-interval
""".split()
"""Options with one value."""

LISTS = (
    "data-path train-data-path valid-data-path test-data-path profile-ranks tiktoken-special-tokens "
    "recompute-modules cuda-graph-scope"
).split()
"""Options with any number of values; Megatron takes ``--data-path`` without one."""

TOKENIZER = "tokenizer_type tokenizer_model vocab_file merge_file vocab_extra_ids legacy_tokenizer".split()
"""Options that decide the size of the vocabulary, and so the size of two parameters."""

_CHANGE = """
    activation-func-clamp-value attention-output-gate batch-size checkpoint-activations context-parallel-size=1
    decoder-num-layers decoder-seq-length delay-wgrad-compute encoder-num-layers encoder-pipeline-model-parallel-size=1
    encoder-seq-length encoder-tensor-model-parallel-size=1 experimental-attention-variant
    expert-tensor-parallel-num-weight-shards=1 first-last-layers-bf16 fp32-residual-connection fp4-format
    fused-residual-rmsnorm glu-linear-offset=0.0 heterogeneous-layers-config-encoded-json
    heterogeneous-layers-config-path hierarchical-context-parallel-sizes hybrid-attention-ratio hybrid-layer-pattern
    hybrid-override-pattern kv-lora-rank memory-efficient-layer-norm mlp-chunks-for-training=1 model-parallel-size
    moe-apply-probs-on-input moe-input-jitter-eps moe-latent-size moe-layer-recompute moe-paged-stash
    moe-shared-expert-gate moe-use-legacy-grouped-gemm mtp-num-layers multi-latent-attention no-rope-freq
    num-microbatches-with-partial-activation-checkpoints openai-gelu padded-vocab-size pipeline-model-parallel-layout
    pipeline-model-parallel-split-rank q-lora-rank qk-l2-norm quick-geglu relative-attention-num-buckets
    softmax-type=vanilla spec tensor-parallel-num-weight-shards=1 use-checkpoint-args use-grouped-gemm-for-dense-mlp
    use-grouped-gemm-for-shared-expert use-legacy-models use-mp-args-from-checkpoint-args
    use-transformer-engine-op-fuser yaml-cfg enable-hyper-connections head-wise-attn-gate linear-attention-type
""".replace("-", "_").split()
REFUSED = {name: [neutral] for name, _, neutral in (option.partition("=") for option in _CHANGE)}
"""Options that change parameters, which rank holds them, what layers save or the order of steps, and the values that
change nothing: with one rank of a kind all is as without the option; one layer of a kind is not."""

DESCRIBES = "describe", "fit", "cost estimate"
"""Verbs that support ranks which share sequences, because they neither time nor train a layer."""

BATCH = "rampup_batch_size step_batch_size_schedule".split()
"""Options that change the number of micro-batches in the course of training."""


SIZES = "num-layers hidden-size num-attention-heads seq-length micro-batch-size vocab-size".split()
"""Options that Megatron itself requires, the last one in place of a tokenizer; here they have defaults."""


def sizes_taken(options) -> dict[str, int]:
    """By option, the defaults of the sizes that ``options`` do not give."""
    parser = gpt_arguments.add_gpt_arguments(argparse.ArgumentParser())
    given = {option.partition("=")[0] for option in options}
    return {f"--{name}": parser.get_default(name.replace("-", "_")) for name in SIZES if f"--{name}" not in given}


MEGATRONS = {"--transformer-impl": "transformer_engine", "--hidden-dropout": "0.1", "--attention-dropout": "0.1"}
"""Megatron's own defaults, where those of the example differ. Counts and measurements take dropout from here."""


def not_given(options) -> dict[str, str]:
    """The entries of :data:`MEGATRONS` that ``options`` do not give."""
    given = {option.partition("=")[0] for option in options}
    return {option: value for option, value in MEGATRONS.items() if option not in given}


def parse(
    options, *, verb: str = "describe", world_size: int | None = None, passed_over: list[str] | None = None, **defaults
) -> argparse.Namespace:
    """Parse options of ``megatron-ext describe`` (or another ``verb``): Megatron's, and those for plans.

    Args:
        world_size: number of GPUs, or None to compute it from the parallel sizes.
        passed_over: if given, options in no list are added to it, unless they look misspelt; if None, they are
            refused.
        defaults: defaults of options that differ from the example's.

    Raises:
        InputError: naming the option and its value.
    """
    parser = _parser(verb)
    parser.set_defaults(vocab_size=None, **defaults)
    args, unknown = parser.parse_known_args(list(options))
    _refuse_unknown(parser, unknown, passed_over)
    check_other_options(args, verb)
    args.vocab_size = gpt_arguments.MODEL_SIZES["vocab_size"] if args.vocab_size is None else args.vocab_size
    args.accumulate_allreduce_grads_in_fp32 = _grads_in_fp32(args)
    gpt_arguments.check(args, world_size=world_size)
    return args


def batch_of_words(options, tensor_parallel: int) -> MicroBatch:
    """The micro-batch that one step computes on, from a launch script's options; all other options are ignored. Raises
    InputError if a size is not given, or if an option looks misspelt."""
    parser = _parser("cost estimate")
    parser.set_defaults(transformer_impl=MEGATRONS["--transformer-impl"])
    args, unknown = parser.parse_known_args(list(options))
    _refuse_unknown(parser, unknown, [])
    args.tensor_model_parallel_size = tensor_parallel
    batch = gpt_arguments.batch_of(args)
    for option in ("--seq-length", "--num-attention-heads") if batch.score_heads else ("--seq-length",):
        if option in sizes_taken(options):
            raise InputError("is needed", field=option)
    return batch


def _grads_in_fp32(args: argparse.Namespace) -> bool:
    """Whether gradients are fp32, as in Megatron's ``validate_args``: with --bf16 unless turned off, with --fp16 only
    if asked for."""
    asked, dtype = "accumulate_allreduce_grads_in_fp32" in args, getattr(args, "main_grads_dtype", "fp32")
    return not (args.bf16 and "grad_reduce_in_bf16" in args) and (asked or (args.bf16 and dtype == "fp32"))


def _parser(verb: str) -> argparse.ArgumentParser:
    parser = gpt_arguments.OneLineParser(prog=f"megatron-ext {verb}", allow_abbrev=False, add_help=False)
    gpt_arguments.add_gpt_arguments(parser)
    gpt_arguments.add_plan_arguments(parser)
    parser.set_defaults(**{name: MEGATRONS[flag(name)] for name in ("hidden_dropout", "attention_dropout")})
    parser.add_argument("--attention-backend", choices=("flash", "fused", "unfused", "local", "auto"))
    if verb in DESCRIBES:
        parser.add_argument(flag(gpt_arguments.CONTEXT), type=int, default=argparse.SUPPRESS)
    # Options of the lists above are accepted here; check_other_options refuses some of them.
    group = parser.add_argument_group("Megatron's other options")
    known = set(parser._option_string_actions)
    judged = {flag(name): name for name in (*REFUSED, *BATCH, *NEUTRAL)}
    options: tuple[tuple[Iterable[str], dict[str, Any]], ...] = (
        (map("--{}".format, FLAGS), {"action": "store_true"}),
        (map("--{}".format, VALUES), {}),
        (map(flag, TOKENIZER), {"nargs": "?", "const": True}),
        ([*map("--{}".format, LISTS), *judged], {"nargs": "*"}),
    )
    for names, how in options:
        for option in names:
            if option not in known:
                known.add(option)
                group.add_argument(option, dest=judged.get(option), default=argparse.SUPPRESS, **how)
    return parser


def check_other_options(args, verb: str = "describe") -> None:
    """Refuse options that only Megatron itself can work out.

    Raises:
        InputError: naming the option and its value.
    """
    given = vars(args)
    for name, neutral in NEUTRAL.items():
        if given.get(name) not in (None, [str(neutral)]):
            _refuse(given, name, f"cannot be combined with a schedule: {REASONS[name]}")
    how = _CHECKOUT.get(verb, _CHECKOUT["describe"])
    for name in [name for name in REFUSED if name != gpt_arguments.CONTEXT or verb not in DESCRIBES]:
        if given.get(name) not in (None, REFUSED[name]):
            _refuse(given, name, f"changes parameters, what layers save or the order of steps; {how}")
        given.pop(name, None)
    padded_to = args.moe_expert_capacity_factor if args.moe_pad_expert_input_to_capacity else 1
    for name, wrong, experts in (
        ("no_bias_swiglu_fusion", args.swiglu and "no_bias_swiglu_fusion" in given, "whose activation is not fused"),
        ("num_experts", args.add_bias_linear, "with biases (without --disable-bias-linear)"),
        ("moe_expert_capacity_factor", padded_to != 1, "that are padded"),
    ):
        if wrong and verb == "fit" and args.num_experts:
            raise option_error(name, f"it is not known what experts {experts} save; {how}", given[name])
    if args.recompute_granularity == "selective" and given.get("recompute_modules", ["core_attn"]) != ["core_attn"]:
        _refuse(given, "recompute_modules", f"changes which activations layers save; {how}")
    tokenizers = [name for name in TOKENIZER if name in given]
    if tokenizers and args.vocab_size is None:
        why = "is not read here; give --vocab-size, the tokenizer's own size"
        raise option_error(tokenizers[0], why, given[tokenizers[0]])
    if given.get("tokenizer_type") == "NullTokenizer":
        args.vocab_size += releases.null_tokenizer_adds()


_CHECKOUT = {
    "describe": "give --checkout DIR, so that Megatron itself is asked",
    "fit": "use `describe --checkout DIR`, which asks Megatron itself, then `cost estimate` and `plan`",
}
"""By verb, what can read options that only Megatron itself can work out."""


def _refuse(given: dict, name: str, why: str) -> NoReturn:
    raise option_error(name, why, " ".join(given[name]) or ...)


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: list[str], passed_over: list[str] | None) -> None:
    """Refuse options that are in no list, and name the nearest one; if none is near, add them to ``passed_over``."""
    options = [word.partition("=")[0] for word in unknown]
    if passed_over is not None:
        options = [option for option in options if option.startswith("--")]
        passed_over += [option for option in options if not _near(parser, option, 0.9)]
        options = [option for option in options if option not in passed_over]
    if not options:
        return
    option, near = options[0], _near(parser, options[0], 0.8)
    hint = (
        f"did you mean {near[0]}?" if near else "if it is one of Megatron's, give --checkout DIR, whose parser knows it"
    )
    verb = parser.prog.rpartition(" ")[2]
    raise InputError(f"is not an option that {verb} knows; {hint}", file=parser.prog, field="option", value=option)


def _near(parser: argparse.ArgumentParser, option: str, cutoff: float) -> list[str]:
    return difflib.get_close_matches(option, list(parser._option_string_actions), n=1, cutoff=cutoff)
