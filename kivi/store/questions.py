"""Questions at a snapshot: what they may read is captured here, and handed to ``kivi.query``.

Events are captured as a scan does it, pending ones first, the view second; aggregates are those of the table that the
snapshot sees. Where one of these cannot be read at the snapshot, as it keeps no history and the snapshot is of a past
moment, events answer. Own events of a transaction are in no aggregate, so events answer these, too.

An aggregate's row takes as long as some 20 events. How many rows there are is known when they have been read: an
aggregate that turns out to have more than one for so many events of the time is given up, events are read instead, and
the next question does not begin with it. So a question costs at most twice what it costs without aggregates, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from kivi.arrow.dictionaries import chunks, gathered, plain
from kivi.arrow.predicates import evaluate
from kivi.delta.combine import commutes
from kivi.delta.rolling import Rolling
from kivi.errors import NotFound, OutOfRange, ResourceExhausted, SnapshotTooOld
from kivi.events.summing import Sums
from kivi.events.views import later_of
from kivi.model.expressions import Expr, names
from kivi.model.questions import Question, asked_of, seen_schema
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType
from kivi.mvcc.leases import Lease
from kivi.mvcc.timeline import Timeline
from kivi.query.answers import Answer, Explain, answered
from kivi.query.planning import Candidate, Part, Times, planned
from kivi.query.tally import CHUNK_ROWS, Derived, Tally
from kivi.runtime.ahead import in_order
from kivi.store.catalog import Catalog
from kivi.store.event_selection import Captured, SelectedEvents, columns_asked, narrowed, pushed
from kivi.store.key_ranges import asked_range, equalities
from kivi.store.retention import Retention
from kivi.store.rollups import Rollups, RowsRead

__all__ = ["Questions"]

_MOMENT: Final = ColumnType("timestamp")
_EVENTS_OF_A_ROW: Final = 20
_ROWS_MIN: Final = 10_000
"""Rows that are read in any case."""
_CUT_ROWS_MAX: Final = 262_144
"""Sums that headers know all of but so many events of are not asked of an aggregate."""


@dataclass(slots=True)
class Read:
    """What was read for an answer."""

    parts: Sequence[Part] = ()
    rows: dict[str, RowsRead] | None = None
    blocks: tuple[int, int] = (0, 0)
    """By their headers alone, and opened for a sum."""
    events: int = 0


class _Dense(Exception):
    """An aggregate has too many rows to be worth reading."""

    def __init__(self, aggregate: TableSchema) -> None:
        self.aggregate = aggregate


@dataclass(slots=True)
class Questions:
    """Thread safe. ``bytes_max``: what the groups of one question may take."""

    catalog: Catalog
    retention: Retention
    timeline: Timeline
    bytes_max: int
    blocks_known: int = 0
    blocks_read: int = 0
    dense: set[int] = field(default_factory=set)
    """Aggregates that had too many rows to be read instead of events."""

    def check_order_bytes(self, held: int) -> None:
        """Of rows that are put in another order. Raises ResourceExhausted."""
        if held > self.bytes_max:
            raise ResourceExhausted(
                f"the rows to put in order take {held:,} bytes, beyond the limit query_bytes = {self.bytes_max:,}: "
                "give a limit, name fewer columns, select less by where, start and end, or raise the setting",
                limit="query_bytes",
                maximum=self.bytes_max,
            )

    # -- of an aggregate's rows -----------------------------------------------------------------

    def of_rows(self, rollups: Rollups, lease: Lease, schema: TableSchema, wanted: Scan) -> Answer:
        """The rows of an aggregate, combined."""
        question = _asked(wanted)

        def ask() -> tuple[Iterator[pa.RecordBatch], Explain]:
            tally, read = Tally(question, self.bytes_max), RowsRead()
            places = asked_of(schema, question.target, question.cells)
            assert places is not None
            part = Part((question.start_us, question.end_us), schema, places[0], question.cells)
            self._add_rows(rollups, lease, part, wanted.where, tally, read)
            batches = answered(question, tally.result(), wanted.limit, tally.check)
            return batches, functools.partial(_told, question, lease, Read([part], {schema.name: read}))

        return Answer(ask, later_of(self.retention.row_floor(schema, lease.ts), schema.complete_since_us))

    def _add_rows(
        self,
        rollups: Rollups,
        lease: Lease,
        part: Part,
        where: Expr | None,
        tally: Tally,
        read: RowsRead,
        rows_max: int | None = None,
    ) -> None:
        schema = part.aggregate
        assert schema is not None
        rolling = Rolling(schema, tally.target, part.keys, part.cells, tally.combining())
        for rows in rollups.selected(lease, schema, where, asked_range(schema, where), part.times, read):
            if rows_max is not None and read.rows > rows_max:
                raise _Dense(schema)
            if len(rows.rows):
                read.selected += len(rows.rows)
                rolling.add(rolling.keys(rows.keys), rows.rows)
                tally.check()

    # -- of events ------------------------------------------------------------------------------

    def of_events(self, rollups: Rollups, lease: Lease, captured: Captured, wanted: Scan) -> Answer:
        """The events of a snapshot, or what aggregates say of them. The view is closed when it was read."""
        question, schema = _asked(wanted), captured.schema
        times, where = narrowed(schema, (question.start_us, question.end_us), wanted.where)

        def ask() -> tuple[Iterator[pa.RecordBatch], Explain]:
            with captured.view:
                candidates = [] if captured.is_own else self._candidates(lease, schema, where)
                while True:
                    try:
                        return self._asked_of_events(rollups, lease, captured, wanted, times, where, candidates)
                    except (SnapshotTooOld, NotFound):  # no history; dropped meanwhile
                        if not candidates:
                            raise
                        candidates = []
                    except _Dense as found:
                        self.dense.add(found.aggregate.id)
                        candidates = [each for each in candidates if each.schema.id != found.aggregate.id]

        return Answer(ask, captured.view.floor_us)

    def _candidates(self, lease: Lease, schema: TableSchema, where: Expr | None) -> list[Candidate]:
        """The aggregates of a table that a snapshot sees, and that may be quicker to read than its events."""
        found = []
        for aggregate in self.catalog.visible.aggregates.get(schema.id, ()):
            is_few = aggregate.id not in self.dense or equalities(aggregate, where)
            if is_few and aggregate.state == "ready" and aggregate.created_ts <= lease.ts:
                seen = aggregate.at(lease.ts)
                floor_us = self.retention.row_floor(seen, lease.ts)
                found.append(Candidate(seen, later_of(floor_us, seen.complete_since_us)))
        return found

    def _asked_of_events(
        self,
        rollups: Rollups,
        lease: Lease,
        captured: Captured,
        wanted: Scan,
        times: Times,
        where: Expr | None,
        candidates: Sequence[Candidate],
    ) -> tuple[Iterator[pa.RecordBatch], Explain]:
        question, view = _asked(wanted), captured.view
        tally, read = Tally(question, self.bytes_max), Read()
        sums = _sums(captured.schema, question, where)
        if sums is not None and view.cut_rows(*times) <= _CUT_ROWS_MAX:
            candidates = []
        seen = (later_of(times[0], view.floor_us), times[1]) if candidates else times
        read.parts = planned(question, where, seen, candidates)
        read.rows = {part.aggregate.name: RowsRead() for part in read.parts if part.aggregate is not None}
        for part in read.parts:
            if part.aggregate is not None:
                events = view.rows_between(*part.times) + sum(each.batch.num_rows for each in captured.recent)
                rows_max = max(_ROWS_MIN, events // _EVENTS_OF_A_ROW)
                self._add_rows(rollups, lease, part, where, tally, read.rows[part.aggregate.name], rows_max)
        of_events = [part.times for part in read.parts if part.aggregate is None]
        if sums is not None:
            self._sum_up(captured, of_events, where, sums, tally, read)
        else:
            self._derive(captured, of_events, where, question, tally)
            read.events = tally.events
        batches = answered(question, tally.result(), wanted.limit, tally.check)
        return batches, functools.partial(_told, question, lease, read)

    def _sum_up(
        self, captured: Captured, parts: Sequence[Times], where: Expr | None, sums: Sums, tally: Tally, read: Read
    ) -> None:
        columns = sums.columns or (captured.schema.event_time or "",)  # a batch of no columns has no rows
        for times in parts:
            known, opened = captured.view.sum_up(sums, time_from=times[0], time_to=times[1], where=where)
            read.blocks = read.blocks[0] + known, read.blocks[1] + opened
            for batch in captured.in_memory(times, where, columns):
                sums.add(batch)
        self.blocks_known += read.blocks[0]
        self.blocks_read += read.blocks[1]
        read.events = sums.rows
        tally.add_values(sums.row())

    def _derive(
        self, captured: Captured, parts: Sequence[Times], where: Expr | None, question: Question, tally: Tally
    ) -> None:
        schema = seen_schema(captured.schema)
        types = {column.name: column.type for column in schema.columns}
        simple, rest = pushed(captured.schema, where)
        used = columns_asked(schema, question, rest)
        events = SelectedEvents(self.timeline, captured, used, simple, rest, types)
        after = events.after()
        ordered = not all(map(commutes, question.target.columns))
        batches = (
            batch for times in parts for batch in events.of(times, after, named=question.is_timed, ordered=ordered)
        )

        def derived(chunk: pa.RecordBatch) -> Derived:
            for name, expression in question.computed:
                read = plain(chunk.select(sorted(names(expression)) or chunk.schema.names[:1]))
                chunk = chunk.append_column(name, evaluate(read, expression, types))
            return tally.derived(chunk)

        # Where nothing depends on it a chunk ends with a batch, and so is not copied.
        held = chunks(batches, CHUNK_ROWS) if ordered else gathered(batches, CHUNK_ROWS)
        for each in in_order(held, derived):
            tally.add_derived(each)


def _asked(wanted: Scan) -> Question:
    assert wanted.question is not None
    return wanted.question


def _sums(schema: TableSchema, question: Question, where: Expr | None) -> Sums | None:
    """Sums that headers know; None: it is about something else."""
    if question.target.key or (where is not None and not names(where) <= schema.by_name.keys()):
        return None
    return Sums(schema, question.measures) if Sums.are_known(schema, question.measures) else None


# -- in words ---------------------------------------------------------------------------------------


def _told(question: Question, lease: Lease, read: Read, may_name: Callable[[str], bool]) -> str:
    def named(aggregate: str) -> str:
        return aggregate if may_name(aggregate) else "an aggregate"

    target = question.target
    groups = [group.name + (f" (slots of {group.slot})" if group.slot else "") for group in target.group_by]
    by = ", ".join(groups) or "nothing: one row"
    lines = [f"question of {target.name} at {lease.ts}, by {by}"]
    if question.windows is not None:
        lines.append(f"in {question.windows}")
    for part in read.parts:
        between = _between(part.times)
        lines.append(f"{between}: {'events' if part.aggregate is None else f'rows of {named(part.aggregate.name)}'}")
    for name, rows in (read.rows or {}).items():
        how = "all of them looked at, and filtered by their slots" if rows.filtered else "no others looked at"
        lines.append(f"read: {rows.rows:,} rows of {named(name)} in {rows.ranges:,} ranges of keys; {how}")
    if any(read.blocks):
        lines.append(f"read: {read.blocks[0]:,} blocks by their headers, {read.blocks[1]:,} opened")
    lines.append(f"read: {read.events:,} events")
    return "\n".join(lines)


def _between(times: Times) -> str:
    def told(moment: int) -> str:
        try:
            return str(_MOMENT.from_stored(moment).isoformat())
        except OutOfRange:
            return f"{moment} us"

    low, high = times
    begins = "from the first event" if low is None else f"from {told(low)}"
    return f"{begins} on" if high is None else f"{begins} to {told(high)}"
