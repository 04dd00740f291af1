"""Writes: ``POST /v1/tables/{table}/append`` and ``POST /v1/transactions``, each one commit.

::

    {"operations": [
        {"op": "put", "table": "accounts", "key": [1], "values": {"name": "ada"}},
        {"op": "delta", "table": "accounts", "key": [1], "values": {"balance": 21}},
        {"op": "insert", "table": "accounts", "key": [2], "values": {"name": "bob"}},
        {"op": "delete", "table": "accounts", "key": [3]},
        {"op": "guard", "table": "accounts", "key": [4], "column": "balance"},
        {"op": "append", "table": "invocations", "records": [{"endpoint_id": 251, "ts": "2026-07-01T12:00:00Z"}]}],
     "snapshot": 812}

``snapshot`` is the one that the caller has read (``X-Kivi-Snapshot``): the transaction begins there, so that what
others wrote since, and this one writes or guards, is a Conflict (409). Without it, it begins when it is read.

``Idempotency-Key`` is the request token: whoever repeats the request under it gets the first commit timestamp, and
nothing happens twice. Without one, a request whose answer was lost may have happened or not.

Values are JSON's: moments in ISO 8601 or microseconds since 1970, decimals as texts or numbers (exact either way),
bytes as ``0x`` and hexadecimal. An append's body is JSON (a list of objects), lines of JSON, or an Arrow IPC stream,
as Content-Type says. Numbers of JSON that must be seconds or milliseconds are refused where a moment belongs
(``kivi.model.types.check_unit``): of an append, if all of a column are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

from kivi_server.http.errors import UnsupportedMediaType
from kivi_server.http.questions import parsed
from kivi_server.http.rendering import ARROW, JSON, NDJSON
from kivi_server.sessions import Sessions

from kivi.api.arguments import check_token, drops_late
from kivi.api.writes import Write
from kivi.arrow.records import event_batch
from kivi.errors import CommitUnknown, InvalidArgument, KiviError, NotFound, SnapshotTooOld
from kivi.model.json_texts import as_float, name_lines
from kivi.model.predicate_text import parse_value
from kivi.model.schema import TableSchema
from kivi.model.tenants import Tenant
from kivi.model.types import check_unit, shown
from kivi.store.facade import Store, Txn

__all__ = ["Appended", "Operations", "committed", "token_of"]

_CELLS: Final = frozenset({"op", "table", "key", "values"})
_MEMBERS: Final = {
    "put": _CELLS,
    "delta": _CELLS,
    "insert": _CELLS,
    "delete": _CELLS - {"values"},
    "guard": _CELLS - {"values"} | {"column"},
    "append": frozenset({"op", "table", "records", "late"}),
}
_LINES: Final = frozenset({NDJSON, "application/ndjson", "application/jsonl"})
_TEXTUAL: Final = frozenset({"timestamp", "bytes", "decimal", "float64"})


def token_of(headers: Mapping[str, str], tenant: Tenant | None = None) -> str | None:
    """The request token, as it is kept. Raises InvalidArgument."""
    token = headers.get("idempotency-key")
    if token is None:
        return None
    return check_token(token) if tenant is None else tenant.own_token(check_token(token))


class Appended:
    """An append's body, yet to be read. ``media``: its Content-Type."""

    def __init__(self, table: str, media: str, body: bytes, late: str) -> None:
        self.table, self._body, self._drop_late = table, body, drops_late(late)
        self._media = media.partition(";")[0].strip().lower()
        if self._media not in (JSON, ARROW) and self._media not in _LINES:
            raise UnsupportedMediaType(
                f"an append is {JSON}, {NDJSON} or {ARROW}, not {shown(media)}: set Content-Type"
            )

    def prepare(self, sessions: Sessions, tenant: Tenant | None) -> Txn:
        """In a thread. Raises what it deserves."""
        txn = sessions.store.blind_transaction(tenant)
        try:
            schema = sessions.store.table(self.table, txn.lease)
            txn.append(schema, self._batch(sessions, schema), drop_late=self._drop_late)
        except BaseException:
            txn.rollback()
            raise
        return txn

    def _batch(self, sessions: Sessions, schema: TableSchema) -> Any:
        if self._media == ARROW:
            return sessions.translator.batch(schema, self._body)
        how: dict[str, Any] = {"parse_float": Decimal} if any(c.type.name == "decimal" for c in schema.columns) else {}
        if self._media == JSON:
            return event_batch(schema, _records(schema, parsed(self._body, "the body", **how)))
        lines = [(n, line) for n, line in enumerate(self._body.split(b"\n"), start=1) if line.strip()]
        records = [parsed(line, f"line {n} of the body", **how) for n, line in lines]
        try:
            return event_batch(schema, _records(schema, records))
        except KiviError as error:
            name_lines(error, lambda index: f"line {lines[index][0]} of the body")
            raise


