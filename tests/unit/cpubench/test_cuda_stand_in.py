"""Calls that name a CUDA device or page-locked memory make tensors of the processor."""

import torch

from megatron_ext.megatron import cpu_compat

cpu_compat.install()


def test_an_index_in_page_locked_memory_is_made_and_copied():
    """As Megatron makes one for the rotary embeddings of a context-parallel rank."""
    index = torch.tensor([0, 3], device="cpu", pin_memory=True).cuda(non_blocking=True)
    assert index.tolist() == [0, 3]


def test_tensors_of_a_device_are_on_the_processor():
    assert torch.zeros(2, device="cuda:1").device == torch.empty(2, device=0).device == torch.device("cpu")
