"""Page-locked memory of exactly the size that was asked for, unlocked when nobody has it any more."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.runtime.device import CudaDevice


@pytest.fixture
def locked(monkeypatch):
    """Bytes by address of what a driver has page-locked; it refuses more than 1 MiB at once."""
    known = {}

    def register(address: int, size: int, flags: int) -> int:
        if size > 1 << 20:
            return 2
        known[address] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=known.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return known


def test_a_tensor_takes_what_it_has_and_gives_it_back_with_its_last_view(locked):
    tensor = CudaDevice(torch.device("cuda", 0)).host_tensor(5000, torch.bfloat16)
    assert tensor.dtype == torch.bfloat16 and tensor.shape == (5000,) and not tensor.any()
    assert locked == {tensor.data_ptr(): 10_000}
    tensor.fill_(3)
    view = tensor[10:].view(torch.int16)
    del tensor
    assert len(locked) == 1 and (view == view[0]).all()
    del view
    assert locked == {}


def test_nothing_is_locked_for_nothing_and_a_refusal_leaves_nothing(locked):
    device = CudaDevice(torch.device("cuda", 0))
    assert device.host_tensor(0, torch.float32).numel() == 0
    with pytest.raises(RuntimeError, match="cudaHostRegister of 2097152 bytes failed with error 2"):
        device.host_tensor(1 << 19, torch.float32)
    assert locked == {}
