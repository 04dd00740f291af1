"""Delta runs: what one commit does to the rows of one aggregate table, in columns, sorted by key.

A *delta run* is the columnar twin of a list of ``RowOp``s that hold deltas only: the keys, and one ``Cells`` per
column. It is made once (``kivi.delta.derive``), logged as Arrow IPC, kept in memory while it is pending, bisected
by readers and folded into base rows by consolidation (``kivi.delta.gather``). Runs are immutable.

    events --derive--> DeltaRun --to_buffers--> log --from_buffer--> DeltaRun       pending
                                                    runs --gather--> Gathered --fold--> base rows

**Exactness**, which decides how every delta is kept:

* A SUM of integers or decimals may leave 64 bits inside one commit. It is a plain int64 where every row of the run
  fits, and otherwise two limbs: value = low + (high << 32). Limbs are normalised (0 <= low < 2**32) and become a
  plain int64 again if every value fits, so equal deltas are equal bytes whichever way they were computed.
* Deltas of two commits are never combined with each other, as float sums depend on the order: a run of several
  commits has a row for each of them, and a CTS per row.
* A SUM always has a delta, 0 where it saw nothing but nulls; a MIN or MAX has none (null) there. Adding 0
  changes no bit, because no cell is ever -0.0.
* Float deltas are finite.

Pure: no I/O and no clock; timestamps are given.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kivi.arrow.ipc import encode_ipc
from kivi.delta.ops import Barrier
from kivi.delta.states import States
from kivi.encoding.base_rows import is_wide
from kivi.errors import DataLoss
from kivi.model.schema import Column, TableSchema
from kivi.model.types import INT64_MAX, INT64_MIN
from kivi.states.registry import kind_of

__all__ = [
    "LIMB",
    "LOW",
    "Array",
    "Cells",
    "DeltaRun",
    "RunColumn",
    "dtype_of",
    "fitted",
    "joined_columns",
    "neutral_column",
    "neutral_of",
    "shifted",
    "stamped",
    "ufunc_of",
    "whole",
    "with_cts",
]

Array = npt.NDArray[Any]
Item = tuple[bytes, int, dict[int, Any]]

LIMB: Final = 32
"""Bits of a low limb."""

LOW: Final = 2**LIMB - 1
_BARRIER: Final = b"kivi.barrier"
_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"


# -- one column of deltas -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The deltas of one column. ``values`` int64 or float64; with ``high`` they are low limbs.

    ``valid`` (MIN and MAX only): False where a row has no delta, and ``values`` is 0 there. None: all have one.
    """

    values: Array
    high: Array | None = None
    valid: Array | None = None

    def at(self, i: int) -> Any:
        """The delta of row ``i`` in stored form, None if it has none."""
        if self.valid is not None and not self.valid[i]:
            return None
        if self.high is not None:
            return self.values.item(i) + (self.high.item(i) << LIMB)
        return self.values.item(i)

    def listed(self, rows: range) -> list[Any]:
        part = slice(rows.start, rows.stop)
        values: list[Any] = self.values[part].tolist()
        if self.high is not None:
            high = self.high[part].tolist()
            return [low + (top << LIMB) for low, top in zip(values, high, strict=True)]
        if self.valid is not None:
            return [v if ok else None for v, ok in zip(values, self.valid[part].tolist(), strict=True)]
        return values

    def take(self, index: Any) -> Cells:
        return Cells(*(None if part is None else part[index] for part in (self.values, self.high, self.valid)))  # type: ignore[arg-type]

    def limbs(self) -> tuple[Array, Array]:
        """(low, high) with value = low + (high << 32)."""
        return (self.values & LOW, self.values >> LIMB) if self.high is None else (self.values, self.high)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.high, self.valid) if part is not None)

    @staticmethod
    def joined(parts: Sequence[Cells]) -> Cells:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        if any(part.high is not None for part in parts):
            lows, highs = zip(*(part.limbs() for part in parts), strict=True)
            return Cells(np.concatenate(lows), np.concatenate(highs))
        values = np.concatenate([part.values for part in parts])
        if all(part.valid is None for part in parts):
            return Cells(values)
        valid = [np.ones(len(p.values), np.bool_) if p.valid is None else p.valid for p in parts]
        return Cells(values, None, np.concatenate(valid))

    @staticmethod
    def of_limbs(low: Array, high: Array) -> Cells:
        """Sums of limbs, normalised; plain int64 if every value fits."""
        high = high + (low >> LIMB)
        low = low & LOW
        if not len(high) or (high.min() >= -(2**31) and high.max() < 2**31):
            return Cells(low + (high << LIMB))
        return Cells(low, high)


