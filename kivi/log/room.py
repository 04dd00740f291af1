"""Room for records: preallocated files, made ahead of need by one thread, off the commit path.

A group of records enters a segment only if the segment has disk space for all of it, so running out of space
is noticed here, before a number is assigned, and is a definite answer; inside preallocated space a write
cannot run out. A spare file is called ``<n>.spare.tmp`` until the writer that fills it names it; recovery
deletes spares.

The first segment after an opening is small, and the next ones grow up to the size that the log was given: whoever opens
a store has a spare at once, most stores need little of it, and some file systems write all that is preallocated.

The same thread closes and trims segments that are full, and lets the log sync its mark once a second.

Invariant, under the log's lock: every request (`Room.wait`) is answered by a round that *began* after it, so
an old failure is never the answer to a new question. That is why service resumes by itself when there is
space again. After a failure a round follows every second, asked for or not, so that whoever is told (``told``,
before the answer is given) learns that there is space again also while nobody writes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from kivi.errors import DiskFull, KiviError, Unavailable
from kivi.log.direct import open_direct
from kivi.log.files import Files
from kivi.log.records import BLOCK_BYTES, SegmentHeader
from kivi.log.recovery import Segment
from kivi.runtime.files import is_no_space

__all__ = ["Room"]

_EVERY_S = 1.0
_FIRST_BYTES = 1 << 20
_GROWTH = 4
_NOBODY = SegmentHeader(bytes(16), 0, 0, 0, 0)


class Room:
    """The spare segment, and the thread that makes it.

    ``lock`` is the log's; ``tick`` is called about once a second; ``told`` with the outcome of every round.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        segment_bytes: int,
        lock: threading.Lock,
        tick: Callable[[], None],
        told: Callable[[KiviError | None], None],
    ) -> None:
        self._files = files
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._next_bytes = min(segment_bytes, _FIRST_BYTES)
        self._tick = tick
        self._told = told
        self._work = threading.Condition(lock)
        self._answered = threading.Condition(lock)
        self._spare: Segment | None = None
        self._full: list[Segment] = []
        self._wanted = self._started = self._done = self._made = 0
        self._error: OSError | None = None
        self._retry_at = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kivi-log-room", daemon=True)
        self._thread.start()

    # Everything from here to the next comment is called under the lock.

    def take(self, size: int) -> Segment | None:
        """The spare segment if it has room for ``size`` bytes of records; it is the caller's from now on."""
        spare = self._spare
        if spare is None or BLOCK_BYTES + size > spare.capacity:
            return None
        self._spare = None
        self._next_bytes = min(self._next_bytes * _GROWTH, self._segment_bytes)
        return spare

    def prepare(self) -> None:
        """Ask for a spare ahead of need; after a failure, at most once a second."""
        idle = self._spare is None and not self._wanted and self._started == self._done
        if idle and (self._error is None or time.monotonic() >= self._retry_at):
            self._wanted = self._next_bytes
            self._work.notify()

    def wait(self, size: int, stop: Callable[[], bool]) -> KiviError | None:
        """Ask for room for ``size`` bytes and wait for an answer: None (look again) or why there is none."""
        self._wanted = max(self._wanted, BLOCK_BYTES + size, self._next_bytes)
        mine = self._started + 1
        self._work.notify()
        self._answered.wait_for(lambda: self._done >= mine or stop())
        error = self._error
        if error is None or stop() or (self._spare and BLOCK_BYTES + size <= self._spare.capacity):
            return None
        return self._refusal(error)

    def _refusal(self, error: OSError) -> KiviError:
        what = f"no room for another log segment in {self._directory} ({error}); nothing was written"
        if is_no_space(error):
            return DiskFull(f"{what}: make room on the disk, and try again", path=self._directory)
        return Unavailable(what, path=self._directory)

    def wake(self) -> None:
        """Let waiting appends look again, because the log failed or is closing."""
        self._answered.notify_all()

    def retire(self, segment: Segment) -> None:
        """Trim and close the segment, which gets no more records."""
        self._full.append(segment)

    # Called without the lock.

    def stop(self, *, trim: bool) -> None:
        """End the thread; with ``trim`` remove the spare, without leave the files as a crash would."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self._thread.join()
        spare, self._spare = self._spare, None
        if spare is not None:
            self._discard(spare, unlink=trim)
        for segment in self._full:
            self.trim(segment, truncate=trim)

    def trim(self, segment: Segment, *, truncate: bool = True) -> None:
        """Give back what is preallocated behind the last record (an optimisation), and close the files."""
        try:
            if truncate and segment.fd >= 0 and segment.end < segment.capacity:
                self._files.truncate(segment.fd, segment.end)
        except OSError as error:
            logging.getLogger("kivi.log").warning("could not trim %s: %s", segment.path, error)
        self._discard(segment, unlink=False)

    def _run(self) -> None:
        synced_at = time.monotonic()
        while True:
            with self._work:
                self._work.wait_for(lambda: self._wanted or self._stopping, _EVERY_S)
                if self._stopping:
                    return
                if self._error is not None and not self._wanted and time.monotonic() >= self._retry_at:
                    self._wanted = self._next_bytes
                wanted, self._wanted = self._wanted, 0
                if wanted:
                    self._started += 1
                full, self._full = self._full, []
            if wanted:
                self._make(wanted)
            for segment in full:
                self.trim(segment)
            if time.monotonic() - synced_at >= _EVERY_S / 2:
                synced_at = time.monotonic()
                self._tick()

    def _make(self, wanted: int) -> None:
        with self._work:
            spare, self._spare = self._spare, None
        made, failed = spare, None
        if spare is None or spare.capacity < wanted:
            made = None
            if spare is not None:
                self._discard(spare, unlink=True)
            try:
                made = self._allocate(wanted)
            except OSError as error:
                failed = error
        self._told(None if failed is None else self._refusal(failed))
        with self._work:
            self._spare, self._error = made, failed
            self._retry_at = time.monotonic() + _EVERY_S
            self._done += 1
            self._answered.notify_all()

    def _allocate(self, size: int) -> Segment:
        self._made += 1
        path = os.path.join(self._directory, f"{self._made}.spare.tmp")
        segment = Segment(path, _NOBODY, capacity=size)
        try:
            segment.fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            self._files.allocate(segment.fd, size)
            self._files.fsync(segment.fd)
            segment.direct = open_direct(self._files, path)
        except OSError:
            self._discard(segment, unlink=True)
            raise
        return segment

    def _discard(self, segment: Segment, *, unlink: bool) -> None:
        fds = [fd for fd in (segment.fd, segment.direct) if fd >= 0]
        segment.fd = segment.direct = -1
        try:
            for fd in fds:
                self._files.close(fd)
            if unlink:
                self._files.unlink(segment.path)
        except OSError as error:
            logging.getLogger("kivi.log").warning("could not close %s: %s", segment.path, error)
