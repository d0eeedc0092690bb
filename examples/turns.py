"""Turns of two training runs that share a machine: a few iterations of one, then a few of the other.

Both runs are started together and meet the same states of the machine, so that its drift is in neither. They take turns
between iterations, where no collective is under way.
"""

import time
from pathlib import Path

WAIT_S = 0.005


class Turns:
    """One run's part: ``--interleave DIRECTORY,NUMBER,ITERATIONS``.

    The file ``turn`` in the directory holds the number of the turn; even turns are of run 0, odd ones of run 1. Every
    rank reads it, rank 0 writes it. Both runs train equally many iterations.
    """

    def __init__(self, text: str, writes: bool):
        directory, number, iterations = text.rsplit(",", 2)
        self.file, self.number, self.iterations, self.writes = (
            Path(directory) / "turn",
            int(number),
            int(iterations),
            writes,
        )

    def before(self, iteration: int) -> None:
        """Wait until ``iteration`` (from 0) may begin."""
        mine = 2 * (iteration // self.iterations) + self.number
        if iteration % self.iterations == 0:
            while self._turn() < mine:
                time.sleep(WAIT_S)

    def after(self, iteration: int, *, last: bool) -> None:
        """``iteration`` has ended on every rank: hand the turn on where it was the turn's last."""
        if self.writes and (last or iteration % self.iterations == self.iterations - 1):
            new = self.file.with_suffix(".new")
            new.write_text(str(2 * (iteration // self.iterations) + self.number + 1))
            new.replace(self.file)

    def _turn(self) -> int:
        return int(self.file.read_text()) if self.file.exists() else 0
