"""A store that follows another one on this machine: the same content, a moment later, in a process of its own.

::

    begin     the owner makes a copy of its base, by hard links, as of some position (``kivi.store.checkpoint``)
    follow    this process opens the copy, and enters what the owner's log has behind that position, as it comes
    end       the copy is thrown away: the next start begins with another one

**Invariant.** At each W a follower answers every read as its owner does at W: it has the same base, the same records in
the same order, and nothing else ever enters it. It folds and settles by itself, as any store does (R23). What it cannot
follow any more (``LeftBehind``) ends it.

Its readers, and the subscriptions of ``kivi serve --hub``, use another interpreter than those who commit. What that
costs is a second copy of what is in memory, the blocks and rows that change on disk, and the time of another processor
to decode and fold what was committed: decision 0067.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kivi.errors import KiviError, Unavailable
from kivi.log import Kind, Record
from kivi.log.followed import FollowedLog
from kivi.mvcc.consolidate import POSITION
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from kivi.store.opening import read_marker
from kivi.store.replay import replay_record

__all__ = ["Follower", "open_follower"]

_POLL_S: Final = 0.001
_IDLE_POLL_S: Final = 0.005
_IDLE_S: Final = 1.0
_log = logging.getLogger("kivi.store")


def open_follower(copy: str, log: str, settings: Settings, *, clock: Callable[[], float] = time.time) -> Follower:
    """Opens the copy of a store, which nobody else has open, and follows the owner's ``log`` directory: as far as that
    is at the call when this returns, and on.

    Raises what ``Store.open`` does, and LeftBehind.
    """
    store_id, _ = read_marker(copy)
    followed: list[FollowedLog] = []

    def make_log(engine: object) -> FollowedLog:
        position = int.from_bytes(engine.get(POSITION) or b"", "little")  # type: ignore[attr-defined]
        followed.append(FollowedLog(log, after=position, store_id=store_id))
        return followed[0]

    follower = Follower(Store.open(copy, settings=settings, make_log=make_log, clock=clock), followed[0])
    while not followed[0].checked_at:
        if followed[0].failed is not None:
            follower.close()
            raise followed[0].failed
        time.sleep(_POLL_S)
    return follower


class Follower:
    """``store`` and the thread that keeps it up. What ends it, ``store.check_open`` raises from then on."""

    def __init__(self, store: Store, log: FollowedLog) -> None:
        self.store = store
        self._log = log
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kivi-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it. The copy is left as it is, and cannot be followed on with."""
        self._stopping.set()
        self._thread.join()
        self.store.crash()

    def _run(self) -> None:
        moved = time.monotonic()
        try:
            while not self._stopping.is_set():
                records = self._log.news()
                if records:
                    self._enter(records)
                    moved = time.monotonic()
                else:
                    self._stopping.wait(_POLL_S if time.monotonic() - moved < _IDLE_S else _IDLE_POLL_S)
        except KiviError as error:
            self._ended(error)
        except OSError as error:
            self._ended(Unavailable(f"the log of the server cannot be read ({error.strerror})"))

    def _ended(self, error: KiviError) -> None:
        _log.warning("following has ended at %d: %s", self.store.watermark(), error.message)
        self._log.failed = error

    def _enter(self, records: Sequence[Record]) -> None:
        """W moves in one step past all of them."""
        store = self.store
        committer, watermark = store.committer, store.moved
        if store.pending.nbytes > store.settings.pending_soft_bytes:
            committer.on_pressure()
        while store.is_full and not self._stopping.is_set():
            committer.pending.wait_for_room(store.settings.pending_hard_bytes, 0.1)
        with watermark.gathered():
            for record in records:
                with committer.entry_lock:
                    watermark.enter(record.sequence, record.last)
                    replay_record(store, record)
                watermark.finish(record.last)
                if record.kind is Kind.COMMIT:
                    committer.counters.commits += record.count
