"""Creating an aggregate on a table that already has events: exact, while writers go on, without a write lock.

::

    c    catalog commit: the aggregate is BUILDING and unreadable. Every commit that enters the log after c carries
         its deltas (the catalog version is compared under the entry lock), so events above c are summed by writers
    ...  events at or below c are summed in chunks, whose deltas are combined as they come; the result is staged in
         pieces: durable, invisible, no CTS
    b    one commit names all the stages and makes the aggregate readable: their deltas apply at b

Every event is summed once: at or below c by a chunk, above c by its own commit. A crash on the way leaves a BUILDING
table; opening the store drops its stages and builds again, from the beginning, in the background: the logger
``kivi.store`` tells how far it is, and ``describe`` (``kivi tables``) says *building* until it is done. Snapshots below
b do not see the table. If the events cannot be summed, the aggregate is dropped again.

Memory follows the rows of the aggregate, not the events: a backfill is one transaction, so what its chunks do to one
row is one delta (R10, ``kivi.delta.combine``). Measured: 6 M events of 100,000 keys of 50 bytes, 5.4 s, and nothing on
top of what the store held already, where staging each chunk took 223 MB.

Events at or below c are read at a snapshot from after c, with the retention floor of that snapshot: what had been
forgotten by then is not summed, and ``complete_since`` of the aggregate says so.

Float sums are added in commit order within each chunk, the chunks in commit order, and the result folds at b, before
the deltas after it in CTS order; the log holds the result, so this too is the same for every replay. Chunks end after
so many events, wherever those lie: when consolidation ran changes no bit. (An aggregate that was there from the start
has added them commit by commit, and may differ from one made later in the last bits.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from kivi.arrow.dictionaries import together
from kivi.delta.combine import Combining, pieces
from kivi.delta.derive import derive
from kivi.delta.runs import DeltaRun
from kivi.errors import KiviError, NotFound, Unavailable
from kivi.events.views import EventView
from kivi.model.schema import TableSchema
from kivi.mvcc.record import StageKind
from kivi.store.host import Running
from kivi.store.retention import remembered
from kivi.store.staging import waited
from kivi.store.tables import Tables

__all__ = ["Backfill", "Progress"]

Progress = Callable[[int, int], None]

_log = logging.getLogger("kivi.store")
_PIECE_ROWS: Final = 131_072
_PIECE_BYTES: Final = 16 << 20
_TELL_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Backfill:
    """Builds aggregates."""

    store: Running
    tables: Tables

    def build(self, schema: TableSchema, progress: Progress | None) -> TableSchema:
        """Sums the events at or below the aggregate's catalog commit, then makes it readable. Returns its definition.

        Whatever goes wrong (a null group key, no memory) is raised, and the aggregate dropped again.
        """
        try:
            return self._build(schema, progress)
        except Exception:
            if (whole := self.store.catalog.entered.successor(schema)) is not None:
                return whole  # the source was overwritten meanwhile: there is nothing older left to sum
            self._drop(schema)
            raise

    def _build(self, schema: TableSchema, progress: Progress | None) -> TableSchema:
        """``build``; after an error the aggregate is still there, BUILDING, and its stages are not."""
        owner = f"backfill/{schema.id}"
        try:
            self.store.staging.drop(self.store.staging.owned(owner))
            done = 0
            combining = Combining(schema, _PIECE_ROWS)
            with self._events(schema) as (view, recent):
                total = view.rows + sum(batch.num_rows for batch in recent)
                batches = itertools.chain(view.scan(), recent)
                for chunk in _chunks(batches, self.store.settings.block_rows):
                    combining.add(derive(schema, chunk))
                    done += chunk.num_rows
                    if progress is not None:
                        progress(done, total)
            ready = dataclasses.replace(schema, state="ready", complete_since_us=view.floor_us)
            return self.tables.redefine(ready, self._staged(schema, owner, combining.result()))
        finally:
            if self.store.is_open:
                self.store.staging.drop(self.store.staging.owned(owner))

    @contextlib.contextmanager
    def _events(self, schema: TableSchema) -> Iterator[tuple[EventView, list[pa.RecordBatch]]]:
        """The source's events at or below the aggregate's catalog commit: those in blocks, then those in memory.

        Events before ``floor_us`` of the view had been forgotten, and are not given.
        """
        store, source, upto = self.store, schema.source_id, schema.created_ts
        with store.snapshots.opened(min_snapshot=upto, ttl_s=store.settings.lease_ttl_max_s) as lease:
            events = store.event_tables.of(source)
            if events is None:
                raise NotFound(f"the source of {schema.name!r} was dropped")
            take = functools.partial(events.view, upto, floor_at=lease.ts)
            view, waiting = store.retention.captured(store.pending, source, upto, take, floor_at=lease.ts)
            with view:
                yield view, [remembered(part.kept(), events.schema, view.floor_us) for part in waiting]

    def _staged(self, schema: TableSchema, owner: str, run: DeltaRun | None) -> list[int]:
        """Stages that hold the run, in key order."""
        if run is None or not run.rows:
            return []
        rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES * run.rows // run.nbytes))
        stages = []
        for piece in pieces(run, rows):
            stage_id = waited(
                lambda settled, piece=piece: self.store.staging.log_stage(  # type: ignore[misc]
                    StageKind.RUN, schema.origin, piece.rows, owner, piece.to_buffers(), settled
                )
            )
            stages.append(self.store.staging.index.sequence_of(stage_id))
        return stages

    def _drop(self, schema: TableSchema) -> None:
        """Gives the aggregate up. Where that cannot be logged, opening the store builds it again."""
        try:
            self.tables.drop(schema.name, only_id=schema.id)
        except Exception as error:  # the error that led here is the one to raise
            if self.store.is_open:
                _log.error("aggregate %r is left building until the store is opened again: %s", schema.name, error)

    def resume(self) -> threading.Thread | None:
        """Builds what a crash left BUILDING, in the background; None if there is nothing."""
        unfinished = [schema for schema in self.store.catalog.entered.by_id.values() if schema.state == "building"]
        if not unfinished:
            return None

        def work() -> None:
            for schema in unfinished:
                self._resume(schema)

        thread = threading.Thread(target=work, name="kivi-backfill", daemon=True)
        thread.start()
        return thread

    def _resume(self, schema: TableSchema) -> None:
        """Builds one, and tells the log: nobody waits for it. What may pass by itself (no space) does not drop it."""
        started = told = time.monotonic()
        seen = 0

        def progress(done: int, total: int) -> None:
            nonlocal told, seen
            seen = done
            if (now := time.monotonic()) - told >= _TELL_EVERY_S:
                told = now
                _log.info("aggregate %r: %d of %d events are summed", schema.name, done, total)

        _log.info("aggregate %r was left building: summing its events again, from the beginning", schema.name)
        try:
            self._build(schema, progress)
        except Exception as error:
            if not self.store.is_open or schema.id not in self.store.catalog.entered.by_id:
                return  # it goes on when the store is opened again; or somebody has dropped it
            if isinstance(error, Unavailable):
                then = "it stays building, and is built when the store is opened again"
            else:
                self._drop(schema)
                then = "it is dropped; create it again"
            known = isinstance(error, KiviError)
            _log.error("aggregate %r could not be built (%s): %s", schema.name, error, then, exc_info=not known)
            return
        _log.info("aggregate %r is complete: %d events in %.1f s", schema.name, seen, time.monotonic() - started)


def _chunks(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same events in chunks of ``rows`` each, but the last.

    Deriving has a price per call, and commits may be small.
    """
    held: list[pa.RecordBatch] = []
    missing = rows
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            held.append(batch.slice(at, missing))
            at += held[-1].num_rows
            missing -= held[-1].num_rows
            if not missing:
                yield together(held)
                held, missing = [], rows
    if held:
        yield together(held)
