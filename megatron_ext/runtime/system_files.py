"""Reads files in which the kernel describes this machine and this process."""

from pathlib import Path


def text_of(path: Path) -> str:
    """The content of the file; an empty string if it does not exist or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
