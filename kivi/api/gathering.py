"""What both appenders share: their bounds, and for threads the batch that gathers and the futures that look at it.

An event is validated and packed when it is appended (``kivi.arrow.packed_events``), so that a bad one is refused alone
and never fails the batch it would have travelled in; for the same reason a batch is bounded in bytes as well as in
events. A batch has one outcome, and a future is a light view of it: it is one transaction, or with ``each`` one for
each event, of which the first timestamp says all.

What only the table's aggregates know (a group column that is null, a key that is too long, floats that add up to more
than there is), and whether an event lies below the retention floor, is found when the batch commits, which is then
refused as a whole. Its halves are tried by themselves, and so on, until the bad ones are alone (``Halves``): each event
has the outcome of the part that it went in. After 64 bad events of a batch the rest is not halved any more: a writer
whose events are often late asks for ``late="drop"``, which commits the batch at once.

Measured, CPU for making one, settling it and asking for its result while 32,000 are there (CPython 3.11): a
``concurrent.futures.Future`` 3.8 us, an ``AppendFuture`` 0.40 us. One that is no subclass, with slots and a
``__class__`` that says it is one: 0.37 us, and an append over gRPC 1.8 us instead of 2.0 us. Not worth the lie.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, NamedTuple

from kivi.arrow.packed_events import Row
from kivi.errors import (
    CommitUnknown,
    InvalidArgument,
    KiviError,
    OutOfRange,
    ResourceExhausted,
    SchemaError,
    Unavailable,
)

__all__ = [
    "BATCH_BYTES",
    "BYTES_BUFFERED_MAX",
    "EVENTS_BUFFERED_MAX",
    "AppendFuture",
    "Gathered",
    "Halves",
    "Outcome",
    "Settled",
]

Outcome = int | BaseException
"""A commit timestamp, or why there is none."""

EVENTS_BUFFERED_MAX: Final = 100_000  # events of one appender that are not durable yet; then append() waits
BYTES_BUFFERED_MAX: Final = 64 << 20  # ... or this many bytes of them
BATCH_BYTES: Final = 16 << 20  # a batch leaves when it has grown to this, whatever max_events says

_ALONE_MAX: Final = 64  # events of one batch that are found to be bad, each alone; more are not looked for

_log = logging.getLogger("kivi.appender")


class Settled(NamedTuple):
    """A part of a batch that was appended by itself: its rows from ``first`` to ``end``, under ``token``.

    ``each``: its events are each a transaction. Then ``outcome`` is that of the first.
    """

    first: int
    end: int
    token: str
    outcome: Outcome
    each: bool

    def of(self, row: int) -> Outcome:
        """The outcome of a row of the batch."""
        if not self.each:
            return self.outcome
        if isinstance(self.outcome, int):
            return self.outcome + row - self.first
        if isinstance(self.outcome, CommitUnknown):
            return CommitUnknown(self.outcome.message, token=self.token, place=row - self.first)
        return self.outcome

    def place_of(self, row: int) -> int | None:
        """Which member of the token the row is."""
        return row - self.first if self.each else None


class Halves:
    """The parts in which a batch of ``rows`` is to be appended: ``next`` says which, ``settle`` how that ended."""

    def __init__(self, rows: int, *, each: bool) -> None:
        self._left = [(0, rows)]
        self._each = each
        self._alone = 0
        self.settled: list[Settled] = []
        """In order."""

    def next(self) -> tuple[int, int] | None:
        return self._left[-1] if self._left else None

    def settle(self, token: str, outcome: Outcome) -> None:
        first, end = self._left.pop()
        if _is_of_content(outcome) and self._alone < _ALONE_MAX:
            if end - first > 1:
                middle = (first + end) // 2
                self._left += [(middle, end), (first, middle)]  # in order: the first half is next
                return
            self._alone += 1
        self.settled.append(Settled(first, end, token, outcome, self._each))


def _is_of_content(outcome: Outcome) -> bool:
    """Whether it was refused for what is in it, of which a half may be good."""
    if isinstance(outcome, ResourceExhausted):
        return outcome.details.get("limit") == "key_bytes_max"
    return isinstance(outcome, KiviError) and isinstance(outcome, (InvalidArgument, OutOfRange, SchemaError))


class Gathered:
    """One batch of the appender for threads: the rows that gather in it, then its outcome to come."""

    __slots__ = (  # a future is made and resolved in a seventh less time
        "_callbacks",
        "_places",
        "_settled",
        "_traceback",
        "_waiters",
        "first_at",
        "is_done",
        "large_bytes",
        "limit",
        "lock",
        "rows",
        "size",
        "stamp_of",
    )

    def __init__(self) -> None:
        # While it gathers: see ``kivi.api.appender``, "Without a lock".
        self.rows: list[Row] = []
        self.limit = 1
        self.size: int | None = None
        self.first_at: float | None = None
        self.large_bytes = 0
        # Its outcome.
        self.lock = threading.RLock()  # of the callbacks, and while one of its futures becomes a whole Future
        self.is_done = False
        self._settled: Sequence[Settled] = ()
        self._places: dict[int, int] | None = None  # of rows by their id, which they had while they were in ``rows``
        self.stamp_of: Callable[[int], int] | None = None  # the timestamp of a row, by its id, if all entered together
        self._traceback: TracebackType | None = None
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[tuple[Callable[[AppendFuture], Any], AppendFuture]] = []

    def wait(self, timeout: float | None = None) -> None:
        """Until it is done. Raises TimeoutError."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if self.is_done:  # looked at after joining the waiters: whoever resolves it sees the waiter, or this sees it
            return
        limit_s = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if not waiter.acquire(timeout=limit_s) and not self.is_done:
            with suppress(ValueError):
                self._waiters.remove(waiter)
            raise TimeoutError("the event is not durable yet")

    def resolve(self, settled: Sequence[Settled], ids: Sequence[int]) -> None:
        """``ids`` of its rows, in order: where it matters which row it is."""
        first = settled[0]
        with self.lock:
            self._settled = settled
            if isinstance(outcome := first.outcome, BaseException):
                self._traceback = outcome.__traceback__
            elif len(settled) == 1:
                stamps = dict(zip(ids, range(outcome, outcome + len(ids)), strict=True))
                self.stamp_of = stamps.__getitem__ if first.each else lambda _: outcome
            if ids and self.stamp_of is None:
                self._places = dict(zip(ids, range(len(ids)), strict=True))
            self.is_done = True
            callbacks, self._callbacks = self._callbacks, []
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()
        for callback, future in callbacks:
            _called(callback, future)

    def forked(self, error: BaseException) -> None:
        """This is a child: whoever asks here is told ``error``. Its callbacks are the parent's, which calls them."""
        self.lock = threading.RLock()  # one that no thread holds which is not there
        self._callbacks = []
        self.stamp_of = None
        self.resolve([Settled(0, 0, "", error, False)], ())

    def on_done(self, callback: Callable[[AppendFuture], Any], future: AppendFuture) -> None:
        with self.lock:
            if not self.is_done:
                self._callbacks.append((callback, future))
                return
        _called(callback, future)

    def settled(self, row_id: int) -> tuple[Settled, int]:
        """The part that a row went in, and its place in the batch."""
        first = self._settled[0]
        if self.stamp_of is not None and isinstance(first.outcome, int):
            return first, self.stamp_of(row_id) - first.outcome
        if self._places is None:
            return first, 0
        row = self._places[row_id]
        return self._settled[bisect_right(self._settled, row, key=attrgetter("first")) - 1], row

    def outcome(self, row_id: int) -> Outcome:
        part, row = self.settled(row_id)
        return part.of(row)

    def raised(self, error: BaseException) -> BaseException:
        """To be raised by one of many: its traceback begins anew, or each would add to it."""
        return error.with_traceback(self._traceback if error is self._settled[0].outcome else None)


