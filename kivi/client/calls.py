"""What both clients' transports share: the service's calls over a channel, the sessions' epochs, and gRPC's failures.

``grpc`` and ``grpc.aio`` have channels with the same methods; of one a call returns its answer, of the other something
to await.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import count, islice, repeat
from typing import Any, Final, Generic, TypeVar

import grpc

from kivi.client.core import Core
from kivi.client.steps import (
    Answer,
    Ask,
    Closed,
    CommitPlain,
    Committed,
    ConnectionLost,
    Maker,
    Message,
    Page,
    Rows,
    Stream,
    Unary,
    Upload,
    silent,
)
from kivi.errors import InvalidArgument, KiviError, ResourceExhausted, Unavailable
from kivi.wire import methods
from kivi.wire.columns import rows_of
from kivi.wire.frames import Packet, padded, split
from kivi.wire.status import from_error, from_rpc_error
from kivi.wire.v1 import session_pb2

__all__ = [
    "FRAME_BYTES",
    "Calls",
    "Link",
    "Queued",
    "Session",
    "answer",
    "broken_by",
    "encoded",
    "failed",
    "leaving",
    "received",
    "together",
    "unreachable",
]

FRAME_BYTES: Final = 1 << 20  # a frame is sent when it has grown to this, whatever else waits


class Calls:
    """The service's calls over one channel; ``kind`` is the module whose channel it is."""

    def __init__(self, kind: Any, endpoint: str, access_token: str | None, tls: methods.Tls | None) -> None:
        target = methods.target(endpoint)
        options = methods.channel_options(tls, several=target != endpoint)
        if tls is not None and target != endpoint and not tls.server_name:
            raise InvalidArgument(
                "one name has to be in the certificates of all servers: kivi.Tls(..., server_name=NAME)"
            )
        if tls is None:
            self.channel = kind.insecure_channel(target, options)
        else:
            self.channel = kind.secure_channel(target, methods.credentials(tls), options)
        self._metadata = methods.metadata(access_token)
        self._made: dict[str, Any] = {}

    def session(self, *frames: Any, wait_for_ready: bool, received: Callable[[bytes], object] | None = None) -> Any:
        """The session's stream, of encoded frames, or of what ``received`` makes of each, where gRPC receives it."""
        call = self.channel.stream_stream(methods.path("Exchange"), response_deserializer=received)
        return call(*frames, metadata=self._metadata, wait_for_ready=wait_for_ready)

    def subscriptions(self, *requests: Any, wait_for_ready: bool) -> Any:
        """The stream of subscriptions, of encoded messages."""
        call = self.channel.stream_stream(methods.path("Subscribe"))
        return call(*requests, metadata=self._metadata, wait_for_ready=wait_for_ready)

    def start(self, effect: Unary | Stream | Upload) -> Any:
        call = self._made.get(effect.method)
        if call is None:
            make = {
                Unary: self.channel.unary_unary,
                Stream: self.channel.unary_stream,
                Upload: self.channel.stream_unary,
            }[type(effect)]
            sent, returned = methods.messages(effect.method)
            call = self._made[effect.method] = make(
                methods.path(effect.method),
                request_serializer=sent.SerializeToString,
                response_deserializer=returned.FromString,
            )
        message = effect.messages() if isinstance(effect, Upload) else effect.message
        return call(message, timeout=effect.timeout_s, metadata=self._metadata, wait_for_ready=True)


