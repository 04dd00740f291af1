"""The one writer: what is ready together becomes one transaction, without the spans that were taken before.

::

    take       requests that wait, up to ROWS_MAX spans     (event loop)
    prepare    ids of the last commit -> window; table as it is now; leave out what is known or repeated, and what is
               late if that is to fail -> one blind transaction of appends          (a thread)
    commit     wait for its outcome, however long it takes  (the log's thread calls back)
    answer     each request: stored, dropped, repeated, rejected

No step of one turn overlaps one of the next; that is the lock under which ``window`` decides (the invariants are in
``kivi_server.otlp``). Requests that come meanwhile are decoded and wait, and go together in the next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from kivi_server.metrics import NO_SPANS
from kivi_server.otlp.recall import recall
from kivi_server.otlp.spans import Spans, gathered
from kivi_server.otlp.tables import INVOCATIONS_KIND, DoesNotFit, Kind, ensure, misfit
from kivi_server.sessions import Sessions

from kivi.arrow.id_window import Ids, Window, first_ones
from kivi.arrow.records import event_batch
from kivi.errors import (
    CommitUnknown,
    InvalidArgument,
    KiviError,
    NotFound,
    Retryable,
    SnapshotTooOld,
    Unavailable,
)
from kivi.model.schema import TableSchema
from kivi.store.facade import Outcome, Txn
from kivi.store.retention import is_late
from kivi.store.shared_window import SharedWindow

__all__ = ["Intake", "Taken"]

T = TypeVar("T")
_log = logging.getLogger("kivi.server")
_ROWS_MAX: Final = 100_000  # in one commit, unless one request brings more
_TRIES: Final = 5
_LATE: Final = "it ended before the table's retention floor"


@dataclass(slots=True)
class Taken:
    """The outcome of one request's spans: how many are new, were dropped as late, were there before, and cannot be
    used, and why."""

    stored: int = 0
    dropped: int = 0
    repeated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Request:
    spans: Spans
    answer: asyncio.Future[Taken]


class Intake:
    """Of one server. ``put`` and ``run`` belong to its event loop."""

    def __init__(
        self,
        sessions: Sessions,
        table: str,
        retention_s: float,
        window_s: float,
        spans_max: int,
        *,
        drop_late: bool = False,
        kind: Kind = INVOCATIONS_KIND,
    ) -> None:
        if not 1 <= window_s <= 86_400:
            raise InvalidArgument(f"otlp_window_s is between 1 s and a day, not {window_s:g} s")
        self.sessions = sessions
        self.store = sessions.store
        self.table, self.kind = table, kind
        self.window: Window | SharedWindow = Window(window_s, spans_max)
        self._window_s, self._spans_max = window_s, spans_max
        self._retention_s = retention_s
        self._drop_late = drop_late
        self._rows_max = min(_ROWS_MAX, self.store.settings.max_append_rows)
        self._bytes_max = self.store.settings.max_transaction_bytes // 2
        self._source: TableSchema | None = None  # whose ids the window holds
        self._fresh: list[Ids] = []  # of the last turn
        self._waiting: deque[_Request] = deque()
        self._awake = asyncio.Event()
        self._failure: KiviError | None = None
        self._writing: asyncio.Task[None] | None = None
        self._was_unfit = False
        self._counts = {name: 0 for name in NO_SPANS if name.startswith((f"otlp_{kind.item}s_", "otlp_commits"))}

    def stats(self) -> dict[str, int | float]:
        """Those of ``kivi_server.metrics`` that are about its spans, or points."""
        return {
            **self._counts,
            f"otlp_window_{self.kind.item}s": len(self.window),
        }

    @property
    def is_unfit(self) -> bool:
        """Whether spans were refused because the table does not fit, and still would be."""
        try:
            return self._was_unfit and bool(misfit(self.store.table(self.table).description(), self.kind))
        except NotFound:
            return False

    # -- requests ---------------------------------------------------------------------------------

    def check(self, spans: Spans) -> None:
        """Raises InvalidArgument for more than one transaction may bring."""
        settings = self.store.settings
        if len(spans) > settings.max_append_rows or spans.nbytes > settings.max_transaction_bytes:
            raise InvalidArgument(
                f"one export brings {len(spans):,} events of {spans.nbytes:,} bytes, more than one transaction may "
                f"({settings.max_append_rows:,}, {settings.max_transaction_bytes:,}): send smaller batches"
            )

    async def put(self, spans: Spans) -> Taken:
        """Answers once these spans are durable and visible.

        Whoever stops waiting changes nothing: the request is committed, and repeating it is harmless.
        """
        request = _Request(spans, asyncio.get_running_loop().create_future())
        self.sessions.commit_started()
        self._waiting.append(request)
        self._awake.set()
        return await request.answer

    def left_out(self, spans: Spans, why: str = "") -> Taken:
        """All of them, for a reason, or where there is none among them: nothing is committed, or made, for them."""
        taken = Taken(rejected=spans.rejected + Counter({why: spans.items}))
        self._count(spans, taken)
        return taken

    def _count(self, spans: Spans, taken: Taken) -> None:
        outcomes = f"otlp_{self.kind.item}s_"
        self._counts[f"{outcomes}stored"] += taken.stored
        self._counts[f"{outcomes}dropped"] += taken.dropped
        self._counts[f"{outcomes}repeated"] += taken.repeated
        self._counts[f"{outcomes}rejected"] += taken.rejected.total()
        self._counts[f"{outcomes}passed_over"] += spans.passed_over

    def _answer(self, request: _Request, taken: Taken | None, error: BaseException | None = None) -> None:
        self.sessions.commit_ended()
        if taken is not None:
            self._count(request.spans, taken)
        if request.answer.done():  # nobody waits any more
            return
        if error is not None:
            request.answer.set_exception(error)
        elif taken is not None:
            request.answer.set_result(taken)

    # -- the writer -------------------------------------------------------------------------------

    async def open(self) -> None:
        """The table, created if it is missing, and the window as it was. Before anything is listened to.

        One that does not fit stops nobody: the log says why, and its spans are refused.
        """
        with contextlib.suppress(DoesNotFit):
            await self._in_thread(self._schema)

    def start(self) -> None:
        self._writing = asyncio.create_task(self.run())

    def stop(self) -> None:
        if self._writing is not None:
            self._writing.cancel()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._awake.wait()
            group = self._next()
            if not self._waiting:
                self._awake.clear()
            await self._write(group)

    def _next(self) -> list[_Request]:
        group: list[_Request] = []
        rows = nbytes = 0
        while self._waiting:
            request = self._waiting[0]
            rows, nbytes = rows + len(request.spans), nbytes + request.spans.nbytes
            if group and (rows > self._rows_max or nbytes > self._bytes_max):
                break
            group.append(self._waiting.popleft())
        return group

    async def _write(self, group: list[_Request]) -> None:
        try:
            taken = await self._committed(group)
        except Exception as error:
            if len(group) > 1 and not isinstance(error, Unavailable) and self._failure is None:
                for request in group:  # the fault of one is not the others'
                    await self._write([request])
                return
            for request in group:
                self._answer(request, None, error)
        else:
            for request, each in zip(group, taken, strict=True):
                self._answer(request, each)

    async def _committed(self, group: list[_Request]) -> list[Taken]:
        for _ in range(_TRIES):
            if self._failure is not None:
                raise self._failure
            txn, ids, taken = await self._in_thread(self._prepared, group)
            if txn is None:
                return taken()
            outcome = await self._outcome(txn)
            if outcome.error is None:
                self._counts["otlp_commits"] += 1
                self._fresh.append(ids)
                return taken()
            if isinstance(outcome.error, CommitUnknown):
                self._failure = Unavailable(
                    "the commit log failed, and whether the last events are in it is not known: the server has to be "
                    "started again"
                )
                raise self._failure
            if not _passes(outcome.error):
                raise outcome.error
        raise Unavailable(f"table {self.table!r} changes all the time: send them again in a moment")

    async def _outcome(self, txn: Txn) -> Outcome:
        """However long it takes: what comes next depends on it."""
        settled = Future[Outcome]()
        settled.set_running_or_notify_cancel()  # a writer that is cancelled does not cancel it: the log will set it
        await self._in_thread(lambda: self.store.commit(txn, done=settled.set_result))
        return await asyncio.wrap_future(settled)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        pool = self.sessions.full if self.store.is_full else self.sessions.writes
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    # -- in a thread, one at a time ----------------------------------------------------------------

    def _prepared(self, group: list[_Request]) -> tuple[Txn | None, Ids, Callable[[], list[Taken]]]:
        """Its transaction, if anything is new, the ids in that, and what each request is answered after it."""
        schema = self._schema()
        window = self.window
        if isinstance(window, Window):  # a cluster's knows it from the log
            for ids in self._fresh:
                window.add(ids)
            window.expire()
        self._fresh = []
        table, ids = gathered([request.spans for request in group])
        floor_us = self.store.floor(schema)
        fresh = np.ones(len(ids), bool) if self._drop_late else ~_late(table, schema, floor_us)
        fresh[fresh] = first_ones(ids[fresh]) & ~window.known(ids[fresh])
        txn = None
        if fresh.any():
            window.check_room(int(fresh.sum()))
            txn = self.store.blind_transaction()
            txn.once = window.once if isinstance(window, SharedWindow) else None
            table = table.select([name for name in table.column_names if name in schema.by_name])
            batch = event_batch(schema, table if fresh.all() else table.filter(pa.array(fresh)))
            txn.append(schema, batch, drop_late=self._drop_late)

        def taken() -> list[Taken]:
            late = _late(table, schema, floor_us if txn is None else txn.floors.get(schema.id, floor_us))
            left_out = late & fresh if self._drop_late else late
            said, end = list[Taken](), 0
            for request in group:
                rows = slice(end, end := end + len(request.spans))
                items = request.spans.are_items()
                each, count = Taken(rejected=Counter(request.spans.rejected)), int((left_out[rows] & items).sum())
                each.stored = int(((fresh & ~late)[rows] & items).sum())
                each.repeated = int(items.sum()) - count - each.stored
                if self._drop_late:
                    each.dropped = count
                elif count:
                    each.rejected[_LATE] += count
                said.append(each)
            return said

        return txn, ids[fresh], taken

    def _schema(self) -> TableSchema:
        """The table as it is now, with the window of it."""
        try:
            schema = self.store.table(self.table)
        except NotFound:
            schema = None
        if schema is None or self._source is None or schema.id != self._source.id:
            try:
                schema = ensure(self.store, self.table, self._retention_s, self.kind)
            except DoesNotFit as error:
                if not self._was_unfit:  # once, and not for each export
                    _log.error("%ss are refused: %s", self.kind.item, error.message)
                self._was_unfit = True
                raise
            self._was_unfit = False
            self._fresh = []  # are in the table
            self.window = self._window_of(schema)
            _log.info(
                "OpenTelemetry's %ss go to %s; %d of its last ids are known",
                self.kind.item,
                schema.name,
                len(self.window),
            )
        self._source = schema
        return schema

    def _window_of(self, table: TableSchema) -> Window | SharedWindow:
        shared = self.store.shared_window(table, self.kind.ids, self._window_s, self._spans_max)
        if shared is not None:
            return shared
        window = Window(self._window_s, self._spans_max)
        recall(self.store, table, window, self.kind.ids)
        return window


def _passes(error: KiviError) -> bool:
    """Whether another attempt, with the table and its floor as they are by then, may do better."""
    return isinstance(error, (Retryable, NotFound, SnapshotTooOld)) or "floor_us" in error.details


def _late(table: pa.Table, schema: TableSchema, floor_us: int | None) -> npt.NDArray[np.bool_]:
    """Which events lie below the retention floor."""
    if floor_us is None:
        return np.zeros(table.num_rows, bool)
    return np.asarray(is_late(table, schema, floor_us))
