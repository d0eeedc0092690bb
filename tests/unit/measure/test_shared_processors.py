"""Rounds of compute on processors that ranks share."""

import pytest

from megatron_ext.measure.hostcpu.shared_processors import (
    LEAST_ROUNDS,
    MAX_COMPUTE_ROUNDS,
    MAX_REPEATS,
    Place,
    Round,
    counts_within,
    kept_busy,
    nodes_sharing,
)


@pytest.mark.parametrize("micro_batch_s", [0.001, 0.02, 0.1, 0.2, 0.4, 0.7, 1.5, 4.0, 9.0])
@pytest.mark.parametrize("seconds", [7.5, 15.0, 30.0])
def test_walks_take_the_time_there_is_however_long_they_are(micro_batch_s, seconds):
    """Alone, and all ranks of two on a processor at once: three times a micro-batch."""
    rounds, repeats, warmup = counts_within(seconds, micro_batch_s * 1e6, parts=5)
    takes = 3 * micro_batch_s * rounds * (warmup + repeats)
    assert takes <= max(3 * seconds, 3 * micro_batch_s * LEAST_ROUNDS)
    assert repeats >= 1 and (rounds >= 5 if 3 * micro_batch_s * 5 <= seconds else rounds >= LEAST_ROUNDS)
    assert warmup or repeats == 1


def test_turns_are_rather_many_than_long():
    """A measurement that is stopped now and then must not have a stop in most of its rounds."""
    rounds, repeats, warmup = counts_within(94, 0.2e6, parts=5)
    assert rounds >= 40 and warmup + repeats <= 4
    assert counts_within(94, 100.0, parts=5) == (MAX_COMPUTE_ROUNDS, MAX_REPEATS, 1)


def test_nodes_on_one_kernel_share_the_processors_that_both_may_use():
    two = frozenset((0, 1))
    assert nodes_sharing([Place(0, "a", two), Place(0, "a", two)]) == 1
    assert nodes_sharing([Place(n, "a", two) for n in range(4)]) == 4  # four emulated nodes
    assert nodes_sharing([Place(n, str(n), two) for n in range(4)]) == 1  # four machines
    assert nodes_sharing([Place(0, "a", frozenset((0,))), Place(1, "a", frozenset((1,)))]) == 1


def test_processors_are_not_kept_busy_until_the_last_rank_is_done():
    even, uneven = [Round(0, 200, 100)] * 4, [Round(0, 150, 100)] * 2 + [Round(0, 250, 100)] * 2
    assert kept_busy([[one] for one in even], processors=2) == 1.0
    assert kept_busy([[one] for one in uneven], processors=2) == 400 / 500
    assert (
        kept_busy([list(rounds) for rounds in zip(uneven, even, uneven)], processors=2) == 400 / 500
    )  # the median round
