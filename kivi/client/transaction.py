"""One transaction or snapshot of a client, as steps: see ``steps``."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kivi import errors
from kivi.api.arguments import (
    GetArguments,
    ScanArguments,
    SnapshotArguments,
    SqlArguments,
    TransactionArguments,
    check_ttl,
    drops_late,
    stage_ids,
)
from kivi.api.interface import BATCH_ROWS
from kivi.api.match_arguments import AnswerArguments
from kivi.api.results import Result
from kivi.api.retry import backoff_s
from kivi.api.writes import Write
from kivi.client.core import Core, newest
from kivi.client.messages import (
    append_parts,
    encoding,
    get,
    got,
    read_batches,
    request_token,
    scan_spec,
    write_parts,
)
from kivi.client.messages import commit as commit_message
from kivi.client.pages import PageReader
from kivi.client.steps import (
    Ask,
    CommitPlain,
    Committed,
    ConnectionLost,
    Maker,
    Page,
    Sleep,
    Steps,
    Timeout,
    Work,
    silent,
    timeout_ms,
)
from kivi.client.writes import encoded_delta, encoded_write
from kivi.errors import InvalidArgument
from kivi.model.given import flag, shown
from kivi.wire.codec import from_table
from kivi.wire.columns import rows_of, rows_reader
from kivi.wire.v1 import session_pb2

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.client.steps import Answer
    from kivi.model.schema import TableSchema

__all__ = ["ANY_SNAPSHOT", "SharedSnapshotArguments", "TransactionCore"]

Kind = session_pb2.Operation
_FLUSH_OPERATIONS: Final = 4_096  # buffered operations are sent ahead from so many on ...
_FLUSH_BYTES: Final = 1 << 20  # ... or this many bytes
_REFUSALS: Final = (errors.ResourceExhausted, errors.Unauthenticated, errors.PermissionDenied)
_PLAIN: Final = frozenset({"put", "delta"})
_PLAIN_OPERATIONS: Final = 16  # those of more are no plain commits at a server
_PLAIN_BYTES: Final = 1_024
_PLAIN_TOKEN: Final = 256  # characters; nor are those under longer tokens


@dataclass(slots=True)
class SharedSnapshotArguments(SnapshotArguments):
    """Of a client's ``snapshot``: ``shared`` makes one that others may open, by its ``lease``."""

    _: KW_ONLY
    shared: bool = False
    lease: bytes | None = None

    def __post_init__(self) -> None:
        SnapshotArguments.__post_init__(self)
        if not isinstance(self.shared, bool):
            raise InvalidArgument(f"shared is True or False, not {shown(self.shared)}")
        if not isinstance(self.lease, (bytes, NoneType)):
            raise InvalidArgument(f"lease is that of a shared snapshot, bytes, not {shown(self.lease)}")

    @property
    def says_more(self) -> bool:
        """Than how new it has to be at least."""
        is_limited = self.as_of is not None or self.max_staleness is not None or self.ttl_s is not None
        return self.shared or bool(self.lease) or is_limited

    @staticmethod
    def at(ts: int, lease: bytes, ttl_s: float | None) -> SharedSnapshotArguments:
        """One of another node, at this timestamp: that of a shared snapshot every node keeps, under its name."""
        if lease:
            return SharedSnapshotArguments(lease=lease, min_snapshot=ts)
        return SharedSnapshotArguments(as_of=ts, min_snapshot=ts, ttl_s=ttl_s)


ANY_SNAPSHOT: Final = SharedSnapshotArguments()


class _Place(NamedTuple):
    """Where a transaction is: its number, in the session of that epoch. What belongs to it there, such as its scans,
    is asked for by both."""

    number: int
    epoch: int


