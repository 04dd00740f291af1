"""What clients send: read against limits, of one request and of all together, also after it is unpacked.

A body that is longer than ``BODY_BYTES_MAX`` is 413, one that does not come in time is 408. gzip and deflate are
unpacked piece by piece, so that some bytes that stand for gigabytes stop at the limit.

Who sends slowly is not in the way of others: where there is no room for a piece, bodies that have been coming for
``_SLOW_S`` give way, the longest first, and are told to come again (429).
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kivi_server.http.errors import BodyTooLarge, RequestTimeout, UnsupportedMediaType
from starlette.requests import ClientDisconnect, Request

from kivi.errors import InvalidArgument, ResourceExhausted

__all__ = ["BODY_BYTES_MAX", "Bodies"]

BODY_BYTES_MAX: Final = 64 << 20
_ALL_BYTES_MAX: Final = 256 << 20
_WHOLE_S: Final = 60.0
_SLOW_S: Final = 5.0
_PIECE: Final = 256 << 10
_CODINGS: Final = {"identity": 0, "gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""What zlib calls each, and 0 for what is not packed."""


class Bodies:
    """Of one server; its event loop's."""

    def __init__(self) -> None:
        self.held = 0
        self.unpacking = asyncio.Lock()
        self._coming: dict[_Body, None] = {}  # not whole yet; in the order in which they began

    @asynccontextmanager
    async def read(self, request: Request, limit: int = BODY_BYTES_MAX) -> AsyncIterator[bytes]:
        """The body, unpacked; what it takes is counted until the block ends.

        Raises BodyTooLarge, RequestTimeout, UnsupportedMediaType, InvalidArgument for what is not packed as it
        says, and ResourceExhausted while others' bodies take all the room.
        """
        coding = request.headers.get("content-encoding", "identity").lower()
        if coding not in _CODINGS:
            raise UnsupportedMediaType(
                f"Content-Encoding {coding!r} is not understood: send gzip or deflate, or leave it out"
            )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        body = _Body(self, limit, coding)
        try:
            self._coming[body] = None
            try:
                async with body.clock:
                    async for piece in request.stream():
                        await body.add(piece)
            except TimeoutError:
                body.check()
                raise RequestTimeout(f"the body did not come within {_WHOLE_S:g} s: send it again, or less") from None
            except ClientDisconnect:
                raise RequestTimeout("the connection ended before the body did") from None
            finally:
                del self._coming[body]
            yield body.whole()
        finally:
            self.held -= body.nbytes

    def make_room(self, nbytes: int, asking: _Body) -> None:
        """Raises ResourceExhausted where nobody is slow enough to give way."""
        for body in list(self._coming):
            if self.held + nbytes <= _ALL_BYTES_MAX:
                return
            if body is not asking and body.is_slow():
                body.give_way()
        if self.held + nbytes > _ALL_BYTES_MAX:
            raise _no_room(f"{self.held:,} bytes of requests are being worked on, and {_ALL_BYTES_MAX:,} are the limit")


class _Body:
    def __init__(self, bodies: Bodies, limit: int, coding: str) -> None:
        self._bodies, self._limit, self._coding, self.nbytes = bodies, limit, coding, 0
        self._parts: list[bytes] = []
        self._unpacking = zlib.decompressobj(bits) if (bits := _CODINGS[coding]) else None
        self.clock = asyncio.timeout(_WHOLE_S)
        self._began_s = time.monotonic()
        self._gave_way = False

    def is_slow(self) -> bool:
        return self.nbytes > 0 and time.monotonic() - self._began_s >= _SLOW_S

    def give_way(self) -> None:
        """Whoever reads it is told as soon as it runs."""
        self._bodies.held -= self.nbytes
        self.nbytes, self._gave_way = 0, True
        self._parts.clear()
        if not self.clock.expired():
            self.clock.reschedule(0)

    def check(self) -> None:
        """Raises ResourceExhausted."""
        if self._gave_way:
            raise _no_room("others need the memory, and this body has been coming for long")

    async def add(self, piece: bytes) -> None:
        """However many bodies are unpacked, and however much a packet stands for, the event loop does one piece at a
        turn."""
        if self._unpacking is None:
            self._keep(piece)
            return
        try:
            while piece:
                async with self._bodies.unpacking:
                    self._keep(self._unpacking.decompress(piece, _PIECE))
                    piece = self._unpacking.unconsumed_tail
                    await asyncio.sleep(0)
        except zlib.error as error:
            raise InvalidArgument(f"the body is not {self._coding}, as Content-Encoding says: {error}") from None
        if self._unpacking.unused_data:
            raise InvalidArgument(f"something follows the {self._coding} body: send one member")

    def _keep(self, part: bytes) -> None:
        if self.nbytes + len(part) > self._limit:
            raise _too_large(self._limit)
        self.check()
        self._bodies.make_room(len(part), self)
        self.nbytes += len(part)
        self._bodies.held += len(part)
        if part:
            self._parts.append(part)

    def whole(self) -> bytes:
        self.check()  # its end may have been there when it gave way
        if self._unpacking is not None and not self._unpacking.eof:
            raise InvalidArgument(f"the {self._coding} body ends in the middle")
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"a body has at most {limit:,} bytes, also after it is unpacked: send less at once",
        limit="http_body_bytes",
        maximum=limit,
    )


def _no_room(why: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"{why}: send it again in a moment", limit="http_bodies_bytes", maximum=_ALL_BYTES_MAX, retry_s=1.0
    )
