"""Where the project lies, for tests."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
MEGATRON = ROOT / ".megatron"
"""The private, patched megatron-core tree that scripts/setup.sh makes."""
