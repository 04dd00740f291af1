"""Holding one commit between its timestamp and its finish."""

from __future__ import annotations

from typing import Any

from kivi.mvcc.groups import Outcome
from kivi.store.facade import Store
from tests.waiting import wait_until

__all__ = ["hold"]


def hold(store: Store, tx: Any, **token: Any) -> tuple[int, list[Outcome]]:
    """Commits ``tx`` until it is durable and stands still. Its timestamp, and where its outcome will appear."""
    outcomes: list[Outcome] = []
    before = set(store.committer.held)
    store.committer.hold = lambda commit: True
    store.commit(tx._txn, done=outcomes.append, **token)

    def stands_still() -> set[int]:
        assert not outcomes, outcomes
        return set(store.committer.held) - before

    new = wait_until(stands_still, pause_s=0.0005)
    store.committer.hold = None
    return new.pop(), outcomes
