"""The timeline: which commit timestamp was current at a moment, for ``as_of`` a datetime.

Commit times never decrease in log order, so "the state at moment t" is one prefix of the commits: the largest CTS
whose commit time is <= t. To the microsecond, and for ever: a moment between two commits is after precisely the first.

::

    in the log        each record has its commit time; replay notes what lies above the recorded position
    in memory         commits that no pass has folded yet
    in the engine     all others that are remembered: each pass writes the commits that it folds as one row, or a few
                      (``kivi.encoding.commit_times``), in the batch that records its position. So a crash loses none of
                      them

A moment is looked up in memory first and in the engine second: rows are written before memory forgets, so what has
left memory between the two looks is found by the second one.

What a commit costs on disk, measured as the table files of RocksDB that hold nothing else: 15 bytes where each pass
folds one commit, 3.8 where it folds ten, 2.4 for a hundred and 1.3 for 5,000. A lookup in the engine takes 45 us in a
row of one moment, 120 us in one of 4,096.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

from kivi.encoding.commit_times import Stamps, decode_moments, encode_moments
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, space_prefix, time_key
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, SnapshotTooOld

__all__ = ["Timeline"]

_FEW: Final = 256


class Timeline:
    """Thread safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._times = array("Q")
        self._stamps = array("Q")
        self._asked: tuple[int, int | None] | None = None
        """The CTS that ``time_of`` was asked for last, and the answer, which stays."""

    def note(self, first: int, time_us: int, commits: int = 1) -> None:
        """So many commits, with consecutive CTS, entered the log together. Called in log order."""
        # Each of several commits in one microsecond has an entry: a pass may fold some of these and not the last.
        with self._mutex:
            if commits <= _FEW:  # NumPy gives the interpreter to another thread meanwhile, if there is one
                self._times.extend([time_us] * commits)
                self._stamps.extend(range(first, first + commits))
            else:
                self._times += array("Q", (time_us,)) * commits
                self._stamps.frombytes(np.arange(first, first + commits, dtype=np.uint64).tobytes())

    def at(self, time_us: int) -> int:
        """The largest CTS with a commit time <= ``time_us``; SnapshotTooOld if that is no longer known.

        Raises DataLoss for a row that does not decode.
        """
        with self._mutex:
            i = bisect_right(self._times, time_us)
            if i:
                return self._stamps[i - 1]
        first = space_prefix(Space.TIME)
        for key, value in self._engine.scan(first, time_key(time_us + 1) if time_us >= 0 else first, reverse=True):
            times, stamps = decode_moments(key, value)
            return int(stamps[np.searchsorted(times, np.uint64(time_us), "right") - 1])
        raise SnapshotTooOld("no commit that old is remembered: ask for a later moment")

    def time_of(self, ts: int) -> int | None:
        """The commit time of the snapshot ``ts``, that of its newest commit; None: it is no longer known.

        Of those that have been folded a row has the last of each microsecond: a CTS before it may be one of these, or
        that of no commit, whose time then is the next commit's. Raises DataLoss.
        """
        asked = self._asked
        if asked is None or asked[0] != ts:
            asked = self._asked = ts, self._time_of(ts)
        return asked[1]

    def _time_of(self, ts: int) -> int | None:
        with self._mutex:
            if i := bisect_right(self._stamps, ts):
                return self._times[i - 1]
        first = space_prefix(Space.TIME)
        ends = [next(self._engine.scan(first, prefix_end(first), reverse=reverse), None) for reverse in (False, True)]
        if ends[0] is None or ends[1] is None:
            return None
        (oldest_times, oldest), (times, stamps) = (decode_moments(*row) for row in ends if row)
        if ts < oldest[0]:
            return None
        if ts >= stamps[0]:
            return int(times[min(int(np.searchsorted(stamps, np.uint64(ts))), len(times) - 1)])
        moments = range(int(oldest_times[0]), int(times[0]) + 1)  # rows are found by their times alone
        try:
            return moments[bisect_left(moments, ts, key=self.at)]
        except SnapshotTooOld:  # trimmed meanwhile
            return None

    def times_of(self, stamps: Stamps) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Of each CTS its commit time, and whether that is still known. Raises DataLoss."""
        with self._mutex:
            times = [np.array(self._times, np.uint64)]
            known = [np.array(self._stamps, np.uint64)]
        oldest = int(stamps.min()) if len(stamps) else 0
        if len(stamps) and (not len(known[0]) or oldest < known[0][0]):
            first = space_prefix(Space.TIME)
            for key, value in self._engine.scan(first, prefix_end(first), reverse=True):
                moments, newest = decode_moments(key, value)
                times.insert(0, moments)
                known.insert(0, newest)
                if newest[0] <= oldest:
                    break
        # What was written meanwhile may be in both: of one CTS the time is the same.
        every, moments = np.concatenate(known), np.concatenate(times)
        order = np.argsort(every, kind="stable")
        every, moments = every[order], moments[order]
        if not len(every):
            return np.zeros(len(stamps), np.int64), np.zeros(len(stamps), np.bool_)
        at = np.minimum(np.searchsorted(every, stamps), len(every) - 1)
        return moments[at].astype(np.int64), (stamps >= every[0]) & (stamps <= every[-1])

    def take(self, upto: int) -> list[tuple[bytes, bytes]]:
        """Engine rows for the commits at or below ``upto``; call ``forget`` once they are written.

        The first may replace the newest row there is: then all of that row's commits, which all have one time, come
        before a commit of the same time.
        """
        with self._mutex:
            end = bisect_right(self._stamps, upto)
            times, stamps = self._times[:end], self._stamps[:end]
        return encode_moments(np.array(times, np.uint64), np.array(stamps, np.uint64))

    def forget(self, upto: int) -> None:
        """Drops what lies at or below ``upto``: the engine has it."""
        with self._mutex:
            end = bisect_right(self._stamps, upto)
            del self._times[:end], self._stamps[:end]

    def trim(self, before_us: int, limit: int) -> WriteBatch | None:
        """Deletes up to ``limit`` rows that only say something about moments before ``before_us``, oldest first."""
        batch = WriteBatch()
        last: bytes | None = None
        for key, _ in self._engine.scan(time_key(0), time_key(max(0, before_us))):
            if last is not None:  # the newest of them stays: it answers from before the limit to the next row
                batch.delete(last)
            last = key
            if len(batch) >= limit:
                break
        return batch if len(batch) else None

    def check(self) -> int:
        """Decodes every row of the engine; how many moments they hold. Raises DataLoss, also for rows out of order."""
        count = 0
        last_us = last_cts = -1
        prefix = space_prefix(Space.TIME)
        for key, value in self._engine.scan(prefix, prefix_end(prefix)):
            times, stamps = decode_moments(key, value)
            if times[0] < last_us or stamps[0] <= last_cts:
                raise DataLoss(
                    f"the commit times at key 0x{key.hex()} begin before those in front end: restore a backup"
                )
            last_us, last_cts = int(times[-1]), int(stamps[-1])
            count += len(times)
        return count
