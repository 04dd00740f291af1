"""A client from before 0.2 and a server of today, and the other way round: each says who has to be upgraded."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

import kivi
from kivi.wire.status import DETAILS_KEY, from_rpc_error
from kivi.wire.v1 import service_pb2

OLD_FRAME = base64.b64decode("ChIIARABchAKDAgBEAEiAmsxKgAyAA==")
"""Something like what a client of 0.1.0 sends first: a ClientFrame without a length before it."""
OLD_HELLO = base64.b64decode("CjMKBTAuMS4wEhIIgICAIBCAgAQYgICACCDAhD0aEDAxMjM0NTY3ODlhYmNkZWYiBHNlc3M=")


def test_an_old_client_is_told_to_upgrade(server: Any) -> None:
    """As 0.1.0 does it: it opens Session and waits for the first frame. It shows its caller what it is told."""
    with grpc.insecure_channel(server.endpoint) as channel:
        session: Any = channel.stream_stream("/kivi.v1.Kivi/Session")
        for frames in ([], [OLD_FRAME]):
            call = session(iter(frames), timeout=60)
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
            error = from_rpc_error(refused.value)
            assert type(error) is kivi.InvalidArgument and "older than 0.2" in error.message
            trailing: Any = refused.value.trailing_metadata()
            (details,) = [value for name, value in trailing if name == DETAILS_KEY]
            assert status_pb2.Status.FromString(details).message == error.message


def test_an_old_client_may_make_all_calls_besides(server: Any, db: Any, accounts: str) -> None:
    with grpc.insecure_channel(server.endpoint) as channel:
        describe = channel.unary_unary(
            "/kivi.v1.Kivi/Describe",
            request_serializer=service_pb2.DescribeRequest.SerializeToString,
            response_deserializer=service_pb2.DescribeResponse.FromString,
        )
        assert describe(service_pb2.DescribeRequest(name=accounts), timeout=60).table.name == accounts


@pytest.fixture
def old_server() -> Iterator[str]:
    """One that has Session and no Exchange."""

    def session(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield OLD_HELLO
        for _ in frames:
            pass

    methods: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(session)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kivi.v1.Kivi", methods),))
    port = server.add_insecure_port("localhost:0")
    server.start()
    yield f"localhost:{port}"
    server.stop(None)


def test_a_client_says_that_its_server_is_too_old(old_server: str) -> None:
    with pytest.raises(kivi.InvalidArgument, match="older than 0.2"):
        kivi.connect(old_server, timeout=5)

    async def connect() -> None:
        await kivi.aio.connect(old_server, timeout=5)

    with pytest.raises(kivi.InvalidArgument, match="older than 0.2"):
        asyncio.run(connect())
