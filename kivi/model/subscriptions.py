"""Subscriptions: what is asked for, and what a subscriber is told. Data only; ``kivi.live`` keeps them up.

A subscriber of rows gets its *state* at a snapshot, and then, whenever another one is delivered, how it differs from
the one before. Every state is exactly what the query gives at the snapshot that it names; between two of them commits
may have been passed over, never reordered. ``Change`` has four kinds::

    add     a row that was not there           old None   new: its position now
    remove  a row that is there no more        old: where it was   new None
    move    to another place, changed or not   old, new
    change  other values, in its place         old, new

Old positions count in the state before, new ones in the state now, so the order of application is: take all of
``remove`` and ``move`` out by old position, put ``add`` and ``move`` in by ascending new position, then set ``change``
at new positions: ``applied``. Rows that only shift because others came or went are in place: those that moved are the
fewest that explain the new order (the complement of a longest increasing subsequence, Schensted 1961).

A subscriber of events gets each of them once, in commit order, as ``add`` without positions; and one that wants
retractions delivered, events that were removed as ``remove``, with their values. A subscriber of matches gets each
once, as ``add``, when it is decided, and as ``remove``, with its values, if events that come too late take it back.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from kivi.model.expressions import Expr, names
from kivi.model.orders import Order, order_of
from kivi.model.patterns import matched_schema
from kivi.model.rollups import rolled_outputs, rolled_schema
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema

__all__ = ["Change", "Durable", "Kind", "Query", "Shown", "Stored", "Terms", "Update", "applied", "differences"]

Kind = Literal["add", "remove", "move", "change"]
Row = dict[str, Any]
Keyed = tuple[bytes, Row]
"""A row under what tells it from others."""


class Change(NamedTuple):
    """One row's part of an update. ``row`` is None for "remove", but of an event."""

    kind: Kind
    old: int | None
    new: int | None
    row: Row | None


class Shown(NamedTuple):
    """What is told of the rows of an update: these columns of the table as the snapshot sees it that they were read at.

    The rows may have others, too: those that were read for somebody else.
    """

    schema: TableSchema
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """One message to a subscriber. ``ts`` is the snapshot whose state it has then.

    ``reset``: the changes begin from nothing, whatever the subscriber had before. Of events ``skip`` counts those
    after ``ts`` that have been delivered, this update's included: the next one begins behind them. ``ended``: it is
    the last. ``from_ts``: of a part, the snapshot from which on the state has been as it is; 0: it is not said.
    """

    ts: int
    changes: Sequence[Change] = ()
    reset: bool = False
    skip: int = 0
    ended: bool = False
    from_ts: int = 0
    shown: Shown | None = field(default=None, compare=False, repr=False)
    """Of changes with rows in stored form: only by this can they be told to callers, whatever the table is by then."""
    made: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """By whom, what was made of it: of an update that several get that is done once."""


class Durable(NamedTuple):
    """Of a subscription that is remembered: whose it is, its name, for how long after it was last heard of, and
    whether it leaves out what others of its user were handed."""

    user: str
    name: str
    ttl_us: int
    unseen: bool = False


class Stored(NamedTuple):
    """A durable subscription as it is kept: events after ``since`` are its, those up to ``ts`` and ``skip`` after it
    have been delivered. ``query`` is for people that read the store."""

    user: str
    name: str
    table: str
    table_id: int
    query: str
    since: int
    ts: int
    skip: int
    expires_us: int


@dataclass(frozen=True, slots=True)
class Terms:
    """How a subscriber wants to be told. ``of_events``: events as they come, instead of a state.

    ``since``: the snapshot whose state it has; of events, up to which it has them, and ``skip`` of those after it.
    ``until_us``: the moment at which a subscription to events ends.
    """

    of_events: bool
    interval_s: float
    heartbeat_s: float
    since: int | None = None
    skip: int = 0
    until_us: int | None = None
    durable: Durable | None = None
    retractions: str = "fail"
    """Of events: see ``model.changes.Changes``."""
    lateness_us: int = 0
    """Of matches: how long after its event time an event may come without taking a match back, or ``AUTO_US``."""


