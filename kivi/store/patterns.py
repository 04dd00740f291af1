"""Patterns at a snapshot: the events that may be part of a match are read, and matched by ``kivi.patterns``.

::

    definitions of symbols that each match has  --statistics, value sets-->  the one that needs least to be read
    its candidates, by time and partition       --within-->  what is near them: the rest is not matched

A pattern of few rows without ``within`` has as near what so many rows of the partition lie in, before and behind each
candidate. In how much time they lie is guessed, and more is read of the partitions where that was too little.
Candidates that turn out to be many are given up before all are read: then everything is, and that took little longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import TIMESTAMP, arrow_type, flat, picked, stored_array
from kivi.arrow.predicates import attempted
from kivi.errors import ResourceExhausted
from kivi.events.blocks import NUMERIC, statistics
from kivi.events.pruning import NO_VALUES, Facts, Stretch, Values, never, outside
from kivi.events.views import EventView
from kivi.model.expressions import Expr, all_of, names, never_fails
from kivi.model.patterns import Match
from kivi.model.questions import seen_schema
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType
from kivi.mvcc.leases import Lease
from kivi.mvcc.timeline import Timeline
from kivi.patterns.answers import FIRST, answer_schema, answered
from kivi.patterns.candidates import FAR_US, Candidates, Extent, Near, candidates, reach_rows, reach_us
from kivi.patterns.matching import Matcher
from kivi.patterns.rows import Rows, columns_of
from kivi.query.answers import Answer, Explain
from kivi.query.planning import Times
from kivi.store.event_selection import Captured, SelectedEvents, narrowed, pushed
from kivi.store.sliced_patterns import Sliced, may_be_sliced

__all__ = ["Asked", "Patterns"]

_MOMENT: Final = ColumnType("timestamp")
_BATCH_ROWS: Final = 65_536
_ROWS_MIN: Final = 65_536
"""Of fewer events all are matched."""
_CANDIDATES_MAX: Final = 0.02
"""Candidates that are a larger part of the events tell too little,"""
_PERHAPS_MAX: Final = 0.25
_PERHAPS_ROWS_MAX: Final = 1 << 20
"""unless they lie in row groups that have no more than such a part of them, and so many events."""
_SPARE: Final = 16
"""Rows of a partition that are hoped to be where one is needed, as they are not evenly spread."""
_VALUES_MAX: Final = 64
"""So many values of a partition's first column are looked for in row groups."""


@dataclass(slots=True)
class _Read:
    """What was read for an answer, and found."""

    events: int = 0
    matched: int = 0
    matches: int = 0
    lines: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Patterns:
    """Thread safe. ``bytes_max``: what the events of one question may take."""

    timeline: Timeline
    bytes_max: int

    def of_events(self, lease: Lease, captured: Captured, wanted: Scan) -> Answer:
        """The matches in a snapshot. The view is closed when it was read."""
        match = wanted.match
        assert match is not None

        def ask() -> tuple[Iterator[pa.RecordBatch], Explain]:
            asked = Asked(self.timeline, captured, match, wanted.where, self.bytes_max)
            with captured.view:
                batches = asked.answer(wanted.limit)
            read = asked.read
            told = "\n".join(
                [
                    f"{match.pattern} over {captured.schema.name} at {lease.ts}",
                    *read.lines,
                    f"read: {read.events:,} events, of which {read.matched:,} were matched",
                    f"found: {read.matches:,} matches",
                ]
            )
            return batches, lambda _: told

        return Answer(ask, captured.view.floor_us)


