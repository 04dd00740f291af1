"""RocksDB as an engine. The only file that imports rocksdict.

How the contract of `kivi.engine` is kept here:

* **Prefix after a crash**: one column family, and no write-ahead log on any write. A flush moves a
  whole memtable to a file, so what is on disk is always a prefix of the batches. With several
  families a flush of one would leave the others behind, even under atomic flush.
  (``tests/engine/test_crash.py`` kills a process at random moments, with and without blob files.)
* **Point-in-time scans**: a plain iterator is fixed when it is created, so `scan` creates it at the
  call. The iterators of a rocksdict ``Snapshot`` are *not* isolated and are not used.
* **A scan never ends early as if it were done**: `_pairs` asks ``status()`` at the
  end, and `_Scan` refuses to go on once the engine is closed.

Found in rocksdict 0.3.29, each the reason for something below. The tests pin what we do about them, and for
the lower bound and the snapshots also the finding itself, so that an upgrade which changes it is noticed:

* ``Rdict.values()`` ends *silently* at a damaged or missing block. The lower-level ``iter()`` with a
  ``status()`` at the end reports it, and costs more a step (decision 0003). `scan_records` pays that for nothing but
  the end: it drains ``values()`` by C code, and where that ends, an ``iter()`` of the same moment looks for what comes
  behind. Both are made between two equal sequence numbers, since two iterators made one after the other may have a
  write between them.
* ``next()`` of an iterator that has ended is a segmentation fault.
* ``ReadOptions`` owns the bound that an iterator compares with. Dropped too early, it is freed
  memory and a scan returns anything. The generators keep it alive beside the iterator.
* ``set_iterate_lower_bound`` sets the *upper* bound. Backward scans compare keys in Python instead.
* An iterator keeps the database, and its lock file, open after ``close()``. So the engine keeps weak
  references to its scans and drops their iterators when it is closed.
* ``disable_wal`` is a property, although the type stubs call it a method.
* Two objects for each pair are most of what ``items()`` costs. So values of some keys, as those of base rows, are kept
  with their keys behind them, as *records* (``Records``), and drained from ``values()`` (decision 0003). Everybody but
  `scan_records` gets them without their keys.
* Without ``column_families`` a store that exists is opened by the options that it keeps in its directory, whatever it
  is given, and with a block cache of 8 MiB. So the only family is named, with ours.
* A batched ``get`` costs what single ones cost: it only saves the loop.
* Closing it while ``compact_range`` or ``flush`` runs makes either fail ("Already borrowed"), and leaves it open with
  its lock file if that is the closing. So `close` waits for them.
* ``write`` holds the interpreter's lock, ``flush`` and ``compact_range`` release it (decision 0001).

Values of `BLOB_BYTES_MIN` and more (event blocks) go to blob files and are not rewritten by
every compaction of the keys. While RocksDB collects garbage there, they are, whether or not there is any. So it is set
to collect only while there is garbage worth it (`_Collecting`, which looks after each flush, and where space was given
back; decision 0004); files that hold nothing else are dropped without.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import rocksdict

from kivi.engine import Engine, WriteBatch
from kivi.engine.giving_back import GivingBack
from kivi.errors import DataLoss, DiskFull, InvalidArgument, KiviError, StoreInUse, Unavailable

__all__ = ["BLOB_BYTES_MIN", "Records", "RocksEngine"]

T = TypeVar("T")
_UNREADABLE: Final = ("Invalid argument", "NotFound", "Not implemented", "Not supported")
"""RocksDB's words for options that it wrote itself, and that are not what it wrote any more."""

BLOB_BYTES_MIN = 64 * 1024
_GARBAGE_BYTES_MIN: Final = 64 << 20
_GARBAGE_SHARE: Final = 0.1  # of what blob files hold; half of it ends the collecting
_FORCED_SHARE: Final = "0.4"
"""While it collects, blob files of which so much is garbage are written again, though nothing compacts their keys: at
most one and a half bytes for each that is given back."""

