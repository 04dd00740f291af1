"""One caller's callback that raises is that caller's loss alone: nobody else waits for ever because of it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.mvcc.groups import Outcome
from kivi.mvcc.watermark import Watermark
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from tests.mvcc.holding import hold


def _raises(*_: object) -> None:
    raise ZeroDivisionError("a bug in a callback")


def test_r17_the_others_are_told_when_one_raises(caplog: pytest.LogCaptureFixture) -> None:
    watermark = Watermark(0, threading.RLock())
    said: list[int] = []
    for number in (1, 2, 3):
        watermark.enter(number)
    watermark.finish(3, lambda: said.append(3))
    watermark.finish(2, _raises)
    with caplog.at_level(logging.ERROR):
        watermark.finish(1, lambda: said.append(1))
    assert said == [1, 3]
    assert watermark.value == 3
    assert "a bug in a callback" in caplog.text


def test_r16_attempts_that_wait_for_one_commit_are_told_when_one_raises() -> None:
    db = Database(Store.open(settings=Settings(background=False)))
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})

    def attempt() -> Any:
        tx = db.transaction(token="one")
        tx.delta("t", (1,), n=1)
        return tx

    cts, outcomes = hold(db.store, attempt(), token="one")
    db.store.commit(attempt()._txn, done=_raises, token="one")
    db.store.commit(attempt()._txn, done=outcomes.append, token="one")
    db.store.committer.finish_held(cts)
    assert outcomes == [Outcome(cts), Outcome(cts, repeated=True)]
    db.close()
