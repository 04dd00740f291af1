"""One subscription to a state out of parts, where no node of a cluster holds all of its shards.

::

    part 0, shards 0-31    its state has been so in [100, 104], then so in [107, 107], ...
    part 1, shards 32-63   its state has been so in [102, 107], ...
                                                       \\--> the state at 107, as one update

**Invariant.** An update at S is given only when every part has been told its state at S: its node has passed S then. S
only grows. So each update is what the query gives at the snapshot S of all shards, as from one node.

Each part is a subscription to the rows of its shards, in the same order, as many from the first on as decide what is
shown. A part that has told nothing of an S that another one has told is sought there (``kivi.live.parts`` says why
that ends). Where a part is lost, all begin again, at nodes that hold the shards now; the next update is the difference
to the state that was given last, whatever these are.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from kivi.api.arguments import SubscribeArguments
from kivi.api.subscription import Follower
from kivi.client.core import Core
from kivi.client.placing import least_loaded
from kivi.client.subscription_messages import KINDS, Place, Said, begin_message
from kivi.encoding.keys import encode_key
from kivi.errors import KiviError
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Change, Keyed, Query, Update, applied, differences
from kivi.wire.columns import rows_of, rows_reader
from kivi.wire.v1 import service_pb2 as pb

__all__ = ["Merged", "parts_of"]

Ranked = tuple[tuple[Any, ...], dict[str, Any]]
"""A row as callers see it, and its place in the order, which ends with its key."""
_KEY = itemgetter(-1)


def parts_of(error: KiviError, schema: TableSchema, wanted: SubscribeArguments) -> list[tuple[str, int]]:
    """The nodes that hold a part each, and which, if that is what the error says and the parts can be put together."""
    if schema.kind != "aggregate" or wanted.rollup is not None:
        return []
    return [(address, shards) for address, shards in error.details.get("parts") or () if shards]


def cover(core: Core, held: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Every shard at one of the nodes that are said to hold it: such a node refuses shards that it does not hold."""
    left, left_at, found = 0, dict[str, int](), list[tuple[str, int]]()
    for address, shards in held:
        left_at[address] = left_at.get(address, 0) | shards
        left |= shards
    while left:
        address = least_loaded(core, [one for one, shards in left_at.items() if shards & left])
        found.append((address, left_at.pop(address) & left))
        left &= ~found[-1][1]
    return found


@dataclass
class _State:
    """What a part has been in [low, high], as changes of the state before."""

    low: int
    high: int
    changes: Sequence[Change] = ()
    reset: bool = False


class _Reader:
    """Rows of parts, of the table as one schema says."""

    def __init__(self, schema: TableSchema, wanted: SubscribeArguments) -> None:
        self._schema = schema
        self.query: Query = wanted.bound(schema)
        self._rank = self.query.sort_key()
        order = (name for name, _ in self.query.order)
        self.columns = tuple(dict.fromkeys((*self.query.columns, *order, *schema.key_names)))
        self._read = rows_reader(schema, self.columns)
        self._types = [column.type for column in schema.key]

    def changes(self, message: pb.SubscriptionUpdate) -> list[Change]:
        stored = rows_of(message.columns)
        rows = map(self._ranked, stored, self._read(stored))
        changes = []
        for each, old, new in zip(message.kinds, message.old, message.new, strict=True):
            kind = KINDS[each]
            if kind == "remove":
                changes.append(Change(kind, old, None, None))
            else:
                changes.append(Change(kind, None if kind == "add" else old, new, next(rows)))  # type: ignore[arg-type]
        return changes

    def _ranked(self, values: Sequence[Any], seen: dict[str, Any]) -> Ranked:
        stored = dict(zip(self.columns, values, strict=True))
        key = encode_key(self._types, [stored[name] for name in self._schema.key_names])
        return self._rank(stored, key), {name: seen[name] for name in self.query.columns}


@dataclass
class _Part:
    address: str
    place: Place
    reader: _Reader
    """Of what comes: all of a state at S are of the table as S sees it, in each part."""
    accepted: bool = False
    rows: list[Ranked] = field(default_factory=list)
    """In the first of ``states``."""
    states: deque[_State] = field(default_factory=deque)
    coming: list[Change] = field(default_factory=list)
    """Of an update that goes on."""
    sought: int = 0

    def hear(self, update: Update) -> None:
        """One without changes says on what it has been, or that it changed and is as before."""
        last = self.states[-1] if self.states else None
        if last is not None and not update.changes and not update.reset and update.from_ts <= last.high:
            last.high = max(last.high, update.ts)
        elif update.from_ts:
            self.states.append(_State(update.from_ts, update.ts, update.changes, update.reset))
            if len(self.states) == 1:
                self._apply(self.states[0])

    def last_at(self, ts: int) -> int | None:
        """The last snapshot up to ``ts`` whose state is known."""
        return max((min(state.high, ts) for state in self.states if state.low <= ts), default=None)

    def go_to(self, ts: int) -> None:
        while len(self.states) > 1 and self.states[1].low <= ts:
            self.states.popleft()
            self._apply(self.states[0])

    def _apply(self, state: _State) -> None:
        rows = [] if state.reset else self.rows
        self.rows = applied(rows, state.changes, value=lambda change: change.row)


