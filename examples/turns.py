"""Turns of two training runs that share a machine: a few iterations of one, then a few of the other.

Both runs are started together and meet the same states of the machine, so that clock drift does not favour one of them.
They change turns between iterations, when no collective is running.
"""

import time
from pathlib import Path

WAIT_S = 0.005


class Turns:
    """One run's turns: ``--interleave DIRECTORY,NUMBER,ITERATIONS``.

    The file ``turn`` in the directory holds the number of the present turn. Even turns belong to run 0, odd turns to
    run 1. Every rank reads the file, and rank 0 writes it. Both runs train equally many iterations.
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
        """End the turn if ``iteration``, which has ended on every rank, was the last of the turn."""
        if self.writes and (last or iteration % self.iterations == self.iterations - 1):
            new = self.file.with_suffix(".new")
            new.write_text(str(2 * (iteration // self.iterations) + self.number + 1))
            new.replace(self.file)

    def _turn(self) -> int:
        return int(self.file.read_text()) if self.file.exists() else 0
