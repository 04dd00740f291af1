"""What both appenders share: events in column buffers, and futures that share their batch's outcome.

An event is validated and converted when it is appended, so that a bad one is refused alone and never
fails the batch it would have travelled in; for the same reason a batch is bounded in bytes as well as
in events. A batch has one outcome (it is one transaction), and a future is a light view of it: a lock
and a condition per event would cost more than the event.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from kivi.errors import ResourceExhausted, SchemaError, Unavailable
from kivi.schema import TableSchema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BATCH_BYTES", "BYTES_BUFFERED_MAX", "EVENTS_BUFFERED_MAX", "AppendFuture", "Columns", "Pending"]

EVENTS_BUFFERED_MAX: Final = 100_000  # events of one appender that are not durable yet; then append() waits
BYTES_BUFFERED_MAX: Final = 64 << 20  # ... or this many bytes of them
BATCH_BYTES: Final = 16 << 20  # a batch leaves when it has grown to this, whatever max_events says
_CELL_BYTES: Final = 8  # of a column whose values have one width

_log = logging.getLogger("kivi.appender")


class Columns:
    """Events of one table, column by column: ``count`` of them, of about ``nbytes`` bytes."""

    def __init__(self, schema: TableSchema, value_bytes_max: int) -> None:
        self.schema = schema
        self.count = 0
        self.nbytes = 0
        self._value_bytes_max = value_bytes_max
        self._values: list[list[Any]] = [[] for _ in schema.columns]
        self._convert = [(column.name, column.type, column.name == schema.event_time) for column in schema.columns]
        self._names = frozenset(column.name for column in schema.columns)

    def append(self, event: Mapping[str, Any]) -> None:
        """All of the event, or nothing and SchemaError, InvalidArgument or ResourceExhausted."""
        if not self._names.issuperset(event):
            unknown = sorted(event.keys() - self._names)
            raise SchemaError(
                f"event table {self.schema.name!r} has no column {unknown[0]!r}; "
                f"it has {', '.join(sorted(self._names))}"
            )
        row: list[Any] = []
        nbytes = len(self._convert) * _CELL_BYTES
        for name, type_, is_time in self._convert:
            value = event.get(name)
            if value is None:
                if is_time:
                    raise SchemaError(f"an event of {self.schema.name!r} needs its event time {name!r}")
                row.append(None)
            else:
                stored = type_.to_stored(value, f"column {name!r}")
                if type_.name in ("string", "bytes"):
                    nbytes += self._sized(name, stored)
                row.append(type_.from_stored(stored) if type_.name == "decimal" else stored)
        for values, value in zip(self._values, row, strict=True):
            values.append(value)
        self.count += 1
        self.nbytes += nbytes

    def _sized(self, name: str, value: str | bytes) -> int:
        """The bytes of a value, unless they are too many."""
        size = len(value) if isinstance(value, bytes) or value.isascii() else len(value.encode())
        if size > self._value_bytes_max:
            raise ResourceExhausted(
                f"a value of column {name!r} has {size} bytes, over the limit of {self._value_bytes_max}",
                column=name,
                limit="value_bytes_max",
                maximum=self._value_bytes_max,
            )
        return size

    def batch(self) -> pa.RecordBatch:
        import pyarrow as pa

        from kivi.arrow.columns import arrow_type

        arrays = [
            pa.array(values, type=arrow_type(column.type))
            for values, column in zip(self._values, self.schema.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in self.schema.columns])


class Pending:
    """The outcome to come of one batch."""

    __slots__ = ("_callbacks", "_done", "_lock", "becoming", "commit_ts", "error")

    def __init__(self) -> None:
        self.becoming = threading.RLock()  # held while one of its futures becomes a whole Future
        self.commit_ts = 0
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[tuple[Callable[[AppendFuture], Any], AppendFuture]] = []

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None) -> None:
        if not self._done.wait(timeout):
            raise TimeoutError("the event is not durable yet")

    def resolve(self, commit_ts: int, error: BaseException | None) -> None:
        with self._lock:
            self.commit_ts, self.error = commit_ts, error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback, future in callbacks:
            _called(callback, future)

    def on_done(self, callback: Callable[[AppendFuture], Any], future: AppendFuture) -> None:
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append((callback, future))
                return
        _called(callback, future)


def _called(callback: Callable[[AppendFuture], Any], future: AppendFuture) -> None:
    """A callback that raises keeps no other from being called: as with any Future, it is logged."""
    try:
        callback(future)
    except Exception:
        _log.exception("a callback of an append's future failed")


class AppendFuture(Future[int]):
    """One event's outcome: a ``concurrent.futures.Future`` that costs next to nothing until it is used as one.

    ``result``, ``exception``, ``done`` and callbacks look at the batch's outcome. What a Future keeps of its own (a
    condition, a state, waiters) is made when somebody asks for it, as ``concurrent.futures.wait`` does.
    """

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def __getattr__(self, name: str) -> Any:
        if name not in ("_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"):
            raise AttributeError(name)
        with self._pending.becoming:
            if "_condition" not in self.__dict__:
                super().__init__()
                self.set_running_or_notify_cancel()  # an event that is on its way cannot be cancelled
                self._pending.on_done(_settle, self)
        return self.__dict__[name]

    def __repr__(self) -> str:
        if not self.done():
            return "<AppendFuture: not durable yet>"
        return f"<AppendFuture: {self._pending.error or self._pending.commit_ts!r}>"

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        return not self._pending.done()

    def done(self) -> bool:
        return self._pending.done()

    def result(self, timeout: float | None = None) -> int:
        """The commit timestamp, once the event is durable and visible. Raises what the append raised."""
        self._pending.wait(timeout)
        if self._pending.error is not None:
            raise self._pending.error
        return self._pending.commit_ts

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._pending.wait(timeout)
        return self._pending.error

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


def closed() -> Unavailable:
    return Unavailable("the appender is closed")
