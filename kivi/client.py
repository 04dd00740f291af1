"""The client for threads: ``kivi.connect(...)``.

One gRPC channel, one session stream. Threads put encoded requests into a queue and wait for their own
answers; gRPC's sending thread takes everything that is queued each time the stream is ready for more,
so the requests of many threads share messages without anyone waiting for company. One reader thread
hands answers out. What the calls *do* is in ``client_core``.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from kivi import client_methods as methods
from kivi.appending import Appender
from kivi.arrow import rows_from_batch
from kivi.client_core import (
    Ask,
    ConnectionLost,
    Core,
    Effect,
    Sleep,
    Steps,
    Stream,
    Timeout,
    TransactionCore,
    Unary,
    Upload,
    backoff_s,
    read_batches,
)
from kivi.client_errors import from_error, from_rpc_error
from kivi.definitions import TimeSlot
from kivi.errors import InvalidArgument, KiviError, ResourceExhausted, Retryable, SnapshotTooOld, Unavailable
from kivi.schema import OperatorCall, TableSchema
from kivi.wire.v1 import session_pb2

if TYPE_CHECKING:
    import datetime as dt

    import pyarrow as pa

    from kivi.expr import Expr
    from kivi.outcomes import Outcome

__all__ = ["Appender", "Database", "Snapshot", "Tls", "Transaction", "connect"]

Tls = methods.Tls
T = TypeVar("T")
_FRAME_BYTES: Final = 1 << 20  # a frame is sent when it has grown to this, whatever else waits
_QUEUED_MAX: Final = 20_000
_LARGE_BYTES: Final = 256 << 10
_QUEUED_BYTES_MAX: Final = 128 << 20
_REPEATABLE: Final = frozenset({"Describe", "ListTables", "Watermark", "Stats", "DiscardStages"})


class _Waiter:
    """One thread waiting for one answer: a lock that is held until the answer is there."""

    __slots__ = ("error", "gate", "reply")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.reply: session_pb2.Response | None = None
        self.error: KiviError | None = None


class _Session:
    """One stream: a queue out, a reader thread in. Once broken it stays broken."""

    def __init__(self, transport: _Transport, epoch: int, wait_for_ready: bool) -> None:
        self.epoch = epoch
        self.broken: KiviError | None = None
        self.hello = threading.Event()
        self._transport = transport
        self._lock = threading.Lock()
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._large = 0
        self._waiters: dict[int, _Waiter] = {}
        self._ids = itertools.count(1)
        self._call = transport.open(self._frames(), wait_for_ready)
        threading.Thread(target=self._read, name="kivi-session", daemon=True).start()

    def _frames(self) -> Iterator[bytes]:
        """gRPC's sending thread asks for the next message when the stream is ready for it."""
        out = self._out
        while (first := out.get()) is not None:
            parts, size = [first], len(first)
            while size < _FRAME_BYTES:
                try:
                    part = out.get_nowait()
                except queue.Empty:
                    break
                if part is None:
                    out.put(None)
                    break
                parts.append(part)
                size += len(part)
            if size >= _LARGE_BYTES:
                with self._lock:
                    self._large -= sum(len(part) for part in parts if len(part) >= _LARGE_BYTES)
            yield first if len(parts) == 1 else b"".join(parts)

    def put(self, request: session_pb2.Request) -> None:
        data = session_pb2.ClientFrame(requests=(request,)).SerializeToString()
        if len(data) >= _LARGE_BYTES:
            if len(data) > methods.MESSAGE_BYTES_MAX:
                raise ResourceExhausted(
                    f"the request has {len(data)} bytes; the limit message_bytes_max is {methods.MESSAGE_BYTES_MAX}: "
                    "send less at once",
                    limit="message_bytes_max",
                    maximum=methods.MESSAGE_BYTES_MAX,
                )
            while self._large > _QUEUED_BYTES_MAX and self.broken is None:
                time.sleep(0.001)
            with self._lock:
                self._large += len(data)
        elif self._out.qsize() > _QUEUED_MAX:
            while self._out.qsize() > _QUEUED_MAX and self.broken is None:
                time.sleep(0.001)
        self._out.put(data)

    def ask(self, request: session_pb2.Request, timeout_s: float | None) -> session_pb2.Response:
        waiter = _Waiter()
        number = request.id = next(self._ids)
        self._waiters[number] = waiter
        if self.broken is not None:  # checked after registering: whoever breaks the session sees the waiter
            self._waiters.pop(number, None)
            raise self._lost(sent=False)
        try:
            self.put(request)
        except KiviError:
            self._waiters.pop(number, None)
            raise
        if not waiter.gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._waiters.pop(number, None)
            raise Timeout(f"no answer from {self._transport.core.endpoint} within {timeout_s:g} s")
        if waiter.error is not None:
            raise waiter.error
        reply = waiter.reply
        assert reply is not None
        if reply.HasField("error"):
            raise from_error(reply.error)
        return reply

    def _lost(self, sent: bool) -> KiviError:
        if isinstance(self.broken, Unavailable) or self.broken is None:
            return ConnectionLost(f"the connection to {self._transport.core.endpoint} was lost", sent=sent)
        return type(self.broken)(self.broken.message, **self.broken.details)

    def _read(self) -> None:
        reason: KiviError = Unavailable("the server ended the session")
        try:
            for data in self._call:
                frame = session_pb2.ServerFrame.FromString(data)
                if frame.HasField("hello"):
                    self._transport.session = frame.hello.session
                    self.hello.set()
                for reply in frame.responses:
                    waiter = self._waiters.pop(reply.id, None)
                    if waiter is not None:
                        waiter.reply = reply
                        waiter.gate.release()
        except grpc.RpcError as error:
            reason = from_rpc_error(error)
        except Exception as error:
            reason = Unavailable(f"the session failed: {error!r}")
        self.close(reason)

    def close(self, reason: KiviError) -> None:
        if self.broken is None:
            self.broken = reason
        self.hello.set()
        self._out.put(None)
        self._call.cancel()
        while self._waiters:
            try:
                _, waiter = self._waiters.popitem()
            except KeyError:
                break
            waiter.error = self._lost(sent=True)
            waiter.gate.release()


