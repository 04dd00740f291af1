"""The replay oracle: was every answer the one that some prefix of the commit order produces?

A commit's reply carries its timestamp and a begin's reply its snapshot, so a test logs what it did and what it saw,
and afterwards the committed operations are replayed in timestamp order into plain dictionaries of exact Python values:

* **every read at S equals the replay of CTS <= S, exactly**, own writes on top where a transaction read after writing;
* of two concurrent committed transactions none wrote what the other wrote or guarded, except by deltas (R2 to R8);
* whoever was refused with a Conflict was refused because of a commit that clashes with it;
* no timestamp is handed out twice, and each is above the snapshot of its own transaction (R13);
* unknown outcomes are resolved through their token first, and every token answers for its own commit (R16).

*A transaction that has read nothing* (a blind one) need not know its snapshot. By R19 it begins just before its own
commit timestamp. As the store is today, one that comes alone over gRPC and one that enters in a group both begin at the
watermark when the server reads their message, and the reply tells it; in process it is the watermark when it began.
All of these lie between what its client had seen acknowledged (``after``) and the commit timestamp, so the oracle holds
a blind commit to the snapshot that its reply told, whichever rule made it. If no reply told one (``start_ts`` is None),
it is taken to begin just before its commit timestamp: then no earlier commit can clash with it, but it clashes with
later ones, and every read judges it, as any other commit.

*A read without a snapshot that the caller knows* (``db.get``, ``db.get_many``) is a ``Glimpse``: all that it found
together must be the replay at one S between what was acknowledged before it was asked and what was visible after.

Nothing here is shared with the store: not the operators, not the fold, not the verdict. A read that does not agree is
reported with everything that ever happened to its row.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from kivi.errors import Conflict
from tests.clashes import conflicts, refusals, touched
from tests.measures import Cell, Measure, plain

__all__ = [
    "TWICE",
    "Aggregate",
    "Attempt",
    "EventTable",
    "Glimpse",
    "Mismatch",
    "Op",
    "Oracle",
    "Read",
    "Replay",
    "Report",
    "RowTable",
    "Table",
    "Told",
    "View",
    "touched",
]

Key = tuple[Any, ...]
Row = dict[str, Any]
Outcome = Literal["committed", "aborted", "unknown"]


class Mismatch(AssertionError):
    """The store gave an answer that no prefix of the commit order produces."""


# -- what is replayed into ------------------------------------------------------------------------


@dataclass(frozen=True)
class RowTable:
    """``columns``: name -> None for a value column, or sum, fsum, min, max."""

    key: tuple[str, ...]
    columns: Mapping[str, str | None]


@dataclass(frozen=True)
class EventTable:
    """Appended dictionaries, in commit order. ``is_sharded``: those of one commit may come in another order."""

    is_sharded: bool = False


@dataclass(frozen=True)
class Aggregate:
    """``group(event)`` is the key; ``measures``: name -> (operator, event -> observation or None).

    An operator is sum, fsum, min or max, or a measure that keeps a state, whose observation may be (value, by).
    ``time`` names the events' time in microseconds.
    """

    source: str
    key: tuple[str, ...]
    group: Callable[[Row], Key]
    measures: Mapping[str, tuple[str | Measure, Callable[[Row], Any]]]
    since: int = 0
    time: str = "ts"

    @functools.cached_property
    def columns(self) -> Mapping[str, str | Measure | None]:
        return {name: operator for name, (operator, _) in self.measures.items()}

    def observed(self, event: Row, cts: float, place: int) -> Row:
        """What each measure sees of an event that is the ``place``th of its commit."""
        seen: Row = {}
        for name, (operator, of) in self.measures.items():
            what = of(event)
            if isinstance(operator, Measure):
                what = operator.observed(what, event.get(self.time, 0), cts, place)
            seen[name] = what
        return seen


@dataclass(frozen=True)
class View:
    """The rows of a row table under another key, but for those that have a null there. ``columns``: the others."""

    source: str
    key: tuple[str, ...]
    columns: tuple[str, ...]

    def rows(self, own_key: tuple[str, ...], rows: Mapping[Key, Row]) -> list[Row]:
        """In key order; ``rows``: those of the source."""
        named = ({**dict(zip(own_key, key, strict=True)), **_shown(row)} for key, row in rows.items())
        found = [{c: row[c] for c in (*self.key, *self.columns)} for row in named if None not in map(row.get, self.key)]
        return sorted(found, key=self.key_of)

    def key_of(self, row: Row) -> Key:
        return tuple(row[c] for c in self.key)


TWICE: Final = "two rows"
"""What a read of a unique view by a key would find under which two rows come: such a commit is refused."""

Table = RowTable | EventTable | Aggregate | View


def identity(operator: str | Measure | None) -> Any:
    if isinstance(operator, Measure):
        return Cell(operator)
    return {"sum": 0, "fsum": 0.0}.get(operator or "")


def combine(operator: str | Measure, cell: Any, delta: Any) -> Any:
    if delta is None:
        return cell
    if cell is None:
        return delta
    if isinstance(operator, Measure):
        return cell.combined(delta)
    match operator:
        case "sum" | "fsum":
            return cell + delta
        case "min":
            return min(cell, delta)
        case _:
            return max(cell, delta)


# -- what is logged -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """``kind``: put, insert, delta, delete, guard (``values`` maps the column, or is empty for the row), append,
    overwrite (the whole table), retract (the events of its snapshot that have these ``values``)."""

    kind: str
    table: str
    key: Key = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Row] = ()


@dataclass(frozen=True)
class Read:
    """``key`` None: a scan, found in order. ``own``: what the reader had written before. ``only``: of events, those
    with a value in a column."""

    ts: int
    table: str
    key: Key | None
    found: Any
    own: tuple[Op, ...] = ()
    who: str = ""
    only: tuple[str, Any] | None = None
    is_any_order: bool = False
    """Of events: those of one commit may be in another order."""
    columns: frozenset[str] | None = None
    """Of an aggregate to which measures are added: the columns that it had then. None: all of them."""
    top: tuple[str, int] | None = None
    """Of a scan: so many rows with the largest values of a column; those with equal ones in the order of their keys."""


@dataclass(frozen=True)
class Glimpse:
    """Rows that were read together, at a snapshot that was not told: not below ``after``, and not above ``before``."""

    after: int
    before: int | None
    table: str
    keys: tuple[Key, ...]
    found: list[Row | None]
    who: str = ""


@dataclass(frozen=True)
class Told:
    """Events of a table that were told one after the other, of a table from which none are removed: those between two
    places, each a commit timestamp and how many events behind those of that commit."""

    table: str
    after: tuple[int, int]
    upto: tuple[int, int]
    found: list[Row]
    who: str = ""


@dataclass
class Attempt:
    """One attempt to commit. ``commit_ts`` is what the reply said, if there was one.

    ``start_ts``: its snapshot; None if it was blind and nobody told it. ``after``: what its client had seen
    acknowledged before it was asked for. ``repeat``: it came again under a token that had committed, and answers
    nothing but that. ``refused``: the Conflict that it got.
    """

    start_ts: int | None
    ops: list[Op]
    outcome: Outcome
    commit_ts: int | None = None
    token: str | None = None
    who: str = ""
    after: int = 0
    repeat: bool = False
    refused: Conflict | None = None

    @property
    def began(self) -> int:
        """The snapshot that it is held to; of commits only."""
        return self.start_ts if self.start_ts is not None else (self.commit_ts or 0) - 1


@dataclass(frozen=True)
class Report:
    commits: int
    aborts: int
    reads: int
    unknown: int


class Oracle:
    """Thread safe while it collects; ``check`` replays."""

    def __init__(self, tables: Mapping[str, Table], filling: Iterable[str] = ()) -> None:
        """``filling``: row tables of which views are filled while others write."""
        self.tables = dict(tables)
        self.filling = frozenset(filling)
        self._mutex = threading.Lock()
        self.attempts: list[Attempt] = []
        self.reads: list[Read] = []
        self.glimpses: list[Glimpse] = []
        self.tellings: list[Told] = []
        self._replayed: tuple[list[Attempt], Replay] = ([], Replay(self.tables))

    @property
    def row_tables(self) -> set[str]:
        return {name for name, spec in self.tables.items() if isinstance(spec, RowTable)}

    def moving(self, table: str) -> frozenset[str]:
        """The columns of a row table that keys of its views are made of."""
        views = (spec for spec in self.tables.values() if isinstance(spec, View) and spec.source == table)
        return frozenset(column for view in views for column in view.key)

    def attempt(self, attempt: Attempt) -> None:
        with self._mutex:
            self.attempts.append(attempt)

    def read(self, read: Read) -> None:
        with self._mutex:
            self.reads.append(replace(read, found=plain(read.found)))

    def glimpse(self, glimpse: Glimpse) -> None:
        with self._mutex:
            self.glimpses.append(replace(glimpse, found=plain(glimpse.found)))

    def told(self, told: Told) -> None:
        with self._mutex:
            self.tellings.append(replace(told, found=plain(told.found)))

    def copied(self) -> Oracle:
        """Another one that knows the same so far, for a history that branches."""
        other = Oracle(self.tables, self.filling)
        other.attempts = [replace(attempt) for attempt in self.attempts]
        other.reads = list(self.reads)
        other.glimpses = list(self.glimpses)
        other.tellings = list(self.tellings)
        return other

    def resolve(self, outcome: Callable[[str], int | None]) -> int:
        """Asks for every unknown outcome by its token: ``outcome(token)`` is its commit timestamp or None (aborted)."""
        count = 0
        for attempt in self.attempts:
            if attempt.outcome == "unknown":
                assert attempt.token is not None, "an unknown outcome without a token cannot be resolved"
                attempt.commit_ts = outcome(attempt.token)
                attempt.outcome = "aborted" if attempt.commit_ts is None else "committed"
                count += 1
        return count

    def confirm(self, outcome: Callable[[str], int | None], most: int | None = None) -> int:
        """Every token answers with the timestamp of its own commit, or of ``most`` of them, evenly chosen (R16)."""
        known = [a for a in self.attempts if a.outcome == "committed" and a.token is not None and a.ops]
        step = 1 if most is None or len(known) <= most else len(known) / most
        chosen = [known[int(i * step)] for i in range(int(len(known) / step))]
        for attempt in chosen:
            assert attempt.token is not None
            if (found := outcome(attempt.token)) != attempt.commit_ts:
                raise Mismatch(f"R16: the token {attempt.token!r} answers {found}, and it committed as {attempt}")
        return len(chosen)

    # -- checking -------------------------------------------------------------------------------

    def committed(self) -> list[Attempt]:
        """In commit order; a token's repeats count once."""
        seen: dict[int, Attempt] = {}
        by_token: dict[str, int] = {}
        for attempt in self.attempts:
            assert attempt.outcome != "unknown", "resolve() first"
            if attempt.outcome != "committed" or not attempt.ops:
                continue
            cts = attempt.commit_ts
            assert cts is not None
            if attempt.token is not None and by_token.setdefault(attempt.token, cts) != cts:
                raise Mismatch(f"R16: the token of {attempt} has committed at {by_token[attempt.token]} already")
            if cts in seen:
                if attempt.token is None or seen[cts].token != attempt.token:
                    raise Mismatch(f"R13: two commits have the timestamp {cts}: {seen[cts]} and {attempt}")
                if seen[cts].repeat and not attempt.repeat:
                    seen[cts] = attempt
                continue
            if not attempt.repeat and max(attempt.start_ts or 0, attempt.after) >= cts:
                raise Mismatch(f"R13: the commit {cts} is not above its own snapshot: {attempt}")
            if attempt.start_ts is not None and attempt.start_ts < attempt.after:
                raise Mismatch(f"R17: it begins below what its client had seen acknowledged: {attempt}")
            seen[cts] = attempt
        return [seen[cts] for cts in sorted(seen)]

    def check(self) -> Report:
        """Raises Mismatch at the first thing that cannot be."""
        commits = self.committed()
        if wrong := conflicts(commits) or refusals(self, commits):
            raise Mismatch(wrong)
        replay = Replay(self.tables)
        reads = deque(sorted(self.reads, key=lambda read: read.ts))
        glimpses = deque(sorted(self.glimpses, key=lambda glimpse: glimpse.after))
        waiting: list[Glimpse] = []  # for a commit that makes them true
        for commit in (*commits, None):
            cts = math.inf if commit is None else commit.commit_ts or 0
            while reads and reads[0].ts < cts:
                read = reads.popleft()
                expected = replay.answer(read)
                if expected != read.found and not (read.is_any_order and replay.is_alike(read)):
                    raise Mismatch(self._explain(read, expected))
            while glimpses and glimpses[0].after < cts:
                glimpse = glimpses.popleft()
                if replay.glimpsed(glimpse) != glimpse.found:
                    waiting.append(glimpse)
            for glimpse in waiting:
                if glimpse.before is None or glimpse.before >= cts:
                    continue
                raise Mismatch(self._explain_glimpse(glimpse))
            if commit is None:
                break
            replay.apply(commit)
            changed = replay.changes(commit)
            waiting = [g for g in waiting if g.table not in changed or replay.glimpsed(g) != g.found]
        if waiting:
            raise Mismatch(self._explain_glimpse(waiting[0]))
        for told in self.tellings:
            if (wanted := replay.between(told.table, told.after, told.upto)) != told.found:
                raise Mismatch(
                    f"{told.who} was told of {told.table} from {told.after} to {told.upto}\n"
                    f"  {told.found}\n  expected {wanted}"
                )
        aborts = sum(attempt.outcome == "aborted" for attempt in self.attempts)
        return Report(len(commits), aborts, len(self.reads) + len(self.glimpses) + len(self.tellings), 0)

    def state(self, ts: int) -> Replay:
        """Everything committed at or below ``ts``, replayed; good until the next call, which goes on from it."""
        commits = [attempt for attempt in self.committed() if (attempt.commit_ts or 0) <= ts]
        known, replay = self._replayed
        if len(known) > len(commits) or any(a is not b for a, b in zip(known, commits, strict=False)):
            known, replay = [], Replay(self.tables)
        for attempt in commits[len(known) :]:
            replay.apply(attempt)
        self._replayed = commits, replay
        return replay

    def _explain(self, read: Read, expected: Any) -> str:
        found, wanted = read.found, expected
        if isinstance(found, list) and isinstance(wanted, list) and len(found) < 1000:
            found = [row for row in read.found if row not in expected]
            wanted = [row for row in expected if row not in read.found]
        own = f" after own {list(read.own)}" if read.own else ""
        return "\n".join(
            [f"R1: {read.who} read {read.table}{read.key} at {read.ts}{own}", f"  found    {found}",
             f"  expected {wanted}", *self._history(read.table, None if read.key is None else (read.key,))]
        )  # fmt: skip

    def _explain_glimpse(self, glimpse: Glimpse) -> str:
        bound = "now" if glimpse.before is None else glimpse.before
        return "\n".join(
            [f"R1: {glimpse.who} read {glimpse.table}{glimpse.keys} at some S from {glimpse.after} to {bound}",
             f"  found    {glimpse.found}", "  and at no S is that the replay",
             *self._history(glimpse.table, glimpse.keys)]
        )  # fmt: skip

    def _history(self, table: str, keys: Sequence[Key] | None) -> list[str]:
        """The newest of what was committed to these rows."""
        history = [
            f"  @{attempt.commit_ts} (from {attempt.start_ts}, {attempt.who}) {op.kind} {op.key} {dict(op.values)}"
            for attempt in self.committed()
            for op in attempt.ops
            if op.table == table and (keys is None or op.key in keys) and op.kind != "guard"
        ]
        return history[-60:]