class Merged:
    """Without its input and output: reader and place of a ``kivi.client.subscriptions.Live``. ``given``: the state that
    was given last, if some was."""

    def __init__(
        self,
        core: Core,
        schema: TableSchema,
        wanted: SubscribeArguments,
        follower: Follower,
        given: list[Keyed] | None,
    ) -> None:
        self._core, self._schema, self._wanted, self._follower = core, schema, wanted, follower
        self._reader = _Reader(schema, wanted)
        self._query = self._reader.query
        self._parts: list[_Part] = []
        self.given = given
        self._ts = 0
        self.lost = ""
        """The address of a part that was lost."""

    def begin(self, held: Sequence[tuple[str, int]], put: Callable[[Any], None]) -> None:
        """Begins the parts; ``put`` gets what is said of each, with its number."""
        message = begin_message(self._schema, self._wanted, self._follower, self._core.seen_ts)
        message.min_snapshot = max(message.min_snapshot, message.since)
        message.ClearField("since")
        del message.spec.columns[:]
        message.spec.columns.extend(self._reader.columns)
        message.spec.known_columns = len(self._schema.output_names)
        message.offset = 0
        if self._query.shown is not None:
            message.spec.limit = self._query.shown
        for address, shards in cover(self._core, held):
            message.shards = shards
            self.lost = address
            line = self._core.transport.lines_at(address).line()
            place = line.begin(message, partial(_tagged, put, len(self._parts)))
            self._parts.append(_Part(address, place, self._reader))
        self.lost = ""

    @property
    def is_accepted(self) -> bool:
        return all(part.accepted for part in self._parts)

    def hear(self, said: tuple[int, Said | None]) -> None:
        """What is said of a part, if anything. Raises what ends it, and so all of them."""
        number, message = said
        part = self._parts[number]
        if message is None:
            return
        if isinstance(message, KiviError):
            self.lost = part.address
            raise message
        if message.accepted:
            part.accepted = True
            return
        if message.HasField("altered"):
            part.reader = _Reader(self._core.heard(message.altered), self._wanted)
        part.coming += part.reader.changes(message)
        if message.more:
            return
        changes, part.coming = part.coming, []
        part.hear(Update(message.ts, changes, reset=message.reset, from_ts=message.from_ts))
        part.place.took(Update(message.ts, ended=message.ended))
        self._seek()

    def _seek(self) -> None:
        """What one part has come to others are to come to."""
        newest = max((part.states[-1].low for part in self._parts if part.states), default=0)
        for part in self._parts:
            if part.states and max(part.states[-1].high, part.sought) < newest:
                part.sought = newest
                part.place.seek(newest)

    def read(self, said: tuple[int, Said | None]) -> Update | None:
        """The state that all parts have come to, if it is another snapshot; None: they are on their way there."""
        self.hear(said)
        at = self._common()
        if at is None or at <= self._ts:
            return None
        self._ts = at
        for part in self._parts:
            part.go_to(at)
        rows = heapq.merge(*(part.rows for part in self._parts), key=itemgetter(0))
        state = [(_KEY(rank), row) for rank, row in rows][self._query.offset : self._query.shown]
        before, self.given = self.given, state
        return Update(at, differences(before or [], state), reset=before is None)

    def _common(self) -> int | None:
        """The greatest snapshot of which the states of all parts are known."""
        if not all(part.states for part in self._parts):
            return None
        at: int | None = min(part.states[-1].high for part in self._parts)
        while at is not None:
            lasts = [part.last_at(at) for part in self._parts]
            least = None if None in lasts else min(last for last in lasts if last is not None)
            if least == at:
                return at
            at = least
        return None

    def took(self, update: Update) -> None:
        """Each part's updates were taken as they came."""

    def end(self) -> None:
        """Nothing more is wanted. Harmless twice."""
        for part in self._parts:
            part.place.end()


def _tagged(put: Callable[[Any], None], number: int, said: Said) -> None:
    put((number, said))
