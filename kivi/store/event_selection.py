"""Events that questions look at: those of a snapshot, selected, with the columns that are asked for, hidden ones too.

The hidden columns: an event's commit timestamp is its name's, and a commit's time is in the timeline. Bounds of either
in a predicate that must hold become a commit timestamp after which events are read, as bounds of the event time become
bounds of the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import arrow_from_stored
from kivi.arrow.dictionaries import plain
from kivi.arrow.predicates import filter_batch
from kivi.delta.sources import columns_used
from kivi.encoding.event_names import POSITION, STAMP
from kivi.errors import SnapshotTooOld
from kivi.events.views import EventView, later_of
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr, all_of, names, terms_of
from kivi.model.questions import COMMIT_TIME, Question, seen_schema
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX, ColumnType
from kivi.mvcc.applied import PendingEvents
from kivi.mvcc.timeline import Timeline
from kivi.query.planning import Times
from kivi.store.event_parts import named_events, pieces, trimmer
from kivi.store.retention import first_positions
from kivi.store.spanning import SpannedView

__all__ = ["Captured", "SelectedEvents", "columns_asked", "narrowed", "pushed", "shown_events"]

_MOMENT: Final = ColumnType("timestamp")
_UNCOMMITTED: Final = 2**63 - 1
"""The CTS of own events, which are after all others."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The events of a table that a reader sees: ``view``, then ``recent`` in memory; ``own`` of a transaction, which no
    floor hides. ``is_own``: whether it is one that may have changed what it sees."""

    schema: TableSchema
    view: EventView | SpannedView
    recent: Sequence[PendingEvents]
    own: Sequence[pa.RecordBatch] = ()
    is_own: bool = False

    def in_memory(self, times: Times, where: Expr | None, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Of those in memory the ones that are asked for, with their names if these are among ``columns``."""
        trim = trimmer(self.schema, where, times, self.view.floor_us, list(columns))
        if STAMP in columns:
            recent = list(map(named_events, self.recent, first_positions(self.recent)))
            own = [named_events(PendingEvents(_UNCOMMITTED, _UNCOMMITTED, batch), 0) for batch in self.own]
        else:
            recent, own = [part.kept() for part in self.recent], list(self.own)
        parts = [*((batch, True) for batch in recent), *((batch, False) for batch in own)]
        return (kept for batch, committed in parts if (kept := trim(batch, committed)).num_rows)

    def hidden_in_memory(self) -> int:
        """The newest commit of an event in memory that the floor hides; 0: there is none."""
        if self.view.floor_us is None:
            return 0
        trim = trimmer(self.schema, None, (None, self.view.floor_us), None, [STAMP])
        hidden = (trim(named_events(part, 0), True).column(STAMP) for part in self.recent)
        return max((int(stamps.to_numpy().max()) for stamps in hidden if len(stamps)), default=0)


