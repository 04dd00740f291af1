"""Single events made into one Arrow batch, at a fraction of a microsecond each.

An event is checked and *packed* when it comes: its columns of fixed width become the bytes of one C struct, so that
thousands of them become NumPy columns by one ``join``; text and bytes are kept beside it:

=================== =======================================================================================
row                 what it is
=================== =======================================================================================
``packed``          bytes: null bits (a u64 for each 64 nullable columns of fixed width), then those columns
``(packed, s, t)``  the same, and the table's text and bytes columns, None for null
=================== =======================================================================================

What an event goes through is compiled for its table, as ``dataclasses`` and ``namedtuple`` do it: a function whose
keyword arguments are the columns, with a test of each value's exact type. A value that passes it is in stored form
already; any other goes to ``ColumnType.to_stored``, which has the last word. So what is accepted and refused is
what ``kivi.model.types`` says, and only the plain values take the short way.

An append takes a ninth of what it took with a dict and ``to_stored`` for each value (decision 0017). One row in one
``list.append`` has another merit: it is atomic, so that threads that append need no lock (``kivi.api.appender``).
"""

from __future__ import annotations

import keyword
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from kivi.errors import ResourceExhausted, SchemaError
from kivi.model.schema import TableSchema
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US

__all__ = ["EventBatch", "EventRows", "Row"]

F = TypeVar("F")
Row = bytes | tuple[Any, ...]

