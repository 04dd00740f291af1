"""Leases: the open snapshots, and what consolidation must keep for them (R14, R15).

A lease is (id, S, time limit). Registering S = W is atomic with reading W, and consolidation takes its boundary
F = W and the list of open S under the same mutex, so a snapshot is either registered before (its versions are kept)
or has S >= F (and needs none)::

    reader        lock  S = W, register S   unlock
    consolidation lock  F = W, keep = {open S < F}, horizon = F   unlock  ... folds up to F, keeping versions for keep

Past its limit, or cut because keeping its versions cost too much, a lease answers SnapshotTooOld: to reads, which
check *after* they have read, and to commits. No lease ever makes a writer wait.

**Snapshots of others.** A node of a cluster that holds a part of the shards asks others for the rest, at its own S.
So it tells them its watermark and its open S every so often (`told`), and each of them keeps these as if they were its
own, and folds no further than the watermark that it was told (`hold`): whatever S the other one opens next is not below
it.

A snapshot below the horizon that was not registered in time (``as_of`` a past timestamp) is *historical*: it can read
only what keeps history, which each table decides for itself (``snapshot``).
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final

from kivi.errors import InvalidArgument, ResourceExhausted, SnapshotTooOld
from kivi.model.tenants import Tenant
from kivi.model.types import shown
from kivi.mvcc.watermark import Watermark

__all__ = ["Lease", "Leases"]

_TOLD_MAX: Final = 256


@dataclass(slots=True, eq=False)
class Lease:
    """An open snapshot at ``ts``. ``ended`` says why it can no longer be read, or is empty. ``used``: it was read.
    ``tenant``: whose rows alone it shows, and takes."""

    id: int
    ts: int
    expires_at: float
    historical: bool
    opened_at: float = 0.0
    ended: str = ""
    used: bool = False
    pinned: bool = False
    tenant: Tenant | None = None


@dataclass(eq=False)
class Leases:
    """Thread safe. ``clock`` gives seconds that only ever move forward: not the wall clock, which may be set."""

    watermark: Watermark
    lock: threading.RLock
    _: KW_ONLY
    clock: Callable[[], float]
    ttl_s: float
    ttl_max_s: float
    max_leases: int

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, Lease] = {}
        self._count: dict[int, int] = {}
        self._kept: dict[int, int] = {}  # the same without historical leases, which keep nothing alive
        self._deadlines: list[tuple[float, int]] = []
        self._others: dict[int, Lease] = {}  # of other nodes' snapshots
        self._bound: int | None = None
        self._stay: int | None = None
        self.has_no_room: Callable[[], bool] = lambda: False
        """Whether memory cannot wait for other nodes: what they have not opened yet may be too old for them then."""
        self.horizon = self.watermark.value
        self.released_below_horizon = False
        self.cut = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, as_of: int | None = None, ttl_s: float | None = None, tenant: Tenant | None = None) -> Lease:
        """A lease on the watermark, or on ``as_of``. Raises InvalidArgument for a snapshot in the future."""
        with self.lock:
            self._expire()
            self._check_room(1)
            watermark = self.watermark.value
            ts = watermark if as_of is None else as_of
            if ts > watermark:
                raise InvalidArgument(f"as_of {ts} is past the watermark {watermark}: wait for it with min_snapshot")
            if ts < 0:
                raise InvalidArgument(f"as_of {ts} is negative")
            lease = self._opened(ts, self.clock() + self.limit(ttl_s))
            lease.tenant = tenant
            return lease

    def open_together(self, count: int) -> list[Lease]:
        """So many leases on the watermark, all on one S."""
        with self.lock:
            self._expire()
            self._check_room(count)
            ts, expires_at = self.watermark.value, self.clock() + self.ttl_s
            return [self._opened(ts, expires_at) for _ in range(count)]

    def _check_room(self, count: int) -> None:
        if len(self._open) + count > self.max_leases:
            raise ResourceExhausted(f"{self.max_leases} snapshots are open, which is the limit: close some first")

    def _opened(self, ts: int, expires_at: float) -> Lease:
        historical = ts < self.horizon and ts not in self._kept
        lease = Lease(next(self._ids), ts, expires_at, historical, self.clock())
        self._open[lease.id] = lease
        for counts in (self._count,) if historical else (self._count, self._kept):
            counts[ts] = counts.get(ts, 0) + 1
        self._note(lease)
        return lease

    def pin(self, ts: int) -> Lease:
        """A lease on ``ts``, past which nothing is folded yet, that neither ends by itself nor is cut."""
        with self.lock:
            lease = Lease(next(self._ids), ts, math.inf, False, self.clock(), pinned=True)
            self._open[lease.id] = lease
            for counts in (self._count, self._kept):
                counts[ts] = counts.get(ts, 0) + 1
            return lease

    def blind(self, tenant: Tenant | None = None) -> Lease:
        """The watermark as a start timestamp, for a transaction that reads nothing: no version is kept for it.

        It must not be read with. It never ends by itself: its commit is judged by the conflict facts.
        """
        return Lease(0, self.watermark.value, math.inf, False, tenant=tenant)

    def _note(self, lease: Lease) -> None:
        """Puts its deadline on the heap, which is rebuilt when most of it is about leases that have ended."""
        heapq.heappush(self._deadlines, (lease.expires_at, lease.id))
        if len(self._deadlines) > 2 * len(self._open) + 1_024:
            self._deadlines = [(held.expires_at, held.id) for held in self._open.values()]
            heapq.heapify(self._deadlines)

    def limit(self, ttl_s: float | None) -> float:
        """Seconds: those, or the default. Raises InvalidArgument for more than a snapshot may have."""
        if ttl_s is None:
            return self.ttl_s
        if not 0 < ttl_s <= self.ttl_max_s:
            raise InvalidArgument(
                f"a snapshot's time limit is between 0 and {self.ttl_max_s:.0f} s, not {shown(ttl_s)}"
            )
        return ttl_s

    def find(self, lease_id: int) -> Lease:
        lease = self._open.get(lease_id)
        if lease is None:
            raise SnapshotTooOld(f"snapshot {lease_id} is not open (any more): begin again")
        self.check(lease)
        return lease

    def check(self, lease: Lease) -> None:
        """Raises SnapshotTooOld if the lease has ended. Reads call it after they have read, commits before."""
        if not lease.ended and lease.expires_at <= self.clock():
            with self.lock:
                self._end(lease, "its time limit passed")
        if lease.ended:
            raise SnapshotTooOld(f"the snapshot at {lease.ts} can no longer be read: {lease.ended}; begin again")

    def renew(self, lease: Lease, ttl_s: float | None = None) -> None:
        """Extends the time limit from now; never shortens it. SnapshotTooOld if it has already ended."""
        with self.lock:
            self.check(lease)
            deadline = self.clock() + self.limit(ttl_s)
            if deadline > lease.expires_at:
                lease.expires_at = deadline
                self._note(lease)

    def release(self, lease: Lease) -> None:
        """Ends a lease; harmless if it has ended."""
        with self.lock:
            self._end(lease, "it was closed")

    def _end(self, lease: Lease, why: str) -> None:
        if lease.ended:
            return
        lease.ended = why
        if not lease.id:
            return
        del self._open[lease.id]
        for counts in (self._count,) if lease.historical else (self._count, self._kept):
            if counts[lease.ts] > 1:
                counts[lease.ts] -= 1
            else:
                del counts[lease.ts]
        if lease.ts < self.horizon:
            self.released_below_horizon = True

    def _expire(self) -> None:
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._open.get(lease_id)
            if lease is not None and lease.expires_at <= now:
                self._end(lease, "its time limit passed")

    def told(self) -> tuple[int, list[int]]:
        """For ``hold`` of other nodes: below which no S will be opened here, and those below it that are open."""
        with self.lock:
            self._expire()
            upto = self.watermark.value
            own = {held.ts for held in self._open.values() if not held.pinned and held.ts < upto}
            return upto, sorted(own)[:_TOLD_MAX]

    def hold(self, bound: int | None, wanted: set[int]) -> None:
        """What other nodes have told: nobody opens an S below ``bound`` but those ``wanted``. None: there are none.

        Of these the ones below the horizon are kept already, or it is too late.
        """
        with self.lock:
            self._bound = bound
            for ts in self._others.keys() - wanted:
                self._end(self._others.pop(ts), "it was closed")
            for ts in wanted - self._others.keys():
                if ts >= self.horizon or ts in self._kept:
                    self._others[ts] = self.pin(ts)

    def stay(self, ts: int | None) -> None:
        """Nothing above ``ts`` is folded from now on, whatever memory that takes; None: it may be again.

        Not below what is folded already: the watermark, or what was one.
        """
        with self.lock:
            self._stay = ts

    def _upto(self) -> int:
        upto = self.watermark.value if self._stay is None else min(self.watermark.value, self._stay)
        return upto if self._bound is None or self.has_no_room() else min(upto, self._bound)

    def boundaries(self) -> tuple[int, list[int]]:
        """(F, every open S < F in order): fold up to F, keeping a version for each of these. Raises the horizon."""
        with self.lock:
            self._expire()
            upto = self._upto()
            self.horizon = max(self.horizon, upto)
            return upto, sorted(ts for ts in self._count if ts < upto)

    def may_read(self, low: int, high: int) -> bool:
        """Whether a snapshot with low <= S < high is open, or the next one may be of this kind."""
        with self.lock:
            self._expire()
            return self._upto() < high or any(low <= ts < high for ts in self._count)

    def oldest(self) -> int | None:
        with self.lock:
            self._expire()
            return min([*self._count, *([] if self._bound is None else [self._upto()])], default=None)

    def ids(self) -> frozenset[int]:
        """Of all that are open."""
        with self.lock:
            self._expire()
            return frozenset(self._open)

    def oldest_age_s(self) -> float:
        """For how long the snapshot that was opened first has been open; 0 if there is none."""
        with self.lock:
            self._expire()
            first = next(iter(self._open.values()), None)  # in the order in which they were opened
            return 0.0 if first is None else self.clock() - first.opened_at

    def cut_oldest(self, why: str) -> bool:
        """Ends every lease on the oldest S that is no pin's, to free what it keeps. False if none is open below the
        horizon."""
        with self.lock:
            pinned = {held.ts for held in self._open.values() if held.pinned}
            oldest = min(self._count.keys() - pinned, default=None)
            if oldest is None or oldest >= self.horizon:
                return False
            for lease in [held for held in self._open.values() if held.ts == oldest]:
                self._end(lease, why)
                self.cut += 1
            return True
