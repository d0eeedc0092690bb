"""Where the project lies, for tests."""

import os
from pathlib import Path

ROOT = Path(os.environ.get("MEGATRON_EXT_TEST_ROOT", Path(__file__).parents[2]))
"""The checkout whose package is tested: this one, unless old_code.py judges another."""
HELPERS = Path(__file__).parent
DATA_DIR = ROOT / "tests" / "data"
MEGATRON = ROOT / ".megatron"
"""The private, patched megatron-core tree that scripts/setup.sh makes."""


def pinned_core() -> str:
    """The release of megatron-core that scripts/setup.sh unpacks for this interpreter."""
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line.startswith("megatron-core==")]
    (version,) = [str(pin.specifier)[2:] for pin in pins if pin.marker is None or pin.marker.evaluate()]
    return version
