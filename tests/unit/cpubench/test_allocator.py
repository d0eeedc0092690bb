"""Whose settings of the C library's heap hold."""

import pytest

from megatron_ext.cpubench import allocator


@pytest.mark.parametrize("name", allocator.ENVIRONMENT)
def test_a_heap_that_the_user_has_set_is_left_alone(monkeypatch, name):
    for other, value in allocator.ENVIRONMENT.items():
        monkeypatch.setenv(other, value)  # as our launchers set them
    assert allocator.keep_freed_blocks()
    monkeypatch.setenv(name, "4096")
    assert not allocator.keep_freed_blocks()
    monkeypatch.delenv(name)
    assert allocator.keep_freed_blocks()