RunColumn = Cells | States
"""One column of a run: numbers, or the states of a measure."""


def neutral_column(column: Column, rows: int) -> RunColumn:
    """So many deltas that change nothing: a SUM adds 0, a MIN or MAX has none, and a state is empty."""
    if column.state is not None:
        return States.none(kind_of(column.state), rows)
    valid = None if column.operator == "sum" else np.zeros(rows, np.bool_)
    return Cells(np.zeros(rows, dtype_of(column)), None, valid)


def joined_columns(parts: Sequence[RunColumn]) -> RunColumn:
    """The same column of several runs, one after the other."""
    return type(parts[0]).joined(parts)  # type: ignore[arg-type]


def dtype_of(column: Column) -> type[np.generic]:
    """Of a column's ``values``."""
    return np.float64 if column.type.name == "float64" else np.int64


def ufunc_of(column: Column) -> np.ufunc:
    """MIN or MAX."""
    return np.minimum if column.operator == "min" else np.maximum


def neutral_of(column: Column) -> int | float:
    """What MIN or MAX with it changes nothing."""
    if column.type.name == "float64":
        return math.inf if column.operator == "min" else -math.inf
    return INT64_MAX if column.operator == "min" else INT64_MIN


# -- runs -----------------------------------------------------------------------------------------


