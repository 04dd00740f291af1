"""Storage that takes no more: since when, what was refused meanwhile, and that it is over.

Two parts of a store write, and each tells here when it cannot (``failed``) and when it has shown that it can again
(``works``). Where a disk fills up, and what happens then:

=========================== =========================================================================================
the log, a new segment      refused before a number is taken: DiskFull. Tried again every second (``log.room``)
the log, inside a segment   cannot happen, the space was had before. A write or sync that fails all the same is no
                            matter of room: outcomes are unknown, and the server stops and has to be started again
base: fold, flush           what could not be written stays in pending and in the log. Tried again twice a second
                            (``consolidate``), and RocksDB looks for room every five seconds. Commits go on until
                            pending is at its hard limit, then they are refused: DiskFull
base: compaction            goes on by itself; nothing is refused
stages                      are log records
checkpoint, backup          DiskFull, and nothing is left of it
opening                     DiskFull, and nothing is changed
=========================== =========================================================================================

So after an ENOSPC service resumes by itself, and reads never notice. Any other error of its files (an I/O error, a
quota) RocksDB does not get over: it takes no writes until it is opened again. Then commits are refused likewise, and
log and ``kivi status`` say that the server has to be restarted, which loses nothing: the log has all of it.

Invariant: a part is in ``_parts`` from its first failure until it has *written durably* again: base by a flush, the log
by a new segment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kivi.errors import DiskFull, KiviError

__all__ = ["BASE", "LOG", "Shortage"]

BASE = "base"
LOG = "the commit log"

_log = logging.getLogger("kivi.store")


class Shortage:
    """Thread safe. ``clock`` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._parts: dict[str, KiviError] = {}
        self._full = False
        self._times = self._refused = 0
        self._began_s = self._ended_s = 0.0  # of the newest time without space
        self._since = 0.0  # its beginning by the monotonic clock
        self._before_s = 0.0  # how long those before it lasted

    def failed(self, part: str, error: KiviError) -> None:
        """The part cannot be written, for now or for good."""
        with self._lock:
            known = self._parts.get(part)
            self._parts[part] = error
            self._look()
        if type(known) is type(error):
            return
        if isinstance(error, DiskFull):
            _log.error(
                "%s has no disk space (%s): commits that find no room are refused, reads go on; when there is space "
                "again, service resumes by itself",
                part,
                error.message,
                extra={"event": "disk_full"},
            )
        else:
            _log.error(
                "%s cannot be written (%s): it is tried again; if this stays, mend the disk and restart the server, "
                "nothing that was acknowledged is lost",
                part,
                error.message,
                extra={"event": "storage_failing"},
            )

    def works(self, part: str) -> None:
        """The part has just been written, durably."""
        with self._lock:
            if self._parts.pop(part, None) is None:
                return
            was_full, lasted, refused = self._full, self._lasted(), self._refused
            self._look()
            is_over = was_full and not self._full
        if is_over:
            _log.warning(
                "there is disk space again, after %.1f s: service has resumed by itself; %d commits and stages were "
                "refused meanwhile, and nothing that was acknowledged is lost",
                lasted,
                refused,
                extra={"event": "disk_space", "seconds": round(lasted, 1), "refused": refused},
            )
        else:
            _log.warning("%s can be written again", part, extra={"event": "storage_works"})

    def _look(self) -> None:
        """Whether a time without space begins or ends here; under the lock."""
        full = any(isinstance(error, DiskFull) for error in self._parts.values())
        if full and not self._full:
            self._times += 1
            self._refused = 0
            self._began_s, self._since = self._clock(), time.monotonic()
        elif self._full and not full:
            self._before_s += self._lasted()
            self._ended_s = self._clock()
        self._full = full

    def why(self, part: str) -> KiviError | None:
        """Why the part cannot be written now."""
        with self._lock:
            return self._parts.get(part)

    def refused(self) -> None:
        """A commit or a stage was refused, as long as there is no space."""
        with self._lock:
            self._refused += self._full

    def _lasted(self) -> float:
        return time.monotonic() - self._since if self._full else 0.0

    def stats(self) -> dict[str, int | float]:
        """``disk_full_refused``, ``_began_at_s`` and ``_ended_at_s`` are of the newest time; 0: there was none."""
        with self._lock:
            return {
                "disk_full": int(self._full),
                "disk_full_times": self._times,
                "disk_full_s": self._before_s + self._lasted(),
                "disk_full_began_at_s": self._began_s,
                "disk_full_ended_at_s": 0.0 if self._full else self._ended_s,
                "disk_full_refused": self._refused,
                "storage_failing": int(any(not isinstance(error, DiskFull) for error in self._parts.values())),
            }
