"""Links as slow as asked for, and figures that say so."""

import time

import pytest
import slow_links
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import drive, host_device, machine
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.host_device import HostEvent
from megatron_ext.runtime.recorder import Recorder, log_of
from megatron_ext.workload.drive_reads import DriveReads

BYTES = 1 << 20


@pytest.fixture
def rates(monkeypatch):
    wrapped = ((host_device, "copy_now"), (drive.DriveFile, "start"), (drive.DriveFile, "write"))
    for owner, name in (*wrapped, (machine, "environment")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what is wrapped here is as it was afterwards
    for module in (host_device, drive, machine):
        slow_links.WRAPPED[module.__name__](module)
    return lambda text: monkeypatch.setenv("MEGATRON_EXT_SLOW_LINKS", text)


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def test_a_copy_takes_the_time_of_the_link_and_moves_the_same_bytes(rates):
    source, destination = torch.ones(BYTES, dtype=torch.uint8), torch.zeros(BYTES, dtype=torch.uint8)

    recorder, stream = Recorder(0), HostDevice().stream("test")
    stream.log = log_of(recorder, "gather", "to_device", "cpu", "copy")

    def copy() -> None:
        stream.copy(destination, source)
        stream.record(HostEvent()).synchronize()

    copy()
    assert recorder.events()[0].duration_us < 0.05e6  # a link as it is
    rates("host_link_mb=10")
    assert seconds(copy) >= BYTES / 10e6
    stream.close()
    assert torch.equal(destination, source) and recorder.events()[1].duration_us >= BYTES / 10e6 * 1e6 - 1e3


def test_the_drive_moves_one_after_the_other(rates, tmp_path):
    rates("drive_mb=10")
    memory = memoryview(torch.zeros(BYTES + drive.BLOCK, dtype=torch.uint8).numpy()).cast("B")
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % drive.BLOCK
    memory = memory[start : start + BYTES]
    file = drive.open_own(tmp_path, BYTES, DriveReads(block_bytes=BYTES, queue_depth=1))
    transfers = [drive.Transfer(), drive.Transfer()]

    def move() -> None:
        file.start(memory, 0, "bytes", transfers[0], write=True)
        file.start(memory, 0, "bytes", transfers[1])
        for transfer in transfers:
            transfer.wait()

    assert seconds(move) >= 2 * BYTES / 10e6
    assert seconds(lambda: file.write(memory, 0, "bytes")) >= BYTES / 10e6  # what is published
    file.close()


def test_tables_say_that_links_are_emulated(rates):
    assert "caution" not in machine.environment()["hardware"]
    rates("network_mb=250,host_link_mb=120.5")
    said = machine.environment()["hardware"]["caution"]
    assert said.startswith("EMULATED links: network 250 MB/s, host link 120.5 MB/s: measured and simulated")
    rates("drive_mb=fast")
    with pytest.raises(InputError, match="drive_mb"):
        slow_links.rates()
