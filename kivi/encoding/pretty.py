"""Engine keys, rows and operations as people read them: for dumps and for the golden histories.

One line for each thing that is stored, named as in ``kivi.encoding.keyspaces``::

    row        accounts(1) @5  name='ada' balance=21
    version    accounts(1) @3  name='ada' balance=13
    tombstone  accounts(2) @6  to be swept
    row        accounts(2) @6  deleted
    block      invocations 7   3 events @4..@6
    time       2024-01-01T17:50:03.000001Z @5 .. 2024-01-01T17:50:03.048120Z @9  4 moments

    operation  accounts(1) @7  balance+=8          (pending operations and log records: ``operation``)

Timestamps are printed by ``stamp``, so that a golden history can count them from a mark of its own. Bytes that do not
decode are shown as hex with the reason: a dump is what one looks at when something is damaged, so it never raises.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.commit_times import decode_moments
from kivi.encoding.keys import decode_key
from kivi.encoding.keyspaces import (
    Space,
    cts_of_fact,
    split_row_key,
    split_token_block_key,
    split_tombstone_key,
    split_version_key,
)
from kivi.encoding.token_blocks import decode_block
from kivi.errors import KiviError
from kivi.model.schema import Column, TableSchema
from kivi.model.types import ColumnType
from kivi.states.registry import kind_of

__all__ = ["cells", "entry", "key_text", "moment", "operation", "row", "table_of", "value"]

SchemaOf = Callable[[int], TableSchema | None]
Stamp = Callable[[int], str]

_LONGEST: Final = 60
"""Longer texts and bytes are cut here."""
_TIMESTAMP: Final = ColumnType("timestamp")
_TABLE_SPACES: Final = (Space.ROW, Space.VERSION, Space.EVENT, Space.EVENT_DATA)


def _plain(stamp: int) -> str:
    return str(stamp)


# -- values and rows --------------------------------------------------------------------------------


def value(column: Column, stored: Any) -> str:
    """A value in stored form. A sum that has outgrown its column is shown as the exact number it is."""
    if stored is None:
        return "null"
    if column.type == _TIMESTAMP and column.state is None:
        return moment(stored)
    try:
        if column.state is not None and not column.type.is_state:
            stored = kind_of(column.state).values([stored])[0]
        shown = column.type.from_stored(stored, column.name)
    except KiviError:
        return f"{stored!r} (out of range)"
    match column.type.name:
        case "decimal" | "int64" | "bool":
            return str(shown)
        case "quantiles" | "list" | "top":
            text = repr(shown)
            return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        case _:
            text = repr(shown)
            return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(shown)} long)"


def moment(time_us: int) -> str:
    """A moment in UTC; the bare microseconds if it lies outside the years 1 to 9999, which are all that Python has."""
    try:
        shown = _TIMESTAMP.from_stored(time_us)
    except KiviError:
        return f"{time_us} us"
    return str(shown.isoformat(timespec="auto")).replace("+00:00", "Z")


def cells(schema: TableSchema, stored: Sequence[Any]) -> str:
    """The non-key columns of a row, by name."""
    shown = zip(schema.columns, stored, strict=True)
    return " ".join(f"{column.name}={value(column, cell)}" for column, cell in shown)


def key_text(schema: TableSchema, key: bytes) -> str:
    """``accounts(1, 'x')``; hex if the bytes are no key of the table."""
    try:
        values = decode_key([column.type for column in schema.key], key)
    except KiviError:
        return f"{schema.name}(0x{key.hex()})"
    return f"{schema.name}({', '.join(value(c, v) for c, v in zip(schema.key, values, strict=True))})"


def row(schema: TableSchema, key: bytes, version: Version, stamp: Stamp = _plain) -> str:
    """One version of a row, with the timestamp that it includes."""
    text = cells(schema, version.cells) if version.alive else "deleted"
    return f"{key_text(schema, key)} @{stamp(version.cts)}  {text}".rstrip()


def operation(
    schema: TableSchema,
    key: bytes,
    barrier: str,
    puts: Mapping[int, Any],
    deltas: Mapping[int, Any],
    cts: int | None = None,
    stamp: Stamp = _plain,
) -> str:
    """The effect of one transaction on a row: ``x=5`` puts, ``n+=3`` and ``peak max=7`` are deltas."""
    words = [] if barrier == "PATCH" else [barrier.lower()]
    words += [f"{schema.columns[i].name}={value(schema.columns[i], cell)}" for i, cell in sorted(puts.items())]
    for i, delta in sorted(deltas.items()):
        column = schema.columns[i]
        sign = "+=" if column.operator == "sum" or column.state is not None else f" {column.operator}="
        words.append(f"{column.name}{sign}{value(column, delta)}")
    at = "" if cts is None else f" @{stamp(cts)}"
    return f"{key_text(schema, key)}{at}  {' '.join(words)}".rstrip()


# -- one pair of an engine --------------------------------------------------------------------------


def table_of(key: bytes) -> int | None:
    """The table that an engine key belongs to, or None."""
    if len(key) >= 5 and key[0] in _TABLE_SPACES:
        return int.from_bytes(key[1:5], "big")
    if len(key) >= 13 and key[0] == Space.TOMBSTONE:
        return int.from_bytes(key[9:13], "big")
    return None


def entry(key: bytes, data: bytes, schema_of: SchemaOf, stamp: Stamp = _plain) -> str:
    """One key and its value, as one line. ``schema_of`` gives the definitions, system tables included."""
    try:
        return _entry(key, data, schema_of, stamp)
    except (KiviError, ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        return f"damaged    0x{key.hex()} ({error})"


def _entry(key: bytes, data: bytes, schema_of: SchemaOf, stamp: Stamp) -> str:
    space = Space(key[0])
    table_id = table_of(key)
    schema = schema_of(table_id) if table_id is not None else None
    name = schema.name if schema is not None else f"table {table_id}"
    match space:
        case Space.META:
            return f"meta       {key[1:].decode()} = {_meta(key[1:].decode(), data, stamp)}"
        case Space.CATALOG:
            return f"catalog    {key[1:].decode()} = {data!r}"
        case Space.ROW | Space.VERSION:
            word = "row" if space is Space.ROW else "version"
            row_key = split_row_key(key)[1] if space is Space.ROW else split_version_key(key)[1]
            if schema is None:
                return f"{word:<10} {name} 0x{row_key.hex()} @{stamp(RowLayout.stamp_of(data))}"
            version = RowLayout.of(schema).decode(data)
            return f"{word:<10} {row(schema, row_key, version, stamp)}"
        case Space.TOMBSTONE:
            cts, _, row_key = split_tombstone_key(key)
            where = key_text(schema, row_key) if schema is not None else f"{name} 0x{row_key.hex()}"
            return f"tombstone  {where} @{stamp(cts)}  to be swept"
        case Space.EVENT if len(key) == 6:
            facts = json.loads(data)
            return f"events     {name}  {facts['rows']} events up to @{stamp(facts['upto'])}"
        case Space.EVENT if key[5] == 2:
            facts = json.loads(data)
            number, rows, nbytes, *_ = facts["file"]
            there = f", cold: {' '.join(facts['cold'])}" if "cold" in facts else ""
            return f"file       {name} {number}  {rows} events, {nbytes} bytes{there}"
        case Space.EVENT:
            head = json.loads(data)
            first, last = head["runs"][0][0], head["runs"][-1][0]
            word = "settled" if head.get("settled") else "block"
            return f"{word:<10} {name} {head['order']}  {head['rows']} events @{stamp(first)}..@{stamp(last)}"
        case Space.EVENT_DATA:
            return f"data       {name} {int.from_bytes(key[5:], 'big')}  {len(data)} bytes"
        case Space.TOKEN:
            cts = int.from_bytes(data[:8], "little")
            return f"token      {key[1:].decode()} -> {f'@{stamp(cts)}' if cts else 'fenced'}"
        case Space.TOKENS:
            newest, oldest, cts = split_token_block_key(key)
            return f"tokens     issued {moment(oldest)} .. {moment(newest)} -> @{stamp(cts)} and later"
        case Space.TOKEN_DATA:
            saved = decode_block(key, data)
            last = f" .. {saved[-1].token} -> @{stamp(saved[-1].cts)}  {len(saved)} tokens" if len(saved) > 1 else ""
            return f"tokens     {saved[0].token} -> @{stamp(saved[0].cts)}{last}"
        case Space.BATCH:
            scope, sequence = key[1:-8].removesuffix(b"\x00\x00"), int.from_bytes(key[-8:], "big")
            return f"batch      {scope.decode()} {sequence} -> @{stamp(int.from_bytes(data, 'little'))}"
        case Space.FACT:
            return f"fact       @{stamp(cts_of_fact(key))}  {len(data)} bytes"
        case Space.GATHERED:
            return f"gathered   @{stamp(cts_of_fact(key))}  {len(data)} bytes"
        case Space.TAKEN:
            return f"taken      @{stamp(cts_of_fact(key))}  {len(data)} bytes"
        case Space.TIME:
            times, stamps = decode_moments(key, data)
            first, last = (f"{moment(int(times[i]))} @{stamp(int(stamps[i]))}" for i in (0, -1))
            return f"time       {first}" + (f" .. {last}  {len(times)} moments" if len(times) > 1 else "")


def _meta(name: str, data: bytes, stamp: Stamp) -> str:
    if name == "position":
        return f"@{stamp(int.from_bytes(data, 'little'))}"
    if name == "records":
        return ", ".join(Space(first).name for first in data)
    if name.startswith("scope/"):
        return str(int.from_bytes(data, "little"))
    if name.startswith("owed/"):
        return f"up to 0x{data.hex()}"
    if name.startswith("history/"):
        return f"from @{stamp(int.from_bytes(data, 'little'))} on"
    if name.startswith("floors/"):
        known = json.loads(data)
        floors = [f"before {moment(time_us)} hidden from @{stamp(cts)} on" for cts, time_us in known["floors"]]
        erased = known["erased"]
        return ", ".join([*floors, *([f"before {moment(erased[1])} erased"] if erased else [])])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"0x{data.hex()}"
