"""The tally of a question: the deltas of its groups, as events, rows of aggregates and sums of headers come.

A key has no nulls, but a group may be null. So events are told apart by which of their groups are null, and each such
kind has a target of its own, whose key is without these columns: the usual kind, in which none is, costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import stored_array
from kivi.delta.combine import Combining, pieces
from kivi.delta.derive import Derivation, run_from_rows
from kivi.delta.overlay import FixedRows
from kivi.delta.rolling import CTS, folded
from kivi.delta.runs import DeltaRun, neutral_column, with_cts
from kivi.delta.sources import Order
from kivi.delta.windows import session_starts, sessions, slid
from kivi.encoding.event_names import POSITION, STAMP
from kivi.errors import ResourceExhausted
from kivi.model.questions import SESSION, WINDOW_END, Question
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType
from kivi.runtime.ahead import AT_ONCE

__all__ = ["CHUNK_ROWS", "Derived", "Found", "Nulls", "Tally"]

CHUNK_ROWS: Final = 131_072
"""Events that deltas are derived from at once; or more where no sum of floats begins anew with a chunk: what is derived
of fewer takes longer to combine than what is derived of more takes to derive."""
_ROWS_MIN: Final = 262_144
"""Deltas that are combined at once, at least."""
_PART_ROWS: Final = 16_384
_MOMENT: Final = ColumnType("timestamp")


Nulls = tuple[str, ...]
"""Which groups of a kind are null."""


class Derived(NamedTuple):
    """The deltas of so many events, by kind."""

    events: int
    runs: list[tuple[Nulls, DeltaRun]]


class Found(NamedTuple):
    """Rows of an answer of one kind: in key order, and which groups are null in all of them."""

    target: TableSchema
    rows: FixedRows
    nulls: Nulls


class Tally:
    """Not thread safe. ``bytes_max``: what it may hold."""

    def __init__(self, question: Question, bytes_max: int) -> None:
        self._question, self._bytes_max = question, bytes_max
        self._kinds: dict[Nulls, tuple[TableSchema, Combining]] = {}
        self._targets: dict[Nulls, TableSchema] = {(): question.target}
        self.target = question.target
        self.events = 0
        """How many were looked at."""

    def combining(self, nulls: Nulls = ()) -> Combining:
        """Where deltas of a kind are added: whoever does that by itself calls ``check`` now and then."""
        return self._kind(nulls)[1]

    def _target(self, nulls: Nulls) -> TableSchema:
        if nulls not in self._targets:
            target = self._question.target
            kept = [i for i, group in enumerate(target.group_by) if group.name not in nulls]
            key, group_by = tuple(target.key[i] for i in kept), tuple(target.group_by[i] for i in kept)
            made = dataclasses.replace(target, key=key, group_by=group_by, derived=())
            self._targets.setdefault(nulls, made)
        return self._targets[nulls]

    def _kind(self, nulls: Nulls) -> tuple[TableSchema, Combining]:
        if nulls not in self._kinds:
            target = self._target(nulls)
            gather = Pieces(self._question, target) if self._gap_us is not None else Combining(target, _ROWS_MIN)
            self._kinds[nulls] = target, gather
        return self._kinds[nulls]

    @property
    def _gap_us(self) -> int | None:
        windows = self._question.windows
        return None if windows is None else windows.session_us

    def check(self, more: int = 0) -> None:
        """Raises ResourceExhausted if it holds too much."""
        held = more + sum(combining.nbytes for _, combining in self._kinds.values())
        if held > self._bytes_max:
            raise ResourceExhausted(
                f"the groups of this question take {held:,} bytes so far, beyond the limit query_bytes = "
                f"{self._bytes_max:,}: group by fewer columns or longer slots, bound it by start and end, select "
                "less by where, or raise the setting",
                limit="query_bytes",
                maximum=self._bytes_max,
            )

    # -- what comes in --------------------------------------------------------------------------

    def derived(self, events: pa.RecordBatch) -> Derived:
        """What ``add_derived`` takes, of events in their order with the columns that the target observes, by name.

        Any thread may call it. Raises OutOfRange and InvalidArgument for what events cannot be.
        """
        runs = [(nulls, self._derived(self._target(nulls), kind)) for nulls, kind in self._by_nulls(events)]
        return Derived(events.num_rows, runs)

    def add_derived(self, derived: Derived) -> None:
        """Those of the events that are next in their order. Raises OutOfRange, ResourceExhausted."""
        self.events += derived.events
        for nulls, run in derived.runs:
            self.combining(nulls).add(run)
        self.check()

    def _by_nulls(self, events: pa.RecordBatch) -> list[tuple[Nulls, pa.RecordBatch]]:
        target = self._question.target
        nullable = [g for g in target.group_by if g.source != SESSION and events.column(g.source).null_count]
        if not nullable:
            return [((), events)]
        code = np.zeros(events.num_rows, np.int64)
        for i, group in enumerate(nullable):
            code |= events.column(group.source).is_null().to_numpy(zero_copy_only=False).astype(np.int64) << i
        return [
            (
                tuple(group.name for i, group in enumerate(nullable) if kind >> i & 1),
                events.take(pa.array(np.flatnonzero(code == kind))),
            )
            for kind in np.unique(code).tolist()
        ]

    def _derived(self, target: TableSchema, events: pa.RecordBatch) -> DeltaRun:
        order = None
        if POSITION in events.schema.names:
            order = Order(*(events.column(name).to_numpy().astype(np.uint64) for name in (STAMP, POSITION)))
        if self._gap_us is not None:
            others = dataclasses.replace(target, key=target.key[:-1], group_by=target.group_by[:-1])
            times = stored_array(_MOMENT, events.column(target.event_time or ""))
            starts = session_starts(Derivation(events).groups(others).group_of, times, self._gap_us)
            events = events.append_column(SESSION, pa.array(starts))
        return Derivation(events, order).runs([target], CTS)[0]

    def add_values(self, values: Mapping[str, Any]) -> None:
        """The measures of some events, in stored form, where there are no groups. None: of no value."""
        target, combining = self._kind(())
        deltas = {target.index_of[name]: value for name, value in values.items() if value is not None}
        combining.add(with_cts(run_from_rows(target, [(b"", CTS, deltas)]), CTS))

    # -- what comes out -------------------------------------------------------------------------

    def result(self) -> Iterator[Callable[[], Found]]:
        """All rows, in parts: those of one kind after the other. Without groups there is one, also of no events.

        Each part is a call, which any thread may make. Both raise OutOfRange, ResourceExhausted.
        """
        target = self._question.target
        empty = True
        for nulls, (kind, combining) in self._kinds.items():
            if (run := combining.result()) is not None:
                empty = False
                yield from (partial(_found, kind, part, nulls) for part in self._parts(kind, run))
        if not target.key and empty:
            columns = tuple(neutral_column(column, 1) for column in target.columns)
            nothing = DeltaRun(pa.array([b""], pa.large_binary()), CTS, columns)
            yield partial(_found, target, partial(_itself, nothing), ())

    def _parts(self, kind: TableSchema, run: DeltaRun) -> Iterator[Callable[[], DeltaRun]]:
        windows = self._question.windows
        if windows is None or windows.size is None or windows.slide_us is None:
            return (partial(_itself, part) for part in pieces(run, _PART_ROWS))

        def check(more: int) -> None:
            self.check(run.nbytes + AT_ONCE * more)

        return slid(kind, run, windows.size.count, windows.slide_us, check)


def _itself(part: DeltaRun) -> DeltaRun:
    return part


def _found(kind: TableSchema, part: Callable[[], DeltaRun], nulls: Nulls) -> Found:
    return Found(kind, folded(kind, part()), nulls)


class Pieces(Combining):
    """Pieces of sessions, put together whenever they are combined."""

    def __init__(self, question: Question, target: TableSchema) -> None:
        super().__init__(target, _ROWS_MIN)
        assert question.windows is not None
        assert question.windows.session_us is not None
        self._gap_us = question.windows.session_us
        self._end = target.index_of[WINDOW_END]

    def _combine(self) -> None:
        super()._combine()
        self._runs[:] = [sessions(self._schema, run, self._end, self._gap_us) for run in self._runs]
