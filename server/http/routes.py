"""Which path is what. Each route: who may, what is asked for, the store's call, the answer.

==================================== =================================================================
``GET /``, ``/console/{file}``       the console, for browsers (``kivi_server.http.console``); asks for no token
``GET /healthz``                     whether the server serves; asks for no token
``GET /metrics``                     the metrics, for Prometheus
``GET /openapi.json``                this, for programs; asks for no token
``GET /rows``                        rows as JSON or CSV (``kivi_server.http.rows``)
``GET /v1/tables``                   the definitions of all tables that the token is for
``GET /v1/tables/{table}``           one, with what is known about its contents
``GET /v1/tables/{table}/rows``      rows
``GET /v1/rules``, ``/v1/alerts``    what ``db.rules()`` and ``db.alerts()`` say, of the tables that the token is for
``GET /v1/stats``                    what ``db.stats()`` says, and the version
``POST /v1/tables/{table}/append``   events (``kivi_server.http.writes``)
``POST /v1/transactions``            a transaction
``POST /v1/query``, ``/v1/sql``      questions (``kivi_server.http.questions``)
``/api/v1/...``                      Prometheus' query API (``kivi_server.http.prometheus``)
``POST /v1/traces``, ``/v1/metrics`` OTLP/HTTP: exports of spans and of metrics (``kivi_server.otlp``)
``GET /v1/live``                     subscriptions, as server-sent events (``kivi_server.http.live``)
==================================== =================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qs

from kivi_server import metrics
from kivi_server.auth import Access, Grant
from kivi_server.clients import Client
from kivi_server.http import prometheus as prometheus_api
from kivi_server.http.access import Door, client_of
from kivi_server.http.bodies import Bodies
from kivi_server.http.console import Console
from kivi_server.http.description import described
from kivi_server.http.errors import UnsupportedMediaType, retry_after, status_of, whole_seconds
from kivi_server.http.front import CALL, ERROR
from kivi_server.http.live import Channels, Wanted, until_left
from kivi_server.http.questions import Query, Sql
from kivi_server.http.rendering import (
    CSV,
    JSON,
    MEDIA,
    accepted,
    compact,
    csv_of,
    plain,
    reads_doubles,
    rendered,
    rows_of,
    types_of,
)
from kivi_server.http.rows import TIMEOUT_S, Asked, read
from kivi_server.http.shared import Answer, Shared
from kivi_server.http.writes import Appended, Operations, committed, token_of
from kivi_server.logs import request_id
from prometheus_client.registry import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from kivi.errors import InvalidArgument, KiviError, NotFound, ResourceExhausted, Unavailable
from kivi.model.given import shown
from kivi.store.facade import Txn

__all__ = ["Exported", "Routes"]

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Exported(Protocol):
    """What takes OTLP/HTTP: ``kivi_server.otlp.over_http``."""

    @property
    def bytes_max(self) -> int: ...

    @property
    def media(self) -> Sequence[str]: ...

    @property
    def signals(self) -> Sequence[str]: ...

    async def export(
        self, signal: str, body: bytes, media: str, allows: Callable[[str], bool], client: Client
    ) -> bytes: ...

    def failure(self, error: KiviError, media: str) -> tuple[bytes, float | None]: ...


class Routes:
    def __init__(self, door: Door, registry: CollectorRegistry, stats: metrics.Stats, otlp: Exported | None) -> None:
        self._door = door
        self._sessions, self._store = door.sessions, door.store
        self._registry, self._stats = registry, stats
        self._console = Console()
        self._bodies = Bodies()
        self._otlp = otlp
        self._questions = prometheus_api.Prometheus(door.sessions)
        self._shared = Shared(door.sessions)
        self._channels = Channels(door)
        self._described = compact(described(door.sessions.version))

    def router(self) -> Router:
        routes: Iterable[tuple[str, str, Handler]] = (
            ("GET", "/", self.console),
            ("GET", "/console/{file}", self.console),
            ("GET", "/healthz", self.healthz),
            ("GET", "/metrics", self.metrics),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/rows", self.rows),
            ("GET", "/v1/tables", self.tables),
            ("GET", "/v1/tables/{table}", self.describe),
            ("GET", "/v1/rules", self.rules),
            ("GET", "/v1/alerts", self.alerts),
            ("GET", "/v1/stats", self.stats),
            ("GET", "/v1/tables/{table}/rows", self.table_rows),
            ("POST", "/v1/tables/{table}/append", self.append),
            ("POST", "/v1/transactions", self.transaction),
            ("POST", "/v1/query", self.query),
            ("POST", "/v1/sql", self.sql),
            ("GET", "/v1/live", self.live),
            ("POST", "/v1/traces", self._exports("traces")),
            ("POST", "/v1/metrics", self._exports("metrics")),
        )
        prometheus = [
            Route(f"/api/v1/{path}", self._prometheus(path), methods=["GET", "POST"]) for path in prometheus_api.PATHS
        ]
        return Router(
            [*(Route(path, _named(handler), methods=[method]) for method, path, handler in routes), *prometheus],
            redirect_slashes=False,
        )

    async def _in(self, pool: Executor, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    async def _asked(self, request: Request, pool: Executor, work: Callable[..., T], *arguments: Any) -> T:
        """What reads: its time counts for the client's quota."""
        client = client_of(request)

        def timed() -> T:
            with client.reading():
                return work(*arguments)

        return await self._in(pool, timed)

    async def _commit(
        self, request: Request, wanted: Appended | Operations, grant: Grant, token: str | None
    ) -> Response:
        client = client_of(request)
        client.check_writes()

        def prepare() -> Txn:
            txn = wanted.prepare(self._sessions, grant.tenant)
            try:
                client.check_writes()  # of many that were decoded together the first ones enter
            except ResourceExhausted:
                txn.rollback()
                raise
            client.take_writes(txn.brought, txn.nbytes)
            return txn

        return _json({"commit_ts": await committed(self._sessions, prepare, token)})

    async def _reached(self, ts: int | None) -> None:
        """Waits for a snapshot that is to come; no thread does. Raises Unavailable when the time is up."""
        if ts is None or ts <= self._store.watermark():
            return
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def go_on() -> None:
            loop.call_soon_threadsafe(reached.set)

        self._sessions.waiting.add(ts, time.monotonic() + TIMEOUT_S, lambda: True, go_on)
        await reached.wait()
        if ts > (watermark := self._store.watermark()):
            raise Unavailable(f"the snapshot {ts} is not readable yet; the watermark is {watermark}")

    # -- about the server ----------------------------------------------------------------------------------

    async def console(self, request: Request) -> Response:
        return self._console.answer(request, request.path_params.get("file", "index.html"))

    async def openapi(self, request: Request) -> Response:
        return Response(self._described, media_type=JSON)

    async def healthz(self, request: Request) -> Response:
        if self._sessions.stopping:
            raise Unavailable("the server is stopping", stopping=True)
        self._store.check_open()
        return Response("ok\n", media_type="text/plain", headers={"Cache-Control": "no-store"})

    async def metrics(self, request: Request) -> Response:
        self._door.enter(request, Access.READ, "reading metrics")
        encode, media = metrics.form(request.headers.get("accept", ""))

        def page() -> Answer:
            return Answer(encode(self._registry), media, self._store.watermark())

        # Together with who asks meanwhile: it takes the interpreter for milliseconds, whoever asks.
        answer = await self._shared.once(("metrics", media), lambda: self._in(self._sessions.reads, page))
        return Response(answer.body, headers={"Content-Type": media, "Cache-Control": "no-store"})

    async def stats(self, request: Request) -> Response:
        self._door.enter(request, Access.READ, "reading statistics")
        values = await self._in(self._sessions.reads, self._stats)
        return _json({"version": self._sessions.version, "snapshot": self._store.watermark(), "stats": plain(values)})

    async def rules(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.READ, "reading rules")
        found = await self._in(self._sessions.reads, self._store.rules)
        return _json({"rules": plain([listed for rule, listed in found if all(map(grant.allows, rule.tables))])})

    async def alerts(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.READ, "reading alerts")
        found = await self._in(self._sessions.reads, self._sessions.alerts.listed)
        listed = [one.described() for one in found if grant.allows(one.on)]
        return _json({"alerts": plain(listed, exact=True, doubles=_doubles(request))})

    # -- reads ---------------------------------------------------------------------------------------------

    async def tables(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.READ, "reading definitions")
        upto = self._store.watermark()
        tag = self._shared.tag(self._store.changed_at, grant)
        if _matches(request, tag):
            return _unchanged(tag, upto)
        found = [schema.description() for schema in self._store.tables() if grant.sees(schema)]
        names = {"ETag": tag, "X-Kivi-Snapshot": str(upto), **_REVALIDATE}
        return _json({"tables": plain(found, exact=True)}, **names)

    async def describe(self, request: Request) -> Response:
        name = request.path_params["table"]
        grant = self._door.enter(request, Access.READ, "reading definitions", name)

        def described() -> Any:
            schema = self._store.table(name, tenant=grant.tenant)
            if grant.tenant is not None:  # all else is about the rows of all
                return schema.description()
            return schema.described(self._store.statistics(schema), self._store.retracted_in_backups(schema))

        return _json(plain(await self._in(self._sessions.reads, described), exact=True))

    async def rows(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.READ, "reading")
        asked = Asked(request.url.query)
        self._door.require(grant, Access.READ, "reading", asked.table)
        form = asked.given.get("format", "json")
        if form not in ("json", "csv"):
            raise InvalidArgument(f"parameter format is json or csv, not {shown(form)}")

        def text() -> Answer:
            table, ts, more = read(self._sessions, asked, grant.tenant)
            rows = rows_of(table)
            if form == "csv":
                return Answer(csv_of(table.column_names, rows), CSV, ts, more)
            return Answer(compact([plain(row) for row in rows]), JSON, ts, more)

        return await self._get(request, asked, f"rows.{form}", grant, text)

    async def table_rows(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.READ, "reading", request.path_params["table"])
        asked = Asked(request.url.query, request.path_params["table"])
        media, doubles = accepted(request.headers.get("accept", ""), asked.given.get("format")), _doubles(request)

        def render() -> Answer:
            table, ts, more = read(self._sessions, asked, grant.tenant)
            return Answer(rendered(media, table, {"snapshot": ts, "more": more}, doubles=doubles), media, ts, more)

        form = f"{_FORMS[media]}.integers-as-text" if doubles else _FORMS[media]
        return await self._get(request, asked, form, grant, render)

    async def _get(
        self, request: Request, asked: Asked, form: str, grant: Grant, work: Callable[[], Answer]
    ) -> Response:
        if not asked.is_now:
            await self._reached(asked.min_snapshot)
            return _answered(await self._asked(request, self._sessions.questions, work))
        upto, changed = self._shared.changed([asked.table])
        if "last" in asked.given:
            form = f"{form}-{self._shared.ends(asked.table, upto)}"
        tag = self._shared.tag(changed, grant, form)
        if _matches(request, tag):
            return _unchanged(tag, upto)
        answer = await self._shared.answer(
            (form, asked.question, grant.tenant), changed, lambda: self._asked(request, self._sessions.questions, work)
        )
        return _answered(answer, max(upto, answer.ts), ETag=tag)

    # -- questions -----------------------------------------------------------------------------------------

    async def query(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.READ, "reading")
        media, doubles = accepted(request.headers.get("accept", "")), _doubles(request)
        async with self._bodies.read(request, _QUESTION_BYTES_MAX) as body:
            query = Query.of(body)
        self._door.require(grant, Access.READ, "reading", query.table)

        def work() -> Answer:
            table, ts, more, explanation = query.answer(self._sessions, grant)
            about = {"snapshot": ts, "more": more} | ({"explanation": explanation} if explanation else {})
            return Answer(rendered(media, table, about, doubles=doubles), media, ts, more)

        if not query.is_now:
            await self._reached(query.given.get("min_snapshot"))
            return _answered(await self._asked(request, self._sessions.questions, work))
        upto, changed = self._shared.changed([query.table])
        answer = await self._shared.answer(
            (media, doubles, query.question, grant.tables, grant.tenant),
            changed,
            lambda: self._asked(request, self._sessions.questions, work),
        )
        return _answered(answer, max(upto, answer.ts))

    async def sql(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.READ, "reading")
        media, doubles = accepted(request.headers.get("accept", "")), _doubles(request)
        async with self._bodies.read(request, _QUESTION_BYTES_MAX) as body:
            asked = Sql.of(body)

        def work() -> Answer:
            table, ts, more, _ = asked.answer(self._sessions, grant, left)
            about = {"snapshot": ts, "more": more, "types": types_of(table)}
            return Answer(rendered(media, table, about, doubles=doubles), media, ts, more)

        await self._reached(asked.given.get("min_snapshot"))
        left = Future[None]()

        def ended(leaving: asyncio.Task[None]) -> None:
            if not leaving.cancelled():
                with contextlib.suppress(RuntimeError):  # the server stops, and ends all of them
                    self._sessions.long.submit(left.set_result, None)  # to end a process takes a while

        leaving = asyncio.create_task(until_left(request.receive))
        leaving.add_done_callback(ended)
        try:
            return _answered(await self._asked(request, self._sessions.sql, work))
        finally:
            leaving.cancel()

    async def live(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.READ, "subscribing")
        wanted = Wanted.all_of(self._door, grant, request)
        name = request_id([("x-request-id", request.headers.get("x-request-id"))])
        return self._channels.answer(wanted, grant, client_of(request), name)

    # -- writes --------------------------------------------------------------------------------------------

    async def append(self, request: Request) -> Response:
        table = request.path_params["table"]
        grant = self._door.enter(request, Access.WRITE, "writing", table)
        if unknown := request.query_params.keys() - {"late"}:
            raise InvalidArgument(f"there is no parameter {shown(min(unknown))}; there is late")
        token = token_of(request.headers, grant.tenant)
        media = request.headers.get("content-type", "")
        async with self._bodies.read(request) as body:
            wanted = Appended(table, media, body, request.query_params.get("late", "fail"))
            return await self._commit(request, wanted, grant, token)

    async def transaction(self, request: Request) -> Response:
        grant = self._door.enter(request, Access.WRITE, "writing")
        token = token_of(request.headers, grant.tenant)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise UnsupportedMediaType(f"a transaction is {JSON}: set Content-Type")
        async with self._bodies.read(request) as body:
            wanted = await self._in(self._sessions.writes, Operations, body, token)
            self._door.require(grant, Access.WRITE, "writing", *wanted.tables)
            return await self._commit(request, wanted, grant, token)

    def _prometheus(self, path: str) -> Handler:
        async def prometheus(request: Request) -> Response:
            request.scope[CALL] = f"prometheus/{path.partition('/')[0]}"
            try:
                grant = self._door.enter(request, Access.READ, "reading")
                given = _form(request.url.query)
                if request.method == "POST":
                    async with self._bodies.read(request, _QUESTION_BYTES_MAX) as body:
                        for name, texts in _form(body.decode("utf-8", "replace")).items():
                            given[name] = [*texts, *given.get(name, ())]
                return await self._prometheus_answer(request, path, given, grant)
            except KiviError as error:
                request.scope[ERROR] = error
                status, said = prometheus_api.failure(error)
                return Response(compact(said), status, dict(retry_after(status, error)), JSON)

        return prometheus

    async def _prometheus_answer(
        self, request: Request, path: str, given: dict[str, list[str]], grant: Grant
    ) -> Response:
        """As of rows, equal questions are computed once until what decides about them is another."""
        label, pool, questions = request.path_params.get("name", ""), self._sessions.questions, self._questions

        def page() -> Answer:
            data = questions.answer(path, label, given, grant)
            return Answer(compact({"status": "success", "data": data}), JSON, self._store.watermark())

        decided = await self._in(pool, questions.decided_by, path, given, grant)
        if decided is None:
            return _told(await self._asked(request, pool, page))
        changed, ended_us = decided
        tag = self._shared.tag(changed, grant, f"prometheus-{ended_us}")
        if request.method != "POST" and _matches(request, tag):
            return _unchanged(tag)
        asked = tuple(sorted((name, tuple(texts)) for name, texts in given.items()))
        key = path, label, asked, grant.tables, grant.tenant, ended_us
        return _told(await self._shared.answer(key, changed, lambda: self._asked(request, pool, page)), tag)

    def _exports(self, signal: str) -> Handler:
        async def export(request: Request) -> Response:
            request.scope[CALL] = signal if signal == "traces" else f"otlp_{signal}"  # metrics is the server's own page
            otlp = self._otlp
            if otlp is None:
                raise NotFound(f"this server takes no {signal}: it needs pip install 'kivi[otlp]'")
            media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media not in otlp.media:
                raise UnsupportedMediaType(
                    f"{signal} are {' or '.join(otlp.media)}, not {shown(media)}: set Content-Type"
                )
            try:
                grant = self._door.enter(request, Access.WRITE, f"exporting {signal}")
                async with self._bodies.read(request, otlp.bytes_max) as body:
                    said = await otlp.export(signal, body, media, grant.allows, client_of(request))
                    return Response(said, media_type=media)
            except KiviError as error:
                request.scope[ERROR] = error
                body, retry_s = otlp.failure(error, media)
                status = status_of(error)
                headers = {} if retry_s is None else {"Retry-After": whole_seconds(retry_s)}
                return Response(body, int(status), headers, media_type=media)

        return export


