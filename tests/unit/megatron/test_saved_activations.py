"""A chunk that cannot run without data is not counted, and the reason is said."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import tensor_parallel
from torch.nn import functional as F

from megatron_ext.megatron.engine_modules import DotProductAttention, Linear
from megatron_ext.megatron.saved_activations import balance_experts, saved_activations

MLP = {"gated_linear_unit": False, "bias_activation_fusion": False}


class NeedsData(torch.nn.Module):
    """A chunk whose only layer reads what its tensors hold, as a fused kernel does."""

    pre_process = True
    config = SimpleNamespace(**MLP)

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Linear(4, 4, device="meta")

    def set_input_tensor(self, tensor):
        pass

    def forward(self, tokens, positions, mask, labels=None):
        raise self.error

    error: Exception = RuntimeError("a kernel\nwithout a form for meta tensors")


def test_the_reason_is_said_in_one_line(capsys):
    assert saved_activations(NeedsData(), seq_length=8, micro_batch_size=1, hidden_size=4) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "RuntimeError: a kernel without a form for meta tensors" in said


def test_other_errors_are_not_swallowed():
    model = NeedsData()
    model.error = KeyError("a mistake")
    with pytest.raises(KeyError):
        saved_activations(model, seq_length=8, micro_batch_size=1, hidden_size=4)


@pytest.mark.parametrize(("padded", "capacity"), [(False, 1.0), (True, 1.5)])
def test_padded_experts_keep_their_capacity(padded, capacity):
    config = SimpleNamespace(
        num_moe_experts=4,
        moe_expert_capacity_factor=1.5,
        moe_pad_expert_input_to_capacity=padded,
        moe_router_fusion=True,
    )
    balance_experts(config)
    assert config.moe_expert_capacity_factor == capacity
    assert config.moe_pad_expert_input_to_capacity and not config.moe_router_fusion


class ReturnsItsBias(NeedsData):
    """As Megatron's MLP: a recompute that returns a parameter is what made it, so its backward begins itself again."""

    def forward(self, tokens, positions, mask, labels=None):
        layer = self.embedding
        return sum(tensor_parallel.checkpoint(lambda weight: (weight * 2, layer.bias), False, layer.weight))


def test_a_backward_that_never_ends_is_not_counted(capsys):
    assert saved_activations(ReturnsItsBias(), seq_length=8, micro_batch_size=1, hidden_size=4) is None
    assert "--disable-bias-linear" in capsys.readouterr().err


class AsksForTokens(torch.nn.Module):
    """Two layers; the second divides by the number of tokens where there are some, as layers that predict further
    tokens do."""

    pre_process = post_process = True
    config = SimpleNamespace(params_dtype=torch.float32, **MLP)

    def __init__(self):
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, device="meta") for _ in range(2))
        self.embedding = torch.nn.Embedding(8, 4, device="meta")

    def set_input_tensor(self, tensor):
        pass

    def forward(self, tokens, positions, mask, labels=None):
        hidden = self.embedding(tokens)
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        number = (labels > 0).sum()
        return hidden.sum() / number if number > 0 else hidden.sum() * 0


def test_layers_that_predict_further_tokens_may_ask_whether_there_are_any(monkeypatch, capsys):
    """What other layers ask is not known."""
    sizes = dict(seq_length=8, micro_batch_size=1, hidden_size=4)
    assert saved_activations(AsksForTokens(), **sizes) is None and "DataDependent" in capsys.readouterr().err
    monkeypatch.setitem(globals(), "__name__", "megatron.core.transformer.multi_token_prediction")
    assert saved_activations(AsksForTokens(), **sizes) is not None


class SelectsForExperts(AsksForTokens):
    """Chooses two of four probabilities of each of eight tokens by a mask, as Megatron 0.12.3 does for experts."""

    config = SimpleNamespace(params_dtype=torch.float32, moe_router_topk=2, **MLP)
    selected = ()

    def forward(self, tokens, positions, mask, labels=None):
        hidden = self.embedding(tokens)
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        chosen = hidden.view(8, 4).T.contiguous().masked_select(torch.ones(4, 8, dtype=torch.bool))
        self.selected = chosen.shape
        return chosen.sum()


def test_every_expert_gets_as_many_tokens():
    model = SelectsForExperts()
    assert saved_activations(model, seq_length=8, micro_batch_size=1, hidden_size=4) is not None
    assert model.selected == (16,)


class SharesKeys(AsksForTokens):
    """One layer of attention, in which two heads share keys and values, and a linear layer."""

    config = SimpleNamespace(params_dtype=torch.float32, **MLP)

    def __init__(self):
        super().__init__()
        self.decoder.layers = torch.nn.ModuleList([Linear(4, 4, device="meta")])
        self.attention = DotProductAttention(2, 2)

    def forward(self, tokens, positions, mask, labels=None):
        hidden = self.embedding(tokens.T).view(8, 1, 2, 2)
        self.decoder.layers[0].forward = lambda x: self.attention(x, x[:, :, :1], x[:, :, 1:])
        return self.decoder.layers[0](hidden).sum()


def test_fused_attention_saves_no_scores_whatever_torch_does(monkeypatch):
    """PyTorch 2.6 computes attention of shared heads on the processor with scores."""

    def with_scores(query, key, value, mask, *_, **how):
        key, value = (one.repeat_interleave(2, 1) for one in (key, value))
        return torch.softmax(query @ key.transpose(2, 3), -1) @ value

    monkeypatch.setattr(F, "scaled_dot_product_attention", with_scores)
    saved = saved_activations(SharesKeys(), seq_length=8, micro_batch_size=1, hidden_size=4)
    assert saved is not None
    query = 4 * 8 * 4
    key = value = query // 2
    assert saved.activation_bytes[-1] == query + key + value + 4 * 8 * 2
