"""The local log: segment files, a thread that writes them, a mark of what was acknowledged.

The way of a group of records::

    append     caller's thread   find room, take numbers, time and place under the lock, join the queue
    write      the writer        take what is queued, chain the checksums, pwritev
    sync       the writer        fdatasync, with no lock
    complete   the writer        write the mark, raise `durable`, call every done()

What comes in while one batch is written and synced is the next. An idle log writes and syncs at once, nothing lingers.
A thread that appends while it is *leading* is the writer of what it has appended, if nothing else is there to write: it
spares two hand-overs between threads, for the time of a sync in which it can do nothing else. Who cannot spare that
asks `is_quick` first. Invariants, and where they are kept:

* **Log order.** Numbers and places are given under ``_lock`` in `append`. From when the queue is emptied (`_take`)
  until what was in it is completed, ``_taken`` keeps every other writer away.
* **A failed sync is never missed.** A segment is written and synced through one open file, by one thread at a time, and
  a group completes only after its own sync has returned without an error; any error fails the log (`_fail`).
* **Large records go past the page cache** (`kivi.log.direct`); they are synced as all others.
* **Nothing is retried.** After `_fail` nothing is written, not even the mark: the next open decides.
* **A segment that has a successor is whole and durable**: `_roll` syncs it before it writes the next one's
  header.
* **The mark is behind the log and ahead of the acknowledgement**: `_write_through` writes it between sync and
  done().
* **Disk space is had before a number is**: `append` asks `kivi.log.room`, which preallocates.

Every hand-over between threads waits for the interpreter's lock. What a commit costs beside a bare write and sync, and
what the interpreter's switch interval does to it: decision 0005.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter

from kivi.errors import (
    DataLoss,
    DiskFull,
    InvalidArgument,
    KiviError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kivi.log import MAX_RECORD_BYTES, CommitLog, Done, Entry, LogFailed, Record, Ticket
from kivi.log.direct import Direct
from kivi.log.files import Files
from kivi.log.mark import INFLIGHT_RECORDS_MAX, Mark, MarkFile, open_mark
from kivi.log.reading import pieces, read_pieces
from kivi.log.records import BLOCK_BYTES, HEADER_BYTES, SegmentHeader, pack_records
from kivi.log.records import segment_name as name_of
from kivi.log.recovery import NUMBERS_MAX, Segment, recover
from kivi.log.room import Room
from kivi.runtime.files import is_no_space
from kivi.runtime.histogram import Histogram
from kivi.runtime.scheduling import use_batch_scheduling

__all__ = ["GROUP_BYTES_MAX", "QUEUED_BYTES_MAX", "SegmentedLog"]

GROUP_BYTES_MAX = 1 << 30
QUEUED_BYTES_MAX = 2 << 30
_SEGMENT_BYTES_MAX = 2 << 30
_FLIGHT_BYTES = 4 << 20  # one write and sync takes no more
_QUICK_S = 0.001
_QUICK_BYTES = 256 << 10


@dataclass(slots=True, eq=False)
class _Group:
    """The records that one append entered: their lengths, their numbers, and their place."""

    records: Sequence[Entry]
    lengths: list[int]
    count: int
    first: int
    time_us: int
    segment: Segment
    offset: int
    size: int
    done: Done


class SegmentedLog(CommitLog):
    """The log in ``path``, for this process alone.

    ``store_id`` (16 bytes) must be the one that the log was made with. ``clock`` gives nanoseconds since
    1970. ``recovered`` tells what opening it found. Raises `DataLoss` (naming file and offset) if it is
    damaged, `StoreInUse`, `FormatTooNew`, `DiskFull` if recovery needs disk space that is not there.
    """

    def __init__(
        self,
        path: str,
        *,
        store_id: bytes,
        files: Files | None = None,
        segment_bytes: int = 64 << 20,
        max_record_bytes: int = MAX_RECORD_BYTES,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if len(store_id) != 16 or not 2 * BLOCK_BYTES <= segment_bytes <= _SEGMENT_BYTES_MAX:
            raise InvalidArgument("a store id has 16 bytes, and a segment between 8 KiB and 2 GiB")
        self._files = files or Files()
        self._path = os.fspath(path)
        self._store_id = store_id
        self._clock = clock
        self._max_record_bytes = min(max_record_bytes, GROUP_BYTES_MAX)
        try:
            with ExitStack() as undo:
                self._mark = open_mark(self._files, self._path, store_id)
                undo.callback(self._mark.close)
                self._segments, end, self.recovered = recover(self._files, self._path, self._mark)
                undo.pop_all()
        except OSError as error:
            raise _at_open(self._path, error) from error
        # Under the lock:
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._queue: deque[_Group] = deque()
        self._taken = False  # by one who has not completed yet what was in the queue
        self._here = threading.local()  # `written_by_leader`: what this thread has appended while it is leading
        self._sync_s = 0.0  # the syncs' moving average
        self._active: Segment | None = None
        self.next = self._mark.current.start
        self.last = self.durable = end.sequence
        self.last_time_us = end.time_us
        self._inflight_records = self._inflight_bytes = 0
        self._failed: LogFailed | None = None
        self._closing = self._abandoned = False
        self.sync_times = Histogram()
        self._counts = {"groups": 0, "syncs": 0, "written_bytes": 0, "rolls": 0, "sync_s": 0.0}
        # Who has taken the queue: the segment being written, and the state of the chain at its end.
        self._writing: Segment | None = None
        self._chain, self._written, self._written_time_us = end.chain, end.sequence, end.time_us
        self._direct = Direct()
        self._truncating = threading.Lock()
        self.on_room = lambda error: None
        self._room = Room(
            self._files,
            self._path,
            segment_bytes,
            self._lock,
            self._sync_mark,
            lambda error: self.on_room(error),
        )
        with self._lock:
            self._room.prepare()
        self._thread = threading.Thread(target=self._writer, name="kivi-log-writer", daemon=True)
        self._thread.start()

    @staticmethod
    def start_after(path: str, *, store_id: bytes, last: int, time_us: int) -> None:
        """Make an empty log in the empty directory ``path`` whose next number is ``last + 1``.

        For a checkpoint: the engine's copy includes everything up to ``last``, so the log needs none of it.
        """
        files = Files()
        files.makedirs(path)
        if files.listdir(path):
            raise InvalidArgument(f"{path} is not empty: a log can only be started in a new directory", path=path)
        MarkFile.create(files, path, Mark(sequence=last, time_us=time_us, start=last + 1, store_id=store_id))

    # -- entering

    def append(self, records: Sequence[Entry], done: Done) -> Ticket:
        lengths, counts = self._sizes(records)
        count, size = sum(counts), sum(lengths) + HEADER_BYTES * len(lengths)
        if size > GROUP_BYTES_MAX:
            raise InvalidArgument(f"a group has at most {GROUP_BYTES_MAX} bytes, not {size}")
        with self._lock:
            segment = self._find_room(count, size)
            first, offset = self.next, segment.end
            self.last_time_us = max(self.last_time_us, self._clock() // 1000)
            ends = accumulate([HEADER_BYTES + length for length in lengths], initial=offset)
            *offsets, segment.end = ends
            *numbers, self.next = accumulate(counts, initial=first)
            self.last = self.next - 1
            segment.extend(offsets, numbers, self.last)
            self._inflight_records += count
            self._inflight_bytes += size
            ticket = Ticket(first, self.last, self.last_time_us)
            group = _Group(records, lengths, count, first, self.last_time_us, segment, offset, size, done)
            self._queue.append(group)
            mine: list[_Group] | None = getattr(self._here, "written_by_leader", None)
            if mine is not None:
                mine.append(group)
            elif not self._taken:
                self._ready.notify()
            if segment.end > segment.capacity // 2:
                self._room.prepare()
        return ticket

    @contextmanager
    def leading(self) -> Iterator[None]:
        appended: list[_Group] = []
        self._here.written_by_leader = appended
        try:
            yield
        finally:
            self._here.written_by_leader = None
            if appended:
                self._lead(appended)

    def _lead(self, appended: list[_Group]) -> None:
        """Writes, syncs and completes these, if they are all that there is; else a writer does."""
        with self._lock:
            idle = not self._taken and not self._closing
            all_there_is = len(appended) == len(self._queue) and appended[0] is self._queue[0]
            one_segment = appended[0].segment is appended[-1].segment is self._writing
            if not (idle and all_there_is and one_segment):
                self._ready.notify()
                return
            groups = self._take()
        self._write_through(groups)

    def is_quick(self) -> bool:
        """Whether a thread that is leading would most likely have its records written and synced in no time.

        That is, nothing else is being written, there is room, and syncs have been quick: one that was slow is felt for
        a dozen of them.
        """
        active = self._active
        return (
            self._sync_s < _QUICK_S
            and not self._taken
            and not self._queue
            and active is not None
            and active is self._writing
            and active.end + _QUICK_BYTES <= active.capacity
        )

    def _find_room(self, count: int, size: int) -> Segment:
        """The segment with space for the next group; under the lock, which waiting releases."""
        while True:
            self._check()
            if self._inflight_records + count > INFLIGHT_RECORDS_MAX or self._inflight_bytes + size > QUEUED_BYTES_MAX:
                raise ResourceExhausted(
                    f"{self._inflight_records} records ({self._inflight_bytes} bytes) wait to be synced: "
                    "wait, the disk is behind"
                )
            active = self._active
            if (
                active is not None
                and active.end + size <= active.capacity
                and self.next + count - active.header.first <= NUMBERS_MAX
            ):
                return active
            spare = self._room.take(size)
            if spare is not None:
                spare.header = SegmentHeader(self._store_id, self.next, self.last, 0, 0)  # completed by _roll
                spare.last = self.last
                self._segments.append(spare)
                self._active = spare
                return spare
            error = self._room.wait(size, lambda: self._failed is not None or self._closing)
            if error is not None:
                raise error

    def _check(self) -> None:
        if self._failed is not None:
            raise LogFailed(str(self._failed), **self._failed.details)
        if self._closing:
            raise Unavailable("the log is closed: open the store again", path=self._path)

    # -- writing, syncing, completing

    def _writer(self) -> None:
        use_batch_scheduling()
        while True:
            with self._lock:
                while self._taken or not (self._queue or self._closing):
                    self._ready.wait()
                if not self._queue:
                    return
                groups = self._take()
            with suppress(BaseException):  # it has failed the log, and who is queued is to hear so
                self._write_through(groups)

    def _take(self) -> list[_Group]:
        """Takes what is written next; under the lock, with something in the queue."""
        groups: list[_Group] = []
        size = 0
        while self._queue and size < _FLIGHT_BYTES:
            groups.append(self._queue.popleft())
            size += groups[-1].size
        self._taken = True
        return groups

    def _write_through(self, groups: list[_Group]) -> None:
        """Writes, syncs and completes what was taken. What interrupts it fails the log, and is raised then."""
        sync_s = 0.0
        try:
            try:
                if self._failed is None:
                    for _, of_segment in groupby(groups, attrgetter("segment")):
                        self._write(list(of_segment))
                    began = time.perf_counter()
                    self._files.fdatasync(groups[-1].segment.fd)
                    sync_s = time.perf_counter() - began
                if self._failed is None:
                    self._mark.put(sequence=self._written, time_us=self._written_time_us, chain=self._chain)
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._complete(groups, sync_s)
        except BaseException as error:  # a callback may have been left undone: its commit would be in flight for ever
            self._fail(error)
            raise
        finally:
            with self._lock:
                self._taken = False
                if self._queue or self._closing:  # to wake the writer in vain costs more than a small group
                    self._ready.notify()

    def _write(self, groups: list[_Group]) -> None:
        """Writes groups that follow each other in one segment."""
        if groups[0].segment is not self._writing:
            self._roll(groups[0])
        buffers: list[bytes | memoryview] = []
        for group in groups:
            parts, self._chain = pack_records(group.records, group.lengths, group.first, group.time_us, self._chain)
            buffers += parts
            self._written, self._written_time_us = group.first + group.count - 1, group.time_us
        self._direct.write(self._files, groups[0].segment, buffers, groups[0].offset)

    def _roll(self, group: _Group) -> None:
        """Make the group's segment the one that is written, with all before it durable."""
        files, old, new = self._files, self._writing, group.segment
        if old is not None:
            files.fdatasync(old.fd)
        header = SegmentHeader(self._store_id, group.first, self._written, self._written_time_us, self._chain)
        if files.pwritev(new.fd, [header.pack()], 0) != BLOCK_BYTES:
            raise OSError(f"short write to {new.path}")
        files.fdatasync(new.fd)
        path = os.path.join(self._path, name_of(group.first))
        files.rename(new.path, path)
        files.sync_directory(self._path)
        with self._lock:
            new.path, new.header = path, header
            self._counts["rolls"] += 1
            # An empty segment that a restart left under the same name is replaced by the new file.
            self._segments[:] = [s for s in self._segments if s is new or s.path != path]
            if old is not None:
                self._room.retire(old)
        self._mark.put(in_use=True, begins=group.first)
        self._mark.sync()
        self._writing = new

    def _complete(self, groups: list[_Group], sync_s: float) -> None:
        size = sum(group.size for group in groups)
        with self._lock:
            failed = self._failed
            if failed is None:
                self.durable = self._written
            self._inflight_records -= sum(group.count for group in groups)
            self._inflight_bytes -= size
            counts = self._counts
            counts["groups"] += len(groups)
            counts["syncs"] += 1
            counts["written_bytes"] += size
            counts["sync_s"] += sync_s
            self._sync_s += (sync_s - self._sync_s) / 8
            self.sync_times.observe(sync_s)
        if not self._abandoned:
            self._call_done(groups, failed)

    def _call_done(self, groups: list[_Group], failed: LogFailed | None) -> None:
        interrupt: BaseException | None = None
        for group in groups:
            try:
                group.done(None if failed is None else LogFailed(str(failed), **failed.details))
            except Exception:
                logging.getLogger("kivi.log").exception("done() of the group at %d raised", group.first)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _fail(self, error: BaseException) -> None:
        """From now on the log is failed, for good. The first error is the one that is told."""
        with self._lock:
            if self._failed is None:
                self._failed = LogFailed(
                    f"the log in {self._path} failed ({str(error) or type(error).__name__}); the outcome of what is in "
                    "flight is unknown: open the store again, then ask by token",
                    path=self._path,
                )
                self._failed.__cause__ = error
                if not self._abandoned:
                    logging.getLogger("kivi.log").error("the log in %s failed: %s", self._path, error)
            self._room.wake()
            self._ready.notify_all()

    def _sync_mark(self) -> None:
        if self._failed is None:
            try:
                self._mark.sync()
            except OSError as error:
                self._fail(error)

    # -- reading

    def replay(self, after: int) -> Iterator[Record]:
        with self._lock:
            self._check_kept(after)
            if after > self.last:
                raise DataLoss(
                    f"{self._path}: the log ends at {self.last}, before {after}: it lost records, or is not "
                    "the one that belongs here; restore the data directory from a checkpoint",
                    path=self._path,
                )
            found = pieces(self._segments, after, self.durable)
        return read_pieces(self._files, found)

    def read(self, sequence: int) -> Record:
        with self._lock:
            found = pieces(self._segments, sequence - 1, min(sequence, self.durable))
        try:
            for record in read_pieces(self._files, found):
                return record
        except DataLoss:
            if sequence >= self.first:
                raise
        raise NotFound(f"the log has no durable record {sequence}")

    def _check_kept(self, after: int) -> None:
        forgotten = self._segments[0].header.previous if self._segments else self.durable
        if after < forgotten:
            raise DataLoss(
                f"{self._path}: the log keeps nothing up to {forgotten}: it cannot be read on from {after}",
                path=self._path,
            )

    # -- forgetting

    def truncate(self, below: int) -> None:
        with self._truncating:
            with self._lock:
                self._check()
                # A segment goes if the next one begins at or below `below` and already holds an acknowledged
                # record, so that the mark is always inside what is kept.
                upto = min(below, self.durable)
                count = sum(segment.header.first <= upto for segment in self._segments[1:])
                gone, kept = self._segments[:count], self._segments[count:]
            if not gone:
                return
            try:
                self._mark.put(first=kept[0].header.first)
                self._mark.sync()
            except OSError as error:
                self._fail(error)
                raise LogFailed(f"{self._mark.path}: {error}", path=self._mark.path) from error
            with self._lock:
                del self._segments[:count]
            try:
                for segment in gone:
                    self._files.unlink(segment.path)
                self._files.sync_directory(self._path)
            except OSError as error:  # the next open removes them
                logging.getLogger("kivi.log").warning("could not remove %s: %s", gone[0].path, error)

    @property
    def first(self) -> int:
        with self._lock:
            kept = [segment.header.first for segment in self._segments if segment.offsets]
            return kept[0] if kept else self.next

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            return {
                **self._counts,
                "segments": len(self._segments),
                "records": sum(len(segment.offsets) for segment in self._segments),
                "log_bytes": sum(segment.end for segment in self._segments),
                "inflight_records": self._inflight_records,
                "inflight_bytes": self._inflight_bytes,
                "failed": int(self._failed is not None),
            }

    # -- ending

    def abandon(self) -> None:
        """Stop as a kill would: the queue is dropped, no ``done`` is called, nothing is tidied. For tests."""
        self._abandoned = True
        self._fail(RuntimeError("abandoned"))
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._ready.notify_all()
            self._room.wake()
        self._thread.join()
        clean = self._failed is None
        self._room.stop(trim=clean)
        for segment in (self._writing, self._active):  # two, if the log failed before it could roll
            if segment is not None:
                self._room.trim(segment, truncate=clean)
        try:
            if clean and self._mark.current.in_use:
                self._mark.put(in_use=False, start=self.next)
                self._mark.sync()
        except OSError as error:
            logging.getLogger("kivi.log").error("could not close %s: %s", self._mark.path, error)
        finally:
            self._mark.close()


def _at_open(path: str, error: OSError) -> KiviError:
    if is_no_space(error):
        return DiskFull(f"no disk space to open the log in {path} ({error}): make room", path=path)
    return Unavailable(f"cannot open the log in {path}: {error}", path=path)
