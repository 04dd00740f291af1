"""Giving back: what was deleted leaves the disk, in the background, though nothing else would have it compacted soon.

Whoever deletes much *asks* for the range it was in, and the range is compacted by one thread, a part at a time. Between
two parts the thread rests several times as long as the part took, so that a store which is never idle spends a fraction
of one processor on it. What is asked for again while it waits is compacted once.

**Invariant.** A range in which something was deleted is noted in the engine, in the batch that deletes, until it was
compacted from one end to the other since. So what a crash or the closing leaves is known when the engine is opened
again, and nothing else is compacted then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["GivingBack"]

_REST: Final = 4
"""So many times as long as a part took."""
_REST_S: Final = 0.5
"""And at least so long."""
_log = logging.getLogger("kivi.engine")


class GivingBack:
    """``compact`` compacts a range, and yields after each part of it; ``done`` deletes the note of the range that
    begins there. Thread safe; the thread begins with the first range that is asked for.
    """

    def __init__(self, compact: Callable[[bytes, bytes | None], Iterator[None]], done: Callable[[bytes], None]) -> None:
        self._compact, self._done = compact, done
        self._asked: dict[bytes, bytes | None] = {}
        self._owed_since: set[bytes] = set()
        """Something was deleted there after the last compaction began."""
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def ask(self, start: bytes, end: bytes | None) -> None:
        """Has the range compacted soon. Ranges that begin at the same key end at the same."""
        with self._changed:
            if self._stopped:
                return
            self._asked[start] = end
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kivi-give-back", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @contextmanager
    def owing(self, starts: Iterable[bytes]) -> Iterator[None]:
        """For writing a batch that deletes in the ranges which begin there, and notes them."""
        with self._changed:  # so no note is deleted between the writing and this
            yield
            self._owed_since.update(starts)

    def stop(self) -> None:
        """Waits for the part in progress. What else was asked for is left to its note."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            try:
                for took in _timed(self._compact(*found)):
                    if not self._rested(took):
                        break
                else:
                    self._end(found[0])
            except Exception as error:  # nothing depends on it, and the next that is asked for tries again
                _log.warning("deleted values could not be given back to the disk: %s", error)

    def _next(self) -> tuple[bytes, bytes | None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._asked)
            if self._stopped:
                return None
            start = next(iter(self._asked))
            self._owed_since.discard(start)
            return start, self._asked.pop(start)

    def _end(self, start: bytes) -> None:
        with self._changed:
            if start not in self._owed_since:
                self._done(start)

    def _rested(self, took: float) -> bool:
        """Whether there may be another part, after a rest."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._stopped, max(_REST_S, _REST * took))


def _timed(steps: Iterator[None]) -> Iterator[float]:
    """How long each step took."""
    started = time.monotonic()
    for _ in steps:
        yield time.monotonic() - started
        started = time.monotonic()