class Operations:
    """Of a transaction, under its ``token``. Raises InvalidArgument for what is none."""

    def __init__(self, body: bytes, token: str | None) -> None:
        self._token = token
        found = parsed(body, parse_float=Decimal)
        if not isinstance(found, dict) or not found.keys() <= {"operations", "snapshot"}:
            raise InvalidArgument('the body is a JSON object of "operations" and "snapshot"')
        self._snapshot = found.get("snapshot")
        if self._snapshot is not None and (type(self._snapshot) is not int or not 0 < self._snapshot < 1 << 63):
            raise InvalidArgument(
                f"snapshot is the one that was read (X-Kivi-Snapshot), a whole number from 1 on, not "
                f"{shown(self._snapshot)}, at which there is no table: leave it out where nothing was read"
            )
        operations = found.get("operations")
        if not isinstance(operations, list) or not operations:
            raise InvalidArgument('"operations" is a list of at least one operation')
        self._operations = [_checked(i, each) for i, each in enumerate(operations)]
        self.tables = {str(each["table"]) for each in self._operations}

    def prepare(self, sessions: Sessions, tenant: Tenant | None) -> Txn:
        """In a thread. Raises what it deserves."""
        store = sessions.store
        if self._snapshot is not None:
            txn = self._begun(store, self._snapshot, tenant)
        elif any(each["op"] in ("insert", "guard") for each in self._operations):
            txn = store.transaction(store.begin(tenant=tenant))
        else:
            txn = store.blind_transaction(tenant)
        txn.deferred = True  # RowExists is no answer before the token has been looked up (R16)
        try:
            for each in self._operations:
                _apply(store, txn, each)
        except BaseException:
            txn.rollback()
            raise
        return txn

    def _begun(self, store: Store, snapshot: int, tenant: Tenant | None) -> Txn:
        try:
            return store.transaction(store.begin(as_of_ts=snapshot, tenant=tenant))
        except SnapshotTooOld:
            if self._token is None or store.committed_at(token=self._token) is None:
                raise
            # It is compared with what has happened under its token, and no more.
            return store.transaction(store.begin(tenant=tenant))


def _checked(i: int, operation: Any) -> Mapping[str, Any]:
    what = f"operations[{i}]"
    if not isinstance(operation, dict):
        raise InvalidArgument(f"{what} is a JSON object")
    known = _MEMBERS.get(op) if isinstance(op := operation.get("op"), str) else None
    if known is None:
        raise InvalidArgument(f'{what}: "op" is {", ".join(_MEMBERS)}')
    if unknown := operation.keys() - known:
        raise InvalidArgument(f"{what}: {op} has no member {shown(min(unknown))}; it has {', '.join(sorted(known))}")
    if not isinstance(operation.get("table"), str):
        raise InvalidArgument(f'{what}: "table" names a table')
    if op == "append":
        if not isinstance(operation.get("records"), list):
            raise InvalidArgument(f'{what}: "records" is a list of objects')
        drops_late(operation.get("late", "fail"))
        return operation
    if not isinstance(operation.get("key"), list):
        raise InvalidArgument(f'{what}: "key" is a list of the values of the key columns')
    if not isinstance(operation.get("values", {}), dict):
        raise InvalidArgument(f'{what}: "values" is an object of columns')
    if not isinstance(operation.get("column") or "", str):
        raise InvalidArgument(f'{what}: "column" names a column')
    return operation


