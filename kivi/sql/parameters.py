"""The parameters of a question, for those who send it elsewhere: a record batch of one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from kivi.errors import InvalidArgument
from kivi.model.given import has_elements
from kivi.model.names import is_text
from kivi.model.types import check_whole_us, shown
from kivi.sql.engine import Parameters

__all__ = ["from_batch", "to_batch"]

_LEVELS_MAX: Final = 50
"""Arrow writes 64 levels of lists, and takes long over many more."""


def to_batch(parameters: Parameters) -> pa.RecordBatch | None:
    """None: there are none. Columns are called like the parameters, and like nothing if these have places.

    Raises InvalidArgument for a value that Arrow has no type for.
    """
    if parameters is None:
        return None
    if not has_elements(parameters) or not isinstance(parameters, Sequence | Mapping):
        raise InvalidArgument(f"parameters are a list of values, or a dict for names ($name), not {shown(parameters)}")
    named = isinstance(parameters, Mapping)
    items = parameters.items() if isinstance(parameters, Mapping) else (("", value) for value in parameters)
    names, arrays = list[str](), list[pa.Array]()
    for name, value in items:
        if not is_text(name) or (named and not name):
            raise InvalidArgument(f"a parameter is named by a text, not {shown(name)}")
        check_whole_us(value, f"parameter {name or len(names) + 1}")
        if _is_deeper(value, _LEVELS_MAX):
            raise InvalidArgument(
                f"a parameter has at most {_LEVELS_MAX} levels of lists: write the inner ones as text"
            )
        try:
            arrays.append(_in_us(pa.array([value])))
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            raise InvalidArgument(
                f"{shown(value)} cannot be a parameter: it is no number of 64 bits, text, moment of whole microseconds "
                "or list"
            ) from None
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names=names) if names else None


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dicts lie more than so many levels in one another."""
    if not isinstance(value, list | tuple | dict):
        return False
    within = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(each, levels - 1) for each in within if isinstance(each, list | tuple | dict))


def _in_us(value: pa.Array) -> pa.Array:
    """A moment or duration in microseconds, as DuckDB compares it. Raises ArrowInvalid for a finer one."""
    kind = value.type
    if pa.types.is_timestamp(kind):
        return value.cast(pa.timestamp("us", kind.tz))
    return value.cast(pa.duration("us")) if pa.types.is_duration(kind) else value


def from_batch(batch: pa.RecordBatch | None) -> Parameters:
    """Raises InvalidArgument for a moment that DuckDB cannot be given."""
    if batch is None:
        return None
    try:
        values = [column[0].as_py() for column in batch.columns]
    except (OverflowError, ValueError):  # such as the last hours of the year 9999 in a time zone west of UTC
        raise InvalidArgument("a parameter is a moment outside the years 1 to 9999") from None
    names = batch.schema.names
    return dict(zip(names, values, strict=True)) if any(names) else values
