"""A run whose pipeline schedule no hook reaches is refused before its first step."""

import pytest
from megatron.core.pipeline_parallel import schedules

from megatron_ext.checkout.hook_table import SCHEDULE_FUNCTIONS
from megatron_ext.megatron.refusals import schedule_without_hooks


@pytest.mark.parametrize("name", sorted(SCHEDULE_FUNCTIONS))
def test_the_schedules_with_hooks_pass(name, monkeypatch):
    function = getattr(schedules, name)
    monkeypatch.setattr(schedules, "get_forward_backward_func", lambda: function)
    assert schedule_without_hooks() is None


def test_another_schedule_is_named(monkeypatch):
    def zero_bubble(): ...

    monkeypatch.setattr(schedules, "get_forward_backward_func", lambda: zero_bubble)
    assert "zero_bubble, which has no hooks" in (schedule_without_hooks() or "")