class TransactionCore:
    """One transaction or snapshot: buffers writes, builds requests, remembers its timestamps.

    Threads and tasks may read a snapshot at once, and each of them may find that its session is lost. One of them
    begins it again, and the others go on where that one did (``_again``): a request names the place that is in force
    when it is asked, and the pages of a scan the place where the scan was begun. Whoever closes a snapshot says so
    first and then lets go of its place; whoever asks looks once more when it has its answer, and lets go of it, too.
    """

    # What most transactions leave as it is, is the class's: they begin and end many thousand times a second.
    start_ts: int | None = None
    commit_ts: int | None = None
    token: str | None = None
    batch: tuple[str, int] | None = None
    deferred = False
    lease = b""
    is_maker = False  # of the shared snapshot with that name
    ended = False
    wrote = False
    sent = False  # operations are at the server, or an error has told of what it holds: not to be begun again
    broken: errors.KiviError | None = None  # operations were dropped here, so it must not commit
    told: Callable[[], object] | None = None  # called when the first answer comes, before anybody has it
    ttl_s: float | None = None  # of a snapshot: the longest that it was asked to be kept for
    _at = _Place(0, -1)
    _unsure: _Place | None = None  # it was begun again there, and has not answered yet
    _is_behind = False  # what begins it may be on its way to the server still, behind what gathers releases
    _unsent: Sequence[Maker] = ()  # Begin, until the sender takes it from here
    _writes: Sequence[bytes] = ()  # operations that are buffered, each an encoded Writes ...
    _bodies: Sequence[Any] = ()  # ... and their bodies
    _buffered_bytes = 0
    _is_plain = True  # all that was written are deltas and puts
    _begin: session_pb2.Begin | None = None  # one that says more than the least snapshot
    _is_past = False  # the snapshot may be from before what this client has seen
    _defined: Mapping[int, TableSchema] = {}  # tables that were altered since its snapshot, by their ids

    def __init__(self, core: Core, wanted: TransactionArguments | SharedSnapshotArguments) -> None:
        self.core = core
        self._min_snapshot = max(core.seen_ts, wanted.min_snapshot or 0)
        self.read_only = isinstance(wanted, SnapshotArguments)
        if isinstance(wanted, TransactionArguments):
            self.token, self.batch, self.deferred = wanted.token, wanted.batch, wanted.deferred
        elif wanted.says_more:
            self._view(wanted)

    def _view(self, wanted: SharedSnapshotArguments) -> None:
        self.lease = wanted.lease or b""
        self._is_past = wanted.as_of is not None or bool(self.lease)
        if self._is_past:  # it is what it is, whatever this client has seen; a node may have to come there first (C6)
            self._min_snapshot = max(wanted.min_snapshot or 0, min(wanted.as_of_ts or 0, self.core.seen_ts))
        begin = self._begin = self._beginning()
        self.ttl_s = wanted.ttl_s
        begin.ttl_ms = timeout_ms(wanted.ttl_s)
        if (staleness_us := wanted.max_staleness_us) is not None:
            begin.max_staleness_us = staleness_us
        begin.shared = wanted.shared
        begin.lease = self.lease
        if (as_of_us := wanted.as_of_us) is not None:
            begin.as_of_us = as_of_us
        elif wanted.as_of_ts is not None:
            begin.as_of_ts = wanted.as_of_ts

    @property
    def shared(self) -> bool:
        return self._begin is not None and self._begin.shared

    def _beginning(self) -> session_pb2.Begin:
        begin = self._begin
        if begin is not None:
            return begin
        return session_pb2.Begin(min_snapshot=self._min_snapshot, fresh=self.core.fresh, deferred=self.deferred)

    # -- the life of a transaction --------------------------------------------------------------

    def begin(self) -> None:
        """Queued, not awaited: what follows on the session arrives after it.

        A transaction that reads or commits before its Begin has left takes it back, and begins in that request: the
        server would have begun it no earlier.
        """
        number = next(self.core.numbers)
        self._unsent = [functools.partial(self._request_to_begin, number)]
        self._at = _Place(number, self.core.transport.tell(self._unsent))

    def _request_to_begin(self, number: int) -> session_pb2.Request:
        timeout = timeout_ms(self.core.timeout_s)
        return session_pb2.Request(txn=number, begin=self._beginning(), timeout_ms=timeout)

    def _taken_back(self) -> bool:
        """True if Begin had not left, and now never will. Atomic: the sender pops it too."""
        unsent = self._unsent
        if not unsent:
            return False
        try:
            unsent.pop()  # type: ignore[attr-defined]
        except IndexError:
            return False
        return True

    def _again(self, lost: _Place) -> bool:
        """Begins anew on another session, if nothing that was seen or written depends on the old one. Whoever else
        lost that place goes on there."""
        with self.core.begins:
            if self._at is not lost:
                return True
            if self.sent or (self.start_ts is not None and not self.read_only) or (self.shared and not self.lease):
                return False
            if (ts := self.start_ts) is not None:  # that one, for which another node may have to wait
                if self.lease:  # it outlived the session: use it by its name
                    self._begin = session_pb2.Begin(lease=self.lease, min_snapshot=ts)
                else:
                    self._begin = session_pb2.Begin(as_of_ts=ts, min_snapshot=ts, ttl_ms=timeout_ms(self.ttl_s))
            number = next(self.core.numbers)
            self._unsent, self._is_behind = (), True  # no request takes it back: another's may leave before that one
            self._at = self._unsure = _Place(number, self.core.transport.tell(self._request_to_begin(number)))
            return True

    def _never_there(self, at: _Place) -> None:
        """Its server has not come to the snapshot in time: the next read begins it once more."""
        with self.core.begins:
            if self._at is at and self._unsure is at:
                self._let_go(at)
                self._at = _Place(at.number, -1)

    def _check_open(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.ended:
            raise InvalidArgument("this transaction has ended")

    def _take(self, request: session_pb2.Request | None = None) -> tuple[session_pb2.Request, Sequence[Any]]:
        """The request, or a new one, with what is buffered, which is that no more, and its bodies."""
        self._check_open()
        if request is None:
            request = session_pb2.Request()
        bodies = self._bodies
        if self._writes:
            request.MergeFromString(b"".join(self._writes))
            self._writes = self._bodies = ()
            self._buffered_bytes = 0
        return request, bodies

    def _ask(self, request: session_pb2.Request, bodies: Sequence[Any] = ()) -> Steps[Any]:
        attempt, deadline, at = 0, self.core.deadline(), self._at
        try:
            while True:
                request.txn, request.timeout_ms = at.number, timeout_ms(self.core.timeout_s)
                if self._unsent and self._taken_back():  # one request begins and does what it is for
                    request.first.CopyFrom(self._beginning())
                left = self.core.left(deadline)
                try:
                    reply = yield Ask(request, left, at.epoch, bodies)
                except ConnectionLost:
                    attempt += 1
                    yield Sleep(backoff_s(attempt + 4))
                    self._check_open()
                    if not self._again(at):
                        raise errors.SnapshotTooOld(
                            "the connection was lost, and with it this transaction's snapshot: begin again"
                        ) from None
                    at = self._at
                    request.ClearField("first")
                    continue
                except errors.KiviError as error:
                    if self._unsure is at and isinstance(error, errors.Unavailable):
                        self._never_there(at)
                    self._refused(request, error)
                    raise
                self._learn(reply)
                if self._unsure is at:
                    self._unsure = None
                return reply._replace(at=at) if isinstance(reply, Page) and reply.scan else reply
        except BaseException:  # a cancelled task's and an interrupt, too
            self._is_behind = True
            raise
        finally:  # whatever became of them: this request was all that knew them
            self.sent = self.sent or len(request.operations) > 0
            if self.ended and self.read_only:  # meanwhile
                self._let_go(at)

    def _refused(self, request: session_pb2.Request, error: errors.KiviError) -> None:
        """The request failed. What travelled in it may be at the server all the same; what never left is lost."""
        has_told = self.start_ts is None and not isinstance(error, errors.Unavailable)  # of a snapshot nobody knows
        self.sent = self.sent or not self.read_only or has_told
        if isinstance(error, errors.NotFound):
            self.core.schemas.clear()  # a table was dropped, and perhaps made anew
        at_once = self.deferred and isinstance(error, errors.RowExists)  # of a server that defers nothing yet
        if request.operations and (at_once or isinstance(error, _REFUSALS)):
            self.broken = error  # its writes may have been applied nowhere: a commit must not go on without them

    def _learn(self, reply: Answer) -> None:
        if self.read_only and self.start_ts not in (None, reply.start_ts):
            raise errors.SnapshotTooOld(
                f"the server has opened the snapshot {self.start_ts} again at {reply.start_ts}: begin another"
            )
        if self.start_ts is None:
            self.start_ts = reply.start_ts if self.read_only else reply.start_ts or None
            self.core.saw(reply.start_ts)
            if self.told is not None:
                self.told()

    def started(self) -> Steps[int]:
        """The snapshot; asks the server if no answer has told it yet."""
        if self.start_ts is None:
            request, bodies = self._take()
            request.apply.SetInParent()
            yield from self._ask(request, bodies)
        return self.start_ts or 0

    def open_shared(self) -> Steps[bytes]:
        """Begins a shared snapshot and waits for its name."""
        at = self._at = _Place(next(self.core.numbers), self.core.transport.epoch())
        try:
            reply = yield Ask(self._request_to_begin(at.number), self.core.timeout_s, at.epoch)
        except BaseException:  # no ``__exit__`` follows, and a shared snapshot outlives its session
            self.release()
            raise
        if self.ended:  # meanwhile
            self._let_go(at)
        self._learn(reply)
        self.lease, self.is_maker = bytes(reply.begin.lease), True
        return self.lease

    def end(self) -> Steps[None] | None:
        """Lets go of it, and gives what is left to be waited for, if something is."""
        if self.ended or not self.is_maker:
            self.release()
            return None
        self.ended = True
        return self._end_for_everyone()

    def _end_for_everyone(self) -> Steps[None]:
        """A shared snapshot ends for everyone where it was made: by its name, as its session may be another by now,
        and that is waited for, as nothing else ends it before its time. Without an answer it is left to that."""
        release = session_pb2.Release(txns=[self._at.number], leases=[self.lease])
        request = session_pb2.Request(release=release, timeout_ms=timeout_ms(self.core.timeout_s))
        with contextlib.suppress(errors.KiviError):
            yield from self.core.repeat(request, lambda: silent(self.core.endpoint, self.core.timeout_s))

    def release(self) -> None:
        """Fire and forget."""
        if not self.ended:
            self.ended = True
            if not self._taken_back():
                self._let_go(self._at)

    def _let_go(self, at: _Place) -> None:
        if self._is_behind or self.shared:
            # What gathers releases may leave before the request that begins this one, or never; others end with their
            # session, and a shared one does not.
            release = session_pb2.Release(txns=[at.number])
            self.core.transport.tell(session_pb2.Request(release=release), at.epoch)
        else:
            self.core.transport.release(at.number, at.epoch)

    def renew(self, ttl_s: float | None = None) -> Steps[None]:
        check_ttl(ttl_s)
        self._check_open()
        yield from self._ask(session_pb2.Request(renew=self._renewed(ttl_s)))

    def renew_unasked(self, ttl_s: float | None) -> None:
        """The same, for which nobody waits. If its session is lost, it is begun again for so long."""
        at, renew = self._at, self._renewed(ttl_s)
        self.core.transport.tell(session_pb2.Request(txn=at.number, renew=renew), at.epoch)

    def _renewed(self, ttl_s: float | None) -> session_pb2.Renew:
        """From here on it is begun again for so long; a renewal never shortens its time."""
        self.ttl_s = max(ttl_s or 0, self.ttl_s or 0) or None
        return session_pb2.Renew(ttl_ms=timeout_ms(ttl_s))

    def commit(self) -> Steps[int]:
        if self.broken is not None:
            self.release()
        self._check_open()
        if not self.wrote and self.batch is None and self.token is None:
            try:
                self.commit_ts = yield from self.started()
            finally:
                self.release()
            return self.commit_ts
        token = request_token(self.token, self.batch)
        asked: Ask | CommitPlain
        if self._commits_plainly(token):
            asked = CommitPlain(b"".join(self._writes), token, self.core.timeout_s, self._at.epoch)
        else:
            asked = self._commit_alone(token)
        self.ended = True
        deadline, attempt = self.core.deadline(), 0
        while True:
            try:
                reply = yield asked
                break
            except (ConnectionLost, Timeout) as lost:
                was_sent = isinstance(lost, Timeout) or lost.sent
                if was_sent and not token:
                    raise errors.CommitUnknown(
                        "the connection was lost during the commit: repeat the batch, which applies it once"
                    ) from None
                try:
                    if was_sent:
                        self.commit_ts = yield from self.core.resolve(token, deadline)
                        return self.commit_ts
                    raise errors.Disconnected(
                        "the connection was lost before the commit was sent; "
                        "nothing was applied: run the transaction again"
                    ) from None
                except errors.Disconnected:
                    if (was_sent and self.token is not None) or time.monotonic() > deadline:
                        raise
                    if not self._again(self._at):
                        raise
                    token = request_token(None, self.batch) if was_sent else token  # that one never commits any more
                    asked = self._anew(asked, token)
            except errors.NotFound:
                self.core.schemas.clear()  # a table was dropped, and perhaps made anew
                raise
            except _REFUSALS:  # perhaps before its transaction was looked at, which is open then
                self.ended = False
                self.release()
                raise
            except errors.Unavailable as refused:
                if not refused.details.get("stopping") or time.monotonic() > deadline:
                    raise
                self.core.transport.leave(asked.epoch)
                if not self._again(self._at):
                    raise
                asked = self._anew(asked, token)
            if attempt:
                yield Sleep(backoff_s(attempt + 4))
            attempt += 1
            try:
                asked.timeout_s = self.core.left(deadline)
            except Timeout as late:
                raise errors.Disconnected(f"{late.message}; nothing was applied: run the transaction again") from None
        self._learn(reply)
        self.commit_ts = int(reply.commit_ts if isinstance(reply, Committed) else reply.commit.commit_ts)
        self.core.saw(self.commit_ts)
        return self.commit_ts

    def _anew(self, asked: Ask | CommitPlain, token: str) -> Ask:
        """The same on the session on which it has begun again."""
        asked = asked if isinstance(asked, Ask) else Ask(asked.request, self.core.timeout_s)
        asked.request.commit.CopyFrom(commit_message(token, self.batch))
        asked.request.txn, asked.epoch = self._at
        return asked

    def _commits_plainly(self, token: str) -> bool:
        """Whether it can commit along with others: it is deltas and puts, and has not begun; nor will it any more."""
        return (
            self._is_plain
            and 0 < len(self._writes) <= _PLAIN_OPERATIONS
            and self._buffered_bytes <= _PLAIN_BYTES
            and len(token) <= _PLAIN_TOKEN
            and self.batch is None
            and self._begins_late()
        )

    def _begins_late(self) -> bool:
        """True if it has not begun, and now only will where it commits."""
        return self.start_ts is None and self._min_snapshot <= self.core.seen_ts and self._taken_back()

    def _commit_alone(self, token: str) -> Ask:
        request, bodies = self._take()
        request.commit.CopyFrom(commit_message(token, self.batch))
        request.txn, epoch = self._at
        if self._begins_late():
            request.txn = 0
        return Ask(request, self.core.timeout_s, epoch, bodies)

    # -- writes ---------------------------------------------------------------------------------

    def _operation(self, kind: session_pb2.Operation.Kind, schema: TableSchema, body: Any = None, **more: Any) -> None:
        """One more buffered operation, that is no write of a row."""
        operation = session_pb2.Operation(kind=kind, table=schema.name, table_id=schema.id, **more)
        self._write(session_pb2.Writes(operations=[operation]).SerializeToString(), [] if body is None else [body])
        self._is_plain = False

    def write(self, table: str, write: Write) -> Steps[None] | None:
        """Buffers a write. None: that was all; else what is left to be carried out."""
        schema = self.core.cached(table)
        if schema is not None:
            try:
                return self.flush() if self._buffer(schema, write) else None
            except InvalidArgument:  # which the table as it is now may not find
                pass
        return self._write_by_newest(table, write)

    def _write_by_newest(self, table: str, write: Write) -> Steps[None]:
        if (yield from self.core.use(table, lambda schema: self._buffer(schema, write))):
            yield from self.flush()

    def _buffer(self, schema: TableSchema, write: Write) -> bool:
        """True: flush now, as it is full, or an insert waits for its answer. If it raises, nothing was done."""
        if write.kind == "delta" and (data := encoded_delta(schema, write.key, write.values)) is not None:
            return self._write(data)
        bodies: list[Any] = []
        full = self._write(encoded_write(schema, write.kind, *write.bound(schema), write.column, bodies), bodies)
        if bodies or write.kind not in _PLAIN:
            self._is_plain = False
        return full or (write.kind == "insert" and not self.deferred)

    def _write(self, data: bytes, bodies: Sequence[Any] = ()) -> bool:
        """Buffers an operation; True: flush now."""
        if self.ended:
            raise InvalidArgument("this transaction has ended")
        if self.read_only:
            raise InvalidArgument("a snapshot is read only: write in a transaction")
        self.wrote = True
        if self._writes:
            self._writes.append(data)  # type: ignore[attr-defined]
        else:
            self._writes = [data]
        self._buffered_bytes += len(data)
        if bodies:
            self._bodies = [*self._bodies, *bodies]
            self._buffered_bytes += sum([memoryview(body).nbytes for body in bodies])
        return self._is_full

    @property
    def _is_full(self) -> bool:
        return len(self._writes) >= _FLUSH_OPERATIONS or self._buffered_bytes > _FLUSH_BYTES

    def flush(self) -> Steps[None]:
        """Sends what is buffered, and waits, so that memory and the server's queue stay bounded."""
        if self._writes:
            request, bodies = self._take()
            request.apply.SetInParent()
            yield from self._ask(request, bodies)

    def append(self, table: str, records: Any, late: str = "fail") -> Steps[None]:
        drop_late = drops_late(late)
        schema, parts = yield from self.core.use(table, encoding(records, append_parts))
        for part in parts:
            self.send_part(Kind.KIND_APPEND, schema, part, drop_late=drop_late)
            if len(parts) > 1 or self._is_full:
                yield from self.flush()

    def send_part(self, kind: session_pb2.Operation.Kind, schema: TableSchema, part: Any, **options: bool) -> None:
        """Events or rows, encoded."""
        self._operation(kind, schema, part, arrow_bytes=len(part), **options)

    def write_rows(self, table: str, records: Any, deletes: str | None = None, insert: bool = False) -> Steps[None]:
        flag(insert, "insert")
        schema, parts = yield from self.core.use(
            table, encoding(records, functools.partial(write_parts, deletes=deletes))
        )
        for part in parts:
            self.send_part(Kind.KIND_WRITE, schema, part, insert=bool(insert))
            if len(parts) > 1 or (insert and not self.deferred) or self._is_full:
                yield from self.flush()

    def append_stages(self, table: str, stages: Iterable[bytes], late: str = "fail") -> Steps[None]:
        named, drop_late = stage_ids(stages), drops_late(late)
        schema = yield from self.core.schema(table)
        self._operation(Kind.KIND_APPEND_STAGES, schema, stages=named, drop_late=drop_late)

    def overwrite(self, table: str) -> Steps[None]:
        def check(schema: TableSchema) -> TableSchema:
            schema.check_overwritable()
            return schema

        self._operation(Kind.KIND_OVERWRITE, (yield from self.core.use(table, check)))

    def retract(self, wanted: ScanArguments) -> Steps[int]:
        if self.read_only:
            raise InvalidArgument("a snapshot is read only: write in a transaction")

        def request(schema: TableSchema) -> session_pb2.Request:
            spec = scan_spec(schema, wanted.bound(schema))
            return session_pb2.Request(retract=session_pb2.Retract(spec=spec))

        self.wrote, self._is_plain = True, False
        _, reply = yield from self._read(wanted.table, request)
        return int(reply.retract.events)

    # -- reads ----------------------------------------------------------------------------------

    def _seen(self, schema: TableSchema) -> Steps[TableSchema]:
        """The definition by which this snapshot's reads go, where the newest one is perhaps of after it."""
        least = 0 if self._is_past else self._min_snapshot
        if schema.altered_ts <= (self.start_ts or least):
            return schema
        known = self._defined.get(schema.id)
        if known is None:
            request, bodies = self._take()
            request.define.table, request.define.table_id = schema.name, schema.id
            reply = yield from self._ask(request, bodies)
            known = from_table(reply.table)
            self._defined = {**self._defined, schema.id: known}
        return known

    def table_schema(self, table: str) -> Steps[TableSchema]:
        """As this snapshot sees it."""
        self._check_open()
        return self.core.asked(table, lambda schema: schema, newest, self._seen, self._min_snapshot)

    def _read(
        self, table: str, request: Callable[[TableSchema], session_pb2.Request]
    ) -> Steps[tuple[TableSchema, Any]]:
        """The schema, and the answer; a snapshot may ask again if the table turns out to be another."""

        def ask(bound: tuple[TableSchema, session_pb2.Request]) -> Steps[tuple[TableSchema, Any]]:
            return bound[0], (yield from self._ask(*self._take(bound[1])))

        return self.core.asked(
            table, lambda schema: (schema, request(schema)), ask, self._seen, self._min_snapshot, again=self.read_only
        )

    def get_many(self, wanted: GetArguments) -> Steps[list[dict[str, Any] | None]]:
        schema, reply = yield from self._read(wanted.table, lambda schema: get(schema, wanted))
        return got(schema, wanted, reply)

    def scan_open(
        self,
        wanted: ScanArguments | AnswerArguments,
        page_rows: int | None = None,
        *,
        rows: bool = False,
    ) -> Steps[tuple[TableSchema, Page]]:
        """The schema and the first page, which has the scan's number if there is more. ``rows``: it may have rows."""

        asked = 0

        def request(schema: TableSchema) -> session_pb2.Request:
            nonlocal asked
            spec = scan_spec(schema, wanted.bound(schema))
            asked = spec.shards
            row_groups = page_rows == BATCH_ROWS
            opening = session_pb2.ScanOpen(spec=spec, page_rows=page_rows or 0, rows=rows, row_groups=row_groups)
            return session_pb2.Request(scan_open=opening)

        schema, page = yield from self._read(wanted.table, request)
        if page.shards != asked:
            raise errors.FeatureOff(
                f"the server at {self.core.endpoint} is of a version that gives the rows of all shards where some are "
                "asked for: upgrade it",
                nodes=[self.core.endpoint],
            )
        return schema, page

    def answer(self, wanted: AnswerArguments) -> Steps[Result]:
        """All of the answer."""
        schema, page = yield from self.scan_open(wanted)
        first, batches = page, read_batches(page.arrow)
        while page.scan:
            page = yield from self.scan_next(page)
            batches += read_batches(page.arrow)
        return Result(wanted.arrow_schema(schema), batches, first.explanation, first.complete_since_us)

    def sql(self, wanted: SqlArguments) -> Steps[pa.Table]:
        """The whole answer."""
        import pyarrow as pa

        from kivi.arrow.ipc import encode_ipc

        parameters = b"" if wanted.batch is None else encode_ipc(wanted.batch).to_pybytes()
        request, bodies = self._take()
        request.sql.CopyFrom(session_pb2.Sql(text=wanted.text, parameters=parameters))
        page = yield from self._ask(request, bodies)
        parts = list[pa.Table]()
        while True:
            with pa.ipc.open_stream(page.arrow) as reader:
                parts.append(reader.read_all())
            if not page.scan:
                return pa.concat_tables(parts)
            page = yield from self.scan_next(page)

    def scan_rows(self, wanted: ScanArguments) -> Steps[tuple[list[dict[str, Any]] | None, Page]]:
        """A scan for its rows: all of them if they are few, and else None and the first page of batches."""
        schema, page = yield from self.scan_open(wanted, rows=True)
        if page.arrow or page.scan:
            return None, page
        read = rows_reader(schema, schema.output_columns(wanted.columns))
        return read(rows_of(page.columns)), page

    def scan_next(self, last: Page, meanwhile: Callable[[], object] | None = None) -> Steps[Page]:
        """The page that follows that one; ``meanwhile`` is done while it is on its way."""
        # A scan belongs to one session: were it lost, the pages that follow could not be told from those before.
        try:
            asked = Ask(self._scan(last), self.core.timeout_s, last.at.epoch)
            page: Page = yield asked if meanwhile is None else Work(meanwhile, asked)
        except ConnectionLost:
            # A shared snapshot outlasts the session, and whoever has its name may scan again.
            kind = errors.Unavailable if self.lease else errors.SnapshotTooOld
            raise kind("the connection was lost during a scan: begin it again") from None
        return page._replace(at=last.at)

    def scan_close(self, last: Page) -> None:
        self.core.transport.tell(self._scan(last, close=True), last.at.epoch)

    @staticmethod
    def _scan(last: Page, *, close: bool = False) -> session_pb2.Request:
        return session_pb2.Request(txn=last.at.number, scan_next=session_pb2.ScanNext(scan=last.scan, close=close))

    def to_arrow(self, wanted: ScanArguments) -> Steps[pa.Table]:
        """A scan as one Arrow table."""
        import pyarrow as pa

        schema, page = yield from self.scan_open(wanted, BATCH_ROWS)
        pages, batches = PageReader(), list[pa.RecordBatch]()

        def decode(page: Page) -> None:
            batches.extend(pages.batches(page))

        while page.scan:
            page = yield from self.scan_next(page, functools.partial(decode, page))
        if page.row_groups:
            yield Work(functools.partial(decode, page))
        else:
            decode(page)
        return pa.Table.from_batches(batches, wanted.arrow_schema(schema))
