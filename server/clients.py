"""Clients and what each of them uses: requests a second, open snapshots, staged bytes, subscriptions, and quotas.

A client is a token, however many connections use it, or without tokens a connection. What is beyond its allowance is
refused with ``ResourceExhausted`` that names the limit, before anything was done; nobody else notices.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Final

from kivi_server.auth import Allowance, Grant
from kivi_server.quotas import Bucket, Quota

from kivi.errors import ResourceExhausted

__all__ = ["Client", "Clients"]

_UNCOUNTED: Final = contextlib.nullcontext()
_KNOWN_MAX: Final = 10_000  # beyond it those that have not connected for longest are forgotten


class Client:
    """One of them. Thread safe."""

    __slots__ = ("_buckets", "_filled_at", "_lock", "_subscriptions", "_tokens", "allowance", "name")

    def __init__(self, name: str, allowance: Allowance) -> None:
        self.name = name
        self.allowance = allowance
        self._tokens = max(allowance.rate or 0.0, 1.0)
        self._filled_at = time.monotonic()
        self._lock = threading.Lock()
        self._buckets: dict[str, Bucket] = {}
        self._subscriptions = 0

    # -- quotas -----------------------------------------------------------------------------------

    def check_writes(self) -> None:
        """Before a write is decoded. Raises ResourceExhausted."""
        allowed = self.allowance
        if allowed.meters_writes:
            self._check("events", allowed.events, "events and rows")
            self._check("bytes", allowed.nbytes, "of writes")

    def take_writes(self, events: int, nbytes: int) -> None:
        """Counts what is written, committed or not."""
        allowed = self.allowance
        if allowed.meters_writes:
            self._take("events", allowed.events, events)
            self._take("bytes", allowed.nbytes, nbytes)

    def check_reads(self) -> None:
        """Before something is read. Raises ResourceExhausted."""
        self._check("query", self.allowance.query, "seconds of queries")

    def reading(self) -> AbstractContextManager[None]:
        """Counts the time of the block as query time."""
        quota = self.allowance.query
        return _UNCOUNTED if quota is None else self._reading(quota)

    @contextlib.contextmanager
    def _reading(self, quota: Quota) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._take("query", quota, time.monotonic() - began)

    def _bucket(self, name: str, quota: Quota) -> Bucket:
        bucket = self._buckets.get(name)
        if bucket is None or bucket.quota != quota:  # the token's line is another by now
            bucket = self._buckets[name] = Bucket(quota)
        return bucket

    def _check(self, name: str, quota: Quota | None, what: str) -> None:
        if quota is not None:
            with self._lock:
                self._bucket(name, quota).check(f"client_{name}", what)

    def _take(self, name: str, quota: Quota | None, amount: float) -> None:
        if quota is not None:
            with self._lock:
                self._bucket(name, quota).take(amount)

    def subscribe(self) -> None:
        """One more subscription, until ``unsubscribe``. Raises ResourceExhausted."""
        most = self.allowance.subscriptions
        with self._lock:
            if most is not None and self._subscriptions >= most:
                raise ResourceExhausted(
                    f"this client has {self._subscriptions} subscriptions, and {most} is its limit: end some first",
                    limit="client_subscriptions",
                    maximum=most,
                    retry_s=1.0,
                )
            self._subscriptions += 1

    def unsubscribe(self) -> None:
        with self._lock:
            self._subscriptions -= 1

    # -- rates and what is held -------------------------------------------------------------------

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
                    retry_s=round((1.0 - self._tokens) / rate, 3),
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
