"""What the launcher makes of what the ranks tell it, by ranks that are a pipe each."""

import io
import json
import os
import threading
from types import SimpleNamespace

import pytest

from megatron_ext.measure import local_launch
from megatron_ext.measure.local_launch import RankFailed, Ranks


@pytest.fixture
def told(monkeypatch):
    """``told(*messages)`` of one rank that goes on, whose time is up in a tenth of a second; what was shown."""
    pipes = []
    monkeypatch.setattr(local_launch, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(local_launch, "LOOK_SECONDS", 0.02)

    def ranks(*messages):
        reading, writing = os.pipe()
        pipes.append(writing)
        os.write(writing, "".join(json.dumps(message) + "\n" for message in messages).encode())
        made = object.__new__(Ranks)
        made.options, made.done, made.what = SimpleNamespace(seconds=0.1, keep_path="T"), (0, 0), "starting"
        made.processes, made.errors = (
            [None],
            [io.StringIO("Thread 0x1 (most recent call first):\n  File contention.py")],
        )
        made.pipes = [os.fdopen(reading, "rb", buffering=0)]
        pipes.append(made.pipes[0])
        return made

    ranks.pipes = pipes
    yield ranks
    for pipe in pipes:
        pipe.close() if hasattr(pipe, "close") else os.close(pipe)


def at(done: int, what: str) -> dict:
    return {"done": done, "total": 9, "what": what}


def test_what_is_there_becomes_the_table_where_the_rest_does_not_end(told, capsys):
    ranks = told(at(1, "ready"), {"so_far": {"a": 1}}, {"so_far": {"a": 2}}, at(7, "gpu beside compute"))
    assert ranks.collect(lambda *_: None) == {"a": 2, "given_up": "gpu beside compute"}
    said = capsys.readouterr().err
    assert "rank 0, in gpu beside compute:" in said and "File contention.py" in said


def test_where_nothing_is_there_yet_it_is_said_what_hangs(told):
    with pytest.raises(RankFailed, match=r"not ended in 1.2 times --seconds 0.1: optimizer 2 GiB; .* is kept"):
        told(at(1, "ready"), at(2, "optimizer 2 GiB")).collect(lambda *_: None)


def test_every_line_is_told_at_once_and_the_result_is_not_waited_behind(told):
    """A process that has sent its result may take seconds to end."""
    seen = []
    ranks = told(at(0, "once"), at(1, "ready"), at(2, "a"), {"so_far": {}}, at(3, "b"), {"result": {"a": 3}})
    assert ranks.collect(lambda *now: seen.append(now)) == {"a": 3}
    assert [what for _, _, what in seen] == ["once", "ready", "a", "b"]


def test_starting_takes_what_it_takes(told):
    """Time is counted from when the ranks are ready."""
    ranks = told(at(0, "compute, once"))
    last = (json.dumps({"result": {"a": 4}}) + "\n").encode()
    later = threading.Timer(0.4, os.write, (told.pipes[0], last))
    later.start()
    assert ranks.collect(lambda *_: None) == {"a": 4}
    later.join()