_PROPERTIES = {
    "keys_estimate": "rocksdb.estimate-num-keys",
    "live_bytes": "rocksdb.estimate-live-data-size",
    "memtable_bytes": "rocksdb.cur-size-all-mem-tables",
    "block_cache_bytes": "rocksdb.block-cache-usage",
    "table_readers_bytes": "rocksdb.estimate-table-readers-mem",
    "sst_bytes": "rocksdb.total-sst-files-size",
    "blob_bytes": "rocksdb.total-blob-file-size",
    "blob_live_bytes": "rocksdb.live-blob-file-size",
    "blob_garbage_bytes": "rocksdb.live-blob-file-garbage-size",
    "pending_compaction_bytes": "rocksdb.estimate-pending-compaction-bytes",
    "running_compactions": "rocksdb.num-running-compactions",
    "running_flushes": "rocksdb.num-running-flushes",
    "immutable_memtables": "rocksdb.num-immutable-mem-table",
    "background_errors": "rocksdb.background-errors",
    "write_stopped": "rocksdb.is-write-stopped",
    "delayed_write_rate": "rocksdb.actual-delayed-write-rate",
    "block_cache_capacity_bytes": "rocksdb.block-cache-capacity",
}


_COMPACTED_BYTES: Final = 64 << 20
"""Files of so many bytes are compacted at a time where space is given back: closing waits for that."""
_DELETIONS_OF: Final = 128
_DELETIONS: Final = 64
"""A file with so many deletions among so many neighbouring keys is compacted soon, so that what they deleted goes."""

_BLOBS: Final = ("live", "garbage")
_log = logging.getLogger("kivi.engine")


class Records(NamedTuple):
    """The pairs that are kept as records, each value with its key behind it: of all keys that begin with one of these.

    An engine that was empty notes it under ``note``, in its first batch, and keeps to it; one that holds pairs without
    the note has none (made by an older version). So it is true of all that an engine holds or of nothing, after a crash
    and in copies as well.
    """

    note: bytes
    of: bytes


