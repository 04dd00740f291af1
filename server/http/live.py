"""``GET /v1/live``: subscriptions as server-sent events, over the hub that gRPC's subscriptions use.

::

    GET /v1/live?table=endpoint_5m&prefix=251&order_by=-slowest&limit=10
    GET /v1/live?table=server_5m&by=application&step=1m&last=15m
    GET /v1/live?table=invocations&where=status >= 500&since=now

    id: 812
    data: {"snapshot":812,"reset":true,"changes":[{"kind":"add","old":null,"new":0,"row":{...}}]}

====================== =============================================================================================
table                  the table (required)
prefix, where, columns as of /rows
order_by, limit,       the order, and the part of it that is followed
offset
by, step, tz, last,    aggregates: the rollup that is followed; ``last=15m`` is a range that moves with the newest
from, to               slot. Other than of /rows all is combined in one where by is not given, and the columns that
                       tell the rows apart are told beside those of ``columns``
since                  of events: those committed after this commit timestamp, or from ``now`` on; else all of them
interval_ms            at most one event in each; default 100
of                     in place of all others: a query of these parameters, as text; several are followed in one stream
====================== =============================================================================================

What ``changes`` are and in which order they are applied is said by ``kivi.model.subscriptions``: rows are told as a
state and how it changes, where an event has ``reset`` the changes begin from nothing; events of an event table (without
order and limit) each once, in commit order. ``id`` is the snapshot, of events with the number of those after it
(``812.3``): a client that connects again sends the last one as ``Last-Event-ID`` and goes on there. Of a state that
is not at hand any more it gets ``reset``. An ``id`` alone says that nothing changed up to there. What ends the stream
is the event ``error``, with ``{"error": ..., "reason": ...}``.

A page that shows several states follows them as one stream (``of=table%3Da&of=table%3Db``: browsers have six
connections for each origin). What belongs to the first is the event ``part0``, to the second ``part1``. Each says about
once in its interval up to which snapshot it is current, so that a page can put together the states of one snapshot.
After a disconnection all begin anew.

**What holds.**

1. *Every state is what the query gives at the snapshot that it names*, hierarchies being as they were when its client
   came. Clients of an equal query share one subscription (a channel) and the text of its updates, until a hierarchy
   changes, of which those that come later have another one. Who joins gets the whole state as of the newest update, or,
   where ``Last-Event-ID`` is one of the last updates, what came after it; then all that follow, in order.
2. *A client that reads slowly makes nobody wait and holds no more than ``_QUEUED_BYTES``.* What waits for it is thrown
   away then, and the next it gets is the whole state (``reset``). Of events nothing is thrown away: it has a
   subscription of its own, which the hub asks for more only when the last has left.
3. *A token that is withdrawn, or not for the table any more, ends the stream* with the next update or heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final

from kivi_server.auth import Access, Grant
from kivi_server.clients import Client
from kivi_server.http.access import Door, client_of
from kivi_server.http.errors import body_of
from kivi_server.http.rendering import compact, plain, reads_doubles
from kivi_server.http.rows import LIMIT_MAX, moment_us, names_of, parameters, prefix_of, slot_from, whole
from kivi_server.status import told as told_error
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kivi.api.arguments import SubscribeArguments, type_of
from kivi.api.subscription import told
from kivi.errors import InvalidArgument, KiviError, Unauthenticated
from kivi.live.lives import Live
from kivi.model.given import shown
from kivi.model.predicate_text import split_names, where
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Change, Query, Update, applied

__all__ = ["Channels", "Wanted", "until_left"]

_PARAMETERS: Final = frozenset(
    "table prefix where columns order_by limit offset by step tz last from to since interval_ms".split()  # noqa: SIM905
)
_HEARTBEAT_MS: Final = 10_000
_SOON_MS: Final = 200
_PARTS_MAX: Final = 16
_QUEUED_BYTES: Final = 1 << 20
_REMEMBERED: Final = 64
_REMEMBERED_BYTES: Final = 256 << 10
_MANY: Final = 256
"""Changes that are rendered off the event loop."""


class Wanted:
    """One query of a request. ``last``: the Last-Event-ID. Raises InvalidArgument, NotFound, SchemaError."""

    def __init__(
        self,
        door: Door,
        grant: Grant,
        client: Client,
        query: str,
        last: str = "",
        *,
        is_part: bool = False,
        doubles: bool = False,
    ) -> None:
        self.client = client
        self.doubles = doubles
        self.given, several = parameters(query, _PARAMETERS, ("prefix",))
        self.is_part = is_part
        if "table" not in self.given:
            raise InvalidArgument("parameter table is required")
        self.table = self.given["table"]
        grant.require(Access.READ, "subscribing", self.table)
        self.tenant = grant.tenant
        schema = door.store.table(self.table, tenant=self.tenant)
        self.arguments = self._arguments(door, schema, several["prefix"], last)
        self.of_events = self.arguments.of_events(schema)
        if is_part and self.of_events:
            raise InvalidArgument(f"events of {self.table!r} have a stream of their own: give an order and a limit")
        if is_part:
            self.arguments.heartbeat_ms = max(self.arguments.interval_ms, _SOON_MS)
        self.bound(schema)  # says what is wrong with it, before there is an answer
        hierarchies = door.store.hierarchies_changed_at
        form = is_part, doubles
        self.key: Hashable = (self.tenant, form, hierarchies, *several["prefix"], None, *sorted(self.given.items()))

    def bound(self, schema: TableSchema) -> Query:
        """The query, of the rows that the caller may see. Raises SchemaError, InvalidArgument, PermissionDenied."""
        query = self.arguments.bound(schema)
        if self.tenant is None:
            return query
        return replace(query, scan=self.tenant.narrowed(schema, query.scan))

    @staticmethod
    def all_of(door: Door, grant: Grant, request: Request) -> list[Wanted]:
        """Those of a request: one, or the parts that it names. Raises likewise."""
        client, doubles = client_of(request), reads_doubles(request.headers.get("accept", ""))
        if "of" not in request.query_params:
            last = request.headers.get("last-event-id", "")
            return [Wanted(door, grant, client, request.url.query, last, doubles=doubles)]
        names, texts = zip(*request.query_params.multi_items(), strict=True)
        if {*names} != {"of"} or len(texts) > _PARTS_MAX:
            raise InvalidArgument(f"up to {_PARTS_MAX} queries are each in a parameter of, and there are no others")
        return [Wanted(door, grant, client, text, is_part=True, doubles=doubles) for text in texts]

    def _arguments(self, door: Door, schema: TableSchema, prefix: list[str], last: str) -> SubscribeArguments:
        given = self.given
        types = {name: str(type_of(schema, name)) for name in schema.output_names}
        selected: dict[str, Any] = {
            "prefix": prefix_of(schema, prefix),
            "where": where(given["where"], types, "parameter where") if "where" in given else None,
        }
        columns = split_names(given["columns"]) if "columns" in given else None
        if rolls := given.keys() & {"by", "step", "tz", "last", "from", "to"}:
            if schema.kind != "aggregate":
                raise InvalidArgument(f"parameter {min(rolls)} is for aggregates, and {schema.name!r} is none")
            by = names_of(given.get("by", ""))
            if columns is not None:
                columns = [name for name in columns if name not in schema.key_names]
            rollup: dict[str, Any] = {name: given[name] for name in ("step", "tz", "last") if name in given}
            rollup |= {n: slot_from(schema, moment_us(given, of)) for n, of in (("start", "from"), ("end", "to"))}
            selected = {"rollup": {"by": by, "measures": columns, **rollup, **selected}}
        else:
            selected["columns"] = columns
        since, skip = self._begins(door, last)
        return SubscribeArguments(
            self.table,
            **selected,
            order_by=split_names(given["order_by"]) if "order_by" in given else (),
            limit=self._number("limit", None),
            offset=self._number("offset", 0) or 0,
            interval_ms=self._number("interval_ms", 100) or 0,
            heartbeat_ms=_HEARTBEAT_MS,
            since=since,
            skip=skip,
        )

    def _number(self, name: str, otherwise: int | None) -> int | None:
        text = self.given.get(name)
        number = otherwise if text is None else whole(text)
        if text is not None and (number is None or number > 10 * LIMIT_MAX):
            raise InvalidArgument(f"parameter {name} is a number up to {10 * LIMIT_MAX:,}, not {shown(text)}")
        return number

    def _begins(self, door: Door, last: str) -> tuple[int | None, int]:
        """Of events; of states ``joined`` is what the client has."""
        self.joined = whole(last)
        if last:
            ts, _, skip = last.partition(".")
            if (since := whole(ts)) is None or (skipped := whole(skip or "0")) is None:
                raise InvalidArgument(f"Last-Event-ID is the id of an event of this stream, not {shown(last)}")
            return since, skipped
        text = self.given.get("since")
        if text is None or text == "now":
            return (None if text is None else door.store.watermark()), 0
        if (since := whole(text)) is None:
            raise InvalidArgument(f"parameter since is a commit timestamp, or now, not {shown(text)}")
        return since, 0


class Channels:
    """All streams of a server; its event loop's."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._channels: dict[Hashable, _Channel] = {}

    def answer(self, wanted: list[Wanted], grant: Grant, client: Client, request: str) -> Response:
        """Streams until the client leaves."""
        texts = self._events(wanted[0]) if wanted[0].of_events else self._states(wanted)
        return _Stream(self._checked(texts, [each.table for each in wanted], grant, client, request))

    async def _checked(
        self, texts: AsyncIterator[bytes], tables: list[str], grant: Grant, client: Client, request: str
    ) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        with contextlib.ExitStack() as counted:
            try:
                for _ in tables:
                    client.subscribe()
                    counted.callback(client.unsubscribe)
                async with contextlib.aclosing(texts):  # type: ignore[type-var]
                    async for text in texts:
                        now = self._door.tokens.now(grant)
                        if now is None:
                            raise Unauthenticated("the token of this stream was withdrawn")
                        now.require(Access.READ, "subscribing", *tables)
                        if now.tenant != grant.tenant:
                            raise Unauthenticated("the token of this stream is for other rows by now")
                        yield text
            except Exception as error:
                yield b"event: error\ndata: %b\n\n" % body_of(told_error(error, "a stream over HTTP", request))

    async def _states(self, several: list[Wanted]) -> AsyncIterator[bytes]:
        awake = asyncio.Event()
        listeners: list[_Listener] = []
        try:
            for i, wanted in enumerate(several):
                channel = self._channels.get(wanted.key)
                if channel is None or channel.failure is not None:
                    channel = self._channels[wanted.key] = _Channel(self._door, wanted, self._forget)
                listeners.append(channel.join(wanted.joined, awake, b"event: part%d\n" % i if wanted.is_part else b""))
            while True:
                await awake.wait()
                awake.clear()
                yield b"".join([listener.taken() for listener in listeners])
        finally:
            for listener in listeners:
                listener.leave()

    def _forget(self, channel: _Channel) -> None:
        if self._channels.get(channel.key) is channel:
            del self._channels[channel.key]

    async def _events(self, wanted: Wanted) -> AsyncIterator[bytes]:
        async with _subscribed(self._door, wanted) as following:
            async for update in following:
                _, text = await _rendered(self._door, update, f"{update.ts}.{update.skip}", wanted.doubles)
                yield text
                if update.ended:
                    return


