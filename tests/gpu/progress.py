"""What a program with several cases tells of them while it runs."""

import json
import os
import time
from pathlib import Path


class Progress:
    """Lines in ``FOLDER/progress.jsonl``, which ``job_runs.py`` reads; ``writes``: whether this rank tells."""

    def __init__(self, folder: Path, *, writes: bool = True):
        self._lines = open(folder / "progress.jsonl" if writes else os.devnull, "a", buffering=1)  # noqa: SIM115

    def begins(self, case: str) -> None:
        """A case begins."""
        print(f"== {case}", flush=True)
        self._lines.write(json.dumps({"begun": case, "at": time.time()}) + "\n")

    def ends(self, case: str, *, status: str, said: str = "", figures: dict) -> None:
        """It has ended."""
        self._lines.write(json.dumps({"ended": case, "status": status, "said": said, "figures": figures}) + "\n")
