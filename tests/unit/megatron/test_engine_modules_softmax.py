"""Attention of the stand-in of Transformer Engine whose softmax has an offset: its values, and what it saves."""

import pytest
import torch

from megatron_ext.megatron.engine_modules import DotProductAttention

TOKENS, HEADS, CHANNELS = 5, 2, 4


def attention(**options) -> DotProductAttention:
    return DotProductAttention(HEADS, CHANNELS, **options)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(TOKENS, 1, heads, CHANNELS, requires_grad=True) for heads in (HEADS, 1, 1)]


def test_an_offset_far_below_the_scores_changes_nothing():
    module = attention(softmax_type="learnable", tp_size=2)
    assert module.softmax_offset.shape == (HEADS // 2,)
    module = attention(softmax_type="learnable")
    with torch.no_grad():
        module.softmax_offset.fill_(-1e4)
    torch.testing.assert_close(module(*inputs()), attention()(*inputs()))


def test_off_by_one_adds_one_to_the_sum():
    query, key, value = inputs()
    first = torch.sigmoid((query[0] * key[0]).sum(-1) * CHANNELS**-0.5)  # the first token attends to itself alone
    found = attention(softmax_type="off-by-one")(query, key, value)
    torch.testing.assert_close(found[0].view(1, HEADS, CHANNELS), first[..., None] * value[0])


@pytest.mark.parametrize("fused", [True, False])
def test_only_unfused_attention_saves_scores(monkeypatch, fused):
    monkeypatch.setattr(DotProductAttention, "fused", fused)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.shape) or one, lambda one: one):
        attention(softmax_type="learnable")(*inputs()).sum().backward()
    assert any(shape[-2] == TOKENS and shape[-1] > TOKENS for shape in saved if len(shape) > 1) != fused
