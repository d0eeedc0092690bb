"""What jobs of the tier for GPUs are told of the machine."""

import sys
import time
from argparse import Namespace
from pathlib import Path

import device_facts
import drive_place
import pytest
import run
import torch
from case_table import jobs
from device_facts import DeviceFacts
from drive_place import Drive
from simulated_lanes import report_of

from megatron_ext.runtime import host_threads

FACTS = DeviceFacts(environment={}, name="a card", free_bytes=80, node=1, no_flags="no flags")
ARGS = Namespace(dry_run=False, hang="", drive=None, out=Path("/none/report.json"))


@pytest.fixture
def bound(monkeypatch):
    """A machine with 128 processors, 64 of them next to the device, of which a container has 8."""
    nodes = []
    monkeypatch.setattr(host_threads, "bind", nodes.append)
    monkeypatch.setattr(host_threads, "processors", lambda: 8 if nodes else 128)
    return nodes


def place(args=ARGS, facts=FACTS, no_engine=""):
    return run.place_of(args, facts, no_engine, Drive(Path("/d"), "", 2e9), "/work", "/folder")


def test_processors_are_counted_next_to_the_device_and_as_a_quota_allows(bound):
    found = place()
    assert bound == [1] and found.processors == 8 and found.lanes == 2
    assert found.environment(1, alone=True)["OMP_NUM_THREADS"] == "6"


def test_what_the_device_has_free_is_what_there_is(bound):
    found = place(no_engine="it is not installed")
    assert (found.device_bytes, found.no_flags, found.drive_rate, found.engine) == (80, "no flags", 2e9, False)
    assert found.host_bytes > 0 and found.shared_bytes > 0


def test_a_device_for_one_process_has_one_lane(bound):
    assert place(facts=DeviceFacts(environment={}, name="a card", free_bytes=80, one_process=True)).lanes == 1


def test_this_process_asks_no_device(monkeypatch, bound):
    def refuse(*words):
        raise AssertionError("CUDA is initialised")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(device_facts, "ask", lambda: FACTS)
    monkeypatch.setattr(device_facts, "why_no_engine", lambda: "")
    monkeypatch.setattr(drive_place, "find", lambda directories, least: Drive(Path("/d"), "", 2e9))
    facts, no_engine, drive = run.look(ARGS)
    assert run.place_of(ARGS, facts, no_engine, drive, "/work", "/folder").engine


def test_what_is_asked_of_the_machine_is_part_of_the_budget(monkeypatch, tmp_path, bound):
    spent = []

    class Lanes:
        def __init__(self, place, report, out, seconds):
            spent.append(seconds)
            self.run = lambda todo: report

        def close(self):
            pass

    monkeypatch.setattr(run.signal, "signal", lambda *words: None)
    monkeypatch.setattr(run.resource, "setrlimit", lambda *words: None)
    monkeypatch.setattr(run, "Lanes", Lanes)
    monkeypatch.setattr(run, "look", lambda args: (FACTS, "", Drive(tmp_path, "", 2e9)))
    monkeypatch.setattr(run, "machine_facts", lambda *about: {})
    monkeypatch.setattr(run, "new_report", lambda root, about, cases, **how: report_of(jobs()))
    monkeypatch.setattr(run, "BEGUN", time.time() - 100)
    monkeypatch.setattr(sys, "argv", ["run.py", "--dry-run", "--spent", "30", "--out", str(tmp_path / "report.json")])
    assert run.run(run.parse()) == 1 and 130 <= spent[0] < 140
