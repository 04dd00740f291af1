"""Columns to rows: a list of dicts, by a function that is made for their names.

A display with constant names takes a quarter of the time of ``dict(zip(names, row))`` (decision 0026).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["records"]


def records(names: Sequence[str], columns: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """A dict for each row, with the columns' order; none without columns. Raises ValueError if one is shorter."""
    return _maker(tuple(names))(*columns)


@functools.lru_cache(maxsize=1024)
def _maker(names: tuple[str, ...]) -> Callable[..., list[dict[str, Any]]]:
    """A column's name may be anything; in the source it is a literal."""
    columns = "".join(f"c{i}, " for i in range(len(names)))
    values = "".join(f"v{i}, " for i in range(len(names)))
    row = ", ".join(f"{name!r}: v{i}" for i, name in enumerate(names))
    return eval(f"lambda {columns}: [{{{row}}} for {values} in zip({columns} strict=True)]") if names else list
