"""A database that nobody has asked yet, made once a question has ended, for the next one.

To make one takes DuckDB 18 ms of a processor, which is more than most questions take. The spare one is as empty and as
closed as any other: what differs from question to question (memory, threads, tables) is told to it when it is taken.
Each is asked once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any, Final

from kivi.runtime.forks import register_fork_handler

__all__ = ["Spare"]


class Spare:
    """``config``: of every database. Thread safe."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self._config: Final = dict(config)
        self._changed = threading.Condition()
        self._made: Any = None
        self._making = False
        self._parents: Any = None
        register_fork_handler(self)

    def forked(self) -> None:
        """The spare one stays what it was, and where it was: to close it would wait for threads of the parent."""
        self._parents, self._made = self._made, None
        self._changed, self._making = threading.Condition(), False

    def take(self, duckdb: Any) -> Any:
        """A connection to a database in memory, which the caller closes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._making)  # two at a time would take twice as long
            found, self._made = self._made, None
        return found or self._new(duckdb)

    def prepare(self, duckdb: Any) -> None:
        """Makes the next one, in a thread of its own, if there is none."""
        with self._changed:
            if self._making or self._made is not None:
                return
            self._making = True
        try:  # not a daemon: the interpreter's end must not find it within DuckDB
            threading.Thread(target=self._prepare, args=(duckdb,), name="kivi-sql-spare").start()
        except RuntimeError:  # no thread begins any more
            self._making = False

    def _prepare(self, duckdb: Any) -> None:
        made = None
        try:
            with contextlib.suppress(
                duckdb.Error, MemoryError
            ):  # then the next question makes its own, or says why not
                made = self._new(duckdb)
        finally:
            with self._changed:
                self._made, self._making = made, False
                self._changed.notify_all()

    def _new(self, duckdb: Any) -> Any:
        connection = duckdb.connect(":memory:", config=self._config)
        connection.execute("set timezone = 'UTC'")
        return connection
