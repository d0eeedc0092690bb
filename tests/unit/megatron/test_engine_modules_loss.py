"""The loss of the stand-in of Transformer Engine: its values, and what it saves."""

import sys
from unittest import mock

import torch
from torch.nn import functional as F

from megatron_ext.megatron import engine_modules


def test_one_tensor_of_the_logits_is_saved():
    """Megatron calls it so (core_v0.17.1, ``te_parallel_cross_entropy``), and drops all activations if it is absent."""
    with mock.patch.dict(sys.modules):
        engine_modules.install()
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
    torch.manual_seed(0)
    logits, labels, saved = torch.randn(5, 2, 7, requires_grad=True), torch.randint(7, (5, 2)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.shape) or one, lambda one: one):
        loss = parallel_cross_entropy(logits, labels, 0.0, False, None, -100, False)
        loss.sum().backward()
    assert saved == [logits.shape]
    assert (
        torch.equal(loss, F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none"))
        and logits.grad is not None
    )
