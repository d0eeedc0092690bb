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
    monkeypatch.setattr(one_line_end.worker, "begin_exit", lambda: codes.append("threads are told"))
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
    sys.excepthook(OSError, ConnectionRefusedError(111, "Connection refused"), None)  # of a logger, for example
    assert seen == [RuntimeError, OSError]


FAULT = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_kernel_that_faults_is_one_line_with_the_place_where_it_is_noticed(leaving, monkeypatch, capfd, scheduled):
    """Of a run by a schedule; Megatron's own are left to Megatron."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    monkeypatch.setattr(one_line_end.worker, "on_failure", (lambda error: None) if scheduled else None)
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(FAULT)
    assert one_line_end.says_all(raised.value) is scheduled
    if scheduled:
        with pytest.raises(Left):
            one_line_end.end(raised.value)
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(
            "megatron-ext: rank 1: CUDA error: an illegal memory access was encountered; noticed in "
        )
        assert "test_one_line_end.py:" in line and leaving == ["threads are told", 1]


def test_a_trace_that_nobody_wrote_is_an_error(leaving, monkeypatch, capfd):
    args = SimpleNamespace(user_defined_schedule_trace="t.json", user_defined_schedule_check=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))
    with pytest.raises(Left):
        hooks.require_end()
    assert leaving == [1] and "t.json was not written: the process ended before" in capfd.readouterr().err
    monkeypatch.setattr(hooks, "ended", True)
    hooks.require_end()
    monkeypatch.setattr(hooks, "ended", False)
    args.skip_train = True
    hooks.require_end()
    args.skip_train, args.user_defined_schedule_trace = False, None
    hooks.require_end()
    assert leaving == [1]


def test_workers_of_a_data_loader_end_with_their_rank(leaving, monkeypatch):
    loader = SimpleNamespace(kill=lambda: leaving.append("loader ends"))
    monkeypatch.setattr("multiprocessing.active_children", lambda: [loader])
    with pytest.raises(Left):
        one_line_end.end(InputError("is wrong"))
    assert leaving == ["threads are told", "loader ends", 2]
