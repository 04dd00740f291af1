"""The session stream: frames of requests in, frames of replies out, and only short work on the event loop.

::

    event loop          worker thread (one per session, shared)       a pool / the log's thread
    read frame  ------> parse, run request after request
                        replies -> out                                long scans | big writes | waits
    take all of out <------------------------------------------------ commit outcomes -> out
    write frame

*Order.* A session's frames are handled by one worker, in order and in turns with its other sessions; reads of few rows,
and plain commits, by the event loop itself, as long as no such frame has taken it more than some milliseconds. A
request that may take long goes to a pool and marks its transaction busy; what follows in that transaction waits behind
it, and other transactions pass. There is a pool each for reads, for writes, for commits that wait for room in pending
and for outcomes, so that none of these holds up another; a snapshot that is to come is waited for by no thread of these
(``kivi_server.waiting``). The next page of a scan may be read ahead, and only who asks for it waits for it
(``kivi_server.pages``).
A commit is answered whenever the log says so.

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
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import grpc
from kivi_server import limits
from kivi_server.auth import Access, Grant
from kivi_server.clients import Client
from kivi_server.leading import Leading
from kivi_server.pages import Page
from kivi_server.parts import check
from kivi_server.payloads import LARGE_BYTES, cut
from kivi_server.plain import Commits, count_of, each_of
from kivi_server.reading import PlainGet, PlainGets
from kivi_server.requests import Requests, Transaction, stopping
from kivi_server.sessions import Sessions, disk_reads
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
from kivi.store.facade import Outcome, Writes
from kivi.wire.codec import delimited, prefix, tag
from kivi.wire.status import to_error
from kivi.wire.v1 import session_pb2

__all__ = ["Session"]

_log = logging.getLogger("kivi.server")
_WRITE_BYTES: Final = 4 << 20
_SLOW_OPERATIONS: Final = 500
_SLOW_BYTES: Final = 64 << 10
_SLOW_KEYS: Final = 500
_HERE_BYTES: Final = 32 << 10
_HERE_ROWS: Final = 2_048  # of the commits of a frame: 5 ms if each has one, 2 ms if each has eight
_READS_BYTES: Final = 8 << 10
_FEW_ROWS: Final = 24
_FEW_READS: Final = 3 * _FEW_ROWS
_RESPONSES: Final = tag(session_pb2.ServerFrame, "responses")
_PAGE: Final = tag(session_pb2.Response, "page")
_ARROW: Final = tag(session_pb2.ScanPage, "arrow")
_REMEMBERED: Final = 2  # times as many as may be open: those that are not say why to what was sent behind them
_TURN_S: Final = 0.02  # of one session, while others of its worker wait
_PATIENCE_S: Final = 10.0  # of a request that says nothing of it
_GROUP: Final = 256  # gets that are done together, or snapshots begun on the event loop


class Session(Requests):
    """One stream."""

    def __init__(self, sessions: Sessions, access: Grant, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(sessions, access, client)
        self.gets = PlainGets(self.translator)
        self.name = secrets.token_bytes(16)
        self.out: deque[tuple[bytes, int]] = deque()  # encoded frames, and how many answers are in each
        self.writing = False
        self.write_began = 0.0
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self.dropped: KiviError | None = None
        self._task: asyncio.Task[Any] | None = None
        self._wake = asyncio.Event()
        self._woken = False
        self._jobs = sessions.next_queue()
        self._leading = sessions.leading = sessions.leading or Leading(sessions, loop)
        self._bytes_in = 0  # read; only the event loop adds
        self._bytes_handled = 0  # only the worker adds, when all of a frame has been
        self._bytes_taken = 0  # of the frame whose requests are in the inbox; the worker's
        self._bytes_waiting = 0  # of requests that were handled so far that they wait for their turn; under the lock
        self._asked = 0  # requests that want an answer; only the worker adds
        self._answered = 0  # only the event loop adds
        self._frames: deque[bytes] = deque()  # read, for the worker
        self._has_turn = False  # the worker will look at the frames; under the lock
        self._inbox: deque[tuple[session_pb2.Request, float]] = deque()  # parsed, of one frame; the worker's
        self._paused = False  # the rest of the inbox waits for room
        self._out_bytes = 0
        self._undrained: list[Transaction] = []  # with a backlog, waiting for room
        self._out_lock = threading.Lock()

    # -- the event loop's half ------------------------------------------------------------------

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        hello = session_pb2.Hello(
            version=self.sessions.version,
            limits=self.sessions.limits,
            instance=self.sessions.instance,
            session=self.name,
        )
        self.sessions.live[self.name] = self
        self._task = asyncio.current_task()
        writer = None
        try:
            await context.write(session_pb2.ServerFrame(hello=hello).SerializeToString())
            writer = asyncio.create_task(self._write(context))
            while (data := await _next_frame(context)) is not None:
                idle = self._bytes_in == self._bytes_handled and not self._paused and not self._has_turn
                self._bytes_in += len(data)
                if not (idle and len(data) <= _HERE_BYTES and self._handle_here(data)):
                    self._frames.append(data)
                    self._want_turn()
                while self._full():
                    await asyncio.sleep(0.002)
                    if writer.done():
                        return
                if writer.done():
                    return
            # Half-closed: answer what was asked. Rare, so looking now and then is enough.
            while self._asked > self._answered or self._bytes_in > self._bytes_handled or self._paused:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        finally:
            self._closed = True
            self.sessions.live.pop(self.name, None)
            if writer is not None:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await writer
            self._jobs.put(self._release_all)

    def _handle_here(self, data: bytes) -> bool:
        """Does a small frame's work on the event loop, if that has been quick; False: it is for the worker.

        That is few reads of few rows, since two hand-overs between threads cost more than they (measured alone: 1.3 ms
        a get here, 2.0 ms by the worker; 64 tasks with a snapshot each: 31,600 a second here, 28,800 by the worker),
        and plain commits (``kivi_server.leading``). More reads at a time are the worker's.
        """
        if not self.sessions.is_quick():
            return False
        may_commit = self.store.log.is_quick() and self.client.allowance.rate is None
        may_read = len(data) <= _READS_BYTES
        if not (may_commit or may_read):
            return False
        try:
            frame = session_pb2.ClientFrame.FromString(data)
        except Exception:
            return False
        if not (may_read and self._read_little(frame.requests)):
            return may_commit and self._read_commits(frame, len(data))
        began, reads = time.monotonic(), disk_reads()
        self._take(frame, len(data))
        self._pump()
        self.sessions.took(time.monotonic() - began, disk_reads() - reads)
        return True

    def _read_commits(self, frame: session_pb2.ClientFrame, size: int) -> bool:
        """Reads a frame of plain commits, to be done in the loop's next turn; False: there is something else in it."""
        now, plain, requests = time.monotonic(), self.translator.plain, frame.requests
        if not requests or len(requests) > _GROUP:
            return False
        if requests[0].HasField("commit_each"):
            found = [plain.each(request, now, self._may_write) for request in requests]
        else:
            found = [plain.together(requests, now, self._may_write)]
            if found[0] is not None and len(found[0]) < len(requests):
                return False
        commits = [each for each in found if each is not None]
        if len(commits) < len(found):
            return False
        if sum([each.rows for each in commits]) > _HERE_ROWS:
            return False
        count = sum([len(each) for each in commits])
        self.sessions.frames_in += 1
        self.sessions.requests += count
        self._asked += count
        self._leading.add(self, commits, size)
        return True

    def commit_here(self, commits: Sequence[Commits], size: int) -> None:
        """Commits what ``_read_commits`` has read. What takes its time, as a conflict or a retry, is the worker's."""
        for each in commits:
            if left := self._commit_plain(each):
                self._jobs.put(functools.partial(self._dispatch_each, left, each.received))
        self._bytes_handled += size

    def _dispatch_each(self, requests: Sequence[session_pb2.Request], received: float) -> None:
        for request in requests:
            self._dispatch(request, received)

    def _read_little(self, requests: Sequence[session_pb2.Request]) -> bool:
        """Whether they begin and end few snapshots, and read few rows, of tables whose rows are of bounded size."""
        if len(requests) > _GROUP:
            return False
        rows = 0  # or what takes as long as reading one
        bounded = {""}  # tables that are known to be
        for request in requests:
            if request.operations:
                return False
            match request.WhichOneof("body"):
                case "get":
                    name = request.get.table
                    rows += len(request.get.keys)
                case "scan_open":
                    spec = request.scan_open.spec
                    name = spec.table
                    if not 0 < spec.limit <= _FEW_ROWS or spec.HasField("where") or spec.HasField("changes"):
                        return False
                    rows += _FEW_ROWS  # the first row costs more than those after it
                case "release":
                    name = ""
                    rows += len(request.release.txns) // 16
                case "apply":
                    name = ""
                    rows += 1
                case "begin":
                    name = ""
                    rows += 1 + request.begin.count // 8
                    if self._pool(request, "begin") is not None:
                        return False
                case _:
                    return False
            if rows > _FEW_READS:
                return False
            if name not in bounded:
                if not self.store.has_bounded_rows(name):
                    return False
                bounded.add(name)
        return True

    def _full(self) -> bool:
        return (
            self._bytes_in - self._bytes_handled + self._bytes_waiting > limits.QUEUED_BYTES_MAX
            or self._paused
            or self._asked - self._answered > limits.SESSION_REQUESTS_MAX
        )

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._woken = False
            while self.out:
                parts: list[bytes] = []
                size = answers = 0
                while self.out and (not parts or size + len(self.out[0][0]) <= _WRITE_BYTES):
                    part, count = self.out.popleft()
                    parts.append(part)
                    size += len(part)
                    answers += count
                self.writing, self.write_began = True, time.monotonic()
                await context.write(parts[0] if len(parts) == 1 else b"".join(parts))
                self.writing = False
                self._answered += answers
                with self._out_lock:
                    self._out_bytes -= size
                    has_room = self._out_bytes < limits.QUEUED_BYTES_MAX // 2
                    undrained, self._undrained = (self._undrained, []) if has_room else ([], self._undrained)
                    if resumes := self._paused and has_room:
                        self._paused = False
                for transaction in undrained:
                    self._jobs.put(functools.partial(self._drain, transaction))
                if resumes:
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

    def _reply(self, response: session_pb2.Response, answers: int = 1) -> None:
        self._send_one(delimited(_RESPONSES, response.SerializeToString()), response, answers)

    def _send_one(self, data: bytes, response: session_pb2.Response, answers: int = 1) -> None:
        """An answer, encoded, to so many requests; ``response`` is what it answers, and when that began."""
        if len(data) > limits.MESSAGE_BYTES_MAX:  # it would end the session, and with it everybody else's requests
            large = limits.exceeded("message_bytes_max", limits.MESSAGE_BYTES_MAX, len(data), "bytes of one answer")
            response = session_pb2.Response(id=response.id, start_ts=response.start_ts, error=to_error(large))
            data = delimited(_RESPONSES, response.SerializeToString())
        self._send(data, answers)

    def _send(self, data: bytes, answers: int) -> None:
        if self._closed:
            return
        with self._out_lock:
            self._out_bytes += len(data)
        self.out.append((data, answers))
        if not self._woken:
            self._woken = True
            if threading.get_ident() == self._loop_thread:
                self._wake.set()
            elif not self.store.log.afterwards(self._wake_loop):  # the answers of one sync share a message
                self._wake_loop()

    def _wake_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake.set)

    def _answer(
        self, request: session_pb2.Request, transaction: Transaction | None, **body: Any
    ) -> session_pb2.Response:
        if self._payloads:
            self._payloads.pop(id(request), None)
        lease = transaction.lease if transaction is not None else None
        return session_pb2.Response(id=request.id, start_ts=lease.ts if lease else 0, **body)

    def _succeed(self, request: session_pb2.Request, transaction: Transaction | None, **body: Any) -> None:
        if request.id:
            self._reply(self._answer(request, transaction, **body))

    def _succeed_page(
        self, request: session_pb2.Request, transaction: Transaction | None, data: Any, number: int
    ) -> None:
        """As ``_succeed``; but the rows are copied once, into the frame, and not by way of three messages."""
        if not request.id:
            return
        size = memoryview(data).nbytes
        page = session_pb2.ScanPage(scan=number).SerializeToString() + prefix(_ARROW, size)
        answer = self._answer(request, transaction)
        response = answer.SerializeToString() + prefix(_PAGE, len(page) + size) + page
        self._send_one(b"".join((prefix(_RESPONSES, len(response) + size), response, data)), answer)

    def _fail(self, request: session_pb2.Request, transaction: Transaction | None, error: BaseException) -> None:
        if not isinstance(error, KiviError):
            name = self._named(request)
            _log.error("a request failed by a fault of the server", exc_info=error, extra={"request": name})
            error = KiviError(f"the server failed to answer this request; its log says why, at request {name}")
        if request.id:
            self._reply(self._answer(request, transaction, error=to_error(error)))
        if transaction is not None and transaction.failed is None and (not request.id or request.HasField("begin")):
            transaction.failed = error  # what is pipelined behind it gets the same answer

    def _named(self, request: session_pb2.Request) -> str:
        return f"{self.name.hex()[:8]}/{request.id}"

    # -- the worker's half ----------------------------------------------------------------------

    def _want_turn(self) -> None:
        with self._lock:
            has, self._has_turn = self._has_turn, True
        if not has:
            self._jobs.put(self._turn)

    def _turn(self) -> None:
        """Goes on with the frames for some milliseconds, and then lets the worker's other sessions have theirs.

        There is one turn at a time. It ends for good if all is done, or if there is no room for answers: then the
        writer wants the next one.
        """
        until = time.monotonic() + _TURN_S
        while time.monotonic() < until:
            if not self._inbox and not self._next():
                return
            with self.store.log.together() if len(self._inbox) > 1 else contextlib.nullcontext():
                self._pump(until)
            if self._paused and self._ends_paused():
                return
        self._jobs.put(self._turn)

    def _ends_paused(self) -> bool:
        with self._lock:  # the writer wants a turn after it has found room, which may be just now
            paused = self._paused
            self._has_turn = not paused
            return paused

    def _next(self) -> bool:
        """Parses the next frame into the inbox. False: there is none, or nobody waits for it."""
        with self._lock:
            if not self._frames or self._closed:
                self._has_turn = False
                return False
            data = self._frames.popleft()
        try:
            self._take(self._parsed(data), len(data))
            return True
        except ResourceExhausted as error:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self.drop, error)
        except Exception:
            self._asked += 1
            bad = InvalidArgument("this is not a ClientFrame")
            self._reply(session_pb2.Response(id=0, error=to_error(bad)))
        self._bytes_handled += len(data)
        return True

    def _parsed(self, data: bytes) -> session_pb2.ClientFrame:
        rest, payloads = cut(data) if len(data) >= LARGE_BYTES else (data, {})
        check(rest)
        frame = session_pb2.ClientFrame.FromString(rest)
        for place, payload in payloads.items():
            request = frame.requests[place]
            self._payloads[id(request)] = request, payload
        return frame

    def _take(self, frame: session_pb2.ClientFrame, size: int) -> None:
        """A frame's requests into the inbox; those beyond the client's rate are refused."""
        requests = frame.requests
        counts = [1 if request.id else count_of(request) for request in requests]
        asked = sum(counts)
        if asked > limits.FRAME_REQUESTS_MAX:
            raise limits.exceeded("frame_requests_max", limits.FRAME_REQUESTS_MAX, asked, "requests of one frame")
        self._bytes_taken = size
        now = time.monotonic()
        self.sessions.frames_in += 1
        self._asked += asked
        self.sessions.requests += asked + counts.count(0)
        try:
            self.client.take(asked)
        except ResourceExhausted as refused:
            for request in requests:
                if request.HasField("commit_each"):
                    self._fail_each(request, refused)
                elif request.id:
                    self._fail(request, self.txns.get(request.txn), refused)
                else:
                    self._inbox.append((request, now))
        else:
            self._inbox.extend([(request, now) for request in requests])

    def _pause(self) -> bool:
        """Leaves the inbox until the writer finds room; False: it just has, and would not look again."""
        with self._out_lock:
            self._paused = self._out_bytes > limits.QUEUED_BYTES_MAX and not self._closed
            return self._paused

    def _pump(self, until: float | None = None) -> None:
        """Runs what is in the inbox, as long as the replies find room, or that time has not come."""
        inbox = self._inbox
        while inbox:
            if self._closed:
                inbox.clear()
                break
            if self._out_bytes > limits.QUEUED_BYTES_MAX and self._pause():
                return
            if until is not None and time.monotonic() > until:
                return
            if inbox[0][0].HasField("release"):
                self._dispatch(*inbox.popleft())
                continue
            plain, received = self.translator.plain, inbox[0][1]
            if inbox[0][0].HasField("commit_each"):
                request, _ = inbox.popleft()
                if (commits := plain.each(request, received, self._may_write)) is None:
                    self._split(request, received)
                    continue
            else:
                commits = plain.together((request for request, _ in inbox), received, self._may_write)
                for _ in range(len(commits) if commits is not None else 0):
                    inbox.popleft()
            if commits is not None:
                self._dispatch_each(self._commit_plain(commits), received)
            elif not self._get_plain():
                self._dispatch(*inbox.popleft())
        size, self._bytes_taken = self._bytes_taken, 0
        self._bytes_handled += size

    def _split(self, request: session_pb2.Request, received: float) -> None:
        """A CommitEach of which something is not plain: its transactions come one by one, before all that is behind."""
        try:
            self.access.require(Access.WRITE, "writing")  # before anything is done for who may not
            apart = each_of(request)
        except (InvalidArgument, PermissionDenied, ResourceExhausted) as error:
            self._fail_each(request, error)
            return
        self._inbox.extendleft([(each, received) for each in reversed(apart)])

    def _fail_each(self, request: session_pb2.Request, error: KiviError) -> None:
        """Refuses a CommitEach: as the one request that it says it is, if it has a number itself."""
        numbers = [request.id] if request.id else [*request.commit_each.ids]
        for number in numbers:
            self._fail(session_pb2.Request(id=number), None, error)
        self.sessions.calls.ended("Session/commit", 0.0, error, len(numbers))

    def _may_write(self, tables: Iterable[str]) -> bool:
        """Whether they are of those of the token; what is not goes the general way, and is told so."""
        return not self.access.tables or all(map(self.access.allows, tables))

    def _get_plain(self) -> bool:
        """Answers the plain reads at the head of the inbox together; False: there is none."""
        if self.sessions.stopping or self.client.allowance.snapshots is not None:
            return False
        inbox = self._inbox
        wanted: list[PlainGet] = []
        begun: dict[int, Transaction] = {}
        alone = Transaction(0)
        while inbox and len(wanted) < _GROUP:
            request, received = inbox[0]
            if request.HasField("release") and wanted:
                numbers = {each.request.txn for each in wanted}
                if numbers.isdisjoint((request.txn, *request.release.txns)):
                    self._dispatch(*inbox.popleft())
                    continue
                break
            if request.txn in begun or len(self.txns) + len(begun) >= limits.SESSION_TRANSACTIONS_MAX:
                break
            if self.access.tables and request.HasField("get") and not self.access.allows(request.get.table):
                break
            plain = self.gets.read(request, received, self.txns.get(request.txn), alone)
            if plain is None:
                break
            if plain.begins and request.txn:
                begun[request.txn] = plain.transaction
            wanted.append(plain)
            inbox.popleft()
        if not wanted:
            return False
        try:
            self.gets.begin(wanted)
            frame = self.gets.answers(wanted)
        except Exception:  # of some of them: one by one
            for transaction in begun.values():
                if transaction.lease is not None:
                    self.store.release(transaction.lease)
            for plain in wanted:
                self._dispatch(plain.request, plain.received)
            return True
        finally:
            if alone.lease is not None:
                self.store.release(alone.lease)
        self.txns.update(begun)
        data = frame.SerializeToString()
        if len(data) > limits.MESSAGE_BYTES_MAX:
            for response in frame.responses:
                self._reply(response, len(response.get_each.ids) or 1)
        else:
            self._send(data, len(wanted))
        self.sessions.calls.ended("Session/get", time.monotonic() - wanted[0].received, count=len(wanted))
        return True

    def _commit_plain(self, commits: Commits) -> Sequence[session_pb2.Request]:
        """Transactions of deltas and puts, together. Gives back those that the store did not take: the catalog has
        changed under them, or they would wait for room, and this is not the place."""
        try:
            if self.sessions.stopping:
                raise stopping()
            self.access.require(Access.WRITE, "writing")
            self.sessions.commit_started(len(commits))
            stale: Sequence[int] = commits.numbers
            try:
                stale = self.store.write(
                    commits.version, commits.does, commits.tokens, commits.numbers, _Answer(self, commits)
                )
            finally:
                self.sessions.commit_ended(len(stale))
        except Exception as error:
            for number in commits.numbers:
                self._fail(session_pb2.Request(id=number), None, error)
            self.sessions.calls.ended("Session/commit", time.monotonic() - commits.received, error, len(commits))
            return ()
        left = {*stale}
        return [request for request in commits.requests if request.id in left] if left else ()

    def _release_these(self, numbers: Iterable[int], received: float) -> None:
        """What is busy is let go of when it is not."""
        for number in numbers:
            transaction = self.txns.get(number)
            if transaction is None:
                continue
            if transaction.busy:
                self._dispatch(session_pb2.Request(txn=number, release=session_pb2.Release()), received)
            else:
                self._let_go(transaction)

    def _dispatch(self, request: session_pb2.Request, received: float) -> None:
        number = request.txn
        if request.HasField("release"):
            self._release_these(request.release.txns, received)
            if not number and not request.id:
                self.sessions.calls.ended("Session/release", time.monotonic() - received)
                return
        if request.HasField("first") and (number or not request.HasField("get")):
            if number in self.txns or not number:
                self._fail(request, None, InvalidArgument(f"transaction {number} is there already, or has no number"))
                return
            self._begin_first(request, received)
        transaction = self.txns.get(number) if number else None
        if transaction is not None and request.HasField("begin"):  # looked at now: it may be busy
            self._fail(request, None, InvalidArgument(f"transaction {number} is there already, or has no number"))
            return
        if transaction is not None and transaction.busy:
            size = self._size(request)
            with self._lock:
                if transaction.busy:
                    transaction.backlog.append((request, received, size))
                    self._bytes_waiting += size
                    return
        body = request.WhichOneof("body")
        if body == "begin":
            if not number:
                self._fail(request, None, InvalidArgument(f"transaction {number} is there already, or has no number"))
                return
            transaction = Transaction(number)
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
        if transaction is not None and self._waits_for_page(request, transaction, received):
            return
        pool = self._pool(request, body) if body != "release" else None
        if pool is not None:
            if transaction is not None:
                transaction.busy = True
            self._run_later(pool, request, body, transaction, received)
        else:
            self._run(request, body, transaction, received)

    def _begin_first(self, request: session_pb2.Request, received: float) -> None:
        """Begins the request's transaction, as a Begin before it would."""
        number, plain = request.txn, len(self.txns) < limits.SESSION_TRANSACTIONS_MAX and not self.sessions.stopping
        if plain and self.client.allowance.snapshots is None and self.gets.begins_plainly(request.first):
            transaction = Transaction(number)
            try:
                (transaction.lease,) = self.store.begin_together(1)
            except KiviError:  # as told by a Begin
                pass
            else:
                self.txns[number] = transaction
                self.sessions.calls.ended("Session/begin", time.monotonic() - received)
                return
        begin = session_pb2.Request(txn=number, begin=request.first, timeout_ms=request.timeout_ms)
        request.ClearField("first")
        self._dispatch(begin, received)

    def _pool(self, request: session_pb2.Request, body: str | None) -> ThreadPoolExecutor | Waiting | None:
        """Where a request runs, or waits, that may take long; None for what is over in no time."""
        pools = self.sessions
        match body:
            case "commit" if self.store.is_full:  # it will wait for room
                return pools.full
            case "begin" if not pools.stopping and request.begin.min_snapshot > self.store.watermark():
                return pools.waiting
            case "begin" if request.begin.HasField("as_of_us"):  # reads what commit times there were
                return pools.reads
            case "outcome":
                return pools.outcomes
            case "get" if (
                not pools.stopping and not request.txn and (request.first.min_snapshot > self.store.watermark())
            ):
                return pools.waiting
            case "get" if len(request.get.keys) > _SLOW_KEYS:
                return pools.reads
            case "scan_next" if not request.operations and (request.scan_next.close or self._ahead(request)):
                return None
            case "scan_next":
                return pools.reads
            case "scan_open":
                spec = request.scan_open.spec
                if spec.HasField("where") or not (spec.prefix.values or spec.limit):
                    return pools.reads
        operations = request.operations
        if operations and (
            len(operations) > _SLOW_OPERATIONS
            or id(request) in self._payloads
            or any(operation.ByteSize() > _SLOW_BYTES or operation.stages for operation in operations)
        ):
            return pools.writes
        return None

    def _size(self, request: session_pb2.Request) -> int:
        """The bytes of a request that is not yet run."""
        _, payload = self._payloads.get(id(request), (None, b""))
        return len(payload) + request.ByteSize()

    def _run_later(
        self,
        pool: ThreadPoolExecutor | Waiting,
        request: session_pb2.Request,
        body: str | None,
        transaction: Transaction | None,
        received: float,
    ) -> None:
        size = self._size(request)
        with self._lock:
            self._bytes_waiting += size
        if not isinstance(pool, Waiting):
            pool.submit(self._run_slow, request, body, transaction, received, size)
            return
        until = received + (request.timeout_ms / 1000 if request.timeout_ms else _PATIENCE_S)
        begin = request.begin if body == "begin" else request.first
        job = functools.partial(self._run_waited, request, body, transaction, received, size, begin.min_snapshot)
        pool.add(begin.min_snapshot, until, lambda: not self._closed, lambda: self._jobs.put(job))

    def _run_slow(
        self,
        request: session_pb2.Request,
        body: str | None,
        transaction: Transaction | None,
        received: float,
        size: int,
    ) -> None:
        with self._lock:
            self._bytes_waiting -= size
        try:
            self._run(request, body, transaction, received)
        finally:
            if transaction is not None:
                self._drain(transaction)

    def _run_waited(
        self,
        request: session_pb2.Request,
        body: str | None,
        transaction: Transaction | None,
        received: float,
        size: int,
        ts: int,
    ) -> None:
        """Goes on with a request whose snapshot is there, or will not be in time, or whose server stops."""
        with self._lock:
            self._bytes_waiting -= size
        if ts > (watermark := self.store.watermark()) and not self.sessions.stopping:
            error = Unavailable(f"the snapshot {ts} is not readable yet; the watermark is {watermark}")
            self._fail(request, transaction, error)
            self.sessions.calls.ended(f"Session/{body}", time.monotonic() - received, error)
        elif (pool := self._pool(request, body)) is not None:
            self._run_later(pool, request, body, transaction, received)
            return
        else:
            self._run(request, body, transaction, received)
        if transaction is not None:
            self._drain(transaction)

    def _ahead(self, request: session_pb2.Request) -> Future[Page] | None:
        """The page that it asks for, if that was read ahead, or is just now."""
        transaction = self.txns.get(request.txn)
        pages = transaction.scans.get(request.scan_next.scan) if transaction is not None else None
        return pages.ahead if pages is not None else None

    def _waits_for_page(self, request: session_pb2.Request, transaction: Transaction, received: float) -> bool:
        """Whether its page is being read: then it is the first of the backlog until that is done."""
        ahead = self._ahead(request) if request.HasField("scan_next") and not request.scan_next.close else None
        if ahead is None or ahead.done():
            return False
        with self._lock:
            transaction.busy = True
            transaction.backlog.appendleft((request, received, 0))
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
                request, received, size = transaction.backlog.popleft()
                self._bytes_waiting -= size
            body = request.WhichOneof("body")
            pool = self._pool(request, body)
            if body != "release" and self.txns.get(transaction.number) is not transaction:
                self._fail(request, None, SnapshotTooOld(f"transaction {transaction.number} has ended"))
            elif self._waits_for_page(request, transaction, received):
                return
            elif pool is not None:
                self._run_later(pool, request, body, transaction, received)
                return
            else:
                self._run(request, body, transaction, received)

    def _run(
        self, request: session_pb2.Request, body: str | None, transaction: Transaction | None, received: float
    ) -> None:
        try:
            if request.timeout_ms and time.monotonic() - received > request.timeout_ms / 1000:
                raise Unavailable("the request's time ran out before its work began; nothing was done")
            if self._closed and body != "release":
                return
            if transaction is not None and transaction.failed is not None and body != "release":
                if body == "commit":  # its last request: a client sends no release after it
                    self.txns.pop(transaction.number, None)
                    self._end(transaction)
                raise transaction.failed
            getattr(self, f"_do_{body}", self._do_nothing)(request, transaction)
            if body != "commit":  # which has not ended
                took = time.monotonic() - received
                self.sessions.calls.ended(f"Session/{body}", took)
                if took > self.sessions.calls.slow_s:
                    self.sessions.calls.slow(f"Session/{body}", took, self._named(request), self.client.name)
        except BaseException as error:
            self._fail(request, transaction, error)
            self.sessions.calls.ended(f"Session/{body}", time.monotonic() - received, error)


