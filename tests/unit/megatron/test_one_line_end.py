"""A run that ends early says why in one line."""

import sys
from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.launch.launcher import PEER_LOST_CODE
from megatron_ext.megatron import hooks, one_line_end
from megatron_ext.runtime.drive import DriveError


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


LOST = RuntimeError("[../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1\nby whom nobody knows")
LOST_SAID = "rank 1: another rank is gone: [../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (InputError("is wrong", file="s.json"), "s.json: is wrong", 2),
        (DriveError("states 3: the drive is gone"), "rank 1: states 3: the drive is gone", 1),
        (LOST, LOST_SAID, PEER_LOST_CODE),
    ],
)
def test_these_errors_end_with_one_line_and_others_as_before(leaving, monkeypatch, capfd, error, said, code):
    seen = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.excepthook", lambda *error: seen.append(error[0]))
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    one_line_end.install()
    with pytest.raises(Left):
        sys.excepthook(type(error), error, None)
    assert leaving == ["threads are told", code] and capfd.readouterr().err == f"megatron-ext: {said}\n"
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
