"""Where the project lies, for tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent
DATA_DIR = ROOT / "tests" / "data"
MEGATRON = ROOT / ".megatron"
"""The private, patched megatron-core tree that scripts/setup.sh makes."""
