"""A request of a session on its way to its answer."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Final

from kivi.wire.frames import KEPT_MAX, NONE, Bodies, split
from kivi.wire.methods import HEADER_BYTES_MAX
from kivi.wire.v1 import session_pb2

__all__ = ["LITTLE_BYTES", "Asked", "parsed"]

LITTLE_BYTES: Final = 4 << 10
"""A body of no more is copied out of its frame, so that whoever keeps it does not keep the frame: events that come one
by one are most of all their schema, and to encode them anew for that took a third of what it takes to read them."""


class Asked:
    """A request, when it came, and the bodies of its operations, which are taken by who applies these."""

    def __init__(self, request: session_pb2.Request, received: float, bodies: Bodies = NONE) -> None:
        self.request = request
        self.received = received
        self.bodies = bodies
        timeout_ms = request.timeout_ms
        self.until = received + timeout_ms / 1000 if timeout_ms else None
        """When its time runs out, of ``time.monotonic``; None: it has all the time."""

    @cached_property
    def nbytes(self) -> int:
        """What it takes while it waits; asked for before its bodies are taken."""
        return self.request.ByteSize() + len(self.bodies)

    def is_late(self) -> bool:
        """Whether its time ran out before its work began."""
        return self.until is not None and time.monotonic() > self.until


def parsed(frame: bytes) -> list[Asked]:
    """A frame's requests. Raises InvalidArgument and protobuf's DecodeError; ResourceExhausted for a large header."""
    header, bodies = split(frame, HEADER_BYTES_MAX)
    now, found = time.monotonic(), list[Asked]()
    for request in session_pb2.ClientFrame.FromString(header).requests:
        mine = NONE
        if request.body_bytes:
            body = bodies.take(request.body_bytes)
            is_kept = len(body) > LITTLE_BYTES and len(frame) <= KEPT_MAX * len(body)
            mine = Bodies(body if is_kept else memoryview(bytes(body)))
        found.append(Asked(request, now, mine))
    return found
