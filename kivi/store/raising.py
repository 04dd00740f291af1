"""Rules whose judgement is a pattern: their matches become events of a table, each once (R25, R26).

::

    events at S ---matched (kivi.store.decided)---> decided between two frontiers --select--> events of ``into``
                                                                                  |
    log's time, newest event ---> clock - lateness = the frontier ----------------+   one transaction (a step)

**The definition.** A rule has a *position*: a snapshot and a frontier, as a subscription to matches has, and the first
rows of the matches that it has judged, as long as one may be met again. A *step* goes from a position (S, F) to a later
one (S', F'). It judges the matches that are decided at (S', F') and were not at F, by what S' has, unless it has judged
one with the same first row. So a match is judged once, whatever comes late or is retracted: what decides a match is at
most ``within`` after its first row, and for so long that row is remembered (``catalog.RAISED``).

**Invariants.**

* What a step judges, raises, counts and remembers, and the position after it, are one transaction that puts the
  position. So a crash leaves whole steps, and of two that begin at the same one the second conflicts (R2), on whatever
  node: ``into`` has what some sequence of whole steps raises. The frontier never goes back.
* Where no event comes later than ``lateness`` said, that is: each match that ``match`` gives at S' and that was decided
  from the rule's beginning up to F', once.
* Events that come later change nothing that was raised. Matches that were decided before and are changed by them are
  counted, as *late*, and not raised.
* Nobody who commits waits for this, and no rule for another one. What a match cannot do (a sum or an expression that
  leaves its range, a value that is too long, or an event that an aggregate on ``into`` cannot have:
  ``Judgement.derived``) is counted, as *failed*, and others are raised; so is what is decided within a millisecond, and
  is more than a transaction may bring. What concerns the whole rule is its ``error``; it stays where it is, and tries
  again.

Steps are as wide as memory and a transaction allow: one that is too much is halved in time; then they become wider
again.
"""

from __future__ import annotations

import itertools
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from kivi.delta.derive import Derivation
from kivi.errors import ResourceExhausted
from kivi.model.event_clock import Clock
from kivi.model.rules import Rule, bound_match
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX
from kivi.mvcc.commit import Committer
from kivi.mvcc.leases import Lease
from kivi.patterns.answers import FIRST
from kivi.store.catalog import JUDGED_TO, RAISED, Catalog
from kivi.store.change_reads import ChangeReads
from kivi.store.commits import Commits
from kivi.store.decided import Decided, Judged, Position
from kivi.store.judging import FAILED, JUDGED, LATE, Judgement
from kivi.store.reads import Reads
from kivi.store.transaction import Txn

__all__ = ["Raising"]

_LEAST_US: Final = 1_000
"""No step is halved to less."""


class Held(Protocol):
    """What it uses of a store."""

    catalog: Catalog
    changes: ChangeReads
    commits: Commits
    committer: Committer
    reads: Reads

    def transaction(self, lease: Lease | None = None) -> Txn: ...


