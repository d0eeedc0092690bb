"""Layers of the example's model for ``megatron-ext measure --modules example_layers:layer_runners``.

The example reads its samples on the thread that trains. With ``--data-path PREFIX --num-workers 0`` among the options,
the measured time of a step includes reading.
"""

from megatron_ext.megatron import cpu_compat

cpu_compat.install()  # before megatron is imported; does nothing where there is a CUDA device

import batches
import corpus
from megatron.core import parallel_state

from megatron_ext.megatron import ignored_options
from megatron_ext.megatron import layer_runners as product

SAMPLES = 1000
"""Samples of the data set that are read. In the order of training they lie far apart from each other."""


def layer_runners(options: list[str]) -> dict:
    """As :func:`megatron_ext.megatron.layer_runners.layer_runners`.

    Raises:
        InputError: an option is wrong, or the data set is missing or too short.
    """
    args = ignored_options.parse(options)
    reads = len(getattr(args, "data_path", ())) == 1 and getattr(args, "num_workers", None) == "0"
    return product.layer_runners(options, _read_batches if reads else None)


def _read_batches(args):
    """Micro-batches that are read from the run's data set."""
    (prefix,) = args.data_path
    corpus.check(prefix, args.seq_length, args.vocab_size)
    size = args.micro_batch_size * parallel_state.get_data_parallel_world_size()
    train, _ = batches.build_datasets(prefix, seq_length=args.seq_length, seed=1234, train_samples=SAMPLES)
    return batches.batches(train, micro_batch_size=args.micro_batch_size, global_batch_size=size)