class DeltaRun:
    """Delta rows of one table, sorted by (key, cts). Immutable.

    ``cts`` is one for all rows, whose keys are then distinct, or an array of uint64, one per row. ``distinct`` says
    that keys are distinct all the same.
    ``columns`` has one entry per schema column, in schema order: all columns of an aggregate are delta columns. A run
    that was derived before the aggregate was altered has fewer: those who compute with several make them alike first
    (``fitted``).
    ``barrier`` is that of its rows (``ops.Barrier``): RESTART, where each row begins anew from the identity, with these
    deltas; DELETE, where each is gone and the columns say nothing. What a retraction computes again are such runs.
    """

    __slots__ = (
        "_data",
        "_offsets",
        "barrier",
        "columns",
        "cts",
        "distinct",
        "first_cts",
        "first_key",
        "keys",
        "last_cts",
        "last_key",
        "nbytes",
        "rows",
        "uniform",
    )

    def __init__(
        self,
        keys: pa.LargeBinaryArray,
        cts: int | Array,
        columns: tuple[RunColumn, ...],
        *,
        distinct: bool = False,
        barrier: Barrier = Barrier.PATCH,
    ) -> None:
        self.keys = keys
        self.barrier = barrier
        self.distinct = distinct or isinstance(cts, int)
        self.cts = cts
        self.columns = columns
        self.rows: int = len(keys)
        self.first_cts, self.last_cts = _range_of(cts)
        self.nbytes: int = int(keys.nbytes) + sum(c.nbytes for c in columns)
        if not isinstance(cts, int):
            self.nbytes += int(cts.nbytes)
        self._offsets, self._data, self.uniform = _views(keys)
        self.first_key = self.key_at(0) if self.rows else b""
        self.last_key = self.key_at(self.rows - 1) if self.rows else b""

    @property
    def weight(self) -> int:
        """What combining it costs: its rows, and the items of their states."""
        return self.rows + sum(int(c.offsets[-1]) for c in self.columns if isinstance(c, States))

    def key_at(self, i: int) -> bytes:
        return self._data[self._offsets[i] : self._offsets[i + 1]].tobytes()

    def cts_at(self, i: int) -> int:
        return self.cts if isinstance(self.cts, int) else self.cts.item(i)

    def deltas_at(self, i: int) -> dict[int, Any]:
        """Column index -> delta in stored form; columns without a delta are left out."""
        return {c: delta for c, cells in enumerate(self.columns) if (delta := cells.at(i)) is not None}

    def find(self, key: bytes) -> range:
        """The rows of ``key``. 2 us among 100,000 keys of one width, 6 us among strings, 0.1 us outside."""
        if not self.rows or not self.first_key <= key <= self.last_key:
            return range(0)
        start = self.lower(key)
        if self.key_at(start) != key:
            return range(start, start)
        if isinstance(self.cts, int):
            return range(start, start + 1)
        if self.uniform is not None and len(key) == self.uniform.itemsize:
            return range(start, int(self.uniform.searchsorted(key, "right")))
        return range(start, bisect_right(range(self.rows), key, start, key=self.key_at))

    def slice_range(self, start: bytes | None, end: bytes | None) -> range:
        """The rows with start <= key < end; None is no bound."""
        first = 0 if start is None else self.lower(start)
        return range(first, max(first, self.rows if end is None else self.lower(end)))

    def lower(self, key: bytes) -> int:
        """The first row with a key >= ``key``, which may be a prefix or any bytes."""
        if self.uniform is None:
            return bisect_left(range(self.rows), key, key=self.key_at)
        # NumPy pads the shorter side with zeros. That is right for a shorter key. A longer one would make it
        # copy the whole column: the keys below it are those at or below its first bytes.
        width = self.uniform.itemsize
        if len(key) <= width:
            return int(self.uniform.searchsorted(key))
        return int(self.uniform.searchsorted(key[:width], "right"))

    def listed(self, rows: range) -> list[bytes]:
        """The keys of consecutive rows."""
        if self.uniform is not None:
            return whole(self.uniform[rows.start : rows.stop])
        listed: list[bytes] = self.keys.slice(rows.start, len(rows)).to_pylist()
        return listed

    def items(self, rows: range) -> list[Item]:
        """(key, cts, deltas) of consecutive rows."""
        if not rows:
            return []
        keys = self.listed(rows)
        stamps = [self.cts] * len(rows) if isinstance(self.cts, int) else self.cts[rows.start : rows.stop].tolist()
        listed = [cells.listed(rows) for cells in self.columns]
        deltas: Iterable[dict[int, Any]] = (dict(enumerate(row)) for row in zip(*listed, strict=True))
        if any(isinstance(cells, States) or cells.valid is not None for cells in self.columns):
            deltas = ({c: v for c, v in row.items() if v is not None} for row in deltas)
        return list(zip(keys, stamps, deltas, strict=True))

    # -- the form in the commit log ----------------------------------------------------------------

    def to_buffers(self) -> list[pa.Buffer]:
        """An Arrow IPC stream of one batch: key, cts (if one per row), c0, c0_high (if two limbs), c1 ...

        Its metadata name the barrier, if it has one.
        """
        named: dict[str, Any] = {"key": self.keys}
        if not isinstance(self.cts, int):
            named["cts"] = pa.array(self.cts)
        for i, cells in enumerate(self.columns):
            if not isinstance(cells, Cells):
                named[f"c{i}"] = cells.to_arrow()
                continue
            named[f"c{i}"] = pa.array(cells.values, mask=None if cells.valid is None else ~cells.valid)
            if cells.high is not None:
                named[f"c{i}_high"] = pa.array(cells.high)
        batch = pa.RecordBatch.from_pydict(named)
        if self.barrier is not Barrier.PATCH:
            batch = batch.replace_schema_metadata({_BARRIER: str(int(self.barrier))})
        return [encode_ipc(batch)]

    @staticmethod
    def from_buffer(schema: TableSchema, cts: int, data: bytes | bytearray | memoryview | pa.Buffer) -> DeltaRun:
        """What ``to_buffers`` wrote, without copying: ``data`` stays referenced. ``cts`` is used unless rows have one.

        The bytes have been checked by the log; what does not fit anyway is DataLoss.
        """
        try:
            buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
            if buffer.size < 8 or buffer.slice(buffer.size - 8).to_pybytes() != _END_OF_STREAM:
                raise ValueError("it is cut short")
            with pa.ipc.open_stream(buffer) as reader:
                batch = reader.read_next_batch()
                if any(True for _ in reader):
                    raise ValueError("it has more than one batch")
            batch.validate(full=True)
            return _from_batch(schema, cts, batch)
        except (pa.ArrowException, OSError, ValueError, KeyError, StopIteration) as error:
            raise DataLoss(f"a delta run of table {schema.name!r} is damaged ({error}): run kivi verify") from None


