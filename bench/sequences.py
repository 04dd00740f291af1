"""The events of goal 16: calls of 1,000 endpoints in ten days, of which few have one of the statuses that are rare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from bench.past import DAY_US, START_US

__all__ = ["MOST_US", "RARE", "WITHIN_US", "batches"]

RARE: Final = {504: 1e-6, 503: 1e-5, 502: 1e-4, 501: 1e-3, 500: 1e-2}
"""Statuses, and the part of the events that has each."""
WITHIN_US: Final = 15 * 60 * 1_000_000
MOST_US: Final = 5_000
"""Half of the events are quicker."""
_BATCH_ROWS: Final = 100_000


def batches(events: int) -> Iterator[pa.RecordBatch]:
    """In order; the same events whenever they are asked for."""
    rng = np.random.default_rng(16)
    hosts = pa.array([f"h{i}" for i in range(50)])
    for first in range(0, events, _BATCH_ROWS):
        rows = min(_BATCH_ROWS, events - first)
        times = START_US + np.arange(first, first + rows) * (10 * DAY_US) // events
        status, drawn, below = np.full(rows, 200), rng.random(rows), 0.0
        for code, part in RARE.items():
            status[(drawn >= below) & (drawn < below + part)] = code
            below += part
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(np.sort(times + rng.integers(0, 10_000_000, rows))).cast(pa.timestamp("us", "UTC")),
                pa.array(rng.integers(0, 1_000, rows)),
                hosts.take(pa.array(rng.integers(0, 50, rows))),
                pa.array(status),
                pa.array(rng.integers(1, 10_000, rows)),
            ],
            ["ts", "endpoint_id", "host", "status", "us"],
        )