class Session(ABC):
    """One stream of a session. Once broken it stays broken. ``hello`` is an Event of the driver's kind."""

    def __init__(self, core: Core, epoch: int, hello: Any) -> None:
        self.epoch = epoch
        self.broken: KiviError | None = None
        self.left = False
        """Nothing new is asked of it: its server takes nothing now, and it ends once it has answered."""
        self.hello = hello
        self.releases = Releases(self.put)
        self._core = core
        self._commits = Commits(self.put)
        self._ids = count(1)

    @abstractmethod
    def put(self, request: Message, bodies: Sequence[Any] = ()) -> None:
        """Queues what is to be sent."""

    @property
    @abstractmethod
    def is_awaited(self) -> bool:
        """Whether somebody waits for an answer."""

    @abstractmethod
    def end(self, reason: KiviError) -> None:
        """Whoever waits is told so, and nothing is asked of it any more. Harmless twice."""

    def _queue(self, number: int, asked: Ask | CommitPlain) -> None:
        """A plain commit leaves together with others."""
        if isinstance(asked, CommitPlain) and not self._commits.is_full:
            self._commits.add((number, asked.writes, asked.token))
        else:
            request = asked.request
            request.id = number
            self.put(request, asked.bodies)

    def _answers(self, data: bytes) -> list[tuple[int, Answer]]:
        """Those in a frame, each with the number of its request."""
        frame, found = received(data)
        if frame.HasField("hello"):
            self._commits.most = frame.hello.limits.commit_each_max
            self._core.value_bytes_max = frame.hello.limits.value_bytes_max
            self.hello.set()
        return found

    def _lost(self, *, sent: bool) -> KiviError:
        """What a request is told that this session took along: why it broke, where the server said why and the request
        had not been ``sent``. What became of one that was is not known, and the next attempt meets the reason."""
        if sent or isinstance(self.broken, Unavailable) or self.broken is None:
            return ConnectionLost(f"the connection to {self._core.endpoint} was lost", sent=sent)
        return type(self.broken)(self.broken.message, **self.broken.details)


S = TypeVar("S", bound=Session)
G = TypeVar("G")
P = TypeVar("P", bound=Sized)


class Link(Generic[S]):
    """The channel and the current session; each session that follows another is of a new epoch.

    ``new_session`` begins one: the stream of a client's transport, of that epoch; it may wait for the server.

    Of several servers each has a channel that tries it first, and then the others in their order, which is left to
    chance. A channel stays with a server that answers. So who leaves a session goes on with the next channel; reads
    that are under way on the one before end there.
    """

    def __init__(
        self, core: Core, calls_of: Callable[[str], Calls], new_session: Callable[[Any, int, bool], S]
    ) -> None:
        self.core = core
        self._calls_of = calls_of
        names = core.endpoint.split(",")
        random.shuffle(names)  # so that clients spread over the nodes
        self._orders = deque(",".join(names[i:] + names[:i]) for i in range(len(names)))
        self._at: dict[str, Calls] = {}
        self.calls = self._calls_at(self._orders[0])
        self._behind: list[S] = []
        """Sessions that were left, as long as somebody waits for what was asked there."""
        self._new_session = new_session
        self._current: S | None = None
        self._epochs = 0
        self._closed = False
        self._why_closed = "this client is closed"

    def open(self, wait_for_ready: bool = True) -> S:
        """The current session, or a new one if it is broken or was left. Raises Closed once the client is."""
        session = self._current
        if session is None or session.broken is not None or session.left:
            self.check_open()
            if session is not None and session.left:
                self._orders.rotate(-1)
                self.calls = self._calls_at(self._orders[0])
                self._behind.append(session)
            for behind in [each for each in self._behind if not each.is_awaited]:
                behind.end(Unavailable("the server takes nothing now"))
                self._behind.remove(behind)
            self._epochs += 1
            session = self._current = self._new_session(self, self._epochs, wait_for_ready)
        return session

    def check_open(self) -> None:
        """Raises Closed."""
        if self._closed:
            raise Closed(self._why_closed)

    @property
    def is_reached(self) -> bool:
        """Whether there is a session whose server has answered."""
        session = self._current
        return session is not None and session.broken is None and session.hello.is_set()

    def _calls_at(self, address: str) -> Calls:
        """Of the server there, or of whichever answers first of several; "" is the one of the session."""
        if not address:
            return self.calls
        if address not in self._at:
            self._at[address] = self._calls_of(address)
        return self._at[address]

    def leave(self, epoch: int | None) -> None:
        """Whatever begins from here on begins on another session than that one; None: than the current one."""
        session = self._current
        if session is not None and epoch in (None, session.epoch):
            session.left = True

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
            session.releases.add(number)

    def _alive(self, epoch: int) -> S | None:
        session = self._current
        return session if session is not None and session.epoch == epoch and session.broken is None else None


