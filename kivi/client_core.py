"""What both clients do, without doing it: every call as *steps* that a driver carries out.

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
  CommitUnknown. "Aborted" is final (the server fences the attempt), and becomes Retryable.
* Anything else of a transaction: its state died with the session. A snapshot that has been read is
  opened again at the same timestamp if the server still keeps it, a transaction that has neither read
  nor sent anything begins again, all else is SnapshotTooOld.

Reads never go backwards (R17): the largest commit timestamp and snapshot this client has seen travel
with every Begin, and the server waits for its watermark to reach them.
"""

from __future__ import annotations

import datetime as dt
import itertools
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from kivi import errors, expr
from kivi.client_codec import (
    fill_values,
    from_table,
    from_values,
    new_token,
    to_expr,
    to_groups,
    to_measures,
    to_table,
    type_of,
)
from kivi.definitions import TimeSlot, event_table_schema, parse_duration_us, row_table_schema
from kivi.errors import InvalidArgument
from kivi.outcomes import ABORTED, UNKNOWN, Outcome
from kivi.schema import GroupKey, Measure, OperatorCall, TableSchema
from kivi.wire.v1 import service_pb2, session_pb2, types_pb2

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Ask", "ConnectionLost", "Core", "Effect", "Sleep", "Steps", "Stream", "Timeout", "TransactionCore", "Unary"]

Kind = session_pb2.Operation
_FLUSH_OPERATIONS: Final = 4_096  # buffered operations are sent ahead beyond this many ...
_FLUSH_BYTES: Final = 4 << 20  # ... or this many bytes
_APPEND_BYTES: Final = 24 << 20  # a larger append travels in several messages of one transaction
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

T = TypeVar("T")


