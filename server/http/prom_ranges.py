"""Functions of PromQL over the samples of a range, for all series and steps at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kivi_server.http.prom_series import Series, Unanswerable
from kivi_server.http.prom_vectors import quantile_of

__all__ = ["HELD_MAX", "HISTOGRAM", "RANGES", "WORK_MAX", "Window", "Work"]

Floats = npt.NDArray[np.float64]
WORK_MAX: Final = 10_000_000_000
HELD_MAX: Final = 60_000_000
_APART: Final = 20
_APART_WINDOW: Final = 10_000
"""A sample and a window of a function of Python's, as work."""
HISTOGRAM: Final = 50_000
"""And a histogram whose quantile is looked for."""


class Work:
    """What one question has read of its ranges, and how many values it holds; and how much it may.

    **Invariant.** It counts what a function looks at, whatever the range is: one for each window, and one for each
    sample that is added up or compared, which takes a fraction of a nanosecond. So what looks only at the ends of a
    range costs as much for a month as for an hour; a counter's rate costs its ends and the samples where it began anew.
    """

    def __init__(self) -> None:
        self._done = self.held = 0

    def hold(self, count: int) -> None:
        """So many values of vectors are held now, of which those to come are made. Raises Unanswerable."""
        self.held = count
        if count > HELD_MAX:
            raise Unanswerable(
                f"the question holds more than {HELD_MAX:,} values while it is evaluated: ask for its parts, or for "
                "fewer series or steps"
            )

    def add(self, count: int) -> None:
        """Raises Unanswerable."""
        self._done += count
        if self._done > WORK_MAX:
            raise Unanswerable(
                f"the question reads more than {WORK_MAX:,} samples of its ranges, where a sample of a quantile or a "
                f"deviation is as {_APART}, such a range as {_APART_WINDOW:,}, and a histogram as {HISTOGRAM:,}: "
                "ask for fewer series or steps, or shorter ranges"
            )


@dataclass(frozen=True)
class Window:
    """Of each series (rows) at each step (columns), the samples from ``low`` to ``high``, both included."""

    series: Series
    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    high_ms: npt.NDArray[np.int64]
    range_ms: int
    work: Work

    @property
    def count(self) -> npt.NDArray[np.int64]:
        count: npt.NDArray[np.int64] = np.maximum(self.high - self.low + 1, 0)
        return count

    def at(self, array: npt.NDArray[Any], place: npt.NDArray[np.int64]) -> Floats:
        """Of a row per series; where there is no such place, any."""
        places = np.broadcast_to(np.clip(place, 0, array.shape[1] - 1), self.low.shape)
        return np.take_along_axis(array, places, axis=1)

    def time_s(self, place: npt.NDArray[np.int64]) -> Floats:
        ends = self.series.ends_ms
        return np.broadcast_to(ends[np.clip(place, 0, len(ends) - 1)] / 1_000, self.low.shape)

    def reduced(self, by: np.ufunc) -> Floats:
        """The samples of each window, reduced to one; 0 where there are none."""
        values = self.series.values
        size = values.shape[1]
        begin, end = np.clip(self.low, 0, size), np.clip(np.broadcast_to(self.high + 1, self.low.shape), 0, size)
        self.work.add(int(np.maximum(end - begin, 0).sum()))
        return np.array([_reduced(by, *each) for each in zip(values, begin, end, strict=True)]).reshape(begin.shape)

    def anew(self) -> Floats:
        """What the counters had where they began anew, in each window: of its samples but the first, those that are
        less than the one before. Only these are read."""
        rows = []
        for values, low in zip(self.series.values, self.low, strict=True):
            places = np.flatnonzero(values[1:] < values[:-1])  # of the sample before
            begin, end = np.searchsorted(places, low), np.searchsorted(places, self.high[0])
            self.work.add(int(np.maximum(end - begin, 0).sum()))
            rows.append(_reduced(np.add, values[places], begin, end))
        return np.array(rows).reshape(self.low.shape)

    def changed(self, happens: Callable[[Floats, Floats], Any]) -> Floats:
        """In how many of its samples but the first that is so of them and the one before."""
        values = self.series.values
        counts = np.zeros(values.shape)
        np.cumsum(happens(values[:, 1:], values[:, :-1]), axis=1, out=counts[:, 1:])
        return self.at(counts, self.high) - self.at(counts, self.low)

    def apart(self, function: Callable[[Floats, int], float]) -> Floats:
        """What it says of the samples of each window, and of its step."""
        count = self.count
        self.work.add(_APART * int(count.sum()) + _APART_WINDOW * int((count > 0).sum()))
        out = np.full(self.low.shape, np.nan)
        for i, t in zip(*np.nonzero(count > 0), strict=True):
            out[i, t] = function(self.series.values[i, self.low[i, t] : self.high[0, t] + 1], t)
        return out


