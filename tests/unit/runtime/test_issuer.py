"""What is issued late is issued in its turn, once, and as soon as somebody polls or waits."""

import threading

import pytest

from megatron_ext.runtime import flags
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.worker import Transfer, Worker


class Ready:
    def __init__(self, ready: bool = False):
        self.ready = ready

    def __call__(self) -> bool:
        return self.ready


def test_what_is_ready_is_issued_at_once_and_what_is_not_when_somebody_polls():
    issuer, issued, later = Issuer(), [], Ready()
    issuer.when(Ready(True), lambda: issued.append("now"))
    issuer.when(later, lambda: issued.append("later"))
    assert issued == ["now"]
    issuer.poll()
    assert issued == ["now"] and len(issuer.left) == 1
    later.ready = True
    issuer.poll()
    issuer.poll()
    assert issued == ["now", "later"] and not issuer.left


def test_what_becomes_ready_together_is_issued_in_the_order_in_which_it_was_given():
    issuer, issued, early, late = Issuer(), [], Ready(), Ready()
    for number in range(6):
        issuer.when(late if number % 2 else early, lambda number=number: issued.append(number))
    early.ready = True
    issuer.poll()
    late.ready = True
    issuer.poll()
    assert issued == [0, 2, 4, 1, 3, 5]


def test_what_is_issued_may_wait_and_so_issue_more_and_nothing_is_issued_twice():
    issuer, issued, ready = Issuer(), [], Ready()

    def issue(number: int) -> None:
        issued.append(number)
        if number == 0:
            issuer.wait(lambda: 2 in issued)

    for number in range(4):
        issuer.when(ready, lambda number=number: issue(number))
    ready.ready = True
    issuer.poll()
    assert sorted(issued) == [0, 1, 2, 3] and issued[0] == 0 and not issuer.left


def test_what_an_issue_adds_is_left_for_the_next_look():
    issuer, issued, ready, never = Issuer(), [], Ready(), Ready()
    issuer.when(ready, lambda: issuer.when(never, lambda: issued.append("more")))
    issuer.when(ready, lambda: issued.append("first"))
    ready.ready = True
    issuer.poll()
    assert issued == ["first"] and len(issuer.left) == 1
    never.ready = True
    issuer.poll()
    assert issued == ["first", "more"]


def test_who_waits_issues_what_can_be_meanwhile():
    """The thread that is waited for needs what is issued late."""
    issuer, given, worker = Issuer(), threading.Event(), Worker("test")
    began = threading.Event()
    transfer = worker.submit(lambda transfer: (began.set(), given.wait(10)))
    issuer.when(began.is_set, given.set)
    issuer.join(transfer)
    assert transfer.ended and given.is_set()
    worker.close()


def test_to_join_nothing_does_nothing_and_to_join_a_failure_raises_it():
    issuer, failed = Issuer(), Transfer()
    issuer.join(None)
    failed.finish(OSError("no space"))
    with pytest.raises(OSError, match="no space"):
        issuer.join(failed)


def test_an_error_of_what_is_issued_reaches_who_polls_and_it_is_not_issued_again():
    issuer, ready = Issuer(), Ready()
    issuer.when(ready, lambda: 1 / 0)
    ready.ready = True
    with pytest.raises(ZeroDivisionError):
        issuer.poll()
    assert not issuer.left


def test_who_waits_hears_of_somebody_that_is_gone(monkeypatch):
    monkeypatch.setattr(flags, "LOOK_SECONDS", 0.001)
    issuer = Issuer()
    issuer.check = lambda: 1 / 0
    issuer.wait(lambda: True)  # nobody looks where nobody waits
    with pytest.raises(ZeroDivisionError):
        issuer.wait(lambda: False)


def test_who_waits_when_the_process_ends_is_told(monkeypatch):
    monkeypatch.setattr(flags, "exiting", lambda: True)
    with pytest.raises(flags.Exiting, match="the process ended"):
        Issuer().wait(lambda: False)


def test_what_can_never_be_issued_is_said_to_everybody_who_waits():
    """The second would wait for ever, if the first had taken it along."""
    issuer, failed = Issuer(), []

    def ready() -> bool:
        if failed:
            raise RuntimeError("a copy is never published")
        return False

    issuer.when(ready, lambda: None)
    failed.append(True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="never published"):
            issuer.poll()
