"""Small pieces of tests on the strict stand-in of a device."""

import mmap
import threading

import torch
from happens_before import HappensBefore
from strict_device import StrictDevice


def open_device(**how) -> StrictDevice:
    return StrictDevice(how.pop("rank", 0), 0, how.pop("order", "late"), circle_seconds=0.3, stuck_seconds=5, **how)


def host_tensor(numel: int, locked: bool = True) -> torch.Tensor:
    tensor = torch.frombuffer(mmap.mmap(-1, numel * 4), dtype=torch.float32)
    if locked:
        torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    return tensor


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, name="other")
    thread.start()
    return thread


def judged(device: StrictDevice) -> HappensBefore:
    return HappensBefore([device.engine.entries])


def raced(device: StrictDevice) -> list[list[str]]:
    """The first words of pairs that nothing orders."""
    return sorted(sorted(label.split()[0] for label in race) for race in judged(device).races)
