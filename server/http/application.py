"""The application, made of its parts. What imports this needs the extra ``kivi[http]``."""

from __future__ import annotations

from collections.abc import Iterable

from kivi_server.auth import Tokens
from kivi_server.http.access import Door
from kivi_server.http.front import Front
from kivi_server.http.routes import Exported, Routes
from kivi_server.metrics import Stats
from kivi_server.sessions import Sessions
from prometheus_client.registry import CollectorRegistry

__all__ = ["application"]


def application(
    sessions: Sessions,
    tokens: Tokens,
    registry: CollectorRegistry,
    stats: Stats,
    origins: Iterable[str],
    otlp: Exported | None,
    *,
    is_local: bool,
) -> Front:
    """ASGI. ``is_local``: the listener is on loopback. ``otlp``: what takes OTLP/HTTP, if anything does."""
    door = Door(sessions, tokens, takes_writes=is_local or tokens.asked_for)
    return Front(
        Routes(door, registry, stats, otlp).router(), sessions, origins, local_names=is_local and not tokens.asked_for
    )
