"""Files in which the kernel says what this machine and this process are."""

from pathlib import Path


def text_of(path: Path) -> str:
    """What the file says; nothing where there is none, or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
