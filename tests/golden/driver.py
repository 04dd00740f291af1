"""What a golden history drives: a database through its public interface, and a store to hold and crash.

``Driver`` is the whole seam. The language speaks to ``db`` for everything an application does, and to ``store`` for
what only tests do (hold a commit between its CTS and its finish, consolidate, look at stored rows). Here ``db`` is the
embedded database; in ``grpc_driver`` it is a client of a server in this process.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from kivi.embedded.database import Database
from kivi.engine.memory import MemoryEngine
from kivi.log.memory import MemoryLog
from kivi.runtime.settings import Settings
from kivi.store.facade import Store

__all__ = ["Driver", "EmbeddedDriver"]


class Driver(Protocol):
    """``db`` has the public interface; ``store`` is the store behind it, consolidating only when told."""

    db: Any
    store: Store
    outlives: bool
    """Whether who waits for a commit outlives a crash of the store, and then asks by its token."""

    def settle(self, open_: int, committing: int) -> None:
        """Waits until the store knows every end: the script has so many transactions and snapshots, open or held."""

    def crash(self) -> None:
        """The process dies and comes back: nothing is finished, nothing flushed."""

    def reopen(self) -> None:
        """A clean stop and a start."""

    def wait(self, seconds: float) -> None:
        """Moves the store's clock."""

    def close(self) -> None: ...


class EmbeddedDriver:
    """A store in this process: in memory, or in the directory ``path`` (RocksDB and the segmented log)."""

    outlives = False
    db: Any

    def __init__(self, path: str | None = None, **settings: Any) -> None:
        self._path = path
        self._settings = Settings.of({"background": False, **settings})
        self._engine = MemoryEngine() if path is None else None
        self._log = MemoryLog(clock=lambda: int(self._now() * 1e9)) if path is None else None
        self._moved_s = 0.0
        self._open()

    def _open(self) -> None:
        self.store = self._open_store()
        self.db = Database(self.store)

    def _open_store(self) -> Store:
        return Store.open(self._path, settings=self._settings, engine=self._engine, log=self._log, clock=self._now)

    def _now(self) -> float:
        return time.time() + self._moved_s

    def settle(self, open_: int, committing: int) -> None:
        """In process an end is known when the call returns."""

    def crash(self) -> None:
        self.store.crash()
        if self._engine is not None and self._log is not None:
            self._engine.crash()
            self._log.crash()
        self._open()

    def reopen(self) -> None:
        self.store.close()
        self._open()

    def wait(self, seconds: float) -> None:
        self._moved_s += seconds

    def close(self) -> None:
        self.store.close()
