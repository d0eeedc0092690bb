"""Flags between two processes: who sees a flag sees the data that were written before it."""

import mmap
import multiprocessing

import numpy as np
import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import flags as flags_module
from megatron_ext.runtime.flags import LINE, AtomicFlags, OrderedFlags, flags_bytes, keeps_store_order, open_flags

ROUNDS = 1_000_000
DATA = 4096
"""Where the data begin, in bytes."""


def write(memory, flags_class, flag_first: bool) -> None:
    flags, data = flags_class(memory, 1, 2), np.frombuffer(memory, dtype=np.int64, count=1, offset=DATA)
    for number in range(1, ROUNDS + 1):
        if flag_first:
            flags.store(0, 0, number)
            data[0] = number
        else:
            data[0] = number
            flags.store(0, 0, number)


def mixtures(flags_class, flag_first: bool = False) -> int:
    """How often a reader saw a flag and not yet the data, while another process wrote both ``ROUNDS`` times."""
    memory = mmap.mmap(-1, 2 * DATA)
    flags, data = flags_class(memory, 1, 2), np.frombuffer(memory, dtype=np.int64, count=1, offset=DATA)
    writer = multiprocessing.get_context("fork").Process(target=write, args=(memory, flags_class, flag_first))
    writer.start()
    found, seen = 0, 0
    while seen < ROUNDS and writer.exitcode in (None, 0):
        seen = flags.load(0, 0)
        found += int(data[0] < seen)
    writer.join()
    assert writer.exitcode == 0
    return found


MACHINES = [AtomicFlags, *([OrderedFlags] if keeps_store_order() else [])]


@pytest.mark.parametrize("flags_class", MACHINES)
def test_who_sees_a_flag_sees_the_data_before_it(flags_class):
    assert mixtures(flags_class) == 0


def test_the_litmus_finds_flags_that_come_before_their_data():
    assert mixtures(MACHINES[-1], flag_first=True) > 0


@pytest.mark.parametrize("flags_class", MACHINES)
def test_every_flag_is_its_own(flags_class):
    memory = mmap.mmap(-1, flags_bytes(3, 2))
    flags = flags_class(memory, 3, 2)
    for row in range(3):
        for rank in range(2):
            flags.store(row, rank, -10 * row - rank)
    assert [[flags.load(row, rank) for rank in range(2)] for row in range(3)] == [[0, -1], [-10, -11], [-20, -21]]
    first = flags.address(0, 0)
    assert [flags.address(row, rank) - first for row in range(3) for rank in range(2)] == list(range(0, 6 * LINE, LINE))


@pytest.mark.parametrize("machine, flags_class", [("x86_64", OrderedFlags), ("aarch64", AtomicFlags)])
def test_a_machine_of_weak_order_uses_atomics(monkeypatch, machine, flags_class):
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert type(open_flags(mmap.mmap(-1, flags_bytes(1, 1)), 1, 1)) is flags_class


def test_without_libatomic_a_machine_of_weak_order_is_refused(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(flags_module.ctypes, "PyDLL", missing)
    with pytest.raises(InputError, match="platform = 'aarch64': .*libatomic"):
        open_flags(mmap.mmap(-1, flags_bytes(1, 1)), 1, 1)
