"""A stream of NATS JetStream: the replicated engine under ``kivi.log.replicated``.

::

    nats = Nats(["nats://a:4222", "nats://b:4222", "nats://c:4222"])
    stream = JetStream(nats, "kivi-NAME-order", max_bytes=64 << 30)

**Writing.** A message is published with its name as ``Nats-Msg-Id``, many at a time; without an acknowledgement it is
published again under the same name, until ``give_up_s`` has passed. A window keeps below what a server takes at once.

**Reading.** No consumers: these are state of the servers that can be lost, and a position is ours. The leader
*republishes* every message that the quorum has, with its sequence; this is a plain subscription that loses what it
cannot take, so it is believed only as far as it follows on without a gap, and everything else is fetched by direct gets
in batches. Which server answers these is chance, and it answers from its own copy, silently without what that copy has
lost (measured: 899 of 1,500 messages, after one flipped bit). So what is missing is asked of the leader, and then of
others as often as it takes.

**What has to be true of the servers.** They sync every write (``sync_interval: always``): a stream cannot say so, so
``kivi.log.natsserver`` writes it into their configuration, and an operator does for others. They are 2.11.11 or newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import secrets
import threading
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kivi.errors import DiskFull, InvalidArgument, KiviError, NotFound, Unavailable
from kivi.log.natslink import Nats, status
from kivi.log.stream import Acknowledged, Message, Stream

if TYPE_CHECKING:
    from nats.aio.msg import Msg

__all__ = ["MAX_MESSAGE_BYTES", "JetStream", "delete_stream", "find_stream"]

_log = logging.getLogger("kivi.log")
T = TypeVar("T")
MAX_MESSAGE_BYTES: Final = 1 << 20
_HEADER_BYTES: Final = 1024
COPIES_MAX: Final = 3
_ATTEMPTS: Final = 24
"""Of three copies the only sound one is not asked in 6 of 100,000 cases: then a node stops that need not."""
_ANSWER_S: Final = 2.0
"""Without a leader nobody answers, and whoever waits longer than that misses the new one."""
_SET_UP_S: Final = 5.0
_KNOWN_S: Final = 3.0
"""Servers that have just started do not know every stream at once."""
_REPEAT_S: Final = 1.0
_SOON_S: Final = 0.1
_WINDOW_MESSAGES: Final = 4096  # a server queues 10,000 of a stream, and refuses more
_WINDOW_BYTES: Final = 32 << 20
_BOUNDS_S: Final = 0.25
"""For so long bounds count that were asked for, moved on by what was seen since: asking takes as long as a fetch."""
_BATCH_BYTES: Final = 16 << 20
_NEWS_BYTES: Final = 64 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_NOT_FOUND: Final = 10059
_NAME_IN_USE: Final = 10058
_NO_MESSAGE: Final = 10037
_NO_ROOM: Final = frozenset({10023, 10028, 10047, 10077})
"""Error codes: insufficient resources, limits of the account and of storage, max_bytes of the stream."""
_TOO_LARGE: Final = 10054
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class _Publish:
    name: str
    data: bytes
    done: Acknowledged
    gives_up_at: float
    due_at: float = 0.0
    """When to publish it again."""
    tokens: list[str] = field(default_factory=list)


class JetStream(Stream):
    """One stream, which is made if it is not there and ``create`` is set, and otherwise has to be as it would be made.

    ``max_bytes``: how large it may become; the servers keep ``room_bytes`` more, for what is on its way then, and for
    what has to be said so that it becomes smaller. ``copies``: how many servers are to have it (default: three, or one
    if there are fewer servers); one that has fewer gets them by ``grow``, and one that has more keeps them.
    ``metadata``: given to it by whoever makes it; the attribute says what it was given.

    Raises NotFound without ``create``, InvalidArgument if the stream is set up otherwise, DiskFull if the servers have
    no room for ``max_bytes``, Unavailable if they do not answer within ``timeout_s``.
    """

    def __init__(
        self,
        nats: Nats,
        name: str,
        *,
        max_bytes: int,
        room_bytes: int = 0,
        copies: int | None = None,
        create: bool = True,
        metadata: Mapping[str, str] | None = None,
        give_up_s: float = 15.0,
        timeout_s: float = 30.0,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{name!r} is no name of a stream: letters, digits, - and _ only")
        self.name = name
        copies = copies or (COPIES_MAX if len(nats.servers) >= COPIES_MAX else 1)
        self._nats, self._give_up_s, self.copies_wanted = nats, give_up_s, copies
        self._take_subject(f"kivi.log.{name}.{secrets.token_hex(8)}")
        self.on_news = lambda: None
        self.attempts = 1
        self._new: deque[_Publish] = deque()
        self._waiting: deque[_Publish] = deque()
        self._flying: dict[int, _Publish] = {}
        self._flying_bytes = 0
        self._flusher: asyncio.Task[None] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._news: deque[Message] = deque()
        self._news_size = 0
        self._bounds, self._bounds_until, self._bounds_at = (1, 0), 0.0, -math.inf
        self._bounds_lock = threading.Lock()
        self._seen_upto = 0
        """The newest message that was seen in any way since the bounds were asked for."""
        self._closed = False
        self.metadata: dict[str, str] = {}
        self._max_bytes, self._nbytes = max_bytes, 0
        wanted = {**self._configuration(max_bytes + room_bytes, copies), "metadata": dict(metadata or {})}
        _soon(lambda: self._verify(wanted, create), timeout_s)
        self.max_message_bytes = min(MAX_MESSAGE_BYTES, nats.link.open.max_payload - _HEADER_BYTES)
        nats.call(self._listen(), _SET_UP_S)

    # -- how it is set up -------------------------------------------------------------------------

    def _take_subject(self, subject: str) -> None:
        """Each stream that is made has one of its own: what is published to one that was deleted, by whoever does not
        know, comes into no other that has its name. One of an earlier version has that of its name."""
        self._subject, self._news_subject = subject, subject.replace("kivi.log.", "kivi.news.", 1)

    def _configuration(self, max_bytes: int, copies: int) -> dict[str, Any]:
        return {
            "name": self.name,
            "subjects": [self._subject],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "num_replicas": copies,
            "max_bytes": max_bytes,
            "max_age": 0,
            "max_msgs": -1,
            "max_msg_size": MAX_MESSAGE_BYTES + _HEADER_BYTES,
            "duplicate_window": 120_000_000_000,
            "deny_delete": True,
            "deny_purge": False,
            "allow_direct": True,
            "republish": {"src": self._subject, "dest": self._news_subject},
        }

    def _verify(self, wanted: dict[str, Any], create: bool) -> None:
        try:
            found = self._ask("STREAM.INFO")["config"]
        except NotFound:
            if not create:
                raise
            try:
                found = self._ask("STREAM.CREATE", wanted)["config"]
            except _InUse:  # another node has made it since
                found = self._ask("STREAM.INFO")["config"]
        for subject in found.get("subjects") or ():
            if subject.startswith(f"kivi.log.{self.name}"):
                self._take_subject(subject)
        wanted |= self._configuration(wanted["max_bytes"], wanted["num_replicas"])
        usual = {"deny_purge": False, "max_age": 0, "max_msgs": -1}
        self.metadata = found.get("metadata") or {}
        self._has(found["num_replicas"])
        judged = wanted.keys() - {"metadata", "num_replicas"}
        other = {key: found.get(key, usual.get(key)) for key in judged if found.get(key, usual.get(key)) != wanted[key]}
        if other:
            said = ", ".join(f"{key} is {value!r} and not {wanted[key]!r}" for key, value in other.items())
            raise InvalidArgument(
                f"the stream {self.name} is not set up for kivi: {said}; change it with nats stream edit"
            )

    def _has(self, copies: int) -> None:
        self.copies = copies
        self.attempts = 1 if copies == 1 else _ATTEMPTS

    def grow(self) -> None:
        """Asks for the copies that it is to have, if it has fewer; the servers make them while it is written and read.
        Raises Unavailable if there are not so many servers, or they do not answer."""
        if self.copies < self.copies_wanted:
            found = self._ask_there("STREAM.INFO")["config"]
            if found["num_replicas"] < self.copies_wanted:
                found = self._ask_there("STREAM.UPDATE", {**found, "num_replicas": self.copies_wanted})["config"]
            self._has(found["num_replicas"])

    def _ask(self, what: str, request: dict[str, Any] | None = None, timeout_s: float = _SET_UP_S) -> dict[str, Any]:
        return _ask(self._nats, self.name, what, request, timeout_s)

    # -- writing ----------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, done: Acknowledged) -> None:
        now = self._nats.loop.time()
        self._new.append(_Publish(name, data, done, now + self._give_up_s))
        try:
            self._nats.soon(self._wake)
        except RuntimeError:  # the loop is closed
            self._fail_all()

    def _wake(self) -> None:
        while self._new:
            self._waiting.append(self._new.popleft())
        if self._closed:
            self._fail_all()
        elif self._waiting and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.ensure_future(self._flush())
        if self._flying and (self._ticker is None or self._ticker.done()):
            self._ticker = asyncio.ensure_future(self._tick())

    async def _flush(self) -> None:
        """Publishes what waits, as far as the window goes."""
        while self._waiting and len(self._flying) < _WINDOW_MESSAGES and self._flying_bytes < _WINDOW_BYTES:
            one = self._waiting.popleft()
            self._flying[id(one)] = one
            self._flying_bytes += len(one.data)
            await self._publish(one)
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.ensure_future(self._tick())

    async def _publish(self, one: _Publish) -> None:
        one.due_at = self._nats.loop.time() + _REPEAT_S
        try:
            if one.tokens:
                await self._nats.link.undone(self._subject)
            token = await self._nats.link.send(
                self._subject, one.data, lambda message: self._acknowledged(one, message), {"Nats-Msg-Id": one.name}
            )
            one.tokens.append(token)
        except Exception as error:
            if type(error).__name__ == "MaxPayloadError":
                self._finish(one, InvalidArgument(f"a message of {len(one.data)} bytes is more than the server takes"))
            else:  # no connection: soon there is one, or it is given up
                one.due_at = self._nats.loop.time() + _SOON_S

    def _acknowledged(self, one: _Publish, message: Msg) -> None:
        if status(message) == "503":  # no leader now
            one.due_at = self._nats.loop.time() + _SOON_S
            return
        answer = json.loads(message.data)
        if "error" not in answer:
            self._nats.link.done(self._subject)
            self._see(answer["seq"])
            self._finish(one, None)
            return
        error = _error(self.name, answer["error"])
        if isinstance(error, DiskFull) and len(one.tokens) > 1:
            self._finish(one, Unavailable(f"{error.message}; an attempt before this one may have been taken"))
        elif isinstance(error, DiskFull | InvalidArgument):
            self._finish(one, error)
        else:
            one.due_at = self._nats.loop.time() + _SOON_S

    def _finish(self, one: _Publish, error: BaseException | None) -> None:
        if self._flying.pop(id(one), None) is None:
            return
        self._flying_bytes -= len(one.data)
        for token in one.tokens:
            self._nats.link.forget(token)
        one.done(error)
        if self._waiting and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.ensure_future(self._flush())

    async def _tick(self) -> None:
        """Publishes again what has not been acknowledged in time, under the same name."""
        while self._flying or self._waiting:
            await asyncio.sleep(_SOON_S)
            now = self._nats.loop.time()
            for one in [*self._flying.values()]:
                if now >= one.gives_up_at:
                    self._finish(one, Unavailable(f"the stream {self.name} has not acknowledged a message in time"))
                elif now >= one.due_at:
                    await self._publish(one)
            self._wake()

    def _fail_all(self) -> None:
        while self._new:
            self._waiting.append(self._new.popleft())
        rest = [*self._flying.values(), *self._waiting]
        self._flying, self._flying_bytes = {}, 0
        self._waiting.clear()
        for one in rest:
            one.done(Unavailable(f"the stream {self.name} was closed before this message was acknowledged"))

    # -- reading ----------------------------------------------------------------------------------

    async def _listen(self) -> None:
        client = self._nats.link.open
        self._nats.link.on_connected = self._reconnected
        self._subscription = await client.subscribe(self._news_subject, cb=self._heard)
        await client.flush()

    def _reconnected(self) -> None:
        self._news = deque()
        self._news_size = 0
        self._bounds_until = 0.0
        self._tell()

    async def _heard(self, message: Msg) -> None:
        """Keeps the newest messages as far as they follow on one another."""
        news = _decode(message)
        if self._news and news.sequence != self._news[-1].sequence + 1:
            self._news = deque()  # another thread may be reading the old one
            self._news_size = 0
        self._news.append(news)
        self._see(news.sequence)
        self._news_size += len(news.data)
        while self._news_size > _NEWS_BYTES:
            self._news_size -= len(self._news.popleft().data)
        self._tell()

    def _tell(self) -> None:
        try:
            self.on_news()
        except Exception:
            _log.exception("what waits for news of the stream %s has failed", self.name)

    def fetch(self, first: int, count: int, attempt: int = 0) -> Sequence[Message]:
        if attempt == 0 and (heard := self._from_news(first, count)):
            return heard
        if attempt == 1:
            return self._of_leader(first)
        request = json.dumps({"seq": first, "batch": count, "max_bytes": _BATCH_BYTES}).encode()
        work = self._nats.link.request_many(f"$JS.API.DIRECT.GET.{self.name}", request, _ANSWER_S)
        found = [_decode(answer) for answer in self._nats.call(work, _ANSWER_S + 1) if not status(answer)]
        if found:
            self._see(found[-1].sequence)
        return found

    def _of_leader(self, sequence: int) -> list[Message]:
        """One message, from the copy of the leader."""
        try:
            found = self._ask("STREAM.MSG.GET", {"seq": sequence}, _ANSWER_S)["message"]
        except _NoMessage:
            return []
        self._see(found["seq"])
        return [Message(found["seq"], _micros(found["time"]), b64decode(found.get("data", "")))]

    def check_copies(self) -> None:
        cluster = self._ask_there("STREAM.INFO").get("cluster") or {}
        for replica in cluster.get("replicas") or ():
            if replica.get("offline") or not replica.get("current"):
                raise Unavailable(f"the copy of the stream {self.name} on {replica['name']} is away or behind")

    def _from_news(self, first: int, count: int) -> list[Message]:
        """What the leader has republished; [] if this does not begin with ``first``, or is gone."""
        with contextlib.suppress(IndexError, RuntimeError):  # the event loop changes it: then it is fetched
            news = self._news
            if news and news[0].sequence <= first <= news[-1].sequence:
                begin = first - news[0].sequence
                found = [news[at] for at in range(begin, min(begin + count, len(news)))]
                if found and found[0].sequence == first and found[-1].sequence == first + len(found) - 1:
                    return found
        return []

    def bounds(self) -> tuple[int, int]:
        """As the leader has said a moment ago, or more: never below what was seen since."""
        with self._bounds_lock:
            now = time.monotonic()
            if now >= self._bounds_until:
                self._seen_upto, self._bounds_at = 0, now  # what was seen before is in the answer, or is lost
                info = self._ask_there("STREAM.INFO")
                self._has(info["config"]["num_replicas"])  # another node may have had it grow
                state = info["state"]
                last, self._nbytes = state["last_seq"], state["bytes"]
                self._bounds = (state["first_seq"] if state["messages"] else last + 1), last
                self._bounds_until = now + _BOUNDS_S
            first, last = self._bounds
            return first, max(last, self._seen_upto)

    @property
    def bounds_at(self) -> float:
        return self._bounds_at

    def _see(self, sequence: int) -> None:
        self._seen_upto = max(self._seen_upto, sequence)

    @property
    def used(self) -> float:
        return self._nbytes / self._max_bytes

    def info(self) -> dict[str, Any]:
        """What its leader says of it, as JetStream's API has it. Raises Unavailable."""
        return self._ask_there("STREAM.INFO")

    def purge(self, below: int) -> None:
        first, last = self.bounds()
        if below > first:
            self._ask_there("STREAM.PURGE", {"seq": min(below, last + 1)})
            self._bounds_until = 0.0

    def _ask_there(self, what: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Of the stream that was there: servers that have just started do not know it yet."""
        try:
            return self._ask(what, request, _ANSWER_S)
        except NotFound as error:
            raise Unavailable(f"{error.message}: the servers may be starting, or somebody has deleted it") from None

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(Unavailable, RuntimeError):
            self._nats.call(self._end(), _SET_UP_S)
        self._fail_all()

    async def _end(self) -> None:
        for task in (self._flusher, self._ticker):
            if task is not None:
                task.cancel()
        self._fail_all()
        with contextlib.suppress(Exception):
            await self._subscription.unsubscribe()


def find_stream(nats: Nats, name: str, timeout_s: float) -> dict[str, Any] | None:
    """What the leader of a stream says of it, as JetStream's API has it; None if there is none. Raises Unavailable."""
    with contextlib.suppress(NotFound):
        return _soon(lambda: _ask(nats, name, "STREAM.INFO"), timeout_s)
    return None


def delete_stream(nats: Nats, name: str, timeout_s: float) -> None:
    """All of it, for good; nothing if there is none. Raises Unavailable."""
    with contextlib.suppress(NotFound):
        _soon(lambda: _ask(nats, name, "STREAM.DELETE"), timeout_s)


def _soon(ask: Callable[[], T], timeout_s: float) -> T:
    """Servers that are starting elect a leader first, place no stream on one that has not called yet, and then do not
    know every stream at once."""
    began = time.monotonic()
    while True:
        try:
            return ask()
        except (Unavailable, NotFound) as error:
            patience_s = min(timeout_s, _KNOWN_S) if isinstance(error, NotFound) else timeout_s
            if isinstance(error, DiskFull) or time.monotonic() > began + patience_s:
                raise
        time.sleep(_SOON_S)


def _ask(
    nats: Nats, name: str, what: str, request: dict[str, Any] | None = None, timeout_s: float = _SET_UP_S
) -> dict[str, Any]:
    """An answer of JetStream's API about a stream. Raises NotFound, DiskFull, Unavailable."""
    payload = b"" if request is None else json.dumps(request).encode()
    message = nats.call(nats.link.request(f"$JS.API.{what}.{name}", payload, timeout_s), timeout_s + 1)
    answer: dict[str, Any] = json.loads(message.data)
    if error := answer.get("error"):
        raise _error(name, error)
    return answer


def _error(name: str, error: dict[str, Any]) -> KiviError:
    code, said = error.get("err_code"), error.get("description", "")
    if code in _NO_ROOM:
        return DiskFull(f"the stream {name} is full ({said}): nothing is taken until it is truncated")
    if code == _NO_MESSAGE:
        return _NoMessage(f"the leader of the stream {name} has no such message")
    if code == _NOT_FOUND:
        return NotFound(f"there is no stream {name}")
    if code == _NAME_IN_USE:
        return _InUse(f"there is another stream {name}")
    if code == _TOO_LARGE:
        return InvalidArgument(f"a message is larger than the stream {name} takes")
    return Unavailable(f"the stream {name}: {said}")


class _InUse(InvalidArgument):
    """Another stream has the name."""


class _NoMessage(Unavailable):
    """The leader's copy does not have a message."""


def _decode(message: Msg) -> Message:
    headers = message.headers or {}
    return Message(int(headers["Nats-Sequence"]), _micros(headers["Nats-Time-Stamp"]), message.data)


def _micros(stamp: str) -> int:
    """Of a time as JetStream writes it: ``2026-11-26T21:46:30.123456789Z``."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return _seconds(seconds) * 1_000_000 + int(fraction[:6].ljust(6, "0"))


@lru_cache(4)
def _seconds(stamp: str) -> int:
    return int((datetime.fromisoformat(stamp).replace(tzinfo=UTC) - _EPOCH).total_seconds())
