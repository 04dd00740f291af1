"""What the reads of a store have told of rows of no bounded size: which tables the event loop may read.

How long a row with text is, is known once it is read, and while the event loop reads a long one, nobody else is
answered. So it is a pool that begins: the event loop reads a table after so many answers in a row were short, whichever
session they were for, and until one is long. Each time that this is found out anew, the table is for the pool for twice
as long as the time before. A table whose rows are all long is never read by the event loop, and one of rows of both
kinds holds it for one small group of reads in each of these times, which soon are minutes.

An answer with some of a row's columns does not tell, since the whole row is read for it: whole rows count, and only
whole rows are read by the event loop.
"""

from __future__ import annotations

import threading
import time
from typing import Final

__all__ = ["RowSizes"]

_LONG_BYTES: Final = 8 << 10
_FEW: Final = 8
"""An answer of more bytes for each of its keys is long; one of few keys may have as many as one of so many."""
_SHORT: Final = 64  # answers in a row
_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 256.0
_TABLES: Final = 4_096  # of more nothing is known again


class _Table:
    __slots__ = ("pause_s", "short", "until")

    def __init__(self) -> None:
        self.short = 0
        self.until = self.pause_s = 0.0


class RowSizes:
    """Of one store's tables, by their ids. Used by many threads."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}
        self._lock = threading.Lock()

    def are_short(self, table: int) -> bool:
        """Whether the event loop may read it."""
        seen = self._tables.get(table)
        return seen is not None and seen.short >= _SHORT and time.monotonic() >= seen.until

    def answered(self, table: int, keys: int, nbytes: int) -> bool:
        """An answer of so many keys had so many bytes; whether it was short."""
        is_short = nbytes <= _LONG_BYTES * max(keys, _FEW)
        with self._lock:
            if len(self._tables) >= _TABLES and table not in self._tables:
                self._tables.clear()
            seen = self._tables.setdefault(table, _Table())
            if is_short:
                seen.short += 1
                return True
            if (now := time.monotonic()) >= seen.until:
                seen.pause_s = min(2 * seen.pause_s or _PAUSE_S, _PAUSE_S_MAX)
            seen.short, seen.until = 0, now + seen.pause_s
            return False
