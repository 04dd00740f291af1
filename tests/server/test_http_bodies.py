"""Bodies by themselves: what they take together, and who gives way to whom."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any, Final

import pytest
from kivi_server.http import bodies
from kivi_server.http.bodies import Bodies
from starlette.requests import Request

from kivi.errors import ResourceExhausted

ROOM: Final = 1_000


class Sender:
    """A body that comes in pieces, when it is told to send them."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __call__(self) -> dict[str, Any]:
        piece = await self.pieces.get()
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    async def read(self, by: Bodies, *headers: tuple[bytes, bytes]) -> bytes:
        async with by.read(Request({"type": "http", "method": "POST", "headers": headers}, self)) as body:
            return body

    async def send(self, piece: bytes | None) -> None:
        self.pieces.put_nowait(piece)
        await asyncio.sleep(0.01)


def test_who_sends_slowly_gives_way_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_ALL_BYTES_MAX", ROOM)

    async def test() -> None:
        by = Bodies()
        senders = [Sender() for _ in range(4)]
        reading = [asyncio.create_task(sender.read(by)) for sender in senders]
        for sender in senders[:3]:
            await sender.send(b"x" * 300)
        assert by.held == 900
        await senders[3].send(b"y" * 300)  # none of them is slow yet: it is this one that is refused
        with pytest.raises(ResourceExhausted) as refused:
            await reading[3]
        assert refused.value.details["retry_s"] == 1.0
        monkeypatch.setattr(bodies, "_SLOW_S", 0.0)
        late = Sender()
        whole = asyncio.create_task(late.read(by))
        await asyncio.sleep(0)
        await late.send(b"z" * 300)
        with pytest.raises(ResourceExhausted, match="others need the memory"):
            await reading[0]
        assert by.held == 900
        await senders[1].send(b"x" * 300)  # and so does whoever has sent something meanwhile
        with pytest.raises(ResourceExhausted, match="others need the memory"):
            await reading[2]
        for sender in (late, senders[1]):
            await sender.send(None)
        assert await whole == b"z" * 300 and await reading[1] == b"x" * 600
        assert by.held == 0

    asyncio.run(test())


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_a_body_whose_end_comes_as_it_gives_way_is_refused_and_not_taken_for_an_empty_one(coding: str) -> None:
    async def test() -> None:
        by, slow = Bodies(), Sender()
        reading = asyncio.create_task(slow.read(by, (b"content-encoding", coding.encode())))
        await slow.send(gzip.compress(b"x" * 900) if coding == "gzip" else b"x" * 900)
        (body,) = by._coming
        slow.pieces.put_nowait(None)  # its end is there, and who reads it runs next
        body.give_way()
        with pytest.raises(ResourceExhausted, match="others need the memory"):
            await reading
        assert by.held == 0

    asyncio.run(test())


def test_bombs_are_unpacked_a_piece_at_a_turn_of_the_event_loop() -> None:
    async def test() -> None:
        by, turns, whole = Bodies(), 0, bytes(4 << 20)

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting, senders = asyncio.create_task(count()), [Sender() for _ in range(3)]
        reading = [asyncio.create_task(sender.read(by, (b"content-encoding", b"gzip"))) for sender in senders]
        for sender in senders:
            sender.pieces.put_nowait(gzip.compress(whole))
            sender.pieces.put_nowait(None)
        assert await asyncio.gather(*reading) == [whole] * 3
        counting.cancel()
        assert turns >= 3 * len(whole) / bodies._PIECE

    asyncio.run(test())
