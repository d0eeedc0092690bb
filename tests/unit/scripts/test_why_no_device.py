"""Where a machine has a GPU that PyTorch does not see, the set-up says so."""

import pytest
import torch
import why_no_device
from places import ROOT

OLD = (
    "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: ..."
)


def refuse(error: Exception):
    def init():
        raise error

    return init


@pytest.mark.parametrize(
    ("init", "said"),
    [
        (refuse(RuntimeError(OLD)), "The NVIDIA driver on your system is too old (found version 12080)"),
        (refuse(AssertionError("Torch not compiled with CUDA enabled")), "Torch not compiled with CUDA enabled"),
        (lambda: None, ""),
    ],
)
def test_a_device_that_torch_does_not_see_is_said_in_its_words(monkeypatch, init, said):
    monkeypatch.setattr(why_no_device.allocator, "may_have_cuda", lambda environment: True)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert why_no_device.why().endswith(said) and bool(why_no_device.why()) == bool(said)


def test_nothing_is_said_where_devices_are_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "init", refuse(RuntimeError(OLD)))
    assert why_no_device.why() == "" and "scripts/why_no_device.py" in (ROOT / "scripts" / "setup.sh").read_text()
