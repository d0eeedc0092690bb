"""Who only waits for a rank that has gone says so, but not where this process is ending and has said why."""

import threading
from types import SimpleNamespace

import pytest

from megatron_ext.launch.launcher import PEER_LOST_CODE
from megatron_ext.runtime import watch, worker
from megatron_ext.runtime.group import Clock
from megatron_ext.runtime.host_pool import PeerLost


@pytest.mark.parametrize("ending", [False, True])
def test_a_lost_peer_ends_a_process_that_is_not_ending_itself(monkeypatch, capfd, ending):
    codes, looked = [], threading.Event()

    def leave(code):
        codes.append(code)
        raise SystemExit  # the thread's

    def check_peers(version):
        looked.set()
        raise PeerLost("rank 1 ended")

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(worker, "exiting", lambda: ending)
    watching = watch.Watch(0)
    watching.executor = SimpleNamespace(pool=SimpleNamespace(check_peers=check_peers), clock=Clock())
    assert looked.wait(0.2 if ending else 10) is not ending
    watching.close()
    assert codes == ([] if ending else [PEER_LOST_CODE] * len(codes)) and bool(codes) is not ending
    assert "Traceback" not in capfd.readouterr().err


def test_threads_that_are_alike_share_a_line():
    go_on = threading.Event()
    idle = [threading.Thread(target=go_on.wait, name="idle") for _ in range(3)]
    for thread in idle:
        thread.start()
    said = [line for line in watch.state_of_threads() if "idle" in line]
    go_on.set()
    for thread in idle:
        thread.join()
    assert len(said) == 1 and said[0].startswith("3 x thread idle: wait (")
