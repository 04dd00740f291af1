"""Commits of deltas and puts on the event loop: entered, written, synced and answered without another thread.

Kept because goal 3 misses its bar without: 64 tasks commit 22,900 a second by the worker, and 32,700 here.

By a worker and the log's threads a commit is handed over three times, and each time somebody waits for the
interpreter. On the event loop they are done in the turn after the one in which they were read, those of all sessions
together, so that they share a sync as they would in the log's queue.

The price is that nobody else is served for as long as the disk takes. So it is done only where that is hardly longer
than a hand-over: while the log is idle and its syncs have been quick (``CommitLog.is_quick``), and while what was done
on the event loop has been over soon (``Sessions.is_quick``). A disk that stalls is felt once; then commits are the
workers'.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kivi_server.commits import Commits
    from kivi_server.session import Session
    from kivi_server.sessions import Sessions

__all__ = ["Leading"]

_AT_ONCE: Final = 256
_AT_ONCE_BYTES: Final = 64 << 10


class _Frame(NamedTuple):
    session: Session
    commits: Sequence[Commits]
    size: int


class Leading:
    """The frames of plain commits that came in this turn of the event loop; of all sessions."""

    def __init__(self, sessions: Sessions, loop: asyncio.AbstractEventLoop) -> None:
        self._sessions = sessions
        self._loop = loop
        self._frames: deque[_Frame] = deque()

    def add(self, session: Session, commits: Sequence[Commits], size: int) -> None:
        """``commits`` were read from a frame of ``size`` bytes."""
        self._frames.append(_Frame(session, commits, size))
        if len(self._frames) == 1:
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        began = time.monotonic()
        count = size = 0
        try:
            with self._sessions.store.log.leading():
                while self._frames and count < _AT_ONCE and size < _AT_ONCE_BYTES:
                    frame = self._frames.popleft()
                    count += sum([len(each.does) for each in frame.commits])
                    size += frame.size
                    frame.session.commit_here(frame.commits, frame.size)
        finally:
            if self._frames:
                self._loop.call_soon(self._run)
        self._sessions.took(time.monotonic() - began, 0)  # how long the disk takes is the log's to know
