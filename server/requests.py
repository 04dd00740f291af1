"""A session's requests, one method each: what a client asks for, asked of the store.

Which thread runs them, and in which order, is ``kivi_server.session``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kivi_server import limits
from kivi_server.auth import Access, Grant
from kivi_server.clients import Client
from kivi_server.pages import Pages
from kivi_server.sessions import Sessions

from kivi.errors import CommitUnknown, InvalidArgument, KiviError, NotFound, RowExists, SnapshotTooOld, Unavailable
from kivi.store.facade import Lease, Outcome, Txn
from kivi.wire.v1 import session_pb2

__all__ = ["Requests", "Transaction", "stopping"]

_READING: Final = frozenset({session_pb2.Operation.KIND_INSERT, session_pb2.Operation.KIND_UNSPECIFIED})
_STATES: Final = {
    "committed": session_pb2.OutcomeReply.STATE_COMMITTED,
    "aborted": session_pb2.OutcomeReply.STATE_ABORTED,
    "unknown": session_pb2.OutcomeReply.STATE_UNKNOWN,
}


def stopping() -> Unavailable:
    return Unavailable("the server is stopping: connect again in a moment", stopping=True)


class Transaction:
    """One of a session's transactions or snapshots."""

    __slots__ = ("backlog", "busy", "failed", "lease", "number", "owner", "scans", "shared", "txn")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lease: Lease | None = None
        self.txn: Txn | None = None
        self.shared = b""
        self.owner = False  # of the shared snapshot: releasing it ends it for everyone
        self.failed: BaseException | None = None
        self.busy = False
        self.backlog: deque[tuple[session_pb2.Request, float, int]] = deque()  # and when it came, and its bytes
        self.scans: dict[int, Pages] = {}

    def close_scan(self, number: int) -> None:
        if (pages := self.scans.pop(number, None)) is not None:
            pages.close()

    def close_scans(self) -> None:
        for number in list(self.scans):
            self.close_scan(number)


