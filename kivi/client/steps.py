"""The core of both clients, without I/O: every call as *steps* that a driver carries out.

A step is an effect (``Ask`` a request of the session, make a ``Unary`` or ``Stream`` call, ``Sleep``)
that a generator yields; the driver performs it and sends the result, or throws the error, back in. The
sync client performs effects on the calling thread, the asyncio client awaits them. Everything else is
here once: validation against the cached schema, building requests, reading replies, what to do when a
connection is lost.

What a lost connection means
----------------------------
* A request that belongs to no transaction is sent again; a commit among them under its token, so that
  the server applies it once.
* A transaction's commit that was sent and not answered: ask ``outcome(token)`` until the deadline, then
  CommitUnknown. "Aborted" is final (the server fences the attempt), and becomes Disconnected.
* Anything else of a transaction: its state died with the session. A snapshot that has been read is
  opened again at the same timestamp if the server still keeps it, a transaction that has neither read
  nor sent anything begins again, all else is SnapshotTooOld.

Reads never go backwards (R17): the largest commit timestamp and snapshot this client has seen travel
with every Begin, and the server waits for its watermark to reach them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from kivi import errors
from kivi.wire.frames import Packet
from kivi.wire.v1 import session_pb2, types_pb2

__all__ = [
    "Answer",
    "Ask",
    "Closed",
    "CommitPlain",
    "Committed",
    "ConnectionLost",
    "Do",
    "Effect",
    "Maker",
    "Message",
    "Page",
    "Receive",
    "RequestMaker",
    "Rows",
    "Sleep",
    "Steps",
    "Stream",
    "Timeout",
    "Transport",
    "Unary",
    "Upload",
    "Work",
    "named",
    "silent",
    "timeout_ms",
]

T = TypeVar("T")


class ConnectionLost(errors.Unavailable):
    """The session broke before the answer came. ``sent``: the request may have reached the server."""

    def __init__(self, message: str = "the connection to the server was lost", *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class Timeout(errors.Unavailable):
    """No answer within the client's timeout; the request may have reached the server."""


def no_text(error: UnicodeEncodeError) -> errors.InvalidArgument:
    """Of a string that no message can hold."""
    return errors.InvalidArgument(f"{error.object!r:.200} is no text: it has half of a character, a lone surrogate")


def silent(endpoint: str, timeout_s: float | None) -> Timeout:
    return Timeout(f"no answer from {endpoint} within {timeout_s:g} s")


class Closed(errors.Unavailable):
    """The caller has closed this client: nothing is tried again."""


@dataclass(slots=True)
class Ask:
    """One request of the session; ``epoch`` names the session it must travel in, None: any.

    ``bodies`` are those of its operations (``kivi.wire.frames``).
    """

    request: session_pb2.Request
    timeout_s: float | None
    epoch: int | None = None
    bodies: Sequence[Any] = ()


@dataclass(slots=True)
class Work:
    """What takes a processor for a while: on a thread of its own, where another waits for nobody. ``asked`` is sent
    before it begins, and the result is its answer; None: nothing is asked."""

    work: Callable[[], object]
    asked: Ask | None = None


@dataclass(slots=True)
class CommitPlain:
    """A commit of a transaction that has not begun: ``writes`` are the bytes of its operations, which are plain.

    The result is ``Committed``, or a Response as of any commit.
    """

    writes: bytes
    token: str
    timeout_s: float | None
    epoch: int | None
    bodies: ClassVar[Sequence[Any]] = ()

    @property
    def request(self) -> session_pb2.Request:
        """As a request of its own."""
        request = session_pb2.Request.FromString(self.writes)
        request.commit.token = self.token
        return request


class Committed(NamedTuple):
    """One of the commits that are answered together."""

    commit_ts: int
    start_ts: int


class Rows(NamedTuple):
    """Answers a Get: for each of its keys the row's values in stored form, or None. No keys: it tells the snapshot."""

    start_ts: int
    rows: Sequence[tuple[Any, ...] | None]


