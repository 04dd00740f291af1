"""The stream that keeps a cluster's log, and what stands in its metadata: what all its nodes have to agree on.

::

    kivi.generation   another one with every beginning of the log
    kivi.genesis      the last commit timestamp before it; not 0 if the cluster began with a store
    kivi.limits       settings that a verdict depends on
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Final

from kivi.errors import InvalidArgument
from kivi.log.jetstream import JetStream, find_stream
from kivi.log.natslink import Nats
from kivi.runtime.settings import Settings

__all__ = ["LOG_BYTES", "ROOM_BYTES", "generation_of", "generation_there", "genesis_of", "open_stream", "stream_of"]

_CLUSTER: Final = re.compile(r"[A-Za-z0-9_-]{1,200}")
_GENERATION: Final = "kivi.generation"
_GENESIS: Final = "kivi.genesis"
_LIMITS: Final = "kivi.limits"
_JUDGED_BY: Final = ("conflict_window_s", "conflict_entries", "request_token_ttl_s")
LOG_BYTES: Final = 64 << 30
"""How large the log may become, unless it is told."""
ROOM_BYTES: Final = 128 << 20
"""Beyond it, for what nodes have published when they hear that the log is full, and for what has to be said then."""


def stream_of(cluster: str) -> str:
    """The name of its stream. Raises InvalidArgument for what is no name of a cluster."""
    if not _CLUSTER.fullmatch(cluster):
        raise InvalidArgument(f"{cluster!r} is no name of a cluster: it has 1 to 200 letters, digits, '-' and '_'")
    return f"kivi-{cluster}"


def open_stream(
    nats: Nats,
    name: str,
    settings: Settings,
    *,
    log_bytes: int = LOG_BYTES,
    copies: int | None = None,
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
        stream_of(name),
        max_bytes=log_bytes,
        room_bytes=ROOM_BYTES,
        copies=copies,
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
    return _generation(stream.name, stream.metadata)


def _generation(stream: str, metadata: Mapping[str, str]) -> bytes:
    try:
        return bytes.fromhex(metadata[_GENERATION])
    except (KeyError, ValueError):
        raise InvalidArgument(
            f"the stream {stream} was not made by kivi: name another cluster, or delete the stream"
        ) from None


def genesis_of(stream: JetStream) -> int:
    """The last commit timestamp before the log."""
    return int(stream.metadata.get(_GENESIS, "0"))


def generation_there(nats: Nats, name: str, timeout_s: float) -> tuple[bytes | None, int]:
    """The generation of the log of the cluster ``name``, None if there is none, and its last message."""
    found = find_stream(nats, stream_of(name), timeout_s)
    if found is None:
        return None, 0
    return _generation(stream_of(name), found["config"].get("metadata") or {}), int(found["state"]["last_seq"])
