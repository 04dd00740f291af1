"""Transactions that reach the store together: the one place where the checkers name the way into a group.

Everything else drives the public interface. In process no public call makes a group of writes, so ``Together`` uses the
methods of the store's facade that a server uses: ``write_plans``, ``write_set``, ``write``. When the store takes groups
by another call, only this file has to follow.

A group here is of blind transactions of deltas and puts, each under a token. If the catalog changes under them they are
all ``left``, for their maker to commit alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kivi.errors import KiviError
from kivi.store.facade import Outcome, Store, WriteSet
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
        self._mutex = threading.Lock()
        self._entering = True
        self.answers: dict[int, Answer] = {}
        self.left: list[int] = [*range(len(members))]
        """The places of those that did not enter."""

    def enter(self) -> None:
        """Into the log, as far as the store decides them together. Waits for nothing."""
        version, plans = self._store.write_plans()
        if plans is None:
            self._answered.set()
            return
        does: dict[int, WriteSet] = {}
        shared: dict[str, WriteSet] = {}  # those that do the same are one object, as when a server has read them
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
                made = self._store.write_set(rows)
                assert made is not None, f"a row comes twice in {member.ops}"
                shared[name] = made
            does[place] = shared[name]
        tokens = [member.token or "" for member in self._members]
        self.left = []
        stale = self._store.write(version, [*does.values()], tokens, [*does], self)
        with self._mutex:
            self._entering = False
            self.left += stale
            self._look()

    def entered(self, part: Any, unknown: KiviError | None) -> None:
        """Called by the store (``kivi.mvcc.groups.Answer``): a member that has read nothing begins just before its
        CTS."""
        for cts, place in enumerate(part.tags, part.first):
            self._tell(place, Answer(cts - 1, None if unknown else cts, unknown))

    def apart(self, place: Any, outcome: Outcome) -> None:
        """Likewise, of a member that did not enter, since its token was known: one that is told at once is ``left``."""
        with self._mutex:
            if self._entering:
                self.left.append(place)
                return
        start_ts = 0 if outcome.commit_ts is None else outcome.commit_ts - 1
        self._tell(place, Answer(start_ts, outcome.commit_ts, outcome.error))

    def _tell(self, place: int, answer: Answer) -> None:
        with self._mutex:
            self.answers[place] = answer
            self._look()

    def _look(self) -> None:
        if not self._entering and len(self.answers) + len(self.left) == len(self._members):
            self._answered.set()

    @property
    def is_answered(self) -> bool:
        return self._answered.is_set()

    def wait(self, timeout_s: float = 30.0) -> None:
        """Until those that entered have their answers."""
        assert self._answered.wait(timeout_s), "a group is not answered"