def _reduced(by: np.ufunc, row: Floats, begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Floats:
    """What is from each ``begin`` to before its ``end``, reduced to one; 0 where that is nothing."""
    pairs = np.stack([begin, np.maximum(begin, end)], axis=1).reshape(-1)
    padded = np.append(row, 0.0)  # for the places behind the last
    return np.where(begin < end, by.reduceat(padded, pairs)[::2], 0)


def _extrapolated(window: Window, *, counter: bool, by_second: bool) -> Floats:
    """Prometheus' extrapolatedRate (promql/functions.go, 2.42)."""
    values, count = window.series.values, window.count
    first, last = window.at(values, window.low), window.at(values, window.high)
    gained = last - first
    if counter:
        gained = gained + window.anew()
    begin_s, end_s = window.time_s(window.low), window.time_s(window.high)
    to_end = window.high_ms / 1_000 - end_s
    to_start = begin_s - (window.high_ms - window.range_ms) / 1_000
    sampled = end_s - begin_s
    apart = sampled / np.maximum(count - 1, 1)
    if counter:
        to_zero = sampled * (first / gained)
        to_start = np.where((gained > 0) & (first >= 0) & (to_zero < to_start), to_zero, to_start)
    limit = apart * 1.1
    whole = sampled + np.where(to_start < limit, to_start, apart / 2) + np.where(to_end < limit, to_end, apart / 2)
    factor = whole / sampled
    return gained * (factor / (window.range_ms / 1_000) if by_second else factor)


def _instant(window: Window, *, by_second: bool) -> Floats:
    last, before = window.at(window.series.values, window.high), window.at(window.series.values, window.high - 1)
    gained = np.where(by_second & (last < before), last, last - before)
    return gained / (window.time_s(window.high) - window.time_s(window.high - 1)) if by_second else gained


def _average(window: Window) -> Floats:
    return window.reduced(np.add) / window.count


def _variance(window: Window) -> Floats:
    return window.apart(lambda values, _: float(np.var(values)))


def _differ(values: Floats, before: Floats) -> Any:
    return (values != before) & ~(np.isnan(values) & np.isnan(before))


RANGES: Final[dict[str, tuple[Callable[..., Floats], int]]] = {
    "rate": (lambda w: _extrapolated(w, counter=True, by_second=True), 2),
    "increase": (lambda w: _extrapolated(w, counter=True, by_second=False), 2),
    "delta": (lambda w: _extrapolated(w, counter=False, by_second=False), 2),
    "irate": (lambda w: _instant(w, by_second=True), 2),
    "idelta": (lambda w: _instant(w, by_second=False), 2),
    "resets": (lambda w: w.changed(np.less), 1),
    "changes": (lambda w: w.changed(_differ), 1),
    "sum_over_time": (lambda w: w.reduced(np.add), 1),
    "avg_over_time": (_average, 1),
    "min_over_time": (lambda w: w.reduced(np.fmin), 1),
    "max_over_time": (lambda w: w.reduced(np.fmax), 1),
    "count_over_time": (lambda w: w.count.astype(np.float64), 1),
    "present_over_time": (lambda w: np.ones(w.count.shape), 1),
    "last_over_time": (lambda w: w.at(w.series.values, w.high), 1),
    "stdvar_over_time": (_variance, 1),
    "stddev_over_time": (lambda w: np.sqrt(_variance(w)), 1),
    "quantile_over_time": (lambda w, q: w.apart(lambda values, t: quantile_of(q[t], values)), 1),
}
"""What each says of each window, given the numbers of its other arguments, and of how many samples at least."""
