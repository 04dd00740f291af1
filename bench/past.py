"""Ten days of events that come in order, or late; what goal 13 asks of them.

Events come one after the other, spread evenly over ten days; some of them are *late*: their event time lies before the
time they come at, by an exponential distribution with a mean of six hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

__all__ = ["DAY_US", "ENDPOINTS", "START_US", "Past", "moment"]

DAY_US: Final = 86_400_000_000
START_US: Final = 1_767_225_600_000_000  # 2026-01-01
ENDPOINTS: Final = 200
_DAYS: Final = 10
_LATE_US: Final = 6 * 3_600_000_000
_HOSTS: Final = 100
BATCH_ROWS: Final = 100_000


def moment(at_us: int) -> str:
    """As SQL says it."""
    return f"make_timestamptz({at_us})"


@dataclass(frozen=True, slots=True)
class Past:
    """``late``: the part of the events that come late. The same events whenever they are asked for."""

    events: int
    late: float

    def batches(self) -> Iterator[pa.RecordBatch]:
        """In the order in which they come, five columns."""
        hosts = pa.array([f"h{i:04d}" for i in range(_HOSTS)])
        for rows, times, random in self._parts():
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(times).cast(pa.timestamp("us", "UTC")),
                    pa.array(random.integers(0, ENDPOINTS, rows)),
                    hosts.take(pa.array(random.integers(0, _HOSTS, rows))),
                    pa.array(np.where(random.random(rows) < 0.02, 500, 200)),
                    pa.array(random.lognormal(10, 1, rows).astype(np.int64)),
                ],
                names=["ts", "endpoint_id", "host", "status", "us"],
            )

    def traces(self) -> Iterator[pa.RecordBatch]:
        """Likewise, with a trace id each, which are all different, in no order."""
        at = 0
        for rows, times, random in self._parts():
            ids = np.arange(at, at + rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            words = ids.astype(">u8").tobytes().hex()
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(times).cast(pa.timestamp("us", "UTC")),
                    pa.array([words[i : i + 16] for i in range(0, 16 * rows, 16)]),
                    pa.array(random.lognormal(10, 1, rows).astype(np.int64)),
                ],
                names=["ts", "trace_id", "us"],
            )
            at += rows

    def trace_id(self, number: int) -> str:
        return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}"

    def _parts(self) -> Iterator[tuple[int, Any, Any]]:
        step = _DAYS * DAY_US / self.events
        for at in range(0, self.events, BATCH_ROWS):
            rows = min(BATCH_ROWS, self.events - at)
            random = np.random.default_rng([13, at])
            times = START_US + ((np.arange(at, at + rows) + random.random(rows)) * step).astype(np.int64)
            times -= np.where(random.random(rows) < self.late, random.exponential(_LATE_US, rows), 0).astype(np.int64)
            yield rows, times, random
