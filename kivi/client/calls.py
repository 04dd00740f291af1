"""What both clients' transports share: the service's calls over a channel, the sessions' epochs, and gRPC's failures.

``grpc`` and ``grpc.aio`` have channels with the same methods; of one a call returns its answer, of the other something
to await.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, repeat
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc

from kivi.client.core import Core
from kivi.client.steps import Answer, Closed, ConnectionLost, Got, Maker, Message, Stream, Timeout, Unary, Upload
from kivi.errors import KiviError, ResourceExhausted, Unavailable
from kivi.wire import methods
from kivi.wire.codec import delimited, prefix, tag
from kivi.wire.status import from_error, from_rpc_error
from kivi.wire.v1 import service_pb2, session_pb2

__all__ = [
    "FRAME_BYTES",
    "Calls",
    "Commits",
    "Link",
    "Queued",
    "Ready",
    "Releases",
    "answer",
    "answers",
    "encoded",
    "failed",
    "leaving",
    "lost",
    "silent",
    "unreachable",
]

FRAME_BYTES: Final = 1 << 20  # a frame is sent when it has grown to this, whatever else waits


class Calls:
    """The service's calls over one channel; ``kind`` is the module whose channel it is."""

    def __init__(self, kind: Any, endpoint: str, access_token: str | None, tls: methods.Tls | None) -> None:
        options = methods.channel_options(tls)
        if tls is None:
            self.channel = kind.insecure_channel(endpoint, options)
        else:
            self.channel = kind.secure_channel(endpoint, methods.credentials(tls), options)
        self._metadata = methods.metadata(access_token)
        self._made: dict[str, Any] = {}

    def session(self, *frames: Any, wait_for_ready: bool, received: Callable[[bytes], object] | None = None) -> Any:
        """The session's stream, of encoded frames, or of what ``received`` makes of each, where gRPC receives it."""
        call = self.channel.stream_stream(methods.path("Session"), response_deserializer=received)
        return call(*frames, metadata=self._metadata, wait_for_ready=wait_for_ready)

    def subscriptions(self, *requests: Any) -> Any:
        """The stream of subscriptions, of encoded messages."""
        call = self.channel.stream_stream(methods.path("Subscribe"))
        return call(*requests, metadata=self._metadata, wait_for_ready=True)

    def start(self, effect: Unary | Stream | Upload) -> Any:
        call = self._made.get(effect.method)
        if call is None:
            make, known = {
                Unary: (self.channel.unary_unary, methods.UNARY),
                Stream: (self.channel.unary_stream, methods.STREAMED),
                Upload: (self.channel.stream_unary, methods.UPLOADED),
            }[type(effect)]
            sent, returned = known[effect.method]
            call = self._made[effect.method] = make(
                methods.path(effect.method),
                request_serializer=sent.SerializeToString,
                response_deserializer=returned.FromString,
            )
        message = effect.messages() if isinstance(effect, Upload) else effect.message
        return call(message, timeout=effect.timeout_s, metadata=self._metadata, wait_for_ready=True)


class Session(Protocol):
    """One stream of a session. Once broken it stays broken."""

    epoch: int
    broken: KiviError | None

    def put(self, request: Message) -> None: ...

    def release(self, number: int) -> None: ...


S = TypeVar("S", bound=Session)


