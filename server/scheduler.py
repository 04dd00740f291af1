"""Which session's requests are done next: all by the event loop, in turns.

Requests that take long are begun here and done by pools. What is left is short, and two hand-overs to another thread
and back would cost more than it: each time somebody waits for the interpreter (docs/decisions/0032).

Commits of one turn, of all its sessions, share a sync, so what begins with one waits for the loop to come round;
reads share nothing, and begin as they come. Small transactions of all sessions enter as one group at the end of the
turn, which derives from their events together; before that, if a session goes on to commits of another kind, which
come behind its own. While the log is idle and its syncs have been quick, commits are written,
synced and answered at the end of the turn by the event loop itself (``CommitLog.leading``): nobody else is served
meanwhile, which is hardly longer than a hand-over. A disk that stalls is felt once; then commits are for the log's own
threads, until its syncs have been quick for a while.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Final, Protocol

from kivi.errors import KiviError
from kivi.store.facade import Commit, Store

__all__ = ["Scheduler", "disk_reads"]

_log = logging.getLogger("kivi.server")
_TURN_S: Final = 0.005
_QUICK_S_MAX: Final = 0.005
_STUCK_S_MAX: Final = 0.05
_GATHERED_MAX: Final = 256
_SLOW_S: Final = 1.0
"""Reads are for a pool for so long after a session's turn that took longer than the first and read from a disk, or
longer than the second. What takes long otherwise waits for a processor or the interpreter's lock, and would wait more
often in a pool."""
_THREAD: Final[int | None] = getattr(resource, "RUSAGE_THREAD", None)
_UNCOUNTED: Final = itertools.count()
_NOT_LEADING: Final = nullcontext()


def disk_reads() -> int:
    """How often the calling thread has waited for a disk; where the system does not count that, more each time."""
    if _THREAD is None:
        return next(_UNCOUNTED)
    used = resource.getrusage(_THREAD)
    return used.ru_inblock + used.ru_majflt


class _Session(Protocol):
    """``go_on``: does what it can until that time; False: it is done, or says when it wants another turn."""

    def go_on(self, until: float) -> bool: ...

    def drop(self, why: KiviError) -> None: ...


class Scheduler:
    """The sessions that have requests, of one event loop."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._log = store.log
        self._loop = loop
        self._waiting: deque[_Session] = deque()
        self._slow_until = 0.0
        self._gathered: list[Commit] = []
        self._enter: Callable[[Sequence[Commit]], object] = len

    def gather(self, commits: Sequence[Commit], enter: Callable[[Sequence[Commit]], object]) -> None:
        """Commits of a session's turn, to be entered by any of its sessions' ``enter``, which raises nothing."""
        self._gathered += commits
        self._enter = enter
        if len(self._gathered) >= _GATHERED_MAX:
            self.enter()

    def enter(self) -> None:
        """What was gathered enters now."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._enter(gathered)

    def is_quick(self) -> bool:
        """Whether the event loop may read: not for a while after it had to wait for a disk."""
        return time.monotonic() >= self._slow_until

    def took(self, seconds: float, reads: int) -> None:
        """A session's turn took so long. ``reads``: by how much ``disk_reads`` has grown."""
        if seconds > (_QUICK_S_MAX if reads else _STUCK_S_MAX):
            self._slow_until = time.monotonic() + _SLOW_S

    def add(self, session: _Session, *, at_once: bool = False) -> None:
        """It has requests to be done. ``at_once``: there is nothing that they could share with those of others, so a
        turn begins here, unless one is to come anyway."""
        self._waiting.append(session)
        if len(self._waiting) > 1:
            return
        if at_once:
            self._turn(leads=False)
        else:
            self._loop.call_soon(self._turn)

    def _turn(self, *, leads: bool = True) -> None:
        log, waiting = self._log, self._waiting
        until = time.monotonic() + _TURN_S
        try:
            with log.leading() if leads and log.is_quick() else _NOT_LEADING:
                while waiting and time.monotonic() < until:
                    session = waiting[0]
                    has_more = self._go_on(session, until)
                    waiting.popleft()
                    if has_more:
                        waiting.append(session)
                self.enter()
        finally:
            if waiting:
                self._loop.call_soon(self._turn)

    def _go_on(self, session: _Session, until: float) -> bool:
        began, reads = time.monotonic(), disk_reads()
        try:
            return session.go_on(until)
        except Exception:
            _log.exception("a session's requests failed")
            session.drop(KiviError("the server failed to do this session's requests; its log says why"))
            return False
        finally:
            self.took(time.monotonic() - began, disk_reads() - reads)
