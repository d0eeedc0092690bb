"""The operations by which the host copies, casts, adds and steps take all threads that they may."""

import time

import pytest
import torch

NUMEL, TIMES = 1 << 22, 12
"""16 MB in fp32: far more than torch gives to one thread alone."""


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def share_of_others(operation) -> float:
    """The share of the processor time of ``operation`` that other threads than this one take."""
    operation()
    begin = time.process_time(), time.thread_time()
    for _ in range(TIMES):
        operation()
    spent = time.process_time() - begin[0], time.thread_time() - begin[1]
    return 1 - spent[1] / spent[0]


@pytest.mark.parametrize("number", [2, 1])
def test_no_thread_works_alone_where_there_are_two(threads, number):
    threads(number)
    wide, half = torch.ones(NUMEL), torch.ones(NUMEL, dtype=torch.bfloat16)
    other = torch.ones(NUMEL)
    parameter = torch.ones(NUMEL)
    parameter.grad = other
    step = torch.optim.AdamW([parameter], fused=True).step
    shares = {
        "copy": share_of_others(lambda: wide.copy_(other)),
        "cast": share_of_others(lambda: half.copy_(wide)),
        "add": share_of_others(lambda: wide.add_(other)),
        "clip": share_of_others(lambda: torch.mul(wide, 0.5, out=other)),
        "step": share_of_others(step),
    }
    assert all(share > 0.3 if number == 2 else share < 0.2 for share in shares.values()), shares
