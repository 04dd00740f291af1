"""The timeline: which commit timestamp was current at a moment, for ``as_of`` a datetime.

Commit times never decrease in log order, so "the state at moment t" is one prefix of the commits: the largest CTS
whose commit time is <= t. Recent commits are known to the microsecond; consolidation writes one row per 10 ms (the
moment rounded up, the last CTS in it), so an old moment resolves to a state at most 10 ms before it, never after.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from kivi.engine import Engine, WriteBatch
from kivi.errors import SnapshotTooOld
from kivi.spaces import time_key

__all__ = ["Timeline"]

STEP_US: Final = 10_000
_RECENT_US: Final = 60_000_000


class Timeline:
    """Thread safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._times: list[int] = []
        self._stamps: list[int] = []
        self._saved = 0

    def note(self, cts: int, time_us: int) -> None:
        """A commit entered the log. Called in log order."""
        with self._mutex:
            if self._times and self._times[-1] == time_us:
                self._stamps[-1] = cts
            else:
                self._times.append(time_us)
                self._stamps.append(cts)

    def at(self, time_us: int) -> int:
        """The largest CTS with a commit time <= ``time_us``; SnapshotTooOld if that is no longer known."""
        with self._mutex:
            i = bisect_right(self._times, time_us)
            if i:
                return self._stamps[i - 1]
        for _, value in self._engine.scan(time_key(0), time_key(max(0, time_us // 1000) + 1), reverse=True):
            return int.from_bytes(value, "little")
        raise SnapshotTooOld("no commit that old is remembered: ask for a later moment")

    def take(self, upto: int) -> Iterator[tuple[bytes, bytes]]:
        """Engine rows for commits at or below ``upto`` that are not saved; call ``forget`` once they are written."""
        with self._mutex:
            start, end = bisect_right(self._stamps, self._saved), bisect_right(self._stamps, upto)
            rows = {
                -(-t // STEP_US) * STEP_US: c
                for t, c in zip(self._times[start:end], self._stamps[start:end], strict=True)
            }
        return ((time_key(t // 1000), c.to_bytes(8, "little")) for t, c in rows.items())

    def forget(self, upto: int, now_us: int) -> None:
        """What lies at or below ``upto`` is saved; drops it from memory once it is older than a minute."""
        with self._mutex:
            self._saved = max(self._saved, upto)
            end = min(bisect_right(self._stamps, upto), bisect_right(self._times, now_us - _RECENT_US))
            if end > 1_000:
                del self._times[:end], self._stamps[:end]

    def trim(self, before_us: int, limit: int) -> WriteBatch | None:
        """Deletes up to ``limit`` rows for moments before ``before_us``, keeping the newest of them."""
        batch = WriteBatch()
        last: bytes | None = None
        for key, _ in self._engine.scan(time_key(0), time_key(max(0, before_us // 1000))):
            if last is not None:
                batch.delete(last)
            last = key
            if len(batch) >= limit:
                break
        return batch if len(batch) else None