def _called(callback: Callable[[AppendFuture], Any], future: AppendFuture) -> None:
    """A callback that raises keeps no other from being called: as with any Future, it is logged."""
    try:
        callback(future)
    except Exception:
        _log.exception("a callback of an append's future failed")


_OF_A_FUTURE: Final = ("_waiters", "_done_callbacks", "_result", "_exception", "_state", "_condition")


class AppendFuture(Future[int]):
    """One event's outcome: a ``concurrent.futures.Future`` that costs next to nothing until it is used as one.

    ``result``, ``exception``, ``done`` and callbacks look at the batch's outcome. What a Future keeps of its own (a
    condition, a state, waiters) is made when somebody asks for it, as ``concurrent.futures.wait`` does.
    """

    def __init__(self, pending: Gathered, row_id: int) -> None:
        self._pending = pending
        self._row_id = row_id

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there yet."""
        if name not in _OF_A_FUTURE:
            raise AttributeError(name)
        pending = self._pending
        with pending.lock:
            is_first = name not in vars(self)
            if is_first:
                whole: Future[int] = Future()
                whole.set_running_or_notify_cancel()  # an event that is on its way cannot be cancelled
                for part in _OF_A_FUTURE:
                    setattr(self, part, vars(whole)[part])
        if is_first:  # without the lock: another thread may hold the condition, and wait for the lock to make the next
            pending.on_done(_settle, self)
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        if not self.done():
            return "<AppendFuture: not durable yet>"
        return f"<AppendFuture: {self._pending.outcome(self._row_id)!r}>"

    @property
    def token(self) -> str | None:
        """The request token that the event was appended under; None until its outcome is known."""
        return self._pending.settled(self._row_id)[0].token if self._pending.is_done else None

    @property
    def place(self) -> int | None:
        """Which member of the token the event is, once its outcome is known: of an appender with ``each``; else
        None."""
        if not self._pending.is_done:
            return None
        part, row = self._pending.settled(self._row_id)
        return part.place_of(row)

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        return not self._pending.is_done

    def done(self) -> bool:
        return self._pending.is_done

    def result(self, timeout: float | None = None) -> int:
        """The commit timestamp, once the event is durable and visible. Raises what the append raised."""
        pending = self._pending
        if not pending.is_done:
            pending.wait(timeout)
        stamp_of = pending.stamp_of
        if stamp_of is not None:
            return stamp_of(self._row_id)
        outcome = pending.outcome(self._row_id)
        if isinstance(outcome, int):
            return outcome
        raise pending.raised(outcome)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        pending = self._pending
        if not pending.is_done:
            pending.wait(timeout)
        outcome = pending.outcome(self._row_id)
        return None if isinstance(outcome, int) else outcome

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """``fn(self)`` once done, on whichever thread finds out; it must be quick. What it raises is logged."""
        self._pending.on_done(fn, self)


def _settle(future: AppendFuture) -> None:
    """Gives what the batch's outcome says to the parts of a Future that were made meanwhile."""
    error = future.exception()
    if error is None:
        future.set_result(future.result())
    else:
        future.set_exception(error)


def closed(why: str = "the appender is closed") -> Unavailable:
    return Unavailable(why)
