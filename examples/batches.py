"""Micro-batches of the example's GPT from Megatron's indexed dataset, read by the thread that trains."""

import os
from collections.abc import Iterator

import corpus
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_ext.runtime.device import has_cuda

KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def build_datasets(
    data_path, *, seq_length: int, seed: int, train_samples: int, valid_samples: int = 1, cache_path=None
) -> list[GPTDataset]:
    """Samples for training and for validation. Collective: rank 0 builds the cached index, the others read it.

    Args:
        data_path: prefix of a byte-level indexed dataset, see :mod:`corpus`.
        cache_path: directory of the index; by default ``cache`` next to the dataset.
    """
    corpus.compile_helpers()
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([str(data_path)], None),
        split=corpus.SPLIT,
        path_to_cache=cache_path or os.path.dirname(os.path.abspath(data_path)) + "/cache",
        tokenizer=corpus.tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [train_samples, valid_samples, 1], lambda: True, config).build()[
        :2
    ]


def batches(
    dataset, *, micro_batch_size: int, global_batch_size: int, start_iteration: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of this data-parallel rank, in order, without end. Tensors have shape
    (micro-batch, sequence) and lie on this rank's device. Every chunk has its own iterator."""
    dp_rank, dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    position = start_iteration * global_batch_size
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")
    while True:
        first = position + dp_rank * micro_batch_size
        rows = [dataset[(first + i) % len(dataset)] for i in range(micro_batch_size)]
        yield {key: torch.stack([row[key] for row in rows]).to(device) for key in KEYS}
        position += dp * micro_batch_size
