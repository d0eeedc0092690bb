"""The fastest settings that fit: a search over Megatron's own options, each choice planned."""
