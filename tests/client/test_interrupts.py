"""An interrupt ends the call that it meets, and no other: nothing that threads share is left locked or half done."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

import kivi
from tests.serverproc import ServerProcess

WAITS_S = 60.0


def is_destroying(frame: FrameType | None) -> bool:
    """Whether a destructor runs, where Python itself leaves an interrupt out."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class Interrupted:
    """The n-th place of this thread in the client at which Python looks for signals gets an interrupt: the beginning of
    a function, or the end of one that is not in Python."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return") or "/kivi/" not in frame.f_code.co_filename or is_destroying(frame):
            return
        if argument != sys.setprofile:
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def during(self, call: Callable[[], object]) -> bool:
        """Whether the call was interrupted."""
        sys.setprofile(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def test_an_interrupt_of_the_first_read_leaves_it_to_others(
    server: ServerProcess, accounts: str, other: ThreadPoolExecutor
) -> None:
    with server.connect(timeout=WAITS_S) as db:
        db.get(accounts, (1,))
        for n in itertools.count(1):
            with db.snapshot() as snap:
                met = Interrupted(n).during(lambda: snap.get(accounts, (1,)))
                with contextlib.suppress(kivi.SnapshotTooOld):  # what was to begin it has not left
                    assert other.submit(snap.get, accounts, (1,)).result(WAITS_S / 2) is None, n
                assert other.submit(db.get, accounts, (1,)).result(WAITS_S / 2) is None, n
            if not met:
                break
        assert n > 50


def changes(db: Any, table: str) -> Callable[[], None]:
    def change() -> None:
        with db.transaction() as tx:
            tx.delta(table, (1,), balance=1)

    return change


def test_an_interrupt_of_a_commit_leaves_those_of_others(
    server: ServerProcess, accounts: str, other: ThreadPoolExecutor
) -> None:
    with server.connect(timeout=WAITS_S) as db:
        change = changes(db, accounts)
        change()
        for n in itertools.count(1):
            met = Interrupted(n).during(change)
            assert other.submit(change).result(WAITS_S / 2) is None, n
            if not met:
                break
        assert n > 50
        row = db.get(accounts, (1,))
        assert row is not None and n <= row["balance"] <= 2 * n + 1


@pytest.mark.story
def test_an_interrupt_of_a_subscription_leaves_those_of_others(
    server: ServerProcess, accounts: str, other: ThreadPoolExecutor
) -> None:
    with server.connect(timeout=WAITS_S) as db:

        def follow() -> int:
            with db.subscribe(accounts) as live:
                update = live.next(WAITS_S)
                return 0 if update is None else update.ts

        assert follow() > 0
        for n in itertools.count(1):
            db._transport._lines.clear()  # so that a stream begins
            met = Interrupted(n).during(follow)
            assert other.submit(follow).result(WAITS_S / 2) > 0, n
            if not met:
                break
        assert n > 50


@pytest.mark.story
def test_an_interrupt_on_a_lost_connection_leaves_the_next_one(
    server: ServerProcess, accounts: str, other: ThreadPoolExecutor
) -> None:
    """It comes while another session begins, and what it had begun with."""
    with server.connect(timeout=WAITS_S) as db:
        db.get(accounts, (1,))
        for n in itertools.count(1):
            db._transport._current._call.cancel()
            with db.snapshot() as snap:
                met = Interrupted(n).during(lambda: snap.get(accounts, (1,)))
                with contextlib.suppress(kivi.SnapshotTooOld):
                    assert other.submit(snap.get, accounts, (1,)).result(WAITS_S / 2) is None, n
                assert other.submit(db.get, accounts, (1,)).result(WAITS_S / 2) is None, n
            if not met:
                break
        assert n > 50