class Replay:
    """The state after some commits."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self.tables = tables
        self.rows: dict[str, dict[Key, Row]] = defaultdict(dict)
        self.events: dict[str, list[Row]] = defaultdict(list)
        self._came: dict[str, list[int]] = defaultdict(list)
        """The commit of each event."""

    def apply(self, attempt: Attempt) -> None:
        cts = attempt.commit_ts or 0
        self.change(attempt.ops, self.rows, cts)
        for op in attempt.ops:
            if op.kind == "append":
                self.events[op.table] += op.events
                self._came[op.table] += [cts] * len(op.events)
            elif op.kind == "overwrite":
                self.events[op.table], self._came[op.table] = [], []
            elif op.kind == "retract":
                self._retract(op, attempt.began)

    def _retract(self, op: Op, seen_at: int) -> None:
        """As if the events had never been in their commits."""
        every = list(zip(self._came[op.table], self.events[op.table], strict=True))
        left = [
            (cts, event)
            for cts, event in every
            if cts > seen_at or any(event[name] != value for name, value in op.values.items())
        ]
        self._came[op.table], self.events[op.table] = [cts for cts, _ in left], [event for _, event in left]
        for name, spec in self.tables.items():
            if isinstance(spec, Aggregate) and spec.source == op.table:
                self.rows[name] = {}
        for cts, found in itertools.groupby(left, key=lambda one: one[0]):
            self.change([Op("append", op.table, events=[event for _, event in found])], self.rows, cts)

    def changes(self, attempt: Attempt) -> set[str]:
        """The tables that a commit has written to, aggregates and views included."""
        written = {op.table for op in attempt.ops}
        derived = (
            n for n, spec in self.tables.items() if isinstance(spec, Aggregate | View) and spec.source in written
        )
        return written.union(derived)

    def glimpsed(self, glimpse: Glimpse) -> list[Row | None]:
        return [self.answer(Read(0, glimpse.table, key, None)) for key in glimpse.keys]

    def change(self, ops: Iterable[Op], rows: dict[str, dict[Key, Row]], cts: float) -> None:
        """Own operations in program order, deltas of one transaction combined before they meet the cell (R10)."""
        deltas: dict[tuple[str, Key, str], Any] = {}
        put: set[tuple[str, Key, str]] = set()
        fresh: set[tuple[str, Key]] = set()
        places: Counter[str] = Counter()

        def add(table: str, key: Key, values: Mapping[str, Any]) -> None:
            spec = self.tables[table]
            assert isinstance(spec, RowTable | Aggregate)
            row = self._row(rows, table, key)
            for name, delta in values.items():
                operator = spec.columns[name]
                assert operator is not None
                if (table, key, name) in put or (table, key) in fresh:
                    row[name] = combine(operator, row[name], delta)
                else:
                    deltas[table, key, name] = combine(operator, deltas.get((table, key, name)), delta)

        for op in ops:
            where = (op.table, op.key)
            match op.kind:
                case "put" | "insert":
                    if op.kind == "insert":
                        rows[op.table].pop(op.key, None)
                        fresh.add(where)
                    row = self._row(rows, op.table, op.key)
                    for name, value in op.values.items():
                        row[name] = value
                        put.add((*where, name))
                        deltas.pop((*where, name), None)
                case "delta":
                    add(op.table, op.key, op.values)
                case "delete":
                    rows[op.table].pop(op.key, None)
                    fresh.add(where)
                    for held in [held for held in deltas if held[:2] == where]:
                        del deltas[held]
                case "overwrite":
                    for name, spec in self.tables.items():
                        if name == op.table or (isinstance(spec, Aggregate) and spec.source == op.table):
                            rows[name] = {}
                            deltas = {held: delta for held, delta in deltas.items() if held[0] != name}
                            put = {held for held in put if held[0] != name}
                case "append":
                    for event in op.events:
                        for name, spec in self.tables.items():
                            if isinstance(spec, Aggregate) and spec.source == op.table:
                                add(name, spec.group(event), spec.observed(event, cts, places[op.table]))
                        places[op.table] += 1
        for (table, key, name), delta in deltas.items():
            spec = self.tables[table]
            assert isinstance(spec, RowTable | Aggregate)
            row = self._row(rows, table, key)
            row[name] = combine(spec.columns[name] or "", row[name], delta)

    def between(self, table: str, after: tuple[int, int], upto: tuple[int, int]) -> list[Any]:
        """The events from one place to another."""
        begin, end = (bisect_right(self._came[table], cts) + skip for cts, skip in (after, upto))
        found: list[Any] = plain(self.events[table][begin:end])
        return found

    def is_alike(self, read: Read) -> bool:
        """Whether it has found the events, those of each commit in some order."""
        commits, found = self._came[read.table], read.found
        if len(found) != len(commits):
            return False
        sides = (zip(commits, map(repr, events), strict=True) for events in (plain(self.events[read.table]), found))
        one, other = map(sorted, sides)
        return one == other

    def _row(self, rows: dict[str, dict[Key, Row]], table: str, key: Key) -> Row:
        found = rows[table].get(key)
        if found is None:
            spec = self.tables[table]
            assert isinstance(spec, RowTable | Aggregate)
            found = rows[table][key] = {name: identity(operator) for name, operator in spec.columns.items()}
        return found

    def answer(self, read: Read) -> Any:
        """What the read must have found."""
        spec = self.tables[read.table]
        if isinstance(spec, EventTable):
            own = [event for op in read.own if op.kind == "append" for event in op.events]
            events = [*self.events[read.table], *own]
            return events if read.only is None else [event for event in events if event[read.only[0]] == read.only[1]]
        rows = self.rows
        if read.own:
            held_in = spec.source if isinstance(spec, View) else read.table
            rows = defaultdict(dict, {held_in: {k: dict(row) for k, row in self.rows[held_in].items()}})
            self.change(read.own, rows, math.inf)  # what is not committed yet comes behind everything that is
        if isinstance(spec, View):
            source = self.tables[spec.source]
            assert isinstance(source, RowTable)
            in_view = spec.rows(source.key, rows[spec.source])
            if read.key is None:
                return in_view
            under = [row for row in in_view if spec.key_of(row) == read.key]
            return TWICE if len(under) > 1 else under[0] if under else None
        if read.key is not None:
            found = rows[read.table].get(read.key)
            return None if found is None else _named(spec, read, read.key, found)
        held = rows[read.table]
        listed = [_named(spec, read, key, held[key]) for key in sorted(held)]
        if read.top is None:
            return listed
        by, most = read.top
        return sorted(listed, key=lambda row: row[by], reverse=True)[:most]


def _named(spec: RowTable | Aggregate, read: Read, key: Key, row: Row) -> Row:
    whole = {**dict(zip(spec.key, key, strict=True)), **_shown(row)}
    return whole if read.columns is None else {name: whole[name] for name in whole if name in read.columns}


def _shown(row: Row) -> Row:
    return {name: value.shown if isinstance(value, Cell) else value for name, value in row.items()}
