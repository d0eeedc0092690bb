"""Every verb forgets a launcher that has started nothing."""

import os

from megatron_ext.cli.main import main


def test_a_verb_does_not_take_a_single_task_for_a_launched_rank(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["no-such-verb"]) == 2 and "RANK" not in os.environ and "MASTER_ADDR" not in os.environ