class Page(NamedTuple):
    """Some rows of a scan: an Arrow IPC stream, the bodies of ``row_groups``, or rows in ``columns``. ``scan`` 0: it is
    the last one; of others ``at`` says where the scan is: the transaction's number and the session. ``shards``: of
    which alone the rows of the scan are; 0: of all."""

    start_ts: int
    scan: int
    arrow: bytes | memoryview
    columns: Sequence[types_pb2.ColumnValues]
    explanation: str = ""
    complete_since_us: int | None = None
    row_groups: Sequence[session_pb2.RowGroup] = ()
    shards: int = 0
    at: Any = None


Answer = session_pb2.Response | Committed | Rows | Page
"""What a request of the session is answered."""


@dataclass(slots=True)
class Unary:
    method: str
    message: Any
    timeout_s: float | None


@dataclass(slots=True)
class Stream:
    """A server stream: ``on_message`` is called with each answer."""

    method: str
    message: Any
    timeout_s: float | None
    on_message: Callable[[Any], None]


@dataclass(slots=True)
class Upload:
    """A client stream with one answer."""

    method: str
    messages: Callable[[], Iterator[Any]]
    timeout_s: float | None


@dataclass(slots=True)
class Sleep:
    seconds: float


@dataclass(slots=True)
class Receive:
    """The next that comes into a queue of the driver's kind. Raises Timeout."""

    inbox: Any
    timeout_s: float | None


@dataclass(slots=True)
class Do:
    """What a driver's own objects do, such as clients of other nodes. For asyncio it gives something to await."""

    call: Callable[[], Any]


Effect = Ask | CommitPlain | Work | Unary | Stream | Upload | Sleep | Receive | Do
Steps = Generator[Effect, Any, T]
M = TypeVar("M", bound=Callable[..., Any])


def named(method: M, steps: Callable[..., Any]) -> M:
    """``method``, which carries out ``steps``, as editors and ``inspect`` are to see it: their arguments and result."""
    signature = inspect.signature(steps)
    whose, *taken = signature.parameters.values()  # of a function its first argument is whose steps they are
    signature = signature.replace(parameters=[whose.replace(name="self"), *taken])
    result = str(signature.return_annotation).removeprefix("Steps[").removesuffix("]")
    method.__name__, method.__qualname__ = steps.__name__, steps.__qualname__
    method.__annotations__ = {**steps.__annotations__, "return": result}
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    return method


class Transport(Protocol):
    """What a driver offers besides performing effects."""

    def run(self, steps: Steps[Any]) -> Any:
        """The result of steps; for asyncio something to await."""

    def lines_at(self, address: str) -> Any: ...

    """``line()`` gives the current ``kivi.client.subscription_messages.Line``, or another; it raises Closed."""

    def epoch(self) -> int:
        """That of the current session, or of a new one. Raises Closed once the client is."""

    def tell(self, request: Message, epoch: int | None = None) -> int:
        """Queues a request that wants no answer; returns the epoch of the session it travels in.

        With ``epoch`` it is dropped when that session is gone.
        """

    def leave(self, epoch: int | None) -> None:
        """What begins from here on begins on another session than that one; None: than the current one."""

    def release(self, number: int, epoch: int) -> None:
        """Lets go of that session's transaction, together with others, when the next message leaves."""


RequestMaker = Callable[[], session_pb2.Request | None]
"""Makes a request when it leaves; None: it is wanted no more."""
Maker = RequestMaker | Callable[[], Packet]
"""The same, or some requests, encoded."""
Message = session_pb2.Request | list[Maker]
"""What is queued: a request, or what makes one when it leaves, in a list of its own from where it may be taken back."""


def timeout_ms(timeout_s: float | None) -> int:
    return 0 if timeout_s is None else max(1, int(min(timeout_s * 1000, 0xFFFFFFFF)))
