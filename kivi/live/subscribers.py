"""All subscriptions that are open, and how patient their subscribers are."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator

from kivi.live.lives import Live

__all__ = ["Subscribers"]


class Subscribers(Collection[Live]):
    """Thread safe."""

    def __init__(self) -> None:
        self._lives: set[Live] = set()
        self._mutex = threading.Lock()
        self._patience: Counter[float] = Counter()
        """In seconds: what the least is decides."""

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[Live]:
        return iter(tuple(self._lives))

    def __contains__(self, live: object) -> bool:
        return live in self._lives

    def add(self, live: Live) -> None:
        with self._mutex:
            self._lives.add(live)
            self._patience[live.patience_s] += 1

    def discard(self, live: Live) -> None:
        with self._mutex:
            if live in self._lives:
                self._lives.discard(live)
                self._patience -= Counter((live.patience_s,))

    def clear(self) -> None:
        with self._mutex:
            self._lives.clear()
            self._patience.clear()

    def patient_s(self, now: float, spare: float) -> float:
        """For how long to wait for those who have been told within their interval.

        Until the first of them may be told again it costs nobody anything. Until all of them may, so that from then on
        one tick is for all, and half an interval more than they asked for: only where ticks are large. So it is, too,
        where somebody might be told something at any moment: half an interval at most. ``spare``: how long to wait
        for the sake of what a tick costs.
        """
        with self._mutex:
            patience = min(self._patience, default=0.0)
        if not patience:
            return 0.0
        dues = (live.due for live in self if live.then is not None or live.due > now)
        soon = [due - now for due in dues if due <= now + patience]
        if not soon or min(soon) <= 0.0:
            return min(spare, patience / 2)
        return max(min(soon), min(spare, max(soon) + patience / 2))
