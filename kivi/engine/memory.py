"""An engine in memory, which can crash on purpose.

It is the reference for the contract and the engine of the fast tests. Nothing is written anywhere;
"durable" means that `MemoryEngine.crash` does not take it back. Each batch since the last flush leaves
the values that it overwrote on an undo list, so a crash costs what it takes back, not the store.

Everything is done under one lock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

from sortedcontainers import SortedDict

from kivi.engine import Engine, WriteBatch
from kivi.errors import InvalidArgument, Unavailable

__all__ = ["MemoryEngine"]


class MemoryEngine(Engine):
    """Everything in a dictionary that is sorted by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: SortedDict[bytes, bytes] = SortedDict()
        self._undo: list[list[tuple[bytes, bytes | None]]] = []
        self._closed = False
        self.checkpoints: dict[str, MemoryEngine] = {}
        """The copies that `checkpoint` made, by path."""

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            self._check_open()
            return self._values.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            self._check_open()
            return [self._values.get(key) for key in keys]

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            self._check_open()
            keys = self._values.irange(start, end, inclusive=(True, False), reverse=reverse)
            view = [(key, self._values[key]) for key in keys]
        return self._steps(view)

    def _steps(self, view: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for pair in view:
            self._check_open()
            yield pair

    def keys(self, start: bytes, end: bytes | None, rows: int) -> Iterator[list[bytes]]:
        keys = (key for key, _ in self.scan(start, end))
        return iter(lambda: list(itertools.islice(keys, rows)), [])

    def every(self, start: bytes, end: bytes | None, step: int) -> Iterator[bytes]:
        return itertools.islice((key for key, _ in self.scan(start, end)), step, None, step)

    def write(self, batch: WriteBatch) -> None:
        with self._lock:
            self._check_open()
            overwritten = []
            held = itertools.chain.from_iterable(self._values.irange(*ends, (True, False)) for ends in batch.ranges)
            for key, value in [*((key, None) for key in held), *batch]:
                overwritten.append((key, self._values.get(key)))
                self._set(key, value)
            self._undo.append(overwritten)

    def _set(self, key: bytes, value: bytes | None) -> None:
        if value is not None:
            self._values[key] = value
        else:
            self._values.pop(key, None)

    def flush(self) -> None:
        with self._lock:
            self._check_open()
            self._undo.clear()

    def give_back(self, start: bytes, end: bytes | None) -> None:
        pass  # nothing that was deleted takes any space

    def give_back_owed(self) -> None:
        pass

    def checkpoint(self, path: str) -> None:
        with self._lock:
            self._check_open()
            if path in self.checkpoints:
                raise InvalidArgument(f"{path} exists: give a checkpoint a path of its own", path=path)
            copy = MemoryEngine()
            copy._values = self._values.copy()
            self.checkpoints[path] = copy

    def stats(self) -> dict[str, int]:
        with self._lock:
            size = sum(len(key) + len(value) for key, value in self._values.items())
            return {"keys": len(self._values), "live_bytes": size, "unflushed_batches": len(self._undo)}

    def close(self) -> None:
        """Keeps everything, flushed or not: `reopen` finds it, as after a clean shutdown."""
        with self._lock:
            self._closed = True

    def crash(self, keep: int = 0) -> None:
        """Go back to the last flush plus the first ``keep`` batches after it, and be open again."""
        with self._lock:
            while len(self._undo) > keep:
                for key, value in reversed(self._undo.pop()):
                    self._set(key, value)
            self._undo.clear()
            self._closed = False

    def reopen(self) -> None:
        """Be open again after `close`."""
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the engine is closed: open the store again")
