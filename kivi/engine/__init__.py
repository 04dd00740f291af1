"""The engine: ordered bytes on disk, and nothing else.

Comes in: batches of keys and values. Goes out: the same, in order. May not touch: anything but ``errors``. Begin
reading here; ``rocks`` is the engine on disk, ``memory`` one for tests.

Everything above stores rows, versions and event blocks as keys and values that this room does not
understand. It knows no tables, no timestamps and no transactions; isolation between transactions
comes from timestamps inside the keys and values, never from an engine snapshot.

What an engine promises, and where it is enforced:

* **Order.** Keys are compared as unsigned bytes; `scan` returns them in that order.
* **Atomic batches.** A `WriteBatch` is there whole or not at all, for readers (a scan, a get) and
  after a crash.
* **A scan is a point in time**: the moment `scan()` is *called*, not the first `next()`. A caller
  may therefore capture something else right before or after the call and reason about both.
* **Writes are not durable, `flush` is.** There is no write-ahead log here, because the commit log
  (`kivi.log`) is one already. After a crash the engine holds exactly the effects of *some prefix*
  of its batches, in the order of the `write` calls, at least those that returned before the last
  completed `flush` began. The caller puts its log position into the batches, reads it back after
  the crash, and replays the log from there.
* **Threads.** Every method may be called by any thread at any time; one scan object belongs to one
  thread at a time (but not always to the thread that made it).

One suite, ``tests/engine/test_contract.py``, runs over every engine. `kivi.engine.memory` keeps a
store in a dictionary and can crash on purpose; `kivi.engine.rocks` is RocksDB, imported only when
it is asked for by its full name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

__all__ = ["Engine", "WriteBatch"]


class WriteBatch:
    """Puts and deletes that take effect together; a later one of the same key wins. Ranges are deleted before them.

    Iterating gives ``(key, value)`` in the order they were added, with the value None for a delete; ``ranges`` are not
    among them.
    """

    __slots__ = ("ops", "owed", "ranges", "size_bytes")

    def __init__(self) -> None:
        self.ops: list[tuple[bytes, bytes | None]] = []
        self.ranges: list[tuple[bytes, bytes]] = []
        self.owed: dict[bytes, bytes | None] = {}
        """The ends of the ranges of `owe`, by their starts."""
        self.size_bytes = 0
        """Bytes of all keys and values; what a caller limits a batch by."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set the key to the value."""
        self.ops.append((key, value))
        self.size_bytes += len(key) + len(value)

    def put_all(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set each key to its value."""
        self.ops += zip(keys, values, strict=True)
        self.size_bytes += sum(map(len, keys)) + sum(map(len, values))

    def delete(self, key: bytes) -> None:
        """Remove the key; nothing happens if it is not there."""
        self.ops.append((key, None))
        self.size_bytes += len(key)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Remove every key with ``start <= key < end`` that is there before this batch.

        It costs what removing one key does, and the next reader some microseconds for each that is not on disk yet.
        """
        self.ranges.append((start, end))
        self.size_bytes += len(start) + len(end)

    def owe(self, start: bytes, end: bytes | None) -> None:
        """What this batch deletes between these keys takes space that is owed to the disk until `Engine.give_back`.

        An engine on disk notes it with the batch, so it is still owed after a crash. Ranges that begin at the same key
        end at the same.
        """
        self.owed[start] = end

    def __len__(self) -> int:
        return len(self.ops) + len(self.ranges)

    def __iter__(self) -> Iterator[tuple[bytes, bytes | None]]:
        return iter(self.ops)


class Engine(ABC):
    """Ordered keys and values; see the module's docstring for what it promises.

    Any method raises `DataLoss` when it meets damaged files, `ResourceExhausted` when the disk is
    full, and `Unavailable` for other storage errors and once the engine is closed.
    """

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """The value of the key, or None."""

    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of the keys, in the order of the keys.

        Not a point in time: two of the keys may be read on either side of a concurrent batch.
        """

    @abstractmethod
    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with ``start <= key < end`` (None: to the last key) in byte order, or backwards.

        The view is fixed when this is called. It pins files and memory until the iterator is
        exhausted or dropped, so do not keep one for longer than a request. If the engine is closed
        first, the next step raises `Unavailable`; an iterator never ends early as if it were done.
        """

    def scan_records(
        self, start: bytes, end: bytes | None, rows: int, value_bytes: int | Callable[[bytes], int]
    ) -> Iterator[list[bytes]]:
        """The pairs of `scan`, forward, each as one record: the value, and right behind it the key.

        In lists of ``rows`` records, the last of fewer; none is empty. For callers that read much. All values have
        ``value_bytes``, or as many as that gives of a record; the caller has to look whether that is so, as from
        another one on it gets anything. An engine may keep records as such, and reads them without a Python statement
        for each. Nothing else runs in the process while a list is read, so one of more than some thousand rows is felt
        by others. ``rows`` is at least 1.
        """
        return _in_lists((value + key for key, value in self.scan(start, end)), rows)

    @abstractmethod
    def keys(self, start: bytes, end: bytes | None, rows: int) -> Iterator[list[bytes]]:
        """The keys of `scan`, forward, in lists of ``rows`` (the last of fewer; none is empty).

        It looks at keys alone, a quarter of a microsecond each, and says nothing of damage.
        """

    @abstractmethod
    def every(self, start: bytes, end: bytes | None, step: int) -> Iterator[bytes]:
        """Of the keys with ``start <= key < end`` in byte order those after ``step``, two ``step``, ... others.

        For cutting a range into parts: it looks at keys alone, a quarter of a microsecond each, and says nothing
        of damage. Nothing else runs in the process for ``step`` keys at a time.
        """

    @abstractmethod
    def write(self, batch: WriteBatch) -> None:
        """Apply the batch atomically; visible when this returns, durable after a later `flush`.

        The order of concurrent calls is the order in which they take effect.
        """

    @abstractmethod
    def flush(self) -> None:
        """Return once every batch whose `write` returned before this call is durable."""

    @abstractmethod
    def give_back(self, start: bytes, end: bytes | None) -> None:
        """Much was deleted between these keys: have its space leave the disk soon, in the background. A hint.

        From then on it is no longer owed (`WriteBatch.owe`), but for what was deleted meanwhile.
        """

    @abstractmethod
    def give_back_owed(self) -> None:
        """Have what batches of before the engine was opened owe leave the disk likewise, and nothing else."""

    @abstractmethod
    def checkpoint(self, path: str) -> None:
        """Make a consistent copy of everything written so far at ``path``, which must not exist."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Figures for metrics: sizes end in ``_bytes``, everything else is a count."""

    @abstractmethod
    def close(self) -> None:
        """Release the files. Idempotent; open scans fail from now on."""


def _in_lists(records: Iterator[bytes], rows: int) -> Iterator[list[bytes]]:
    while part := list(islice(records, rows)):
        yield part
