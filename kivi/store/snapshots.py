"""Snapshots as callers ask for them: now, at a timestamp, or at a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kivi.errors import SnapshotTooOld, Unavailable
from kivi.model.tenants import Tenant
from kivi.mvcc.commit import Committer
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.replicated import ReplicatedCommitter
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.watermark import Watermark

__all__ = ["Snapshots"]


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Thread safe."""

    leases: Leases
    watermark: Watermark
    timeline: Timeline
    committer: Committer
    check_open: Callable[[], None]

    def begin(
        self,
        *,
        as_of_ts: int | None = None,
        as_of_us: int | None = None,
        min_snapshot: int | None = None,
        timeout_s: float | None = None,
        ttl_s: float | None = None,
        max_staleness_s: float | None = None,
        fresh: bool = False,
        tenant: Tenant | None = None,
    ) -> Lease:
        """A lease on the watermark, on a commit timestamp or on a moment (microseconds UTC).

        With ``min_snapshot`` it waits until the watermark is there; Unavailable when the time is up. A moment that is
        over waits likewise, for the commits up to it that are still in flight, or that other nodes have made and this
        one has yet to hear of: it has one answer, now and later, wherever it is asked for. One that is not over by the
        log's time is now: all that was acknowledged before the call.

        A commit timestamp past the watermark may be of another node, and is waited for if it is.

        ``fresh``: with all that was acknowledged before the call, by any node. ``max_staleness_s``: with all that was
        acknowledged so long ago; Unavailable where that cannot be said (R27).
        """
        self.check_open()
        timeout_s = 10.0 if timeout_s is None else timeout_s
        if fresh or max_staleness_s == 0:
            min_snapshot = max(min_snapshot or 0, self.committer.newest(timeout_s))
        elif max_staleness_s is not None:
            min_snapshot = max(min_snapshot or 0, self._no_older_than(max_staleness_s, timeout_s))
        if min_snapshot is not None:
            self._reach(min_snapshot, timeout_s)
        if as_of_us is not None:
            self._reach(self.committer.newest_until(as_of_us, timeout_s), timeout_s)
            over = as_of_us < self.committer.now_us()
            with self.committer.entry_lock:  # whoever has a commit time by now has told the timeline
                pass
            as_of_ts = self.timeline.at(as_of_us)
            if over:
                self._reach(as_of_ts, timeout_s)
            else:
                as_of_ts = min(as_of_ts, self.watermark.value)
        elif as_of_ts is not None:
            self.hear_of(as_of_ts, timeout_s)
        return self.leases.open(as_of_ts, ttl_s, tenant)

    def hear_of(self, ts: int, timeout_s: float = 10.0) -> None:
        """Waits for what other nodes have committed, where this one has yet to hear of a commit at ``ts`` (C6): what is
        past the watermark after that nobody has committed. Raises Unavailable when the time is up."""
        if ts > self.watermark.value:
            self._reach(self.committer.newest(timeout_s), timeout_s)

    def _no_older_than(self, bound_s: float, timeout_s: float) -> int:
        """A commit timestamp that has all that was acknowledged so long ago: one that is known, or else that of now, if
        it comes to be known within the bound. Raises Unavailable."""
        age_s, ts = self.committer.staleness()
        if age_s <= bound_s:
            return ts
        with contextlib.suppress(Unavailable):
            return self.committer.newest(min(bound_s, timeout_s))
        better = self.committer.fresher()
        raise Unavailable(
            f"what this node answers may be {age_s:.1f} s old, and at most {bound_s:g} s was asked for: "
            f"ask {better or 'another one'}",
            **({} if better is None else {"addresses": [better]}),  # where clients ask then
        )

    @contextlib.contextmanager
    def opened(self, **wanted: Any) -> Iterator[Lease]:
        """``begin``, and ``release`` at the end of the block."""
        lease = self.begin(**wanted)
        try:
            yield lease
        finally:
            self.release(lease)

    def begin_shared(
        self, timeout_s: float | None, ttl_s: float | None, max_staleness_s: float | None = None
    ) -> tuple[bytes, Lease] | None:
        """A snapshot under a name that every node of the cluster knows, which has all that was acknowledged before the
        call; None if this is no node. Raises Unavailable when the time is up; with ``max_staleness_s`` a node that is
        cut off need not wait so long to say so, and names another one."""
        if not isinstance(self.committer, ReplicatedCommitter):
            return None
        self.check_open()
        timeout_s = 10.0 if timeout_s is None else timeout_s
        if max_staleness_s:
            self._no_older_than(max_staleness_s, timeout_s)
        name, number = self.committer.pin(ttl_s, timeout_s)
        self._reach(number, timeout_s)
        return name, self.committer.pins.find(name)

    def find_shared(self, name: bytes) -> Lease | None:
        """What any node has begun; None if this is no node. Raises SnapshotTooOld if it has ended."""
        return self.committer.pins.find(name) if isinstance(self.committer, ReplicatedCommitter) else None

    def renew_shared(self, name: bytes, ttl_s: float | None) -> bool:
        """Keeps it for so long from now, on every node; 0 ends it. False if this is no node."""
        if not isinstance(self.committer, ReplicatedCommitter):
            return False
        if ttl_s != 0:
            self.committer.pins.find(name)
        self.committer.prolong(name, ttl_s)
        return True

    @contextlib.contextmanager
    def kept_by_all(self, timeout_s: float, ttl_s: float) -> Iterator[tuple[Lease, Callable[[], None]]]:
        """``begin_shared`` of a node for as long as the block takes, and what is to be called every so often meanwhile:
        whoever dies over it lets go of the snapshot when the time is up."""
        shared = self.begin_shared(timeout_s, ttl_s)
        assert shared is not None
        name, lease = shared
        renewed = self.leases.clock()

        def goes_on() -> None:
            nonlocal renewed
            if self.leases.clock() - renewed > ttl_s / 4:
                renewed = self.leases.clock()
                self.renew_shared(name, ttl_s)

        try:
            yield lease, goes_on
        finally:
            self.renew_shared(name, 0)

    def _reach(self, ts: int, timeout_s: float) -> None:
        """Waits until ``ts`` can be read. Raises Unavailable when the time is up."""
        if not self.watermark.wait_for(ts, timeout_s):
            raise Unavailable(f"the snapshot {ts} is not readable yet; the watermark is {self.watermark.value}")

    def begin_together(self, count: int) -> list[Lease]:
        """So many leases on the watermark, all on one timestamp."""
        self.check_open()
        return self.leases.open_together(count)

    def renew(self, lease_id: int, ttl_s: float | None = None) -> None:
        self.leases.renew(self.leases.find(lease_id), ttl_s)

    def release(self, lease: Lease | int) -> None:
        """Ends a snapshot; harmless if it has ended."""
        if isinstance(lease, int):
            try:
                lease = self.leases.find(lease)
            except SnapshotTooOld:
                return
        self.leases.release(lease)
