"""The ``megatron-ext`` command: one file a verb."""
