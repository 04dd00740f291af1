"""A log in memory, which can hold groups back and crash on purpose.

With ``hold=True`` a group stays in flight until `MemoryLog.release`, so that a test can decide in
which state a crash finds it. ``done`` is called outside the lock by one thread of the log, as in every
log.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kivi.errors import DataLoss, NotFound, Unavailable
from kivi.log import MAX_RECORD_BYTES, CommitLog, Done, Entry, LogFailed, Record, Ticket
from kivi.runtime.histogram import Histogram

__all__ = ["MemoryLog"]

_CRASH_GAP = 1000


@dataclass(slots=True)
class _Group:
    records: list[Record]
    done: Done


class MemoryLog(CommitLog):
    """Records in a list. ``clock`` gives nanoseconds since 1970."""

    def __init__(
        self,
        *,
        hold: bool = False,
        clock: Callable[[], int] = time.time_ns,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self.hold = hold
        self.sync_times = Histogram()  # empty: there is nothing to sync
        self.on_room = lambda error: None
        self._clock = clock
        self._max_record_bytes = max_record_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._records: list[Record] = []
        self._inflight: list[_Group] = []
        self._released = 0
        self._calling = False
        self.last = self.durable = self.last_time_us = self._forgotten = 0
        self.next = 1
        self._failed: LogFailed | None = None
        self._start()

    def _start(self) -> None:
        self._closed = False
        self._thread = threading.Thread(target=self._complete, name="kivi-log-memory", daemon=True)
        self._thread.start()

    def append(self, records: Sequence[Entry], done: Done) -> Ticket:
        self._sizes(records)
        bodies = [(kind, b"".join(bytes(part) for part in parts), count) for kind, parts, count, _ in records]
        with self._lock:
            self._check()
            first = self.next
            self.last_time_us = max(self.last_time_us, self._clock() // 1000)
            made = list[Record]()
            for kind, body, count in bodies:
                made.append(Record(self.next, self.last_time_us, kind, body, count))
                self.next += count
            self.last = self.next - 1
            self._inflight.append(_Group(made, done))
            if not self.hold:
                self._released = len(self._inflight)
                self._changed.notify_all()
            return Ticket(first, self.last, self.last_time_us)

    def release(self, count: int | None = None) -> None:
        """Make the next ``count`` groups in flight (None: all) durable; returns when their ``done`` ran."""
        with self._changed:
            self._released = len(self._inflight) if count is None else min(count, len(self._inflight))
            self._changed.notify_all()
            self._changed.wait_for(lambda: (self._released == 0 and not self._calling) or self._closed)

    def fail(self, message: str = "the sync failed") -> None:
        """Fail for good: everything in flight and every later append gets `LogFailed`."""
        with self._changed:
            self._failed = LogFailed(message)
            self._released = len(self._inflight)
            self._changed.notify_all()

    def crash(self, keep: int = 0) -> None:
        """Lose everything in flight but its first ``keep`` records, call no ``done``, and open again."""
        with self._changed:
            inflight = [record for group in self._inflight for record in group.records]
            self._inflight.clear()
            self._released = 0
            self._records += inflight[:keep]
            if len(inflight) > keep:
                self.next = self.last + _CRASH_GAP
            if self._records:
                self.last = self.durable = max(self.durable, self._records[-1].last)
                self.last_time_us = self._records[-1].time_us
            self._closed = True
            self._changed.notify_all()
        self._join()
        self._failed = None
        self._start()

    def reopen(self) -> None:
        """Be open again after `close`."""
        self._failed = None
        self._start()

    def _complete(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._released or self._closed)
                if not self._released:
                    return
                group = self._inflight.pop(0)
                self._released -= 1
                error = self._failed
                if error is None:
                    self._records += group.records
                    self.durable = group.records[-1].last
                self._calling = True
            try:
                group.done(error)
            finally:
                with self._changed:
                    self._calling = False
                    self._changed.notify_all()

    def replay(self, after: int) -> Iterator[Record]:
        with self._lock:
            self._check_kept(after)
            if after > self.durable:
                raise DataLoss(f"the log ends at {self.durable}, before {after}: records are missing")
            return iter(self._records[self._position(after) :])

    def read(self, sequence: int) -> Record:
        with self._lock:
            position = self._position(sequence - 1)
            if position < len(self._records) and self._records[position].sequence <= sequence:
                return self._records[position]
            raise NotFound(f"the log has no record {sequence}")

    def truncate(self, below: int) -> None:
        with self._lock:
            count = self._position(min(below - 1, self.durable))
            if count:
                self._forgotten = self._records[count - 1].last
                del self._records[:count]

    def _position(self, after: int) -> int:
        return bisect_right(self._records, after, key=lambda record: record.last)

    def _check(self) -> None:
        if self._failed is not None:
            raise LogFailed(str(self._failed))
        if self._closed:
            raise Unavailable("the log is closed: open the store again")

    def _check_kept(self, after: int) -> None:
        if after < self._forgotten:
            raise DataLoss(f"the log keeps nothing up to {self._forgotten}: cannot read on from {after}")

    @property
    def first(self) -> int:
        return self._records[0].sequence if self._records else self.durable + 1

    def stats(self) -> dict[str, int | float]:
        with self._lock:
            return {
                "records": len(self._records),
                "inflight_groups": len(self._inflight),
                "log_bytes": sum(len(record.body) for record in self._records),
            }

    def close(self) -> None:
        with self._changed:
            self._released = len(self._inflight)
            self._closed = True
            self._changed.notify_all()
        self._join()

    def _join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join()
