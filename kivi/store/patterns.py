"""Patterns at a snapshot: the events that may be part of a match are read, and matched by ``kivi.patterns``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from kivi.arrow.dictionaries import narrowed
from kivi.errors import ResourceExhausted
from kivi.model.questions import seen_schema
from kivi.model.scans import Scan
from kivi.mvcc.leases import Lease
from kivi.mvcc.timeline import Timeline
from kivi.patterns.answers import FIRST, answer_schema, answered
from kivi.patterns.matching import Matcher
from kivi.patterns.rows import Rows, columns_of
from kivi.query.answers import Answer, Explain
from kivi.store.event_selection import Captured, SelectedEvents, pushed
from kivi.store.event_selection import narrowed as narrowed_times

__all__ = ["Patterns"]

_BATCH_ROWS = 65_536


@dataclass(slots=True)
class _Read:
    """What was read for an answer, and found."""

    events: int = 0
    matches: int = 0
    lines: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Patterns:
    """Thread safe. ``bytes_max``: what the events of one question may take."""

    timeline: Timeline
    bytes_max: int

    def of_events(self, lease: Lease, captured: Captured, wanted: Scan) -> Answer:
        """The matches in a snapshot. The view is closed when it was read."""

        def ask() -> tuple[Iterator[pa.RecordBatch], Explain]:
            with captured.view:
                batches, read = self._asked(captured, wanted)
            assert wanted.match is not None
            told = "\n".join(
                [
                    f"{wanted.match.pattern} over {captured.schema.name} at {lease.ts}",
                    *read.lines,
                    f"read: {read.events:,} events",
                    f"found: {read.matches:,} matches",
                ]
            )
            return batches, lambda _: told

        return Answer(ask, captured.view.floor_us)

    def _asked(self, captured: Captured, wanted: Scan) -> tuple[Iterator[pa.RecordBatch], _Read]:
        match = wanted.match
        assert match is not None
        schema, read = seen_schema(captured.schema), _Read()
        types = {column.name: column.type for column in schema.columns}
        times, where = narrowed_times(captured.schema, (match.start_us, match.end_us), wanted.where)
        simple, rest = pushed(captured.schema, where)
        used = [name for name in types if name in columns_of(match) or name == schema.event_time]
        events = SelectedEvents(self.timeline, captured, used, simple, rest, types)
        held, size = list[pa.RecordBatch](), 0
        for batch in events.of(times, events.after(), named=True, ordered=False):
            held.append(narrowed(batch))
            size += batch.nbytes
            read.events += batch.num_rows
            self._check(size)
        answer = answer_schema(match).empty_table().to_batches()
        if held:
            rows = Rows.of(held, match, schema.event_time or "")
            found = answered(match, rows, Matcher(match, types).found(rows))
            read.matches = found.num_rows
            answer = [found.drop_columns(list(FIRST))]
        table = pa.Table.from_batches(answer, answer_schema(match)).slice(0, wanted.limit)
        return iter(table.combine_chunks().to_batches(_BATCH_ROWS)), read

    def _check(self, held: int) -> None:
        if held > self.bytes_max:
            raise ResourceExhausted(
                f"the events to match take {held:,} bytes so far, beyond the limit query_bytes = {self.bytes_max:,}: "
                "bound them by start and end, select less by where, or raise the setting",
                limit="query_bytes",
                maximum=self.bytes_max,
            )
