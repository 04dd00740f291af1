"""CSV (RFC 4180) as it is written and read here: an empty cell is null, and a text without characters is ``""``.

**Invariant.** What ``csv_line`` writes of texts and nulls, a reader of CSV with ``with_nulls`` behind it gives back as
it was, whatever characters the texts have. PostgreSQL and DuckDB read and write it so, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["csv_line", "with_nulls"]

_QUOTED: Final = re.compile(r'[",\r\n]')
_CELL: Final = re.compile(r'((?:"[^"]*(?:""[^"]*)*")?[^,\r\n]*)(?:,|[\r\n]|\Z)')


def csv_line(cells: Iterable[str | None]) -> str:
    """A record, without its end. Of a single null it is ``""``, since readers pass over lines without characters."""
    return ",".join("" if cell is None else _cell(cell) for cell in cells) or '""'


def _cell(text: str) -> str:
    return f'"{text.replace(chr(34), chr(34) * 2)}"' if not text or _QUOTED.search(text) else text


def with_nulls(cells: Sequence[str], record: str) -> list[str | None]:
    """The cells that Python's ``csv`` has read of a record, which does not say whether an empty one had quotes."""
    if "" not in cells:
        return list(cells)
    if '""' not in record:
        return [cell or None for cell in cells]
    found = _CELL.finditer(record)
    return [None if not next(found)[1] else cell for cell in cells]