_QUESTION_BYTES_MAX: Final = 1 << 20
_REVALIDATE: Final = {"Cache-Control": "no-cache"}
_FORMS: Final = {media: media.rpartition("/")[2] for media in MEDIA}


def _form(text: str) -> dict[str, list[str]]:
    try:
        return parse_qs(text, keep_blank_values=True, max_num_fields=1_000)
    except ValueError:
        raise InvalidArgument("a request has at most 1,000 parameters") from None


def _named(handler: Handler) -> Handler:
    """Says what it is, for metrics, before anything can go wrong."""

    async def named(request: Request) -> Response:
        request.scope[CALL] = handler.__name__
        return await handler(request)

    return named


def _matches(request: Request, tag: str) -> bool:
    """Whether the caller has the answer of this tag; ``*`` does not say which one it has."""
    given = request.headers.get("if-none-match", "")
    return tag in [each.strip().removeprefix("W/") for each in given.split(",")]


def _unchanged(tag: str, ts: int | None = None) -> Response:
    snapshot = {} if ts is None else {"X-Kivi-Snapshot": str(ts)}
    return Response(status_code=304, headers={"ETag": tag, "Vary": "Accept", **_REVALIDATE, **snapshot})


def _doubles(request: Request) -> bool:
    return reads_doubles(request.headers.get("accept", ""))


def _json(value: Any, **headers: str) -> Response:
    return Response(compact(value), media_type=JSON, headers={"Cache-Control": "no-store", **headers})


def _told(answer: Answer, tag: str = "") -> Response:
    """An answer that names no snapshot."""
    headers = {"ETag": tag, **_REVALIDATE} if tag else {"Cache-Control": "no-store"}
    return Response(answer.body, headers=headers, media_type=answer.media)


def _answered(answer: Answer, ts: int | None = None, **tags: str) -> Response:
    text = f"{answer.media}; charset=utf-8" if answer.media.startswith(("text/", JSON)) else answer.media
    headers = {"Content-Type": text, "X-Kivi-Snapshot": str(answer.ts if ts is None else ts), "Vary": "Accept"}
    headers |= _REVALIDATE | tags if tags else {"Cache-Control": "no-store"}
    if answer.more is not None:
        headers["X-Kivi-More"] = str(answer.more).lower()
    return Response(answer.body, headers=headers)
