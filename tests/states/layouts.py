"""Three layouts of wide states, measured (decision 0034): ``python -m tests.states.layouts [rows]``.

Each row gets 1,000 log-normal values (sigma 1) in ten commits of 100, in RocksDB with the options of the store.
*bytes*: of a row on disk, compacted. *fold*: reading the state of a row, adding the 100 values of a commit, writing
it. *read*: one row by key, p99 or the count. What arrives is in codes and ranks already, as in a delta run.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from kivi.engine import WriteBatch
from kivi.engine.rocks import RocksEngine
from kivi.model.quantiles import Quantiles, rank_of, value_of
from kivi.model.states import KINDS, State, precision_of
from kivi.model.types import ColumnType
from kivi.states.distinct import estimated
from kivi.states.kinds import Observed, joined, offsets_of
from kivi.states.registry import kind_of

CELLS = 32
COMMITS, VALUES = 10, 100
SCALE, P = 6, precision_of(0.01)
TYPE = ColumnType("int64")
KINDS_OF = {
    "quantiles": kind_of(State(KINDS["quantiles"], "quantiles", TYPE, None, SCALE)),
    "distinct": kind_of(State(KINDS["distinct"], "distinct", TYPE, None, P)),
}


def key(row: int) -> bytes:
    return b"r" + row.to_bytes(8, "big")


class Layout(ABC):
    """``items``: of one commit, in order of rows, VALUES for each."""

    def __init__(self, engine: RocksEngine, measure: str, rows: int) -> None:
        self.engine, self.measure, self.rows = engine, measure, rows

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        batch = WriteBatch()
        batch.put_all(keys, values)
        self.engine.write(batch)

    @abstractmethod
    def fold(self, items: Any) -> None: ...

    @abstractmethod
    def read(self, row: int) -> float: ...


class Encoded(Layout):
    """The state as bytes in one cell: what the store does."""

    def fold(self, items: Any) -> None:
        kind, rows = KINDS_OF[self.measure], self.rows
        keys = [key(row) for row in range(rows)]
        old, offsets = kind.decode([value or b"" for value in self.engine.get_many(keys)])
        owner = np.concatenate([np.repeat(np.arange(rows), np.diff(offsets)), np.repeat(np.arange(rows), VALUES)])
        order = np.argsort(owner, kind="stable")
        both = tuple(part[order] for part in joined([old, items]))
        offsets = offsets_of(np.bincount(owner, minlength=rows))
        self.put(keys, kind.encode(*kind.reduce(both, offsets)))

    def read(self, row: int) -> float:
        state = self.engine.get(key(row)) or b""
        if self.measure == "distinct":
            return float(KINDS_OF["distinct"].values([state])[0])
        return Quantiles.from_state(SCALE, state).quantile(0.99) or 0.0


class Cells(Layout):
    """Base of the two layouts of counters and registers: (cell, amount) of the items."""

    @property
    def dtype(self) -> Any:
        return np.dtype("<i8") if self.measure == "quantiles" else np.dtype("u1")

    def cells(self, items: Any) -> tuple[Any, Any]:
        if self.measure == "quantiles":
            return items[0].astype(np.int64), np.ones(len(items[0]), np.int64)
        return items[0].astype(np.int64) >> 6, items[0].astype(np.uint8) & np.uint8(63)

    def add(self, table: Any, at: Any, amounts: Any) -> None:
        (np.add if self.measure == "quantiles" else np.maximum).at(table, at, amounts)

    def value(self, cells: Any, table: Any) -> float:
        if self.measure == "distinct":
            return float(estimated([0, *np.bincount(table, minlength=64)[1:].tolist()], P))
        rank = rank_of(0.99, int(table.sum()))
        return value_of(int(cells[np.searchsorted(np.cumsum(table), rank)]), SCALE)


class Companions(Cells):
    """Rows of 32 cells beside the aggregate's row: its key, and the number of the range."""

    def fold(self, items: Any) -> None:
        cells, amounts = self.cells(items)
        owner = np.repeat(np.arange(self.rows), VALUES) << 32 | cells // CELLS
        ranges, which = np.unique(owner, return_inverse=True)
        keys = [key(number >> 32) + (number & 0xFFFFFFFF).to_bytes(4, "big") for number in ranges.tolist()]
        width = CELLS * self.dtype.itemsize
        found = b"".join([value or bytes(width) for value in self.engine.get_many(keys)])
        table = np.frombuffer(found, self.dtype).copy()
        self.add(table, which * CELLS + cells % CELLS, amounts)
        data = table.tobytes()
        self.put(keys, [data[i : i + width] for i in range(0, len(data), width)])

    def read(self, row: int) -> float:
        found = [(int.from_bytes(k[9:], "big"), v) for k, v in self.engine.scan(key(row), key(row + 1))]
        cells = np.repeat([number * CELLS for number, _ in found], CELLS) + np.tile(np.arange(CELLS), len(found))
        return self.value(cells, np.frombuffer(b"".join([value for _, value in found]), self.dtype))


