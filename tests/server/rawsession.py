"""The session stream without the client library: frames as any language would send them."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc

from kivi.wire.columns import rows_of
from kivi.wire.frames import Packet, joined, padded, split
from kivi.wire.v1 import session_pb2 as pb

__all__ = ["RawSession", "Sent", "each_alone", "frame", "rows"]


Sent = pb.Request | tuple[pb.Request, bytes]
"""A request, or one with a body."""


def frame(*requests: Sent) -> bytes:
    """As it is sent."""
    packets = []
    for sent in requests:
        request, *bodies = sent if isinstance(sent, tuple) else (sent,)
        assert isinstance(request, pb.Request)
        if bodies:
            request.body_bytes = padded(len(bodies[0]))
        packets.append(Packet(pb.ClientFrame(requests=[request]).SerializeToString(), bodies))
    return joined(packets)


def rows(reply: pb.GetReply) -> list[list[Any] | None]:
    """Of each key the row's values in stored form."""
    found = iter(rows_of(reply.columns))
    return [None if place in reply.missing else [*next(found)] for place in range(reply.keys)]


def each_alone(response: pb.Response) -> Iterator[pb.Response]:
    """An answer to many as one to each."""
    if response.HasField("commit_each"):
        for cts, number in enumerate(response.commit_each.ids, response.commit_each.commit_ts):
            yield pb.Response(id=number, start_ts=cts - 1, commit=pb.CommitReply(commit_ts=cts))
    elif response.begin.ids:
        for number in response.begin.ids:
            yield pb.Response(id=number, start_ts=response.start_ts)
    elif response.get.ids:
        get, found = response.get, iter(rows_of(response.get.columns))
        place = 0
        for i, number in enumerate(get.ids):
            one = pb.Response(id=number, start_ts=get.start_ts[i] if get.start_ts else response.start_ts)
            one.get.keys = get.counts[i] if get.counts else 1
            mine = []
            for key in range(one.get.keys):
                if place + key in get.missing:
                    one.get.missing.append(key)
                else:
                    mine.append(next(found))
            place += one.get.keys
            for cells, whole in zip(zip(*mine, strict=True), get.columns, strict=mine != []):
                column = one.get.columns.add(nulls=[k for k, cell in enumerate(cells) if cell is None])
                (member,) = (field.name for field, _ in whole.ListFields() if field.name != "nulls")
                absent = type(getattr(whole, member)[0])()
                getattr(column, member).extend([absent if cell is None else cell for cell in cells])
            yield one
    else:
        yield response


class RawSession:
    def __init__(self, endpoint: str, timeout_s: float = 110) -> None:
        self.channel = grpc.insecure_channel(endpoint)
        self.frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: Any = self.channel.stream_stream("/kivi.v1.Kivi/Exchange")
        self.call = method(iter(self.frames.get, None), timeout=timeout_s)
        self.hello = pb.ServerFrame.FromString(split(next(self.call))[0]).hello
        self.replies: list[pb.Response] = []  # that nobody has asked for yet
        self.pages: dict[int, bytes] = {}  # the bodies of those with a page, by their numbers

    def send(self, *requests: Sent) -> None:
        self.frames.put(frame(*requests))

    def reply(self, number: int) -> pb.Response:
        """The first one of this number."""
        while (found := next((reply for reply in self.replies if reply.id == number), None)) is None:
            header, bodies = split(next(self.call))
            for response in pb.ServerFrame.FromString(header).responses:
                self.replies += each_alone(response)
                self.pages[response.id] = bytes(bodies.take(response.body_bytes))
        self.replies.remove(found)
        return found

    def close(self) -> None:
        self.frames.put(None)
        self.call.cancel()
        self.channel.close()
