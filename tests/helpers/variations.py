"""Variations of a test: some in CI, all of them in tests/nightly.

A test takes ``some(values, number)`` where each variation costs seconds and the first few show most. The mark
``nightly`` is for a test that costs seconds and shows together what tests of CI show one by one. With
MEGATRON_EXT_TEST_ALL=1, which tests/nightly/test_all_variations.py sets, everything runs.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "MEGATRON_EXT_TEST_ALL"
ALL = VARIABLE in os.environ


def some(values: Sequence[T], number: int) -> Sequence[T]:
    """The first ``number`` of ``values``; all of them in tests/nightly."""
    return values if ALL else values[:number]
