"""A run that ends early says why in one line."""

import sys
from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks, one_line_end


class Left(BaseException):
    """The process would have ended."""


@pytest.fixture
def leaving(monkeypatch):
    codes = []

    def leave(code):
        codes.append(code)
        raise Left

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(one_line_end, "begin_exit", lambda: codes.append("threads are told"))
    monkeypatch.setattr(one_line_end, "OTHER_RANKS_SECONDS", 0.0)
    return codes


def test_bad_input_ends_with_one_line_and_other_errors_as_before(leaving, monkeypatch, capfd):
    seen = []
    monkeypatch.setattr("sys.excepthook", lambda *error: seen.append(error[0]))
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    one_line_end.install()
    with pytest.raises(Left):
        sys.excepthook(InputError, InputError("is wrong", file="s.json"), None)
    assert leaving == ["threads are told", 2] and capfd.readouterr().err == "megatron-ext: s.json: is wrong\n"
    sys.excepthook(RuntimeError, RuntimeError("x"), None)
    assert seen == [RuntimeError]


def test_a_trace_that_nobody_wrote_is_an_error(leaving, monkeypatch, capfd):
    args = SimpleNamespace(user_defined_schedule_trace="t.json", user_defined_schedule_check=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))
    with pytest.raises(Left):
        hooks.require_end()
    assert leaving == [1] and "t.json was not written: the process ended before" in capfd.readouterr().err
    monkeypatch.setattr(hooks, "ended", True)
    hooks.require_end()
    monkeypatch.setattr(hooks, "ended", False)
    args.user_defined_schedule_trace = None
    hooks.require_end()
    assert leaving == [1]
