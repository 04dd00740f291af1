"""An append stream whose rate and lateness change by the minute, in a process of its own.

``python -m bench.paced`` is told a ``Course`` as JSON on its command line. It prints a line when its events are made
and it is connected, begins when it is sent one, and prints a ``Ran`` as JSON at the end.

The event times are those of the moment, and before it: of a share of the events, which are *late*, by a minute on
average (exponential).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

import kivi
from bench.appending import READY, Appending, begun
from bench.data import make
from bench.together import in_threads

__all__ = ["Course", "Phase", "Ran", "course"]

BATCH: Final = 50_000
_THREADS: Final = 8
_POOL_EVENTS: Final = 2_000_000
_LATE_S: Final = 60.0
_LATEST_S: Final = 480.0


@dataclass(frozen=True, slots=True)
class Phase:
    """``rate``: events a second; None: as many as are taken. ``late``: share of the events."""

    seconds: float
    rate: float | None
    late: float


@dataclass(frozen=True, slots=True)
class Course:
    endpoint: str
    table: str
    slot_us: int
    phases: list[Phase]


@dataclass(frozen=True, slots=True)
class Ran:
    """``appends``: when each was due (of a full rate: when it was called) and how long from then until it was
    acknowledged, in seconds of the monotonic clock. ``slots``: events and their sum, by where their slot begins in
    microseconds."""

    began_s: float
    appends: list[tuple[float, float]]
    slots: dict[str, tuple[int, int]]


def course(told: Course) -> AbstractContextManager[Appending[Ran]]:
    """The process of a course, which has begun when this is entered."""
    return begun("bench.paced", told, Ran)


class _Schedule:
    """Which batch is next, when it is due and how many of its events are late. Shared by threads."""

    def __init__(self, phases: list[Phase]) -> None:
        self._lock = threading.Lock()
        self._phases = list(phases)
        self._turn = 0
        self.began_s = self._due = time.monotonic()
        self._ends = self._due + phases[0].seconds

    def take(self) -> tuple[int, float, float] | None:
        with self._lock:
            while time.monotonic() >= self._ends:
                del self._phases[0]
                if not self._phases:
                    return None
                self._due = self._ends
                self._ends += self._phases[0].seconds
            phase, due = self._phases[0], self._due
            if phase.rate is None:
                due = time.monotonic()
            else:
                self._due += BATCH / phase.rate
            self._turn += 1
            return self._turn - 1, due, phase.late


class _Appending:
    def __init__(self, db: Any, course: Course) -> None:
        self._db, self._course = db, course
        self._pool = make("wide", BATCH, _POOL_EVENTS)
        self._lock = threading.Lock()
        self.appends: list[tuple[float, float]] = []
        self.counts, self.sums = Counter[int](), Counter[int]()

    def run(self) -> float:
        schedule = _Schedule(self._course.phases)

        def once() -> None:
            if (turn := schedule.take()) is not None:
                i, due, late = turn
                if (early := due - time.monotonic()) > 0:
                    time.sleep(early)
                self._append(i, due, late)

        seconds = sum(phase.seconds for phase in self._course.phases)
        in_threads([once] * _THREADS, seconds)
        return schedule.began_s

    def _append(self, turn: int, due: float, late: float) -> None:
        i, random = turn % len(self._pool), np.random.default_rng(turn)
        behind = random.uniform(0, 1, BATCH)
        some = random.random(BATCH) < late
        behind[some] = np.minimum(random.exponential(_LATE_S, int(some.sum())), _LATEST_S)
        ts_us = time.time_ns() // 1_000 - (behind * 1e6).astype(np.int64)
        batch = self._pool.batches[i]
        batch = batch.set_column(1, batch.schema.field(1), pa.array(ts_us).cast(batch.schema.field(1).type))
        self._db.append(self._course.table, batch)
        took = time.monotonic() - due
        slots, which = np.unique(ts_us // self._course.slot_us * self._course.slot_us, return_inverse=True)
        counts = np.bincount(which)
        sums = np.bincount(which, weights=self._pool.cut(self._pool.resp_us, i)).astype(np.int64)
        with self._lock:
            self.appends.append((due, took))
            self.counts.update(dict(zip(slots.tolist(), counts.tolist(), strict=True)))
            self.sums.update(dict(zip(slots.tolist(), sums.tolist(), strict=True)))


def _main(course: Course) -> None:
    with kivi.connect(course.endpoint, timeout=120.0) as db:
        appending = _Appending(db, course)
        print(READY, flush=True)
        sys.stdin.readline()
        began_s = appending.run()
    slots = {str(slot): (count, appending.sums[slot]) for slot, count in appending.counts.items()}
    print(json.dumps(asdict(Ran(began_s, appending.appends, slots))))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    _main(Course(**{**told, "phases": [Phase(**phase) for phase in told["phases"]]}))