class Asked:
    """One pattern of one snapshot. ``whole``: of a partition all events are read, or none."""

    def __init__(
        self,
        timeline: Timeline,
        captured: Captured,
        match: Match,
        where: Expr | None,
        bytes_max: int,
        whole: bool = False,
    ) -> None:
        self._timeline, self._captured, self._match, self._bytes_max = timeline, captured, match, bytes_max
        self._where = where
        self._reach = None if whole else reach_us(match)
        is_counted = not whole and self._reach is None and isinstance(captured.view, EventView)
        self._count = reach_rows(match) if is_counted else None
        """Of a pattern without such a reach: how many rows beside a candidate there have to be. It is not known when
        events are that other nodes hold."""
        self._schema: TableSchema = seen_schema(captured.schema)
        self._event_time = captured.schema.event_time or ""
        self._types = {column.name: column.type for column in self._schema.columns}
        self._key = match.partition_by[0][0] if match.partition_by else None
        self._times, where = narrowed(captured.schema, (match.start_us, match.end_us), where)
        self._pushed, self._rest = pushed(captured.schema, where)
        self._known = dict[str, Values | None]()
        self.read = _Read()

    def answer(self, limit: int | None) -> Iterator[pa.RecordBatch]:
        match, read = self._match, self.read
        answer = answer_schema(match).empty_table().to_batches()
        for found in self._found():
            read.matches += found.num_rows
            answer.append(found.drop_columns(list(FIRST)))
            if limit is not None and read.matches >= limit:
                break
        table = pa.Table.from_batches(answer, answer_schema(match)).slice(0, limit)
        return iter(table.combine_chunks().to_batches(_BATCH_ROWS))

    def _found(self) -> Iterator[pa.RecordBatch]:
        """One row for each match, in order, with ``FIRST``; of more events than may be held slice by slice."""
        match, view = self._match, self._captured.view
        try:
            held = self.held()
        except ResourceExhausted:
            if not may_be_sliced(match) or not isinstance(view, EventView):  # what other nodes hold is not cut by time
                raise
        else:
            if held:
                rows = Rows.of(held, match, self._event_time)
                yield answered(match, rows, Matcher(match, self._types).found(rows))
            return
        sliced = Sliced(match, self._types, self._event_time, view, self._part)
        first, last = self._extent()
        yield from sliced.answers(first, last + 1)
        self.read.lines.append(f"that is too much to hold at once: it was matched in {sliced.count:,} slices of time")

    def _part(self, times: Times) -> list[pa.RecordBatch]:
        """The events of a range of time, whole partitions of them."""
        match = replace(self._match, start_us=times[0], end_us=times[1])
        part = Asked(self._timeline, self._captured, match, self._where, self._bytes_max, whole=True)
        held = part.held()
        self.read.events += part.read.events
        self.read.matched += part.read.matched
        return held

    # -- what is read ---------------------------------------------------------------------------

    def _selected(self, used: Sequence[str], also: Expr | None = None) -> SelectedEvents:
        used = [name for name in self._types if name in used or name == self._event_time]
        simple = all_of(self._pushed, also)
        return SelectedEvents(self._timeline, self._captured, used, simple, self._rest, self._types)

    def held(self) -> list[pa.RecordBatch]:
        """The events that may be part of a match, with their names and the columns that are looked at."""
        known, held = self._candidates(), list[pa.RecordBatch]()
        if known is None:
            held = self._read(None)
        else:
            found, predicate = known
            near = self._near(found)
            while True:
                read = self._read(near, sum(batch.nbytes for batch in held))
                short, reach = self._further(near, predicate, read)
                if not len(short):
                    held += read
                    break
                found = found.only(short)  # of these values more is needed, and they are read again
                near = Near.to(found, reach)
                if self._key is not None:
                    held += [picked(batch, found.others(batch.column(self._key))) for batch in read]
        self.read.matched = sum(batch.num_rows for batch in held)
        return held

    def _read(self, near: Near | None, size: int = 0) -> list[pa.RecordBatch]:
        """``size``: of what is held besides, in bytes."""
        also, may_have = None, None
        if near is not None:
            may_have = near.meets
            also = self._one_of(near)
        events = self._selected([*columns_of(self._match)], also)
        held = list[pa.RecordBatch]()
        if near is not None and not len(near.of):
            return held
        for batch in events.of(self._times, events.after(), named=True, ordered=False, may_have=may_have):
            self.read.events += batch.num_rows
            if near is not None:
                times = stored_array(_MOMENT, batch.column(self._event_time))
                batch = picked(batch, near.rows(times, None if self._key is None else batch.column(self._key)))
            if batch.num_rows:
                held.append(batch)
                self._check(size := size + batch.nbytes)
        return held

    def _one_of(self, near: Near) -> Expr | None:
        """The partitions of candidates, as a predicate by which row groups are left out; None: they are too many."""
        if self._key is None or len(near.values) > _VALUES_MAX or near.values.null_count:
            return None
        if self._types[self._key].name not in ("string", "int64", "bytes"):
            return None
        return Expr("isin", self._key, tuple(near.values.to_pylist()))

    def _near(self, found: Candidates) -> Near:
        """What is near candidates; of a pattern of few rows, what seems to have so many of them."""
        reach = FAR_US if self._reach is None else self._reach
        if self._count is not None and len(found.times):
            first, last = self._extent()
            reach = 1 + _SPARE * self._count * found.places * ((last - first) // max(1, self._rows()))
        return Near.to(found, np.full(found.places, min(reach, FAR_US)))

    def _further(self, near: Near, predicate: Expr, held: list[pa.RecordBatch]) -> tuple[Any, Any]:
        """The places of values near whose candidates is not all that a match may have; and how far that may be."""
        if self._count is None or not held:
            return (), ()
        rows = Rows.of(held, self._match, self._event_time)
        truth, _ = attempted(rows.events, predicate, self._types)
        at = np.flatnonzero(np.asarray(truth.fill_null(False)))
        column = None if self._key is None else rows.events.column(self._key).take(pa.array(at))
        return near.further(rows, at, column, self._count, self._extent())

    def _rows(self) -> int:
        view = self._captured.view
        recent: int = sum(part.batch.num_rows for part in self._captured.recent)
        return view.rows_between(*self._times) + recent

    def _extent(self) -> Extent:
        """From when to when events are that may be asked for."""
        times = [(part.time_min, part.time_max) for part in self._captured.view.parts()]
        batches = (*(part.batch for part in self._captured.recent), *self._captured.own)
        times += [_span(batch.column(self._event_time)) for batch in batches if batch.num_rows]
        low, high = self._times
        first, last = min(first for first, _ in times), max(last for _, last in times)
        return first if low is None else max(first, low), last if high is None else min(last, high - 1)

    def _candidates(self) -> tuple[Candidates, Expr] | None:
        """Those of the symbol that has least to be read for it, and by what they are known; None: all rows may be."""
        view, rows = self._captured.view, self._rows()
        if rows < _ROWS_MIN or (self._reach is None and self._count is None and self._key is None):
            return None
        known = self._captured.schema.by_name.keys()
        asked = [each for each in candidates(self._match, self._bounds) if names(each[1]) <= known]
        if not asked:
            self.read.lines.append("no symbol that each match has is about single rows: everything was read")
            return None
        symbol, predicate = min(asked, key=lambda each: self._estimated(*each))
        may_have = self._may_have(symbol, predicate)
        perhaps = view.rows_perhaps(*self._times, predicate, may_have)
        most = _CANDIDATES_MAX * rows
        if perhaps <= min(_PERHAPS_MAX * rows, _PERHAPS_ROWS_MAX):
            most = max(most, perhaps)
        moments, values, count, is_far = list[Any](), list[Any](), 0, self._reach is None and self._count is None
        events = self._selected([] if self._key is None else [self._key], predicate)
        for batch in events.of(self._times, events.after(), named=False, ordered=False, may_have=may_have):
            count += batch.num_rows
            if count > most:
                self.read.lines.append(f"candidates of {symbol}: more than {count - 1:,}, so everything was read")
                return None
            moments.append(flat(batch.column(self._event_time)))
            values.append(None if self._key is None else flat(batch.column(self._key)))
        self.read.lines.append(
            f"candidates of {symbol}: {count:,}, found in {perhaps:,} of {rows:,} events; "
            f"what is near them was matched{', which is their partitions' if is_far else ''}"
        )
        joined = pa.chunked_array(moments, TIMESTAMP).combine_chunks()
        column = (
            None if self._key is None else pa.chunked_array(values, arrow_type(self._types[self._key])).combine_chunks()
        )
        return Candidates.at(stored_array(_MOMENT, joined), column), predicate

    def _bounds(self, column: str, low_us: int = INT64_MIN, high_us: int = INT64_MAX) -> tuple[Any, Any] | None:
        """Of the events of a stretch of time that may be asked for; of those in memory by their values."""
        facts = self._facts(column, low_us, high_us)
        return None if facts is None or not facts[2] else (facts[0], facts[1])

    def _facts(self, column: str, low_us: int, high_us: int) -> Facts | None:
        if column not in self._known:
            self._known[column] = self._values(column)
        values = self._known[column]
        return None if values is None else values.between(low_us, high_us)

    def _values(self, column: str) -> Values | None:
        """None: of what lies on other nodes, and of other types than numbers, statistics do not know it here."""
        view, (low, high) = self._captured.view, self._times
        type_ = self._types[column]
        if type_.name not in NUMERIC or not isinstance(view, EventView):
            return None
        if column not in self._captured.schema.by_name:
            return None
        parts = [part for part in view.parts() if not outside(part, low, high)]
        known = [((part.time_min, part.time_max), part.columns.get(column, NO_VALUES)) for part in parts]
        for batch in (*(part.batch for part in self._captured.recent), *self._captured.own):
            if batch.num_rows:
                facts = statistics(type_, flat(batch.column(column))) if column in batch.schema.names else NO_VALUES
                known.append((_span(batch.column(self._event_time)), facts))
        return Values.of(known)

    def _may_have(self, symbol: str, predicate: Expr) -> Callable[[int, int], bool] | None:
        """Whether there may be candidates in a stretch of time, by what rows near it have; None: that tells no more.

        What is beside a row of a match lies within ``within`` of it.
        """
        reach = self._reach
        if reach is None or all(never_fails(definition) for _, definition in self._match.define):
            return None

        def may_have(low_us: int, high_us: int) -> bool:
            near = max(INT64_MIN, low_us - reach), min(INT64_MAX, high_us + reach)
            needed = dict(candidates(self._match, lambda column: self._bounds(column, *near)))
            local = needed.get(symbol, predicate)
            facts = {name: self._facts(name, low_us, high_us) for name in names(local)}
            columns = {name: known for name, known in facts.items() if known is not None}
            return not never(local, Stretch(low_us, high_us, columns))

        return may_have

    def _estimated(self, symbol: str, predicate: Expr) -> float:
        """About how many candidates there are, going by those of one row group in the middle, and what is read for
        them."""
        view, (low, high) = self._captured.view, self._times
        parts = [part for part in view.parts() if not outside(part, low, high)]
        perhaps = view.rows_perhaps(low, high, predicate, self._may_have(symbol, predicate))
        if not parts:
            return perhaps
        middle = parts[len(parts) // 2]
        times = middle.time_min, min(middle.time_max, INT64_MAX - 1) + 1
        events = self._selected([], predicate).of(times, 0, named=False, ordered=False)
        found = sum(batch.num_rows for batch in events)
        share: float = (found + 1) / max(1, view.rows_between(*times))
        return share * perhaps

    def _check(self, held: int) -> None:
        if held > self._bytes_max:
            raise ResourceExhausted(
                f"the events to match take {held:,} bytes so far, beyond the limit query_bytes = {self._bytes_max:,}: "
                "bound them by start and end, select less by where, give the pattern a (shorter) within, or raise the "
                "setting",
                limit="query_bytes",
                maximum=self._bytes_max,
            )


def _span(column: Any) -> tuple[int, int]:
    times = stored_array(_MOMENT, column)
    return int(times.min()), int(times.max())