_GATHERED_MAX: Final = 2_048


class Ready(list[Maker]):
    """What makes a message that waits for no company."""


class Gathered(ABC, Generic[G]):
    """What is gathered until the message leaves that has all of it. ``put`` queues that message, where none is."""

    kind: type[list[Maker]] = list

    def __init__(self, put: Callable[[Message], None]) -> None:
        self._put = put
        self._waiting: deque[G] = deque()
        self._queued: list[Maker] = []
        """The message, until it leaves: the sender takes out what makes it first, and then what has gathered."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, one: G) -> None:
        """Threads may call it at the same time."""
        self._waiting.append(one)
        if not self._queued:  # the last one has left, perhaps with this one: then the next has nothing
            queued = self.kind((self._made,))
            self._put(queued)
            self._queued = queued  # after that: an interrupt in between costs a message, and no one waits for ever

    def _made(self) -> Any:
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        return self._message(taken) if taken else None

    @abstractmethod
    def _message(self, taken: list[G]) -> Any:
        """A request, or some, encoded."""


class Releases(Gathered[int]):
    """Transactions to let go of."""

    def _message(self, taken: list[int]) -> session_pb2.Request:
        return session_pb2.Request(release=session_pb2.Release(txns=taken))


class Commits(Gathered[tuple[int, bytes, str]]):
    """Commits of deltas and puts, in columns: their numbers, writes and tokens. Of one session."""

    kind = Ready
    most = 1  # of one CommitEach, as far as is known

    @property
    def is_full(self) -> bool:
        """There are enough for some messages: more go by themselves, so that no message is too large."""
        return len(self) >= _GATHERED_MAX

    def _message(self, taken: list[tuple[int, bytes, str]]) -> Packet:
        frame = session_pb2.ClientFrame()
        for i in range(0, len(taken), self.most):
            numbers, writes, tokens = zip(*taken[i : i + self.most], strict=True)
            places = {each: i for i, each in enumerate(dict.fromkeys(writes))}
            each = frame.requests.add().commit_each
            each.ids.extend(numbers)
            each.tokens.extend(tokens)
            each.writes.extend(places)
            if len(places) > 1:
                each.does.extend([places[written] for written in writes])
        return Packet(frame.SerializeToString())


def together(parts: list[P], out: Any, leaving: Callable[[Any], P]) -> tuple[list[P], P | None]:
    """What is sent as one message, and the part that is left for the next: with it there might be too much for one.

    ``parts`` are what it begins with, ``out`` the queue of what may travel along, as ``leaving`` makes it. None in that
    queue is its end, and stays there.
    """
    size = sum(map(len, parts))
    while not out.empty():  # nobody else takes from it
        queued = out.get_nowait()
        if queued is None:
            out.put(None)
            break
        part = leaving(queued)
        if size + len(part) > FRAME_BYTES:
            return parts, part
        parts.append(part)
        size += len(part)
    return parts, None


def leaving(queued: Queued) -> Packet:
    """What is sent of it: nothing, if it was taken back, or is wanted no more."""
    if isinstance(queued, Packet):
        return queued
    if not queued:
        return _NOTHING
    try:
        make = queued.pop()
    except IndexError:
        return _NOTHING
    request = make()
    if isinstance(request, Packet):
        return request
    return _NOTHING if request is None else encoded(request)


_NOTHING: Final = Packet(b"")


# -- failures -----------------------------------------------------------------------------------------


Queued = Packet | list[Maker]


def encoded(request: session_pb2.Request, bodies: Sequence[Any] = ()) -> Packet:
    """A request on its own. Raises ResourceExhausted for one that no message can hold."""
    if bodies:
        request.body_bytes = sum([padded(memoryview(body).nbytes) for body in bodies])
    packet = Packet.request(request, bodies)
    if len(packet) > _HEADER_MAX:  # which is the lesser of the two
        check_size("message_bytes_max", methods.MESSAGE_BYTES_MAX - _ROOM, len(packet))
        check_size("header_bytes_max", _HEADER_MAX, len(packet.header))
    return packet


_ROOM: Final = 64 << 10  # for what else a frame may have: what is small and leaves along with it
_HEADER_MAX: Final = methods.HEADER_BYTES_MAX - _ROOM


def check_size(limit: str, maximum: int, size: int) -> None:
    """Raises ResourceExhausted."""
    if size > maximum:
        raise ResourceExhausted(
            f"the request has {size} bytes; the limit {limit} is {maximum}: send less at once",
            limit=limit,
            maximum=maximum,
        )


def received(data: bytes) -> tuple[session_pb2.ServerFrame, list[tuple[int, Answer]]]:
    """A frame: the number of each request that is answered, and its answer."""
    header, bodies = split(data)
    frame = session_pb2.ServerFrame.FromString(header)
    found: list[tuple[int, Answer]] = []
    for reply in frame.responses:
        match reply.WhichOneof("body"):
            case "commit_each":
                each = reply.commit_each
                began = count(each.commit_ts - 1) if each.blind else repeat(reply.start_ts)
                found += zip(each.ids, map(Committed, count(each.commit_ts), began), strict=False)
            case "get":
                found += _rows(reply) if reply.get.ids else [(reply.id, Rows(reply.start_ts, _in_order(reply.get)))]
            case "begin" if reply.begin.ids:
                found += zip(reply.begin.ids, repeat(Rows(reply.start_ts, ())), strict=False)
            case "page":
                page = reply.page
                arrow = bodies.take(reply.body_bytes) if reply.body_bytes else b""
                since_us = page.complete_since_us if page.HasField("complete_since_us") else None
                told = (page.explanation, since_us, page.row_groups, page.shards)
                found.append((reply.id, Page(reply.start_ts, page.scan, arrow, page.columns, *told)))
            case _:
                found.append((reply.id, reply))
    return frame, found


def _rows(reply: session_pb2.Response) -> Iterable[tuple[int, Rows]]:
    get, rows = reply.get, _in_order(reply.get)
    begun = get.start_ts or repeat(reply.start_ts)
    if not get.counts:
        return zip(get.ids, map(Rows, begun, zip(rows, strict=False)), strict=False)
    left = iter(rows)
    return zip(get.ids, map(Rows, begun, [[*islice(left, size)] for size in get.counts]), strict=False)


def _in_order(get: session_pb2.GetReply) -> list[Any]:
    """For each key its row, or None."""
    rows: list[Any] = rows_of(get.columns)
    if not get.missing:
        return rows
    missing, found = {*get.missing}, iter(rows)
    return [None if place in missing else next(found) for place in range(get.keys)]


def answer(reply: Answer) -> Answer:
    """The reply, or the error that it carries, raised."""
    if isinstance(reply, session_pb2.Response) and reply.HasField("error"):
        raise from_error(reply.error)
    return reply


def unreachable(endpoint: str, reason: KiviError) -> KiviError:
    """Why the first session failed."""
    return Unavailable(f"cannot reach {endpoint}: {reason.message}") if isinstance(reason, Unavailable) else reason


def broken_by(error: Exception, what: str) -> KiviError:
    """Why a stream ended, which ``what`` names."""
    return from_rpc_error(error) if isinstance(error, grpc.RpcError) else Unavailable(f"{what} failed: {error!r}")


def failed(error: grpc.RpcError, endpoint: str, timeout_s: float | None) -> KiviError:
    """A call's failure; one whose time was up says so in our words."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        return silent(endpoint, timeout_s)
    return from_rpc_error(error)