class Link(ABC, Generic[S]):
    """The channel and the current session; each session that follows another is of a new epoch."""

    def __init__(self, core: Core, calls: Calls) -> None:
        self.core = core
        self.calls = calls
        self.session = b""
        self._current: S | None = None
        self._epochs = 0
        self._closed = False
        self._why_closed = "this client is closed"

    @abstractmethod
    def _begun(self, wait_for_ready: bool) -> S:
        """A new session's stream."""

    def open(self, wait_for_ready: bool = True) -> S:
        """The current session, or a new one if it is broken. Raises Closed once the client is."""
        session = self._current
        if session is None or session.broken is not None:
            if self._closed:
                raise Closed(self._why_closed)
            self._epochs += 1
            self.core.commits_each = False  # until the server has said so
            session = self._current = self._begun(wait_for_ready)
        return session

    def epoch(self) -> int:
        return self.open().epoch

    def of(self, epoch: int | None) -> S:
        """The session of that epoch; None: any. Raises ConnectionLost if another has followed it."""
        if epoch is None:
            return self.open()
        session = self._current
        if session is None or session.epoch != epoch:
            raise ConnectionLost(sent=False)
        return session

    def tell(self, request: Message, epoch: int | None = None) -> int:
        session = self.open() if epoch is None else self._alive(epoch)
        if session is not None:
            session.put(request)
            epoch = session.epoch
        return epoch or 0

    def release(self, number: int, epoch: int) -> None:
        session = self._alive(epoch)
        if session is not None:
            session.release(number)

    def _alive(self, epoch: int) -> S | None:
        session = self._current
        return session if session is not None and session.epoch == epoch and session.broken is None else None


class Releases:
    """Transactions to let go of: gathered until the message leaves that names them all."""

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()
        self._queued = False

    def add(self, number: int) -> Message | None:
        """A message to queue, unless one is. Threads may call it at the same time."""
        self._numbers.append(number)
        if self._queued:  # what makes the message sets this first and then looks, and finds the number
            return None
        self._queued = True
        return [self._message]

    def _message(self) -> session_pb2.Request:
        self._queued = False
        release, numbers = session_pb2.Release(), self._numbers
        for _ in range(len(numbers)):
            release.txns.append(numbers.popleft())
        return session_pb2.Request(release=release)


_GATHERED_MAX: Final = 4_096


class Ready(list[Maker]):
    """What makes a message that waits for no company."""