class RocksEngine(Engine):
    """A RocksDB directory, opened for this process alone. ``records``: what a new one keeps as such.

    ``owed``: keys that begin with this note what it owes to the disk; without it that is forgotten when it is closed.

    Raises `StoreInUse` if another process (or another engine in this one) has it open, `DataLoss`
    if RocksDB finds its files damaged or missing.
    """

    def __init__(
        self,
        path: str,
        *,
        cache_bytes: int = 128 << 20,
        memtable_bytes: int = 64 << 20,
        records: Records | None = None,
        owed: bytes | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._closed = False
        self._lock = threading.Lock()
        self._at_work = threading.Lock()  # of what lets go of the interpreter's lock: the database is not closed then
        self._scans: weakref.WeakSet[_Scan[Any]] = weakref.WeakSet()
        self._write_options = rocksdict.WriteOptions()
        self._write_options.disable_wal = True  # type: ignore[method-assign, assignment]
        try:
            os.makedirs(self.path, exist_ok=True)
            check_manifest(self.path)
            options = _options(cache_bytes, memtable_bytes)
            self._db = rocksdict.Rdict(self.path, options, column_families={"default": options})
        except KiviError:
            raise
        except Exception as error:
            found = self._translate(error)
            if isinstance(found, Unavailable) and any(text in str(error) for text in _UNREADABLE):
                found = self._damaged(str(error))
            raise found from error
        self._owed = owed
        self._collecting = _Collecting(self._db)
        # Neither knows the engine: one that nobody has any more, and that was never closed, is closed by that.
        given_back = partial(_given_back, self._db, self._write_options, owed, self._collecting)
        self._giving_back = GivingBack(partial(_compacted, self._db), given_back)
        self._records: frozenset[bytes] = frozenset()  # of keys that begin with one of these
        if records is not None:
            try:
                self._records = self._noted(records)
            except BaseException:
                self.close()
                raise

    def _noted(self, records: Records) -> frozenset[bytes]:
        noted = self.get(records.note)
        if noted is None and next(self.scan(b"", None), None) is None:
            noted = records.of
            batch = WriteBatch()
            batch.put(records.note, noted)
            self.write(batch)
        return frozenset(bytes((first,)) for first in noted or b"")

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
            return _value(key, value) if value is not None and key[:1] in self._records else value
        except Exception as error:
            raise self._translate(error) from error

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        try:
            values: list[bytes | None] = self._db.get(list(keys))  # type: ignore[assignment]
            if records := self._records:
                for i, key in enumerate(keys):
                    if key[:1] in records and (value := values[i]) is not None:
                        values[i] = _value(key, value)
        except Exception as error:
            raise self._translate(error) from error
        return values

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        records = self._records_from(start, end)
        return self._begun(start, end, lambda bounds: _pairs(self._db.iter(bounds), start, records, bounds, reverse))

    def scan_records(
        self, start: bytes, end: bytes | None, rows: int, value_bytes: int | Callable[[bytes], int]
    ) -> Iterator[list[bytes]]:
        if start[:1] not in self._records or not _is_within(start[:1], end):
            return super().scan_records(start, end, rows, value_bytes)

        def records(bounds: rocksdict.ReadOptions) -> Iterator[list[bytes]]:
            return _records(*self._twins(bounds, start), start, rows, value_bytes, bounds)

        return self._begun(start, end, records)

    def _records_from(self, start: bytes, end: bytes | None) -> frozenset[bytes]:
        """``_records``, or none of them if there are none in that range."""
        return frozenset([first for first in self._records if first >= start[:1] and (end is None or first < end)])

    def keys(self, start: bytes, end: bytes | None, rows: int) -> Iterator[list[bytes]]:
        def lists(bounds: rocksdict.ReadOptions) -> Iterator[list[bytes]]:
            keys: Any = self._db.keys(read_opt=bounds, from_key=start)
            return _listed(keys, rows, bounds)

        return self._begun(start, end, lists)

    def every(self, start: bytes, end: bytes | None, step: int) -> Iterator[bytes]:
        def steps(bounds: rocksdict.ReadOptions) -> Iterator[bytes]:
            keys: Any = self._db.keys(read_opt=bounds, from_key=start)
            return _every(keys, step, bounds)

        return self._begun(start, end, steps)

    def _begun(
        self, start: bytes, end: bytes | None, steps: Callable[[rocksdict.ReadOptions], Iterator[T]]
    ) -> Iterator[T]:
        """A scan of the range; its iterators, which ``steps`` makes, are those of this moment."""
        if end is not None and end <= start:
            return iter(())
        bounds = rocksdict.ReadOptions()
        if end is not None:
            bounds.set_iterate_upper_bound(end)
        with self._lock:
            if self._closed:
                raise Unavailable("the engine is closed: open the store again")
            with self._translated():
                scan = _Scan(self, steps(bounds))
            self._scans.add(scan)
        return scan

    def _twins(self, bounds: rocksdict.ReadOptions, start: bytes) -> tuple[Iterator[Any], rocksdict.RdictIter]:
        """Two iterators of one moment."""
        while True:
            before = self._db.latest_sequence_number()
            quick = self._db.values(read_opt=bounds, from_key=start)
            rest = self._db.iter(bounds)
            if self._db.latest_sequence_number() == before:
                return quick, rest

    def write(self, batch: WriteBatch) -> None:
        native, records = rocksdict.WriteBatch(raw_mode=True), self._records
        for start, end in batch.ranges:
            native.delete_range(start, end)
        for key, value in batch:
            if value is None:
                native.delete(key)
            else:
                native.put(key, value + key if key[:1] in records else value)
        if not batch.owed:
            with self._translated():
                self._db.write(native, self._write_options)
            return
        if self._owed is not None:
            for start, last in batch.owed.items():
                native.put(_note(self._owed, start), last or b"")
        with self._giving_back.owing(batch.owed), self._translated():
            self._db.write(native, self._write_options)

    def flush(self) -> None:
        with self._working():
            self._db.flush(True)
        self._collecting.look()

    def give_back(self, start: bytes, end: bytes | None) -> None:
        self._giving_back.ask(start, end)

    def give_back_owed(self) -> None:
        self._collecting.look()
        if (owed := self._owed) is not None:
            for key, end in self.scan(owed, owed[:-1] + bytes([owed[-1] + 1])):
                self.give_back(bytes.fromhex(key[len(owed) :].decode()), end or None)

    def checkpoint(self, path: str) -> None:
        if os.path.exists(path):
            raise InvalidArgument(f"{path} exists: give a checkpoint a path of its own", path=path)
        with self._working():
            rocksdict.Checkpoint(self._db).create_checkpoint(path)

    def stats(self) -> dict[str, int]:
        with self._translated():
            return {name: self._db.property_int_value(key) or 0 for name, key in _PROPERTIES.items()}

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for scan in list(self._scans):
                scan.steps = None
        self._giving_back.stop()  # before the rest: closing does not wait for a compaction that somebody waits for
        with self._at_work, self._translated():
            self._db.close()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """For what closing waits for."""
        with self._at_work:
            if self._closed:  # or closing, which waits here, and whoever begins anew must not go before it
                raise Unavailable("the engine is closed: open the store again", path=self.path)
            with self._translated():
                yield

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """For calls that are so few that its microsecond does not count: others say ``try``."""
        try:
            yield
        except Exception as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> KiviError:
        """The error for one of rocksdict's, which are all plain ``Exception`` with RocksDB's text."""
        text = str(error)
        if isinstance(error, _WithoutKey):
            return self._damaged(text)
        if isinstance(error, rocksdict.DbClosedError):
            return Unavailable("the engine is closed: open the store again", path=self.path)
        if "LOCK" in text and ("lock hold" in text or "While lock file" in text):
            return StoreInUse(f"{self.path} is open in another process: stop that one first", path=self.path)
        if "No space left" in text or "out of space" in text.lower():
            return DiskFull(f"no disk space at {self.path}: make room ({text})", path=self.path)
        if "Corruption" in text or "No such file" in text:
            return self._damaged(text)
        return Unavailable(f"storage error at {self.path}: {text}", path=self.path)

    def _damaged(self, text: str) -> DataLoss:
        return DataLoss(
            f"{self.path} is damaged: restore it from a checkpoint, or rebuild it from the log ({text})", path=self.path
        )


def _compacted(db: rocksdict.Rdict, start: bytes, end: bytes | None) -> Iterator[None]:
    """Compacts what is between the keys, some files at a time. It stops nobody else's compactions."""
    options = rocksdict.CompactOptions()
    options.set_exclusive_manual_compaction(False)
    for cut in (*_cuts(db.live_files(), start, end), end):
        db.compact_range(start, cut, options)
        yield
        start = cut or start


class _Collecting:
    """Whether compactions collect garbage in blob files."""

    def __init__(self, db: rocksdict.Rdict) -> None:
        self._db = db
        self._collects = False

    def look(self) -> None:
        """They do from now on, or no more."""
        try:
            held, garbage = (self._db.property_int_value(_PROPERTIES[f"blob_{name}_bytes"]) for name in _BLOBS)
            worth_it = max(_GARBAGE_BYTES_MIN, _GARBAGE_SHARE * (held or 0)) / (2 if self._collects else 1)
            collects = (garbage or 0) >= worth_it
            if collects is not self._collects:
                self._db.set_options({
                    "enable_blob_garbage_collection": "true" if collects else "false",
                    "blob_garbage_collection_force_threshold": _FORCED_SHARE if collects else "1.0",
                })  # fmt: skip
                self._collects = collects
        except Exception as error:  # whoever asked has done its own: the next one looks again
            _log.warning("could not tell RocksDB whether to collect garbage: %s", error)


def _given_back(
    db: rocksdict.Rdict, options: rocksdict.WriteOptions, owed: bytes | None, collecting: _Collecting, start: bytes
) -> None:
    if owed is not None:
        native = rocksdict.WriteBatch(raw_mode=True)
        native.delete(_note(owed, start))
        db.write(native, options)
    collecting.look()  # of blobs it is known only now what is garbage


def _note(owed: bytes, start: bytes) -> bytes:
    return owed + start.hex().encode()


def _cuts(files: list[dict[str, Any]], start: bytes, end: bytes | None) -> Iterator[bytes]:
    """Keys between the two, with files of about ``_COMPACTED_BYTES`` from one to the next."""
    nbytes = 0
    for file in sorted(files, key=lambda file: file["end_key"]):
        last = file["end_key"]
        if last > start and (end is None or last < end):
            nbytes += file["size"]
            if nbytes >= _COMPACTED_BYTES:
                yield last
                nbytes = 0


def check_manifest(path: str) -> None:
    """Raises DataLoss if the manifest has a record of a type that RocksDB never writes there.

    It is a log of 32 KiB blocks; a record is its checksum (4 bytes), length (2), type (1: whole, 2 to 4: parts) and
    data, and the rest of a block is zeros. RocksDB finds all other damage by itself, but a type that only recycled
    logs have, one bit from the right one, sends it round for ever (found by the soak's damage).
    """
    try:
        with open(os.path.join(path, "CURRENT"), encoding="ascii") as file:
            name = file.read().strip()
        with open(os.path.join(path, name), "rb") as file:
            data = file.read()
    except (OSError, ValueError):
        return  # a new store, or one that RocksDB will refuse
    at = 0
    while at + _RECORD_HEAD <= len(data):
        left = _MANIFEST_BLOCK - at % _MANIFEST_BLOCK
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < _RECORD_HEAD or not (kind or length):
            at += left
            continue
        if kind > _MANIFEST_KIND_MAX:
            raise DataLoss(
                f"{path}/{name} is damaged at byte {at + 6}: restore the store from a checkpoint", path=path, offset=at
            )
        at += _RECORD_HEAD + length


_MANIFEST_BLOCK: Final = 32 << 10
_MANIFEST_KIND_MAX: Final = 4
_RECORD_HEAD: Final = 7


class _Scan(Iterator[T]):
    """One open scan: knows its engine, to translate errors and to notice that it was closed."""

    __slots__ = ("__weakref__", "engine", "steps")

    def __init__(self, engine: RocksEngine, steps: Iterator[T]) -> None:
        self.engine = engine
        self.steps: Iterator[T] | None = steps

    def __next__(self) -> T:
        steps = self.steps
        if steps is None:
            raise Unavailable("the engine was closed during the scan: open the store again")
        try:
            return next(steps)
        except StopIteration:
            raise
        except Exception as error:
            raise self.engine._translate(error) from error


class _WithoutKey(Exception):
    """A value that should have its key behind it."""


def _value(key: bytes, record: bytes) -> bytes:
    if not record.endswith(key):
        raise _WithoutKey(f"the value of {key.hex()} does not end with its key")
    return record[: len(record) - len(key)]


def _pairs(
    iterator: rocksdict.RdictIter,
    start: bytes,
    records: frozenset[bytes],
    bounds: rocksdict.ReadOptions,
    reverse: bool = False,
) -> Iterator[tuple[bytes, bytes]]:
    # `bounds` is a parameter only to stay alive as long as the iterator that points into it.
    if reverse:
        iterator.seek_to_last()  # the last key below the upper bound
    else:
        iterator.seek(start)
    step = iterator.prev if reverse else iterator.next
    while iterator.valid():
        key: bytes = iterator.key()
        if reverse and key < start:
            return
        value: bytes = iterator.value()
        yield key, _value(key, value) if records and key[:1] in records else value
        step()
    iterator.status()


def _listed(keys: Iterator[bytes], rows: int, bounds: rocksdict.ReadOptions) -> Iterator[list[bytes]]:
    while part := list(itertools.islice(keys, rows)):
        yield part


def _every(keys: Iterator[bytes], step: int, bounds: rocksdict.ReadOptions) -> Iterator[bytes]:
    yield from itertools.islice(keys, step, None, step)


def _records(
    values: Iterator[bytes],
    rest: rocksdict.RdictIter,
    start: bytes,
    rows: int,
    value_bytes: int | Callable[[bytes], int],
    bounds: rocksdict.ReadOptions,
) -> Iterator[list[bytes]]:
    """``values``, and what ``rest`` finds behind them: nothing, unless they have ended early.

    A value of another width makes it go on somewhere else, which the caller notices by the width.
    """
    part: list[bytes] = []
    while part := list(itertools.islice(values, rows)):
        last = part[-1]
        start = last[value_bytes(last) if callable(value_bytes) else value_bytes :] + b"\0"
        if len(part) < rows:
            break
        yield part
    behind = (record for _, record in _pairs(rest, start, frozenset(), bounds))
    while part := [*part, *itertools.islice(behind, rows - len(part))]:
        yield part
        part = []


def _is_within(first: bytes, end: bytes | None) -> bool:
    """Whether every key from one that begins with that byte up to ``end`` begins with it."""
    return end is not None and (end[:1] <= first or (len(end) == 1 and end[0] == first[0] + 1))


def _options(cache_bytes: int, memtable_bytes: int) -> rocksdict.Options:
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(rocksdict.Cache(cache_bytes))
    blocks.set_block_size(8 * 1024)
    blocks.set_bloom_filter(10, False)

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_paranoid_checks(True)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_size(memtable_bytes)
    options.set_max_write_buffer_number(3)
    options.set_max_background_jobs(2)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_enable_blob_files(True)
    options.set_min_blob_size(BLOB_BYTES_MIN)
    options.set_blob_compression_type(rocksdict.DBCompressionType.none())  # Arrow compressed them already
    options.set_enable_blob_gc(False)  # until `_Collecting` wants it
    options.add_compact_on_deletion_collector_factory(_DELETIONS_OF, _DELETIONS, 0.0)
    options.set_bytes_per_sync(1 << 20)
    options.set_max_open_files(1024)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(8 << 20)
    return options
