"""Quotas: so much in so much time, of events, of bytes, of seconds of query time.

A quota of ``1000/s`` is a bucket that holds what one period allows and fills by that much in each. What is asked for is
taken whole, also where it is more than there is; while the bucket owes, nothing more is taken, and who asks is told
after how long to ask again. So a client gets its quota in the long run, however large its requests are, and a refusal
costs next to nothing: it comes before anything is decoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kivi.errors import ResourceExhausted

__all__ = ["Bucket", "Quota"]

_PERIODS_S: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class Quota:
    """``amount`` in each ``period_s``."""

    amount: float
    period_s: float
    text: str

    @staticmethod
    def parse(text: str, number: Callable[[str], float]) -> Quota:
        """Of ``1000/s``, ``5000000/d``: a number for a second, a minute, an hour or a day. Raises ValueError."""
        amount, _, period = text.partition("/")
        if period not in _PERIODS_S or not 0 < number(amount) < float("inf"):
            raise ValueError
        return Quota(number(amount), _PERIODS_S[period], text)


class Bucket:
    """What is left of a quota. Not thread safe."""

    __slots__ = ("_filled_at", "_left", "quota")

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self._left = quota.amount
        self._filled_at = time.monotonic()

    def _fill(self) -> None:
        now, quota = time.monotonic(), self.quota
        self._left = min(quota.amount, self._left + (now - self._filled_at) * quota.amount / quota.period_s)
        self._filled_at = now

    def check(self, limit: str, what: str) -> None:
        """Raises ResourceExhausted, which says after how long to ask again, while it owes."""
        self._fill()
        if self._left <= 0:
            retry_s = round(max(0.001, -self._left * self.quota.period_s / self.quota.amount), 3)
            raise ResourceExhausted(
                f"this client has used its quota of {self.quota.text} {what}: ask again in {retry_s:g} s",
                limit=limit,
                maximum=self.quota.text,
                retry_s=retry_s,
            )

    def take(self, amount: float) -> None:
        self._fill()
        self._left -= amount
