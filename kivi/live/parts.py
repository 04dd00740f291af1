"""Parts of subscriptions: rows of some shards, of which nodes of a cluster have the other ones.

::

    node with shards 0-31    window of its rows  --> state at S, S', ...   \\
                                                                            client: the greatest S that all have told
    node with shards 32-63   window of its rows  --> state at S, S'', ...  /        (kivi.client.merging)

**Invariant.** What a part is told holds at ``ts``, and has held since ``from_ts``: so a client that puts parts together
at an S that lies in such a range of each of them has the state at S, which every node with a part has passed.

What is left to be seen to is that there is such an S again and again, and nodes do not ask each other:

* A tick goes to the *roundest* commit of (last, W], the one whose number can be halved most often, or to the end of
  those that entered together with it, which is the same on all nodes. Where no tick is of more than 2**m commits, none
  leaves out a multiple of 2**m: so all nodes stop at these, however far each of them is and however fast.
* A part is told a change at the ticks that reach a multiple of its *stride*, a power of two of about as many commits as
  come in its interval; strides of two nodes nest. And it is told where nothing follows, which is then the last commit
  for all.
* What does not change is not told. A client that has been told of S by one node *seeks* S at the others, which answer
  as soon as they have come there.

Where a snapshot below W cannot be read any more a tick goes to W: that costs a moment, and nothing that is told is
wrong.
"""

from __future__ import annotations

import math
import time
from typing import Final

from kivi.live.lives import Live, RowsLive
from kivi.live.schedule import Schedule

__all__ = ["Parts", "roundest"]

_MEASURED_S: Final = 1.0


def roundest(low: int, high: int) -> int:
    """The number in (low, high] that can be halved most often; there is one such number."""
    zeros = (low ^ high).bit_length() - 1
    return high >> zeros << zeros


class Parts:
    """The parts among the subscriptions of a hub, and when each is told. Not thread safe."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._parts: dict[RowsLive, float] = {}
        """And when each was told a change."""
        self._rate = 0.0
        self._counted: tuple[float, int] | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, live: RowsLive) -> None:
        self._parts[live] = 0.0

    def discard(self, live: Live) -> None:
        if isinstance(live, RowsLive):
            self._parts.pop(live, None)

    def told(self, live: Live, now: float) -> None:
        """It was told a change."""
        if isinstance(live, RowsLive) and live in self._parts:
            self._parts[live], live.due = now, math.inf

    def ticked(self, before: int, ts: int, *, is_last: bool) -> None:
        """A tick came from ``before`` to ``ts``; ``is_last``: nothing follows yet. Says when each may be told."""
        now = time.monotonic()
        self._count(ts, now)
        for live, told in self._parts.items():
            if not live.dirty:
                self.answer(live, ts, now)
                continue
            stride = self._stride(live.interval_s)
            if live.failure is not None or ts // stride > before // stride:
                live.due = now
            else:
                live.due = told + live.interval_s if is_last else math.inf
            if live.then is not None:
                self._schedule.put(live, live.due)

    def answer(self, live: Live, ts: int, now: float) -> None:
        """Says of one that it has come to what is sought, if it has, and has not changed."""
        if (
            isinstance(live, RowsLive)
            and 0 < live.sought <= ts
            and live.then is not None
            and not (live.dirty or live.waits)
        ):
            live.sought, live.beat = 0, now
            self._schedule.put(live, now)

    def _count(self, ts: int, now: float) -> None:
        at, counted = self._counted or (now, ts)
        if (passed := now - at) >= _MEASURED_S:
            rate = (ts - counted) / passed
            self._rate, at, counted = (self._rate + rate) / 2, now, ts
        self._counted = at, counted

    def _stride(self, interval_s: float) -> int:
        return 1 << max(0, int(self._rate * interval_s).bit_length() - 1)
