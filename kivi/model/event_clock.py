"""The clock of event time, by which alerts and live matches know what is over."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Clock"]


class Clock(NamedTuple):
    """Event time as somebody saw it: ``clock_us`` at the log's time ``now_us``."""

    now_us: int
    clock_us: int

    def at(self, now_us: int, newest_us: int | None) -> Clock:
        """Later: it goes on as the log's time does, and is never behind the newest event, as far as that is over."""
        now_us = max(now_us, self.now_us)
        clock_us = self.clock_us + now_us - self.now_us
        return Clock(now_us, clock_us if newest_us is None else max(clock_us, min(newest_us, now_us)))
