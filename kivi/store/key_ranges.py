"""Which part of a table's keys a scan reads: its prefix, its bounds, and what its predicate says of the first columns.

A range is [start, end), in encoded form, and None is no bound. A predicate narrows it where no key outside can be
selected, and is asked about every row inside; a literal that is too long for a key narrows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kivi.encoding.keys import encode_key, prefix_end
from kivi.errors import ResourceExhausted
from kivi.model.expressions import Expr, bounds_of, terms_of
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.store.slot_ranges import KeyRange
from kivi.store.transaction import encoded_key

__all__ = ["asked_range", "equalities", "key_range"]


def key_range(schema: TableSchema, wanted: Scan) -> KeyRange:
    """The range of a scan: the prefix, narrowed by start, end and predicate."""
    start = encoded_key(schema, wanted.prefix)
    end = prefix_end(start)
    if wanted.start is not None:
        start = max(start, encoded_key(schema, wanted.start))
    if wanted.end is not None:
        end = _nearer(end, encoded_key(schema, wanted.end))
    low, beyond = asked_range(schema, wanted.where)
    start, end = max(start, low or b""), _nearer(end, beyond)
    return start or None, end if end is None else max(start, end)


def asked_range(schema: TableSchema, where: Expr | None) -> KeyRange:
    """A range of keys outside of which a bound predicate is false: equalities of the first key columns, and whatever
    bounds the one behind them."""
    if where is None:
        return None, None
    prefix = equalities(schema, where)
    start = encode_key([column.type for column in schema.key[: len(prefix)]], prefix)
    end = prefix_end(start)
    if len(prefix) < len(schema.key):
        behind = schema.key[len(prefix)].name
        terms = terms_of(where)
        for term in (*terms, *(bound for each in terms for bound in bounds_of(each))):
            if term.column != behind or term.op not in (">", ">=", "<", "<=", "isin"):
                continue
            values = term.value if term.op == "isin" else (term.value,)
            keys = [key for value in values if (key := _key(schema, (*prefix, value))) is not None]
            if not keys or len(keys) < len(values):
                continue
            if term.op not in ("<", "<="):
                start = max(start, min(keys))
            if term.op not in (">", ">="):
                end = _nearer(end, max(keys) if term.op == "<" else prefix_end(max(keys)))
    return start or None, end


def equalities(schema: TableSchema, where: Expr | None) -> tuple[Any, ...]:
    """The values of the first key columns, in stored form, that a bound predicate asks for."""
    known = {term.column: term.value for term in terms_of(where) if term.op == "==" and term.column}
    prefix: tuple[Any, ...] = ()
    for column in schema.key:
        if column.name not in known or _key(schema, (*prefix, known[column.name])) is None:
            break
        prefix = (*prefix, known[column.name])
    return prefix


def _key(schema: TableSchema, values: Sequence[Any]) -> bytes | None:
    """The first columns of a key; None: no key is that long."""
    try:
        return encoded_key(schema, tuple(values))
    except ResourceExhausted:
        return None


def _nearer(end: bytes | None, other: bytes | None) -> bytes | None:
    return other if end is None else end if other is None else min(end, other)
