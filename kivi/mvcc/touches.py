"""Which rows of aggregates commits have touched lately: what a guard on one is judged by, in a log that orders.

Where one process orders by itself, a guard on a row of an aggregate is compared with the row's newest operation, which
pending and base know (``kivi.mvcc.commit``). What these know is no function of the log's prefix: base may be ahead of
the position, has forgotten rows below a floor, and was folded when its node liked.

::

    guard      comes to its verdict, and nobody watches its aggregate: every node watches it from this number on
    commit     touches rows of a watched aggregate: the buckets of their keys get its CTS, whatever becomes of the rows
    guard      conflicts if its bucket has a CTS above its snapshot, or if its snapshot is below the watch's beginning

**The invariant.** A guard that passes was on a row that no commit between its snapshot and its own CTS touched: every
such commit entered while its aggregate was watched, and left its CTS, or a larger one, in the row's bucket. All of it
is a function of the log's prefix, and is saved as of the position (``kivi.mvcc.prefix``). So no conflict is missed, by
any node; two rows of one bucket, or a watch that begins, make a conflict of none. The transaction that is refused since
a watch has begun passes when it runs again.

Nobody pays who guards no aggregate: a watch ends ``WATCHED_US`` after the last guard, by the log's time. What it costs,
and how often a conflict is none: decision 0072.

The bucket of a key is a part of the format: nodes that differ in it would come to other verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.mvcc.applied import Applied

__all__ = ["BUCKETS", "WATCHED_US", "Touches", "Watch", "buckets_of"]

Array = Any
WATCHED_US: Final = 600_000_000
_BITS: Final = 14
BUCKETS: Final = 1 << _BITS
"""Of each watched aggregate: 128 KiB, which are written with the position when they have changed."""
_FACTOR: Final = 0x9E3779B97F4A7C15
_ROWS: Final = 65_536


class Watch(NamedTuple):
    """Every commit above ``since`` that touched a row of ``table`` is known; ``asked_us``: the last guard."""

    table: int
    since: int
    asked_us: int


class Touches:
    """Not thread safe: lives under the entry lock."""

    def __init__(self) -> None:
        self.watches: dict[int, Watch] = {}
        self.newest_in: dict[int, Array] = {}
        """Of each watched aggregate: by bucket the CTS of the newest commit that touched a row there, or 0."""

    def ask(self, table: int, last: int, time_us: int) -> Watch:
        """There is a guard, behind the number ``last``: the aggregate is watched from here on, or for longer."""
        known = self.watches.get(table)
        watch = Watch(table, last if known is None else known.since, time_us)
        self.watch(watch)
        return watch

    def watch(self, watch: Watch) -> None:
        self.watches[watch.table] = watch
        if watch.table not in self.newest_in:
            self.newest_in[watch.table] = np.zeros(BUCKETS, np.uint64)

    def over(self, now_us: int) -> list[int]:
        """The aggregates whose rows nobody has guarded for long."""
        return [watch.table for watch in self.watches.values() if now_us - watch.asked_us > WATCHED_US]

    def end(self, table: int) -> None:
        self.watches.pop(table, None)
        self.newest_in.pop(table, None)

    def touched(self, applied: Applied) -> dict[int, Array]:
        """The buckets of the rows that commits touch, by each watched aggregate of which they touch some."""
        keys: dict[int, list[pa.LargeBinaryArray]] = {}
        few: dict[int, list[bytes]] = {}
        for _, table, key, _ in applied.rows:
            if table in self.watches:
                few.setdefault(table, []).append(key)
        for table, some in few.items():
            keys[table] = [pa.array(some, pa.large_binary())]
        for table, run in applied.runs:
            if table in self.watches and run.rows:
                keys.setdefault(table, []).append(run.keys)
        found: dict[int, Array] = {}
        for table, parts in keys.items():
            marked = np.zeros(BUCKETS, np.bool_)
            for part in parts:
                marked[buckets_of(part)] = True
            found[table] = np.flatnonzero(marked)
        return found

    def touch(self, touched: Iterable[tuple[int, Array]], cts: int) -> None:
        """Commits up to this CTS, which is not below any before, touched rows of these buckets."""
        for table, buckets in touched:
            if table in self.newest_in:
                self.newest_in[table][buckets] = cts

    def newest(self, table: int, key: bytes) -> int:
        """A CTS not below that of the newest commit that touched a row of a watched aggregate."""
        bucket = buckets_of(pa.array([key], pa.large_binary()))[0]
        return max(self.watches[table].since, int(self.newest_in[table][bucket]))


def buckets_of(keys: pa.LargeBinaryArray) -> Array:
    """The bucket of each key, a uint16: the upper bits of a polynomial over its bytes, modulo 2^64."""
    return np.concatenate([_buckets(keys.slice(at, _ROWS)) for at in range(0, max(1, len(keys)), _ROWS)])


def _buckets(keys: pa.LargeBinaryArray) -> Array:
    _, offsets, data = keys.buffers()
    if not len(keys):
        return np.zeros(0, np.uint16)
    ends = np.frombuffer(offsets, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    begins, sizes = ends[:-1], np.diff(ends)
    values = np.frombuffer(data or b"", np.uint8)
    hashed = sizes.astype(np.uint64)
    whole, power = int(sizes.min()), 1
    for at in range(int(sizes.max())):
        rows = slice(None) if at < whole else np.flatnonzero(sizes > at)
        power = power * _FACTOR & (1 << 64) - 1
        hashed[rows] += values[begins[rows] + at] * np.uint64(power)
    hashed ^= hashed >> np.uint64(32)
    return ((hashed * np.uint64(_FACTOR)) >> np.uint64(64 - _BITS)).astype(np.uint16)
