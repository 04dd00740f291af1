"""The settler: steps of settling for every event table, beside consolidation, in a thread of its own.

What a step does is ``kivi.events.settling``. It reads, sorts and writes without a lock, and holds the consolidator's
only to swap what it made for what went in, so that nothing waits for it but a pass, for some milliseconds.

Blocks are settled once a table has twice as many events in blocks as a file has, oldest first; the newest stay, for
tails and snapshots that follow the commits. Of a table that nothing was appended to for ``settle_idle_s`` all are.
No snapshot and no tail holds this up: whatever they ask for, they get from files (R23).

While events come in, a step rests after each file that it made: as long as it worked, which is enough to keep up; and
nine times as long where they come faster than that, as in a burst, so that the stream has the processors. What is left
then waits for the valley after it: then it does not rest, and neither does it where very many wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from kivi.errors import DataLoss, KiviError, NotFound, Unavailable
from kivi.events.combining import depth
from kivi.events.settling import FILE_ROWS
from kivi.events.store import EventStore
from kivi.model.schema import TableSchema
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.store.host import Running

__all__ = ["Settler"]

_log = logging.getLogger("kivi.store")

_RETRY_S: Final = 5.0
_REST: Final = 1.0
"""Times as long as it worked a step rests while events come in."""
_REST_IN_BURST: Final = 9.0
"""The same, while so many come in that it could not keep up."""
_WAITING_MAX: Final = 256 * FILE_ROWS
"""The more events wait the less it rests; where so many do, not at all."""
_LOOK_AGAIN: Final = 30
"""So many rounds after there was nothing to do it is looked again, whatever has changed: snapshots may have ended."""


class Settler:
    """``settle`` may be called by any thread; one step is made at a time."""

    def __init__(self, store: Running) -> None:
        self._store = store
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._changed: dict[int, tuple[int, float]] = {}
        self._done: dict[int, tuple[object, bool, int]] = {}
        self._damaged: set[int] = set()
        self._rounds = 0
        self._deleted_at = time.monotonic()
        self._worked_from = 0.0
        self._sealed_before = 0
        self.seconds = self.rested = 0.0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="kivi-settle", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Waits for the step in progress."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def settle(self, file_rows: int = FILE_ROWS) -> None:
        """Everything that is in blocks, and whatever there is to combine and to delete, now."""
        with self._mutex:
            for schema, events in self.tables():
                while self._step(schema, events, every=True, file_rows=file_rows):
                    pass
            self.delete_unneeded()

    def waiting(self) -> int:
        """How many events are in no file: in blocks, or not even there."""
        pending = self._store.pending
        return sum(
            sum(one.batch.num_rows for one in pending.events(schema.id, 2**63)) + events.hot_rows()
            for schema, events in self.tables()
        )

    def stats(self) -> dict[str, int | float]:
        """Since the store was opened, but for the files, which are those that are there.

        ``settling_seconds`` are of steps that ended, with the time that they rested. ``settled_depth``: of one table,
        the greatest number of files that have events of one moment. ``settled_write_amplification``: bytes of all files
        that were written, for each byte of those that events first moved to.
        """
        every = [events for _, events in self.tables()]
        files = [events.files() for events in every]
        settled = sum(events.settling.settled_bytes for events in every)
        written = sum(events.settling.written_bytes for events in every)
        return {
            "settling": self.waiting(),
            "settling_seconds": self.seconds,
            "settling_rested_seconds": self.rested,
            "settled_files": sum(map(len, files)),
            "settled_depth": max(map(depth, files), default=0),
            "settled_rows": sum(events.settling.settled_rows for events in every),
            "settled_bytes": settled,
            "settled_written_bytes": written,
            "settled_write_amplification": written / settled if settled else 0.0,
            "settled_combined_rows": sum(events.settling.combined_rows for events in every),
        }

    def _work(self) -> None:
        use_batch_scheduling()
        pause = every_s = self._store.settings.settle_every_s
        while not self._stop.wait(pause):
            try:
                with self._mutex:
                    pause = 0.0 if self._round() else every_s
            except Unavailable:  # no disk space, most of all: what was made is gone, what is there stays
                pause = _RETRY_S
            except KiviError as error:
                _log.error("settling stopped until the store is opened again: %s", error)
                return

    def _round(self) -> bool:
        """One step in each table that has work. Whether there may be more."""
        self._rounds += 1
        self._begin_work()
        more = False
        for schema, events in self.tables():
            if self._stop.is_set():
                return False
            more |= self._due(schema, events)
        if time.monotonic() - self._deleted_at >= self._store.settings.flush_every_s:
            self.delete_unneeded()
            self._deleted_at = time.monotonic()
        return more

    def _due(self, schema: TableSchema, events: EventStore) -> bool:
        now, version = time.monotonic(), events.version
        newest, since = self._changed.get(schema.id, (-1, now))
        if (last := events.newest_cts()) != newest:
            newest, since = self._changed[schema.id] = last, now
        idle = now - since >= self._store.settings.settle_idle_s
        seen, was_idle, at = self._done.get(schema.id, (None, False, 0))
        if (seen, was_idle) == (version, idle) and self._rounds - at < _LOOK_AGAIN:
            return False
        if self._step(schema, events, every=idle, pace=self._rest):
            return True
        self._done[schema.id] = version, idle, self._rounds
        return False

    def _begin_work(self) -> None:
        self._worked_from, self._sealed_before = time.perf_counter(), self._sealed()

    def _sealed(self) -> int:
        """How many events have come into blocks."""
        return sum(events.rows_sealed for _, events in self.tables())

    def _rest(self, rows: int) -> None:
        """Rests as befits the work on a file of so many rows, if events came in during it. Only then: what it was like
        before a burst says nothing about the burst."""
        if came_in := self._sealed() - self._sealed_before:
            now = time.perf_counter()
            rest = _REST if came_in <= rows / (1 + _REST) else _REST_IN_BURST
            self._stop.wait(rest * max(0.0, 1 - self.waiting() / _WAITING_MAX) * (now - self._worked_from))
            self.rested += time.perf_counter() - now
        self._begin_work()

    def _step(
        self,
        schema: TableSchema,
        events: EventStore,
        *,
        every: bool,
        file_rows: int = FILE_ROWS,
        pace: Callable[[int], None] = lambda rows: None,
    ) -> bool:
        if schema.id in self._damaged:
            return False
        started = time.perf_counter()
        consolidator = self._store.consolidator
        try:
            return events.settling.step(
                consolidator.mutex, consolidator.unneeded, every=every, file_rows=file_rows, pace=pace
            )
        except NotFound:
            return False  # it was dropped meanwhile
        except DataLoss as error:  # of what it reads; whoever asks for that is told so, too
            _log.error("events of %r cannot be settled: %s", schema.name, error)
            self._damaged.add(schema.id)
            return False
        finally:
            self.seconds += time.perf_counter() - started

    def tables(self) -> Iterator[tuple[TableSchema, EventStore]]:
        """The event tables that there are."""
        for schema in list(self._store.catalog.visible.by_id.values()):
            if schema.kind == "event" and (events := self._store.event_tables.of(schema.id)) is not None:
                yield schema, events

    def delete_unneeded(self) -> None:
        """Deletes files out of use, after a flush: a crash must not bring back what names them."""
        consolidator = self._store.consolidator
        with consolidator.mutex:
            unneeded = [(events, files) for _, events in self.tables() if (files := events.unneeded_files())]
            if unneeded:
                consolidator.flush()
            for events, files in unneeded:
                events.delete_files(files)