@dataclass(slots=True)
class SelectedEvents:
    """Events with the columns ``used``, hidden ones included: ``pushed`` and ``rest`` are true of them."""

    timeline: Timeline
    captured: Captured
    used: Sequence[str]
    pushed: Expr | None
    rest: Expr | None
    types: dict[str, ColumnType]

    @property
    def _hidden(self) -> list[str]:
        return [name for name in (COMMIT_TS, COMMIT_TIME) if name in self.used and not self._has(name)]

    def _has(self, name: str) -> bool:
        return name in self.captured.schema.by_name

    def of(
        self,
        times: Times,
        after: int,
        *,
        named: bool,
        ordered: bool,
        may_have: Callable[[int, int], bool] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """``may_have``: as of ``EventView.scan``."""
        stored = [name for name in self.used if self._has(name)] or [self.captured.schema.event_time or ""]
        naming = (STAMP, POSITION) if named else (STAMP,) if self._hidden else ()
        scanned = self.captured.view.scan(
            after=after,
            time_from=times[0],
            time_to=times[1],
            where=self.pushed,
            columns=stored,
            naming=naming,
            ordered=ordered,
            coded=True,
            may_have=may_have,
        )
        for batches in (scanned, self.captured.in_memory(times, self.pushed, [*stored, *naming])):
            for batch in batches:
                for name in self._hidden:
                    batch = batch.append_column(name, self._column(name, batch.column(STAMP)))
                if self.rest is not None:
                    asked = plain(batch.select(sorted(names(self.rest))))
                    batch = _filtered(batch, asked, self.rest, self.types)
                if batch.num_rows:
                    yield batch

    def _column(self, name: str, stamps: Any) -> Any:
        if name == COMMIT_TS:
            return stamps.cast(pa.int64())
        times, known = self.timeline.times_of(stamps.to_numpy())
        return arrow_from_stored(_MOMENT, times, ~known)

    def after(self) -> int:
        """Which commits cannot have an event that ``rest`` selects: those up to this one."""
        after = 0
        for term in terms_of(self.rest):
            if term.column not in self._hidden or term.op not in (">", ">=", "=="):
                continue
            least = term.value if term.op != ">" else term.value + 1
            if term.column == COMMIT_TIME:
                try:
                    least = self.timeline.at(least - 1) + 1
                except SnapshotTooOld:
                    continue
            after = max(after, min(least - 1, self.captured.view.upto))
        return after


def shown_events(
    timeline: Timeline,
    captured: Captured,
    where: Expr | None,
    outputs: Sequence[str],
    times: Times,
    *,
    ordered: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Events as a scan gives them, with these columns, hidden ones among them; in commit order if ``ordered``."""
    types = {column.name: column.type for column in seen_schema(captured.schema).columns}
    simple, rest = pushed(captured.schema, where)
    used = list(dict.fromkeys((*outputs, *(sorted(names(rest)) if rest is not None else ()))))
    events = SelectedEvents(timeline, captured, used, simple, rest, types)
    for batch in events.of(times, events.after(), named=False, ordered=ordered):
        yield from pieces([plain(batch.select(list(outputs)))])


def narrowed(schema: TableSchema, times: Times, where: Expr | None) -> tuple[Times, Expr | None]:
    """Bounds of the event time that a predicate has are bounds of the question; and the rest of the predicate."""
    low, high = times
    rest = []
    for term in terms_of(where):
        begins = {">=": 0, ">": 1, "==": 0}.get(term.op)
        ends = {"<": 0, "<=": 1, "==": 1}.get(term.op)
        if term.column != schema.event_time or (begins is None and ends is None) or term.value == INT64_MAX:
            rest.append(term)  # the moment after the last one is no bound
            continue
        if begins is not None:
            low = later_of(low, term.value + begins)
        if ends is not None:
            high = term.value + ends if high is None else min(high, term.value + ends)
    return (low, high), all_of(*rest)


def pushed(schema: TableSchema, where: Expr | None) -> tuple[Expr | None, Expr | None]:
    """What the reader of blocks decides of a predicate, and the rest, which names hidden columns.

    What may be an error stays together: whether it counts depends on all of it.
    """
    if where is None or names(where) <= schema.by_name.keys():
        return where, None
    terms = terms_of(where)
    simple = [term for term in terms if term.column in schema.by_name]
    return all_of(*simple), all_of(*(term for term in terms if term.column not in schema.by_name))


def columns_asked(seen: TableSchema, question: Question, rest: Expr | None) -> list[str]:
    """The columns that are looked at."""
    target = question.target
    used = set(columns_used([target], replace(seen, event_time=None)))
    used |= {name for _, expression in question.computed for name in names(expression)}
    used |= set() if rest is None else names(rest)
    if question.is_timed or (question.windows is not None and question.windows.session_us is not None):
        used.add(seen.event_time or "")
    return [column.name for column in seen.columns if column.name in used]


def _filtered(
    batch: pa.RecordBatch, asked: pa.RecordBatch, where: Expr, types: dict[str, ColumnType]
) -> pa.RecordBatch:
    numbered = asked.append_column("\0row", pa.array(np.arange(batch.num_rows)))
    rows = filter_batch(numbered, where, types).column("\0row")
    return batch if len(rows) == batch.num_rows else batch.take(rows)
