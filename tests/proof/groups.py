"""Transactions that reach the store together: the one place where the checkers name the way into a group.

Everything else drives the public interface. In process no public call makes a group yet, so ``Together`` uses the
methods of the store's facade that a server uses: ``write_plans``, ``plain_rows``, ``plain``, ``submit_plain``. When the
store takes groups by another call, only this file has to follow.

A group here is of blind transactions of deltas and puts, each under a token. Those that the store does not decide in
the group are ``left``, for their maker to commit alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kivi.errors import KiviError
from kivi.store.facade import PlainRows, Store
from tests.oracle import Op

__all__ = ["Answer", "Together"]


class Member(Protocol):
    """A transaction of a group: puts and deltas, of another row each."""

    @property
    def ops(self) -> list[Op]: ...

    @property
    def token(self) -> str | None: ...


@dataclass(frozen=True)
class Answer:
    """What the store told one member: its snapshot, and its commit timestamp or the error."""

    start_ts: int
    commit_ts: int | None
    error: KiviError | None


class Together:
    """One group, of ``members`` in their order."""

    def __init__(self, store: Store, members: Sequence[Member]) -> None:
        self._store = store
        self._members = members
        self._answered = threading.Event()
        self.answers: dict[int, Answer] = {}
        self.left: list[int] = [*range(len(members))]
        """The places of those that did not enter."""

    def enter(self) -> None:
        """Into the log, as far as the store decides them together. Waits for nothing."""
        version, plans = self._store.write_plans()
        if plans is None:
            self._answered.set()
            return
        does: dict[int, PlainRows] = {}
        shared: dict[str, PlainRows] = {}  # those that do the same are one object, as when a server has read them
        for place, member in enumerate(self._members):
            name = repr([(op.kind, op.table, op.key, dict(op.values)) for op in member.ops])
            if name not in shared:
                rows = []
                for op in member.ops:
                    plan = plans[op.table]
                    key, names, values = plan.key(op.key), [*op.values], [*op.values.values()]
                    cells = (plan.deltas if op.kind == "delta" else plan.puts)(names, values)
                    assert key is not None and cells is not None, op
                    rows.append((plan, key, cells))
                made = self._store.plain_rows(rows)
                assert made is not None, f"a row comes twice in {member.ops}"
                shared[name] = made
            does[place] = shared[name]
        tokens = [member.token or "" for member in self._members]
        group = self._store.plain([*does.values()], tokens, [*does])
        self.left = [*self._store.submit_plain(group, version, self._told)]
        if len(self.left) == len(self._members):
            self._answered.set()

    def _told(self, entered: Any, error: KiviError | None) -> None:
        for place, cts in zip(entered.tags, entered.stamps, strict=True):
            self.answers[place] = Answer(entered.start_ts, None if error else cts, error)
        self._answered.set()

    @property
    def is_answered(self) -> bool:
        return self._answered.is_set()

    def wait(self, timeout_s: float = 30.0) -> None:
        """Until those that entered have their answers."""
        assert self._answered.wait(timeout_s), "a group is not answered"
