"""The channel and its session stream, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import grpc

from kivi import client_methods as methods
from kivi.client_core import Ask, ConnectionLost, Core, Effect, Sleep, Steps, Stream, Timeout, Unary, Upload, backoff_s
from kivi.client_errors import from_error, from_rpc_error
from kivi.errors import InvalidArgument, KiviError, ResourceExhausted, Unavailable
from kivi.wire.v1 import service_pb2, session_pb2

__all__ = ["Transport"]

T = TypeVar("T")
_FRAME_BYTES: Final = 1 << 20
_REPEATABLE: Final = frozenset({"Describe", "ListTables", "Watermark", "Stats", "DiscardStages"})


class _Session:
    """One stream and its two tasks. Once broken it stays broken."""

    def __init__(self, transport: Transport, epoch: int, wait_for_ready: bool) -> None:
        self.epoch = epoch
        self.broken: KiviError | None = None
        self.hello = asyncio.Event()
        self._transport = transport
        self._out: list[bytes] = []
        self._wake = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[session_pb2.Response]] = {}
        self._ids = itertools.count(1)
        self._call = transport.open(wait_for_ready)
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._send()), self._loop.create_task(self._receive())]

    def put(self, request: session_pb2.Request) -> None:
        data = session_pb2.ClientFrame(requests=(request,)).SerializeToString()
        if len(data) > methods.MESSAGE_BYTES_MAX:
            raise ResourceExhausted(
                f"the request has {len(data)} bytes; the limit message_bytes_max is {methods.MESSAGE_BYTES_MAX}: "
                "send less at once",
                limit="message_bytes_max",
                maximum=methods.MESSAGE_BYTES_MAX,
            )
        self._out.append(data)
        self._wake.set()

    async def ask(self, request: session_pb2.Request, timeout_s: float | None) -> session_pb2.Response:
        if self.broken is not None:
            raise self._lost(sent=False)
        number = request.id = next(self._ids)
        self.put(request)
        waiting = self._waiting[number] = self._loop.create_future()
        handle = None
        if timeout_s is not None:
            handle = self._loop.call_later(timeout_s, self._expire, number, timeout_s)
        try:
            reply: session_pb2.Response = await waiting
        finally:
            self._waiting.pop(number, None)
            if handle is not None:
                handle.cancel()
        if reply.HasField("error"):
            raise from_error(reply.error)
        return reply

    def _expire(self, number: int, timeout_s: float) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            endpoint = self._transport.core.endpoint
            waiting.set_exception(Timeout(f"no answer from {endpoint} within {timeout_s:g} s"))

    def _lost(self, sent: bool) -> KiviError:
        if isinstance(self.broken, Unavailable) or self.broken is None:
            return ConnectionLost(f"the connection to {self._transport.core.endpoint} was lost", sent=sent)
        return type(self.broken)(self.broken.message, **self.broken.details)

    async def _send(self) -> None:
        """Each time the stream is ready: everything that has gathered, in frames of about a megabyte."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._out:
                    size = end = 0
                    while end < len(self._out) and (end == 0 or size + len(self._out[end]) <= _FRAME_BYTES):
                        size += len(self._out[end])
                        end += 1
                    frame = b"".join(self._out[:end])
                    del self._out[:end]
                    await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the receiving task learns why

    async def _receive(self) -> None:
        reason: KiviError = Unavailable("the server ended the session")
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                frame = session_pb2.ServerFrame.FromString(data)
                if frame.HasField("hello"):
                    self._transport.session = frame.hello.session
                    self.hello.set()
                for reply in frame.responses:
                    waiting = self._waiting.get(reply.id)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                reason = await self._failure(code)
        except grpc.RpcError as error:
            reason = from_rpc_error(error)
        except asyncio.CancelledError:
            if self.broken is None:
                self._break(Unavailable("the session was cancelled"))
            raise
        except Exception as error:
            reason = Unavailable(f"the session failed: {error!r}")
        self._break(reason)

    async def _failure(self, code: grpc.StatusCode) -> KiviError:
        details, trailing = await self._call.details(), await self._call.trailing_metadata()
        return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))

    def _break(self, reason: KiviError) -> None:
        if self.broken is None:
            self.broken = reason
        self.hello.set()
        self._call.cancel()
        self._tasks[0].cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._lost(sent=True))

    async def close(self) -> None:
        self._break(Unavailable("this client is closed"))
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


