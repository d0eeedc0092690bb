"""Where a run begins: at the script's hook, or at the first one in megatron/ where the script has none."""

import argparse
import sys
from types import ModuleType

from megatron_ext.megatron import hooks, one_line_end


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
