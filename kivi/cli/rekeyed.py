"""A secondary view against its source, for ``kivi verify``: every row of the source, under the view's key, is there and
is the same, and there are no others."""

from __future__ import annotations

import itertools
from typing import Any, Final

from kivi.errors import DataLoss
from kivi.model.schema import TableSchema

__all__ = ["compare"]

_ROWS: Final = 4_096


def compare(store: Any, schema: TableSchema, path: str) -> str:
    """What verify says of the view. Memory holds a few thousand rows. Raises DataLoss."""
    from kivi.delta.ops import apply_op
    from kivi.delta.rekeying import Rekeying

    source = store.table(schema.source or "")
    way = Rekeying.of(schema, source)
    wanted = 0
    lease = store.begin()
    try:
        rows = store.reader.scan(lease, source, None, None)
        while chunk := list(itertools.islice(rows, _ROWS)):
            named = ((way.values_of(key), row) for key, row in chunk)
            expected = {at: way.row_of(values, row) for values, row in named if (at := way.key_of(values, row))}
            found = store.reader.get(lease, schema, [*expected])
            for (at, op), version in zip(expected.items(), found, strict=True):
                made = apply_op(schema, None, 0, op)
                if version is None or version.cells != made.cells:
                    what = "gives, is not there" if version is None else "has otherwise"
                    raise _damaged(schema, at, f"which its source {what}", path)
            wanted += len(expected)
        there = 0
        for at, _ in store.reader.scan(lease, schema, None, None):
            there += 1
            last = at
        if there != wanted:
            raise _damaged(schema, last, f"or another of {there - wanted:,} which its source does not give", path)
    finally:
        store.release(lease)
    return f"the same as in {schema.source}"


def _damaged(schema: TableSchema, key: bytes, what: str, path: str) -> DataLoss:
    from kivi.encoding import pretty as fmt

    row = fmt.key_text(schema, key)
    return DataLoss(f"view {schema.name!r} has the row {row}, {what}: drop the view and create it again", path=path)
