"""Filling the memory of a store that opens: from base, and from the log after that.

::

    base        position, catalog, stages and token marks as of that position
    replay      log records after the position, in order: into pending, tokens, stages, catalog
    then        W = the last record of the log; every CTS ever handed out lies at or below it (R13)

A log that is damaged, or ends before what base already includes, is refused. A transaction from before a restart cannot
commit: conflict facts begin at the last record.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from kivi.arrow.columns import padded
from kivi.arrow.dictionaries import together
from kivi.arrow.ipc import own_batches
from kivi.delta.ops import Barrier, RowOp
from kivi.delta.runs import DeltaRun, stamped
from kivi.encoding.base_rows import RowLayout
from kivi.encoding.event_names import EventNames
from kivi.encoding.keys import decode_key, encode_key, prefix_end
from kivi.encoding.keyspaces import Space, row_key, split_row_key, table_prefix
from kivi.engine import Engine
from kivi.errors import DataLoss
from kivi.log import Kind, Record
from kivi.log.replicated import ReplicatedLog
from kivi.model.schema import TableSchema
from kivi.mvcc.applied import Applied, PendingEvents, Retracted
from kivi.mvcc.consolidate import POSITION
from kivi.mvcc.groups import Raised, events_applied
from kivi.mvcc.prefix import Definition
from kivi.mvcc.record import (
    Abort,
    EventsRecord,
    Gather,
    NewFloor,
    Other,
    Pin,
    Stage,
    decode_abort,
    decode_commit,
    decode_events,
    decode_floor,
    decode_stage,
    is_events,
)
from kivi.mvcc.replicated import ReplicatedCommitter
from kivi.store.catalog import COUNTERS, TABLES, changes
from kivi.store.host import Contents
from kivi.store.shards import Shards
from kivi.store.staging import STAGE_INDEX, data_of, sequences_of

__all__ = ["enter_other", "load_base", "replay", "replay_record"]


def load_base(store: Contents) -> int:
    """Catalog and stages as of the recorded position, which is returned."""
    engine = store.engine
    position = int.from_bytes(engine.get(POSITION) or b"", "little")
    if store.log.last < position:
        raise DataLoss(
            f"the commit log ends at {store.log.last}, but base already includes {position}: log files are missing; "
            "put them back, or restore a backup"
        )
    if store.prefix is None or not store.prefix.saved:
        definitions, last_id = _definitions(engine)
    else:
        definitions, last_id = store.prefix.definitions, store.prefix.last_id
    for table_id, (cells, cts) in sorted(definitions.items()):
        store.catalog.load([(table_id, RowOp(Barrier.PATCH, cells, {}))], cts)
    store.catalog.given(last_id)
    if store.prefix is not None and store.prefix.saved:
        store.catalog.restore(store.prefix.changes)
        for schema in store.catalog.entered.by_id.values():
            if schema.kind == "aggregate":  # guards on its rows are found by their table, too
                store.committer.facts.is_aggregate(schema.id)
        store.prefix.restore(store.committer.facts)
        if isinstance(store.committer, ReplicatedCommitter):
            store.prefix.restore_gathering(store.committer.gathering, store.catalog.schema_of)
            store.prefix.restore_taken(store.committer.deduplication)
            store.prefix.restore_pins(store.committer.pins)
            store.prefix.restore_touches(store.committer.touches)
    elif store.prefix is not None:
        store.prefix.begin(definitions, store.catalog.changes, last_id, store.committer.facts.generations)
    store.stages.load(engine.get(STAGE_INDEX))
    if isinstance(store.log, ReplicatedLog):
        store.log.keep_stages(store.stages)
    return position


def _definitions(engine: Engine) -> tuple[dict[int, Definition], int]:
    """The rows of the tables table, as base has them, and the last id that was given."""
    layout, found = RowLayout.of(TABLES), dict[int, Definition]()
    prefix = table_prefix(Space.ROW, TABLES.id)
    for key, value in engine.scan(prefix, prefix_end(prefix)):
        version = layout.decode(value)
        if version.alive:
            table_id = decode_key([c.type for c in TABLES.key], split_row_key(key)[1])[0]
            found[table_id] = Definition(dict(enumerate(version.cells)), version.cts)
    counter = engine.get(row_key(COUNTERS.id, encode_key([COUNTERS.key[0].type], ("table",))))
    return found, 0 if counter is None else RowLayout.of(COUNTERS).decode(counter).cells[0]


def replay(store: Contents, position: int) -> None:
    """Everything in the log after ``position``, into memory."""
    for record in store.log.replay(position):
        replay_record(store, record, position)
    store.catalog.release(list(store.catalog.visible.replaced))  # no snapshot of before is open


def replay_record(store: Contents, record: Record, position: int = 0) -> None:
    """One of them, behind ``position``; of a log that is followed, too, under the entry lock. Raises DataLoss."""
    try:
        _replay_one(store, record, position)
    except DataLoss as error:
        raise DataLoss(f"log record {record.sequence} cannot be replayed: {error.message}", path=error.path) from None


def _replay_one(store: Contents, record: Record, position: int) -> None:
    match record.kind:
        case Kind.COMMIT:
            _replay_commit(store, record)
        case Kind.STAGE:
            enter_other(store, decode_stage(record.body), record.sequence, record.time_us)
        case Kind.FLOOR:
            enter_other(store, decode_floor(record.body), record.sequence, record.time_us)
        case Kind.ABORT:
            abort = decode_abort(record.body)
            for cts in abort.commits:
                if cts <= position:
                    continue  # W passed it only after this record was durable: base never had it
                store.pending.discard(cts)
                store.stages.undo(cts)
                aborted = decode_commit(store.log.read(cts).body)
                if aborted.request:
                    store.tokens.forget(aborted.request[0])
                if aborted.batch:
                    store.tokens.forget_batch(*aborted.batch)
            enter_other(store, abort, record.sequence, record.time_us)


def enter_other(store: Contents, other: Other, sequence: int, time_us: int) -> None:
    """What a record that is no commit does, as it enters the log or is replayed: all but to commits that it aborts."""
    match other:
        case Stage():
            store.stages.add(sequence, other, time_us)
        case NewFloor():
            store.retention.enter(other.table, sequence, other.time_us)
        case Abort():
            for token in other.tokens:
                store.tokens.forget(token)
            store.stages.use(other.stages, sequence)
        case Gather() | Pin():  # of a log that orders, whose committer keeps it
            pass


def _replay_commit(store: Contents, record: Record) -> None:
    if is_events(record.body):
        _replay_events(store, record)
        return
    cts = record.sequence
    commit = decode_commit(record.body)
    catalog_rows = changes(commit.rows)
    if catalog_rows:
        store.catalog.load(catalog_rows, cts)
    known = store.catalog.schema_of
    appended: list[tuple[int, pa.RecordBatch]] = []
    for bulk in commit.appends:
        source = known(bulk.table)
        if source is not None and source.kind == "event":  # rows that were staged are among the commit's rows
            brought = [padded(batch, source) for batch in own_batches(data_of(store.log, bulk))]
            brought = store.retention.staged(source, brought, cts) if bulk.stage else brought
            appended += [(bulk.table, batch) for batch in brought]
    runs: list[tuple[int, DeltaRun]] = []
    for bulk in commit.runs:
        schema = known(bulk.table)
        if schema is not None:
            runs.append((bulk.table, stamped(DeltaRun.from_buffer(schema, cts, data_of(store.log, bulk)), cts)))
    retracted = [
        (bulk.table, Retracted(cts, EventNames.decode(bulk.parts[0])))
        for bulk in commit.retractions
        if known(bulk.table) is not None
    ]
    rows = [row for row in (*commit.rows, *commit.derived) if known(row[0]) is not None]
    events = [(table, PendingEvents(cts, cts, batch)) for table, batch in appended]
    store.pending.apply(cts, Applied([(cts, *row) for row in rows], events, runs, retracted))
    store.stages.use(sequences_of([*commit.appends, *commit.runs]), cts)
    store.timeline.note(cts, record.time_us)
    if commit.request:
        store.tokens.remember(commit.request[0], cts, commit.request[1])
    if commit.batch:
        store.tokens.remember_batch(*commit.batch, cts)


def decoded_columns(
    record: EventsRecord, known: Callable[[int], TableSchema | None], shards: Shards
) -> tuple[pa.RecordBatch, list[tuple[int, DeltaRun]], list[Raised]]:
    """The events of a record, its runs, and what rules raised, of the tables that are there and the shards that are
    held; the places of the record are then those of these events."""
    source = known(record.table)
    batches, places = ([], None) if source is None else shards.read_events(source, record.events[0])
    if places is not None:
        record.places = places if record.places is None else record.places[places]
    runs = [
        (table, run)
        for table, data in record.runs
        if (schema := known(table)) is not None
        for run in shards.read_run(schema, data[0])
    ]
    raised = [
        shards.held_raised(into, (table, together([padded(batch, into) for batch in own_batches(data[0])]), of))
        for table, data, of in record.raised
        if (into := known(table)) is not None
    ]
    return together(batches) if batches else pa.RecordBatch.from_pylist([]), runs, raised


def _replay_events(store: Contents, record: Record) -> None:
    found = decode_events(record.body)
    known = store.catalog.schema_of
    batch, runs, raised = decoded_columns(found, known, store.shards)
    found.derived = [row for row in found.derived if known(row[0]) is not None]
    store.pending.apply(record.last, events_applied(found, record.sequence, record.count, batch, runs, raised))
    store.timeline.note(record.sequence, record.time_us, record.count)
    store.tokens.remember(found.request[0], record.sequence, found.request[1], record.count)
