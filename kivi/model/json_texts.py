"""JSON that others wrote: the one place where it is read.

**Invariant.** What ``read_json`` returns has at most ``LEVELS_MAX`` levels of arrays and objects, so that whatever goes
through it afterwards, in Python or in a library's own code, needs no deeper stack than that. Arrow's reader of JSON,
which ends the process at some ten thousand levels, is given only what was read here before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import numpy as np

from kivi.errors import InvalidArgument, KiviError

__all__ = ["LEVELS_MAX", "as_float", "name_lines", "read_json"]

LEVELS_MAX: Final = 200
_ESCAPED: Final = re.compile(rb"\\.", re.DOTALL)
_OTHERS: Final = bytes(set(range(256)) - set(b'[]{}"'))


def read_json(data: bytes | str, what: str, **how: Any) -> Any:
    """``how``: of ``json.loads``. Raises InvalidArgument for what is nested too deeply, and ValueError for no JSON."""
    if isinstance(data, bytes) and (coding := json.detect_encoding(data)) != "utf-8":
        data = data.decode(coding, "surrogatepass")
    try:
        found = json.loads(data, **how)
        deep = _levels(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data) > LEVELS_MAX
    except RecursionError:
        deep = True
    if deep:
        raise InvalidArgument(
            f"{what} has more than {LEVELS_MAX} levels of arrays and objects in JSON: write the inner ones as text"
        )
    return found


def as_float(number: int | Decimal) -> float | int | Decimal:
    """A number for a column of float64: the nearest one, since others write large ones without a point, and with zeros
    for the digits that they leave out. One that no float64 is stays as it is, and is refused."""
    try:
        return float(number)
    except OverflowError:
        return number


def _levels(data: bytes) -> int:
    """Of JSON that is well formed: how deep it is, if that is more than LEVELS_MAX."""
    if data.count(b"[") + data.count(b"{") <= LEVELS_MAX:
        return 0
    if b"\\" in data:
        data = _ESCAPED.sub(b"", data)
    marks = data.translate(None, _OTHERS).replace(b'""', b"")  # nearly all texts: those without brackets in them
    brackets = np.frombuffer(b"".join(marks.split(b'"')[::2]), np.uint8)
    steps = (brackets & 2).astype(np.int8) - np.int8(1)  # that bit is in [ and {, and not in ] and }
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def name_lines(error: KiviError, line_of: Callable[[int], str]) -> None:
    """What an error says of one of the records, it says of the line that this was in; ``line_of`` its index."""

    def line(found: re.Match[str]) -> str:
        return f"{line_of(int(found[1]))}{f', column {found[2]}' if found[2] else ''}"

    error.message = re.sub(r"\brecords\[(\d+)\](?:\[('[^']*')\])?", line, error.message, count=1)
