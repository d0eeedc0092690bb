"""What is asked of a device by processes that end: the tier's own holds none."""

import importlib.machinery
import subprocess

import device_facts
import msgspec
import pytest
from device_facts import DeviceFacts

from megatron_ext.formats.errors import InputError

FACTS = DeviceFacts(environment={}, name="a card", free_bytes=1, node=1, one_process=True)


@pytest.fixture
def answers(monkeypatch):
    def answers(code: int, output: str = "", said: str = ""):
        def run(command, **how):
            if code is TimeoutError:
                raise subprocess.TimeoutExpired(command, how["timeout"])
            return subprocess.CompletedProcess(command, code, output, said)

        monkeypatch.setattr(device_facts.subprocess, "run", run)
        found = importlib.machinery.ModuleSpec("transformer_engine", None)
        monkeypatch.setattr(device_facts, "find_spec", lambda name: found)

    return answers


def test_an_answer_is_the_last_line(answers):
    answers(0, f"a library says hello\n{msgspec.json.encode(FACTS).decode()}\n")
    assert device_facts.ask() == FACTS


def test_no_answer_is_bad_input_with_the_last_words(answers):
    answers(1, "", "Traceback\nRuntimeError: CUDA error: unspecified launch failure\n\n")
    with pytest.raises(InputError, match="cannot be asked for its facts: RuntimeError: CUDA error"):
        device_facts.ask()


def test_an_engine_that_is_found_and_cannot_be_imported_is_none(answers):
    answers(1, "", "Traceback\nImportError: libcudnn.so.9: cannot open\n")
    assert device_facts.why_no_engine() == "it cannot be imported: ImportError: libcudnn.so.9: cannot open"
    answers(TimeoutError)
    assert device_facts.why_no_engine() == "it cannot be imported: no end after 300 s"
    answers(0)
    assert device_facts.why_no_engine() == ""


def test_without_a_package_there_is_no_engine(monkeypatch):
    monkeypatch.setattr(device_facts, "find_spec", lambda name: None)
    assert device_facts.why_no_engine() == "it is not installed"


def test_without_a_device_there_is_no_name():
    assert device_facts.device_facts().name is None
