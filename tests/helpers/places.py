"""Where the project lies, for tests."""

import os
from pathlib import Path

ROOT = Path(os.environ.get("MEGATRON_EXT_TEST_ROOT", Path(__file__).parents[2]))
"""The checkout whose package is tested: this one, unless old_code.py judges another."""
HELPERS = Path(__file__).parent
DATA_DIR = ROOT / "tests" / "data"
MEGATRON = ROOT / ".megatron"
"""The private, patched megatron-core tree that scripts/setup.sh makes."""
