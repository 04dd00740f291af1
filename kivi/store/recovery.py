"""Opening a store, and what the background does besides folding.

::

    directory   KIVI names format, store id and operators; LOCK keeps a second process out
    base        position, catalog, stages and token marks as of that position
    replay      log records after the position, in order: into pending, tokens, stages, catalog
    then        W = the last record of the log; every CTS ever handed out lies at or below it (R13)

Refused, with the file and what to do: a directory with something else in it, a newer format, operators we do not know,
a directory in use, a log that is damaged or ends before what base already includes.

A transaction from before a restart cannot commit: conflict facts begin at the last record.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from kivi.arrow.dictionaries import together
from kivi.arrow.ipc import own_batches
from kivi.delta import operators
from kivi.delta.ops import Barrier, RowOp
from kivi.delta.runs import DeltaRun
from kivi.encoding.base_rows import RowLayout
from kivi.encoding.keys import decode_key, encode_key, prefix_end
from kivi.encoding.keyspaces import Space, meta_key, row_key, space_prefix, split_row_key, table_prefix
from kivi.engine import Engine, WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.errors import (
    DataLoss,
    DiskFull,
    FormatTooNew,
    InvalidArgument,
    NotAStore,
    StoreInUse,
    Unavailable,
)
from kivi.events.store import destroy
from kivi.log import CommitLog, Kind, Record
from kivi.log.files import is_no_space
from kivi.log.memory import MemoryLog
from kivi.mvcc.applied import Applied, PendingEvents
from kivi.mvcc.consolidate import POSITION
from kivi.mvcc.groups import events_applied
from kivi.mvcc.record import decode_abort, decode_commit, decode_events, decode_stage, is_events
from kivi.runtime.settings import Settings
from kivi.store.catalog import COUNTERS, TABLES, changes
from kivi.store.staging import LiveStage, sequences_of

if TYPE_CHECKING:
    from kivi.store.facade import Parts, Store

__all__ = ["FORMAT", "Housekeeping", "Recovered", "begin_copy", "checkpoint", "open_parts", "sync_directory"]

_log = logging.getLogger("kivi")

FORMAT: Final = 4
"""Of what is on disk: a program refuses a larger one, and opens a smaller one and makes it its own.

