"""Clients and what each of them uses: requests a second, open snapshots, staged bytes.

A client is a token, however many connections use it, or without tokens a connection. What is beyond its allowance is
refused with ``ResourceExhausted`` that names the limit, before anything was done; nobody else notices.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from kivi_server.auth import Allowance, Grant

from kivi.errors import ResourceExhausted

__all__ = ["Client", "Clients"]

_KNOWN_MAX: Final = 10_000  # beyond it those that have not connected for longest are forgotten


class Client:
    """One of them. Thread safe."""

    __slots__ = ("_filled_at", "_lock", "_tokens", "allowance", "name")

    def __init__(self, name: str, allowance: Allowance) -> None:
        self.name = name
        self.allowance = allowance
        self._tokens = allowance.rate or 0.0
        self._filled_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, requests: int) -> None:
        """Counts requests against the rate: a bucket that holds a second's worth. Raises ResourceExhausted."""
        rate = self.allowance.rate
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._tokens = min(max(rate, 1.0), self._tokens + (now - self._filled_at) * rate)
            self._filled_at = now
            if self._tokens < 1.0:
                raise ResourceExhausted(
                    f"this client asks for more than {rate:g} requests a second, its limit: slow down",
                    limit="client_rate",
                    maximum=rate,
                )
            self._tokens -= requests  # a message is taken whole; what it was too much is waited for

    def check_snapshots(self, held: int) -> None:
        """Raises ResourceExhausted if another one may not be open beside the ``held`` ones."""
        most = self.allowance.snapshots
        if most is not None and held >= most:
            raise ResourceExhausted(
                f"this client has {held} snapshots open, and {most} is its limit: close some first",
                limit="client_snapshots",
                maximum=most,
            )

    def check_staged(self, held: int, more: int) -> None:
        """Raises ResourceExhausted if ``more`` bytes may not be staged beside the ``held`` ones."""
        most = self.allowance.staged
        if most is not None and held + more > most:
            raise ResourceExhausted(
                f"this client has {held:,} bytes staged, and {more:,} more would pass its limit of {most:,}: "
                "commit or discard stages first",
                limit="client_staged",
                maximum=most,
            )


class Clients:
    """Of one server. ``default``: for what a token leaves open."""

    def __init__(self, default: Allowance) -> None:
        self._default = default
        self._lock = threading.Lock()
        self._known: dict[str, Client] = {}  # in the order in which they connected last

    def of(self, grant: Grant, peer: str) -> Client:
        name = grant.name or peer
        allowance = grant.allowance.or_else(self._default)
        with self._lock:
            client = self._known.pop(name, None) or Client(name, allowance)
            client.allowance = allowance
            self._known[name] = client
            if len(self._known) > _KNOWN_MAX:
                del self._known[next(iter(self._known))]
            return client
