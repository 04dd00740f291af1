"""The cooler: settled files of old events move to their table's object store, in a thread of its own.

What a step does is ``kivi.events.cooling``; what is deleted there, and when, ``kivi.events.cold_tier``. A table's files
are old when all their events are older than ``local`` says, reckoned as retention is: from the newest event, or from
now if that one is of the future. An object store that cannot be reached holds nothing up but this thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from kivi.errors import DataLoss, DiskFull, KiviError, NotFound, Unavailable
from kivi.events.cold_tier import ColdObject
from kivi.events.store import EventStore
from kivi.model.schema import TableSchema
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.store.host import Running
from kivi.store.settler import Settler

__all__ = ["Cooler"]

_log = logging.getLogger("kivi.store")


class Cooler:
    """``cool`` may be called by any thread; one step is made at a time."""

    def __init__(self, store: Running, settler: Settler) -> None:
        self._store = store
        self._settler = settler
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False
        self.errors = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="kivi-cool", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Waits for the call in progress, which ends by its time limit."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def cool(self) -> int:
        """Moves whatever is old enough, and deletes what nothing needs, now. How many files moved.

        Raises Unavailable, DiskFull and DataLoss, as a step does: the first there was, after all other tables had their
        turn. An object store that cannot be reached is asked once.
        """
        moved = 0
        failures = list[KiviError]()
        away = set[str]()
        with self._mutex:
            for schema, events, before_us in self._tables():
                try:
                    while schema.cold not in away and not self._stop.is_set():
                        if not self._step(schema, events, before_us):
                            break
                        moved += 1
                except (DiskFull, DataLoss, Unavailable) as error:
                    failures.append(error)
                    if isinstance(error, Unavailable):
                        away.add(schema.cold or "")
            if self._has_cold() and not self._stop.is_set():
                self._settler.delete_unneeded()
                try:
                    self._store.cold.sweep(self._in_use, passing=away, stopped=self._stop.is_set)
                except (DataLoss, Unavailable) as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        return moved

    def stats(self) -> dict[str, int]:
        every = [(events.files(), schema) for schema, events in self._settler.tables()]
        here = [file for files, _ in every for file in files if file.cold is None]
        there = [file for files, _ in every for file in files if file.cold is not None]
        waiting = [file for _, events, before_us in self._tables() for file in events.cooling.waiting(before_us)]
        return {
            "local_bytes": sum(file.nbytes for file in here),
            "cold_files": len(there),
            "cold_bytes": sum(file.nbytes for file in there),
            "cold_uploads_waiting": len(waiting),
            "cold_errors": self.errors,
            **self._store.cold.stats(),
        }

    def _work(self) -> None:
        use_batch_scheduling()
        while not self._stop.wait(self._store.settings.cold_every_s):
            try:
                self.cool()
                if self._failing:
                    _log.info("the cold tier can be reached again")
                self._failing = False
            except (Unavailable, DiskFull, DataLoss) as error:  # nothing is lost: what should have moved is still here
                self.errors += 1
                if not self._failing:
                    _log.warning("files do not move to the cold tier: %s", error)
                self._failing = True
            except KiviError as error:
                _log.error("files do not move to the cold tier until the store is opened again: %s", error)
                return

    def _step(self, schema: TableSchema, events: EventStore, before_us: int) -> bool:
        try:
            return events.cooling.step(self._store.consolidator.mutex, schema.cold or "", before_us)
        except NotFound:
            return False  # it was dropped meanwhile

    def _tables(self) -> Iterator[tuple[TableSchema, EventStore, int]]:
        """Tables with a cold tier, and before which moment their files are to be moved."""
        now_us = self._store.committer.now_us()
        for schema, events in self._settler.tables():
            if schema.cold is not None and schema.local_us is not None and (held := events.time_range_us()) is not None:
                yield schema, events, min(held[1], now_us) - schema.local_us

    def _has_cold(self) -> bool:
        return self._store.cold.is_used or any(True for _ in self._tables())

    def _in_use(self) -> set[ColdObject]:
        with self._store.consolidator.mutex:
            self._store.consolidator.flush()
            return self._store.event_tables.objects_in_use()
