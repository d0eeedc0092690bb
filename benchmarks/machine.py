"""What every result says of where it comes from: machine, versions, date, load."""

import os
import platform
from datetime import datetime, timezone
from importlib import metadata


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