class _Transport:
    """The channel and the current session; performs effects on the calling thread."""

    def __init__(self, core: Core, access_token: str | None, tls: methods.Tls | None) -> None:
        self.core = core
        self.session = b""
        options = methods.channel_options(tls)
        if tls is None:
            self._channel = grpc.insecure_channel(core.endpoint, options)
        else:
            self._channel = grpc.secure_channel(core.endpoint, methods.credentials(tls), options)
        self._metadata = methods.metadata(access_token)
        self._calls: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._current: _Session | None = None
        self._epochs = 0
        self._closed = False

    def open(self, frames: Iterator[bytes], wait_for_ready: bool) -> Any:
        call: Any = self._channel.stream_stream(methods.path("Session"))
        return call(frames, metadata=self._metadata, wait_for_ready=wait_for_ready)

    def connect(self) -> None:
        """The first session: fails at once if nothing listens there."""
        session = self._open(wait_for_ready=False)
        if not session.hello.wait(self.core.timeout_s):
            self.close()
            raise Unavailable(f"no answer from {self.core.endpoint} within {self.core.timeout_s:g} s")
        if session.broken is not None:
            self.close()
            if isinstance(session.broken, Unavailable):
                raise Unavailable(f"cannot reach {self.core.endpoint}: {session.broken.message}")
            raise session.broken

    def _open(self, wait_for_ready: bool = True) -> _Session:
        session = self._current
        if session is not None and session.broken is None:
            return session
        with self._lock:
            if self._closed:
                raise InvalidArgument("this client is closed")
            session = self._current
            if session is None or session.broken is not None:
                self._epochs += 1
                session = self._current = _Session(self, self._epochs, wait_for_ready)
        return session

    def tell(self, request: session_pb2.Request, epoch: int | None = None) -> int:
        if epoch is not None:
            session = self._current
            if session is None or session.epoch != epoch or session.broken is not None:
                return epoch
        else:
            session = self._open()
        session.put(request)
        return session.epoch

    def ask(self, effect: Ask) -> session_pb2.Response:
        if effect.epoch is None:
            session = self._open()
        else:
            current = self._current
            if current is None or current.epoch != effect.epoch:
                raise ConnectionLost(sent=False)
            session = current
        return session.ask(effect.request, effect.timeout_s)

    def unary(self, effect: Unary) -> Any:
        call: Any = self._calls.get(effect.method)
        if call is None:
            sent, returned = methods.UNARY[effect.method]
            call = self._channel.unary_unary(
                methods.path(effect.method),
                request_serializer=sent.SerializeToString,
                response_deserializer=returned.FromString,
            )
            self._calls[effect.method] = call
        deadline, attempt = self.core.deadline(), 0
        while True:
            self._open()  # raises once closed
            try:
                return call(effect.message, timeout=effect.timeout_s, metadata=self._metadata, wait_for_ready=True)
            except grpc.RpcError as error:
                lost = error.code() == grpc.StatusCode.UNAVAILABLE
                if not (lost and effect.method in _REPEATABLE and time.monotonic() < deadline):
                    raise from_rpc_error(error) from None
            attempt += 1
            time.sleep(backoff_s(attempt + 4))

    def stream(self, effect: Stream) -> None:
        sent, returned = methods.STREAMED[effect.method]
        call = self._channel.unary_stream(
            methods.path(effect.method),
            request_serializer=sent.SerializeToString,
            response_deserializer=returned.FromString,
        )(effect.message, timeout=effect.timeout_s, metadata=self._metadata, wait_for_ready=True)
        try:
            for message in call:
                effect.on_message(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    def upload(self, effect: Upload) -> Any:
        from kivi.wire.v1 import service_pb2

        try:
            return self._channel.stream_unary(
                methods.path(effect.method),
                request_serializer=service_pb2.StageRequest.SerializeToString,
                response_deserializer=service_pb2.StageResponse.FromString,
            )(effect.messages(), timeout=effect.timeout_s, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def perform(self, effect: Effect) -> Any:
        if isinstance(effect, Ask):
            return self.ask(effect)
        if isinstance(effect, Unary):
            return self.unary(effect)
        if isinstance(effect, Sleep):
            return time.sleep(effect.seconds)
        if isinstance(effect, Stream):
            return self.stream(effect)
        return self.upload(effect)

    def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                try:
                    result = self.perform(effect)
                except KiviError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            steps.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            session = self._current
        if session is not None:
            session.close(Unavailable("this client is closed"))
        self._channel.close()


def connect(
    endpoint: str = methods.DEFAULT_ENDPOINT,
    access_token: str | None = None,
    tls: Tls | bool | str | None = None,
    timeout: float | None = 10.0,
) -> Database:
    """A client of the server at ``endpoint`` ("host:port"). Raises Unavailable, Unauthenticated.

    ``tls``: True for the system's authorities, a CA file's path, or a ``Tls``. ``timeout``: how long, in
    seconds, a call waits for its answer; None waits for ever.
    """
    return Database(endpoint, access_token, tls, timeout)


class Database:
    """A store behind a server: the same interface as ``kivi.open``. Safe to use from many threads."""

    def __init__(
        self, endpoint: str, access_token: str | None, tls: Tls | bool | str | None, timeout: float | None
    ) -> None:
        self._core = Core(endpoint, timeout)
        self._transport = _Transport(self._core, access_token, methods.as_tls(tls))
        self._core.transport = self._transport
        self._run = self._transport.run
        self._transport.connect()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    @property
    def endpoint(self) -> str:
        return self._core.endpoint

    # -- schema ---------------------------------------------------------------------------------

    def create_table(
        self,
        name: str,
        key: Mapping[str, object],
        columns: Mapping[str, object],
        history: str | int | dt.timedelta | None = None,
    ) -> None:
        """A row table; ``history`` keeps older versions for ``as_of``. Raises AlreadyExists, SchemaError."""
        self._run(self._core.create_table(name, key, columns, history))

    def create_event_table(
        self,
        name: str,
        event_time: str,
        columns: Mapping[str, object],
        retention: str | int | dt.timedelta | None = None,
    ) -> None:
        """An append-only event table. Raises AlreadyExists, SchemaError."""
        self._run(self._core.create_event_table(name, event_time, columns, retention))

    def create_aggregate(
        self,
        name: str,
        source: str,
        group_by: Sequence[str | TimeSlot],
        measures: Mapping[str, OperatorCall],
        derived: Mapping[str, str] | None = None,
        history: str | int | dt.timedelta | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """An aggregate of an event table; returns when it can be read. ``progress(done_rows, total_rows)``."""
        self._run(self._core.create_aggregate(name, source, group_by, measures, derived, history, progress))

    def tables(self) -> list[str]:
        """The names of all tables, in order."""
        return self._run(self._core.tables())

    def describe(self, name: str) -> dict[str, Any]:
        """A table's definition and what is cheap to know about its contents, as plain data."""
        return self._run(self._core.describe(name))

    def drop(self, name: str) -> None:
        """Drops a table and its rows. InvalidArgument while aggregates depend on it."""
        self._run(self._core.drop(name))

    # -- transactions ---------------------------------------------------------------------------

    def transaction(
        self,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        min_snapshot: int | None = None,
    ) -> Transaction:
        """``with db.transaction() as tx``: commits on success, rolls back on an exception."""
        return Transaction(self, TransactionCore(self._core, token=token, batch=batch, min_snapshot=min_snapshot))

    def run(self, fn: Callable[[Transaction], T], timeout: float | None = None) -> T:
        """``fn(tx)`` in a transaction; after a conflict again, on a new snapshot, until ``timeout`` (seconds).

        The function is rerun from the start, so what it read is never written back stale. It must not
        have effects outside the transaction. CommitUnknown is never rerun.
        """
        limit = timeout if timeout is not None else self._core.timeout_s
        deadline = time.monotonic() + (limit if limit is not None else 1e9)
        for attempt in itertools.count():
            try:
                with self.transaction() as tx:
                    result = fn(tx)
                return result
            except (Retryable, SnapshotTooOld):
                pause = backoff_s(attempt)
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    def snapshot(
        self,
        as_of: int | dt.datetime | None = None,
        min_snapshot: int | None = None,
        *,
        ttl_s: float | None = None,
        shared: bool = False,
        lease: bytes | None = None,
    ) -> Snapshot:
        """A read-only view. ``as_of``: a commit timestamp, or a moment.

        ``shared`` makes one that other processes may open by its ``lease`` and that outlives this client's
        connection, until its maker closes it or ``ttl_s`` has passed without renewal.
        """
        core = TransactionCore(
            self._core,
            read_only=True,
            as_of=as_of,
            min_snapshot=min_snapshot,
            ttl_s=ttl_s,
            shared=shared,
            lease=lease,
        )
        return Snapshot(self, core)

    # -- bulk -----------------------------------------------------------------------------------

    def append(self, table: str, records: Any, token: str | None = None, batch: tuple[str, int] | None = None) -> int:
        """Events (dicts, an Arrow table or batch) in one transaction; its commit timestamp."""
        return self._run(self._core.append(table, records, token, batch))

    def outcome(self, token: str) -> Outcome:
        """The commit timestamp, kivi.ABORTED (final) or kivi.UNKNOWN."""
        return self._run(self._core.outcome(token))

    def appender(self, table: str, linger_ms: float = 5, max_events: int = 10_000) -> Appender:
        """Events one at a time, sent together: see ``Appender``."""
        return Appender(self, table, linger_ms, max_events)

    def stage(self, table: str, records: Any, owner: str = "") -> bytes:
        """Events made durable and invisible, for ``tx.append_stages``; the stage's id."""
        return self._run(self._core.stage(table, records, owner))

    def discard_stages(self, ids: Iterable[bytes]) -> None:
        """Gives stages up. Those that were committed are passed over."""
        self._run(self._core.discard_stages(ids))

    def batch_scopes(self, prefix: str = "") -> list[str]:
        """The scopes of batch tokens that were ever committed, by prefix."""
        return self._run(self._core.batch_scopes(prefix))

    # -- operation ------------------------------------------------------------------------------

    def watermark(self) -> int:
        """The snapshot a new reader gets."""
        return self._run(self._core.watermark())

    def consolidate(self) -> None:
        """Folds everything up to the watermark into base rows now."""
        self._run(self._core.consolidate())

    def stats(self) -> dict[str, int | float]:
        """Counters and sizes, as flat names."""
        return self._run(self._core.stats())

    def checkpoint(self, path: str) -> None:
        """A consistent copy of the store in a new directory ``path`` of the server's machine."""
        self._run(self._core.checkpoint(path))

    def _schema(self, table: str) -> TableSchema:
        return self._core.schemas.get(table) or self._run(self._core.fetch(table))


class _Reads:
    """What transactions and snapshots have in common."""

    def __init__(self, db: Database, core: TransactionCore) -> None:
        self._db = db
        self._core = core
        self._run = db._run

    def get(self, table: str, key: Sequence[Any], columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """The row as a dict of key, columns and derived columns, or None. Own writes included."""
        return self._run(self._core.get_many(table, (key,), columns))[0]

    def get_many(
        self, table: str, keys: Iterable[Sequence[Any]], columns: Sequence[str] | None = None
    ) -> list[dict[str, Any] | None]:
        """One row or None per key, in the order of the keys."""
        return self._run(self._core.get_many(table, keys, columns))

    def scan(
        self,
        table: str,
        prefix: Sequence[Any] = (),
        start: Sequence[Any] | None = None,
        end: Sequence[Any] | None = None,
        where: Expr | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Rows in key order; ``end`` is exclusive. The first page is read at once, the rest as it is asked for."""
        args = {
            "prefix": prefix,
            "start": start,
            "end": end,
            "where": where,
            "columns": columns,
            "limit": limit,
            "reverse": reverse,
        }
        _, data, scan = self._run(self._core.scan_open(table, args))
        return self._rows(data, scan)

    def _rows(self, data: bytes, scan: int) -> Iterator[dict[str, Any]]:
        try:
            while True:
                for batch in read_batches(data):
                    yield from rows_from_batch(batch)
                if not scan:
                    return
                data, scan = self._run(self._core.scan_next(scan))
        finally:
            if scan:
                self._core.scan_close(scan)


class Transaction(_Reads):
    """Reads one snapshot and its own writes; commits all or nothing."""

    def __enter__(self) -> Transaction:
        self._core.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if not self._core.ended:
                self.commit()
        else:
            self._core.release()

    def commit(self) -> int:
        """Commits now; the ``with`` block does it at its end otherwise."""
        return self._run(self._core.commit())

    def rollback(self) -> None:
        self._core.release()

    @property
    def start_ts(self) -> int:
        """The snapshot: the commit timestamp up to which everything is seen."""
        return self._run(self._core.started())

    @property
    def commit_ts(self) -> int | None:
        """The commit timestamp once committed; for a transaction that wrote nothing, its snapshot if it was read."""
        return self._core.commit_ts

    def _write(self, table: str, fn: Callable[[TableSchema], bool]) -> None:
        if self._run(self._db._core.use(table, fn)):
            self._run(self._core.flush())

    def put(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """Upsert of the named columns."""
        self._write(table, lambda schema: self._core.put(schema, key, values))

    def delta(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """Updates delta columns by their operators; never conflicts with other deltas."""
        self._write(table, lambda schema: self._core.delta(schema, key, values))

    def insert(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """A new row. Raises RowExists here if it is there, and the transaction may go on."""
        self._write(table, lambda schema: self._core.insert(schema, key, values))

    def delete(self, table: str, key: Sequence[Any]) -> None:
        self._write(table, lambda schema: self._core.delete(schema, key))

    def guard(self, table: str, key: Sequence[Any], column: str | None = None) -> None:
        """Makes a read of this cell (or of the row's existence) conflict like a write."""
        self._write(table, lambda schema: self._core.guard(schema, key, column))

    def append(self, table: str, records: Any) -> None:
        """Events: dicts, an Arrow table or record batch."""
        self._run(self._core.append(self._db._schema(table), records))

    def append_stages(self, table: str, stages: Iterable[bytes]) -> None:
        """Events that were staged before."""
        self._core.append_stages(self._db._schema(table), stages)


class Snapshot(_Reads):
    """A read-only view at one timestamp."""

    def __enter__(self) -> Snapshot:
        if self._core._begin.shared:
            self._run(self._core.open_shared())
        else:
            self._core.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._core.release()

    def close(self) -> None:
        self._core.release()

    @property
    def ts(self) -> int:
        """The commit timestamp up to which everything is seen."""
        return self._run(self._core.started())

    @property
    def lease(self) -> bytes:
        """Names a shared snapshot for other processes; empty otherwise."""
        return self._core.lease

    def renew(self, ttl_s: float | None = None) -> None:
        """Keeps the snapshot for ``ttl_s`` from now. Raises SnapshotTooOld if it has ended."""
        self._run(self._core.renew(ttl_s))

    def to_arrow(
        self,
        table: str,
        prefix: Sequence[Any] = (),
        start: Sequence[Any] | None = None,
        end: Sequence[Any] | None = None,
        where: Expr | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> pa.Table:
        """A scan as one Arrow table."""
        args = {
            "prefix": prefix,
            "start": start,
            "end": end,
            "where": where,
            "columns": columns,
            "limit": limit,
            "reverse": reverse,
        }
        return self._run(self._core.to_arrow(table, args))
