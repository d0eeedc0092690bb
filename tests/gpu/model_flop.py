"""Floating-point operations of an iteration, as throughput is given in: three times those of a forward, without what is
recomputed, attention without the half behind the causal mask."""


def iteration_flop(args) -> float:
    """Of all micro-batches of one rank of a GPT without grouped queries or gated layers.

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 3.1, with a causal mask.
    """
    tokens, hidden, layers = args.global_batch_size * args.seq_length, args.hidden_size, args.num_layers
    ffn = args.ffn_hidden_size or 4 * hidden
    products = layers * (8 * hidden**2 + 4 * hidden * ffn) + 2 * hidden * args.padded_vocab_size
    return 3.0 * tokens * (products + layers * 2 * args.seq_length * hidden)
