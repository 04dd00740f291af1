"""The log of another process on this machine, followed while that one writes it.

::

    the owner     writes a record, syncs it, writes the mark, acknowledges
    a follower    reads the mark -> reads the records up to it, each checked by the chain -> hands them out

**Invariants.** What is handed out was acknowledged, or may be at any moment: it lies at or below the mark, so it is
durable, and no start of the owner gives one of its numbers again (``kivi.log.mark``). It is handed out in order, once,
with nothing left out: the chain of checksums goes on from the record that the follower began behind. Nothing is written
here, and the owner does not know of it: it truncates its log as it likes, and a follower that was left behind says so
(``LeftBehind``), and begins anew with another copy.

A record that was seen before it was whole, or a page of the file that was cached before the owner wrote past the cache,
has a wrong checksum; so what does not check out is read again for a while before it is called damaged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

from kivi.errors import DataLoss, InvalidArgument, KiviError, NotFound
from kivi.log import CommitLog, Done, Entry, Kind, Record, Ticket
from kivi.log.files import Files
from kivi.log.mark import MARK_NAME, Mark, parse_mark
from kivi.log.records import BLOCK_BYTES, VERSION, End, Found, SegmentHeader, is_segment_name, walk
from kivi.runtime.histogram import Histogram

__all__ = ["FollowedLog", "LeftBehind"]

_WINDOW_BYTES: Final = 64 << 10
"""What is read at a time: a record that has just come is small most often."""
_TAKEN_BYTES: Final = 16 << 20
"""About so much is handed out at a time."""
_PATIENCE_S: Final = 5.0
"""For so long a record that is at or below the mark may have a wrong checksum."""


class LeftBehind(DataLoss):
    """The owner has forgotten records that this follower has not read: it has to begin with another copy."""


class FollowedLog(CommitLog):
    """The log in ``directory``, of the store ``store_id``, behind the record ``after``. For the thread that follows.

    Raises NotFound where there is no log, LeftBehind if it begins behind ``after``.
    """

    is_followed = True

    def __init__(self, directory: str, *, after: int, store_id: bytes) -> None:
        self._files = Files()
        self._directory = directory
        self._store_id = store_id
        self.last = self.durable = after
        self.next = after + 1
        self.last_time_us = 0
        self.sync_times = Histogram()  # empty: it syncs nothing
        self.on_room = lambda error: None
        self.checked_at = 0.0
        """When the mark was last read and found to be at or below ``last``: ``time.monotonic()``."""
        self.failed: KiviError | None = None
        """What ended following."""
        self._stages: dict[int, tuple[str, End]] = {}
        self._fd = -1
        self._path = ""
        self._end = End(0, 0, 0, 0, None)
        self._wrong_since: float | None = None
        try:
            self._mark = self._files.open(os.path.join(directory, MARK_NAME), os.O_RDONLY)
        except FileNotFoundError:
            raise NotFound(f"{directory} has no log that could be followed") from None
        if self.mark().store_id != store_id:
            self._files.close(self._mark)
            raise NotFound(f"{directory} has the log of another store")
        self._seek(after)

    # -- following --------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """What the owner has promised so far. Raises DataLoss."""
        for _ in range(100):  # both slots are seen torn only if it is written twice within one read
            found = parse_mark(self._files, self._mark)
            if found is not None:
                return found
            time.sleep(0.001)
        path = os.path.join(self._directory, MARK_NAME)
        raise DataLoss(f"{path}: both slots are damaged", path=path, offset=0)

    def news(self) -> list[Record]:
        """The next records, in order: some of those that there are, none if there are none. Raises LeftBehind."""
        asked_at, mark = time.monotonic(), self.mark()
        if mark.sequence <= self.last:
            self.checked_at = asked_at
            return []
        taken, size = list[Record](), 0
        while self.last < mark.sequence and size < _TAKEN_BYTES:
            before = self.last
            for found in self._read(mark.sequence):
                taken.append(found.record())
                size += len(found.body)
                self.last, self.last_time_us = found.last, found.time_us
                if size >= _TAKEN_BYTES:
                    break
            if self.last == before and not self._roll(mark):
                break
        self.durable, self.next = self.last, self.last + 1
        if self.last >= mark.sequence:
            self.checked_at = asked_at
        return taken

    def _read(self, upto: int) -> Iterator[Found]:
        """Records of the segment that is open, if one is."""
        if self._fd < 0:
            return
        for item in walk(self._files, self._fd, self._files.size(self._fd), self._end, window=_WINDOW_BYTES):
            if isinstance(item, End) or item.sequence > upto:
                return
            if item.kind == Kind.STAGE:
                self._stages[item.sequence] = self._path, self._end
            self._wrong_since = None
            self._end = End(item.end, item.last, item.time_us, item.checksum, None)
            yield item

    def _roll(self, mark: Mark) -> bool:
        """The segment that is open has no more: whether there is a next one that goes on from it."""
        if self._seek(self.last, continues=True):
            return True
        now = time.monotonic()
        self._wrong_since = self._wrong_since or now
        if now - self._wrong_since > _PATIENCE_S:
            raise DataLoss(
                f"{self._path}, offset {self._end.offset}: record {self.last + 1} is not there as it was written, and "
                f"{mark.sequence} was acknowledged",
                path=self._path,
                offset=self._end.offset,
            )
        return False

    def _seek(self, after: int, *, continues: bool = False) -> bool:
        """Opens the segment that has the record behind ``after``; False if there is no other than is open."""
        for header, path in self._segments(after):
            if path == self._path:
                return False
            fd = self._files.open(path, os.O_RDONLY)
            # An empty segment may begin after a gap in the numbers.
            end = End(BLOCK_BYTES, header.first - 1, header.previous_time_us, header.chain, None)
            if header.previous < after:
                for item in walk(self._files, fd, self._files.size(fd), end, bodies=False):
                    if isinstance(item, End) or item.sequence > after:
                        break
                    end = End(item.end, item.last, item.time_us, item.checksum, None)
            reached = header.previous if end.offset == BLOCK_BYTES else end.sequence
            if reached != after or (continues and end.chain != self._end.chain):
                self._files.close(fd)
                raise self._left_behind(after)
            if self._fd >= 0:
                self._files.close(self._fd)
            self._fd, self._path, self._end = fd, path, end
            self.last_time_us = max(self.last_time_us, end.time_us)
            return True
        if self._fd < 0 and self.mark().sequence > after:
            raise self._left_behind(after)
        return False

    def _segments(self, after: int) -> Iterator[tuple[SegmentHeader, str]]:
        """The newest segment that begins at or before the record behind ``after``, if there is one."""
        names = sorted(filter(is_segment_name, self._files.listdir(self._directory)), reverse=True)
        for name in names:
            path = os.path.join(self._directory, name)
            try:
                fd = self._files.open(path, os.O_RDONLY)
            except FileNotFoundError:  # truncated away
                continue
            try:
                header = SegmentHeader.parse(self._files.pread(fd, BLOCK_BYTES, 0))
            finally:
                self._files.close(fd)
            if isinstance(header, str):  # being made
                continue
            if header.store_id != self._store_id or header.version > VERSION:
                raise DataLoss(f"{path} is no segment of the log that is followed", path=path, offset=0)
            if header.previous <= after:
                yield header, path
                return
        if names and int(names[-1][:20]) > after + 1:
            raise self._left_behind(after)

    def _left_behind(self, after: int) -> LeftBehind:
        return LeftBehind(
            f"{self._directory} does not have what came behind record {after} any more", path=self._directory
        )

    # -- the log, as a store sees it ----------------------------------------------------------------------------

    def replay(self, after: int) -> Iterator[Record]:
        """None: they are followed."""
        return iter(())

    def read(self, sequence: int) -> Record:
        known = self._stages.get(sequence)
        try:
            if known is None:
                raise NotFound(f"record {sequence} is not among those that were followed")
            fd = self._files.open(known[0], os.O_RDONLY)
        except (NotFound, FileNotFoundError):
            known = None
        if known is None:
            return self._searched(sequence)
        try:
            for item in walk(self._files, fd, self._files.size(fd), known[1], window=_WINDOW_BYTES):
                if not isinstance(item, End) and item.sequence == sequence:
                    return item.record()
                break
        finally:
            self._files.close(fd)
        raise self._left_behind(sequence - 1)

    def _searched(self, sequence: int) -> Record:
        """A record from before the copy that this began with."""
        for header, path in self._segments(sequence - 1):
            fd = self._files.open(path, os.O_RDONLY)
            try:
                start = End(BLOCK_BYTES, header.first - 1, header.previous_time_us, header.chain, None)
                for item in walk(self._files, fd, self._files.size(fd), start):
                    if isinstance(item, End):
                        break
                    if item.sequence <= sequence <= item.last:
                        return item.record()
            finally:
                self._files.close(fd)
        raise self._left_behind(sequence - 1)

    def append(self, records: Sequence[Entry], done: Done) -> Ticket:
        raise InvalidArgument("this process follows a store and writes nothing: commit at the server that owns it")

    def truncate(self, below: int) -> None:
        for sequence in list(self._stages):  # in one step: a thread may be following
            if sequence < below:
                self._stages.pop(sequence, None)

    @property
    def first(self) -> int:
        return self.durable + 1

    def stats(self) -> dict[str, int | float]:
        return {"log_bytes": 0, "failed": 0}

    def close(self) -> None:
        for fd in (self._fd, self._mark):
            if fd >= 0:
                self._files.close(fd)
        self._fd = self._mark = -1
