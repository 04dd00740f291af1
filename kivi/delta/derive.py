"""Deriving: the deltas that the events of one commit are for the aggregates of their table, by Arrow and NumPy kernels.

On this path no Python statement runs once per event; ``derive_small`` does the same row by row where a commit has
only a few events, and ``run_from_rows`` puts such rows in columns later. All of them agree to the last bit:

* Integers and decimals are summed in 128 bits, as Arrow and NumPy wrap silently at 64: in a plain int64 where
  max |v| * rows < 2**63, and otherwise in two limbs, the sum of the low 32 bits and the sum of the high part.
* Floats are added strictly left to right, in row order starting from 0.0. ``np.bincount`` and ``np.add.at`` add in
  that order; ``np.add.reduceat``, ``np.sum`` and Arrow's ``sum`` do not. So the bits of a sum do not depend on
  which of the two derivations was used.
* A float sum that leaves the finite numbers is OutOfRange here, before anything was committed.

How events are grouped, and what several aggregates share of it: ``kivi.delta.grouping``.

Pure: no I/O and no clock; timestamps are given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import stored_rows
from kivi.arrow.dictionaries import plain
from kivi.delta.combine import commutes, exact_sums, extremes
from kivi.delta.finite import Addends
from kivi.delta.grouping import Events, Groups, group_value, null_key
from kivi.delta.runs import LIMB, LOW, Array, Cells, DeltaRun, RunColumn, dtype_of, neutral_column
from kivi.delta.sources import Order, Sources
from kivi.delta.states import States
from kivi.encoding.keys import encode_key
from kivi.errors import KiviError, OutOfRange
from kivi.model.schema import Column, Measure, TableSchema
from kivi.model.types import MOMENT_MIN_US
from kivi.states.kinds import ByGroup
from kivi.states.registry import kind_of

__all__ = ["Derivation", "derive", "derive_all", "derive_each", "derive_few", "derive_small", "run_from_rows"]


def derive(aggregate: TableSchema, batch: pa.RecordBatch, cts: int = 0, order: Order | None = None) -> DeltaRun:
    """The deltas of one commit's events for one aggregate. ``batch`` has the source's columns by name.

    ``order``: the commits and positions of events of several commits that are derived as if they were one (backfill).

    Raises InvalidArgument for a null group key, OutOfRange for a float sum that leaves the finite numbers. What it
    costs: decision 0014.
    """
    return derive_all([aggregate], batch, cts, order)[0]


def derive_all(
    aggregates: Sequence[TableSchema],
    batch: pa.RecordBatch,
    cts: int = 0,
    order: Order | None = None,
    *,
    are_stored: bool = False,
) -> list[DeltaRun]:
    """``derive`` for each of the aggregates of one source, sharing what they have in common (decision 0014)."""
    return Derivation(batch, order, are_stored=are_stored).runs(aggregates, cts)


def _length_us(aggregate: TableSchema) -> int:
    slot = aggregate.group_by[-1].slot if aggregate.group_by else None
    return slot.nominal_us if slot is not None else 0


def derive_each(aggregates: Sequence[TableSchema], events: Derivation) -> list[DeltaRun]:
    """``derive_all`` of events that several commits bring: the runs have a row for each commit that adds to a key, as
    that commit alone would have it, and the CTS of a row is the number of its commit."""
    runs = []
    for aggregate in aggregates:
        groups, commits = events.of_commits(aggregate)
        runs.append(DeltaRun(groups.keys, commits, events.row(aggregate, groups)))
    return runs


class Derivation(Events):
    """Events, their groups, and the deltas that they are."""

    def __init__(
        self,
        batch: pa.RecordBatch,
        order: Order | None = None,
        commits: Array | None = None,
        *,
        are_stored: bool = False,
    ) -> None:
        super().__init__(batch, commits, are_stored=are_stored)
        self.sources = Sources(batch, order, commits)
        self._cells: dict[tuple[Groups, Any], RunColumn] = {}
        self._few: dict[bytes, Groups] = {}

    def taken(self, kept: Array) -> Derivation:
        """Some of the events, as if there were no others."""
        commits = None if self.commits is None else self.commits[kept]
        return Derivation(self.batch.take(pa.array(kept)), commits=commits, are_stored=self.are_stored)

    def beyond(self, aggregate: TableSchema) -> Array:
        """Which events the aggregate cannot have, whatever stands beside them: one that has no key in it, or whose
        expression leaves its range."""
        found = np.zeros(self.rows, np.bool_)
        try:
            self.groups(aggregate)
        except KiviError:
            found |= [not _has_key(aggregate, row) for row in stored_rows(plain(self.batch))]
        for measure in aggregate.measures:
            if measure.source != "":
                found |= self.sources.beyond(aggregate, measure)
        return found

    def refused(self, aggregate: TableSchema) -> Array:
        """Which events, none of which is ``beyond`` it, a measure of the aggregate does not observe, whatever stands
        beside them."""
        found = np.zeros(self.rows, np.bool_)
        for column, measure in zip(aggregate.columns, aggregate.measures, strict=True):
            if column.state is not None and measure.source != "":
                seen, rows = self.sources.of(aggregate, column, measure)
                found[rows[kind_of(column.state).refused(seen)]] = True
        return found

    def addends(self, aggregate: TableSchema) -> list[Addends]:
        """What the sums of floats of the aggregate add up, those of averages among them: of each of several commits by
        themselves. None of the events is ``beyond`` it."""
        found = []
        groups = self.groups(aggregate) if self.commits is None else self.of_commits(aggregate)[0]
        for column, measure in zip(aggregate.columns, aggregate.measures, strict=True):
            if measure.source != "" and not commutes(column):
                seen, rows = self.sources.of(aggregate, column, measure)
                found.append(Addends(rows, groups.group_of[rows], seen.values))
        return found

    def runs(self, aggregates: Sequence[TableSchema], cts: int = 0) -> list[DeltaRun]:
        """``derive_all``."""
        runs: dict[int, DeltaRun] = {}
        for i in sorted(range(len(aggregates)), key=lambda i: _length_us(aggregates[i])):  # finer slots first
            aggregate = aggregates[i]
            groups = self.groups(aggregate)
            runs[i] = DeltaRun(groups.keys, cts, self.row(aggregate, groups))
        return [runs[i] for i in range(len(aggregates))]

    def row(self, aggregate: TableSchema, groups: Groups) -> tuple[RunColumn, ...]:
        """All measures of each group."""
        measured = zip(aggregate.columns, aggregate.measures, strict=True)
        return tuple(self.cells(aggregate, column, measure, groups) for column, measure in measured)

    def cells(self, aggregate: TableSchema, column: Column, measure: Measure, groups: Groups) -> RunColumn:
        """One measure of each group; of a rolled-up one from the finer groups, where that is exact."""
        if measure.source == "":  # it was given up
            return neutral_column(column, groups.count)
        name = (groups, dataclasses.replace(measure, name=""))
        found = self._cells.get(name)
        if found is None:
            finer, number = groups.parent, groups.number
            if finer is None or number is None or not commutes(column):  # floats are added event by event (R10)
                found = self._of_events(aggregate, column, measure, groups)
            else:
                cells = self.cells(aggregate, column, measure, finer)
                if groups.count == finer.count:  # each is one finer group, as those of a few events mostly are
                    found = cells
                elif isinstance(cells, States):
                    found = cells.grouped(ByGroup(number, groups.count))
                elif column.operator == "sum":
                    found = exact_sums(cells, number, groups.count, groups.most)
                else:
                    found = extremes(column, cells, number, groups.count)
            self._cells[name] = found
        return found

    def few(self, aggregate: TableSchema, rows: Sequence[dict[str, Any]]) -> list[tuple[bytes, dict[int, Any]]]:
        """``derive_few`` of an aggregate; ``rows`` are the events."""
        keys = _keys_of(aggregate, rows)
        number = {key: i for i, key in enumerate(sorted(set(keys)))}
        group_of = np.array([number[key] for key in keys], np.int64)
        groups = self._few.setdefault(group_of.tobytes(), Groups.of(group_of, len(number)))
        listed = [cells.listed(range(len(number))) for cells in self.row(aggregate, groups)]
        deltas = zip(*listed, strict=True)
        return [
            (key, {i: d for i, d in enumerate(row) if d is not None}) for key, row in zip(number, deltas, strict=True)
        ]

    def _of_events(self, aggregate: TableSchema, column: Column, measure: Measure, groups: Groups) -> RunColumn:
        count = groups.count
        seen, rows = self.sources.of(aggregate, column, measure)
        group_of = groups.group_of if len(rows) == self.rows else groups.group_of[rows]
        if column.state is not None:
            kind = kind_of(column.state)
            made = kind.grouped(seen, group_of, count)
            if made is not None:
                return States(kind, made[1], made[0])
            by = groups.rows if len(rows) == self.rows else ByGroup(group_of, count)
            return States.of_groups(kind, kind.of_events(seen), by)
        if measure.operator == "count":
            return Cells(np.bincount(group_of, minlength=count).astype(np.int64, copy=False))
        values = Cells(seen.values + 0.0 if seen.values.dtype == np.float64 else seen.values)  # -0.0 + 0.0 is 0.0
        if measure.operator != "sum":
            found = extremes(column, values, group_of, count)
            if len(rows) == self.rows:
                return found
            counted = np.bincount(group_of, minlength=count) > 0
            return found if counted.all() else Cells(np.where(counted, found.values, 0), None, counted)
        if not _is_float_sum(column):
            return exact_sums(values, group_of, count, len(group_of))
        sums = np.bincount(group_of, weights=values.values, minlength=count)
        if not np.isfinite(sums).all():
            raise _not_finite(aggregate, column)
        return Cells(sums.astype(np.float64, copy=False))  # of no rows at all, bincount makes integers


def _is_float_sum(column: Column) -> bool:
    return column.operator == "sum" and column.type.name == "float64"


def _not_finite(aggregate: TableSchema, column: Column) -> OutOfRange:
    return OutOfRange(
        f"these events add up to more than a float64 holds in {aggregate.name!r}.{column.name}",
        column=column.name,
    )


# -- row by row ------------------------------------------------------------------------------------


def derive_few(aggregates: Sequence[TableSchema], batch: pa.RecordBatch) -> list[list[tuple[bytes, dict[int, Any]]]]:
    """``derive_all`` for at most a few dozen events: of each aggregate (key, deltas), sorted by key.

    In plain Python where all that an aggregate measures are columns' sums, counts and extremes. Of others the keys are
    made in plain Python, and what is measured by kernels, once for all aggregates that group the events alike: those of
    a single event do.
    """
    if not aggregates:
        return []
    rows = stored_rows(plain(batch))
    if all(each.is_plain for each in aggregates):
        return [derive_small(each, rows) for each in aggregates]
    events = Derivation(batch)
    return [derive_small(each, rows) if each.is_plain else events.few(each, rows) for each in aggregates]


def derive_small(aggregate: TableSchema, rows: Sequence[dict[str, Any]]) -> list[tuple[bytes, dict[int, Any]]]:
    """``derive`` for at most a few dozen events (stored form), in plain Python: (key, deltas), sorted by key.

    Same results to the bit, same errors. The two ways are level at about 100 events (decision 0014).
    """
    sums = [column.operator == "sum" for column in aggregate.columns]
    zeros = [(0.0 if c.type.name == "float64" else 0) if c.operator == "sum" else None for c in aggregate.columns]
    found: dict[bytes, list[Any]] = {}
    for key, row in zip(_keys_of(aggregate, rows), rows, strict=True):
        cells = found.get(key)
        if cells is None:
            cells = found[key] = list(zeros)
        for i, measure in enumerate(aggregate.measures):
            value = None if measure.source is None else row.get(measure.source)
            if measure.operator == "count":
                cells[i] += measure.source is None or value is not None
            elif value is None:
                continue
            elif sums[i]:
                cells[i] += value
            elif cells[i] is None or (value < cells[i] if measure.operator == "min" else value > cells[i]):
                cells[i] = value + 0  # -0.0 + 0 is 0.0
    for i, column in enumerate(aggregate.columns):
        if isinstance(zeros[i], float) and not all(math.isfinite(cells[i]) for cells in found.values()):
            raise _not_finite(aggregate, column)
    return [
        (key, {i: cell for i, cell in enumerate(cells) if cell is not None}) for key, cells in sorted(found.items())
    ]


def _keys_of(aggregate: TableSchema, rows: Sequence[dict[str, Any]]) -> list[bytes]:
    """The encoded key of each new event's row. Raises InvalidArgument for a null group key, or no such slot."""
    for group in aggregate.group_by:
        if any(row.get(group.source) is None for row in rows):
            raise null_key(aggregate, group)
    types, groups = [column.type for column in aggregate.key], aggregate.group_by
    return [
        encode_key(types, [group_value(aggregate, group, row[group.source], MOMENT_MIN_US) for group in groups])
        for row in rows
    ]


