"""A chunk that cannot run without data is not counted, and the reason is said."""

import pytest
import torch

from megatron_ext.megatron.saved_activations import saved_activations


class NeedsData(torch.nn.Module):
    """A chunk whose only layer reads what its tensors hold, as a fused kernel does."""

    pre_process = True
    config = None

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
