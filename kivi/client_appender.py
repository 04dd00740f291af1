"""What both appenders share: events in column buffers, and futures that share their batch's outcome.

An event is validated and converted when it is appended, so that a bad one is refused alone and never
fails the batch it would have travelled in. A batch has one outcome (it is one transaction), and a
future is a light view of it: a lock and a condition per event would cost more than the event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kivi.errors import SchemaError, Unavailable
from kivi.schema import TableSchema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["EVENTS_BUFFERED_MAX", "AppendFuture", "Columns", "Pending"]

EVENTS_BUFFERED_MAX: Final = 100_000  # events of one appender that are not durable yet; then append() waits


class Columns:
    """Events of one table, column by column."""

    def __init__(self, schema: TableSchema) -> None:
        self.schema = schema
        self.count = 0
        self._values: list[list[Any]] = [[] for _ in schema.columns]
        self._convert = [(column.name, column.type, column.name == schema.event_time) for column in schema.columns]
        self._names = frozenset(column.name for column in schema.columns)

    def append(self, event: Mapping[str, Any]) -> None:
        """All of the event, or nothing and SchemaError or InvalidArgument."""
        if not self._names.issuperset(event):
            unknown = sorted(event.keys() - self._names)
            raise SchemaError(
                f"event table {self.schema.name!r} has no column {unknown[0]!r}; "
                f"it has {', '.join(sorted(self._names))}"
            )
        row: list[Any] = []
        for name, type_, is_time in self._convert:
            value = event.get(name)
            if value is None:
                if is_time:
                    raise SchemaError(f"an event of {self.schema.name!r} needs its event time {name!r}")
                row.append(None)
            else:
                stored = type_.to_stored(value, f"column {name!r}")
                row.append(type_.from_stored(stored) if type_.name == "decimal" else stored)
        for values, value in zip(self._values, row, strict=True):
            values.append(value)
        self.count += 1

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

    __slots__ = ("_callbacks", "_done", "_lock", "commit_ts", "error")

    def __init__(self) -> None:
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
            callback(future)

    def on_done(self, callback: Callable[[AppendFuture], Any], future: AppendFuture) -> None:
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append((callback, future))
                return
        callback(future)


class AppendFuture:
    """One event's outcome: used like a ``concurrent.futures.Future``."""

    __slots__ = ("_pending",)

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def done(self) -> bool:
        return self._pending.done()

    def cancelled(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> int:
        """The commit timestamp, once the event is durable and visible. Raises what the append raised."""
        self._pending.wait(timeout)
        if self._pending.error is not None:
            raise self._pending.error
        return self._pending.commit_ts

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._pending.wait(timeout)
        return self._pending.error

    def add_done_callback(self, fn: Callable[[AppendFuture], Any]) -> None:
        """``fn(self)`` once done, on whichever thread finds out; it must be quick and not raise."""
        self._pending.on_done(fn, self)


def closed() -> Unavailable:
    return Unavailable("the appender is closed")
