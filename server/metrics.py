"""Prometheus reads ``stats()``, and nothing else: a number is counted once, where it happens.

Naming: ``kivi_<name>``, units last (``_bytes``, ``_seconds``). What only grows is a counter and ends in
``_total``; everything else is a gauge. Which is which is decided by the lists below, so that a new stat
is a gauge until somebody has thought about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Final

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from kivi.errors import InvalidArgument

__all__ = ["serve"]

_COUNTERS: Final = (
    "commits",
    "commits_*unknown",
    "aborts_*",
    "consolidations",
    "consolidated_rows",
    "consolidation_seconds",
    "leases_cut",
    "log_syncs",
    "log_groups",
    "log_records",
    "log_rolls",
    "log_sync_s",
    "log_written_bytes",
    "rederived",
    "token_hits",
    "server_requests",
    "server_frames_*",
    "server_sessions_dropped",
)


class _Stats(Collector):
    def __init__(self, stats: Callable[[], dict[str, int | float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        for name, value in self._stats().items():
            what = name.replace("_", " ")
            if any(fnmatchcase(name, pattern) for pattern in _COUNTERS):
                yield CounterMetricFamily(f"kivi_{name}", what, value=value)
            else:
                yield GaugeMetricFamily(f"kivi_{name}", what, value=value)


def serve(endpoint: str, stats: Callable[[], dict[str, int | float]]) -> Callable[[], None]:
    """Serves /metrics on "host:port"; returns what stops it."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(f"{endpoint!r} is not host:port")
    registry = CollectorRegistry()
    registry.register(_Stats(stats))
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry=registry)
    except OSError as error:
        raise InvalidArgument(f"cannot serve metrics on {endpoint}: {error}") from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
