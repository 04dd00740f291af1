"""Creating an aggregate on a table that already has events: exact, while writers go on, without a write lock.

::

    c    catalog commit: the aggregate is BUILDING and unreadable. Every commit that enters the log after c carries
         its deltas (the catalog version is compared under the entry lock), so events above c are summed by writers
    ...  events at or below c are summed in chunks; each chunk's deltas are a stage: durable, invisible, no CTS
    b    one commit names all the stages and makes the aggregate readable: their deltas apply at b

Every event is summed once: at or below c by a chunk, above c by its own commit. A crash on the way leaves a BUILDING
table; opening the store drops its stages and builds again. Snapshots below b do not see the table.

Events at or below c are read at a snapshot from after c, with the retention floor of that snapshot: what had been
forgotten by then is not summed, and ``complete_since`` of the aggregate says so.

Float sums of backfilled events fold at b, in commit order within each chunk, and after it in CTS order; the log holds
the chunks' deltas, so this too is the same for every replay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from kivi.delta.derive import derive
from kivi.delta.runs import DeltaRun
from kivi.errors import KiviError, NotFound
from kivi.mvcc.commit import Prepared
from kivi.mvcc.record import Bulk, StageKind, decode_stage
from kivi.retention import remembered
from kivi.schema import TableSchema

if TYPE_CHECKING:
    from kivi.store import Store

__all__ = ["attach", "build", "resume"]

Progress = Callable[[int, int], None]


def build(store: Store, schema: TableSchema, progress: Progress | None) -> TableSchema:
    """Sums the events at or below the aggregate's catalog commit, then makes it readable. Returns its definition.

    If the events cannot be summed (a null group key), the aggregate is dropped again and the error raised.
    """
    from kivi.store import waited

    owner = f"backfill/{schema.id}"
    try:
        with store.committer.entry_lock:
            stale = store.stages.owned(owner)
        if stale:
            store.drop_stages(stale)
        total = done = 0
        stages: list[int] = []
        events = _Events(store, schema)
        for batch, total in events:
            run = derive(schema, batch)
            stage_id = waited(
                lambda settled, run=run: store.log_stage(  # type: ignore[misc]
                    StageKind.RUN, schema.id, run.rows, owner, run.to_buffers(), settled
                )
            )
            stages.append(store.stages.sequence_of(stage_id))
            done += batch.num_rows
            if progress is not None:
                progress(done, total)
        ready = dataclasses.replace(schema, state="ready", complete_since_us=events.floor_us)
        return store.redefine(ready, stages)
    except NotFound:
        raise
    except KiviError:
        store.drop(schema.name, only_id=schema.id)
        raise
    finally:
        with contextlib.suppress(KiviError), store.committer.entry_lock:
            left = store.stages.owned(owner)
        if left and store.is_open:
            store.drop_stages(left)


class _Events:
    """(batch, total rows) of the source's events at or below the aggregate's catalog commit, in commit order.

    ``floor_us``, once the first batch is there: events before it had been forgotten, and are not given.
    """

    def __init__(self, store: Store, schema: TableSchema) -> None:
        self._store = store
        self._schema = schema
        self.floor_us: int | None = None

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        store, source, upto = self._store, self._schema.source_id, self._schema.created_ts
        lease = store.begin(min_snapshot=upto, ttl_s=store.settings.lease_ttl_max_s)
        try:
            events = store.event_store(source)
            if events is None:
                raise NotFound(f"the source of {self._schema.name!r} was dropped")
            pending = store.pending.events(source, upto)
            unsaved = store.retention.floor_at(source, lease.ts, None)  # in memory first, in base second, like pending
            with events.view(upto, floor_at=lease.ts) as view:
                known = [time_us for time_us in (unsaved, view.floor_us) if time_us is not None]
                floor = self.floor_us = view.floor_us = max(known, default=None)
                recent = [item.batch for item in pending if item.cts > view.events_upto]
                total = view.rows + sum(batch.num_rows for batch in recent)
                for batch in view.scan():
                    yield batch, total
                for batch in recent:
                    yield remembered(batch, events.schema, floor), total
        finally:
            store.release(lease)


def attach(store: Store, prepared: Prepared, run_stages: dict[int, list[int]]) -> None:
    """Makes staged runs part of a prepared commit: their deltas apply at its CTS."""
    for table, sequences in run_stages.items():
        schema = store.catalog.schema_of(table)
        if schema is None:
            raise NotFound(f"table {table} was dropped meanwhile")
        for sequence in sequences:
            data = decode_stage(store.log.read(sequence).body).data[0]
            prepared.applied.runs.append((table, DeltaRun.from_buffer(schema, 0, data)))
            prepared.commit.runs.append(Bulk(table, sequence, []))
    prepared.body = prepared.commit.encode()


def resume(store: Store) -> threading.Thread | None:
    """Builds what a crash left BUILDING, in the background; None if there is nothing."""
    unfinished = [schema for schema in store.catalog.entered.by_id.values() if schema.state == "building"]
    if not unfinished:
        return None

    def work() -> None:
        for schema in unfinished:
            try:
                build(store, schema, None)
            except KiviError:
                if store.is_open:
                    raise

    thread = threading.Thread(target=work, name="kivi-backfill", daemon=True)
    thread.start()
    return thread
