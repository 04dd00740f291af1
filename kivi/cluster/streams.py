"""The stream that keeps a cluster's log, and what stands in its metadata: what all its nodes have to agree on.

::

    kivi.generation   another one with every beginning of the log
    kivi.genesis      the last commit timestamp before it; not 0 if the cluster began with a store
    kivi.limits       settings that a verdict depends on
"""

from __future__ import annotations

import json
import secrets
from typing import Final

from kivi.errors import InvalidArgument
from kivi.log.jetstream import JetStream
from kivi.log.natslink import Nats
from kivi.runtime.settings import Settings

__all__ = ["LOG_BYTES", "generation_of", "genesis_of", "open_stream"]

_GENERATION: Final = "kivi.generation"
_GENESIS: Final = "kivi.genesis"
_LIMITS: Final = "kivi.limits"
_JUDGED_BY: Final = ("conflict_window_s", "conflict_entries", "request_token_ttl_s")
LOG_BYTES: Final = 64 << 30
"""How large the log may become, unless it is told."""
_ROOM_BYTES: Final = 128 << 20
"""Beyond it, for what nodes have published when they hear that the log is full, and for what has to be said then."""


def open_stream(
    nats: Nats,
    name: str,
    settings: Settings,
    *,
    log_bytes: int = LOG_BYTES,
    made: tuple[bytes | None, int] | None = None,
    timeout_s: float = 60.0,
) -> JetStream:
    """The stream of the cluster ``name``. ``made``: generation and genesis, for which it is made if it is not there.

    Raises NotFound without ``made``; InvalidArgument if it is there and is not kivi's, or judges by other settings.
    """
    limits = json.dumps({each: getattr(settings, each) for each in _JUDGED_BY})
    generation, genesis = made or (None, 0)
    stream = JetStream(
        nats,
        f"kivi-{name}",
        max_bytes=log_bytes,
        room_bytes=_ROOM_BYTES,
        create=made is not None,
        metadata={
            _GENERATION: (generation or secrets.token_bytes(16)).hex(),
            _GENESIS: str(genesis),
            _LIMITS: limits,
        },
        timeout_s=timeout_s,
    )
    try:
        generation_of(stream)
        if (known := stream.metadata.get(_LIMITS)) != limits:
            raise InvalidArgument(
                f"the nodes of {name} judge commits by the settings {known}, and this one has {limits}: give it those"
            )
    except BaseException:
        stream.close()
        raise
    return stream


def generation_of(stream: JetStream) -> bytes:
    """Raises InvalidArgument if the stream is not kivi's."""
    try:
        return bytes.fromhex(stream.metadata[_GENERATION])
    except (KeyError, ValueError):
        raise InvalidArgument(
            f"the stream {stream.name} was not made by kivi: name another cluster, or delete the stream"
        ) from None


def genesis_of(stream: JetStream) -> int:
    """The last commit timestamp before the log."""
    return int(stream.metadata.get(_GENESIS, "0"))
