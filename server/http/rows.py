"""Rows over HTTP, for whoever speaks no gRPC: Grafana's Infinity data source, a spreadsheet, curl.

::

    GET /rows?table=endpoint_5m&prefix=251&from=1767225600000&to=2026-01-02T00:00:00Z&step=1h&limit=1000
    Authorization: Bearer TOKEN

====================== =============================================================================================
table                  the table (required)
prefix                 the first key columns, one parameter each, in order
from, to               of the time, ``to`` exclusive: milliseconds since 1970 (Grafana's ``${__from}``), or ISO 8601
step                   aggregates: slots of so long (``5m``, ``1h``) instead of the table's own, a multiple of these
by                     aggregates: combined to these key columns, names with commas; without step there is no slot
tz                     the time zone of step, default the table's
columns                names with commas; default all
where                  a predicate: ``resp_time_us > 1000 & customer == 'acme'``
limit                  rows at most, default 10,000, up to 100,000; ``X-Kivi-More: true`` says that there are more
as_of                  a commit timestamp, or a moment in ISO 8601
format                 json (default): a list of flat objects; csv: the same with a header line
====================== =============================================================================================

Quantiles are ``{"count": 1000, "p50": 344.8, "p95": 651.0, "p99": 689.6}`` (any other one as a column:
``columns=quantile(latency, 0.999)``), the largest and smallest values a list, the most frequent ones a list of
``[value, count]``, with ``[null, count]`` of the others at its end if there are any; in CSV all of these as JSON.

The time column is the event time, or the last timestamp in the key. Times are ISO 8601 in UTC, decimals are numbers,
bytes hexadecimal. All of an answer is one snapshot, whose timestamp ``X-Kivi-Snapshot`` tells. Errors are
``{"error": ..., "reason": ...}`` with the status that fits. Only GET, only reading, behind the same tokens and limits
as everything else, and with TLS where the server has it.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

import grpc
from kivi_server.auth import Access, Tokens
from kivi_server.sessions import Sessions
from kivi_server.wsgi import TIMEOUT_S

from kivi.api.arguments import RollupArguments, ScanArguments, type_of
from kivi.arrow.columns import rows_from_batch
from kivi.errors import InvalidArgument, KiviError
from kivi.model.expressions import Expr
from kivi.model.predicate_text import parse_moment, parse_value, split_names, where
from kivi.model.quantiles import Quantiles
from kivi.model.rollups import rolled_outputs, stored_slot
from kivi.model.schema import TableSchema
from kivi.model.slots import Slot
from kivi.model.values import Top
from kivi.store.facade import Lease, Scan, Store
from kivi.wire.status import status_code

__all__ = ["Application"]

_LIMIT: Final = 10_000
_LIMIT_MAX: Final = 100_000
_PARAMETERS: Final = frozenset(
    {"table", "prefix", "from", "to", "step", "columns", "where", "limit", "as_of", "format", "by", "tz"}
)
_HTTP: Final = {
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}
Row = dict[str, Any]


class Application:
    """WSGI, of /rows."""

    def __init__(self, sessions: Sessions, tokens: Tokens) -> None:
        self._sessions, self._store, self._tokens = sessions, sessions.store, tokens

    def __call__(self, environment: Mapping[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        began, error = time.monotonic(), None
        try:
            if environment["PATH_INFO"] != "/rows" or environment["REQUEST_METHOD"] != "GET":
                return _told(respond, HTTPStatus.NOT_FOUND, "there is GET /rows, and nothing else", "NotFound")
            return self._answered(environment, respond)
        except KiviError as failure:
            error = failure
            status = _HTTP.get(status_code(error), HTTPStatus.INTERNAL_SERVER_ERROR)
            return _told(respond, status, error.message, type(error).__name__)
        finally:
            self._sessions.calls.ended("HTTP/rows", time.monotonic() - began, error)

    def _answered(self, environment: Mapping[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        grant = self._tokens.of_header(environment.get("HTTP_AUTHORIZATION", ""))
        self._sessions.clients.of(grant, environment.get("REMOTE_ADDR", "")).take(1)
        asked = _Asked(environment.get("QUERY_STRING", ""))
        grant.require(Access.READ, "reading", asked.table)
        rows, snapshot, more = _read(self._store, asked)
        body, kind = (_csv(rows, asked) if asked.csv else _json(rows)), "text/csv" if asked.csv else "application/json"
        headers = [
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Kivi-Snapshot", str(snapshot)),
            ("X-Kivi-More", str(more).lower()),
        ]
        respond("200 OK", headers)
        return [body]


class _Asked:
    """The parameters. Raises InvalidArgument for one that is not known."""

    def __init__(self, query: str) -> None:
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=64)
        except ValueError:
            raise InvalidArgument("the query is not name=value&name=value") from None
        self.given: dict[str, str] = {}
        self.prefix: list[str] = []
        for name, text in pairs:
            if name not in _PARAMETERS:
                raise InvalidArgument(f"there is no parameter {name!r}; there are {', '.join(sorted(_PARAMETERS))}")
            if name == "prefix":
                self.prefix.append(text)
            elif name in self.given:
                raise InvalidArgument(f"parameter {name!r} is given twice")
            elif text:
                self.given[name] = text
        if "table" not in self.given:
            raise InvalidArgument("parameter table is required")
        self.table = self.given["table"]
        limit = self.given.get("limit", str(_LIMIT))
        if not limit.isdecimal() or not 0 < int(limit) <= _LIMIT_MAX:
            raise InvalidArgument(f"parameter limit is a number of rows from 1 to {_LIMIT_MAX:,}, not {limit!r}")
        self.limit = int(limit)
        if self.given.get("format", "json") not in ("json", "csv"):
            raise InvalidArgument(f"parameter format is json or csv, not {self.given['format']!r}")
        self.csv = self.given.get("format") == "csv"
        self.names: tuple[str, ...] = ()

    def moment_us(self, name: str) -> int | None:
        text = self.given.get(name)
        if text is None:
            return None
        if text.lstrip("-").isdecimal():
            return int(text) * 1000
        return (parse_moment(text, f"parameter {name}") - _EPOCH) // dt.timedelta(microseconds=1)


_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _read(store: Store, asked: _Asked) -> tuple[list[Row], int, bool]:
    """(rows, the snapshot's timestamp, whether there are more)"""
    lease = _begun(store, asked)
    try:
        schema = store.table(asked.table, lease)
        if _rolls_up(schema, asked):
            wanted = _rolled(schema, asked)
        else:
            names = asked.given.get("columns")
            asked.names = schema.output_columns(None if names is None else split_names(names))
            wanted = _wanted(schema, asked)
        rows = (row for batch in store.scan(lease, schema, wanted) for row in rows_from_batch(batch))
        found = [{name: row[name] for name in asked.names} for row in rows]
        return found[: asked.limit], lease.ts, len(found) > asked.limit
    finally:
        store.release(lease)


def _begun(store: Store, asked: _Asked) -> Lease:
    text = asked.given.get("as_of")
    if text is None:
        return store.begin()
    if text.isdecimal():
        return store.begin(as_of_ts=int(text))
    return store.begin(as_of_us=asked.moment_us("as_of"), timeout_s=TIMEOUT_S)


def _where(schema: TableSchema, asked: _Asked) -> Expr | None:
    if "where" not in asked.given:
        return None
    types = {name: str(type_of(schema, name)) for name in schema.output_names}
    return where(asked.given["where"], types, "parameter where")


def _wanted(schema: TableSchema, asked: _Asked) -> Scan:
    time_column = _time_column(schema)
    low, high = asked.moment_us("from"), asked.moment_us("to")
    if time_column is None and not (low is None and high is None):
        raise InvalidArgument(f"table {schema.name!r} has no time in its key: leave out from and to")
    predicate = _where(schema, asked)
    start: tuple[int] | None = None
    end: tuple[int] | None = None
    if schema.kind == "event":
        if asked.prefix:
            raise InvalidArgument(f"event table {schema.name!r} has no row keys: use where, or from and to")
        start, end = ((bound,) if bound is not None else None for bound in (low, high))
    else:
        for op, bound in ((">=", low), ("<", high)):
            if bound is not None:
                term = Expr(op, time_column or "", bound)
                predicate = term if predicate is None else predicate & term
    prefix, limit = _prefix(schema, asked), asked.limit + 1
    return ScanArguments(schema.name, prefix, start, end, predicate, asked.names, limit).bound(schema)


def _prefix(schema: TableSchema, asked: _Asked) -> list[Any]:
    if len(asked.prefix) > len(schema.key):
        raise InvalidArgument(
            f"the key of {schema.name!r} has {len(schema.key)} columns: give at most as many prefixes"
        )
    return [
        parse_value(str(column.type), text, f"prefix {column.name}")
        for column, text in zip(schema.key, asked.prefix, strict=False)
    ]


def _time_column(schema: TableSchema) -> str | None:
    if schema.kind == "event":
        return schema.event_time
    return next((column.name for column in reversed(schema.key) if column.type.name == "timestamp"), None)


# -- rollups ------------------------------------------------------------------------------------------------


def _rolls_up(schema: TableSchema, asked: _Asked) -> bool:
    """Whether rows are combined: not if the step is the table's own."""
    given = next((name for name in ("by", "step", "tz") if name in asked.given), None)
    if given is not None and schema.kind != "aggregate":
        raise InvalidArgument(f"parameter {given} is for aggregates, and {schema.name!r} is none")
    stored = stored_slot(schema)
    if "by" in asked.given or "step" not in asked.given or stored is None:
        return "by" in asked.given or "step" in asked.given
    return Slot.parse(asked.given["step"], asked.given.get("tz", stored[2].zone or None)) != stored[2]


def _rolled(schema: TableSchema, asked: _Asked) -> Scan:
    """The rollup by the key columns asked for, or by all that are no slot."""
    plain = [group.name for group in schema.group_by if group.slot is None]
    by = split_names(asked.given["by"]) if "by" in asked.given else plain
    given = asked.given.get("columns")
    names = None if given is None else [name for name in split_names(given) if name not in schema.key_names]
    start, end = (_slot_from(schema, asked.moment_us(name)) for name in ("from", "to"))
    where, prefix = _where(schema, asked), _prefix(schema, asked)
    step, tz = asked.given.get("step"), asked.given.get("tz")
    wanted = RollupArguments(schema.name, by, step, start, end, prefix, where, names, tz=tz).bound(schema)
    assert wanted.rollup is not None
    outputs = rolled_outputs(schema, wanted.rollup)
    asked.names = outputs if given is None else tuple(split_names(given))
    if unknown := [name for name in asked.names if name not in outputs]:
        raise InvalidArgument(f"{unknown[0]!r} is no column of this rollup: it has {', '.join(outputs)}")
    return replace(wanted, limit=asked.limit + 1)


def _slot_from(schema: TableSchema, moment_us: int | None) -> int | None:
    """Where the first slot begins that does not begin before a moment."""
    stored = stored_slot(schema)
    if moment_us is None or stored is None:
        return moment_us
    start = stored[2].start(moment_us)
    return start if start == moment_us else stored[2].end(start)


# -- as text ------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.isoformat(timespec="microseconds" if value.microsecond else "seconds").replace("+00:00", "Z")
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, (Quantiles, Top)):
        value = value.to_plain()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, Decimal) else value


def _json(rows: Iterable[Row]) -> bytes:
    flat = [{name: _plain(value) for name, value in row.items()} for row in rows]
    return json.dumps(flat, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _csv(rows: Iterable[Row], asked: _Asked) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(asked.names)
    for row in rows:
        values = [_plain(row[name]) for name in asked.names]
        writer.writerow([json.dumps(v, ensure_ascii=False) if isinstance(v, (bool, dict, list)) else v for v in values])
    return out.getvalue().encode()


def _told(respond: Callable[..., Any], status: HTTPStatus, message: str, reason: str) -> Iterable[bytes]:
    body = json.dumps({"error": message, "reason": reason}, ensure_ascii=False).encode()
    headers = [("Content-Type", "application/json; charset=utf-8"), ("Content-Length", str(len(body)))]
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", "Bearer"))
    respond(f"{status.value} {status.phrase}", headers)
    return [body]