class Commits:
    """Plain commits: gathered until the message leaves that has them all, in columns. Of one session."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes, str]] = deque()
        self._queued = False
        self.most = 0  # of one CommitEach; 0: the server takes none, as far as is known

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """There are enough for some messages: more go by themselves, so that no message is too large."""
        return len(self._waiting) >= _GATHERED_MAX

    def add(self, number: int, writes: bytes, token: str) -> Message | None:
        """A message to queue, unless one is. Threads may call it at the same time."""
        self._waiting.append((number, writes, token))
        if self._queued:  # as with ``Releases``
            return None
        self._queued = True
        return Ready((self._message,))

    def _message(self) -> bytes:
        self._queued = False
        waiting = self._waiting
        taken = [waiting.popleft() for _ in range(len(waiting))]
        most = self.most or 1  # the client may have learnt that its server takes them before this session has
        if len(taken) <= most:
            return _commit_each(taken)
        return b"".join([_commit_each(taken[i : i + most]) for i in range(0, len(taken), most)])


def _commit_each(commits: Sequence[tuple[int, bytes, str]]) -> bytes:
    if not commits:
        return b""
    numbers, writes, tokens = zip(*commits, strict=True)
    places = {each: i for i, each in enumerate(dict.fromkeys(writes))}
    message = session_pb2.CommitEach(ids=numbers, tokens=tokens)
    if len(places) > 1:
        message.does.extend([places[each] for each in writes])
    parts = [part for each in places for part in (prefix(_WRITES, len(each)), each)]
    body = b"".join((*parts, message.SerializeToString()))
    return delimited(_TAG, delimited(_COMMIT_EACH, body))


_WRITES: Final = tag(session_pb2.CommitEach, "writes")
_COMMIT_EACH: Final = tag(session_pb2.Request, "commit_each")


_TAG: Final = b"\x0a"  # of ``ClientFrame.requests`` and ``SubscribeRequest.begin``: field 1, length-delimited


def leaving(queued: Queued) -> bytes:
    """What is sent of it: nothing, if it was taken back, or is wanted no more."""
    if type(queued) is bytes:
        return queued
    if not queued:
        return b""
    try:
        make = queued.pop()  # type: ignore[union-attr]
    except IndexError:
        return b""
    request = make()
    if isinstance(request, bytes):
        return request
    return b"" if request is None else encoded(request)


# -- failures -----------------------------------------------------------------------------------------


Queued = bytes | list[Maker]


def encoded(request: session_pb2.Request | service_pb2.BeginSubscription, payload: Any = None) -> bytes:
    """A request as a message of its own. Raises ResourceExhausted for one that no message can hold.

    ``payload``: the events of its only operation. They are copied once, and not by way of two messages.
    """
    data = delimited(_TAG, request.SerializeToString()) if payload is None else _with_aligned_payload(request, payload)
    if len(data) > methods.MESSAGE_BYTES_MAX:
        raise ResourceExhausted(
            f"the request has {len(data)} bytes; the limit message_bytes_max is {methods.MESSAGE_BYTES_MAX}: "
            "send less at once",
            limit="message_bytes_max",
            maximum=methods.MESSAGE_BYTES_MAX,
        )
    return data


def _with_aligned_payload(request: Any, payload: Any) -> bytes:
    """With the payload at a multiple of eight bytes, and at the end: a server reads it where it lies."""
    head, size = session_pb2.Request(), memoryview(payload).nbytes
    head.CopyFrom(request)
    (operation,) = head.operations
    appended = operation.SerializeToString() + prefix(_ARROW, size)
    head.ClearField("operations")
    last = prefix(_OPERATIONS, len(appended) + size) + appended
    for padding in range(2 * _ALIGNED):  # what says how long it all is may be longer by a byte itself
        head.padding = bytes(padding)
        rest = head.SerializeToString() + last
        begin = prefix(_TAG, len(rest) + size) + rest
        if len(begin) % _ALIGNED == 0:
            break
    return b"".join((begin, payload))


_ALIGNED: Final = 8
_OPERATIONS: Final = tag(session_pb2.Request, "operations")
_ARROW: Final = tag(session_pb2.Operation, "arrow")


def answers(frame: session_pb2.ServerFrame) -> Iterator[tuple[int, Answer]]:
    """The number of each request that is answered, and its answer."""
    for reply in frame.responses:
        if reply.id:
            yield reply.id, reply
            continue
        match reply.WhichOneof("body"):
            case "commit_each":
                each = reply.commit_each
                began = count(each.commit_ts - 1) if each.blind else repeat(reply.start_ts)
                yield from zip(each.ids, zip(count(each.commit_ts), began), strict=False)
            case "get_each":
                yield from _rows(reply.get_each, reply.start_ts)
            case _:
                yield reply.id, reply


def _rows(each: session_pb2.GetEachReply, start_ts: int) -> Iterator[tuple[int, Got]]:
    integers, width = [*each.integers], len(each.integers) // max(1, len(each.ids))
    places = range(0, len(integers), max(1, width))
    rows = [integers[at : at + width] for at in places] if width else repeat(integers)
    return zip(each.ids, zip(each.start_ts or repeat(start_ts), rows, strict=False), strict=False)


def answer(reply: Answer) -> Answer:
    """The reply, or the error that it carries, raised."""
    if isinstance(reply, session_pb2.Response) and reply.HasField("error"):
        raise from_error(reply.error)
    return reply


def lost(endpoint: str, broken: KiviError | None, *, sent: bool) -> KiviError:
    """What a request is told that a broken session took along: why it broke, where the server said why."""
    if isinstance(broken, Unavailable) or broken is None:
        return ConnectionLost(f"the connection to {endpoint} was lost", sent=sent)
    return type(broken)(broken.message, **broken.details)


def silent(endpoint: str, timeout_s: float | None) -> Timeout:
    return Timeout(f"no answer from {endpoint} within {timeout_s:g} s")


def unreachable(endpoint: str, reason: KiviError) -> KiviError:
    """Why the first session failed."""
    return Unavailable(f"cannot reach {endpoint}: {reason.message}") if isinstance(reason, Unavailable) else reason


def failed(error: grpc.RpcError, endpoint: str, timeout_s: float | None) -> KiviError:
    """A call's failure; one whose time was up says so in our words."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        return silent(endpoint, timeout_s)
    return from_rpc_error(error)
