"""What tables, columns and measures may be called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeGuard

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.given import listed
from kivi.model.types import shown

__all__ = ["check_disjoint", "check_name", "column_names", "is_name", "is_text", "name_list"]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")


def is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.match(name) is not None


def check_name(name: object, what: str) -> str:
    """The name, if it is one. Raises SchemaError."""
    if not isinstance(name, str) or not is_name(name):
        raise SchemaError(
            f"{what} name {shown(name)} must be letters of ASCII, digits and '_', not begin with a digit, at most 128"
        )
    return str.__str__(name)  # the characters: an f-string of a text Enum has something else


def check_disjoint(table: str, names: Iterable[str]) -> None:
    """Raises SchemaError for a name that is there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SchemaError(f"table {table!r} names the column {name!r} twice")
        seen.add(name)


def is_text(value: object) -> TypeGuard[str]:
    """Whether it can be written down: Python's strings may have halves of characters."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


def name_list(given: object, what: str) -> tuple[str, ...]:
    """Names that are given as a list, or one name as it is. Raises InvalidArgument."""
    if isinstance(given, str):
        return (given,)
    names = listed(given)
    if names is None:
        raise InvalidArgument(f"{what} is a list of names, not {shown(given)}")
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgument(f"{what} is a list of names, and {shown(name)} in it is none")
    return names


def column_names(what: str, part: str, given: Sequence[str]) -> list[str]:
    """Names of columns, each once. Raises SchemaError."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise SchemaError(f"{what}: {part} is a list of column names, and not {shown(given)}")
    names = list(given)
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise SchemaError(f"{what} names the column {twice[0]!r} twice")
    return names
