"""An aggregate against its events, for ``kivi verify``.

The events are derived and folded once more, by the road of a backfill, into a *twin* of the aggregate, on the copy of
the store that verify works on. Then both are compared as they are stored, row by row and measure by measure: sums in
all their 128 bits, states byte for byte.

Only floats may differ, which were added in another order: n additions in any order stay within n * 2**-53 * sum(|v|)
of the exact sum. So the twin has a sum of |v| beside each measure that adds floats.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kivi.errors import DataLoss
from kivi.model.expressions import case, col
from kivi.model.lifetimes import slot_index
from kivi.model.measuring import measured, observed_columns
from kivi.model.schema import Column, Measure, OperatorCall, TableSchema

if TYPE_CHECKING:
    from kivi.encoding.base_rows import Version

__all__ = ["compare"]

_ROUNDING: Final = 2.0**-53


def compare(store: Any, schema: TableSchema, path: str) -> str:
    """What verify says of the aggregate. ``store`` is a copy, where the twin is made. Raises DataLoss."""
    source = store.table(schema.source or "")
    if source.retention_us is not None:
        return "not compared with its events, of which old ones are dropped"
    since = schema.measures_since
    whole = [schema.columns[i] for name, i in schema.index_of.items() if since[name] is None]
    if not whole:
        return "not compared with its events: all of its measures were added later, and have no earlier ones"
    added = {column.name: f"size of {column.name}" for column in whole if adds_floats(column)}
    events = 0

    def progress(done: int, total: int) -> None:
        nonlocal events
        events = total

    twin = store.create(twin_of(schema, source, whole, added), progress=progress)
    lease = store.begin()
    try:
        found = store.reader.scan(lease, schema, None, None)
        expected = _kept(store, lease, schema, store.reader.scan(lease, twin, None, None))
        for pair in itertools.zip_longest(found, expected):
            _check(schema, twin, whole, added, events, pair, path)
    finally:
        store.release(lease)
        store.drop(twin.name)
    later = [name for name in schema.index_of if since[name] is not None]
    left_out = f", but for {', '.join(later)}, which were added later and have no earlier ones" if later else ""
    return "equal to a recount of the events" + left_out


def adds_floats(column: Column) -> bool:
    """Whether the order of addition shows in its last bits."""
    state = column.state
    if state is None:
        return column.operator == "sum" and column.type.name == "float64"
    return state.kind in ("avg", "var", "stddev") and state.value.name == "float64"


def twin_of(schema: TableSchema, source: TableSchema, whole: list[Column], added: dict[str, str]) -> TableSchema:
    """An aggregate of the measures that have every event, ``whole``, and of the sums of |v| that ``added`` names; under
    a name that no table can have."""
    kept = [schema.measures[schema.index_of[column.name]] for column in whole]
    calls = {added[measure.name]: _sizes(measure) for measure in kept if measure.name in added}
    columns, measures = measured(source, calls, checked=False)
    both = (*kept, *measures)
    return dataclasses.replace(
        schema,
        name=f"recount of {schema.name}",
        id=0,
        origin_id=0,
        columns=(*whole, *columns),
        measures=both,
        observes=observed_columns(source, both),
        derived=(),
        alterations=(),
        history_us=None,
        retention_us=None,
        complete_since_us=None,
    )


def _sizes(measure: Measure) -> OperatorCall:
    call = measure.call
    value: Any = call.expression if call.expression is not None else col(call.argument or "")
    return OperatorCall("sum", None, case((value >= 0.0, value), otherwise=-value), call.where)


def _kept(
    store: Any, lease: Any, schema: TableSchema, rows: Iterator[tuple[bytes, Version]]
) -> Iterator[tuple[bytes, Version]]:
    """Those, by their keys, that the aggregate's own retention keeps."""
    from kivi.encoding.keys import decode_key

    floor_us = store.retention.seen_at(schema.id, lease.ts)
    index = slot_index(schema.group_by)
    if floor_us is None or index is None:
        return rows
    types = [column.type for column in schema.key]
    return (row for row in rows if decode_key(types, row[0])[index] >= floor_us)


def _check(
    schema: TableSchema,
    twin: TableSchema,
    whole: list[Column],
    added: dict[str, str],
    events: int,
    pair: tuple[Any, Any],
    path: str,
) -> None:
    """One row and its twin, of which one may be missing: both come in the order of their keys."""
    from kivi.encoding import pretty as fmt

    found, expected = pair
    if found is None or expected is None or found[0] != expected[0]:
        key = min(row[0] for row in pair if row is not None)
        has = found is not None and found[0] == key
        text = "which none of its events gives" if has else "which its events give, is not there"
        raise _damaged(schema, f"the row {fmt.key_text(schema, key)}, {text}", path)
    cells = expected[1].cells
    for i, column in enumerate(whole):
        size = cells[twin.index_of[added[column.name]]] if column.name in added else None
        have, want = found[1].cells[schema.index_of[column.name]], cells[i]
        if have != want and (size is None or not _near(column, have, want, 2 * events * _ROUNDING, size)):
            text = f"{column.name}={fmt.value(column, have)} in {fmt.key_text(schema, found[0])}"
            raise _damaged(schema, f"{text}, and its events give {fmt.value(column, want)}", path)


def _damaged(schema: TableSchema, what: str, path: str) -> DataLoss:
    return DataLoss(f"aggregate {schema.name!r} has {what}: drop the aggregate and create it again", path=path)


def _near(column: Column, have: Any, want: Any, relative: float, size: float) -> bool:
    """Whether two orders of addition may give both; of moments: equal counts, and sums that are as near."""
    if column.state is None:
        return have is not None and want is not None and abs(have - want) <= relative * size
    from kivi.states.registry import kind_of

    if not have or not want:
        return False
    kind = kind_of(column.state)
    (count, *sums), (wanted, *others) = ([part[0] for part in kind.decode([state])[0]] for state in (have, want))
    within = abs(sums[0] - others[0]) <= relative * size
    return bool(
        count == wanted
        and within
        and all(abs(a - b) <= relative * b for a, b in zip(sums[1:], others[1:], strict=True))
    )
