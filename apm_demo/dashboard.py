"""The dashboard's server: reads kivi through ``kivi.aio`` and nothing else, and serves one page with its own files.

``GET /api/view`` is what the page shows: everything on it is read from **one** snapshot, whose timestamp comes along,
so that a total, its parts and the anomalies among them agree however fast events arrive. Arguments:

    width                                  5s, 5m or 1h
    customer, application, server          how far the drill-down has gone; each needs the one before
    endpoint_id                            the end of the path; needs a server

Integers are exact: sums and counts go out as they are in the store, and the page divides.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import kivi
import kivi.aio
from apm_demo.children import end_with_parent
from apm_demo.tables import LEVELS, LLM_WIDTHS, PATHS, WIDTHS, aggregate, micros, moment

__all__ = ["application", "main"]

_STATIC: Final = Path(str(files("apm_demo").joinpath("static")))
_SLOTS: Final = 60  # the latest slots a chart shows
_ANOMALIES: Final = 40  # the latest that are listed
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'",  # the page needs nothing from anywhere else
    "X-Content-Type-Options": "nosniff",
}


class _Bad(Exception):
    """The request makes no sense; the text says why."""


def application(endpoint: str) -> Starlette:
    """The dashboard of the kivi server at ``endpoint``. Connects at startup."""

    @asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        async with await kivi.aio.connect(endpoint, timeout=5) as db:
            app.state.db = db
            yield

    routes = [
        Route("/", _page),
        Route("/api/view", _answer(_view)),
        Route("/api/endpoints", _answer(_endpoints)),
        Route("/api/anomalies", _answer(_anomalies)),
        Route("/api/llm", _answer(_llm)),
        Mount("/static", StaticFiles(directory=_STATIC)),
    ]
    return Starlette(routes=routes, lifespan=connected)


async def _page(request: Request) -> Response:
    return FileResponse(_STATIC / "index.html", headers=_HEADERS)


def _answer(
    read: Callable[[kivi.aio.Snapshot, Request], Awaitable[dict[str, Any]]],
) -> Callable[[Request], Awaitable[Response]]:
    """A JSON endpoint: one snapshot, and errors the page can show."""

    async def respond(request: Request) -> Response:
        began = time.perf_counter()
        try:
            async with request.app.state.db.snapshot() as snapshot:
                body = await read(snapshot, request)
                body["snapshot_ts"] = await snapshot.started()
        except _Bad as bad:
            return JSONResponse({"error": str(bad)}, 400, headers=_HEADERS)
        except kivi.KiviError as error:
            text = error.message or type(error).__name__
            return JSONResponse({"error": f"kivi does not answer: {text}"}, 503, headers=_HEADERS)
        body["read_at_us"] = time.time_ns() // 1_000
        body["read_ms"] = round((time.perf_counter() - began) * 1_000, 1)
        return JSONResponse(body, headers=_HEADERS)

    return respond


# -- what is read -------------------------------------------------------------------------------------


def _path(request: Request) -> tuple[str, ...]:
    given = [request.query_params.get(name) for name in PATHS]
    path = tuple(value for value in given if value)
    if tuple(given[: len(path)]) != path:
        raise _Bad("the path goes from customer to application to server, and leaves none out")
    return path


def _width(request: Request) -> str:
    width = request.query_params.get("width", "5s")
    if width not in WIDTHS:
        raise _Bad(f"width is one of {', '.join(WIDTHS)}")
    return width


async def _view(snapshot: kivi.aio.Snapshot, request: Request) -> dict[str, Any]:
    """All panels. Reads that do not need each other travel together."""
    path, width = _path(request), _width(request)
    endpoints = {row["endpoint_id"]: row async for row in snapshot.scan("endpoints")}
    below = [e for e, row in endpoints.items() if tuple(row[name] for name in PATHS[: len(path)]) == path]
    chosen = request.query_params.get("endpoint_id")
    if chosen is not None:
        if not chosen.isdecimal() or len(path) < len(PATHS) or int(chosen) not in below:
            raise _Bad("endpoint_id is one of the endpoints of the server that the path names")
        below = [int(chosen)]
    first = await _first_slot(snapshot, width)
    series, anomalies, per_endpoint, llm, batches = await asyncio.gather(
        _series(snapshot, path, below, width, first),
        _latest_anomalies(snapshot, below),
        _anomaly_counts(snapshot, first),
        _llm(snapshot, request),
        _batches(snapshot),
    )
    level = PATHS[len(path)] if len(path) < len(PATHS) else "endpoint"
    children = []
    for name, slots in series.items():
        ids = _ids_below(name, level, path, endpoints)
        label = f"{endpoints[int(name)]['name']}" if level == "endpoint" and int(name) in endpoints else name
        children.append(
            {"key": name, "label": label, "anomalies": sum(per_endpoint.get(e, 0) for e in ids), "slots": slots}
        )
    return {
        "path": list(path),
        "endpoint": {"id": int(chosen), "name": endpoints[int(chosen)]["name"]} if chosen is not None else None,
        "level": level,
        "width": width,
        "width_us": WIDTHS[width],
        "children": children,
        "anomalies": [{**row, "endpoint": endpoints.get(row["endpoint_id"], {}).get("name", "")} for row in anomalies],
        "anomalies_total": sum(per_endpoint.get(e, 0) for e in below),
        "llm": llm,
        "batches": batches,
    }


def _ids_below(name: str, level: str, path: tuple[str, ...], endpoints: dict[int, dict[str, Any]]) -> list[int]:
    """The endpoints that belong to one child of the path."""
    if level == "endpoint":
        return [int(name)]
    wanted = (*path, name)
    return [e for e, row in endpoints.items() if tuple(row[p] for p in PATHS[: len(wanted)]) == wanted]


async def _first_slot(snapshot: kivi.aio.Snapshot, width: str) -> dt.datetime:
    """The oldest slot that is shown: _SLOTS slots end with the newest of any customer. The epoch if there is none."""
    slots = [row["slot"] async for row in snapshot.scan(aggregate("customer", width), columns=["slot"])]
    return moment(micros(max(slots)) - (_SLOTS - 1) * WIDTHS[width] if slots else 0)


async def _series(
    snapshot: kivi.aio.Snapshot, path: tuple[str, ...], endpoints: list[int], width: str, first: dt.datetime
) -> dict[str, list[list[int]]]:
    """Child of the path -> [[slot, sum, count, slowest], ...], oldest first."""
    at_endpoint = len(path) == len(PATHS)
    table = aggregate("endpoint" if at_endpoint else PATHS[len(path)], width)
    name = "endpoint_id" if at_endpoint else PATHS[len(path)]
    where = kivi.col("slot") >= first
    if at_endpoint:
        where = where & kivi.col("endpoint_id").isin(endpoints)
    series: dict[str, list[list[int]]] = {}
    async for row in snapshot.scan(table, prefix=() if at_endpoint else path, where=where):
        point = [micros(row["slot"]), row["sum_resp_time"], row["invocations"], row["slowest"]]
        series.setdefault(str(row[name]), []).append(point)
    return series


async def _latest_anomalies(snapshot: kivi.aio.Snapshot, endpoints: list[int]) -> list[dict[str, Any]]:
    if not endpoints:
        return []
    where = kivi.col("endpoint_id").isin(endpoints)
    rows = (
        [row async for row in snapshot.scan("anomalies", where=where, reverse=True, limit=_ANOMALIES)]
        if endpoints
        else []
    )
    rows.sort(key=lambda row: row["ts"], reverse=True)
    return [
        {
            **{name: row[name] for name in (*LEVELS["server"], "endpoint_id", "resp_time_us", "batch_id")},
            "ts_us": micros(row["ts"]),
            "previous_sum_us": row["previous_sum_us"],
            "previous_count": row["previous_count"],
        }
        for row in rows
    ]


async def _anomaly_counts(snapshot: kivi.aio.Snapshot, first: dt.datetime) -> dict[int, int]:
    """Endpoint -> how many since ``first``."""
    counts: dict[int, int] = {}
    async for row in snapshot.scan("anomalies_per_endpoint", where=kivi.col("slot") >= first):
        counts[row["endpoint_id"]] = counts.get(row["endpoint_id"], 0) + row["anomalies"]
    return counts


async def _batches(snapshot: kivi.aio.Snapshot) -> dict[str, int] | None:
    async for row in snapshot.scan("batches", reverse=True, limit=1):
        return {"last": row["batch_id"], "events": row["events"], "anomalies": row["anomalies"]}
    return None


async def _endpoints(snapshot: kivi.aio.Snapshot, request: Request) -> dict[str, Any]:
    return {"endpoints": [row async for row in snapshot.scan("endpoints")]}


async def _anomalies(snapshot: kivi.aio.Snapshot, request: Request) -> dict[str, Any]:
    ids = [row["endpoint_id"] async for row in snapshot.scan("endpoints")]
    return {"anomalies": await _latest_anomalies(snapshot, ids)}


async def _llm(snapshot: kivi.aio.Snapshot, request: Request) -> dict[str, Any]:
    """The trace's own panel: its widths have no 5 s, since it is from another time and another place."""
    width = request.query_params.get("width", "5m")
    width = width if width in LLM_WIDTHS else "5m"
    fields = ("requests", "context_tokens", "generated_tokens", "context_tokens_max", "generated_tokens_max")
    services: dict[str, list[list[int]]] = {}
    async for row in snapshot.scan(aggregate("llm", width)):
        services.setdefault(row["service"], []).append([micros(row["slot"]), *(row[field] for field in fields)])
    return {"width": width, "width_us": LLM_WIDTHS[width], "fields": ["slot", *fields], "services": services}


# -- the process --------------------------------------------------------------------------------------


class _Announced(uvicorn.Server):
    """Says its address once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            assert sockets
            print(f"ready http://127.0.0.1:{sockets[0].getsockname()[1]}/", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="The dashboard of a kivi server that the demonstration feeds.")
    parser.add_argument("--endpoint", default="localhost:7420", help="of the kivi server; default %(default)s")
    parser.add_argument("--port", type=int, default=0, help="on loopback; default: any that is free")
    parser.add_argument("--listen", metavar="HOST:PORT", help="instead of --port; it asks nobody who they are")
    args = parser.parse_args()
    end_with_parent()
    host, _, port = (args.listen or f"127.0.0.1:{args.port}").rpartition(":")
    try:
        listener = socket.create_server((host, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        print(f"cannot listen on port {port} of {host}: {error}", file=sys.stderr)
        return 1
    config = uvicorn.Config(
        application(args.endpoint), log_level="warning", access_log=False, http="h11", ws="none", loop="asyncio",
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    _Announced(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
