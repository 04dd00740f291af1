"""What clients send: read against limits, of one request and of all together, also after it is unpacked.

A body that is longer than ``BODY_BYTES_MAX`` is 413, one that does not come in time is 408. gzip is unpacked piece by
piece, so that some bytes that stand for gigabytes stop at the limit.
"""

from __future__ import annotations

import asyncio
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
_PIECE: Final = 1 << 20


class Bodies:
    """Of one server; its event loop's."""

    def __init__(self) -> None:
        self.held = 0

    @asynccontextmanager
    async def read(self, request: Request, limit: int = BODY_BYTES_MAX) -> AsyncIterator[bytes]:
        """The body, unpacked; what it takes is counted until the block ends.

        Raises BodyTooLarge, RequestTimeout, UnsupportedMediaType, InvalidArgument for what is no gzip, and
        ResourceExhausted while others' bodies take all the room.
        """
        coding = request.headers.get("content-encoding", "identity").lower()
        if coding not in ("identity", "gzip"):
            raise UnsupportedMediaType(f"Content-Encoding {coding!r} is not understood: send gzip, or leave it out")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        body = _Body(self, limit, unpacks=coding == "gzip")
        try:
            try:
                async with asyncio.timeout(_WHOLE_S):
                    async for piece in request.stream():
                        body.add(piece)
            except TimeoutError:
                raise RequestTimeout(f"the body did not come within {_WHOLE_S:g} s: send it again, or less") from None
            except ClientDisconnect:
                raise RequestTimeout("the connection ended before the body did") from None
            yield body.whole()
        finally:
            self.held -= body.nbytes


class _Body:
    def __init__(self, bodies: Bodies, limit: int, *, unpacks: bool) -> None:
        self._bodies, self._limit, self.nbytes = bodies, limit, 0
        self._parts: list[bytes] = []
        self._unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16) if unpacks else None

    def add(self, piece: bytes) -> None:
        if self._unpacking is None:
            self._keep(piece)
            return
        try:
            while piece:
                self._keep(self._unpacking.decompress(piece, _PIECE))
                piece = self._unpacking.unconsumed_tail
        except zlib.error as error:
            raise InvalidArgument(f"the body is not gzip, as Content-Encoding says: {error}") from None
        if self._unpacking.unused_data:
            raise InvalidArgument("something follows the gzip body: send one member")

    def _keep(self, part: bytes) -> None:
        if self.nbytes + len(part) > self._limit:
            raise _too_large(self._limit)
        if self._bodies.held + len(part) > _ALL_BYTES_MAX:
            raise ResourceExhausted(
                f"{self._bodies.held:,} bytes of requests are being worked on, and {_ALL_BYTES_MAX:,} are the limit: "
                "send it again in a moment",
                limit="http_bodies_bytes",
                maximum=_ALL_BYTES_MAX,
                retry_s=1.0,
            )
        self.nbytes += len(part)
        self._bodies.held += len(part)
        if part:
            self._parts.append(part)

    def whole(self) -> bytes:
        if self._unpacking is not None and not self._unpacking.eof:
            raise InvalidArgument("the gzip body ends in the middle")
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"a body has at most {limit:,} bytes, also after it is unpacked: send less at once",
        limit="http_body_bytes",
        maximum=limit,
    )
