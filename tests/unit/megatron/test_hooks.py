"""Where a run begins: at the script's hook, or at the first one in megatron/ where the script has none."""

import argparse
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks, lifecycle, one_line_end


def test_a_script_without_a_hook_begins_at_the_parser(monkeypatch):
    began = []
    monkeypatch.setattr(one_line_end, "install", lambda: began.append("one line"))
    monkeypatch.setattr(hooks.atexit, "register", began.append)
    monkeypatch.setattr(hooks, "started", False)
    monkeypatch.delitem(sys.modules, "megatron.training", raising=False)
    hooks.add_arguments(argparse.ArgumentParser())  # of the example: it trains without Megatron's scripts
    assert began == []
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    for _ in range(2):
        parser = hooks.add_arguments(argparse.ArgumentParser())
    assert began == ["one line", hooks.require_end]
    assert "--user-defined-schedule" in parser.format_help()


def test_a_schedule_that_megatron_would_not_read_is_refused(monkeypatch):
    monkeypatch.setattr(hooks, "started", True)
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", "c.yaml", "--user-defined-schedule", "s.json"])
    with pytest.raises(InputError, match="^--yaml-cfg: "):
        hooks.add_arguments(argparse.ArgumentParser())


def test_a_run_that_stays_for_readers_ends_where_the_next_training_has_no_schedule(monkeypatch):
    closed = []
    kept = SimpleNamespace(finish=lambda read_later: True, close=lambda: closed.append(True))
    monkeypatch.setattr(lifecycle, "Run", lambda *what: kept)
    monkeypatch.setattr(hooks, "ended", False)
    monkeypatch.setattr(hooks.atexit, "register", lambda function: None)
    hooks.configure("schedule.json")
    hooks.finish()
    assert hooks.active() is kept and closed == []
    assert hooks.configure(None) is None
    assert hooks.active() is None and closed == [True]


def test_a_schedule_has_no_part_where_nothing_is_trained(monkeypatch):
    """With --skip-train Megatron does not wrap its models: one that is built late would wait for that without end."""
    args = SimpleNamespace(skip_train=True, user_defined_schedule="schedule.json")
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))
    spec = importlib.util.find_spec(hooks.__name__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)  # of a process that has not asked yet
    spec.loader.exec_module(fresh)
    assert fresh.active() is None
