"""Groups: commits that enter the log together (R19).

A group is a sequence of *parts*, and a part is members of one shape, in columns: what its members have in common is
done once, and what they have each is kept in sequences that Python goes through in C. There are three shapes::

    Single    one transaction of any kind: guards, stages, several tables, reads that its verdict depends on
    Writes    transactions of deltas and puts that have read nothing, each under a request token of its own
    Events    transactions of one event each, of one table, with the deltas that they derive

``commit.Committer`` takes them all through the same steps. Each member is a transaction of its own, with its own
verdict, CTS and outcome; the group is judged as if its members had entered one after the other in its order, and a
member that is answered without entering (its token is known, it conflicts) takes no other with it.

A member that has read nothing begins just before its own CTS (``record.BLIND``). So it sees the cells of all that
entered before it, in its own group too, and there is nothing that it could conflict with: what it writes is noted, and
those who began before it are judged against that. Only a Single may have read something.

A Single is one record, Writes a record for each member, and Events one record of as many numbers as it has members.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from kivi.delta.ops import RowOp
from kivi.delta.runs import DeltaRun, shifted, stamped
from kivi.encoding.event_names import EventNames
from kivi.errors import CommitUnknown, KiviError
from kivi.log import Entry, Kind
from kivi.mvcc.applied import Applied, PendingEvents, Retracted
from kivi.mvcc.leases import Lease
from kivi.mvcc.record import BLIND, Commit, EventsRecord, deltas_body, deltas_head, deltas_section
from kivi.mvcc.verdict import Collision, Footprint, Guard
from kivi.mvcc.watermark import call_all

__all__ = [
    "Answer",
    "Beginning",
    "Events",
    "Outcome",
    "Part",
    "Raised",
    "Single",
    "Tell",
    "WriteSet",
    "Writes",
    "events_applied",
    "told",
]

Row = tuple[int, bytes, RowOp]
Raised = tuple[int, pa.RecordBatch, Any]
"""Events of a table that rules raised, and the place of each among the members, ascending."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a commit ended: ``commit_ts``, or the error. ``repeated``: its token had committed before.

    Of a token of several members it is that of the first; those of the others follow by one each.
    """

    commit_ts: int | None
    error: KiviError | None = None
    repeated: bool = False


Tell = Callable[[Outcome], None]


class Answer(Protocol):
    """Whoever is told what became of a part: once of each member, by any thread. It must be quick."""

    def entered(self, part: Any, unknown: CommitUnknown | None) -> None:
        """Its members are committed from ``part.first`` on and can be read; or the log failed under them."""

    def apart(self, tag: Any, outcome: Outcome) -> None:
        """Those members with this tag did not enter."""


class Part(ABC):
    """Members of one shape: so many commits, each of which takes a CTS.

    ``derived_at``: it was derived by all that had changed up to this CTS (``Catalog.changed_at``).
    ``tokens`` are their request tokens, each with a digest of what came under it and a tag for whoever is told. Once
    the part has entered, its members have the CTS from ``first`` on. ``waiters`` came with a token meanwhile ("": with
    the batch token). ``on_check`` and ``on_enter`` are called under the entry lock.
    """

    def __init__(
        self,
        derived_at: int,
        members: int,
        tokens: Sequence[str],
        digests: Sequence[bytes],
        tags: Sequence[Any],
        answer: Answer,
    ) -> None:
        self.derived_at = derived_at
        self.members = members
        self.tokens = tokens
        self.digests = digests
        self.tags = tags
        self.answer = answer
        self.alone = False
        """Whether it is a group of one."""
        self.derive_again: Callable[[], object] | None = None
        """Commits it anew, if it comes back from a log that orders (``kivi.mvcc.replicated``) as stale; it may wait."""
        self.on_check: Callable[[], None] | None = None
        self.on_enter: Callable[[int], None] | None = None
        self.first = 0
        self.unknown: CommitUnknown | None = None
        self.waiters: dict[str, list[Tell]] = {}

    def without(self, gone: set[int]) -> Part | None:
        """The members of the tokens at the other places; None if none are left. This is for a part of one token."""
        return None if gone else self

    @abstractmethod
    def written(self, first: int) -> Iterator[tuple[int, Footprint]]:
        """(CTS, what it writes) that others are judged against: of members that write the same cells, the last."""

    @abstractmethod
    def tables(self) -> set[int]:
        """Of which it writes rows, or appends or retracts events."""

    @abstractmethod
    def entries(self) -> Sequence[Entry]:
        """The records."""

    @abstractmethod
    def applied(self) -> Applied:
        """What it does, as pending holds it."""

    def touches(self, table: int, key: bytes) -> bool:
        """Whether a member does something to this row."""
        applied = self.applied()
        return any(t == table and k == key for _, t, k, _ in applied.rows) or any(
            t == table and bool(run.find(key)) for t, run in applied.runs
        )

    @property
    def last(self) -> int:
        """The CTS of the last member."""
        return self.first + self.members - 1

    def cts_of(self, token: str) -> int:
        """The CTS of the first commit under one of its tokens."""
        return self.first + (self.tokens.index(token) if token else 0)

    def settle(self) -> None:
        """Tells everybody, once the members can be read, or are unknown for good."""
        told = [partial(self.answer.entered, self, self.unknown)]
        for token, waiters in self.waiters.items():
            if self.unknown is None:
                outcome = Outcome(self.cts_of(token), repeated=True)
            else:
                outcome = Outcome(None, CommitUnknown(self.unknown.message, token=token or None))
            told += [partial(waiter, outcome) for waiter in waiters]
        call_all(told)


class _Told:
    """Answers the only member of a part by a function."""

    __slots__ = ("_done",)

    def __init__(self, done: Tell) -> None:
        self._done = done

    def entered(self, part: Part, unknown: CommitUnknown | None) -> None:
        self._done(Outcome(part.first) if unknown is None else Outcome(None, unknown))

    def apart(self, tag: Any, outcome: Outcome) -> None:
        self._done(outcome)


def told(done: Tell) -> Answer:
    """For a part of one token: ``done`` is called with its outcome."""
    return _Told(done)


# -- any transaction ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beginning:
    """Rows of aggregates that begin anew in a commit for a log that orders: ``at`` is called with the number as of
    which they do, by which all commits are applied, and completes the part; or ``close``. Both may be slow."""

    tables: tuple[int, ...]
    at: Callable[[int], None]
    close: Callable[[], None]


class Single(Part):
    """One transaction of any kind. ``schema_guards`` are implied by the tables that it names.

    The hooks are the catalog's and the stages': ``on_apply`` before W passes it, ``on_abort`` if it aborts after its
    CTS was taken. ``on_entry`` completes it, under the entry lock, before it gets its CTS: it is called with what has
    entered and is not in pending yet, by the last CTS of each; in a cluster with all that was gathered.
    """

    def __init__(
        self,
        commit: Commit,
        body: list[Any],
        *,
        events: Sequence[tuple[int, pa.RecordBatch]],
        runs: list[tuple[int, DeltaRun]],
        derived_at: int,
        schema_guards: list[Guard],
        describe: Callable[[Collision], tuple[str, tuple[Any, ...], str | None]],
        aggregate_newest: Callable[[int, bytes], int | None],
        judged: Sequence[tuple[int, DeltaRun]] = (),
    ) -> None:
        """``judged``: of the runs those of row tables, whose rows a verdict looks at as it does at ``commit.rows``.
        They are listed here, once, and not each time under the entry lock."""
        tokens, digests = ([commit.request[0]], [commit.request[1]]) if commit.request else ([], [])
        super().__init__(derived_at, 1, tokens, digests, (None,), told(lambda outcome: None))
        self.commit = commit
        self.body = body
        self.events = events
        self.runs = runs
        self.schema_guards = schema_guards
        self.describe = describe
        self.aggregate_newest = aggregate_newest
        self._judged = list(chain.from_iterable(_written(table, run) for table, run in judged))
        self.lease: Lease | None = None
        self.derives_again = False
        """Whether it has read nothing but what it is derived from: instead of a conflict it is given back, to be
        derived from a newer snapshot, which has what was committed at ``behind``."""
        self.behind = 0
        self.retracted: list[tuple[int, EventNames]] = []
        self.on_entry: Callable[[dict[int, Applied]], None] | None = None
        self.begins: Beginning | None = None
        self.on_apply: Callable[[int], None] | None = None
        self.on_abort: Callable[[int], None] | None = None
        self.needs: tuple[str, ...] = ()
        """Features that a node needs to read it (``kivi.log.features``)."""

    @property
    def blind(self) -> bool:
        """Whether it has read nothing."""
        return self.commit.start_ts == BLIND

    @property
    def footprint(self) -> Footprint:
        rows = self.commit.rows
        if self._judged:
            rows = [*rows, *self._judged]
        return Footprint(self.commit.start_ts, rows, [*self.commit.guards, *self.schema_guards])

    def written(self, first: int) -> Iterator[tuple[int, Footprint]]:
        yield first, self.footprint

    def tables(self) -> set[int]:
        commit = self.commit
        bulks = (*commit.appends, *commit.retractions)
        return {each[0] for each in (*commit.rows, *commit.guards)} | {bulk.table for bulk in bulks}

    def entries(self) -> Sequence[Entry]:
        return [Entry(Kind.COMMIT, self.body, 1, self.needs)]

    def applied(self) -> Applied:
        cts = self.first
        return Applied(
            [(cts, *row) for row in (*self.commit.rows, *self.commit.derived)],
            [(table, PendingEvents(cts, cts, batch)) for table, batch in self.events],
            [(table, stamped(run, cts)) for table, run in self.runs],
            [(table, Retracted(cts, names)) for table, names in self.retracted],
        )


def _written(table: int, run: DeltaRun) -> Iterable[Row]:
    """What a run writes of each of its rows; the operations are one, without its values."""
    op = RowOp(run.barrier, {}, dict.fromkeys(range(len(run.columns))))
    return zip(repeat(table), run.listed(range(run.rows)), repeat(op), strict=False)


# -- deltas and puts ------------------------------------------------------------------------------------


class WriteSet:
    """The deltas and puts of a transaction: one may be shared by many that do the same, as counters often do.

    ``rows`` sorted, of PATCH operations; ``guards`` are their tables' schema guards. ``digest`` is that of a token,
    over the rows as the caller ``sent`` them if that is under other ids. ``cells`` says all that a verdict
    looks at.
    """

    __slots__ = ("_tail", "cells", "digest", "footprint", "rows")

    def __init__(self, rows: list[Row], guards: Sequence[Guard], sent: list[Row] | None = None) -> None:
        self.rows = rows
        self.footprint = Footprint(0, rows, guards)
        self.cells = tuple((table, key, (*op.puts,), (*op.deltas,)) for table, key, op in rows)
        section = deltas_section(rows)
        as_sent = section if sent is None else deltas_section(sent)
        self.digest = hashlib.blake2b(deltas_body(len(rows), as_sent), digest_size=16).digest()
        self._tail = self.digest + section

    @staticmethod
    def bodies(write_sets: Sequence[WriteSet], tokens: Sequence[str]) -> list[bytes]:
        """Of the records that commit these under these tokens, byte for byte what ``Commit.encode`` gives."""
        return [
            b"".join((deltas_head(len(each.rows), len(text)), text, each._tail))
            for each, text in zip(write_sets, map(str.encode, tokens), strict=True)
        ]


class Writes(Part):
    """Transactions of deltas and puts that have read nothing: the write set and the token of each."""

    def __init__(
        self,
        derived_at: int,
        write_sets: Sequence[WriteSet],
        tokens: Sequence[str],
        tags: Sequence[Any],
        answer: Answer,
    ) -> None:
        super().__init__(derived_at, len(write_sets), tokens, [each.digest for each in write_sets], tags, answer)
        self.write_sets = write_sets
        self.notes_each = False
        """Whether the facts note every member, and not only the last one of those that write the same cells."""

    def without(self, gone: set[int]) -> Part | None:
        kept = [i for i in range(len(self.write_sets)) if i not in gone]
        if not kept:
            return None
        tokens, tags = [self.tokens[i] for i in kept], [self.tags[i] for i in kept]
        rest = Writes(self.derived_at, [self.write_sets[i] for i in kept], tokens, tags, self.answer)
        rest.notes_each = self.notes_each
        return rest

    def written(self, first: int) -> Iterator[tuple[int, Footprint]]:
        if self.notes_each:
            yield from ((first + i, each.footprint) for i, each in enumerate(self.write_sets))
            return
        # The last place of those that are one object: most are, where many count.
        last = {each: i for i, each in enumerate(self.write_sets)}
        of_cells = {each.cells: (i, each) for each, i in sorted(last.items(), key=lambda item: item[1])}
        for i, each in sorted(of_cells.values(), key=lambda item: item[0]):
            yield first + i, each.footprint

    def tables(self) -> set[int]:
        return {row[0] for each in {*self.write_sets} for row in each.rows}

    def entries(self) -> Sequence[Entry]:
        bodies = WriteSet.bodies(self.write_sets, self.tokens)
        return [*map(partial(tuple.__new__, Entry), zip(repeat(Kind.COMMIT), zip(bodies), repeat(1), repeat(())))]

    def applied(self) -> Applied:
        stamped = zip(range(self.first, self.first + len(self.write_sets)), self.write_sets, strict=True)
        return Applied([(cts, *row) for cts, each in stamped for row in each.rows], (), ())


# -- events, each its own transaction --------------------------------------------------------------------


class Events(Part):
    """Events of one table, each a transaction of its own, and the deltas that they derive.

    They have one ``token``: a member is (token, place). ``places``: which member each row of ``batch`` is, if some
    members bring none (they were late, and are counted in ``derived``). The CTS of ``runs`` are places, too.
    ``raised``: what rules raised. ``body`` is the record.
    """

    def __init__(
        self,
        derived_at: int,
        record: EventsRecord,
        batch: pa.RecordBatch,
        runs: Sequence[tuple[int, DeltaRun]],
        members: int,
        answer: Answer,
        guards: Sequence[Guard],
        body: list[Any] | None = None,
        raised: Sequence[Raised] = (),
    ) -> None:
        token, digest = record.request
        super().__init__(derived_at, members, (token,), (digest,), (None,), answer)
        self.record = record
        self.body = record.encode() if body is None else body
        self.batch = batch
        self.runs = runs
        self.guards = guards
        self.raised = raised

    def written(self, first: int) -> Iterator[tuple[int, Footprint]]:
        yield first + self.members - 1, Footprint(0, (), self.guards)

    def tables(self) -> set[int]:
        return {self.record.table, *(table for table, _, _ in self.record.raised)}  # on every node, whatever it holds

    def entries(self) -> Sequence[Entry]:
        return [Entry(Kind.COMMIT, self.body, self.members)]

    def applied(self) -> Applied:
        return events_applied(self.record, self.first, self.members, self.batch, self.runs, self.raised)


def events_applied(
    record: EventsRecord,
    first: int,
    members: int,
    batch: pa.RecordBatch,
    runs: Sequence[tuple[int, DeltaRun]],
    raised: Sequence[Raised],
) -> Applied:
    """What a record with the CTS from ``first`` on does, with its events and runs decoded: also when it is replayed."""
    last = first + members - 1
    if record.places is None:
        stamps = np.arange(first, last + 1, dtype=np.uint64)
    else:
        stamps = record.places + np.uint64(first)
    events = [(record.table, PendingEvents(first, last, batch, stamps))] if batch.num_rows else []
    events += [
        (table, PendingEvents(first, last, more, places + np.uint64(first)))
        for table, more, places in raised
        if more.num_rows
    ]
    runs = [(table, shifted(run, first)) for table, run in runs if run.rows]
    return Applied([(last, *row) for row in record.derived], events, runs)
