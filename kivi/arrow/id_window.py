"""The ids of events that were taken within the last minutes, exactly, in 32 bytes each.

An id is 24 bytes: of a span, 16 of the trace and 8 of the span. They lie in sorted *runs*, by a hash of the three
64-bit words in it, and are compared whole where hashes agree, so nothing depends on ids being random (some tracers
count). Each commit brings a run; small runs are joined, so there are few to search.

A run belongs to a *slot* of an eighth of the window, and goes as a whole when all of its slot is older than the window.
So an id is kept for at least the window, and memory holds at most nine eighths of one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.dictionaries import plain
from kivi.errors import InvalidArgument, ResourceExhausted

__all__ = ["ID", "SLOTS", "Ids", "Window", "first_ones", "ids_of"]

Ids: TypeAlias = npt.NDArray[np.bytes_]
"""One for each span, of type ``ID``."""
ID: Final = np.dtype("S24")
SLOTS: Final = 8
_RETRY_S_MAX: Final = 30.0


class _Run(NamedTuple):
    slot: int
    hashes: npt.NDArray[np.uint64]
    ids: Ids


def ids_of(batch: pa.RecordBatch, names: Sequence[str]) -> Ids:
    """Of events whose id is the bytes of these columns together. Raises InvalidArgument if one has another width."""
    parts = plain(batch.select(list(names))).columns
    joined = pc.binary_join_element_wise(*(part.cast(pa.binary()) for part in parts), b"")
    if not len(joined):
        return np.zeros(0, ID)
    if joined.null_count or not pc.all(pc.equal(pc.binary_length(joined), ID.itemsize)).as_py():
        raise InvalidArgument(f"{' and '.join(names)} of each event have to be {ID.itemsize} bytes together")
    return np.frombuffer(joined.buffers()[2], ID, len(joined))


def first_ones(ids: Ids) -> npt.NDArray[np.bool_]:
    """Which of these occur for the first time among them."""
    first = np.zeros(len(ids), bool)
    first[np.unique(ids, return_index=True)[1]] = True
    return first


class Window:
    """Not thread safe: its writer is the only one who asks. ``seconds``: for how long ids are kept."""

    def __init__(self, seconds: float, spans_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.spans_max = spans_max
        self._clock = clock
        self._slot_s = seconds / SLOTS
        self._runs: list[_Run] = []
        # A stranger who does not know these cannot make many ids with one hash.
        self._odd = np.array([secrets.randbits(64) | 1 for _ in range(3)], np.uint64)

    def __len__(self) -> int:
        return sum(len(run.ids) for run in self._runs)

    def clear(self) -> None:
        self._runs = []

    def known(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these were added within the window."""
        found = np.zeros(len(ids), bool)
        hashes = self._hashed(ids)
        for run in self._runs:
            found |= _in_run(run, ids, hashes)
        return found

    def add(self, ids: Ids, age_s: float = 0.0) -> None:
        """Ids that it does not hold, committed ``age_s`` ago or before: they are kept as if it were just then."""
        if not len(ids):
            return
        hashes = self._hashed(ids)
        order = np.argsort(hashes, kind="stable")
        run = _Run(int((self._clock() - age_s) // self._slot_s), hashes[order], ids[order])
        runs = self._runs
        if runs and runs[-1].slot < run.slot:  # nothing is added to that slot any more: it becomes one run
            while len(runs) > 1 and runs[-2].slot == runs[-1].slot:
                runs.append(_joined(runs.pop(-2), runs.pop()))
        while runs and runs[-1].slot == run.slot and len(runs[-1].hashes) <= 2 * len(run.hashes):
            run = _joined(runs.pop(), run)
        runs.append(run)

    def expire(self) -> None:
        """Forgets what is older than the window."""
        oldest = (self._clock() - self.seconds) // self._slot_s
        self._runs = [run for run in self._runs if run.slot >= oldest]

    def check_room(self, more: int, spans_max: int | None = None) -> None:
        """Raises ResourceExhausted, with the seconds until some of it is old enough to go; or InvalidArgument."""
        spans_max = self.spans_max if spans_max is None else spans_max
        if (count := len(self)) + more <= spans_max:
            return
        if more > spans_max:
            raise InvalidArgument(
                f"an export of {more:,} spans is larger than the limit otlp_window_spans = {spans_max:,}: raise "
                "it, or send fewer at a time",
                limit="otlp_window_spans",
                maximum=spans_max,
            )
        wait_s = 1.0
        if self._runs:
            wait_s = (self._runs[0].slot + 1) * self._slot_s + self.seconds - self._clock()
        raise ResourceExhausted(
            f"{count:,} span ids of the last {self.seconds:g} s are held and {more:,} more would pass the limit "
            f"otlp_window_spans = {spans_max:,}: raise it, shorten otlp_window_s, or send less",
            limit="otlp_window_spans",
            maximum=spans_max,
            retry_s=min(max(wait_s, 1.0), _RETRY_S_MAX),
        )

    def _hashed(self, ids: Ids) -> npt.NDArray[np.uint64]:
        words = ids.view(np.uint64).reshape(-1, 3)
        hashes: npt.NDArray[np.uint64] = (words * self._odd).sum(axis=1, dtype=np.uint64)  # modulo 2**64, as it should
        return hashes


def _joined(one: _Run, other: _Run) -> _Run:
    hashes, ids = np.concatenate([one.hashes, other.hashes]), np.concatenate([one.ids, other.ids])
    order = np.argsort(hashes, kind="stable")
    return _Run(one.slot, hashes[order], ids[order])


def _in_run(run: _Run, ids: Ids, hashes: npt.NDArray[np.uint64]) -> Any:
    found = np.zeros(len(ids), bool)
    at = np.searchsorted(run.hashes, hashes)
    asked = np.flatnonzero(at < len(run.hashes))
    while len(asked := asked[run.hashes[at[asked]] == hashes[asked]]):
        found[asked] = run.ids[at[asked]] == ids[asked]
        asked = asked[~found[asked]]  # another id with the same hash: look at the next one
        at[asked] += 1
        asked = asked[at[asked] < len(run.hashes)]
    return found
