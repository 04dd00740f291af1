"""Events from a seed, and what their aggregates must hold. Peers make the same ones in their own processes.

A pool is a list of batches, sent again and again in turn: making them costs more than sending them. An aggregate's
rows are then known from how often each batch was sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = [
    "ENDPOINTS",
    "HOT",
    "PER_NAME",
    "SLOTS",
    "SLOT_US",
    "START_US",
    "Expected",
    "Pool",
    "Totals",
    "Values",
    "make",
]

Ints = npt.NDArray[np.int64]

START_US: Final = 1_767_225_600_000_000  # 2026-01-01 00:00 UTC, in microseconds
SLOT_US: Final = 300_000_000
SLOTS: Final = 12
ENDPOINTS: Final = 10_000
HOT: Final = 252  # the endpoint of the hot row
PER_NAME: Final = {"customer": 2_000, "application": 400, "server": 100}  # endpoints of each
_KEYS_MAX: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one aggregate: its rows, the events counted in them, the sum of their response times in microseconds."""

    rows: int
    count: int
    total: int


@dataclass(frozen=True)
class Expected:
    """What an aggregate by (endpoint, slot) must hold: one entry a row, in the order of the keys."""

    endpoint: Ints
    slot_us: Ints
    count: Ints
    total: Ints

    @property
    def totals(self) -> Totals:
        return Totals(len(self.endpoint), int(self.count.sum()), int(self.total.sum()))


@dataclass(frozen=True)
class Values:
    """Of the response times in each row of an aggregate by (endpoint, slot), in the order of ``Expected``.

    ``percentile``: the value at the nearest rank. ``distinct``: how many different ones.
    """

    percentile: Ints
    distinct: Ints