class Transport:
    """The channel and the current session; performs effects for the awaiting task."""

    def __init__(self, core: Core, access_token: str | None, tls: methods.Tls | None) -> None:
        self.core = core
        self.session = b""
        options = methods.channel_options(tls)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(core.endpoint, options)
        else:
            self._channel = grpc.aio.secure_channel(core.endpoint, methods.credentials(tls), options)
        self._metadata = methods.metadata(access_token)
        self._calls: dict[str, Any] = {}
        self._current: _Session | None = None
        self._epochs = 0
        self._closed = False

    def open(self, wait_for_ready: bool) -> Any:
        call: Any = self._channel.stream_stream(methods.path("Session"))
        return call(metadata=self._metadata, wait_for_ready=wait_for_ready)

    async def connect(self) -> None:
        """The first session: fails at once if nothing listens there."""
        session = self._open(wait_for_ready=False)
        try:
            await asyncio.wait_for(session.hello.wait(), self.core.timeout_s)
        except TimeoutError:
            await self.close()
            raise Unavailable(f"no answer from {self.core.endpoint} within {self.core.timeout_s:g} s") from None
        if session.broken is not None:
            await self.close()
            if isinstance(session.broken, Unavailable):
                raise Unavailable(f"cannot reach {self.core.endpoint}: {session.broken.message}")
            raise session.broken

    def _open(self, wait_for_ready: bool = True) -> _Session:
        session = self._current
        if session is None or session.broken is not None:
            if self._closed:
                raise InvalidArgument("this client is closed")
            self._epochs += 1
            session = self._current = _Session(self, self._epochs, wait_for_ready)
        return session

    def tell(self, request: session_pb2.Request, epoch: int | None = None) -> int:
        if epoch is not None:
            session = self._current
            if session is None or session.epoch != epoch or session.broken is not None:
                return epoch
        else:
            session = self._open()
        session.put(request)
        return session.epoch

    async def ask(self, effect: Ask) -> session_pb2.Response:
        if effect.epoch is None:
            session = self._open()
        else:
            current = self._current
            if current is None or current.epoch != effect.epoch:
                raise ConnectionLost(sent=False)
            session = current
        return await session.ask(effect.request, effect.timeout_s)

    async def unary(self, effect: Unary) -> Any:
        call: Any = self._calls.get(effect.method)
        if call is None:
            sent, returned = methods.UNARY[effect.method]
            call = self._channel.unary_unary(
                methods.path(effect.method),
                request_serializer=sent.SerializeToString,
                response_deserializer=returned.FromString,
            )
            self._calls[effect.method] = call
        deadline, attempt = self.core.deadline(), 0
        while True:
            self._open()  # raises once closed
            try:
                return await call(
                    effect.message, timeout=effect.timeout_s, metadata=self._metadata, wait_for_ready=True
                )
            except grpc.RpcError as error:
                lost = error.code() == grpc.StatusCode.UNAVAILABLE
                if not (lost and effect.method in _REPEATABLE and time.monotonic() < deadline):
                    raise from_rpc_error(error) from None
            attempt += 1
            await asyncio.sleep(backoff_s(attempt + 4))

    async def stream(self, effect: Stream) -> None:
        sent, returned = methods.STREAMED[effect.method]
        call = self._channel.unary_stream(
            methods.path(effect.method),
            request_serializer=sent.SerializeToString,
            response_deserializer=returned.FromString,
        )(effect.message, timeout=effect.timeout_s, metadata=self._metadata, wait_for_ready=True)
        try:
            async for message in call:
                effect.on_message(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def upload(self, effect: Upload) -> Any:
        messages: Iterator[Any] = effect.messages()
        try:
            return await self._channel.stream_unary(
                methods.path(effect.method),
                request_serializer=service_pb2.StageRequest.SerializeToString,
                response_deserializer=service_pb2.StageResponse.FromString,
            )(messages, timeout=effect.timeout_s, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def perform(self, effect: Effect) -> Any:
        if isinstance(effect, Ask):
            return await self.ask(effect)
        if isinstance(effect, Unary):
            return await self.unary(effect)
        if isinstance(effect, Sleep):
            return await asyncio.sleep(effect.seconds)
        if isinstance(effect, Stream):
            return await self.stream(effect)
        return await self.upload(effect)

    async def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                try:
                    result = await self.perform(effect)
                except KiviError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            steps.close()

    async def close(self) -> None:
        self._closed = True
        if self._current is not None:
            await self._current.close()
        await self._channel.close()
