"""What every result says of where it comes from (machine, versions, date, load), and how it is written."""

import argparse
import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import pictures

from megatron_ext.formats import json_files


def options(doc: str | None, **defaults) -> argparse.Namespace:
    """Options of the command line, ``--name`` with the type of its default; the help is the first line of ``doc``."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def about_this_machine(*, load_before: float | None = None) -> dict:
    """Machine, versions and date; ``load_before`` is the load average when the benchmark began
    (other programs on the machine shift every time that is not a ratio within one run)."""
    versions = {}
    for package in ("torch", "numpy", "ortools"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "load_before": load_before,
    }


def write(out: str | Path, result: dict, *, load_before: float, **about) -> None:
    """Write a result with what it says of itself, ``about`` included, and its picture beside it, where it has one."""
    json_files.save(out, {"about": about_this_machine(load_before=load_before) | about, **result}, indent=1)
    pictures.draw(out)