class _Channel:
    """One subscription to a state, and who listens to it. It begins with the first and ends with the last of them."""

    def __init__(self, door: Door, wanted: Wanted, ended: Callable[[_Channel], None]) -> None:
        self.key = wanted.key
        self._door, self._wanted, self._ended = door, wanted, ended
        self._wanted.arguments.since = None
        self._listeners: set[_Listener] = set()
        self._rows: list[Any] = []
        self._ts: int | None = None
        self._whole: bytes | None = None
        self._last: deque[tuple[int, bytes]] = deque()
        """The snapshot before each of the last updates, and its text."""
        self.failure: Exception | None = None
        self._task = asyncio.ensure_future(self._follow())

    def join(self, since: int | None, awake: asyncio.Event, prefix: bytes) -> _Listener:
        """``awake`` is set whenever something waits for the listener; ``prefix``: what each event begins with."""
        listener = _Listener(self, awake, prefix)
        self._listeners.add(listener)
        if self._ts is not None:
            before = [before for before, _ in self._last]
            if since == self._ts:
                pass
            elif since is not None and since in before:
                for _, text in list(self._last)[before.index(since) :]:
                    listener.put(text)
            else:
                listener.put(self.whole())
        return listener

    def leave(self, listener: _Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self._ended(self)
            self._task.cancel()

    def whole(self) -> bytes:
        """The state as of the newest update, as text."""
        if self._whole is None:
            changes = [{"kind": "add", "old": None, "new": i, "row": row} for i, row in enumerate(self._rows)]
            self._whole = _text(str(self._ts), {"snapshot": self._ts, "reset": True, "changes": changes})
        return self._whole

    async def _follow(self) -> None:
        try:
            async with _subscribed(self._door, self._wanted) as following:
                async for update in following:
                    await self._tell(update)
        except Exception as error:
            self.failure = error
            for listener in self._listeners:
                listener.fail(error)
            self._ended(self)

    async def _tell(self, update: Update) -> None:
        changes, text = await _rendered(self._door, update, str(update.ts), self._wanted.doubles)
        if update.reset:
            self._rows = []
            self._last.clear()
        if changes:
            self._rows = applied(self._rows, changes, value=itemgetter(3))
        if update.reset or changes:
            self._whole = None
        if self._ts is not None:
            self._last.append((self._ts, text))
            while len(self._last) > _REMEMBERED or sum(len(text) for _, text in self._last) > _REMEMBERED_BYTES:
                self._last.popleft()
        self._ts = update.ts
        for listener in self._listeners:
            listener.put(text)


class _Listener:
    """A client of a channel."""

    def __init__(self, channel: _Channel, awake: asyncio.Event, prefix: bytes) -> None:
        self._channel, self._awake, self._prefix = channel, awake, prefix
        self._texts: deque[bytes] = deque()
        self._bytes = 0
        self._behind = False
        self._failure: Exception | None = None

    def leave(self) -> None:
        self._channel.leave(self)

    def put(self, text: bytes) -> None:
        if not self._behind:
            self._texts.append(self._prefix + text if self._prefix else text)
            self._bytes += len(text)
            if self._bytes > _QUEUED_BYTES and len(self._texts) > 1:
                self._texts.clear()
                self._behind = True
        self._awake.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._awake.set()

    def taken(self) -> bytes:
        """All that waits. Raises what ended the channel."""
        if self._behind:
            text = self._prefix + self._channel.whole()
        else:
            text = b"".join(self._texts)
        self._texts.clear()
        self._bytes, self._behind = 0, False
        if self._failure is not None:
            if not text:
                raise self._failure
            self._awake.set()
        return text


# -- the hub -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _subscribed(door: Door, wanted: Wanted) -> AsyncIterator[AsyncIterator[Update]]:
    """The updates of a subscription, each asked for when the one before has been worked on."""
    hub, loop = door.sessions.hub, asyncio.get_running_loop()
    schema = door.store.table(wanted.table)
    terms = wanted.arguments.terms(schema)

    def opened() -> Live:
        with wanted.client.reading():  # of several who follow it, the first one's
            return hub.subscribe(wanted.table, wanted.bound, terms)

    opening = loop.run_in_executor(door.sessions.reads, opened)
    try:
        live = await asyncio.shield(opening)
    except asyncio.CancelledError:  # the client has gone, and its subscription is still being made
        opening.add_done_callback(lambda made: None if made.exception() else hub.close(made.result()))
        raise

    async def following() -> AsyncIterator[Update]:
        while True:
            said: asyncio.Future[Update | KiviError] = loop.create_future()

            def then(update: Update | KiviError, said: asyncio.Future[Update | KiviError] = said) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(_set, said, update)

            hub.ask(live, then)
            update = await said
            if isinstance(update, KiviError):
                raise update
            yield update

    try:
        yield following()
    finally:
        hub.close(live)


def _set(said: asyncio.Future[Update | KiviError], update: Update | KiviError) -> None:
    if not said.done():
        said.set_result(update)


async def _rendered(door: Door, update: Update, name: str, doubles: bool) -> tuple[list[Change], bytes]:
    """Its changes with rows as JSON has them, and its text; of what several channels are told, once."""
    form = "http.integers-as-text" if doubles else "http"
    made: tuple[list[Change], bytes] | None = update.made.get(form)
    if made is None:
        if len(update.changes) <= _MANY:
            made = _render(update, name, doubles)
        else:
            loop = asyncio.get_running_loop()
            made = await loop.run_in_executor(door.sessions.reads, _render, update, name, doubles)
        update.made[form] = made
    return made


def _render(update: Update, name: str, doubles: bool) -> tuple[list[Change], bytes]:
    changes = [
        change if change.row is None else change._replace(row=plain(change.row, exact=True, doubles=doubles))
        for change in told(update).changes
    ]
    if not changes and not update.reset:
        return [], b"id: %b\n\n" % name.encode()
    said = {"snapshot": update.ts, "reset": update.reset, "changes": [change._asdict() for change in changes]}
    return changes, _text(name, said)


def _text(name: str, said: Any) -> bytes:
    return b"id: %b\ndata: %b\n\n" % (name.encode(), compact(said))


class _Stream(Response):
    """Sends texts as they come, and ends when the client has gone."""

    def __init__(self, texts: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(until_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._texts):  # type: ignore[type-var]
            async for text in self._texts:
                await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Waits until whoever asked has closed the connection; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
