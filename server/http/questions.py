"""Questions as JSON: ``POST /v1/query`` and ``POST /v1/sql``.

::

    {"table": "invocations", "group_by": ["endpoint_id", "hour=ts/1h"], "where": "application == 'shop'",
     "measures": {"calls": "count()", "latency": "quantiles(resp_time_us)"},
     "derived": {"p99": "quantile(latency, 0.99)"}, "having": "calls > 100", "order_by": ["-p99"], "limit": 10}
    {"sql": "select endpoint_id, sum(calls) from endpoint_5m group by all", "parameters": [3]}

Members of a query are the arguments of ``snap.query``, and with ``size`` (and ``slide``) or ``session`` those of
``snap.windows``; predicates, measures and expressions are texts, as the command line takes them. ``start`` and ``end``
are ISO 8601, or microseconds since 1970. A list of one text may be that text. Both take ``as_of`` (a commit timestamp
or a moment) and ``min_snapshot``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
from kivi_server.auth import Grant
from kivi_server.http.rows import LIMIT, LIMIT_MAX, begun, gathered
from kivi_server.sessions import Sessions
from kivi_server.sql_tables import SqlTables

from kivi.api.arguments import QuestionArguments, SqlArguments
from kivi.arrow.ipc import encode_ipc
from kivi.errors import InvalidArgument
from kivi.model.given import shown
from kivi.model.json_texts import read_json
from kivi.model.measure_text import any_group, operator_call
from kivi.model.predicate_text import parse_value, type_names, where
from kivi.model.questions import question_of, windows_of
from kivi.model.schema import TableSchema
from kivi.model.types import check_unit

__all__ = ["QUERY", "SQL", "Answered", "Query", "Sql", "members", "parsed"]

TEXT: Final = "a text"
NUMBER: Final = "a whole number"
TEXTS: Final = "a text or a list of texts"
NAMED: Final = "an object of texts"
MOMENT: Final = "a moment in ISO 8601, or a whole number"
FLAG: Final = "true or false"
ANY: Final = "a list or an object"
_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    TEXT: lambda value: isinstance(value, str),
    NUMBER: lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63,
    TEXTS: lambda value: all(isinstance(each, str) for each in (value if isinstance(value, list) else [value])),
    NAMED: lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
    MOMENT: lambda value: isinstance(value, (str, int)) and not isinstance(value, bool),
    FLAG: lambda value: isinstance(value, bool),
    ANY: lambda value: isinstance(value, (list, dict)),
}
_SNAPSHOT: Final = {"as_of": MOMENT, "min_snapshot": NUMBER}
QUERY: Final = {
    "table": TEXT, "start": MOMENT, "end": MOMENT, "where": TEXT, "group_by": TEXTS, "measures": NAMED,
    "derived": NAMED, "having": TEXT, "order_by": TEXTS, "limit": NUMBER, "offset": NUMBER, "columns": TEXTS,
    "size": TEXT, "slide": TEXT, "session": TEXT, "tz": TEXT, "explain": FLAG, **_SNAPSHOT,
}  # fmt: skip
SQL: Final = {"sql": TEXT, "parameters": ANY, **_SNAPSHOT}


class Answered(NamedTuple):
    table: Any
    ts: int
    more: bool
    explanation: str


def members(data: bytes, known: Mapping[str, str], required: str) -> dict[str, Any]:
    """The members of a JSON object, those that are null left out. Raises InvalidArgument."""
    found = parsed(data, parse_float=_finite)
    if not isinstance(found, dict):
        raise InvalidArgument("the body is a JSON object")
    given = {name: value for name, value in found.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(f"there is no member {shown(name)}; there are {', '.join(sorted(known))}")
        if not _CHECKS[known[name]](value):
            raise InvalidArgument(f"member {shown(name)} is {known[name]}")
        if known[name] == TEXTS and isinstance(value, str):
            given[name] = [value]
    if required not in given:
        raise InvalidArgument(f"member {required!r} is required")
    return given


def parsed(data: bytes, what: str = "the body", **how: Any) -> Any:
    """JSON. Raises InvalidArgument."""
    try:
        return read_json(data, what, parse_constant=_refuse, object_pairs_hook=_once, **how)
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise InvalidArgument(f"{what} is not JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, of which Python would silently take the last of the members of one name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InvalidArgument(f"an object in the body has the member {shown(twice)} twice: give it once")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise InvalidArgument(
            f"{text} in the body is beyond the numbers of a float64: NaN and infinities are not accepted"
        )
    return number


@dataclass(frozen=True, slots=True)
class Query:
    """Of ``/v1/query``."""

    given: Mapping[str, Any]

    @staticmethod
    def of(data: bytes) -> Query:
        """Raises InvalidArgument."""
        query = Query(members(data, QUERY, "table"))
        if not 0 < query.limit <= LIMIT_MAX:
            raise InvalidArgument(f"member limit is a number of rows from 1 to {LIMIT_MAX:,}, not {query.limit}")
        return query

    @property
    def table(self) -> str:
        return str(self.given["table"])

    @property
    def limit(self) -> int:
        return int(self.given.get("limit", LIMIT))

    @property
    def is_now(self) -> bool:
        return "as_of" not in self.given and "min_snapshot" not in self.given

    @property
    def question(self) -> tuple[Any, ...]:
        return ("query", json.dumps(sorted(self.given.items())))  # columns come in the order of the measures

    def answer(self, sessions: Sessions, grant: Grant) -> Answered:
        """In a thread. Raises what the question deserves."""
        store = sessions.store
        lease = begun(store, *snapshot_of(self.given), grant.tenant)
        try:
            schema = store.table(self.table, lease)
            wanted = self._wanted(schema)
            answer = store.answer(lease, schema, wanted.bound(schema))
            table = gathered(answer, wanted.arrow_schema(schema))
            explanation = answer.explanation(grant.allows) if self.given.get("explain") and grant.tenant is None else ""
            return Answered(table.slice(0, self.limit), lease.ts, table.num_rows > self.limit, explanation)
        finally:
            store.release(lease)

    def _wanted(self, schema: TableSchema) -> QuestionArguments:
        given = self.given
        types = type_names(schema.description())
        if schema.kind == "event":
            types = {"_commit_ts": "int64", "_commit_time": "timestamp", **types}
        windows, tz = None, given.get("tz")
        if "size" in given or "session" in given:
            windows = windows_of(given.get("size"), given.get("slide"), given.get("session"), tz)
        elif "slide" in given:
            raise InvalidArgument("slide is of windows that have a size")
        contents: dict[str, Any] = {
            "group_by": [any_group(text, types, tz) for text in given.get("group_by", ())],
            "measures": {n: operator_call(n, text, types) for n, text in given.get("measures", {}).items()} or None,
            "derived": given.get("derived") or None,
        }
        having = None
        if "having" in given:
            question = question_of(schema, **contents, windows=windows)
            having = where(given["having"], {n: str(question.type_of(n)) for n in question.columns}, "having")
        return QuestionArguments(
            self.table,
            **{name: moment(given[name], name) for name in ("start", "end") if name in given},
            **contents,
            where=where(given["where"], types, "where") if "where" in given else None,
            having=having,
            order_by=given.get("order_by", ()),
            limit=self.limit + 1,
            offset=given.get("offset", 0),
            columns=given.get("columns"),
            windows=windows,
        )


@dataclass(frozen=True, slots=True)
class Sql:
    """Of ``/v1/sql``. The answer's tables are not known before it is computed, so it is nobody else's."""

    given: Mapping[str, Any]

    @staticmethod
    def of(data: bytes) -> Sql:
        """Raises InvalidArgument."""
        return Sql(members(data, SQL, "sql"))

    def answer(self, sessions: Sessions, grant: Grant, left: Future[None]) -> Answered:
        """In a thread of those that wait for processes. ``left`` is done once nobody waits for the answer: its process
        is for others then. Raises what the question deserves."""
        wanted = SqlArguments(self.given["sql"], self.given.get("parameters"))
        parameters = b"" if wanted.batch is None else bytes(encode_ipc(wanted.batch))
        store = sessions.store
        lease = begun(store, *snapshot_of(self.given), grant.tenant)
        try:
            with store.shared_events(lease) as shared:
                question = SqlTables(sessions.translator, lambda: grant, lease, shared).question(
                    wanted.text, parameters
                )
                table = gathered(_batches(sessions.workers.answer(question, left=left)), None)
                shared.check()
            return Answered(table, lease.ts, False, "")
        finally:
            store.release(lease)


def _batches(pages: Any) -> Any:
    """Of pages that are Arrow IPC streams; an empty one of the first, so that there is a schema."""
    first = True
    for page in pages:
        with pa.ipc.open_stream(page) as reader:
            if first:
                yield pa.RecordBatch.from_pylist([], reader.schema)
                first = False
            yield from reader


def moment(value: str | int, name: str) -> Any:
    found = parse_value("timestamp", value, name) if isinstance(value, str) else value
    check_unit([found], name)
    return found


def snapshot_of(given: Mapping[str, Any]) -> tuple[str | None, int | None]:
    as_of = given.get("as_of")
    return None if as_of is None else str(as_of), given.get("min_snapshot")
