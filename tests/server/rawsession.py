"""The session stream without the client library: frames as any language would send them."""

from __future__ import annotations

import queue
from typing import Any

import grpc

from kivi.wire.v1 import session_pb2 as pb


class RawSession:
    def __init__(self, endpoint: str) -> None:
        self.channel = grpc.insecure_channel(endpoint)
        self.frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: Any = self.channel.stream_stream("/kivi.v1.Kivi/Session")
        self.call = method(iter(self.frames.get, None), timeout=30)
        self.hello = pb.ServerFrame.FromString(next(self.call)).hello
        self.replies: list[pb.Response] = []  # that nobody has asked for yet

    def send(self, *requests: pb.Request) -> None:
        self.frames.put(pb.ClientFrame(requests=requests).SerializeToString())

    def reply(self, number: int) -> pb.Response:
        """The first one of this number."""
        while (found := next((reply for reply in self.replies if reply.id == number), None)) is None:
            self.replies += pb.ServerFrame.FromString(next(self.call)).responses
        self.replies.remove(found)
        return found

    def close(self) -> None:
        self.frames.put(None)
        self.call.cancel()
        self.channel.close()
