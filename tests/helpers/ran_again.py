"""Iterations that are run twice before the optimizer steps, as Megatron's rerun machinery does."""

import contextlib
from unittest import mock


@contextlib.contextmanager
def ran_again(example):
    """The second iteration is run again before the optimizer steps, on the next micro-batches; yields nothing."""
    run_schedule, iterations = example.run_schedule, 0

    def run(args, model, iterators, forward_only: bool = False):
        nonlocal iterations
        iterations += not forward_only
        if not forward_only and iterations == 2:
            run_schedule(args, model, iterators)
            for chunk in model:
                chunk.zero_grad_buffer()
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.object(example, "run_schedule", run):
        yield
