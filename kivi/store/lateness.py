"""How late events come, by the day on which they were committed.

Whoever appends does not count: it would cost each commit something, and what it counted would have to be durable. What
is counted is derived from what is there anyway, the event time and the commit timestamp of each event, when somebody
asks: the first time those of the last days, later only the events since. Commit order makes that exact: an event whose
timestamp is above the one that was counted to has not been counted, and every other one has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kivi.arrow.columns import stored_array
from kivi.errors import SnapshotTooOld
from kivi.model.changes import COMMIT_TS
from kivi.model.expressions import Expr
from kivi.model.lateness import DAYS, LatenessDay
from kivi.model.quantiles import Quantiles, codes_of, scale_of
from kivi.model.questions import COMMIT_TIME, seen_schema
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MAX, ColumnType
from kivi.store.event_selection import SelectedEvents
from kivi.store.reads import Reads
from kivi.store.snapshots import Snapshots

__all__ = ["Lateness"]

_MOMENT: Final = ColumnType("timestamp")
_DAY_US: Final = 86_400_000_000
_SCALE: Final = scale_of(0.01)


@dataclass(slots=True)
class _Counted:
    """Of one table: up to which commit, and each day's distribution and latest event."""

    upto: int = 0
    days: dict[int, tuple[Quantiles, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Lateness:
    """Of one store. Thread safe. ``now_us``: the log's time."""

    snapshots: Snapshots
    reads: Reads
    now_us: Callable[[], int]
    _counted: dict[int, _Counted] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def days(self, schema: TableSchema) -> list[LatenessDay]:
        """Of an event table, the last days on which something was committed, the newest one last."""
        with self._lock:
            return [
                LatenessDay(day, known.count, _us(known, 0.5), _us(known, 0.99), _us(known, 0.999), latest)
                for day, (known, latest) in sorted(self._known(schema).items())
            ]

    def auto_us(self, schema: TableSchema) -> int:
        """What 0.999 of the last days' events kept to, in microseconds; 0 without events."""
        with self._lock:
            every = Quantiles.combined(known for known, _ in self._known(schema).values())
        return 0 if every is None else _us(every, 0.999)

    def _known(self, schema: TableSchema) -> dict[int, tuple[Quantiles, int]]:
        first_day = self.now_us() // _DAY_US - DAYS + 1
        counted = self._counted.setdefault(schema.id, _Counted())
        with self.snapshots.opened() as lease, self.reads.shared_events(lease) as events:
            after = max(counted.upto, self._first(first_day * _DAY_US))
            captured, check = events.take(schema)
            types = {column.name: column.type for column in seen_schema(schema).columns}
            used = [schema.event_time or "", COMMIT_TIME, COMMIT_TS]
            with captured.view:
                newer = Expr(">", COMMIT_TS, after)
                selected = SelectedEvents(events.timeline, captured, used, None, newer, types)
                found: dict[int, list[tuple[Quantiles, int]]] = {}
                for batch in selected.of((None, None), selected.after(), named=False, ordered=False):
                    _count(batch, used, found)
                check()
            for day, parts in found.items():
                if day in counted.days:
                    parts.append(counted.days[day])
                whole = Quantiles.combined(part for part, _ in parts)
                assert whole is not None
                counted.days[day] = whole, max(latest for _, latest in parts)
            counted.upto = lease.ts
        counted.days = {day: known for day, known in counted.days.items() if day >= first_day}
        return counted.days

    def _first(self, moment_us: int) -> int:
        """Which commits are of before a moment: those up to this one."""
        try:
            return self.reads.questions.timeline.at(moment_us - 1)
        except SnapshotTooOld:
            return 0


def _us(known: Quantiles, q: float) -> int:
    return min(round(known.quantile(q) or 0), INT64_MAX)  # an event time may be as far off as it can be


def _count(batch: Any, used: Sequence[str], found: dict[int, list[tuple[Quantiles, int]]]) -> None:
    """Adds the events of a batch whose commit time is known."""
    times, committed = batch.column(used[0]), batch.column(used[1])
    if committed.null_count:
        there = committed.is_valid()
        times, committed = times.filter(there), committed.filter(there)
    moments = stored_array(_MOMENT, committed)
    late = np.maximum(moments.astype(np.float64) - stored_array(_MOMENT, times), 0.0)
    days = moments // _DAY_US
    for day in range(int(days.min()), int(days.max()) + 1) if len(days) else ():
        values = late[days == day]
        if not len(values):
            continue
        codes = codes_of(values, _SCALE)  # of values from 0 on, and dense: counted without sorting
        counts = np.bincount(codes)
        there = np.flatnonzero(counts)
        found.setdefault(day, []).append((Quantiles(_SCALE, there, counts[there]), min(int(values.max()), INT64_MAX)))
