"""Where the ranks were when a check did not end: the text that faulthandler wrote, in full and as one line."""

import re
from pathlib import Path

MOST_FRAMES = 3
MOST_CHARACTERS = 4000

FRAME = re.compile(r'  File "(?:.*/)?([^"/]+)", line (\d+) in (\S+)')


def path_of(folder: str, rank: int) -> Path:
    """The file that a rank's stacks are written to."""
    return Path(folder) / f"rank{rank}.stacks"


def deadline_path(folder: str) -> Path:
    """The file that tells the process that started the ranks when the time for all checks is over."""
    return Path(folder) / "deadline"


def main_thread(text: str) -> list[str]:
    """The innermost frames of the last thread in ``text``, which is the main thread in faulthandler's order."""
    last = re.split(r"(?m)^(?:Current thread|Thread) ", text)[-1]
    return [f"{function} ({file}:{line})" for file, line, function in FRAME.findall(last)[:MOST_FRAMES]]


def said(folder: str, ranks: int) -> tuple[str, dict[str, float | str]]:
    """For all ranks that wrote stacks: where they were, in one line, and the full text by rank."""
    lines, whole = [], {}
    for rank in range(ranks):
        file = path_of(folder, rank)
        text = file.read_text(errors="replace") if file.exists() else ""
        if text:
            signals = re.findall(r"(?m)^Fatal Python error: (.*)$", text)  # that ended the process, if one did
            where = [*signals[:1], *main_thread(text)]
            lines.append(f"rank {rank} in {' < '.join(where)}")
            whole[f"stacks_of_rank_{rank}"] = text[:MOST_CHARACTERS]
    return "; ".join(lines), whole