1  the first
2  text in codes and integers of 3, 5, 6 and 7 bytes in event blocks, generations and late counts in the catalog
3  base rows with their keys behind them, in engines that were empty then (``kivi.engine.rocks.Records``)
4  request tokens of the library in blocks (``kivi.encoding.token_blocks``), besides rows of their own
"""
_MARKER: Final = "KIVI"
_MARKER_NEW: Final = "KIVI.new"  # on its way; a crash may leave it


@dataclass(frozen=True, slots=True)
class Recovered:
    """What opening found: records replayed after the position, and what of the log was cut off as torn."""

    position: int
    last: int
    replayed: int
    log: Any = None


# -- the directory --------------------------------------------------------------------------------------


def open_parts(path: str | None, settings: Settings, engine: Engine | None, log: CommitLog | None) -> Parts:
    """Engine, log and identity for ``path``; in memory if it is None."""
    from kivi.store.facade import Parts

    if path is None:
        memory_engine, memory_log = engine or MemoryEngine(), log or MemoryLog()
        return Parts(memory_engine, memory_log, b"memory", lambda: None)
    from kivi.engine.rocks import Records, RocksEngine
    from kivi.log.segmented import SegmentedLog

    release_lock, store_id = claim(path)
    try:
        rocks = engine or RocksEngine(
            os.path.join(path, "engine"),
            cache_bytes=settings.cache_bytes,
            memtable_bytes=settings.memtable_bytes,
            records=Records(meta_key("records"), space_prefix(Space.ROW)),
        )
        try:
            segments = log or SegmentedLog(
                os.path.join(path, "log"), store_id=store_id, segment_bytes=settings.segment_bytes
            )
        except BaseException:
            rocks.close()
            raise
    except BaseException:
        release_lock()
        raise

    def release() -> None:
        with contextlib.ExitStack() as stack:  # each of them, whatever the one before has to say
            stack.callback(release_lock)
            stack.callback(rocks.close)
            stack.callback(segments.close)

    return Parts(rocks, segments, store_id, release, path)


def claim(path: str) -> tuple[Callable[[], None], bytes]:
    """Locks the directory, creating the store's marker in an empty one. (how to let go, the store id)"""
    marker = os.path.join(path, _MARKER)
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotAStore(f"{path} is a file, not a directory: name a directory for the store") from None
    except OSError as error:
        raise NotAStore(f"{path} cannot be made ({error.strerror}): name a directory that can") from None
    entries = set(os.listdir(path)) - {"LOCK", _MARKER_NEW}
    if entries and _MARKER not in entries:
        raise NotAStore(
            f"{path} holds {sorted(entries)[0]!r} and no {_MARKER} file: not a kivi store; name an empty directory"
        )
    try:
        lock = os.open(os.path.join(path, "LOCK"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if is_no_space(error):
            raise _full(path, error) from None
        raise
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(f"{path} is open in another process: stop that one, or connect to its server") from None
        if not os.path.exists(marker):
            write_marker(path, {"format": FORMAT, "store_id": secrets.token_hex(16), "operators": operators.ids()})
        store_id, version = read_marker(path)
        if version < FORMAT:  # before anything is written that an older program would take for damage
            write_marker(path, {"format": FORMAT, "store_id": store_id.hex(), "operators": operators.ids()})
            _log.info("%s had format %d, and has %d now: older versions of kivi refuse it", path, version, FORMAT)
        return lambda: os.close(lock), store_id
    except BaseException as error:
        os.close(lock)
        if isinstance(error, OSError) and is_no_space(error):
            raise _full(path, error) from None
        raise


def _full(path: str, error: OSError) -> DiskFull:
    return DiskFull(f"no disk space in {path} ({error.strerror}): make room, then try again", path=path)


def write_marker(path: str, content: dict[str, Any]) -> None:
    temporary = os.path.join(path, _MARKER_NEW)
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, os.path.join(path, _MARKER))
    sync_directory(path)


def sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_marker(path: str) -> tuple[bytes, int]:
    """The store id and the format. Raises FormatTooNew, DataLoss."""
    marker = os.path.join(path, _MARKER)
    try:
        with open(marker, encoding="utf-8") as file:
            content = json.load(file)
        version, store_id, known = content["format"], bytes.fromhex(content["store_id"]), content["operators"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{marker} is damaged ({error}): restore it from a backup", path=marker, offset=0) from None
    if not isinstance(version, int) or not 0 < version <= FORMAT:
        raise FormatTooNew(f"{path} has format {version}; this version of kivi reads up to {FORMAT}: use a newer one")
    operators.check_ids(known)
    return bytes(store_id), version


# -- base and log -----------------------------------------------------------------------------------------


def load_base(store: Store) -> int:
    """Catalog and stages as of the recorded position, which is returned."""
    engine = store.engine
    raw = engine.get(POSITION)
    position = int.from_bytes(raw, "little") if raw else 0
    if store.log.last < position:
        raise DataLoss(
            f"the commit log ends at {store.log.last}, but base already includes {position}: log files are missing; "
            "put them back, or restore a backup"
        )
    layout = RowLayout.of(TABLES)
    prefix = table_prefix(Space.ROW, TABLES.id)
    for key, value in engine.scan(prefix, prefix_end(prefix)):
        version = layout.decode(value)
        if version.alive:
            table_id = decode_key([c.type for c in TABLES.key], split_row_key(key)[1])[0]
            op = RowOp(Barrier.PATCH, dict(enumerate(version.cells)), {})
            store.catalog.load([(table_id, op)], version.cts)
    counter = engine.get(row_key(COUNTERS.id, encode_key([COUNTERS.key[0].type], ("table",))))
    if counter is not None:
        store.catalog.given(RowLayout.of(COUNTERS).decode(counter).cells[0])
    store.stages.load(engine.get(store.stages.index_key()))
    return position


def replay(store: Store, position: int) -> Recovered:
    """Everything in the log after ``position``, into memory."""
    count = 0
    for record in store.log.replay(position):
        count += 1
        try:
            _replay_one(store, record, position)
        except DataLoss as error:
            raise DataLoss(
                f"log record {record.sequence} cannot be replayed: {error.message}", path=error.path
            ) from None
    return Recovered(position, store.log.last, count, getattr(store.log, "recovered", None))


def _replay_one(store: Store, record: Record, position: int) -> None:
    match record.kind:
        case Kind.COMMIT:
            _replay_commit(store, record)
        case Kind.STAGE:
            stage = decode_stage(record.body)
            store.stages.add(
                LiveStage(
                    record.sequence, stage.kind, stage.table, stage.rows, len(record.body), stage.owner, record.time_us
                )
            )
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
            for token in abort.tokens:
                store.tokens.forget(token)
            store.stages.drop(abort.stages)
        case Kind.FLOOR:
            store.retention.replay(record.sequence, record.body)


def _replay_commit(store: Store, record: Record) -> None:
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
            data = bulk.parts[0] if not bulk.stage else decode_stage(store.log.read(bulk.stage).body).data[0]
            appended += [(bulk.table, batch) for batch in own_batches(data)]
    runs: list[tuple[int, DeltaRun]] = []
    for bulk in commit.runs:
        schema = known(bulk.table)
        if schema is not None:
            data = bulk.parts[0] if not bulk.stage else decode_stage(store.log.read(bulk.stage).body).data[0]
            runs.append((bulk.table, DeltaRun.from_buffer(schema, cts, data)))
    rows = [row for row in (*commit.rows, *commit.derived) if known(row[0]) is not None]
    events = [(table, PendingEvents(cts, cts, batch)) for table, batch in appended]
    store.pending.apply(cts, Applied([(cts, *row) for row in rows], events, runs))
    store.stages.commit(sequences_of([*commit.appends, *commit.runs]), cts)
    store.timeline.note(cts, record.time_us)
    if commit.request:
        store.tokens.remember(commit.request[0], cts, commit.request[1])
    if commit.batch:
        store.tokens.remember_batch(*commit.batch, cts)


def _replay_events(store: Store, record: Record) -> None:
    found = decode_events(record.body)
    known = store.catalog.schema_of
    source = known(found.table)
    batches = [] if source is None else own_batches(found.events[0])
    runs = [
        (table, DeltaRun.from_buffer(schema, 0, data[0]))
        for table, data in found.runs
        if (schema := known(table)) is not None
    ]
    batch = together(batches) if batches else pa.RecordBatch.from_pylist([])
    found.derived = [row for row in found.derived if known(row[0]) is not None]
    store.pending.apply(record.last, events_applied(found, record.sequence, record.count, batch, runs))
    store.timeline.note_many(record.sequence, record.last, record.time_us)
    store.tokens.remember(found.request[0], record.sequence, found.request[1], record.count)


# -- checkpoint ---------------------------------------------------------------------------------------------


def checkpoint(store: Store, path: str) -> None:
    """A copy that opens by itself: fold and flush, copy the engine at that position, begin an empty log after it.

    The copy has its own identity. Commits that arrive meanwhile are not in it. It appears under ``path`` when it is
    complete: an empty directory left by a crash would open as a new store, and be taken for a backup. A checkpoint
    that fails leaves nothing.

    Raises NotAStore if ``path`` is something already, InvalidArgument if it cannot be made where it should be,
    DiskFull without space.
    """
    path = os.path.abspath(path)
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise NotAStore(f"{path} is not an empty directory: a checkpoint makes a new one")
    parent = os.path.dirname(path)
    made = partial = f"{path}.partial-{secrets.token_hex(4)}"
    try:
        os.mkdir(partial)
    except OSError as error:
        if is_no_space(error):
            raise _full(parent, error) from None
        raise InvalidArgument(
            f"a checkpoint cannot be made in {parent} ({error.strerror}): name a directory that is there and can be "
            "written to"
        ) from None
    try:
        with store.consolidator.paused() as position:
            store.engine.checkpoint(os.path.join(partial, "engine"))
        begin_copy(store, partial, position)
        os.rename(partial, path)
        made = path
        sync_directory(parent)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            kind = DiskFull if is_no_space(error) else Unavailable
            raise kind(
                f"the checkpoint {path} could not be written ({error.strerror}): nothing is left of it"
            ) from error
        raise


def begin_copy(store: Store, path: str, position: int) -> None:
    """Beside a copy of the engine: an empty log after ``position``, and an identity of its own."""
    from kivi.log.segmented import SegmentedLog

    store_id = secrets.token_bytes(16)
    SegmentedLog.start_after(
        os.path.join(path, "log"), store_id=store_id, last=position, time_us=store.log.last_time_us
    )
    write_marker(path, {"format": FORMAT, "store_id": store_id.hex(), "operators": operators.ids()})


# -- housekeeping ---------------------------------------------------------------------------------------------


class Housekeeping:
    """Bounded steps beside consolidation: stages past their time limit, rows of dropped and overwritten tables."""

    _SPACES: Final = (Space.ROW, Space.VERSION, Space.EVENT)
    _ROWS: Final = 1_024

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rounds = 0
        self._catalog_version = -1
        self._dropped: list[int] = []

    def step(self) -> None:
        store = self._store
        self._rounds += 1
        if self._rounds % 20 == 0:
            limit = int((store.clock() - store.settings.stage_ttl_s) * 1_000_000)
            with store.committer.entry_lock:
                expired = store.stages.expired(limit)
            if expired:
                store.drop_stages(expired)
        if self._rounds % 100 == 0:
            store.retention.step()
        self._release_replaced()
        version = store.catalog.visible.version
        if version != self._catalog_version and not self._waiting():
            self._dropped = self._orphans()
            self._catalog_version = version
        for table in self._dropped:
            if not store.events_in_use(table):
                store.consolidator.with_mutex(partial(self._erase, table))
                break

    def _release_replaced(self) -> None:
        """What was overwritten goes when no open snapshot sees it."""
        store = self._store
        old = store.catalog.visible.replaced
        unseen = [table for table, it in old.items() if not store.leases.may_read(it.schema.created_ts, it.cts)]
        if unseen:
            store.catalog.release(unseen)
            self._catalog_version = -1

    def _waiting(self) -> bool:
        """Whether something is pending for a dropped table: the next pass lets go of it."""
        return any(self._store.catalog.schema_of(table) is None for table in self._store.pending.tables())

    def _orphans(self) -> list[int]:
        """Ids of tables that have rows and no definition: one seek per table and key space."""
        found: set[int] = set()
        for space in self._SPACES:
            at = space_prefix(space)
            end = prefix_end(at)
            while at is not None:
                first = next(iter(self._store.engine.scan(at, end)), None)
                if first is None:
                    break
                table = int.from_bytes(first[0][1:5], "big")
                if self._store.catalog.schema_of(table) is None:
                    found.add(table)
                if table == 2**32 - 1:
                    break
                at = table_prefix(space, table + 1)
        return sorted(found)

    def _erase(self, table: int) -> None:
        """One bounded step, with the consolidator's mutex held. Rows first, so a table is done when its events are."""
        engine = self._store.engine
        batch = WriteBatch()
        for space in (Space.ROW, Space.VERSION):
            prefix = table_prefix(space, table)
            rows = itertools.islice(engine.scan(prefix, prefix_end(prefix)), self._ROWS - len(batch))
            for key, _ in rows:
                batch.delete(key)
        if not len(batch):
            batch = next(destroy(engine, table), batch)
        if len(batch):
            engine.write(batch)
        else:
            self._store.consolidator.sweeper.forget_versions(table)
            self._store.forget_events(table)
            self._dropped.remove(table)