class _Answer:
    """Tells a session what became of its plain commits: one message for all that entered, by the log's thread."""

    __slots__ = ("_commits", "_session")

    def __init__(self, session: Session, commits: Commits) -> None:
        self._session, self._commits = session, commits

    def entered(self, part: Writes, unknown: CommitUnknown | None) -> None:
        session, commits = self._session, self._commits
        try:
            if unknown is None:
                frame = commits.answers(part.tags, part.first)
                session._send(frame.SerializeToString(), part.members)
            else:
                for number, token in zip(part.tags, part.tokens, strict=True):
                    error = CommitUnknown(unknown.message, token=token)
                    session._fail(session_pb2.Request(id=number), None, error)
            took = time.monotonic() - commits.received
            session.sessions.calls.ended("Session/commit", took, unknown, part.members)
        finally:
            session.sessions.commit_ended(part.members)

    def apart(self, number: int, outcome: Outcome) -> None:
        session = self._session
        try:
            request = session_pb2.Request(id=number)
            if outcome.error is not None:
                session._fail(request, None, outcome.error)
            else:
                session._succeed(request, None, commit=session_pb2.CommitReply(commit_ts=outcome.commit_ts))
            took = time.monotonic() - self._commits.received
            session.sessions.calls.ended("Session/commit", took, outcome.error)
        finally:
            session.sessions.commit_ended(1)


async def _next_frame(context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
    data: Any = await context.read()
    return None if data is grpc.aio.EOF else data