class Dense(Cells):
    """All cells of the least range that holds every value, in one row, as an array."""

    def __init__(self, engine: RocksEngine, measure: str, rows: int) -> None:
        super().__init__(engine, measure, rows)
        self.low, self.span = 0, 2**P

    def fold(self, items: Any) -> None:
        cells, amounts = self.cells(items)
        keys = [key(row) for row in range(self.rows)]
        width = self.span * self.dtype.itemsize
        found = b"".join([value or bytes(width) for value in self.engine.get_many(keys)])
        table = np.frombuffer(found, self.dtype).copy()
        self.add(table, np.repeat(np.arange(self.rows), VALUES) * self.span + cells - self.low, amounts)
        data = table.tobytes()
        self.put(keys, [data[i : i + width] for i in range(0, len(data), width)])

    def read(self, row: int) -> float:
        table = np.frombuffer(self.engine.get(key(row)) or b"", self.dtype)
        return self.value(np.arange(self.span) + self.low, table)


def measured(
    layout: type[Layout], measure: str, rows: int, commits: list[Any]
) -> tuple[float, float, float, list[float]]:
    """Bytes, microseconds to fold, microseconds to read, and what some rows read."""
    path = tempfile.mkdtemp(prefix="layouts-")
    try:
        engine = RocksEngine(path)
        made = layout(engine, measure, rows)
        if isinstance(made, Dense) and measure == "quantiles":
            codes = np.concatenate([items[0] for items in commits])
            made.low, made.span = int(codes.min()), int(codes.max() - codes.min()) + 1
        began = time.perf_counter()
        for items in commits:
            made.fold(items)
        folded = (time.perf_counter() - began) / rows / len(commits)
        engine.flush()
        engine._db.compact_range(None, None)
        stats = engine.stats()
        size = stats["sst_bytes"] + stats["blob_live_bytes"] - stats["blob_garbage_bytes"]
        began = time.perf_counter()
        read = [made.read(row) for row in range(0, rows, 3)]
        took = (time.perf_counter() - began) / len(read)
        engine.close()
        return size / rows, folded * 1e6, took * 1e6, read
    finally:
        shutil.rmtree(path)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    chance = np.random.default_rng(1)
    for measure, kind in KINDS_OF.items():
        values = [(chance.lognormal(11, 1, rows * VALUES)).astype(np.int64) for _ in range(COMMITS)]
        if measure == "distinct":
            values = [chance.integers(0, 2**62, rows * VALUES) for _ in range(COMMITS)]
        commits = [kind.of_events(Observed(part)) for part in values]
        expected = None
        for layout in (Encoded, Companions, Dense):
            size, fold, read, found = measured(layout, measure, rows, commits)
            assert expected is None or found == expected
            expected = found
            print(
                f"{measure:<10} {layout.__name__:<11} {size:>9,.0f} bytes  fold {fold:>8,.1f} us  read {read:>8,.1f} us"
            )


if __name__ == "__main__":
    main()
