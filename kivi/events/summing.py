"""Summing events up: what headers know, added, exactly and at any size.

Headers keep no sum of floats, since sums of parts would not add up to the sum in commit order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kivi.events.blocks import NUMERIC, statistics
from kivi.model.measuring import PLAIN
from kivi.model.schema import Measure, TableSchema

__all__ = ["Facts", "Sums"]

Facts = tuple[int, dict[str, tuple[Any, Any, int, int | None]]]
"""How many events, and what is known of each of their columns (``Sums.add_known``)."""


class Sums:
    """``columns``: those of the table that are needed. For measures that headers know (``are_known``)."""

    @staticmethod
    def are_known(schema: TableSchema, measures: Iterable[Measure]) -> bool:
        """Whether headers know all that is measured."""
        return all(_is_known(schema, measure) for measure in measures)

    def __init__(self, schema: TableSchema, measures: Sequence[Measure]) -> None:
        self._measures = measures
        self._types = {m.source: schema.column(m.source).type for m in measures if m.source is not None}
        self.columns = tuple(column.name for column in schema.columns if column.name in self._types)
        self.rows = 0
        """How many events were summed up."""
        self._known: dict[str, tuple[Any, Any, int, int]] = dict.fromkeys(self._types, (None, None, 0, 0))

    def add_known(self, rows: int, columns: Mapping[str, tuple[Any, Any, int, int | None]]) -> None:
        """So many events, of which (min, max, non-nulls, exact sum or None) is known of each numeric column."""
        self.rows += rows
        for name, (low, high, count, total) in self._known.items():
            if name not in columns:  # they were stored before the column was added: it is null
                continue
            other_low, other_high, other_count, other_total = columns[name]
            if other_count:
                low = other_low if low is None else min(low, other_low)
                high = other_high if high is None else max(high, other_high)
                self._known[name] = low, high, count + other_count, total + (other_total or 0)

    def facts_of(self, batch: Any) -> Facts:
        """What is known of events. Any thread may call it."""
        return batch.num_rows, {name: statistics(type_, batch.column(name)) for name, type_ in self._types.items()}

    def add(self, batch: Any) -> None:
        """Events."""
        self.add_known(*self.facts_of(batch))

    def row(self) -> dict[str, Any]:
        """The measures, in stored form."""
        out: dict[str, Any] = {}
        for measure in self._measures:
            low, high, count, total = self._known[measure.source] if measure.source else (None, None, self.rows, 0)
            match measure.operator:
                case "count":
                    out[measure.name] = count
                case "sum":
                    out[measure.name] = total
                case "min":
                    out[measure.name] = low
                case "max":
                    out[measure.name] = high
        return out


def _is_known(schema: TableSchema, measure: Measure) -> bool:
    if measure.operator not in PLAIN or measure.expression is not None or measure.where is not None:
        return False
    if measure.source is None:
        return True
    column = schema.by_name.get(measure.source)
    if column is None or column.type.name not in NUMERIC:
        return False
    return measure.operator != "sum" or column.type.is_integer