class ConnectionLost(errors.Unavailable):
    """The session broke before the answer came. ``sent``: the request may have reached the server."""

    def __init__(self, message: str = "the connection to the server was lost", *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class Timeout(errors.Unavailable):
    """No answer within the client's timeout; the request may have reached the server."""


@dataclass(slots=True)
class Ask:
    """One request of the session; ``epoch`` names the session it must travel in, None: any."""

    request: session_pb2.Request
    timeout_s: float | None
    epoch: int | None = None


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


Effect = Ask | Unary | Stream | Upload | Sleep
Steps = Generator[Effect, Any, T]


class Transport(Protocol):
    """What a driver offers besides performing effects."""

    session: bytes

    def tell(self, request: session_pb2.Request, epoch: int | None = None) -> int:
        """Queues a request that wants no answer; returns the epoch of the session it travels in.

        With ``epoch`` it is dropped when that session is gone.
        """


def backoff_s(attempt: int) -> float:
    """A random pause that grows with the attempts: 1 ms to 250 ms."""
    return random.uniform(0.5, 1.0) * min(0.25, 0.001 * 2.0**attempt)


def timeout_ms(timeout_s: float | None) -> int:
    return 0 if timeout_s is None else max(1, min(int(timeout_s * 1000), 0xFFFFFFFF))


@dataclass
class Core:
    """One client's state: its schema cache, what it has seen, its timeout."""

    endpoint: str
    timeout_s: float | None
    transport: Transport = field(init=False)
    schemas: dict[str, TableSchema] = field(default_factory=dict)
    seen_ts: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def saw(self, ts: int) -> None:
        self.seen_ts = max(self.seen_ts, ts)

    def deadline(self) -> float:
        return time.monotonic() + (self.timeout_s if self.timeout_s is not None else 1e9)

    # -- schemas --------------------------------------------------------------------------------

    def fetch(self, name: str) -> Steps[TableSchema]:
        """The schema from the server, into the cache."""
        if not isinstance(name, str):
            raise InvalidArgument(f"a table is named by a string, not {name!r}")
        try:
            reply = yield Unary("Describe", service_pb2.DescribeRequest(name=name), self.timeout_s)
        except errors.NotFound:
            self.schemas.pop(name, None)
            raise
        schema = self.schemas[name] = from_table(reply.table)
        return schema

    def stale(self, error: errors.KiviError, table: str) -> bool:
        """True, and the cached schema forgotten, if ``error`` says it is of another generation."""
        if isinstance(error, errors.NotFound) and error.details.get("stale"):
            self.schemas.pop(table, None)
            return True
        if isinstance(error, errors.NotFound):
            self.schemas.pop(table, None)
        return False

    def use(self, table: str, fn: Callable[[TableSchema], T]) -> Steps[T]:
        """``fn(schema)``, which validates before it does anything.

        If it refuses what was written against the cached schema, the table may have been made anew since: the
        schema is fetched, and ``fn`` has the last word on that one.
        """
        schema = self.schemas.get(table)
        if schema is not None:
            try:
                return fn(schema)
            except InvalidArgument:
                pass
        return fn((yield from self.fetch(table)))

    # -- requests without a transaction ---------------------------------------------------------

    def repeat(self, request: session_pb2.Request, lost: Callable[[], errors.KiviError]) -> Steps[Any]:
        """Asks, and asks the same again on new sessions until the deadline; then raises ``lost()``."""
        deadline, attempt = self.deadline(), 0
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise lost()
            try:
                return (yield Ask(request, left if self.timeout_s is not None else None))
            except (ConnectionLost, Timeout):
                pass
            except errors.Unavailable as error:
                if not error.details.get("stopping"):
                    raise
            attempt += 1
            yield Sleep(min(backoff_s(attempt + 4), max(0.0, deadline - time.monotonic())))

    def outcome(self, token: str) -> Steps[Outcome]:
        request = session_pb2.Request(outcome=session_pb2.Outcome(token=token), timeout_ms=timeout_ms(self.timeout_s))
        reply = yield from self.repeat(request, lambda: Timeout(f"the server did not say what became of {token!r}"))
        match reply.outcome.state:
            case session_pb2.OutcomeReply.STATE_COMMITTED:
                self.saw(reply.outcome.commit_ts)
                return int(reply.outcome.commit_ts)
            case session_pb2.OutcomeReply.STATE_ABORTED:
                return ABORTED
        return UNKNOWN

    def resolve(self, token: str) -> Steps[int]:
        """The commit timestamp of a commit whose reply was lost. Raises Retryable if it did not happen."""
        deadline, attempt = self.deadline(), 0
        while time.monotonic() < deadline:
            try:
                outcome = yield from self.outcome(token)
            except errors.Unavailable:
                break
            if outcome is ABORTED:
                raise errors.Retryable(
                    "the connection was lost before the commit was logged; "
                    "nothing was applied: run the transaction again"
                )
            if isinstance(outcome, int):
                return outcome
            attempt += 1
            yield Sleep(backoff_s(attempt + 4))
        raise errors.CommitUnknown(token=token)

    # -- appends --------------------------------------------------------------------------------

    def append(self, table: str, records: Any, token: str | None, batch: tuple[str, int] | None) -> Steps[int]:
        """One transaction; the schema is fetched again, once, if the table turns out to be another."""
        if token is not None and not isinstance(token, str):
            raise InvalidArgument(f"a token is a string, not {token!r}")
        for attempt in (0, 1):
            schema = self.schemas.get(table) or (yield from self.fetch(table))
            try:
                return (yield from self._append(schema, records, token, batch))
            except errors.NotFound as error:
                if not self.stale(error, table) or attempt:
                    raise
        raise AssertionError("unreachable")

    def _append(
        self, schema: TableSchema, records: Any, token: str | None, batch: tuple[str, int] | None
    ) -> Steps[int]:
        parts = append_parts(schema, records)
        token = _token(token, batch)
        if len(parts) > 1:
            transaction = TransactionCore(self, token=token, batch=batch)
            transaction.begin()
            try:
                for part in parts:
                    operation = transaction.operation(Kind.KIND_APPEND, schema)
                    operation.arrow = part
                    yield from transaction.flush()
            except BaseException:
                transaction.release()
                raise
            return (yield from transaction.commit())
        request = session_pb2.Request(commit=_commit(token, batch))
        operation = request.operations.add(kind=Kind.KIND_APPEND, table=schema.name, table_id=schema.id)
        operation.arrow = parts[0]
        reply = yield from self.repeat(request, lambda: errors.CommitUnknown(token=token or None))
        self.saw(reply.commit.commit_ts)
        return int(reply.commit.commit_ts)

    def stage(self, table: str, records: Any, owner: str) -> Steps[bytes]:
        for attempt in (0, 1):
            schema = self.schemas.get(table) or (yield from self.fetch(table))
            parts = append_parts(schema, records)

            def messages(schema: TableSchema = schema, parts: Sequence[bytes] = parts) -> Iterator[Any]:
                for part in parts:
                    yield service_pb2.StageRequest(table=schema.name, table_id=schema.id, owner=owner, arrow=part)

            try:
                reply = yield Upload("Stage", messages, None)
                return bytes(reply.stage)
            except errors.NotFound as error:
                if not self.stale(error, table) or attempt:
                    raise
        raise AssertionError("unreachable")

    def discard_stages(self, ids: Iterable[bytes]) -> Steps[None]:
        yield Unary("DiscardStages", service_pb2.DiscardStagesRequest(stages=list(ids)), self.timeout_s)

    def batch_scopes(self, prefix: str) -> Steps[list[str]]:
        reply = yield Unary("ListBatchScopes", service_pb2.ListBatchScopesRequest(prefix=prefix), self.timeout_s)
        return list(reply.scopes)

    # -- administration -------------------------------------------------------------------------

    def create_table(
        self, name: str, key: Mapping[str, object], columns: Mapping[str, object], history: Any
    ) -> Steps[None]:
        yield from self._create(row_table_schema(name, key, columns, history))

    def create_event_table(
        self, name: str, event_time: str, columns: Mapping[str, object], retention: Any
    ) -> Steps[None]:
        yield from self._create(event_table_schema(name, event_time, columns, retention))

    def _create(self, schema: TableSchema) -> Steps[None]:
        request = service_pb2.CreateTableRequest(table=to_table(schema))
        reply = yield Unary("CreateTable", request, self.timeout_s)
        self.schemas[schema.name] = from_table(reply.table)

    def create_aggregate(
        self,
        name: str,
        source: str,
        group_by: Sequence[str | TimeSlot],
        measures: Mapping[str, OperatorCall],
        derived: Mapping[str, str] | None,
        history: Any,
        progress: Callable[[int, int], None] | None,
    ) -> Steps[None]:
        """The server checks names and types against the source; here only the shape of the call."""
        groups = []
        for item in (group_by,) if isinstance(group_by, (str, TimeSlot)) else group_by:
            if isinstance(item, TimeSlot):
                groups.append(GroupKey(item.name, item.column, item.width_us))
            elif isinstance(item, str):
                groups.append(GroupKey(item, item))
            else:
                raise errors.SchemaError(f"group_by takes column names and kivi.time_slot, not {item!r}")
        for measure, call in measures.items():
            if not isinstance(call, OperatorCall):
                raise errors.SchemaError(f"measure {measure!r} must be kivi.sum, count, min or max, not {call!r}")
        request = service_pb2.CreateAggregateRequest(
            name=name,
            source=source,
            group_by=to_groups(groups),
            measures=to_measures([Measure(m, call.operator, call.argument) for m, call in measures.items()]),
            derived=[types_pb2.Derived(name=n, expression=text) for n, text in (derived or {}).items()],
            history_us=None if history is None else parse_duration_us(history, "history"),
        )

        def on_message(reply: service_pb2.CreateAggregateResponse) -> None:
            if reply.HasField("table"):
                self.schemas[name] = from_table(reply.table)
            if progress is not None:
                progress(reply.done_rows, reply.total_rows)

        yield Stream("CreateAggregate", request, None, on_message)

    def tables(self) -> Steps[list[str]]:
        reply = yield Unary("ListTables", service_pb2.ListTablesRequest(), self.timeout_s)
        return [table.name for table in reply.tables]

    def describe(self, name: str) -> Steps[dict[str, Any]]:
        reply = yield Unary("Describe", service_pb2.DescribeRequest(name=name), self.timeout_s)
        schema = self.schemas[name] = from_table(reply.table)
        statistics = {key: _number(value) for key, value in reply.statistics.items()}
        return {**schema.description(), "statistics": statistics}

    def drop(self, name: str) -> Steps[None]:
        self.schemas.pop(name, None)
        yield Unary("DropTable", service_pb2.DropTableRequest(name=name), self.timeout_s)

    def watermark(self) -> Steps[int]:
        reply = yield Unary("Watermark", service_pb2.WatermarkRequest(), self.timeout_s)
        return int(reply.watermark)

    def consolidate(self) -> Steps[None]:
        yield Unary("Consolidate", service_pb2.ConsolidateRequest(), None)

    def stats(self) -> Steps[dict[str, int | float]]:
        reply = yield Unary("Stats", service_pb2.StatsRequest(), self.timeout_s)
        return {name: _number(value) for name, value in reply.values.items()}

    def checkpoint(self, path: str) -> Steps[None]:
        yield Unary("Checkpoint", service_pb2.CheckpointRequest(path=str(path)), None)


class TransactionCore:
    """One transaction or snapshot: buffers writes, builds requests, remembers its timestamps."""

    def __init__(
        self,
        core: Core,
        *,
        read_only: bool = False,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        as_of: int | dt.datetime | None = None,
        min_snapshot: int | None = None,
        ttl_s: float | None = None,
        shared: bool = False,
        lease: bytes | None = None,
    ) -> None:
        if token is not None and (not isinstance(token, str) or not token):
            raise InvalidArgument(f"a token is a string, not {token!r}")
        self.core = core
        self.read_only = read_only
        self.token = token
        self.batch = _batch(batch)
        self.number = next(core.numbers)
        self.start_ts: int | None = None
        self.commit_ts: int | None = None
        self.lease = lease or b""
        self.ended = False
        self.wrote = False
        self.sent = False  # operations are at the server
        self._epoch = -1
        self._next = session_pb2.Request(txn=self.number)
        self._begin = session_pb2.Begin(
            min_snapshot=max(core.seen_ts if as_of is None and not lease else 0, min_snapshot or 0),
            ttl_ms=timeout_ms(ttl_s),
            shared=shared,
            lease=self.lease,
        )
        if isinstance(as_of, dt.datetime):
            if as_of.tzinfo is None:
                raise InvalidArgument("as_of is a datetime without a time zone: use an aware one, in UTC")
            self._begin.as_of_us = (as_of - _EPOCH) // dt.timedelta(microseconds=1)
        elif as_of is not None:
            if not isinstance(as_of, int) or isinstance(as_of, bool) or as_of < 0:
                raise InvalidArgument(f"as_of is a commit timestamp or a datetime, not {as_of!r}")
            self._begin.as_of_ts = as_of

    # -- the life of a transaction --------------------------------------------------------------

    def begin(self) -> None:
        """Queued, not awaited: what follows on the session arrives after it."""
        request = session_pb2.Request(txn=self.number, begin=self._begin, timeout_ms=timeout_ms(self.core.timeout_s))
        self._epoch = self.core.transport.tell(request)

    def _again(self) -> bool:
        """Begins anew on another session, if nothing that was seen or written depends on the old one."""
        if self.sent or (self.start_ts is not None and not self.read_only):
            return False
        if self._begin.shared:
            if not self.lease:
                return False
            self._begin = session_pb2.Begin(lease=self.lease)  # it outlived the session: use it by its name
        if self.start_ts is not None and not self.lease:
            self._begin.as_of_ts = self.start_ts
        self.number = next(self.core.numbers)
        self._next.txn = self.number
        self.begin()
        return True

    def _take(self) -> session_pb2.Request:
        if self.ended:
            raise InvalidArgument("this transaction has ended")
        request, self._next = self._next, session_pb2.Request(txn=self.number)
        return request

    def _ask(self, request: session_pb2.Request) -> Steps[Any]:
        attempt, deadline = 0, self.core.deadline()
        while True:
            try:
                reply = yield Ask(request, self.core.timeout_s, self._epoch)
            except ConnectionLost:
                if time.monotonic() > deadline:
                    raise
                attempt += 1
                yield Sleep(backoff_s(attempt + 4))
                if not self._again():
                    raise errors.SnapshotTooOld(
                        "the connection was lost, and with it this transaction's snapshot: begin again"
                    ) from None
                request.txn = self.number
                continue
            except errors.NotFound:
                self.core.schemas.clear()  # a table was dropped, and perhaps made anew
                raise
            self._learn(reply)
            self.sent = self.sent or len(request.operations) > 0
            return reply

    def _learn(self, reply: session_pb2.Response) -> None:
        if self.start_ts is None and reply.start_ts:
            self.start_ts = reply.start_ts
            self.core.saw(reply.start_ts)

    def started(self) -> Steps[int]:
        """The snapshot; asks the server if no answer has told it yet."""
        if self.start_ts is None:
            request = self._take()
            request.apply.SetInParent()
            yield from self._ask(request)
        return self.start_ts or 0

    def open_shared(self) -> Steps[bytes]:
        """Begins a shared snapshot and waits for its name."""
        request = session_pb2.Request(txn=self.number, begin=self._begin, timeout_ms=timeout_ms(self.core.timeout_s))
        reply = yield Ask(request, self.core.timeout_s)
        self._epoch = self.core.transport.tell(session_pb2.Request(txn=self.number, apply=session_pb2.Apply()))
        self._learn(reply)
        self.lease = bytes(reply.begin.lease)
        return self.lease

    def release(self) -> None:
        """Fire and forget."""
        if not self.ended:
            self.ended = True
            self.core.transport.tell(session_pb2.Request(txn=self.number, release=session_pb2.Release()), self._epoch)

    def renew(self, ttl_s: float | None) -> Steps[None]:
        request = self._take()
        request.renew.ttl_ms = timeout_ms(ttl_s)
        yield from self._ask(request)

    def commit(self) -> Steps[int]:
        if self.ended:
            raise InvalidArgument("this transaction has ended")
        if not self.wrote and self.batch is None and self.token is None:
            self.commit_ts = yield from self.started()
            self.release()
            return self.commit_ts
        token = _token(self.token, self.batch)
        request = self._take()
        request.commit.CopyFrom(_commit(token, self.batch))
        self.ended = True
        restarted = False
        while True:
            try:
                reply = yield Ask(request, self.core.timeout_s, self._epoch)
            except (ConnectionLost, Timeout) as lost:
                if isinstance(lost, ConnectionLost) and not lost.sent:
                    if not restarted and self._again():
                        restarted, request.txn = True, self.number
                        continue
                    raise errors.Retryable(
                        "the connection was lost before the commit was sent; "
                        "nothing was applied: run the transaction again"
                    ) from None
                if not token:
                    raise errors.CommitUnknown(
                        "the connection was lost during the commit: repeat the batch, which applies it once"
                    ) from None
                self.commit_ts = yield from self.core.resolve(token)
                return self.commit_ts
            except errors.NotFound:
                self.core.schemas.clear()  # a table was dropped, and perhaps made anew
                raise
            break
        self._learn(reply)
        self.commit_ts = int(reply.commit.commit_ts)
        self.core.saw(self.commit_ts)
        return self.commit_ts

    # -- writes ---------------------------------------------------------------------------------

    def operation(
        self, kind: session_pb2.Operation.Kind, schema: TableSchema, key: tuple[Any, ...] = ()
    ) -> session_pb2.Operation:
        """One more buffered operation."""
        if self.ended:
            raise InvalidArgument("this transaction has ended")
        if self.read_only:
            raise InvalidArgument("a snapshot is read only: write in a transaction")
        self.wrote = True
        operation: session_pb2.Operation = self._next.operations.add(kind=kind, table=schema.name, table_id=schema.id)
        if key:
            fill_values(operation.key, key)
        return operation

    def write(
        self,
        kind: session_pb2.Operation.Kind,
        schema: TableSchema,
        key: tuple[Any, ...],
        values: Mapping[str, Any],
    ) -> bool:
        """Buffers a put, delta or insert of stored-form values; True: the buffer is full, flush it."""
        operation = self.operation(kind, schema, key)
        operation.columns.extend(values)
        fill_values(operation.values, values.values())
        return self.full()

    def put(self, schema: TableSchema, key: object, values: Mapping[str, Any]) -> bool:
        return self.write(Kind.KIND_PUT, schema, schema.stored_key(key), schema.stored_put(values))

    def delta(self, schema: TableSchema, key: object, values: Mapping[str, Any]) -> bool:
        return self.write(Kind.KIND_DELTA, schema, schema.stored_key(key), schema.stored_delta(values))

    def delete(self, schema: TableSchema, key: object) -> bool:
        schema.stored_put({})  # refuses event and aggregate tables
        self.operation(Kind.KIND_DELETE, schema, schema.stored_key(key))
        return self.full()

    def guard(self, schema: TableSchema, key: object, column: str | None) -> bool:
        schema.check_guardable(column)
        operation = self.operation(Kind.KIND_GUARD, schema, schema.stored_key(key))
        if column is not None:
            operation.columns.append(column)
        return self.full()

    def full(self) -> bool:
        count = len(self._next.operations)
        return count >= _FLUSH_OPERATIONS or (count % 64 == 0 and self._next.ByteSize() > _FLUSH_BYTES)

    def flush(self) -> Steps[None]:
        """Sends what is buffered, and waits, so that memory and the server's queue stay bounded."""
        if self._next.operations:
            request = self._take()
            request.apply.SetInParent()
            yield from self._ask(request)

    def insert(self, schema: TableSchema, key: object, values: Mapping[str, Any]) -> bool:
        """True: flush now, which raises RowExists; the transaction may then go on without the insert."""
        self.write(Kind.KIND_INSERT, schema, schema.stored_key(key), schema.stored_put(values))
        return True

    def append(self, schema: TableSchema, records: Any) -> Steps[None]:
        parts = append_parts(schema, records)
        for part in parts:
            self.operation(Kind.KIND_APPEND, schema).arrow = part
            if len(parts) > 1 or len(part) > _FLUSH_BYTES:
                yield from self.flush()

    def append_stages(self, schema: TableSchema, stages: Iterable[bytes]) -> None:
        self.operation(Kind.KIND_APPEND_STAGES, schema).stages.extend(stages)

    # -- reads ----------------------------------------------------------------------------------

    def get_many(
        self, table: str, keys: Iterable[object], columns: Sequence[str] | None
    ) -> Steps[list[dict[str, Any] | None]]:
        keys = list(keys)
        for attempt in (0, 1):
            schema, names, stored = yield from self.core.use(
                table, lambda s: (s, s.output_columns(columns), [s.stored_key(key) for key in keys])
            )
            request = self._take()
            request.get.table = schema.name
            request.get.table_id = schema.id
            if columns is not None:
                request.get.columns.extend(names)
            for key in stored:
                fill_values(request.get.keys.add().values, key)
            try:
                reply = yield from self._ask(request)
            except errors.NotFound as error:
                if not self.core.stale(error, table) or attempt or not self.read_only:
                    raise
                continue
            rows: list[dict[str, Any] | None] = []
            for row in reply.get.rows:
                if row.found:
                    rows.append(schema.row_from_stored(dict(zip(names, from_values(row.values), strict=True))))
                else:
                    rows.append(None)
            return rows
        raise AssertionError("unreachable")

    def spec(self, schema: TableSchema, args: Mapping[str, Any]) -> types_pb2.ScanSpec:
        return scan_spec(schema, **args)

    def scan_open(
        self, table: str, args: Mapping[str, Any], page_rows: int = 0
    ) -> Steps[tuple[TableSchema, bytes, int]]:
        """The first page: the schema, Arrow bytes (maybe none), and the scan's number if there is more."""
        for attempt in (0, 1):
            schema, spec = yield from self.core.use(table, lambda s: (s, scan_spec(s, **args)))
            request = self._take()
            request.scan_open.spec.CopyFrom(spec)
            request.scan_open.page_rows = page_rows
            try:
                reply = yield from self._ask(request)
            except errors.NotFound as error:
                if not self.core.stale(error, table) or attempt or not self.read_only:
                    raise
                continue
            return schema, reply.page.arrow, reply.page.scan
        raise AssertionError("unreachable")

    def scan_next(self, scan: int) -> Steps[tuple[bytes, int]]:
        # A scan belongs to one session: were it lost, the pages that follow could not be told from those before.
        request = session_pb2.Request(txn=self.number, scan_next=session_pb2.ScanNext(scan=scan))
        try:
            reply = yield Ask(request, self.core.timeout_s, self._epoch)
        except ConnectionLost:
            raise errors.SnapshotTooOld("the connection was lost during a scan: begin it again") from None
        return reply.page.arrow, reply.page.scan

    def scan_close(self, scan: int) -> None:
        request = session_pb2.Request(txn=self.number, scan_next=session_pb2.ScanNext(scan=scan, close=True))
        self.core.transport.tell(request, self._epoch)

    def to_arrow(self, table: str, args: Mapping[str, Any]) -> Steps[pa.Table]:
        """A scan as one Arrow table: a page in the session if it fits in one, else a stream of its own."""
        import pyarrow as pa

        schema, data, scan = yield from self.scan_open(table, args)
        batches = read_batches(data)
        if scan:
            self.scan_close(scan)
            yield from self.started()
            request = service_pb2.ScanRequest(spec=scan_spec(schema, **args))
            if self.lease:
                request.lease = self.lease
            else:
                request.session, request.txn = self.core.transport.session, self.number
            batches = []
            yield Stream("Scan", request, None, lambda reply: batches.extend(read_batches(reply.arrow)))
        if not batches:
            from kivi.arrow import arrow_schema

            names = schema.output_columns(args.get("columns"))
            whole = arrow_schema(schema)
            return pa.schema([whole.field(name) for name in names]).empty_table()
        return pa.Table.from_batches(batches)


# -- helpers ------------------------------------------------------------------------------------------


def _token(token: str | None, batch: tuple[str, int] | None) -> str:
    """The request token of a commit. A batch token is one already: a repeat is answered with its first timestamp."""
    return token or ("" if batch is not None else new_token())


def _commit(token: str, batch: tuple[str, int] | None) -> session_pb2.Commit:
    batch = _batch(batch)
    if batch is None:
        return session_pb2.Commit(token=token)
    return session_pb2.Commit(token=token, batch=session_pb2.BatchToken(scope=batch[0], sequence=batch[1]))


def _batch(batch: tuple[str, int] | None) -> tuple[str, int] | None:
    if batch is None:
        return None
    if not (
        isinstance(batch, tuple)
        and len(batch) == 2
        and isinstance(batch[0], str)
        and isinstance(batch[1], int)
        and not isinstance(batch[1], bool)
        and batch[1] >= 0
    ):
        raise InvalidArgument(f"a batch token is (scope, number from 0), not {batch!r}")
    return batch


def _number(value: float) -> int | float:
    return int(value) if abs(value) < 2**63 and value == int(value) else value  # NaN is not below anything


def append_parts(schema: TableSchema, records: Any) -> list[bytes]:
    """Records as Arrow IPC streams, each small enough for one message."""
    from kivi.arrow import encode_ipc, event_batch

    if schema.kind != "event":
        raise InvalidArgument(f"{schema.name!r} is not an event table: write its rows in a transaction")
    batch = event_batch(schema, records)
    data = encode_ipc(batch)
    if len(data) <= _APPEND_BYTES or batch.num_rows <= 1:
        return [bytes(data)]
    rows = max(1, batch.num_rows // (-(-len(data) // _APPEND_BYTES)))
    return [bytes(encode_ipc(batch.slice(i, rows))) for i in range(0, batch.num_rows, rows)]


def read_batches(data: bytes) -> list[pa.RecordBatch]:
    if not data:
        return []
    import pyarrow as pa

    with pa.ipc.open_stream(data) as reader:
        return list(reader)


def scan_spec(
    schema: TableSchema,
    prefix: Sequence[Any] = (),
    start: Sequence[Any] | None = None,
    end: Sequence[Any] | None = None,
    where: expr.Expr | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    reverse: bool = False,
) -> types_pb2.ScanSpec:
    """The arguments of scan(), validated against the schema, as a message."""
    spec = types_pb2.ScanSpec(table=schema.name, table_id=schema.id, reverse=bool(reverse))
    if prefix:
        fill_values(spec.prefix.values, schema.stored_bound(prefix))
    if start is not None:
        spec.start.SetInParent()
        fill_values(spec.start.values, schema.stored_bound(start))
    if end is not None:
        spec.end.SetInParent()
        fill_values(spec.end.values, schema.stored_bound(end))
    if where is not None:
        spec.where.CopyFrom(to_expr(expr.bind(where, lambda name: type_of(schema, name))))
    if columns is not None:
        spec.columns.extend(schema.output_columns(columns))
    if limit is not None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            raise InvalidArgument(f"limit is a number of rows, not {limit!r}")
        spec.limit = limit
    return spec