def _has_key(aggregate: TableSchema, row: dict[str, Any]) -> bool:
    try:
        _keys_of(aggregate, [row])
    except KiviError:
        return False
    return True


def run_from_rows(schema: TableSchema, rows: Sequence[tuple[bytes, int, dict[int, Any]]]) -> DeltaRun:
    """(key, cts, deltas) in any order -> a run with one CTS per row. A SUM that is left out becomes 0."""
    ordered = sorted(rows, key=lambda row: row[:2])
    columns: list[RunColumn] = []
    for i, column in enumerate(schema.columns):
        listed = [deltas.get(i) for _, _, deltas in ordered]
        if column.state is not None:
            columns.append(States.decoded(kind_of(column.state), [state or b"" for state in listed]))
            continue
        valid = None
        if column.operator != "sum" and None in listed:
            valid = np.array([v is not None for v in listed], np.bool_)
        filled = [0 if v is None else v for v in listed]
        try:
            columns.append(Cells(np.array(filled, dtype_of(column)), None, valid))
        except OverflowError:
            low = np.array([v & LOW for v in filled], np.int64)
            columns.append(Cells(low, np.array([v >> LIMB for v in filled], np.int64)))
    keys = pa.array([key for key, _, _ in ordered], pa.large_binary())
    return DeltaRun(keys, np.array([cts for _, cts, _ in ordered], np.uint64), tuple(columns))
