"""Where a run begins: at the script's hook, or at the first one in megatron/ where the script has none."""

import argparse
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_ext.cpubench import parser_options
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import cpu_compat, hooks, lifecycle, one_line_end


def test_a_script_without_a_hook_begins_at_the_parser(monkeypatch):
    began = []
    monkeypatch.setattr(one_line_end, "install", lambda: began.append("one line"))
    monkeypatch.setattr(hooks.atexit, "register", began.append)
    monkeypatch.setattr(hooks, "started", False)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--user-defined-schedule=s.json"])
    monkeypatch.delitem(sys.modules, "megatron.training", raising=False)
    hooks.add_arguments(argparse.ArgumentParser())  # of the example: it trains without Megatron's scripts
    assert began == []
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    for _ in range(2):
        parser = hooks.add_arguments(argparse.ArgumentParser())
    assert began == ["one line", hooks.require_end]
    assert "--user-defined-schedule" in parser.format_help()


@pytest.mark.parametrize("option", ["--user-defined-schedule-trace", "--delayed-parameter-update", "--seed"])
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_training_without_our_options_is_left_alone(monkeypatch, capsys, option, local_rank):
    """Where its node shows no GPU, and where it ends with an error."""
    began = []
    monkeypatch.setattr(one_line_end, "install", lambda: began.append("one line"))
    monkeypatch.setattr(cpu_compat, "install", lambda: began.append("CPU") or True)
    monkeypatch.setattr(cpu_compat, "is_installed", lambda: False)
    monkeypatch.setattr(parser_options, "without_a_gpu", lambda: None)
    monkeypatch.setattr(hooks.atexit, "register", lambda function: None)
    monkeypatch.setattr(hooks, "started", False)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", option, "1"])
    monkeypatch.setenv("RANK", "8")  # on the second of two nodes
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    hooks.on_pretrain()
    assert began == ([] if option == "--seed" else ["one line", "CPU"])
    assert ("trains on the CPU" in capsys.readouterr().err) is (option != "--seed" and local_rank == "0")


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