def _apply(store: Store, txn: Txn, operation: Mapping[str, Any]) -> None:
    schema, op = store.table(operation["table"], txn.lease), operation["op"]
    if op == "append":
        batch = event_batch(schema, _records(schema, operation["records"]))
        txn.append(schema, batch, drop_late=drops_late(operation.get("late", "fail")))
        return
    types = [(column.name, str(column.type)) for column in schema.key]
    key = tuple(
        _single(type_, value, f"key column {name!r}")
        for (name, type_), value in zip(types, operation["key"], strict=False)
    ) + tuple(operation["key"][len(types) :])
    values = {name: _cell(schema, name, value) for name, value in operation.get("values", {}).items()}
    column = operation.get("column") or None
    stored_key, stored = Write(op, key, values, column).bound(schema)
    match op:
        case "put":
            txn.put(schema, stored_key, stored)
        case "delta":
            txn.delta(schema, stored_key, stored)
        case "insert":
            txn.insert(schema, stored_key, stored)
        case "delete":
            txn.delete(schema, stored_key)
        case "guard":
            txn.guard(schema, stored_key, column)


def _cell(schema: TableSchema, name: str, value: Any) -> Any:
    column = schema.by_name.get(name)
    return value if column is None else _single(str(column.type), value, f"column {name!r}")


def _single(type_: str, value: Any, what: str) -> Any:
    value = _value(type_, value, what)
    if type_ == "timestamp":
        check_unit([value], what)
    return value


def _value(type_: str, value: Any, what: str) -> Any:
    """A value of JSON as a caller in Python would write it; what does not fit is refused by the type itself.

    A text is a value, and neither null nor another text in quotes, which only a command line has to write so.
    """
    if isinstance(value, str) and (type_ in ("timestamp", "bytes") or type_.startswith("decimal")):
        if value == "null" or value[:1] in ("'", '"'):
            raise InvalidArgument(f"{what} is the text {shown(value)}, which is no {type_}: null has no quotes in JSON")
        if type_ == "bytes" and not value.startswith("0x"):
            raise InvalidArgument(f"{what} is {shown(value)}: write bytes as 0x and hexadecimal, like 0x00ff")
        return parse_value(type_, value, what)
    if type_ == "float64" and type(value) in (Decimal, int):  # whose digits are those of a float that others wrote
        return as_float(value)
    return value


def _records(schema: TableSchema, records: Any) -> Iterable[Any]:
    if not isinstance(records, list):
        raise InvalidArgument("an append is a list of objects, one for each event")
    types = {name: str(column.type) for name, column in schema.by_name.items() if column.type.name in _TEXTUAL}
    for i, record in enumerate(records):
        if isinstance(record, dict):
            for name in types.keys() & record.keys():
                record[name] = _value(types[name], record[name], f"records[{i}], column {name!r}")
    for name in (name for name, type_ in types.items() if type_ == "timestamp"):
        check_unit([record.get(name) for record in records if isinstance(record, dict)], f"column {name!r}")
    return records


async def committed(sessions: Sessions, prepare: Callable[[], Txn], token: str | None) -> int:
    """Prepares and commits, off the event loop; the commit timestamp, once it is durable and visible.

    Whoever stops waiting changes nothing. Raises what it deserves, and CommitUnknown if that takes too long.
    """
    loop, store = asyncio.get_running_loop(), sessions.store
    settled: asyncio.Future[int] = loop.create_future()

    def tell(commit_ts: int | None, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_settle, settled, commit_ts, error)

    sessions.commit_started()
    settled.add_done_callback(lambda ended: _ended(sessions, ended))
    pool = sessions.full if store.is_full else sessions.writes
    await loop.run_in_executor(pool, _begin, sessions, prepare, token, tell)
    try:
        async with asyncio.timeout(store.settings.commit_timeout_s):
            return await asyncio.shield(settled)
    except TimeoutError:
        raise CommitUnknown(token=token) from None


Told = Callable[[int | None, BaseException | None], None]


def _begin(sessions: Sessions, prepare: Callable[[], Txn], token: str | None, tell: Told) -> None:
    store = sessions.store
    try:
        store.commit(prepare(), token=token, done=lambda outcome: tell(outcome.commit_ts, outcome.error))
    except BaseException as error:
        first = None
        if token is not None and isinstance(error, NotFound):  # its table was dropped since: nothing can be compared
            first = store.committed_at(token=token)
        tell(first, error if first is None else None)


def _settle(settled: asyncio.Future[int], commit_ts: int | None, error: BaseException | None) -> None:
    if settled.done():
        return
    if error is not None:
        settled.set_exception(error)
    else:
        settled.set_result(commit_ts or 0)


def _ended(sessions: Sessions, settled: asyncio.Future[int]) -> None:
    sessions.commit_ended()
    if not settled.cancelled():
        settled.exception()  # which nobody may be there to look at
