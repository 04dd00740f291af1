"""What callers give, of which nothing is known yet.

It is asked for its type before it is asked for anything else: an array has no truth and is equal to nothing, one of no
dimension has no elements though it can be iterated, and what is nested deeply enough cannot be written out (``shown``).
"""

from __future__ import annotations

import decimal
from collections.abc import Collection, Iterable
from typing import Any, TypeGuard

from kivi.errors import InvalidArgument

__all__ = ["flag", "has_elements", "is_among", "is_bool", "listed", "shown"]


def shown(value: object) -> str:
    """A value in an error's sentence: short, however long the value is, and never an error of its own."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write out very long ones
        return f"an integer of {value.bit_length()} bits"
    try:
        text = str(value) if isinstance(value, decimal.Decimal) else repr(value)
    except Exception:  # an object of the caller's
        return f"an object of type {type(value).__name__}"
    text = text.replace("\n", " ")  # of arrays and data frames: an error is one line
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def is_bool(value: object) -> bool:
    """True and False, of Python or NumPy."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))  # bool_ before NumPy 2


def flag(value: object, what: str) -> bool:
    """True or False, of Python or NumPy, and not whatever Python takes for it. Raises InvalidArgument."""
    if not is_bool(value):
        raise InvalidArgument(f"{what} is True or False, not {shown(value)}")
    return bool(value)


def is_among(value: object, texts: Collection[str]) -> TypeGuard[str]:
    """Whether it is one of these texts."""
    return isinstance(value, str) and value in texts


def has_elements(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether it can be iterated, and is no text and no bytes, each of which is one value, and no frame, which would
    give the names of its columns."""
    if isinstance(value, str | bytes | bytearray | memoryview) or hasattr(value, "columns"):
        return False
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def listed(value: object) -> tuple[Any, ...] | None:
    """The elements of what has some, each asked for once; None for a single value."""
    return tuple(value) if has_elements(value) else None
