"""The routes for programs: an OpenAPI 3.1 description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kivi_server.http.prometheus import PATHS
from kivi_server.http.questions import ANY, FLAG, MOMENT, NAMED, NUMBER, QUERY, SQL, TEXT, TEXTS
from kivi_server.http.rendering import ARROW, CSV, JSON, NDJSON
from kivi_server.http.rows import LIMIT_MAX

__all__ = ["described"]

Json = dict[str, Any]
_TEXT: Final = {"type": "string"}
_WHOLE: Final = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
_SCHEMAS: Final[Mapping[str, Json]] = {
    TEXT: _TEXT,
    NUMBER: _WHOLE,
    TEXTS: {"type": ["string", "array"], "items": _TEXT},
    NAMED: {"type": "object", "additionalProperties": _TEXT},
    MOMENT: {"type": ["string", "integer"]},
    FLAG: {"type": "boolean"},
    ANY: {"type": ["array", "object"]},
}
_OPERATION: Final = {
    "type": "object",
    "required": ["op", "table"],
    "properties": {
        "op": {"enum": ["put", "delta", "insert", "delete", "guard", "append"]},
        "table": _TEXT,
        "key": {"type": "array"},
        "values": {"type": "object"},
        "column": _TEXT,
        "records": {"type": "array", "items": {"type": "object"}},
        "late": {"enum": ["fail", "drop"]},
    },
}
_ROWS: Final[Json] = {
    "type": "object",
    "required": ["snapshot", "more", "rows"],
    "properties": {
        "snapshot": _WHOLE,
        "more": {"type": "boolean"},
        "rows": {"type": "array", "items": {"type": "object"}},
        "types": {"type": "object", "additionalProperties": _TEXT},
        "explanation": _TEXT,
    },
}
_COMMITTED: Final = {"type": "object", "required": ["commit_ts"], "properties": {"commit_ts": _WHOLE}}
_ERROR: Final = {
    "type": "object",
    "required": ["error", "reason"],
    "properties": {"error": _TEXT, "reason": _TEXT, "details": {"type": "object"}},
}
_FAILURES: Final = {
    400: "The request is not right: what it says, or what it says of the table.",
    401: "Send an access token that the server knows.",
    403: "This access token, this page or this listener may not.",
    404: "There is no such table, row or path.",
    405: "The path takes another method.",
    406: "Ask for another format.",
    408: "The body did not come in time.",
    409: "A conflict: the transaction did nothing. Or the snapshot is not kept any more.",
    413: "Send less at once.",
    415: "Send another Content-Type.",
    422: "The question is understood, and not supported.",
    429: "A limit was reached: wait, or ask for less.",
    503: "Wait and try again. After CommitUnknown under the same Idempotency-Key.",
}
_IDEMPOTENCY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1},
    "description": "The request token: a repetition gets the first commit timestamp, and nothing happens twice.",
}
_PROTOBUF: Final = "application/x-protobuf"
_LIVE: Final = frozenset({"prefix", "where", "columns", "order_by", "limit", "by", "step", "tz", "from", "to"})
_TABLE: Final = {"name": "table", "in": "path", "required": True, "schema": _TEXT}


def described(version: str) -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "kivi", "version": version, "description": "Tables and online aggregates over HTTP."},
        "paths": {
            "/healthz": {"get": _operation("Whether the server serves", {"text/plain": _TEXT}, [503], open_=True)},
            "/metrics": {"get": _operation("Metrics for Prometheus", {"text/plain": _TEXT, "*/*": _TEXT})},
            "/rows": {
                "get": _operation(
                    "Rows, as a list",
                    {JSON: {"type": "array", "items": {"type": "object"}}, CSV: _TEXT},
                    parameters=[_query("table", "The table.", required=True), *_rows(["json", "csv"])],
                    revalidates=True,
                )
            },
            "/v1/tables": {
                "get": _operation(
                    "Definitions of all tables", {JSON: {"type": "object", "required": ["tables"]}}, revalidates=True
                )
            },
            "/v1/tables/{table}": {
                "get": _operation(
                    "A table's definition and statistics", {JSON: {"type": "object"}}, parameters=[_TABLE]
                )
            },
            "/v1/tables/{table}/rows": {
                "get": _operation(
                    "A table's rows",
                    {JSON: _ROWS, NDJSON: _TEXT, CSV: _TEXT, ARROW: _TEXT},
                    parameters=[_TABLE, *_rows(["json", "ndjson", "csv", "arrow"])],
                    revalidates=True,
                )
            },
            "/v1/rules": {"get": _operation("Rules, and what became of events", {JSON: {"type": "object"}})},
            "/v1/alerts": {"get": _operation("Alerts, and their instances", {JSON: {"type": "object"}})},
            "/v1/stats": {"get": _operation("Statistics of the store and the server", {JSON: {"type": "object"}})},
            "/v1/tables/{table}/append": {
                "post": _operation(
                    "Appends events, in one transaction",
                    {JSON: _COMMITTED},
                    parameters=[
                        _TABLE,
                        _query("late", "What becomes of late events.", {"enum": ["fail", "drop"]}),
                        _IDEMPOTENCY,
                    ],
                    body={JSON: {"type": "array", "items": {"type": "object"}}, NDJSON: _TEXT, ARROW: _TEXT},
                )
            },
            "/v1/transactions": {
                "post": _operation(
                    "A transaction",
                    {JSON: _COMMITTED},
                    parameters=[_IDEMPOTENCY],
                    body={
                        JSON: {
                            "type": "object",
                            "required": ["operations"],
                            "properties": {
                                "operations": {"type": "array", "minItems": 1, "items": _OPERATION},
                                "snapshot": {**_WHOLE, "minimum": 1},
                            },
                        }
                    },
                )
            },
            "/v1/traces": {
                "post": _operation(
                    "OTLP/HTTP: spans",
                    {JSON: {"type": "object"}, _PROTOBUF: _TEXT},
                    body={JSON: {"type": "object"}, _PROTOBUF: _TEXT},
                    failed=(JSON, _PROTOBUF),
                )
            },
            "/v1/metrics": {
                "post": _operation(
                    "OTLP/HTTP: metrics",
                    {JSON: {"type": "object"}, _PROTOBUF: _TEXT},
                    body={JSON: {"type": "object"}, _PROTOBUF: _TEXT},
                    failed=(JSON, _PROTOBUF),
                )
            },
            "/v1/live": {
                "get": _operation(
                    "Follows a table's rows, or events, as server-sent events",
                    {"text/event-stream": _TEXT},
                    parameters=[
                        _query("table", "The table; required without of."),
                        *(each for each in _rows([]) if each["name"] in _LIVE),
                        _query("offset", "The first row that is followed.", _WHOLE),
                        _query("last", "A range that moves with the newest slot, such as 15m."),
                        _query("since", "Of events: those after this commit timestamp, or now."),
                        _query("interval_ms", "At most one event in each.", _WHOLE),
                        _query(
                            "of",
                            "In place of all others: queries of these, as text.",
                            {"type": "array", "items": _TEXT},
                        ),
                    ],
                )
            },
            **{f"/api/v1/{path}": _prometheus(path) for path in PATHS},
            "/v1/query": {"post": _operation("A question", _RENDERED, body={JSON: _members(QUERY, "table")})},
            "/v1/sql": {"post": _operation("A question in SQL", _RENDERED, body={JSON: _members(SQL, "sql")})},
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


_RENDERED: Final = {JSON: _ROWS, NDJSON: _TEXT, CSV: _TEXT, ARROW: _TEXT}


def _operation(
    summary: str,
    answers: Mapping[str, Json],
    failures: Any = tuple(_FAILURES),
    *,
    parameters: Any = (),
    body: Mapping[str, Json] | None = None,
    revalidates: bool = False,
    open_: bool = False,
    failed: Any = (),
) -> Json:
    error: Json = {"description": "", "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    if failed:  # in a form of its own
        error["content"] = {media: {"schema": {}} for media in failed}
    found: Json = {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {media: {"schema": each} for media, each in answers.items()},
            },
            **({"304": {"description": "Nothing has changed since If-None-Match."}} if revalidates else {}),
            **{str(status): {**error, "description": _FAILURES[status]} for status in failures},
        },
    }
    if not open_:
        found["security"] = [{"token": []}, {}]
    if body is not None:
        content = {media: {"schema": each} for media, each in body.items()}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _prometheus(path: str) -> Json:
    """Of Prometheus' query API, whose parameters may be in the body, too."""
    summary, parameters = _PROMETHEUS[path]
    answers = {JSON: {"type": "object", "required": ["status", "data"]}}
    named = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}] if "{name}" in path else []
    members = {each["name"]: each["schema"] for each in parameters}
    required = [each["name"] for each in parameters if each["required"]]
    body = {"application/x-www-form-urlencoded": {"type": "object", "properties": members, "required": required}}
    return {
        "get": _operation(summary, answers, parameters=[*named, *parameters], failed=(JSON,)),
        "post": _operation(summary, answers, parameters=named, body=body, failed=(JSON,)),
    }