class Raising:
    """Not thread safe."""

    def __init__(self, store: Held) -> None:
        self._store = store
        self._idle: dict[int, tuple[int, int | None]] = {}
        """By rule, where it has looked: the snapshot, and beyond which frontier more is decided of what that has."""

    def evaluate(self, rule: Rule) -> None:
        """Steps until the rule is where its events are. Raises Conflict where another node has stepped, and what
        reading its source raises."""
        width_us: int | None = None
        is_there = False
        while not is_there:
            txn = self._store.transaction()
            try:
                is_there = self._step(txn, rule, width_us)
                width_us = None if width_us is None else 2 * width_us
            except ResourceExhausted:
                if width_us is not None and width_us <= _LEAST_US:
                    raise
                width_us = max(_LEAST_US, (self._width(rule) if width_us is None else width_us) // 2)
            finally:
                self._store.commits.rollback(txn)

    def fail(self, txn: Txn, rule: Rule, error: str) -> None:
        """Why the rule cannot be evaluated; it is where it was."""
        row = txn.get(JUDGED_TO, [(rule.id,)], ["error"])[0]
        if row is not None and row["error"] != error:
            txn.put(JUDGED_TO, (rule.id,), {"error": error})

    # -- one step ------------------------------------------------------------------------------------

    def _step(self, txn: Txn, rule: Rule, width_us: int | None) -> bool:
        """Whether the rule is where its events are. ``width_us``: the step goes over so much of their time at most."""
        store = self._store
        row = txn.get(JUDGED_TO, [(rule.id,)])[0]
        if row is None:
            return True
        source = store.catalog.table(rule.source, txn.start_ts)
        was, clock = Position(row["seen"], row["frontier_us"]), Clock(row["now_us"], row["clock_us"])
        now_us = store.committer.now_us()
        went_us = clock.at(now_us, None).clock_us
        seen, next_us = self._idle.get(rule.id, (None, None))
        newest = None
        if seen is None or store.changes.tail_points(source, seen, 1, txn.start_ts, 0).last > seen:
            newest = store.reads.extreme_time(txn.lease, source, "max", went_us)
        elif not row["error"] and (next_us is None or went_us - rule.lateness_us <= next_us):
            return True
        clock = clock.at(now_us, newest)
        to_us = frontier_us = max(was.frontier_us, clock.clock_us - rule.lateness_us)
        if width_us is not None:
            to_us = min(frontier_us, self._begin_us(txn, source, was) + width_us)
        match, where = bound_match(rule, source)
        end_us = None if to_us == frontier_us else to_us
        judged = Decided(store.reads, store.changes, match, where).judged(txn.lease, source, was, to_us, end_us)
        within_us = match.pattern.within_us or 0
        may_halve = width_us is None or width_us > _LEAST_US
        has_judged = self._raise(txn, rule, source, judged, to_us, within_us, may_halve)
        is_ahead = clock.clock_us > went_us
        if has_judged or is_ahead or end_us is not None or row["error"] or to_us - was.frontier_us > within_us:
            position = {"seen": txn.start_ts, "frontier_us": to_us, "now_us": clock.now_us, "clock_us": clock.clock_us}
            txn.put(JUDGED_TO, (rule.id,), {**position, "error": ""})
            store.commits.commit_wait(txn)
        if end_us is None:
            self._idle[rule.id] = txn.start_ts, judged.next_us
        return end_us is None

    def _raise(
        self, txn: Txn, rule: Rule, source: TableSchema, judged: Judged, to_us: int, within_us: int, may_halve: bool
    ) -> bool:
        """Whether there was anything to judge, or to count."""
        met = dict[tuple[int, ...], int]()
        for batch in txn.scan(RAISED, Scan(prefix=(rule.id,))):
            met |= {(row["at_us"], row["cts"], row["position"]): row["until_us"] for row in batch.to_pylist()}
        for first, until_us in met.items():
            if until_us < to_us:
                txn.delete(RAISED, (rule.id, *first))
        names = [judged.matches.column(name).cast(pa.int64()).to_pylist() for name in FIRST]
        firsts = list(zip(*names, strict=True))
        is_new = np.array([first not in met for first in firsts], np.bool_)
        for first in itertools.compress(firsts, is_new):
            if (until_us := min(first[0] + within_us, INT64_MAX)) >= to_us:
                txn.put(RAISED, (rule.id, *first), {"until_us": until_us})
        view = self._store.catalog.entered
        judgement = Judgement(self._store.commits.judging, view, lambda: txn.lease, may_halve=may_halve)
        matches = judged.matches.drop_columns(FIRST).filter(pa.array(is_new & ~judged.failed))
        judgement.judge(source, Derivation(matches), only=rule)
        into = view.table(rule.into)
        if (events := judgement.taken(into)) is not None:
            txn.append(into, events, drop_late=True)
        counts, failed = judgement.counted(rule), int((is_new & judged.failed).sum())
        for what, more in ((JUDGED, failed), (FAILED, failed), (LATE, judged.changed)):
            counts[what] += more
        judgement.count(txn, rule)
        return bool(is_new.any()) or judged.changed > 0

    # -- steps that are too much ------------------------------------------------------------------------

    def _begin_us(self, txn: Txn, source: TableSchema, was: Position) -> int:
        """From where on there are events that a step may judge."""
        oldest = self._store.reads.extreme_time(txn.lease, source, "min")
        return was.frontier_us if oldest is None else max(was.frontier_us, oldest)

    def _width(self, rule: Rule) -> int:
        """How much of the events' time there is from where the rule is."""
        txn = self._store.transaction()
        try:
            source = self._store.catalog.table(rule.source, txn.start_ts)
            row = txn.get(JUDGED_TO, [(rule.id,)])[0]
            newest = self._store.reads.extreme_time(txn.lease, source, "max")
            if row is None or newest is None:
                return 0
            return newest - self._begin_us(txn, source, Position(row["seen"], row["frontier_us"]))
        finally:
            self._store.commits.rollback(txn)
