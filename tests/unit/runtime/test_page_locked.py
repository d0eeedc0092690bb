"""Page-locked memory of the size that was asked for, plus one element, unlocked by the issuing thread when unused."""

import gc
import threading

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.device import CudaDevice
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_pool import HostPool, Sharers
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.workload.drive_reads import DriveReads


class Driver(dict):
    """Bytes by address of what is page-locked; refuses more than 1 MiB at once. ``callers``: threads that unlocked."""

    def __init__(self):
        self.callers = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if size > 1 << 20:
            return 2
        self[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.callers.append(threading.current_thread())
        self.pop(address, None)


@pytest.fixture
def locked(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    CudaDevice(torch.device("cuda", 0)).close()  # what other tests have left
    driver.callers.clear()
    return driver


@pytest.fixture
def device():
    return CudaDevice(torch.device("cuda", 0))


def test_a_tensor_takes_what_it_has_and_gives_it_back_with_its_last_view(locked, device):
    tensor = device.host_tensor(5000, torch.bfloat16)
    assert tensor.dtype == torch.bfloat16 and tensor.shape == (5000,) and not tensor.any()
    assert locked == {tensor.data_ptr(): 10_002}
    tensor.fill_(3)
    view = tensor[10:].view(torch.int16)
    del tensor
    device.close()
    assert len(locked) == 1 and (view == view[0]).all()
    del view
    device.close()
    assert locked == {}


def test_a_block_that_dies_on_another_thread_is_only_listed_there(locked, device):
    """It is unlocked by the thread that locks the next one, or at the end; its memory stays until then."""
    held = [device.host_tensor(64, torch.float32)]
    (address,) = locked
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert locked == {address: 260} and locked.callers == []
    other = device.host_tensor(64, torch.float32)
    assert locked == {other.data_ptr(): 260} and locked.callers == [threading.main_thread()]
    del other
    device.close()
    assert locked == {}


def test_a_block_whose_unlocking_fails_stays_listed(locked, device, monkeypatch):
    device.host_tensor(64, torch.float32)
    with monkeypatch.context() as broken:
        broken.setattr(torch.cuda, "synchronize", lambda device: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            device.close()
    assert len(locked) == 1
    device.close()
    assert locked == {}


def test_nothing_is_locked_for_nothing_and_a_refusal_leaves_nothing(locked, device, monkeypatch):
    """Not even the runtime's last error, which torch would raise behind a kernel that has nothing to do with it."""
    errors = ["CUDA error: out of memory"]

    def kernel(*shape, device):
        raise RuntimeError(errors.pop())

    monkeypatch.setattr(torch, "ones", kernel)
    assert device.host_tensor(0, torch.float32).numel() == 0
    with pytest.raises(InputError, match=r"2097156 bytes of host memory .* \(cudaHostRegister: error 2\)"):
        device.host_tensor(1 << 19, torch.float32)
    device.close()
    assert locked == {} and locked.callers == [] and errors == []


def host_pool(device, directory) -> HostPool:
    group = RankGroup(0, "chunk 0", torch.ones(256), 0, 1)
    pool = HostPool([Sharers([group], 0, 1, lambda value: [value])], {0}, set(), device)
    pool.pin()
    return pool


def nvme_pool(device, directory) -> NvmePool:
    return NvmePool(directory, [], slots=1, slot_bytes=4096, settings=DriveReads(), device=device)


@pytest.mark.parametrize("make", [host_pool, nvme_pool])
def test_a_pool_of_a_run_that_is_refused_is_unlocked_as_well(locked, device, tmp_path, make):
    """Nobody closes it. With its memory unmapped but still locked, the next run could not lock what lies there then, or
    the device would copy from the old pages."""
    pool = make(device, tmp_path)
    assert locked
    del pool
    gc.collect()
    assert locked and locked.callers == []
    device.close()
    assert locked == {}


@pytest.mark.parametrize("make", [host_pool, nvme_pool])
def test_closing_a_pool_unlocks_its_memory_once(locked, device, tmp_path, make):
    pool = make(device, tmp_path)
    number = len(locked)
    pool.close()
    del pool
    device.close()
    assert locked == {} and len(locked.callers) == number
