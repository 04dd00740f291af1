"""The session stream: frames of requests in, frames of replies out, and only short work on the event loop.

::

    event loop                                          a pool / the log's thread
    read frame -> inbox -> run request after request -> long scans | big writes | waits
    take all of out <---- replies ----------------------------- replies, commit outcomes
    write frame

*Order.* A session's requests are begun by the event loop, in turns with other sessions (``kivi_server.scheduler``), and
those of a transaction in their order. Commits pass reads of other transactions, to be prepared and entered together:
nobody has been answered, so nobody knows which came first. A request that may take long goes to a pool and marks its
transaction busy; what follows in that transaction waits behind it, and other transactions pass. There is a pool each
for reads, for writes, for commits that wait for room in pending and for outcomes, so that none of these holds up
another; a snapshot that is to come is waited for by no thread of these (``kivi_server.waiting``). The next page of a
scan may be read ahead, and only who asks for it waits for it (``kivi_server.pages``). A commit is answered whenever the
log says so.

*Gathering.* Whoever has a reply encodes it and appends the bytes to ``out``; the first one wakes the
event loop, and the writer takes everything that is there when it comes to it. Encoded frames can be
concatenated, which is how replies of many threads share a message without a lock.

*Bounds.* The server stops reading from a session that has too many unanswered requests or too many
bytes on their way in or out; gRPC's flow control then stops the client. A client that accepts no byte
for a minute is dropped. Transactions, scans and keys per request have published limits, and so has
what a frame may be made of, which is looked at before it is parsed.

*Ends.* When the stream ends, transactions are rolled back and snapshots released, but a commit that
was handed to the store completes whatever the client does. Shared snapshots stay until their time
limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import grpc
from kivi_server import limits
from kivi_server.asked import Asked, parsed
from kivi_server.auth import Access, Grant
from kivi_server.clients import Client
from kivi_server.commits import Commits, answer_to, count_of, each_of
from kivi_server.pages import Page, Pages
from kivi_server.reads import Read, ReadGroups
from kivi_server.requests import SLOW_OPERATIONS, Requests, Transaction, own_tokens, stopping
from kivi_server.scheduler import Scheduler
from kivi_server.sessions import Sessions
from kivi_server.status import to_error, told
from kivi_server.waiting import Waiting

from kivi.errors import (
    CommitUnknown,
    InvalidArgument,
    KiviError,
    PermissionDenied,
    ResourceExhausted,
    SnapshotTooOld,
    Unavailable,
)
from kivi.runtime import deadlines
from kivi.store.facade import Commit, Outcome, Writes
from kivi.wire.frames import Packet, header_bytes, joined, padded
from kivi.wire.v1 import session_pb2

__all__ = ["Session"]

_WRITE_BYTES: Final = 4 << 20
_SLOW_BYTES: Final = 64 << 10  # of an operation, or of a frame's header
_SLOW_BODY: Final = 16 << 10
_SLOW_KEYS: Final = 128
_FEW_ROWS: Final = 24
_REMEMBERED: Final = 2  # times as many as may be open: those that are not say why to what was sent behind them
_PATIENCE_S: Final = 10.0  # of a request that says nothing of it
_READS: Final = frozenset({"get", "scan_open", "scan_next", "sql", "retract"})
"""What counts as query time."""
_GROUP: Final = 256  # reads or commits that are done together
_COMMITS: Final = frozenset({"commit", "commit_each"})
_GROUPED: Final = frozenset({"get", "apply"})
"""Reads that ``ReadGroups`` takes."""


class Session(Requests):
    """One stream."""

    def __init__(self, sessions: Sessions, access: Grant, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(sessions, access, client)
        self.reads = ReadGroups(self.translator, sessions.row_sizes)
        self.out: deque[tuple[Packet, int]] = deque()  # and how many answers are in each
        self.writing = False
        self.write_began = 0.0
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self.dropped: KiviError | None = None
        self._task: asyncio.Task[Any] | None = None
        self._wake = asyncio.Event()
        self._woken = False
        self._scheduler = sessions.scheduler = sessions.scheduler or Scheduler(self.store, loop)
        self._scheduled = False
        self._inbox: deque[Asked] = deque()
        self._paused = False  # what is in the inbox waits for room
        self._bytes_in = 0  # read since the inbox was empty
        self._bytes_waiting = 0  # of requests that were handled so far that they wait for their turn; under the lock
        self._asked = 0  # requests that want an answer
        self._answered = 0
        self._out_bytes = 0
        self._undrained: list[Transaction] = []  # with a backlog, waiting for room
        self._out_lock = threading.Lock()

    # -- the event loop's half ------------------------------------------------------------------

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        hello = session_pb2.Hello(
            version=self.sessions.version,
            limits=self.sessions.limits,
            instance=self.sessions.instance,
        )
        self.sessions.live[self.name] = self
        self._task = asyncio.current_task()
        writer = None
        try:
            await context.write(joined([Packet(session_pb2.ServerFrame(hello=hello).SerializeToString())]))
            writer = asyncio.create_task(self._send_all(context))
            while (data := await context.read()) is not grpc.aio.EOF:
                self._bytes_in += len(data)
                await self._receive(data)
                while self._full():
                    await asyncio.sleep(0.002)
                    if writer.done():
                        return
                if writer.done():
                    return
            # Half-closed: answer what was asked. Rare, so looking now and then is enough.
            while self._asked > self._answered or self._inbox:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        finally:
            self._closed = True
            self.sessions.live.pop(self.name, None)
            if writer is not None:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await writer
            self._release_all()

    async def _receive(self, data: bytes) -> None:
        """A frame's requests into the inbox. A session whose frame is beyond a limit ends."""
        try:
            if len(data) > _SLOW_BYTES and header_bytes(data) > _SLOW_BYTES:
                requests = await self._loop.run_in_executor(self.sessions.reads, parsed, data)
            else:
                requests = parsed(data)
            self._take(requests)
        except ResourceExhausted as error:
            self.drop(error)
        except Exception:
            self._asked += 1
            bad = InvalidArgument("this is not a frame with a ClientFrame")
            self._reply(session_pb2.Response(id=0, error=to_error(bad)))

    def _take(self, requests: Sequence[Asked]) -> None:
        """Requests into the inbox; those beyond the client's rate are refused."""
        counts = [count_of(asked.request) for asked in requests]
        wanted = sum(counts)
        if wanted > limits.FRAME_REQUESTS_MAX:
            raise limits.exceeded("frame_requests_max", limits.FRAME_REQUESTS_MAX, wanted, "requests of one frame")
        self.sessions.frames_in += 1
        self._asked += wanted
        self.sessions.requests += wanted + counts.count(0)
        if (tenant := self.access.tenant) is not None:
            for asked in requests:
                own_tokens(asked.request, tenant)
        try:
            self.client.take(wanted)
        except ResourceExhausted as refused:
            for asked in requests:
                request = asked.request
                if request.HasField("commit_each"):
                    self._fail_each(asked, refused)
                elif request.id:
                    transaction = self.txns.get(request.txn)
                    self._fail(request, transaction, refused)
                    if transaction is not None and request.operations and transaction.failed is None:
                        transaction.failed = refused  # it must not commit without these
                else:
                    self._inbox.append(asked)
        else:
            self._inbox.extend(requests)
        self._want_turn(at_once=bool(self._inbox) and self._inbox[0].request.WhichOneof("body") not in _COMMITS)

    def _want_turn(self, *, at_once: bool = False) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._scheduler.add(self, at_once=at_once)

    def go_on(self, until: float) -> bool:
        """Runs what is in the inbox until that time. False: it is all done, or waits for room for the replies."""
        inbox = self._inbox
        while inbox and not self._paused:
            if self._closed:
                inbox.clear()
                break
            if time.monotonic() > until:
                return True
            if self._out_bytes > limits.QUEUED_BYTES_MAX:
                self._paused = True  # the writer finds room, and wants a turn then
                break
            request = inbox[0].request
            body = request.WhichOneof("body")
            if body in _COMMITS:
                self._commit_group()
            elif body not in _GROUPED or not self._read_group():
                self._dispatch(inbox.popleft())
        if not inbox:
            self._bytes_in = 0
        self._scheduled = False
        return False

    def _dispatch_each(self, requests: Iterable[Asked]) -> None:
        for asked in requests:
            self._dispatch(asked)

    def _full(self) -> bool:
        return (
            self._bytes_in + self._bytes_waiting > limits.QUEUED_BYTES_MAX
            or self._paused
            or self._asked - self._answered > limits.SESSION_REQUESTS_MAX
        )

    async def _send_all(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._woken = False
            while self.out:
                parts: list[Packet] = []
                size = answers = 0
                while self.out and (not parts or size + len(self.out[0][0]) <= _WRITE_BYTES):
                    part, count = self.out.popleft()
                    parts.append(part)
                    size += len(part)
                    answers += count
                self.writing, self.write_began = True, time.monotonic()
                await context.write(joined(parts))
                self.writing = False
                self._answered += answers
                with self._out_lock:
                    self._out_bytes -= size
                    undrained: list[Transaction] = []
                    if self._out_bytes < limits.QUEUED_BYTES_MAX // 2:
                        undrained, self._undrained = self._undrained, undrained
                for transaction in undrained:
                    self.sessions.reads.submit(self._drain, transaction)
                if self._paused and self._out_bytes < limits.QUEUED_BYTES_MAX // 2:
                    self._paused = False
                    self._want_turn()
                self.sessions.frames_out += 1

    def stalled(self) -> bool:
        return self.writing and time.monotonic() - self.write_began > limits.STALL_S_MAX

    def drop(self, why: KiviError) -> None:
        """Ends it: its client is told ``why``, and its transactions are let go of."""
        self.dropped = why
        if self._task is not None:
            self._task.cancel()

    # -- any thread -----------------------------------------------------------------------------

    def _reply(self, response: session_pb2.Response, answers: int = 1, bodies: Sequence[Any] = ()) -> None:
        """An answer to so many requests. ``bodies``: of a page."""
        if bodies:
            *before, last = [memoryview(body).nbytes for body in bodies]
            response.body_bytes = sum(map(padded, before)) + last
        packet = Packet.response(response, bodies)
        if len(packet) > limits.MESSAGE_BYTES_MAX:  # it would end the session, and with it everybody else's requests
            large = limits.exceeded("message_bytes_max", limits.MESSAGE_BYTES_MAX, len(packet), "bytes of one answer")
            self._reply(session_pb2.Response(id=response.id, start_ts=response.start_ts, error=to_error(large)))
            return
        self._send(packet, answers)

    def _send(self, data: Packet, answers: int) -> None:
        if self._closed:
            return
        with self._out_lock:
            self._out_bytes += len(data)
        self.out.append((data, answers))
        if not self._woken:
            self._woken = True
            if threading.get_ident() == self._loop_thread:
                self._wake.set()
            else:
                self._call_on_loop(self._wake.set)

    def _call_on_loop(self, job: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(job)

    def _fail(self, request: session_pb2.Request, transaction: Transaction | None, error: BaseException) -> None:
        error = told(error, "a request", self._named(request))
        if request.id:
            start_ts = transaction.start_ts if transaction is not None else 0
            self._reply(session_pb2.Response(id=request.id, start_ts=start_ts, error=to_error(error)))
        if transaction is not None and transaction.failed is None and (not request.id or request.HasField("begin")):
            transaction.failed = error  # what is pipelined behind it gets the same answer

    def _refuse(self, asked: Asked, transaction: Transaction | None, error: BaseException) -> None:
        """Answers it with an error, and counts that."""
        self._fail(asked.request, transaction, error)
        call = f"Session/{asked.request.WhichOneof('body')}"
        self.sessions.calls.ended(call, time.monotonic() - asked.received, error)

    def _named(self, request: session_pb2.Request) -> str:
        return f"{self.name.hex()[:8]}/{request.id}"

    # -- what is asked for ----------------------------------------------------------------------

    def _commit_group(self) -> None:
        """Commits what is at the head of the inbox, and together with it what can join it."""
        inbox = self._inbox
        if inbox[0].request.HasField("commit_each"):
            self._scheduler.enter()
            asked = inbox.popleft()
            commits = self.translator.commits.each(asked, self._may_write)
            self._split(asked) if commits is None else self._dispatch_each(self._write(commits))
            return
        several, passed, numbers = list[Asked](), list[Asked](), set[int]()
        while inbox and len(several) + len(passed) < _GROUP:
            request = inbox[0].request
            if request.txn not in numbers and self._may_join(inbox[0]):
                several.append(inbox.popleft())
            elif several and request.WhichOneof("body") in _GROUPED:
                passed.append(inbox.popleft())
            else:
                break
            if request.txn:
                numbers.add(request.txn)
        inbox.extendleft(reversed(passed))
        if several:
            self._commit_several(several)
        else:
            self._scheduler.enter()
            self._dispatch(inbox.popleft())

    def _may_join(self, asked: Asked) -> bool:
        """Whether it is the commit of any small transaction: of one in one step that appends an event, say."""
        request = asked.request
        if not request.id or not request.HasField("commit") or request.HasField("first"):
            return False
        if request.txn:
            transaction = self.txns.get(request.txn)
            if transaction is None or transaction.busy or transaction.failed is not None:
                return False
        operations = request.operations
        each = len(operations) > 0 and operations[0].kind == session_pb2.Operation.KIND_APPEND_EACH
        return not each and not asked.is_late() and self._pool(asked) is None

    def _commit_several(self, several: Sequence[Asked]) -> None:
        commits = list[Commit]()
        for asked in several:
            transaction = self.txns.get(asked.request.txn)
            try:
                if (commit := self._prepared(asked, transaction)) is not None:
                    commits.append(commit)
            except BaseException as error:
                self._refuse(asked, transaction, error)
        if small := self._small_of(commits):
            self._scheduler.gather(small, self._commit_unless_full)

    def _split(self, asked: Asked) -> None:
        """A CommitEach with more than deltas and puts: its transactions come one by one, before all that is behind."""
        try:
            self.access.require(Access.WRITE, "writing")  # before anything is done for who may not
            apart = each_of(asked)
        except (InvalidArgument, PermissionDenied, ResourceExhausted) as error:
            self._fail_each(asked, error)
            return
        self._inbox.extendleft(reversed(apart))

    def _fail_each(self, asked: Asked, error: Exception) -> None:
        """Refuses a CommitEach: as the one request that it says it is, if it has a number itself."""
        request = asked.request
        numbers = [request.id] if request.id else request.commit_each.ids
        for number in numbers:
            self._fail(session_pb2.Request(id=number), None, error)
        self.sessions.calls.ended("Session/commit", time.monotonic() - asked.received, error, len(numbers))

    def _may_write(self, tables: Iterable[str]) -> bool:
        """Whether they are of those of the token; what is not is told so by ``_do_commit``, and so is a tenant."""
        if self.access.tenant is not None or self.client.allowance.meters_writes:
            return False
        return not self.access.tables or all(map(self.access.allows, tables))

    def _read_group(self) -> bool:
        """Answers the reads at the head of the inbox together; False: the first is read by itself."""
        inbox = self._inbox
        if not self._begins_alike() or self.client.allowance.query is not None or not self._scheduler.is_quick():
            return False
        wanted: list[Read] = []
        begun: dict[int, Transaction] = {}
        alone = Transaction(0)
        room = limits.SESSION_TRANSACTIONS_MAX - len(self.txns)
        while inbox and len(wanted) < _GROUP:
            asked = inbox[0]
            request = asked.request
            body, number = request.WhichOneof("body"), request.txn
            if body == "release":
                if {each.asked.request.txn for each in wanted}.isdisjoint((number, *request.release.txns)):
                    self._dispatch(inbox.popleft())
                    continue
                break
            if body not in _GROUPED or number in begun or len(begun) >= room:
                break
            if self.access.tables and body == "get" and not self.access.allows(request.get.table):
                break
            read = self.reads.read(asked, body == "get", self.txns.get(number), alone)
            if read is None:
                break
            if read.begins and number:
                begun[number] = read.transaction
            wanted.append(read)
            inbox.popleft()
        if not wanted:
            return False
        try:
            self.reads.begin(wanted)
            answers = [*self.reads.answers(wanted)]
        except Exception:  # of some of them: one by one
            for transaction in begun.values():
                if transaction.lease is not None:
                    self.store.release(transaction.lease)
            self._dispatch_each([read.asked for read in wanted])
            return True
        finally:
            if alone.lease is not None:
                self.store.release(alone.lease)
        self.txns.update(begun)
        for response, count in answers:
            self._reply(response, count)
        self.sessions.calls.ended("Session/get", time.monotonic() - wanted[0].asked.received, count=len(wanted))
        return True

    def _begins_alike(self) -> bool:
        """Whether a snapshot begins here without a look at who asks for it."""
        return not self.sessions.stopping and self.client.allowance.snapshots is None and self.access.tenant is None

    def _write(self, commits: Commits) -> Sequence[Asked]:
        """Transactions of deltas and puts, together.

        Gives back those that the store did not take: the catalog has changed under them, or they would have to wait
        for room, which is for a pool's thread to do.
        """
        try:
            if self.sessions.stopping:
                raise stopping()
            self.access.require(Access.WRITE, "writing")
        except KiviError as error:
            self._fail_each(commits.source, error)
            return ()
        answer, write_sets = _Answer(self, commits), commits.write_sets
        self.sessions.commit_started(len(write_sets))
        write = functools.partial(
            self.store.write, commits.derived_at, write_sets, commits.tokens, commits.numbers, answer
        )
        stale = self._or_unknown([answer.all_left], write) or ()
        self.sessions.commit_ended(len(stale))
        left = {*stale}
        return [asked for asked in each_of(commits.source) if asked.request.id in left] if left else ()

    def _release_these(self, numbers: Iterable[int], received: float) -> None:
        """What is busy is let go of when it is not."""
        for number in numbers:
            transaction = self.txns.get(number)
            if transaction is None:
                continue
            if transaction.busy:
                self._dispatch(Asked(session_pb2.Request(txn=number, release=session_pb2.Release()), received))
            else:
                self._let_go(transaction)

    def _dispatch(self, asked: Asked) -> None:
        request = asked.request
        number = request.txn
        if request.HasField("release"):
            self._release_these(request.release.txns, asked.received)
            if not (number or request.id or request.release.leases):
                self.sessions.calls.ended("Session/release", time.monotonic() - asked.received)
                return
        if request.HasField("first") and (number or not request.HasField("get")):
            if not self._may_begin(request):
                return
            self._begin_first(asked)
        transaction = self.txns.get(number) if number else None
        if request.HasField("begin") and not self._may_begin(request):  # looked at now: what is there may be busy
            return
        if transaction is not None and transaction.busy:
            with self._lock:
                if transaction.busy:
                    transaction.backlog.append(asked)
                    self._bytes_waiting += asked.nbytes
                    return
        body = request.WhichOneof("body")
        if body == "begin":
            transaction = Transaction(number, deferred=request.begin.deferred)
            if (count := len(self.txns) + 1) > limits.SESSION_TRANSACTIONS_MAX:
                most = limits.SESSION_TRANSACTIONS_MAX
                transaction.failed = limits.exceeded("session_transactions_max", most, count, "open transactions")
                if count > _REMEMBERED * most:
                    self._fail(request, None, transaction.failed)
                    return
            self.txns[number] = transaction
        elif transaction is None and number:
            if body != "release":
                self._fail(request, None, SnapshotTooOld(f"transaction {number} has ended, or was never begun"))
            return
        self._start(asked, transaction)

    def _start(self, asked: Asked, transaction: Transaction | None) -> bool:
        """Runs it here, or if it takes long elsewhere and later: then its transaction is busy, and this is False."""
        if transaction is not None and self._waits_for_page(asked, transaction):
            return False
        pool = None if asked.request.HasField("release") else self._pool(asked)
        if pool is None:
            self._run(asked, transaction)
            return True
        if transaction is not None:
            transaction.busy = True
        self._run_later(pool, asked, transaction)
        return False

    def _may_begin(self, request: session_pb2.Request) -> bool:
        """Whether its number is free for a transaction; if not, it is told so."""
        if request.txn and request.txn not in self.txns:
            return True
        self._fail(request, None, InvalidArgument(f"transaction {request.txn} is there already, or has no number"))
        return False

    def _begin_first(self, asked: Asked) -> None:
        """Begins the request's transaction, as a Begin before it would."""
        request = asked.request
        begin = session_pb2.Request(txn=request.txn, begin=request.first, timeout_ms=request.timeout_ms)
        request.ClearField("first")
        self._dispatch(Asked(begin, asked.received))

    def _pool(self, asked: Asked) -> ThreadPoolExecutor | Waiting | None:
        """Where a request runs, or waits, that may take long; None for what is over in no time."""
        pools, request = self.sessions, asked.request
        match request.WhichOneof("body"):
            case "scan_open":
                spec = request.scan_open.spec
                if spec.HasField("question") or spec.HasField("match") or spec.order_by:
                    return pools.questions
                others = ("where", "changes", "rollup")
                few = 0 < spec.limit + spec.offset <= _FEW_ROWS and not any(map(spec.HasField, others))
                if not (few and self._is_little(spec.table, spec.limit)):
                    return pools.reads
            case "begin" if not pools.stopping and request.begin.min_snapshot > self.store.watermark():
                return pools.waiting
            case "begin" if request.begin.HasField("as_of_us"):  # reads what commit times there were
                return pools.reads
            case "begin" if self._waits_for_others(request.begin):
                return pools.outcomes
            case "get" if not request.txn and self._waits_for_others(request.first):
                return pools.outcomes
            case "outcome":
                return pools.outcomes
            case "get" if (
                not pools.stopping and not request.txn and (request.first.min_snapshot > self.store.watermark())
            ):
                return pools.waiting
            case "get" if not self._is_little(request.get.table, len(request.get.keys)):
                return pools.reads
            case "retract":
                return pools.reads
            case "sql":
                return pools.sql
            case "scan_next" if not request.operations and (request.scan_next.close or self._ahead(request)):
                return None
            case "scan_next":
                return pages.pool if (pages := self._pages(request)) is not None else pools.scans
        operations = request.operations
        if operations and (
            len(operations) > SLOW_OPERATIONS
            or len(asked.bodies) >= _SLOW_BODY
            or (operations[0].kind == session_pb2.Operation.KIND_APPEND_EACH)
            or any(operation.ByteSize() > _SLOW_BYTES or operation.stages for operation in operations)
        ):
            return pools.writes
        return None

    def _waits_for_others(self, begin: session_pb2.Begin) -> bool:
        """Whether a snapshot may have to wait for what the log of a cluster brings."""
        is_bounded = begin.HasField("max_staleness_us")
        is_new = begin.fresh or (is_bounded and begin.max_staleness_us == 0)
        if is_new or begin.as_of_ts > self.store.watermark():
            return True
        return (is_bounded or self._is_pin(begin)) and self.store.is_node

    def _is_little(self, table: str, rows: int) -> bool:
        """Whether so many rows are read in no time: few, of bounded size, while the disk is quick."""
        return rows <= _SLOW_KEYS and self._scheduler.is_quick() and self.store.has_bounded_rows(table)

    def _run_later(self, pool: ThreadPoolExecutor | Waiting, asked: Asked, transaction: Transaction | None) -> None:
        with self._lock:
            self._bytes_waiting += asked.nbytes
        if not isinstance(pool, Waiting):
            once = threading.Lock()  # what a pool refuses for want of a thread another of its threads may still do
            try:
                pool.submit(self._run_slow, once, asked, transaction)
            except RuntimeError as refused:
                self._call_on_loop(functools.partial(self._run_slow, once, asked, transaction, refused))
            return
        request = asked.request
        until = asked.received + (request.timeout_ms / 1000 if request.timeout_ms else _PATIENCE_S)
        begin = request.begin if request.HasField("begin") else request.first
        job = functools.partial(self._run_waited, asked, transaction, begin.min_snapshot)
        pool.add(begin.min_snapshot, until, lambda: not self._closed, lambda: self._call_on_loop(job))

    def _run_slow(
        self, once: threading.Lock, asked: Asked, transaction: Transaction | None, refused: Exception | None = None
    ) -> None:
        if not once.acquire(blocking=False):
            return
        with self._lock:
            self._bytes_waiting -= asked.nbytes
        try:
            self._run(asked, transaction, refused)
        finally:
            if transaction is not None:
                self._drain(transaction)

    def _run_waited(self, asked: Asked, transaction: Transaction | None, ts: int) -> None:
        """Goes on with a request whose snapshot is there, or will not be in time, or whose server stops."""
        with self._lock:
            self._bytes_waiting -= asked.nbytes
        if ts > (watermark := self.store.watermark()) and not self.sessions.stopping:
            error = Unavailable(f"the snapshot {ts} is not readable yet; the watermark is {watermark}")
            self._refuse(asked, transaction, error)
        elif not self._start(asked, transaction):
            return
        if transaction is not None:
            self._drain(transaction)

    def _ahead(self, request: session_pb2.Request) -> Future[Page] | None:
        """The page that it asks for, if that was read ahead, or is just now."""
        pages = self._pages(request)
        return pages.ahead if pages is not None else None

    def _pages(self, request: session_pb2.Request) -> Pages | None:
        transaction = self.txns.get(request.txn)
        return transaction.scans.get(request.scan_next.scan) if transaction is not None else None

    def _waits_for_page(self, asked: Asked, transaction: Transaction) -> bool:
        """Whether its page is being read: then it is the first of the backlog until that is done."""
        request = asked.request
        ahead = self._ahead(request) if request.HasField("scan_next") and not request.scan_next.close else None
        if ahead is None or ahead.done():
            return False
        with self._lock:
            transaction.busy = True
            transaction.backlog.appendleft(asked)
            self._bytes_waiting += asked.nbytes
        ahead.add_done_callback(lambda _: self._drain(transaction))
        return True

    def _drain(self, transaction: Transaction) -> None:
        """Runs what gathered behind a slow request, here, until nothing is left or something else takes long."""
        while True:
            with self._out_lock:
                if self._out_bytes > limits.QUEUED_BYTES_MAX and not self._closed:
                    self._undrained.append(transaction)  # the writer goes on: no thread of a pool waits for a client
                    return
            with self._lock:
                if not transaction.backlog:
                    transaction.busy = False
                    return
                asked = transaction.backlog.popleft()
                self._bytes_waiting -= asked.nbytes
            released = asked.request.HasField("release")
            if not released and self.txns.get(transaction.number) is not transaction:
                self._fail(asked.request, None, SnapshotTooOld(f"transaction {transaction.number} has ended"))
            elif not self._start(asked, transaction):
                return

    def _run(self, asked: Asked, transaction: Transaction | None, refused: Exception | None = None) -> None:
        request = asked.request
        body = request.WhichOneof("body")
        try:
            if asked.is_late():
                raise Unavailable("the request's time ran out before its work began; nothing was done")
            if self._closed and body != "release":
                return
            if refused is not None:
                transaction = transaction or Transaction(0)
                transaction.failed = transaction.failed or refused
            if transaction is not None and transaction.failed is not None and body != "release":
                if body == "commit":  # its last request: a client sends no release after it
                    self.txns.pop(transaction.number, None)
                    self._end(transaction)
                raise transaction.failed
            is_read = body in _READS
            if is_read:
                self.client.check_reads()
            with deadlines.until(asked.until), self.client.reading() if is_read else contextlib.nullcontext():
                getattr(self, f"_do_{body}", self._do_nothing)(asked, transaction)
            if body != "commit":  # which has not ended
                took = time.monotonic() - asked.received
                self.sessions.calls.ended(f"Session/{body}", took)
                if took > self.sessions.calls.slow_s:
                    self.sessions.calls.slow(f"Session/{body}", took, self._named(request), self.client.name)
        except BaseException as error:
            self._refuse(asked, transaction, error)


class _Answer:
    """Tells a session what became of its plain commits: one message for all that entered, by the log's thread."""

    __slots__ = ("_commits", "_ended", "_lock", "_session", "_told")

    def __init__(self, session: Session, commits: Commits) -> None:
        self._session, self._commits = session, commits
        self._lock, self._told, self._ended = threading.Lock(), list[int](), False

    def _may_tell(self, numbers: Sequence[int]) -> bool:
        with self._lock:
            self._told += () if self._ended else numbers
            return not self._ended

    def all_left(self, outcome: Outcome) -> None:
        """Tells all that were told nothing so far, and lets nobody else tell them."""
        with self._lock:
            self._ended = True
        left = {*self._commits.numbers}.difference(self._told)
        for number, token in zip(self._commits.numbers, self._commits.tokens, strict=True):
            if number in left:
                self._tell(session_pb2.Request(id=number, commit=session_pb2.Commit(token=token)), outcome)

    def entered(self, part: Writes, unknown: CommitUnknown | None) -> None:
        session, commits = self._session, self._commits
        if not self._may_tell(part.tags):
            return
        try:
            if unknown is None:
                session._reply(answer_to(part.tags, part.first), part.members)
            else:
                for number, token in zip(part.tags, part.tokens, strict=True):
                    error = CommitUnknown(unknown.message, token=token)
                    session._fail(session_pb2.Request(id=number), None, error)
            took = time.monotonic() - commits.received
            session.sessions.calls.ended("Session/commit", took, unknown, part.members)
        finally:
            session.sessions.commit_ended(part.members)

    def apart(self, number: int, outcome: Outcome) -> None:
        if self._may_tell((number,)):
            self._tell(session_pb2.Request(id=number), outcome)

    def _tell(self, request: session_pb2.Request, outcome: Outcome) -> None:
        self._session._told(Asked(request, self._commits.received), None)(outcome)
