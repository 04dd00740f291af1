"""How long to pause before the same is tried again."""

from __future__ import annotations

import random
import time

from kivi.errors import KiviError, NotFound

__all__ = ["Retries", "backoff_s"]


def backoff_s(attempt: int) -> float:
    """A random pause that grows with the attempts: 1 ms to 250 ms."""
    return random.uniform(0.5, 1.0) * min(0.25, 0.001 * 2.0 ** min(attempt, 10))


class Retries:
    """The pauses between the attempts of ``run``."""

    def __init__(self, timeout_s: float | None) -> None:
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._attempt = 0
        self._was_stale = False

    def pause_s(self, error: KiviError) -> float | None:
        """The next pause; None if ``error`` is not to be tried again, or the pause would end after the timeout.

        A table that another client has dropped and made anew is found under its name at the second attempt.
        """
        if isinstance(error, NotFound):
            if self._was_stale or not error.details.get("stale"):
                return None
            self._was_stale = True
            return 0.0
        pause = backoff_s(self._attempt)
        self._attempt += 1
        return None if self._deadline is not None and time.monotonic() + pause > self._deadline else pause
