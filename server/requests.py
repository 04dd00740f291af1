"""A session's requests, one method each: what a client asks for, asked of the store.

Which thread runs them, and in which order, is ``kivi_server.session``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Final

from kivi_server import limits
from kivi_server.asked import Asked
from kivi_server.auth import Access, Grant
from kivi_server.clients import Client
from kivi_server.pages import Pages, followed
from kivi_server.row_groups import RowGroups
from kivi_server.sessions import Sessions
from kivi_server.sql_tables import SqlTables
from kivi_server.status import told

from kivi.errors import CommitUnknown, InvalidArgument, KiviError, NotFound, RowExists, Unavailable
from kivi.model.tenants import Tenant
from kivi.store.checks import check_tenant
from kivi.store.facade import Answer, Commit, Lease, Outcome, Txn
from kivi.wire.codec import to_table
from kivi.wire.v1 import session_pb2

__all__ = ["SLOW_OPERATIONS", "Requests", "Transaction", "stopping"]

SLOW_OPERATIONS: Final = 256
"""A transaction of more is for a pool."""

Tell = Callable[[Outcome], None]
_READING: Final = frozenset({session_pb2.Operation.KIND_INSERT, session_pb2.Operation.KIND_UNSPECIFIED})


def own_tokens(request: session_pb2.Request, tenant: Tenant) -> None:
    """Makes the request tokens that a tenant names its own (``Tenant.own_token``)."""
    match request.WhichOneof("body"):
        case "commit":
            request.commit.token = tenant.own_token(request.commit.token)
        case "commit_each":
            request.commit_each.tokens[:] = [tenant.own_token(token) for token in request.commit_each.tokens]
        case "outcome":
            request.outcome.token = tenant.own_token(request.outcome.token)


def stopping() -> Unavailable:
    return Unavailable("the server is stopping: connect again in a moment", stopping=True)


class Transaction:
    """One of a session's transactions or snapshots."""

    __slots__ = ("backlog", "busy", "deferred", "failed", "lease", "number", "owner", "scans", "shared", "txn")

    def __init__(self, number: int, *, deferred: bool = False) -> None:
        self.number = number
        self.deferred = deferred  # its inserts, as in ``Txn``
        self.lease: Lease | None = None
        self.txn: Txn | None = None
        self.shared = b""
        self.owner = False  # of the shared snapshot: releasing it ends it for everyone
        self.failed: BaseException | None = None
        self.busy = False
        self.backlog: deque[Asked] = deque()
        self.scans: dict[int, Pages] = {}

    @property
    def start_ts(self) -> int:
        """Its snapshot; 0 if it has none."""
        return self.lease.ts if self.lease is not None else 0

    def close_scan(self, number: int) -> None:
        if (pages := self.scans.pop(number, None)) is not None:
            pages.close()

    def close_scans(self) -> None:
        for number in list(self.scans):
            self.close_scan(number)


