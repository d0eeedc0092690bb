"""What the kernel takes for packets and charges to no rank."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.measure import rank_program
from megatron_ext.measure.hostcpu import softirq_time
from megatron_ext.measure.hostcpu.softirq_time import SoftirqTime, Spent, idle_us, per_byte
from megatron_ext.measure.sampling import Samples, sample
from megatron_ext.runtime.device import HostDevice

STAT = """cpu  900 0 900 9000 90 0 9 9 0 0
cpu0 100 0 50 1000 5 0 3 2 0 0
cpu1 200 0 50 2000 7 0 3 4 0 0
cpu12 300 0 50 4000 9 0 3 6 0 0
intr 1 2 3
"""
SECOND = 1e6
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("processors", "ticks"), [({0}, 1007), ({0, 1}, 3018), ({12}, 4015), ({2}, 0)])
def test_idle_of_the_processors_asked_for(processors, ticks):
    assert idle_us(STAT, frozenset(processors), 100) == pytest.approx(ticks * 1e4)


def test_what_no_rank_was_charged_with_is_by_byte():
    """Two ranks on two processors for ten seconds: 6 s busy, 4 s charged, of the other 2 s one is there without any
    gather too."""
    quiet = Spent(2 * SECOND, 0.0, 0.2 * SECOND)
    own = {"gpu": Spent(10 * SECOND, 2 * SECOND, 6 * SECOND, 50_000_000)}
    assert per_byte([("a", quiet, own), ("a", quiet, own)]) == {"gpu": pytest.approx(0.01)}


def test_nodes_with_processors_of_their_own_count_each():
    quiet = Spent(2 * SECOND, 0.0, 0.0)
    first, second = ({"gpu": Spent(10 * SECOND, 2 * SECOND, busy * SECOND, 50_000_000)} for busy in (3, 5))
    assert per_byte([("a", quiet, first), ("b", quiet, second)]) == {"gpu": pytest.approx(0.04)}


def test_a_rank_without_a_part_counts_with_what_it_was_charged():
    quiet = Spent(SECOND, 0.0, 0.0)
    with_part, without = (
        {"p2p": Spent(SECOND, SECOND, 1.5 * SECOND, 1000)},
        {"p2p": Spent(SECOND, 0.25 * SECOND, 1.5 * SECOND, 0)},
    )
    assert per_byte([("a", quiet, with_part), ("a", quiet, without)]) == {"p2p": pytest.approx(250.0)}


def test_never_below_nothing():
    quiet = Spent(SECOND, 0.0, 0.5 * SECOND)
    assert per_byte([("a", quiet, {"gpu": Spent(SECOND, 0.9 * SECOND, SECOND, 1000)})]) == {"gpu": 0.0}


def _fabric(monkeypatch, device="cpu"):
    monkeypatch.setattr(softirq_time.dist, "all_gather_object", lambda everyone, own: everyone.__setitem__(0, own))
    return SimpleNamespace(
        rank=0,
        world_size=1,
        torch_device=SimpleNamespace(type=device),  # torch.device("cuda") is the CPU where compatibility is installed
        device=HostDevice(),
        agree=lambda value: value,
        barrier=lambda: None,
    )


def _at_rest(watch: SoftirqTime) -> SoftirqTime:
    """As on processors that had nothing to do before: what they have is not for a test to say."""
    watch.quiet = Spent(SECOND, 0.0, 0.0)
    return watch


def _moved(seconds: float, action) -> Samples:
    end, samples = time.monotonic() + seconds, Samples()
    while time.monotonic() < end:
        action()
    samples.transfers = 10
    return samples


def _charged_us(pid: int) -> float:
    """What the scheduler charged a process with, schedstat in proc(5): microseconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def test_work_of_others_during_a_visit_is_found_and_own_work_is_not(monkeypatch):
    """Another process stands for the kernel; real processors, real /proc/stat.

    It is held to what that process was charged with, and to all that the processor had beside it: how much of a
    second a process gets is for the machine to say.
    """
    processor = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processor)
    try:
        watch = _at_rest(SoftirqTime(_fabric(monkeypatch), 0.0))
        with subprocess.Popen(
            [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
        ) as other:
            try:
                other.stdout.readline()
                charged_us, began = _charged_us(other.pid), time.monotonic()
                watch.watch("gpu", 1000, lambda: _moved(1.0, lambda: time.sleep(0.01)))
                charged_us, elapsed_us = _charged_us(other.pid) - charged_us, (time.monotonic() - began) * 1e6
            finally:
                other.kill()
        found = watch.us_per_byte("kernel")["gpu"] * 10_000
        assert 0.7 * charged_us < found < elapsed_us + TICK_US
        own = _at_rest(SoftirqTime(_fabric(monkeypatch), 0.0))
        began_us, began = time.process_time() * 1e6, time.monotonic()
        own.watch("gpu", 1000, lambda: _moved(1.0, lambda: None))
        spent_us, elapsed_us = time.process_time() * 1e6 - began_us, (time.monotonic() - began) * 1e6
        assert own.us_per_byte("kernel")["gpu"] * 10_000 < elapsed_us - spent_us + 2 * TICK_US
        assert spent_us > 10 * TICK_US, "too little for the line above to tell own work from that of others"
        assert SoftirqTime(_fabric(monkeypatch), 0.0).us_per_byte("kernel") == {}
    finally:
        os.sched_setaffinity(0, before)


def test_it_is_what_a_curve_holds_beside_what_ranks_were_charged_with():
    passes = {(name, 1000): [([(5.0,)], [1.0], [2.0])] for name in ("gpu", "cpu")}
    curves = rank_program.curves_of(passes, set(), {"gpu": 0.01})
    assert curves["gpu"][0]["processor_us"] == pytest.approx(12.0) and curves["cpu"][0]["processor_us"] == 2.0


def test_transfers_that_warm_up_count_as_bytes(monkeypatch):
    """Their packets are in what the processors did."""
    seen = []
    operation = SimpleNamespace(
        messages=2,
        computes=False,
        issue=lambda size, round_index: seen.append(size) or SimpleNamespace(wait=lambda: None),
    )
    samples = sample(_fabric(monkeypatch), operation, 1000, 0.01, max_rounds=5)
    assert samples.transfers == 2 * len(seen) and len(samples.us) == len(seen) - 2


def test_copies_and_devices_are_not_watched(monkeypatch):
    watch = SoftirqTime(_fabric(monkeypatch), 0.0)
    watch.watch("cpu", 1000, Samples)
    assert watch.us_per_byte("kernel") == {}
    on_device = SoftirqTime(_fabric(monkeypatch, "cuda"), 0.0)
    on_device.watch("gpu", 1000, Samples)
    assert not on_device.active and on_device.us_per_byte("kernel") == {}


def test_processors_are_watched_at_rest_for_long_enough_to_tell(monkeypatch):
    """Idle time comes in steps: over no time at all, one step would be everything."""
    assert SoftirqTime(_fabric(monkeypatch), 0.0).quiet.wall_us > 15 * TICK_US
