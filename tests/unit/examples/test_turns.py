"""Two runs take turns of a few iterations, whoever is faster."""

import time
from threading import Thread

import pytest
from turns import Turns


@pytest.mark.parametrize("iterations, turn_iterations", [(6, 2), (7, 3), (3, 3)])
def test_turns_alternate_and_the_last_ends(tmp_path, iterations, turn_iterations):
    order: list[tuple[int, int]] = []

    def train(number: int, iteration_s: float) -> None:
        turns = Turns(f"{tmp_path},{number},{turn_iterations}", writes=True)
        for iteration in range(iterations):
            turns.before(iteration)
            order.append((number, iteration))
            time.sleep(iteration_s)
            turns.after(iteration, last=iteration == iterations - 1)

    runs = [Thread(target=train, args=(number, 0.01 * number)) for number in (0, 1)]
    for run in reversed(runs):
        run.start()
    for run in runs:
        run.join(timeout=100)
    expected = [
        (number, iteration)
        for first in range(0, iterations, turn_iterations)
        for number in (0, 1)
        for iteration in range(first, min(first + turn_iterations, iterations))
    ]
    assert order == expected


def test_ranks_that_do_not_write_hand_nothing_on(tmp_path):
    turns = Turns(f"{tmp_path},0,1", writes=False)
    turns.before(0)
    turns.after(0, last=True)
    assert not list(tmp_path.iterdir())