class Requests(ABC):
    """The transactions of one session, and what is done in them. ``_do_*`` run on the event loop or in a pool."""

    def __init__(self, sessions: Sessions, access: Grant, client: Client) -> None:
        self.sessions = sessions
        self.store = sessions.store
        self.translator = sessions.translator
        self.access = access
        self.client = client
        self.name = secrets.token_bytes(16)
        self.txns: dict[int, Transaction] = {}
        self._closed = False
        self._lock = threading.Lock()  # of the transactions' busy flags and backlogs, and the number of scans
        self._scans = 0

    @abstractmethod
    def _reply(self, response: session_pb2.Response, answers: int = 1, bodies: Sequence[Any] = ()) -> None:
        """Sends an answer to so many requests."""

    @abstractmethod
    def _fail(self, request: session_pb2.Request, transaction: Transaction | None, error: BaseException) -> None:
        """Answers it with an error."""

    def _succeed(
        self, asked: Asked, transaction: Transaction | None, *, bodies: Sequence[Any] = (), **body: Any
    ) -> None:
        """Answers it."""
        if asked.request.id:
            start_ts = transaction.start_ts if transaction is not None else 0
            self._reply(session_pb2.Response(id=asked.request.id, start_ts=start_ts, **body), bodies=bodies)

    def _do_nothing(self, asked: Asked, transaction: Transaction | None) -> None:
        raise InvalidArgument("the request has no body")

    def _begun(self, transaction: Transaction | None) -> Transaction:
        if transaction is None or transaction.lease is None:
            raise InvalidArgument("this request belongs to a transaction, and names none")
        return transaction

    def _do_begin(self, asked: Asked, transaction: Transaction | None) -> None:
        assert transaction is not None
        request = asked.request
        begin = request.begin
        self._has_none(request, "a Begin")
        if self.sessions.stopping:
            raise stopping()
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else None
        ttl_s = begin.ttl_ms / 1000 if begin.ttl_ms else None
        bound_s = begin.max_staleness_us / 1e6 if begin.HasField("max_staleness_us") else None
        if begin.lease or begin.shared:  # which show all rows, to whoever has their name
            self.access.require_all_rows("a shared snapshot")
        if begin.lease:
            transaction.shared = begin.lease
            transaction.lease = self.sessions.find_shared(begin.lease)
        elif self._is_pin(begin) and (pin := self.store.begin_shared(timeout_s, ttl_s, bound_s)) is not None:
            transaction.shared, transaction.lease = pin
            transaction.owner = True
        else:
            self.sessions.check_snapshots(self.client)
            transaction.lease = self.store.begin(
                as_of_ts=begin.as_of_ts if begin.HasField("as_of_ts") else None,
                as_of_us=begin.as_of_us if begin.HasField("as_of_us") else None,
                min_snapshot=begin.min_snapshot or None,
                max_staleness_s=bound_s,
                fresh=begin.fresh,
                timeout_s=timeout_s,
                ttl_s=ttl_s,
                tenant=self.access.tenant,
            )
            if self._closed:  # the stream ended while this waited
                self.store.release(transaction.lease)
                return
            if begin.shared:
                transaction.shared, transaction.owner = self.sessions.share(transaction.lease, self.client), True
        self._succeed(asked, transaction, begin=session_pb2.BeginReply(lease=transaction.shared))

    @staticmethod
    def _is_pin(begin: session_pb2.Begin) -> bool:
        """Whether all nodes of a cluster keep what it begins: a shared snapshot that is not of the past."""
        return begin.shared and not (begin.HasField("as_of_ts") or begin.HasField("as_of_us"))

    def _apply(self, asked: Asked, transaction: Transaction) -> None:
        """The request's operations. Any failure but a failed insert dooms the transaction."""
        request = asked.request
        if not request.operations:
            return
        try:
            self.access.require(Access.WRITE, "writing", *{operation.table for operation in request.operations})
            self.client.check_writes()
            txn = self._writing(transaction)
            for operation in request.operations:
                self.translator.apply(txn, operation, asked.bodies)
        except RowExists:
            raise
        except BaseException as error:
            transaction.failed = error
            raise

    def _writing(self, transaction: Transaction) -> Txn:
        if transaction.txn is None:
            if transaction.shared:
                raise InvalidArgument("a shared snapshot is read only")
            transaction.txn = self.store.transaction(transaction.lease)
            transaction.txn.deferred = transaction.deferred
        return transaction.txn

    def _has_none(self, request: session_pb2.Request, body: str) -> None:
        if request.operations:
            raise InvalidArgument(f"{body} has no operations: send them with another request of their transaction")

    def _do_apply(self, asked: Asked, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(asked, transaction)
        self._succeed(asked, transaction)

    def _do_get(self, asked: Asked, transaction: Transaction | None) -> None:
        if transaction is None:
            self._get_alone(asked)
            return
        transaction = self._begun(transaction)
        self._apply(asked, transaction)
        get = asked.request.get
        if len(get.keys) > limits.GET_KEYS_MAX:
            raise limits.exceeded("get_keys_max", limits.GET_KEYS_MAX, len(get.keys), "keys of one read")
        self.access.require(Access.READ, "reading", get.table)
        schema = self.translator.schema(get.table, get.table_id, transaction.lease)
        keys = [self.translator.key(schema, key.values) for key in get.keys]
        columns = self.translator.columns(schema, get.columns, get.known_columns)
        if transaction.txn is not None:
            rows = transaction.txn.get(schema, keys, columns)
        else:
            assert transaction.lease is not None
            rows = self.store.get(transaction.lease, schema, keys, columns)
        reply = self.translator.rows(schema, columns, rows)
        if columns is None and not self.store.has_bounded_rows(get.table):
            self.sessions.row_sizes.answered(schema.id, len(keys), reply.ByteSize())
        self._succeed(asked, transaction, get=reply)

    def _get_alone(self, asked: Asked) -> None:
        """A Get without a transaction: a snapshot for it alone."""
        request = asked.request
        if self.sessions.stopping:
            raise stopping()
        if not request.id:
            return  # nobody would get it
        first = request.first
        only = session_pb2.Begin(min_snapshot=first.min_snapshot, fresh=first.fresh)
        if first.HasField("max_staleness_us"):
            only.max_staleness_us = first.max_staleness_us
        if request.operations or first != only:
            raise InvalidArgument(
                "a Get without a transaction has no operations, and in `first` only how new it has to be: begin one"
            )
        transaction = Transaction(0)
        transaction.lease = self.store.begin(
            min_snapshot=only.min_snapshot or None,
            max_staleness_s=only.max_staleness_us / 1e6 if only.HasField("max_staleness_us") else None,
            fresh=only.fresh,
            timeout_s=request.timeout_ms / 1000 if request.timeout_ms else None,
            tenant=self.access.tenant,
        )
        try:
            self._do_get(asked, transaction)
        finally:
            self.store.release(transaction.lease)

    def _do_retract(self, asked: Asked, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(asked, transaction)
        spec = asked.request.retract.spec
        self.access.require(Access.WRITE, "writing", spec.table)
        schema = self.translator.schema(spec.table, spec.table_id, transaction.lease)
        events = self._writing(transaction).retract(schema, self.translator.scan(schema, spec, reads=True))
        self._succeed(asked, transaction, retract=session_pb2.RetractReply(events=events))

    def _do_define(self, asked: Asked, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(asked, transaction)
        define = asked.request.define
        self.access.require(Access.READ, "reading", define.table)
        schema = self.translator.schema(define.table, define.table_id, transaction.lease)
        self._succeed(asked, transaction, table=to_table(schema))

    def _do_scan_open(self, asked: Asked, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(asked, transaction)
        opening = asked.request.scan_open
        spec = opening.spec
        self.access.require(Access.READ, "reading", spec.table)
        schema = self.translator.schema(spec.table, spec.table_id, transaction.lease)
        wanted = self.translator.scan(schema, spec, reads=True)
        if opening.row_groups:
            wanted = dataclasses.replace(wanted, stored_bytes=limits.PAGE_BYTES)
        if transaction.txn is not None:
            batches = transaction.txn.scan(schema, wanted)
        else:
            assert transaction.lease is not None
            if opening.rows and (few := self.store.few_rows(transaction.lease, schema, wanted)) is not None:
                self._succeed(asked, transaction, page=self.translator.few_rows(schema, wanted.columns, *few))
                return
            batches = self.store.scan(transaction.lease, schema, wanted)
        rows = min(opening.page_rows or limits.PAGE_ROWS, limits.PAGE_ROWS_MAX)
        page = session_pb2.ScanPage(shards=wanted.shards or 0)
        pages = Pages(
            self.translator.pages(batches, rows), self.sessions.pages_ahead, self.sessions.scans, self.client.reading
        )
        data = self._first_page(transaction, pages, page)
        if isinstance(batches, Answer):
            if self.access.tenant is None:  # it says how many rows of all were read
                page.explanation = batches.explanation(self.access.allows)
            if batches.complete_since_us is not None:
                page.complete_since_us = batches.complete_since_us
        self._answer_page(asked, transaction, page, data)

    def _first_page(self, transaction: Transaction, pages: Pages, page: session_pb2.ScanPage) -> Any:
        """The first page's rows; ``page`` gets the number under which the transaction has the others, if any."""
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
        page.scan = number
        return data

    def _answer_page(self, asked: Asked, transaction: Transaction, page: session_pb2.ScanPage, data: Any) -> None:
        bodies = (data,) if data else ()
        if isinstance(data, RowGroups):
            page.row_groups.extend(data.groups)
            bodies = tuple(data.bodies)
        self._succeed(asked, transaction, page=page, bodies=bodies)

    def _do_sql(self, asked: Asked, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(asked, transaction)
        self.access.require(Access.READ, "reading")
        lease, request = transaction.lease, asked.request
        if transaction.txn is not None:
            raise InvalidArgument("SQL is asked in a snapshot, not in a transaction")
        assert lease is not None
        shared = self.store.shared_events(lease)
        question = SqlTables(self.translator, lambda: self.access, lease, shared).question(
            request.sql.text, request.sql.parameters
        )
        left_s = asked.received + request.timeout_ms / 1000 - time.monotonic() if request.timeout_ms else None

        def answer() -> Iterator[Any]:
            with shared:
                yield from self.sessions.workers.answer(question, left_s)
                shared.check()

        pages = Pages(followed(answer()), self.sessions.pages_ahead, self.sessions.sql_pages, self.client.reading)
        page = session_pb2.ScanPage()
        self._answer_page(asked, transaction, page, self._first_page(transaction, pages, page))

    def _do_scan_next(self, asked: Asked, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(asked, transaction)
        request = asked.request
        number = request.scan_next.scan
        pages = transaction.scans.get(number)
        if request.scan_next.close:
            transaction.close_scan(number)
            self._succeed(asked, transaction, page=session_pb2.ScanPage())
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
        self._answer_page(asked, transaction, session_pb2.ScanPage(scan=number if more else 0), data)
        if more and transaction.txn is None:  # a scan of a transaction that writes looks at what that holds
            pages.read_ahead()

    def _do_commit(self, asked: Asked, transaction: Transaction | None) -> None:
        operations = asked.request.operations
        if operations and operations[0].kind == session_pb2.Operation.KIND_APPEND_EACH:
            self._append_each(asked)
        elif (commit := self._prepared(asked, transaction)) is not None:
            self._commit_together([commit])

    def _prepared(self, asked: Asked, transaction: Transaction | None) -> Commit | None:
        """What the store is to commit; None if it has answered. It ends the transaction, also if it raises."""
        request = asked.request
        if transaction is None:  # it begins and commits in one step
            if self.sessions.stopping:
                raise stopping()
            transaction = Transaction(0)
            if any(operation.kind in _READING or operation.insert for operation in request.operations):
                transaction.lease = self.store.begin(tenant=self.access.tenant)
            else:
                transaction.txn = self.store.blind_transaction(self.access.tenant)
                transaction.lease = transaction.txn.lease
        transaction = self._begun(transaction)
        self.txns.pop(transaction.number, None)
        transaction.close_scans()
        token, batch = request.commit.token or None, None
        if request.commit.HasField("batch"):
            batch = (request.commit.batch.scope, request.commit.batch.sequence)
        try:
            if token is not None or batch is not None:  # a token is kept, and answers whoever comes with it later
                self.access.require(Access.WRITE, "committing under a token")
            if batch is not None:
                self.access.require_all_rows("a batch token")
            txn = self._writing(transaction)
            txn.deferred = True  # no answer is due before the token has been looked up
            self._apply(asked, transaction)
            if self.client.allowance.meters_writes:
                self.client.check_writes()  # of many transactions that began together the first ones enter
                self.client.take_writes(txn.brought, txn.nbytes)
        except BaseException as error:
            self._end(transaction)
            if isinstance(error, NotFound) and self._committed_before(asked, transaction, batch):
                return None
            raise
        return Commit(txn, token, batch, self._told(asked, transaction))

    def _committed_before(
        self, asked: Asked, transaction: Transaction | None, batch: tuple[str, int] | None = None
    ) -> bool:
        """Answers a retry of what committed before its table was dropped."""
        first = self.store.committed_at(token=asked.request.commit.token or None, batch=batch)
        if first is not None:
            self._succeed(asked, transaction, commit=session_pb2.CommitReply(commit_ts=first))
        return first is not None

    def _append_each(self, asked: Asked) -> None:
        """An append whose events are each a transaction of its own."""
        if self.sessions.stopping:
            raise stopping()
        request = asked.request
        commit = request.commit
        if len(request.operations) > 1 or request.txn or not commit.token or commit.HasField("batch"):
            raise InvalidArgument("KIND_APPEND_EACH is alone in a commit without a transaction, under a request token")
        (operation,) = request.operations
        self.access.require(Access.WRITE, "writing", operation.table)
        self.client.check_writes()
        try:
            schema = self.translator.schema(operation.table, operation.table_id, tenant=self.access.tenant)
        except NotFound:
            if self._committed_before(asked, None):
                return
            raise
        batch = self.translator.batch(schema, asked.bodies.take(operation.arrow_bytes))
        check_tenant(self.access.tenant, schema, batch)
        self.client.take_writes(batch.num_rows, batch.nbytes)
        done = self._told(asked, None)
        append = functools.partial(
            self.store.append_each, schema, batch, token=commit.token, drop_late=operation.drop_late, done=done
        )
        self.sessions.commit_started()
        if self._or_unknown([done], append, may_wait=False) is False:
            self._commit_in(self.sessions.full, [done], append)

    def _commit_together(self, commits: Sequence[Commit]) -> None:
        """Large ones, and those of stages, which may wait for a feature (``kivi.log.features``), by a pool; and what
        has to wait for room by another one."""
        self._commit_unless_full(self._small_of(commits))

    def _small_of(self, commits: Sequence[Commit]) -> list[Commit]:
        """Those that are left to be entered; the others are with a pool."""
        self.sessions.commit_started(len(commits))
        small = list[Commit]()
        for commit in commits:
            txn = commit.txn
            is_small = txn.operations <= SLOW_OPERATIONS and not (txn.in_columns or txn.retracted or txn.staged)
            if not is_small or self.store.asks_others(txn):
                self._commit_in(self.sessions.writes, [commit.done], self._commit_unless_full, [commit])
            else:
                small.append(commit)
        return small

    def _commit_unless_full(self, commits: Sequence[Commit]) -> None:
        tells = [commit.done for commit in commits]
        if left := self._or_unknown(tells, self.store.commit_together, commits, may_wait=False):
            self._commit_in(self.sessions.full, [commit.done for commit in left], self.store.commit_together, left)

    def _commit_in(self, pool: Executor, tells: Sequence[Tell], work: Callable[..., object], *arguments: Any) -> None:
        self._or_unknown(tells, pool.submit, self._or_unknown, tells, work, *arguments)

    def _or_unknown(self, tells: Sequence[Tell], work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Does work on commits. What it raises is told to those that have no outcome yet: after a fault of ours some
        may have entered, and what a pool refuses for want of a thread another of its threads may still do."""
        try:
            return work(*arguments, **named)
        except BaseException as error:
            why = told(error, "a commit", self.name.hex()[:8])
            if why is not error:
                why = CommitUnknown(f"{why.message}; outcome() tells whether it has committed")
            for tell in tells:
                tell(Outcome(None, why))
            return None

    def _told(self, asked: Asked, transaction: Transaction | None) -> Tell:
        """Answers with the first outcome that it is told."""
        token, once = asked.request.commit.token or None, threading.Lock()

        def done(outcome: Outcome) -> None:
            if not once.acquire(blocking=False):
                return
            try:
                self.sessions.calls.ended("Session/commit", time.monotonic() - asked.received, outcome.error)
                if outcome.error is None:
                    self._succeed(asked, transaction, commit=session_pb2.CommitReply(commit_ts=outcome.commit_ts or 0))
                    return
                error = outcome.error
                if isinstance(error, CommitUnknown) and error.token is None:
                    error = CommitUnknown(error.message, token=token)
                self._fail(asked.request, transaction, error)
                if transaction is not None:
                    self._end(transaction)  # the store has, but for a fault
            finally:
                self.sessions.commit_ended()

        return done

    def _do_release(self, asked: Asked, transaction: Transaction | None) -> None:
        for name in asked.request.release.leases:
            self.access.require_all_rows("a shared snapshot")
            self._end_shared(name)
        self._let_go(transaction)
        self._succeed(asked, transaction)

    def _let_go(self, transaction: Transaction | None) -> None:
        if transaction is not None:
            self.txns.pop(transaction.number, None)
            if transaction.owner:
                self._end_shared(transaction.shared)
            self._end(transaction)

    def _end_shared(self, name: bytes) -> None:
        """For everyone. In a cluster this node may not have come to where it began."""
        found = self.sessions.shared.pop(name, None)
        if found is not None:
            self.store.release(found[0])
        else:
            self.store.renew_shared(name, 0)

    def _do_renew(self, asked: Asked, transaction: Transaction | None) -> None:
        transaction = self._begun(transaction)
        self._apply(asked, transaction)
        assert transaction.lease is not None
        ttl_ms = asked.request.renew.ttl_ms
        ttl_s = ttl_ms / 1000 if ttl_ms else None
        if transaction.lease.pinned:
            self.store.renew_shared(transaction.shared, ttl_s)
        else:
            self.store.renew(transaction.lease.id, ttl_s)
        self._succeed(asked, transaction)

    def _do_outcome(self, asked: Asked, transaction: Transaction | None) -> None:
        self.access.require(Access.WRITE, "asking for an outcome, which ends the attempt")
        self._has_none(asked.request, "an Outcome")
        wanted = asked.request.outcome
        state, commit_ts = self.store.outcome(wanted.token, wanted.place if wanted.HasField("place") else None)
        reply = session_pb2.OutcomeReply(state=f"STATE_{state.upper()}", commit_ts=commit_ts or 0)
        self._succeed(asked, transaction, outcome=reply)

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