class Requests(ABC):
    """The transactions of one session, and what is done in them. ``_do_*`` run on a worker or in a pool."""

    def __init__(self, sessions: Sessions, access: Grant, client: Client) -> None:
        self.sessions = sessions
        self.store = sessions.store
        self.translator = sessions.translator
        self.access = access
        self.client = client
        self.txns: dict[int, Transaction] = {}
        # What was cut out of a request, by that request itself, until it is answered: with it, so that no other object
        # is at its address meanwhile.
        self._payloads: dict[int, tuple[session_pb2.Request, memoryview]] = {}
        self._closed = False
        self._lock = threading.Lock()  # of the transactions' busy flags and backlogs, and the number of scans
        self._scans = 0

    @abstractmethod
    def _answer(
        self, request: session_pb2.Request, transaction: Transaction | None, **body: Any
    ) -> session_pb2.Response:
        """An answer to be filled."""

    @abstractmethod
    def _reply(self, response: session_pb2.Response) -> None:
        """Sends an answer."""

    @abstractmethod
    def _succeed(self, request: session_pb2.Request, transaction: Transaction | None, **body: Any) -> None:
        """Answers it."""

    @abstractmethod
    def _succeed_page(
        self, request: session_pb2.Request, transaction: Transaction | None, data: Any, number: int
    ) -> None:
        """Answers it with a page of a scan, an Arrow IPC stream."""

    @abstractmethod
    def _fail(self, request: session_pb2.Request, transaction: Transaction | None, error: BaseException) -> None:
        """Answers it with an error."""

    def _do_nothing(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        raise InvalidArgument("the request has no body")

    def _begun(self, transaction: Transaction | None) -> Transaction:
        if transaction is None or transaction.lease is None:
            raise InvalidArgument("this request belongs to a transaction, and names none")
        return transaction

    def _do_begin(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        assert transaction is not None
        begin = request.begin
        self._has_none(request, "a Begin")
        if self.sessions.stopping:
            raise stopping()
        if not begin.lease:
            self.sessions.check_snapshots(self.client, begin.count or 1)
        if begin.count > 1:
            self._begin_together(request, transaction)
        elif begin.lease:
            transaction.shared = begin.lease
            transaction.lease = self.sessions.find_shared(begin.lease)
        else:
            transaction.lease = self.store.begin(
                as_of_ts=begin.as_of_ts if begin.HasField("as_of_ts") else None,
                as_of_us=begin.as_of_us if begin.HasField("as_of_us") else None,
                min_snapshot=begin.min_snapshot or None,
                timeout_s=request.timeout_ms / 1000 if request.timeout_ms else None,
                ttl_s=begin.ttl_ms / 1000 if begin.ttl_ms else None,
            )
            if self._closed:  # the stream ended while this waited
                self.store.release(transaction.lease)
                return
            if begin.shared:
                transaction.shared, transaction.owner = self.sessions.share(transaction.lease, self.client), True
        self._succeed(request, transaction, begin=session_pb2.BeginReply(lease=transaction.shared))

    def _begin_together(self, request: session_pb2.Request, first: Transaction) -> None:
        begin, store = request.begin, self.store
        if begin.lease or begin.shared or begin.ttl_ms or begin.HasField("as_of_ts") or begin.HasField("as_of_us"):
            raise InvalidArgument("snapshots are begun together on the newest state only: begin this one by itself")
        more = range(first.number + 1, first.number + begin.count)
        open_ones = len(self.txns) + len(more)
        if open_ones > limits.SESSION_TRANSACTIONS_MAX:
            raise limits.exceeded(
                "session_transactions_max", limits.SESSION_TRANSACTIONS_MAX, open_ones, "open transactions"
            )
        if not self.txns.keys().isdisjoint(more):
            raise InvalidArgument(f"some of the transactions {more.start} to {more.stop - 1} are there already")
        begun = [first, *map(Transaction, more)]
        for transaction, lease in zip(begun, store.begin_together(len(begun)), strict=True):
            transaction.lease = lease
            self.txns[transaction.number] = transaction
        if self._closed:  # the stream ended while this waited
            self._release_all()

    def _apply(self, request: session_pb2.Request, transaction: Transaction) -> None:
        """The request's operations. Any failure but a failed insert dooms the transaction."""
        if not request.operations:
            return
        self.access.require(Access.WRITE, "writing", *{operation.table for operation in request.operations})
        if transaction.txn is None:
            if transaction.shared:
                raise InvalidArgument("a shared snapshot is read only")
            transaction.txn = self.store.transaction(transaction.lease)
        _, payload = self._payloads.pop(id(request), (None, None))
        try:
            for operation in request.operations:
                self.translator.apply(transaction.txn, operation, payload)
        except RowExists:
            raise
        except BaseException as error:
            transaction.failed = error
            raise

    def _has_none(self, request: session_pb2.Request, body: str) -> None:
        if request.operations:
            raise InvalidArgument(f"{body} has no operations: send them with another request of their transaction")

    def _do_apply(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(request, transaction)
        self._succeed(request, transaction)

    def _do_get(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        if transaction is None:
            self._get_alone(request)
            return
        transaction = self._begun(transaction)
        self._apply(request, transaction)
        get = request.get
        if len(get.keys) > limits.GET_KEYS_MAX:
            raise limits.exceeded("get_keys_max", limits.GET_KEYS_MAX, len(get.keys), "keys of one read")
        self.access.require(Access.READ, "reading", get.table)
        schema = self.translator.schema(get.table, get.table_id, transaction.lease)
        keys = [self.translator.key(schema, key.values) for key in get.keys]
        columns = self.translator.columns(schema, get.columns)
        if transaction.txn is not None:
            rows = transaction.txn.get(schema, keys, columns)
        else:
            assert transaction.lease is not None
            rows = self.store.get(transaction.lease, schema, keys, columns)
        self._succeed(request, transaction, get=self.translator.rows(schema, columns, rows))

    def _get_alone(self, request: session_pb2.Request) -> None:
        """A Get without a transaction: a snapshot for it alone."""
        if self.sessions.stopping:
            raise stopping()
        if not request.id:
            return  # nobody would get it
        first = request.first
        only = session_pb2.Begin(min_snapshot=first.min_snapshot, count=min(first.count, 1))
        if request.operations or first != only:
            raise InvalidArgument(
                "a Get without a transaction has no operations, and nothing in `first` but min_snapshot: begin one"
            )
        transaction = Transaction(0)
        transaction.lease = self.store.begin(
            min_snapshot=only.min_snapshot or None,
            timeout_s=request.timeout_ms / 1000 if request.timeout_ms else None,
        )
        try:
            self._do_get(request, transaction)
        finally:
            self.store.release(transaction.lease)

    def _do_scan_open(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(request, transaction)
        spec = request.scan_open.spec
        self.access.require(Access.READ, "reading", spec.table)
        schema = self.translator.schema(spec.table, spec.table_id, transaction.lease)
        wanted = self.translator.scan(schema, spec)
        if transaction.txn is not None:
            batches = transaction.txn.scan(schema, wanted)
        else:
            assert transaction.lease is not None
            if request.scan_open.rows and (few := self.store.few_rows(transaction.lease, schema, wanted)) is not None:
                if request.id:
                    packed, ts = request.scan_open.packed, transaction.lease.ts
                    self._reply(self.translator.few_rows(request.id, ts, schema, wanted.columns, few, packed))
                return
            batches = self.store.scan(transaction.lease, schema, wanted)
        rows = min(request.scan_open.page_rows or limits.PAGE_ROWS, limits.PAGE_ROWS_MAX)
        pages = Pages(self.translator.pages(batches, rows), self.sessions.pages_ahead)
        data, more = pages.next()
        number = 0
        if more:
            with self._lock:
                self._scans += 1
                number = self._scans
            open_scans = len(transaction.scans) + 1
            if open_scans > limits.SESSION_SCANS_MAX:
                raise limits.exceeded("session_scans_max", limits.SESSION_SCANS_MAX, open_scans, "open scans")
            transaction.scans[number] = pages
        self._succeed_page(request, transaction, data, number)

    def _do_scan_next(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(request, transaction)
        number = request.scan_next.scan
        pages = transaction.scans.get(number)
        if request.scan_next.close:
            transaction.close_scan(number)
            self._succeed(request, transaction, page=session_pb2.ScanPage())
            return
        if pages is None:
            raise NotFound(f"scan {number} has ended, or was never begun")
        try:
            data, more = pages.next()
        except BaseException:
            transaction.close_scan(number)
            raise
        if not more:
            transaction.close_scan(number)
        self._succeed_page(request, transaction, data, number if more else 0)
        if more and transaction.txn is None:  # a scan of a transaction that writes looks at what that holds
            pages.read_ahead(self.sessions.reads)

    def _do_commit(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        if request.operations and request.operations[0].kind == session_pb2.Operation.KIND_APPEND_EACH:
            self._append_each(request)
            return
        one_shot = transaction is None
        if one_shot:
            if self.sessions.stopping:
                raise stopping()
            transaction = Transaction(0)
            if any(operation.kind in _READING for operation in request.operations):
                transaction.lease = self.store.begin()
            else:
                transaction.txn = self.store.blind_transaction()
                transaction.lease = transaction.txn.lease
        transaction = self._begun(transaction)
        self.txns.pop(transaction.number, None)
        transaction.close_scans()
        token = request.commit.token or None
        batch = None
        if request.commit.HasField("batch"):
            batch = (request.commit.batch.scope, request.commit.batch.sequence)
        try:
            if token is not None or batch is not None:  # a token is kept, and answers whoever comes with it later
                self.access.require(Access.WRITE, "committing under a token")
            self._apply(request, transaction)
            if transaction.txn is None:
                if transaction.shared:
                    raise InvalidArgument("a shared snapshot is read only")
                transaction.txn = self.store.transaction(transaction.lease)
        except NotFound:  # a retry of what committed, after its table was dropped, has an answer all the same
            self._end(transaction)
            first = self.store.committed_at(token=token, batch=batch)
            if first is None:
                raise
            self._succeed(request, transaction, commit=session_pb2.CommitReply(commit_ts=first))
            return
        except BaseException:
            self._end(transaction)
            raise
        assert transaction.txn is not None
        commit = functools.partial(self.store.commit, transaction.txn, token=token, batch=batch)
        self._committing(request, transaction, commit)

    def _append_each(self, request: session_pb2.Request) -> None:
        """An append whose events are each a transaction of its own."""
        if self.sessions.stopping:
            raise stopping()
        commit = request.commit
        if len(request.operations) > 1 or request.txn or not commit.token or commit.HasField("batch"):
            raise InvalidArgument("KIND_APPEND_EACH is alone in a commit without a transaction, under a request token")
        (operation,) = request.operations
        self.access.require(Access.WRITE, "writing", operation.table)
        _, payload = self._payloads.pop(id(request), (None, None))
        try:
            schema = self.translator.schema(operation.table, operation.table_id)
        except NotFound:  # as in ``_do_commit``
            first = self.store.committed_at(token=commit.token)
            if first is None:
                raise
            self._succeed(request, None, commit=session_pb2.CommitReply(commit_ts=first))
            return
        batch = self.translator.batch(schema, operation.arrow if payload is None else payload)
        append = functools.partial(
            self.store.append_each, schema, batch, token=commit.token, drop_late=operation.drop_late
        )
        self._committing(request, None, append)

    def _committing(
        self, request: session_pb2.Request, transaction: Transaction | None, commit: Callable[..., None]
    ) -> None:
        """Has the store commit; the answer is the outcome."""
        token = request.commit.token or None
        self.sessions.commit_started()
        began = time.monotonic()

        def done(outcome: Outcome) -> None:
            self.sessions.calls.ended("Session/commit", time.monotonic() - began, outcome.error)
            try:
                if outcome.error is None:
                    reply = session_pb2.CommitReply(commit_ts=outcome.commit_ts or 0)
                    self._succeed(request, transaction, commit=reply)
                else:
                    error = outcome.error
                    if isinstance(error, CommitUnknown) and error.token is None:
                        error = CommitUnknown(error.message, token=token)
                    self._fail(request, transaction, error)
            finally:
                self.sessions.commit_ended()

        try:
            commit(done=done)
        except BaseException:  # a fault of ours, before the log: ``done`` was not called and never will be
            self.sessions.commit_ended()
            if transaction is not None:
                self._end(transaction)
            raise

    def _do_release(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        self._let_go(transaction)
        self._succeed(request, transaction)

    def _let_go(self, transaction: Transaction | None) -> None:
        if transaction is not None:
            self.txns.pop(transaction.number, None)
            if transaction.owner:
                found = self.sessions.shared.pop(transaction.shared, None)
                if found is not None:
                    self.store.release(found[0])
            self._end(transaction)

    def _do_renew(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(request, transaction)
        assert transaction.lease is not None
        ttl_ms = request.renew.ttl_ms
        self.store.renew(transaction.lease.id, ttl_ms / 1000 if ttl_ms else None)
        self._succeed(request, transaction)

    def _do_outcome(self, request: session_pb2.Request, transaction: Transaction | None) -> None:
        self.access.require(Access.WRITE, "asking for an outcome, which ends the attempt")
        self._has_none(request, "an Outcome")
        asked = request.outcome
        state, commit_ts = self.store.outcome(asked.token, asked.place if asked.HasField("place") else None)
        reply = session_pb2.OutcomeReply(state=_STATES[state], commit_ts=commit_ts or 0)
        self._succeed(request, transaction, outcome=reply)

    # -- the end --------------------------------------------------------------------------------

    def _end(self, transaction: Transaction) -> None:
        transaction.close_scans()
        if transaction.shared or transaction.lease is None:
            return
        if transaction.txn is not None:
            transaction.txn.rollback()
        else:
            self.store.release(transaction.lease)

    def _release_all(self) -> None:
        for transaction in list(self.txns.values()):
            self.txns.pop(transaction.number, None)
            with contextlib.suppress(KiviError):
                self._end(transaction)

    def lease_of(self, number: int) -> Lease:
        """The snapshot of one of this session's transactions, for the Scan call."""
        transaction = self.txns.get(number)
        if transaction is None or transaction.lease is None:
            raise SnapshotTooOld(f"transaction {number} has ended, or was never begun")
        return transaction.lease
