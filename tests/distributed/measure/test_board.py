"""Ranks meet in shared memory."""

import mmap
import multiprocessing
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ext.measure import board
from megatron_ext.measure.board import SharedBoard
from megatron_ext.measure.fabric import Fabric

RANKS, ROUNDS = 4, 200


def in_ranks(function):
    """``function(board, rank)`` in as many processes as ranks; fails where one does."""
    memory = mmap.mmap(-1, SharedBoard.size_bytes(RANKS))

    def body(rank):
        function(SharedBoard(memoryview(memory), rank, RANKS), rank)

    fork = multiprocessing.get_context("fork")  # for the memory's sake, which has no name
    processes = [fork.Process(target=body, args=(rank,)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * RANKS


def shared_array(*shape) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape)))).reshape(shape)


@pytest.mark.parametrize("polls", [0, 50])
def test_nobody_leaves_before_everyone_has_come(monkeypatch, polls):
    monkeypatch.setattr(board, "POLLS", polls)
    came, left = shared_array(RANKS, ROUNDS), shared_array(RANKS, ROUNDS)

    def rounds(board, rank):
        for index in range(ROUNDS):
            if (index + rank) % 7 == 0:
                time.sleep(1e-3)  # another rank comes last every time
            came[rank, index] = time.monotonic()
            board.barrier()
            left[rank, index] = time.monotonic()

    in_ranks(rounds)
    assert (came.max(axis=0) <= left.min(axis=0)).all()
    assert (came > 0).all()


def test_who_waits_leaves_the_processor_to_others(monkeypatch):
    monkeypatch.setattr(board, "POLLS", 0)
    used = shared_array(RANKS)

    def wait(board, rank):
        if rank == 0:
            time.sleep(0.5)
        start = time.process_time()
        board.barrier()
        used[rank] = time.process_time() - start

    in_ranks(wait)
    assert (used[1:] < 0.25).all()  # of 0.5 s: it sleeps between two looks


def test_all_ranks_agree_on_what_the_first_says():
    said = shared_array(RANKS, ROUNDS)

    def agree(board, rank):
        for index in range(ROUNDS):
            said[rank, index] = Fabric.agree(SimpleNamespace(board=board, rank=rank), index * 10 + rank)

    in_ranks(agree)
    assert (said == np.arange(ROUNDS) * 10).all()


def test_what_is_posted_is_read_by_others():
    read = shared_array(RANKS, RANKS)

    def exchange(board, rank):
        board.post(rank + 1, 100 + rank)
        board.barrier()
        read[rank] = [board.read(word + 1) for word in range(RANKS)]

    in_ranks(exchange)
    assert (read == 100 + np.arange(RANKS)).all()
