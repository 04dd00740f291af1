"""What each measure of an aggregate observes of some events: which of them, and the values of its source.

Events are left out that the measure's ``where`` does not select, or where its source (or ``by``) is null. Predicates
and expressions are evaluated once for all aggregates of a source that share them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import flat, stored_array
from kivi.arrow.dictionaries import is_coded
from kivi.arrow.predicates import attempted, evaluate, mask
from kivi.errors import OutOfRange
from kivi.model.expressions import Expr, bind, bind_value, from_plain, names
from kivi.model.schema import Column, Measure, TableSchema
from kivi.model.types import ColumnType
from kivi.states.kinds import Array, Observed
from kivi.states.registry import kind_of

__all__ = ["Order", "Sources", "columns_used"]

_TEXT = frozenset({"string", "bytes"})
Types = dict[str, ColumnType]


class Order(NamedTuple):
    """The place of each event in the total order, besides its time: its commit timestamp and position in the commit."""

    stamps: Array
    places: Array


def columns_used(aggregates: Iterable[TableSchema], source: TableSchema) -> list[str]:
    """The columns of the events of ``source`` that these aggregates derive from, and their event time."""
    used = {source.event_time}
    for aggregate in aggregates:
        used |= {group.source for group in aggregate.group_by}
        for measure in aggregate.measures:
            used |= {measure.source, measure.by}
            for text in (measure.expression, measure.where):
                used |= names(from_plain(json.loads(text))) if text else set()
    return [column.name for column in source.columns if column.name in used]


class Sources:
    """Of the events of ``batch``, whose columns are the source table's by name. ``commits``: as ``Events`` has them."""

    def __init__(self, batch: Any, order: Order | None, commits: Array | None) -> None:
        self._batch = batch
        self._order = order
        self._commits = commits
        self._arrays: dict[str, Any] = {}
        self._kept: dict[tuple[str | None, str | None], Array | None] = {}

    @property
    def rows(self) -> int:
        return int(self._batch.num_rows)

    @cached_property
    def _places(self) -> Array:
        """The position of each event in its commit."""
        if self._order is not None:
            return self._order.places
        places = np.arange(self.rows)
        if self._commits is not None:
            first = np.ones(self.rows, np.bool_)
            np.not_equal(self._commits[1:], self._commits[:-1], out=first[1:])
            starts = np.flatnonzero(first)
            places -= np.repeat(starts, np.diff(starts, append=self.rows))
        return places

    def of(self, aggregate: TableSchema, column: Column, measure: Measure) -> tuple[Observed, Array]:
        """What ``measure`` sees, and the numbers of the events that it sees, ascending.

        Raises OutOfRange, which names the measure, for an expression that leaves the range of its type.
        """
        try:
            return self._of(aggregate, column, measure)
        except OutOfRange as error:
            raise OutOfRange(f"{error}: measure {column.name!r} of {aggregate.name!r}", column=column.name) from None

    def _of(self, aggregate: TableSchema, column: Column, measure: Measure) -> tuple[Observed, Array]:
        array, type_ = self._source(aggregate, column, measure)
        by = None if measure.by is None else self._column(measure.by)
        rows = self._rows(aggregate, measure, array, by)
        if measure.operator == "count":
            return Observed(None), rows
        values = _stored(type_, _taken(array, rows, self.rows))
        if column.state is None:
            return Observed(values), rows
        kind = kind_of(column.state)
        seen = Observed(values)
        if by is not None and column.state.by is not None:
            seen = seen._replace(by=stored_array(column.state.by, _taken(by, rows, self.rows)))
        if kind.timed:
            times = stored_array(ColumnType("timestamp"), self._column(aggregate.event_time or ""))[rows]
            stamps = None if self._order is None else self._order.stamps[rows]
            seen = seen._replace(times=times, places=self._places[rows].view(np.int64), stamps=stamps)
        return seen, rows

    def beyond(self, aggregate: TableSchema, measure: Measure) -> Array:
        """Which events ``of`` raises OutOfRange about, each whatever stands beside it."""
        found, selected = np.zeros(self.rows, np.bool_), np.ones(self.rows, np.bool_)
        if measure.where is not None:
            bound, types = _predicate(aggregate, measure.where)
            holds, out = attempted(self._batch, bound, types)
            selected = np.asarray(holds.fill_null(False))
            if out is not None:
                found |= out
        if measure.expression is not None:
            bound, _, types = _bound(aggregate, measure.expression)
            _, out = attempted(self._batch, bound, types)
            if out is not None:
                found |= out & selected
        return found

    def _column(self, name: str) -> Any:
        if name not in self._arrays:
            array = self._batch.column(name)
            self._arrays[name] = array if is_coded(array) else flat(array)
        return self._arrays[name]

    def _source(self, aggregate: TableSchema, column: Column, measure: Measure) -> tuple[Any, ColumnType]:
        if measure.expression is None:
            type_ = column.type if column.state is None else column.state.value
            return None if measure.source is None else self._column(measure.source), type_
        bound, type_, types = _bound(aggregate, measure.expression)
        if measure.expression not in self._arrays:
            try:
                self._arrays[measure.expression] = flat(evaluate(self._batch, bound, types))
            except OutOfRange:  # which is an error only of events that are observed
                if measure.where is None:
                    raise
                return flat(evaluate(self._batch, bound, types, self._selected(aggregate, measure.where))), type_
        return self._arrays[measure.expression], type_

    def _rows(self, aggregate: TableSchema, measure: Measure, array: Any, by: Any) -> Array:
        kept: Any = None
        for source in (array, by):
            if source is not None and source.null_count:
                valid = source.is_valid().to_numpy(zero_copy_only=False)
                kept = valid if kept is None else kept & valid
        if measure.where is not None:
            selected = self._selected(aggregate, measure.where)
            kept = selected if kept is None else kept & selected
        return np.arange(self.rows) if kept is None else np.flatnonzero(kept)

    def _selected(self, aggregate: TableSchema, where: str) -> Array:
        if where not in self._arrays:
            bound, types = _predicate(aggregate, where)
            selected = mask(self._batch, bound, types)
            if isinstance(selected, pa.Scalar):
                found = np.full(self.rows, bool(selected.as_py()))
            else:
                found = flat(selected.fill_null(False)).to_numpy(zero_copy_only=False)
            self._arrays[where] = found
        found = self._arrays[where]
        return found  # type: ignore[no-any-return]


def _bound(aggregate: TableSchema, text: str) -> tuple[Expr, ColumnType, Types]:
    bound, type_ = aggregate.remembered(
        ("expression", text), lambda: bind_value(from_plain(json.loads(text)), aggregate.source_type)
    )
    return bound, type_, _types(aggregate, bound)


def _predicate(aggregate: TableSchema, text: str) -> tuple[Expr, Types]:
    bound = aggregate.remembered(("where", text), lambda: bind(from_plain(json.loads(text)), aggregate.source_type))
    return bound, _types(aggregate, bound)


def _types(aggregate: TableSchema, bound: Expr) -> Types:
    return {name: aggregate.source_type(name) for name in names(bound)}


def _taken(array: Any, rows: Array, count: int) -> Any:
    return array if len(rows) == count else array.take(pa.array(rows))


def _stored(type_: ColumnType, array: Any) -> Any:
    return array if type_.name in _TEXT else stored_array(type_, array)