def _query(name: str, description: str, schema: Any = None, *, required: bool = False) -> Json:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "description": description,
        "schema": schema or _TEXT,
    }


_MATCH: Final = _query("match[]", "Selectors of series.", {"type": "array", "items": _TEXT})
_ASKED: Final = _query("query", "PromQL.", required=True)
_LIMITED: Final = _query("limit", "So many at most; 0 for all.", _WHOLE)
_PROMETHEUS: Final[Mapping[str, tuple[str, list[Json]]]] = {
    "query": ("Prometheus: PromQL at a moment", [_ASKED, _query("time", "Seconds since 1970, or ISO 8601.")]),
    "query_range": (
        "Prometheus: PromQL at the steps of a range",
        [
            _ASKED,
            *(_query(name, "Seconds since 1970, or ISO 8601.", required=True) for name in ("start", "end")),
            _query("step", "Seconds, or a time span such as 1m.", required=True),
        ],
    ),
    "series": (
        "Prometheus: the labels of series",
        [_query("match[]", "Selectors of series.", _MATCH["schema"], required=True), _LIMITED],
    ),
    "labels": ("Prometheus: the names of labels", [_MATCH, _LIMITED]),
    "label/{name}/values": ("Prometheus: the values of a label", [_MATCH, _LIMITED]),
    "metadata": ("Prometheus: types of metrics", [_query("metric", "Of one alone."), _LIMITED]),
    "status/buildinfo": ("Prometheus: the version", []),
    "rules": ("Prometheus: rules, of which there are none", []),
    "alerts": ("Prometheus: alerts, of which there are none", []),
}