_SMALL_BYTES: Final = 256  # of text and bytes in an event: as many are charged for every event of a table that has any
_CELL_BYTES: Final = 8
_WORD: Final = 64  # null bits
_OURS: Final = "_kivi_"  # begins every name of the compiled function that is not a column's
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FORMATS: Final = {"bool": "?", "int64": "q", "float64": "d", "decimal": "q", "timestamp": "q"}
_DTYPES: Final = {"?": "?", "q": "<i8", "d": "<f8"}


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A RecordBatch as ``kivi.arrow.records.event_batch`` would return it for ``schema``: it need not look again."""

    schema: TableSchema
    batch: Any


class EventRows:
    """The rows of one event table. ``value_bytes_max``: of a single text or bytes value.

    ``event_bytes`` is what an event is charged that is not large; a large one costs its own bytes on top.
    """

    def __init__(self, schema: TableSchema, value_bytes_max: int) -> None:
        self.schema = schema
        self._value_bytes_max = value_bytes_max
        self._fixed = [column for column in schema.columns if column.type.name in _FORMATS]
        self._texts = [column for column in schema.columns if column.type.name not in _FORMATS]
        nullable = [column.name for column in self._fixed if column.name != schema.event_time]
        self._null_bits = {name: divmod(i, _WORD) for i, name in enumerate(nullable)}
        self._words = -(-len(nullable) // _WORD)
        self._struct = struct.Struct(
            "<" + "Q" * self._words + "".join(_FORMATS[column.type.name] for column in self._fixed)
        )
        self._small_bytes = min(_SMALL_BYTES, value_bytes_max) if self._texts else 0
        self.event_bytes = _CELL_BYTES * len(schema.columns) + self._small_bytes

    # -- one event into a row -------------------------------------------------------------------

    def compiled(self, put: Callable[[Row], F], put_large: Callable[[Row, int], F]) -> Callable[..., F]:
        """``append(**event)``: the event as a row handed to ``put``, or to ``put_large`` with its bytes of text.

        It returns what they return, and raises SchemaError, InvalidArgument or ResourceExhausted for a bad event.
        """
        names: dict[str, Any] = {
            "type": type,
            "int": int,
            "float": float,
            "bool": bool,
            "str": str,
            "bytes": bytes,
            "len": len,
            "datetime": datetime,
            "utc": UTC,
            "epoch": _EPOCH,
            "microsecond": timedelta(microseconds=1),
            "pack": self._struct.pack,
            "struct_error": struct.error,
            "unknown": self._unknown,
            "no_time": self._no_time,
            "unfit": self._unfit,
            "oversized": self._oversized,
            "text_bytes": _text_bytes,
            "put": put,
            "put_large": put_large,
        }
        for i, column in enumerate(self.schema.columns):
            names[f"to_written_{i}"] = partial(column.type.to_written, what=f"column {column.name!r}")
            names[f"name_{i}"] = column.name
        namespace = {_OURS + name: value for name, value in names.items()}
        exec("\n".join(self._source()), namespace)
        append: Callable[..., F] = namespace["append"]
        append.__doc__ = f"One event of {self.schema.name!r}."
        return append

    def _source(self) -> Iterable[str]:
        """The function's lines. No name is written into them that is not a plain identifier."""
        variables = {}
        for i, column in enumerate(self.schema.columns):
            variables[column.name] = column.name if _is_plain(column.name) else f"{_OURS}value_{i}"
        parameters = [f"{name}=None, " for name, variable in variables.items() if name == variable]
        yield f"def append({'*, ' if parameters else ''}{''.join(parameters)}**_kivi_rest):"
        for i, (name, variable) in enumerate(variables.items()):
            if name != variable:  # a keyword of Python's, such as `from`
                yield f"    {variable} = _kivi_rest.pop(_kivi_name_{i}, None)"
        yield "    if _kivi_rest: _kivi_unknown(_kivi_rest)"
        for word in range(self._words):
            yield f"    _kivi_nulls_{word} = 0"
        if self._texts:
            yield "    _kivi_size = 0"
        for i, column in enumerate(self.schema.columns):
            yield from (f"    {line}" for line in self._conversion(i, column.name, variables[column.name]))
        fixed = [variables[column.name] for column in self._fixed]
        texts = [variables[column.name] for column in self._texts]
        cells = [f"_kivi_nulls_{word}" for word in range(self._words)] + fixed
        yield f"    try: _kivi_row = _kivi_pack({', '.join(cells)})"
        yield f"    except _kivi_struct_error: _kivi_unfit({', '.join(fixed)})"
        if texts:
            yield f"    _kivi_row = (_kivi_row, {', '.join(texts)},)"
            yield f"    if _kivi_size > {self._small_bytes}:"
            yield f"        _kivi_oversized({', '.join(texts)})"
            yield "        return _kivi_put_large(_kivi_row, _kivi_size)"
        yield "    return _kivi_put(_kivi_row)"

    def _conversion(self, i: int, name: str, x: str) -> Iterable[str]:
        """The lines that leave the value of column ``i``, in variable ``x``, in stored form."""
        column = self.schema.columns[i]
        match column.type.name:
            case "string":
                yield f"if _kivi_type({x}) is _kivi_str and {x}.isascii(): _kivi_size += _kivi_len({x})"
            case "bytes":
                yield f"if _kivi_type({x}) is _kivi_bytes: _kivi_size += _kivi_len({x})"
            case "float64":  # what is not finite is not 0 when subtracted from itself
                yield f"if _kivi_type({x}) is _kivi_float and {x} - {x} == 0.0: pass"
            case "timestamp":
                yield f"if _kivi_type({x}) is _kivi_int and {MOMENT_MIN_US} <= {x} <= {MOMENT_MAX_US}: pass"
                yield f"elif _kivi_type({x}) is _kivi_datetime and {x}.tzinfo is _kivi_utc:"
                yield f"    {x} = ({x} - _kivi_epoch) // _kivi_microsecond"
            case "decimal":
                yield "if False: pass"
            case plain:
                yield f"if _kivi_type({x}) is _kivi_{'bool' if plain == 'bool' else 'int'}: pass"
        if column.type.name not in _FORMATS:
            yield f"elif {x} is not None:"
            yield f"    {x} = _kivi_to_written_{i}({x})"
            yield f"    _kivi_size += _kivi_text_bytes({x})"
            return
        if name == self.schema.event_time:
            yield f"elif {x} is None: _kivi_no_time()"
        else:
            word, bit = self._null_bits[name]
            yield f"elif {x} is None: _kivi_nulls_{word} |= {1 << bit}; {x} = 0"
        yield f"else: {x} = _kivi_to_written_{i}({x})"

    def _unknown(self, rest: dict[str, Any]) -> None:
        raise SchemaError(
            f"event table {self.schema.name!r} has no column {min(rest)!r}; "
            f"it has {', '.join(sorted(self.schema.by_name))}"
        )

    def _no_time(self) -> None:
        raise SchemaError(f"an event of {self.schema.name!r} needs its event time {self.schema.event_time!r}")

    def _unfit(self, *values: Any) -> None:
        """One of them is an int that 64 bits do not hold."""
        for column, value in zip(self._fixed, values, strict=True):
            if column.type.name == "int64":
                column.type.to_written(value, f"column {column.name!r}")
        raise AssertionError(f"an event of {self.schema.name!r} does not fit its own columns")

    def _oversized(self, *values: str | bytes | None) -> None:
        """Raises ResourceExhausted if one is."""
        for column, value in zip(self._texts, values, strict=True):
            if value is not None and (size := _text_bytes(value)) > self._value_bytes_max:
                raise ResourceExhausted(
                    f"a value of column {column.name!r} has {size} bytes, over the limit of {self._value_bytes_max}",
                    column=column.name,
                    limit="value_bytes_max",
                    maximum=self._value_bytes_max,
                )

    # -- rows into a batch ----------------------------------------------------------------------

    def batch(self, rows: Sequence[Row]) -> EventBatch:
        """The rows, at least one, as one batch of the table's columns."""
        import numpy as np
        import pyarrow as pa

        from kivi.arrow.columns import arrow_from_stored, arrow_schema

        packed: Any
        packed, *texts = zip(*rows, strict=True) if self._texts else (rows,)
        layout = [(f"nulls_{word}", "<u8") for word in range(self._words)]
        layout += [(f"at_{i}", _DTYPES[_FORMATS[column.type.name]]) for i, column in enumerate(self._fixed)]
        cells = np.frombuffer(b"".join(packed), np.dtype(layout))
        arrays = {}
        for i, column in enumerate(self._fixed):
            missing = None
            if column.name in self._null_bits:
                word, bit = self._null_bits[column.name]
                missing = cells[f"nulls_{word}"] & np.uint64(1 << bit) != 0
            stored = np.ascontiguousarray(cells[f"at_{i}"])
            if column.type.name == "float64":
                stored = stored + 0.0  # -0.0 + 0.0 is 0.0
            arrays[column.name] = arrow_from_stored(column.type, stored, missing)
        wanted = arrow_schema(self.schema)
        for column, values in zip(self._texts, texts, strict=True):
            arrays[column.name] = pa.array(values, wanted.field(column.name).type)
        columns = [arrays[column.name] for column in self.schema.columns]
        return EventBatch(self.schema, pa.RecordBatch.from_arrays(columns, schema=wanted))


def _is_plain(name: str) -> bool:
    """Whether a column's name may be written into the source: an identifier that is nothing else there."""
    return bool(_NAME.match(name)) and not keyword.iskeyword(name) and not name.startswith(_OURS)


def _text_bytes(value: str | bytes) -> int:
    return len(value) if isinstance(value, bytes) or value.isascii() else len(value.encode())