@dataclass(frozen=True)
class Pool:
    """Events as three columns of integers, cut into batches of ``batch_rows``. ``name`` says how they are spread."""

    name: str
    batch_rows: int
    endpoint: Ints
    ts_us: Ints
    resp_us: Ints

    def __len__(self) -> int:
        return len(self.endpoint) // self.batch_rows

    def cut(self, column: npt.NDArray[Any], i: int) -> npt.NDArray[Any]:
        return column[i * self.batch_rows : (i + 1) * self.batch_rows]

    @cached_property
    def batches(self) -> list[Any]:
        """RecordBatches of (endpoint_id int64, ts timestamp[us, UTC], resp_time_us int64)."""
        return [pa.record_batch(self._columns(i)) for i in range(len(self))]

    @cached_property
    def integers(self) -> list[Any]:
        """The same with ``ts`` as an int64 of microseconds, for peers that are fastest so."""
        return [b.set_column(1, "ts", b.column(1).cast(pa.int64())) for b in self.batches]

    def strings(self, dictionary: bool = False) -> list[Any]:
        """The same with customer, application and server as the demonstration has them: an endpoint's id says which."""
        return [self._named(self.cut(self.endpoint, i), batch, dictionary) for i, batch in enumerate(self.batches)]

    def _columns(self, i: int) -> dict[str, Any]:
        return {
            "endpoint_id": pa.array(self.cut(self.endpoint, i)),
            "ts": pa.array(self.cut(self.ts_us, i)).cast(pa.timestamp("us", "UTC")),
            "resp_time_us": pa.array(self.cut(self.resp_us, i)),
        }

    @staticmethod
    def _named(endpoint: Ints, batch: Any, dictionary: bool) -> Any:
        columns = {}
        for name, each in PER_NAME.items():
            words = pa.array([f"{name}-{i:03}" for i in range(ENDPOINTS // each)])
            coded = pa.DictionaryArray.from_arrays(pa.array((endpoint // each).astype(np.int32)), words)
            columns[name] = coded if dictionary else coded.cast(pa.string())
        columns |= {field.name: column for field, column in zip(batch.schema, batch.columns, strict=True)}
        return pa.record_batch(columns)

    def taken(self, events: Ints) -> Pool:
        """These events in this order, as one batch."""
        return Pool(self.name, len(events), self.endpoint[events], self.ts_us[events], self.resp_us[events])

    def events(self, sent: Iterable[int]) -> int:
        return self.batch_rows * sum(sent)

    def expected(self, sent: Iterable[int], slot_us: int = SLOT_US) -> Expected:
        """The aggregate after batch i was sent ``sent[i]`` times. Exact: no partial sum reaches 2**53."""
        used = len(self) * self.batch_rows
        times = np.repeat(np.fromiter(sent, np.int64, len(self)), self.batch_rows)
        slot = (self.ts_us[:used] - START_US) // slot_us
        slots = int(slot.max()) + 1
        code = self.endpoint[:used] * slots + slot
        if int(code.max()) >= _KEYS_MAX or float(self.resp_us[:used].astype(float) @ times) >= 2**53:
            raise ValueError("too many rows, or too large a sum, to be expected exactly")
        count = np.bincount(code, weights=times).astype(np.int64)
        total = np.bincount(code, weights=self.resp_us[:used] * times).astype(np.int64)
        (keys,) = np.nonzero(count)
        return Expected(keys // slots, START_US + keys % slots * slot_us, count[keys], total[keys])

    def values(self, sent: Iterable[int], percent: int, slot_us: int = SLOT_US) -> Values:
        """The exact percentiles and distinct counts after batch i was sent ``sent[i]`` times, from sorted values."""
        used = len(self) * self.batch_rows
        times = np.repeat(np.fromiter(sent, np.int64, len(self)), self.batch_rows)
        kept = np.flatnonzero(times)
        slot = (self.ts_us[:used][kept] - START_US) // slot_us
        code, values = self.endpoint[:used][kept] * (int(slot.max()) + 1) + slot, self.resp_us[:used][kept]
        order = np.lexsort((values, code))
        code, values, upto = code[order], values[order], np.cumsum(times[kept][order])
        first = np.append(True, code[1:] != code[:-1])
        other = first | np.append(True, values[1:] != values[:-1])
        (starts,) = np.nonzero(first)
        ends = upto[np.append(starts[1:], len(upto)) - 1]
        before = np.append(0, ends[:-1])
        ranks = before + -(-(ends - before) * percent // 100)
        return Values(values[np.searchsorted(upto, ranks)], np.add.reduceat(other.astype(np.int64), starts))

    def busiest(self, first: int, count: int) -> list[int]:
        """The endpoints with the most events, from place ``first`` on."""
        ordered = np.argsort(-np.bincount(self.endpoint), kind="stable")
        return ordered[first : first + count].tolist()  # type: ignore[no-any-return]


def make(name: str, batch_rows: int, events: int, seed: int = 1) -> Pool:
    """A pool of about ``events`` events in all, of whole batches.

    ``hot``: one endpoint, one slot. ``wide``: zipf (s = 1) over 10,000 endpoints, times uniform in an hour.
    ``even-N``: N endpoints, equally often, times in one slot: N aggregate rows.
    """
    count = max(1, events // batch_rows) * batch_rows
    random = np.random.default_rng(seed)
    if name == "hot":
        endpoint, span = np.full(count, HOT, np.int64), SLOT_US
    elif name == "wide":
        weights = 1 / np.arange(1, ENDPOINTS + 1)
        ranks = random.choice(ENDPOINTS, count, p=weights / weights.sum())
        endpoint, span = random.permutation(ENDPOINTS)[ranks], SLOT_US * SLOTS  # frequent ones are no neighbours
    elif name.startswith("even-"):
        endpoint, span = random.permutation(np.arange(count) % int(name[5:])), SLOT_US
    else:
        raise ValueError(f"there is no pool {name!r}")
    ts_us = START_US + random.integers(0, span, count)
    resp_us = np.minimum(random.lognormal(10, 1, count), 6e7).astype(np.int64)  # median 22 ms, at most a minute
    return Pool(name, batch_rows, endpoint.astype(np.int64), ts_us, resp_us)
