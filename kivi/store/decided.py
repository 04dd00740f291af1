"""Matches that can change no more, as events come: what a subscription to matches is told.

**The definition.** A *position* is a snapshot S and a *frontier* F, a moment of event time. The matches that are
*decided* at (S, F) are those of the pattern over the events of S which no event at F or later can change: what the
automaton had to read, for each match and for every row before it in its partition that might have begun another one,
is before F (``Matcher.decided``).

**Invariant.** Whoever was told, from position to position, what came and what went, has exactly the matches that are
decided at the last one. So once F has passed all events this is what ``match`` gives at S. Events that come later than
F said are no exception: the matches that they change go, and others come.

Between two positions only these are looked at: matches that begin less than ``within`` before the old frontier, or
before the earliest of the events that came behind it. What was matched before these matters as far as it is not clear
where the next match may begin: further back than that is read only while it is not (``Matcher.decided`` gives None).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import stored_array, stored_rows
from kivi.arrow.dictionaries import plain
from kivi.encoding.event_names import STAMP
from kivi.errors import EventsRetracted
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr, all_of
from kivi.model.patterns import Match
from kivi.model.questions import seen_schema
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MIN, ColumnType
from kivi.mvcc.leases import Lease
from kivi.patterns.answers import FIRST, answer_schema, answered
from kivi.patterns.matching import Matcher
from kivi.patterns.rows import Rows
from kivi.store.change_reads import ChangeReads
from kivi.store.event_selection import Captured, SelectedEvents, narrowed, pushed
from kivi.store.patterns import Asked
from kivi.store.reads import Reads
from kivi.store.shards import asked_shards

__all__ = ["Decided", "Judged", "Position", "Told"]

_OVER, _FAILED = "\0over", "\0failed"
_RULES_LOOK_BACK: Final = 8
_MOMENT: Final = ColumnType("timestamp")
Row = dict[str, Any]


class Position(NamedTuple):
    """Snapshot and frontier; the least frontier is before all events."""

    ts: int
    frontier_us: int = INT64_MIN


class Told(NamedTuple):
    """What went and what came, in stored form, by their first rows. ``next_us``: unless events come, nothing is decided
    before the frontier is later than this; None: nothing at all."""

    removed: Sequence[Row]
    added: Sequence[Row]
    next_us: int | None


class Judged(NamedTuple):
    """For a rule: the matches that were decided between two positions, in Arrow, with the names of their first rows
    (``FIRST``); which of them have a measure that is out of range; and how many matches that were decided before were
    changed by events that came later than the frontier said, as far as they begin not more than ``_RULES_LOOK_BACK``
    times ``within`` before it. ``next_us`` as of ``Told``."""

    matches: pa.RecordBatch
    failed: Any
    changed: int
    next_us: int | None


class _Found(NamedTuple):
    """Matches, with the names of their first rows, and from when on each can change no more."""

    rows: Any
    over: Any
    failed: Any


@dataclass(frozen=True, slots=True)
class Decided:
    """Of one pattern over one table."""

    reads: Reads
    changes: ChangeReads
    match: Match
    where: Expr | None

    def between(self, lease: Lease, schema: TableSchema, was: Position, frontier_us: int) -> Told:
        """From a position to another one, at the lease's snapshot. The frontier does not go back.

        Raises EventsRetracted where events that it was told of may be gone since, ResourceExhausted, and what reading
        the table raises.
        """
        try:
            self.changes.check_not_read(lease, schema, self.where, was.ts)
        except EventsRetracted as met:
            raise EventsRetracted(
                f"events of {schema.name!r} were retracted at {met.details['retracted_at']}, and matches that were "
                f"told since {was.ts} may be gone with them: subscribe again",
                **met.details,
            ) from None
        now, before = self._both(lease, schema, was, None)
        there, next_us = now.over < frontier_us, _next(now, frontier_us)
        if before is None:
            return Told([], _shown(now.rows, there & (now.over >= was.frontier_us)), next_us)
        removed, added = _differences(_named(before.rows, before.over < was.frontier_us), _named(now.rows, there))
        return Told(list(map(_without_name, removed)), list(map(_without_name, added)), next_us)

    def judged(
        self, lease: Lease, schema: TableSchema, was: Position, frontier_us: int, end_us: int | None = None
    ) -> Judged:
        """What a rule judges between two positions. Nothing is an error that is about one match alone, or that events
        were retracted. ``end_us``: no event from there on is read, which is not before the frontier."""
        now, before = self._both(lease, schema, was, end_us, for_rule=True)
        there, changed = now.over < frontier_us, 0
        if before is not None:
            old, new = (_named(each.rows, each.over < was.frontier_us) for each in (before, now))
            differing = [row for rows in _differences(old, new) for row in rows]
            changed = len({tuple(row[name] for name in FIRST) for row in differing})
        chosen = there & (now.over >= was.frontier_us)
        rows = plain(now.rows.filter(pa.array(chosen)))
        return Judged(rows, now.failed[chosen], changed, _next(now, frontier_us))

    def _both(
        self, lease: Lease, schema: TableSchema, was: Position, end_us: int | None, for_rule: bool = False
    ) -> tuple[_Found, _Found | None]:
        """The matches now, and as they were at the position, if events came that are behind its frontier."""
        late_us = self._earliest(lease, schema, was)
        within = self.match.pattern.within_us or 0
        from_us = _before(was.frontier_us if late_us is None else min(late_us, was.frontier_us), within)
        if for_rule:  # one that is ages late would have all events since read
            from_us = max(from_us, _before(was.frontier_us, _RULES_LOOK_BACK * within))
        back, found = 2 * within, None
        while found is None:
            low_us = _before(from_us, back)
            if low_us > INT64_MIN and not self._any_before(lease, schema, low_us):
                low_us = INT64_MIN
            since = None if late_us is None else was.ts
            found = self._read(lease, schema, since, from_us, low_us, end_us, for_rule)
            back *= 4
        return found

    # -- what is read -------------------------------------------------------------------------------------

    def _captured(self, lease: Lease, schema: TableSchema) -> Captured:
        asked = asked_shards(schema, Scan(where=self.where))
        self.reads.missing(lease, schema, asked)
        return self.reads.captured(lease, schema, None, asked)

    def _selected(self, captured: Captured, used: Sequence[str], also: Expr | None) -> SelectedEvents:
        _, where = narrowed(captured.schema, (None, None), all_of(self.where, also))
        types = {column.name: column.type for column in seen_schema(captured.schema).columns}
        return SelectedEvents(self.reads.questions.timeline, captured, used, *pushed(captured.schema, where), types)

    def _earliest(self, lease: Lease, schema: TableSchema, was: Position) -> int | None:
        """Of the events that came since a position, the earliest before its frontier; None: none is."""
        if was.frontier_us == INT64_MIN:
            return None
        captured = self._captured(lease, schema)
        time = schema.event_time or ""
        selected = self._selected(captured, [time, COMMIT_TS], Expr(">", COMMIT_TS, was.ts))
        with captured.view:
            batches = selected.of((None, was.frontier_us), selected.after(), named=False, ordered=False)
            return min((int(stored_array(_MOMENT, batch.column(time)).min()) for batch in batches), default=None)

    def _any_before(self, lease: Lease, schema: TableSchema, moment_us: int) -> bool:
        captured = self._captured(lease, schema)
        selected = self._selected(captured, [schema.event_time or ""], None)
        with captured.view:
            batches = selected.of((None, moment_us), selected.after(), named=False, ordered=False)
            return next(iter(batches), None) is not None

    def _read(
        self,
        lease: Lease,
        schema: TableSchema,
        since: int | None,
        from_us: int,
        low_us: int,
        end_us: int | None,
        may_fail: bool,
    ) -> tuple[_Found, _Found | None] | None:
        """None: it takes earlier events. ``since``: the snapshot that they are wanted at, too."""
        captured = self._captured(lease, schema)
        part = replace(self.match, start_us=None if low_us == INT64_MIN else low_us, end_us=end_us)
        questions = self.reads.questions
        with captured.view:
            asked = Asked(questions.timeline, captured, part, self.where, questions.bytes_max, whole=True)
            held = asked.held()
        types = {column.name: column.type for column in seen_schema(schema).columns}
        now = self._matches(held, schema, types, low_us, from_us, may_fail)
        if now is None or since is None:
            return now and (now, None)
        seen = [batch.filter(pc.less_equal(batch.column(STAMP), pa.scalar(since, pa.uint64()))) for batch in held]
        before = self._matches(seen, schema, types, low_us, from_us, may_fail)
        return before and (now, before)

    def _matches(
        self,
        held: Sequence[Any],
        schema: TableSchema,
        types: dict[str, ColumnType],
        low_us: int,
        from_us: int,
        may_fail: bool,
    ) -> _Found | None:
        """The matches that begin from a moment on."""
        held = [batch for batch in held if batch.num_rows]
        if not held:
            columns = [*answer_schema(self.match), *(pa.field(name, pa.int64()) for name in FIRST)]
            return _Found(
                pa.RecordBatch.from_pylist([], schema=pa.schema(columns)), np.zeros(0, np.int64), np.zeros(0, np.bool_)
            )
        rows = Rows.of(held, self.match, schema.event_time or "")
        decided = Matcher(self.match, types).decided(rows, None if low_us == INT64_MIN else low_us, from_us)
        if decided is None:
            return None
        failed = np.zeros(len(decided.over_us), np.bool_)
        more = {_OVER: decided.over_us, _FAILED: failed}
        answer = answered(self.match, rows, decided.found, more, failed if may_fail else None)
        over, out = answer.column(_OVER).to_numpy(), np.asarray(answer.column(_FAILED))
        return _Found(answer.drop_columns([*more]), over, out)


def _next(found: _Found, frontier_us: int) -> int | None:
    return min(found.over[found.over >= frontier_us].tolist(), default=None)


def _before(moment_us: int, by: int) -> int:
    return INT64_MIN if moment_us < INT64_MIN + by else moment_us - by


def _named(rows: Any, kept: Any) -> list[Row]:
    """In stored form, with the names of their first rows."""
    return stored_rows(plain(rows.filter(pa.array(kept))))


def _shown(rows: Any, kept: Any) -> list[Row]:
    return [_without_name(row) for row in _named(rows, kept)]


def _without_name(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in FIRST}


def _differences(old: Sequence[Row], new: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """What is only in the one, and only in the other."""

    def missing(rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
        known, left = Counter(map(_key, others)), list[Row]()
        for row in rows:
            if known[_key(row)]:
                known[_key(row)] -= 1
            else:
                left.append(row)
        return left

    return missing(old, new), missing(new, old)


def _key(row: Row) -> str:
    return repr(row)  # a NaN is the same as another
