"""Filters of others: a pyarrow expression, as DuckDB and Polars push it into a dataset, as a predicate of ours.

Arrow shows an expression to nobody. It writes one down, though, for other processes: as a batch of one row with its
literals, whose schema has the calls, in order, in its metadata::

    (ts > 5) and (host == "a")      call and_kleene | call greater | field_ref ts | literal 0 | end greater
                                    | call equal | field_ref host | literal 1 | end equal | end and_kleene

Metadata with a name that comes twice is read through Arrow's C interface, since a dict would lose it.

**Invariant.** The predicate is true wherever the filter is: what cannot be said in our words is left out of an "and",
and makes an "or" or a "not" say nothing. ``is_exact`` tells whether it is true nowhere else; where it is not, the
filter has to be applied to what was read. A version of Arrow that writes otherwise costs time only: nothing is said.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import decimal
import operator
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa

from kivi.errors import InvalidArgument
from kivi.model.expressions import Expr, Value, all_of, bind, col, lit
from kivi.model.types import ColumnType

__all__ = ["Filter", "read_filter"]

_COMPARED: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "equal": operator.eq,
    "not_equal": operator.ne,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
}
_LITERALS: Final[dict[str, type]] = {
    "bool": bool,
    "int64": int,
    "float64": float,
    "string": str,
    "bytes": bytes,
    "timestamp": dt.datetime,
    "decimal": decimal.Decimal,
}
"""Of each type the literals that Arrow compares a column with as they are: others it casts, and perhaps rounds."""
_OUT_OF_WORDS: Final = (KeyError, IndexError, StopIteration, TypeError, ValueError, RecursionError, pa.ArrowException)

TypeOf = Callable[[str], ColumnType]


class Filter(NamedTuple):
    """``where`` is a predicate with literals as a caller writes them, None for one that is always true.

    ``columns`` are those that the filter names; None: that is not known.
    """

    where: Expr | None
    is_exact: bool
    columns: frozenset[str] | None = None


def read_filter(expression: Any, type_of: TypeOf) -> Filter:
    """What a pyarrow expression says about columns of these types. ``type_of`` raises SchemaError for others."""
    if expression is None:
        return Filter(None, True, frozenset())
    try:
        reader = _Reader(expression, type_of)
        said = reader.read()
    except _OUT_OF_WORDS:
        return Filter(None, False)
    return Filter(said.where, said.is_exact, frozenset(reader.columns))


class _Said(NamedTuple):
    where: Expr | None
    is_exact: bool


class _Literal(NamedTuple):
    value: Any


_Term = Value | _Literal | _Said
"""A column, a literal, and everything else."""
_NOTHING: Final = _Said(None, False)


class _Reader:
    def __init__(self, expression: Any, type_of: TypeOf) -> None:
        _, (written,) = expression.__reduce__()
        with pa.ipc.open_file(written) as file:
            self._literals = file.get_batch(0)
        self._words = list(_metadata(self._literals.schema))[::-1]
        self._type_of = type_of
        self.columns = set[str]()

    def read(self) -> _Said:
        said = self._predicate(self._term())
        if self._words:
            raise ValueError("words are left")
        return said

    def _literal(self, place: str) -> Any:
        return self._literals.column(int(place))[0].as_py()

    def _term(self) -> _Term:
        word, said = self._words.pop()
        if word == "literal":
            return _Literal(self._literal(said))
        if word == "field_ref":
            self.columns.add(said)
            return col(said)
        if word != "call":
            raise ValueError(word)
        terms, options = list[_Term](), dict[str, Any]()
        while self._words[-1][0] != "end":
            if self._words[-1][0] == "options":
                options = self._literal(self._words.pop()[1])
            else:
                terms.append(self._term())
        self._words.pop()
        return self._called(said, terms, options)

    def _predicate(self, term: _Term) -> _Said:
        if isinstance(term, Value):
            return self._bound(term == True)  # noqa: E712
        if isinstance(term, _Literal):
            return _Said(None, True) if term.value is True else _NOTHING
        return term

    def _called(self, name: str, terms: list[_Term], options: dict[str, Any]) -> _Said:
        if name in _COMPARED:
            return self._comparison(_COMPARED[name], *terms)
        if name in ("and_kleene", "or_kleene", "invert"):
            return _combined(name, [self._predicate(term) for term in terms])
        match name, terms:
            case "is_null", [Value() as column]:
                return self._bound(column.is_null())
            case "is_valid", [Value() as column]:
                return self._bound(~column.is_null())
            case "is_in", [Value() as column]:
                values = options["value_set"]
                if all(self._is_literal_of(column, value) for value in values):
                    return self._bound(~column.is_null() & column.isin(values))  # false of null, and not unknown
            case "if_else", [_Said(known, True), _Said(Expr(op="and", args=(first, listed)), True), _Literal(None)]:
                if str(known) == str(first) and listed.op == "isin":  # unknown of null, as DuckDB says "in"
                    return _Said(listed, True)
        return _NOTHING

    def _comparison(self, compare: Callable[[Any, Any], Any], left: _Term, right: _Term) -> _Said:
        match left, right:
            case Value() as column, _Literal(value) if self._is_literal_of(column, value):
                return self._bound(compare(column, value))
            case _Literal(value), Value() as column if self._is_literal_of(column, value):
                return self._bound(compare(lit(value), column))
        return _NOTHING

    def _is_literal_of(self, column: Value, value: Any) -> bool:
        return type(value) is _LITERALS.get(self._type_of(column.column).name)

    def _bound(self, where: Expr) -> _Said:
        """Nothing, if the column cannot be asked that."""
        try:
            bind(where, self._type_of)
        except InvalidArgument:  # a SchemaError too
            return _NOTHING
        return _Said(where, True)


def _combined(name: str, parts: list[_Said]) -> _Said:
    exact, said = all(part.is_exact for part in parts), [part.where for part in parts if part.where is not None]
    if name == "and_kleene":
        return _Said(all_of(*said), exact)
    if len(said) < len(parts) or (name == "invert" and not exact):
        return _NOTHING
    return _Said(said[0] | said[1] if name == "or_kleene" else ~said[0], exact)


class _ArrowSchema(ctypes.Structure):
    """The beginning of the C structure of the same name."""

    _fields_ = (("format", ctypes.c_char_p), ("name", ctypes.c_char_p), ("metadata", ctypes.c_void_p))


_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _metadata(schema: Any) -> Iterator[tuple[str, str]]:
    """Names and values, as they come: their number, then of each its length and its bytes, lengths in 32 bits."""
    capsule = schema.__arrow_c_schema__()  # which the pointer is into
    at = _ArrowSchema.from_address(_pointer(capsule, b"arrow_schema")).metadata
    if not at:
        return

    def number() -> int:
        nonlocal at
        (found,) = struct.unpack("=i", ctypes.string_at(at, 4))
        at += 4
        return int(found)

    def text() -> str:
        nonlocal at
        length = number()
        found = ctypes.string_at(at, length)
        at += length
        return found.decode()

    for _ in range(number()):
        yield text(), text()