def _from_batch(schema: TableSchema, cts: int, batch: pa.RecordBatch) -> DeltaRun:
    names = set(batch.schema.names)

    def part(name: str, dtype: Any, *, nullable: bool = False) -> tuple[Array, Array | None]:
        array = batch.column(name)
        if array.type != pa.from_numpy_dtype(dtype) or (array.null_count and not nullable):
            raise ValueError(f"column {name} is {array.type} with {array.null_count} nulls")
        if not len(array):
            return np.zeros(0, dtype), None
        values = np.frombuffer(array.buffers()[1], dtype, len(array), np.dtype(dtype).itemsize * array.offset)
        return values, array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None

    columns: list[RunColumn] = []
    for i, column in enumerate(schema.columns):
        if f"c{i}" not in names and any(one.columns == i for one in schema.alterations):  # it was altered since
            break
        if column.state is not None:
            columns.append(States.from_arrow(kind_of(column.state), batch.column(f"c{i}")))
            continue
        values, valid = part(f"c{i}", dtype_of(column), nullable=column.operator != "sum")
        high = part(f"c{i}_high", np.int64)[0] if is_wide(column) and f"c{i}_high" in names else None
        columns.append(Cells(values, high, valid))
    stamps: int | Array = part("cts", np.uint64)[0] if "cts" in names else cts
    keys = batch.column("key")
    expected = 1 + len(columns) + sum(isinstance(c, Cells) and c.high is not None for c in columns) + ("cts" in names)
    if keys.type != pa.large_binary() or keys.null_count or len(names) != expected:
        raise ValueError(f"its columns are {sorted(names)}")
    barrier = Barrier(int((batch.schema.metadata or {}).get(_BARRIER, Barrier.PATCH)))
    return DeltaRun(keys, stamps, tuple(columns), barrier=barrier)


def fitted(run: DeltaRun, schema: TableSchema) -> DeltaRun:
    """The run with all columns of its table: those that were added since it was derived change nothing."""
    missing = schema.columns[len(run.columns) :]
    if not missing:
        return run
    added = tuple(neutral_column(column, run.rows) for column in missing)
    return DeltaRun(run.keys, run.cts, (*run.columns, *added), distinct=run.distinct, barrier=run.barrier)


def _views(keys: pa.LargeBinaryArray) -> tuple[memoryview, memoryview, Array | None]:
    """Offsets and bytes for bisection; if all keys have one width, also the keys as NumPy byte strings.

    NumPy ignores trailing zeros of byte strings. Among strings of one width that cannot confuse two of them.
    """
    rows = len(keys)
    if not rows:
        return memoryview(b""), memoryview(b""), None
    offsets = memoryview(keys.buffers()[1]).cast("B")[8 * keys.offset :][: 8 * (rows + 1)].cast("q")
    data = memoryview(keys.buffers()[2] or b"").cast("B")
    first, last = offsets[0], offsets[rows]
    width = (last - first) // rows
    uniform = None
    if width and (np.diff(np.frombuffer(offsets, np.int64)) == width).all():
        uniform = np.frombuffer(data[first:last], f"S{width}")
    return offsets, data, uniform


def _range_of(cts: int | Array) -> tuple[int, int]:
    if isinstance(cts, int):
        return cts, cts
    return (int(cts.min()), int(cts.max())) if len(cts) else (0, 0)


def whole(strings: Array) -> list[bytes]:
    """NumPy byte strings -> bytes objects with their trailing zeros."""
    return strings.view(f"V{strings.itemsize}").tolist()  # type: ignore[no-any-return]


def shifted(run: DeltaRun, first: int) -> DeltaRun:
    """The same run of several commits, whose CTS are places so far, where the commit at place 0 is ``first``."""
    assert not isinstance(run.cts, int)
    other = copy.copy(run)
    other.cts = run.cts + np.uint64(first)
    other.first_cts, other.last_cts = run.first_cts + first, run.last_cts + first
    return other


def with_cts(run: DeltaRun, cts: int) -> DeltaRun:
    """The same run at ``cts``: a commit learns its CTS after it has derived."""
    other = copy.copy(run)
    if not isinstance(run.cts, int):
        other.nbytes -= int(run.cts.nbytes)
    other.cts = other.first_cts = other.last_cts = cts
    return other


def stamped(run: DeltaRun, cts: int) -> DeltaRun:
    """``with_cts``, also for a run that may have several rows of one key: those get a CTS each, which is the same."""
    if run.distinct:
        return with_cts(run, cts)
    other = copy.copy(run)
    other.cts = np.full(run.rows, cts, np.uint64)
    other.first_cts = other.last_cts = cts
    return other