class _Backwards:
    """Orders text and bytes from the last to the first."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Backwards) -> bool:
        return bool(other.value < self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backwards) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


_LAST: Final = (1,)
"""The rank of nulls, in either direction."""


def _up(value: Any) -> tuple[Any, ...]:
    return _LAST if value is None or value != value else (0, value)


def _down(value: Any) -> tuple[Any, ...]:
    if value is None or value != value:
        return _LAST
    return (0, _Backwards(value) if isinstance(value, (str, bytes)) else -value)


@dataclass(frozen=True, slots=True)
class Query:
    """The query of a subscription, bound to a schema: a scan's range, predicate and columns, an order and a part.

    ``order``: (column, whether from the largest down). Rows that are equal by it are in key order (events: in commit
    order), nulls last. ``limit`` rows are shown from the ``offset``-th on.
    """

    scan: Scan
    columns: tuple[str, ...]
    order: Order = ()
    limit: int | None = None
    offset: int = 0
    whole: bool = False
    """Whether ``columns`` are all that is read of a row: all of the table's, in its order, and no other to order by."""

    @staticmethod
    def of(
        schema: TableSchema,
        scan: Scan,
        order_by: Iterable[str],
        limit: int | None,
        offset: int,
    ) -> Query:
        """Raises SchemaError, InvalidArgument."""
        scan = replace(scan, limit=None)  # what is shown is only a part of what is read
        if (rollup := scan.rollup) is not None:
            scan = replace(scan, columns=rolled_outputs(schema, rollup))
            schema = rolled_schema(schema, rollup)
        order = order_of(order_by, schema.output_type)
        if scan.match is not None:
            schema = matched_schema(schema, scan.match)
        columns = schema.output_columns(scan.columns)
        whole = columns == schema.output_names and all(name in columns for name, _ in order)
        return Query(scan, columns, order, limit, offset, whole)

    @property
    def where(self) -> Expr | None:
        return self.scan.where

    @property
    def shown(self) -> int | None:
        """How many rows from the first on decide what is shown; None: all."""
        return None if self.limit is None else self.offset + self.limit

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that are shown and ordered by. Of those asked about a sum may have outgrown its column."""
        return tuple(dict.fromkeys((*self.columns, *(name for name, _ in self.order))))

    @property
    def read(self) -> set[str]:
        """Every column that a row must have for it: shown, ordered by, or in the predicate."""
        return {*self.needed, *(names(self.where) if self.where is not None else ())}

    def sort_key(self) -> Callable[[Row, bytes], tuple[Any, ...]]:
        """(row, key) -> what orders it among the others; no two are equal."""
        terms = [(name, _down if down else _up) for name, down in self.order]
        if not terms:
            return lambda _, key: (key,)
        return lambda row, key: (*(rank(row[name]) for name, rank in terms), key)


# -- from one state to the next -------------------------------------------------------------------------


def differences(before: Sequence[Keyed], after: Sequence[Keyed]) -> list[Change]:
    """The changes from one state to the next. O(n log n), and O(n) where nothing moved."""
    was = {key: i for i, (key, _) in enumerate(before)}
    changes: list[Change] = []
    stayed: list[int] = []  # positions before, in the order of now
    here = set()
    for key, _ in after:
        at = was.get(key)
        if at is not None:
            stayed.append(at)
            here.add(at)
    changes += [Change("remove", i, None, None) for i in range(len(before)) if i not in here]
    in_place = _increasing(stayed)
    for new, (key, row) in enumerate(after):
        old = was.get(key)
        if old is None:
            changes.append(Change("add", None, new, row))
        elif old not in in_place:
            changes.append(Change("move", old, new, row))
        elif row is not (previous := before[old][1]) and row != previous:
            changes.append(Change("change", old, new, row))
    return changes


def _increasing(positions: Sequence[int]) -> set[int]:
    """The members of a longest increasing subsequence of distinct numbers."""
    if all(a < b for a, b in itertools.pairwise(positions)):
        return set(positions)
    ends: list[int] = []  # the least last number of a subsequence of each length
    lengths: list[int] = []
    for position in positions:
        at = bisect_left(ends, position)
        ends[at : at + 1] = [position]
        lengths.append(at)
    found: set[int] = set()
    wanted, below = len(ends) - 1, math.inf
    for position, length in zip(reversed(positions), reversed(lengths), strict=True):
        if length == wanted and position < below:
            found.add(position)
            wanted, below = wanted - 1, position
    return found


def applied(rows: Sequence[Any], changes: Iterable[Change], *, value: Callable[[Change], Any]) -> list[Any]:
    """The state after ``changes``; ``value`` makes what is kept of a change's row. Moved rows are what they bring."""
    listed = list(changes)
    gone = {c.old for c in listed if c.kind in ("remove", "move")}
    out = [row for i, row in enumerate(rows) if i not in gone]
    for c in listed:
        if c.new is not None and c.kind in ("add", "move"):
            out.insert(c.new, value(c))
    for c in listed:
        if c.new is not None and c.kind == "change":
            out[c.new] = value(c)
    return out