def _rows(formats: list[str]) -> list[Json]:
    several = {"type": "array", "items": _TEXT}
    return [
        _query("key", "The whole key of one row, one parameter a column.", several),
        _query(
            "prefix", "The first key columns, one parameter each; null is null, and 'null' in quotes the text.", several
        ),
        _query("from", "Of the time, inclusive: milliseconds since 1970, or ISO 8601."),
        _query("to", "Of the time, exclusive."),
        _query("step", "Slots of so long, such as 1h."),
        _query("by", "Combined to these key columns."),
        _query("last", "The time up to the end of the newest slot, such as 15m."),
        _query("tz", "The time zone of step."),
        _query("columns", "Names with commas."),
        _query("where", "A predicate, such as resp_time_us > 1000."),
        _query("order_by", "Columns with commas, -x from the largest down."),
        _query("limit", "Rows at most.", {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX}),
        _query("as_of", "A commit timestamp, or a moment in ISO 8601."),
        _query("min_snapshot", "A commit timestamp that the snapshot has to have.", _WHOLE),
        _query("format", "The format, instead of Accept.", {"enum": formats}),
    ]


def _members(known: Mapping[str, str], required: str) -> Json:
    properties = {name: _SCHEMAS[kind] for name, kind in known.items()}
    return {"type": "object", "required": [required], "properties": properties, "additionalProperties": False}
