"""Summing events up: measures of many, from what headers know, or from the events themselves.

Integers and decimals are added exactly, at any size. Floats are added one after the other in the order in which they
come, so that the sum is the same however events lie in blocks; headers keep no sum of floats, since sums of parts
would not add up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kivi.events.blocks import NUMERIC, statistics
from kivi.model.schema import Measure, TableSchema

__all__ = ["Sums"]


class Sums:
    """``columns``: those of the table that are needed. ``from_headers``: whether headers know all that is measured."""

    def __init__(self, schema: TableSchema, measures: Sequence[Measure]) -> None:
        self._measures = measures
        self._types = {m.source: schema.column(m.source).type for m in measures if m.source is not None}
        self.columns = tuple(column.name for column in schema.columns if column.name in self._types)
        self._floats = {
            m.source: 0.0 for m in measures if m.source and m.operator == "sum" and not self._types[m.source].is_integer
        }
        self.from_headers = not self._floats and all(type_.name in NUMERIC for type_ in self._types.values())
        self._rows = 0
        self._known: dict[str, tuple[Any, Any, int, int]] = dict.fromkeys(self._types, (None, None, 0, 0))

    def add_known(self, rows: int, columns: Mapping[str, tuple[Any, Any, int, int | None]]) -> None:
        """So many events, of which (min, max, non-nulls, exact sum or None) is known of each numeric column."""
        self._rows += rows
        for name, (low, high, count, total) in self._known.items():
            if name not in columns:  # they were stored before the column was added: it is null
                continue
            other_low, other_high, other_count, other_total = columns[name]
            if other_count:
                low = other_low if low is None else min(low, other_low)
                high = other_high if high is None else max(high, other_high)
                self._known[name] = low, high, count + other_count, total + (other_total or 0)

    def add(self, batch: Any) -> None:
        """Events, next in commit order."""
        known: dict[str, tuple[Any, Any, int, int | None]] = {}
        for name, type_ in self._types.items():
            array = batch.column(name)
            if type_.name in NUMERIC:
                known[name] = statistics(type_, array)
            else:
                known[name] = None, None, len(array) - array.null_count, None
            if name in self._floats:
                values = np.concatenate(([self._floats[name]], array.drop_null().to_numpy(zero_copy_only=False)))
                self._floats[name] = float(np.bincount(np.zeros(len(values), np.intp), values)[0])
        self.add_known(batch.num_rows, known)

    def row(self) -> dict[str, Any]:
        """The measures, in stored form."""
        out: dict[str, Any] = {}
        for measure in self._measures:
            low, high, count, total = self._known[measure.source] if measure.source else (None, None, self._rows, 0)
            match measure.operator:
                case "count":
                    out[measure.name] = count
                case "sum":
                    out[measure.name] = self._floats.get(measure.source or "", total)
                case "min":
                    out[measure.name] = low
                case "max":
                    out[measure.name] = high
        return out
