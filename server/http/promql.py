"""PromQL, a part of it, over the series of aggregates: what is parsed is evaluated for all steps at once.

============== ==================================================================================================
selectors      ``name{label="x", other!~"y.*"}``, ``[5m]``, ``offset``
functions      rate increase delta irate idelta resets changes, sum_over_time and avg min max count last present,
               abs ceil floor round sqrt exp ln log2 log10 sgn clamp clamp_min clamp_max, scalar vector time timestamp
               absent sort sort_desc histogram_quantile
aggregations   sum avg min max count group stddev stdvar quantile topk bottomk, by and without
operators      + - * / % ^, comparisons with and without bool, and or unless, on and ignoring
============== ==================================================================================================

All else is refused by what it is called (``Unsupported``, 422): subqueries, ``@``, group_left and group_right. The
meaning is that of Prometheus 2 (ranges include both of their ends), but that a sample is looked back for as long as a
slot, if that is more than five minutes. The test compares it with a real one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kivi_server.http.prom_series import LE, LOOKBACK_US, NAME, Labels, Matching, Series

from kivi.errors import InvalidArgument

__all__ = ["Evaluation", "Unsupported", "Value", "matching_of", "parsed"]

Floats = npt.NDArray[np.float64]
_LOOKBACK_MS: Final = LOOKBACK_US // 1_000
_CELLS_MAX: Final = 20_000_000


class Unsupported(InvalidArgument):
    """A question that is understood, and not answered here."""


@dataclass(frozen=True)
class Value:
    """A vector at each step: ``numbers[i, t]`` of ``labels[i]``, NaN and not ``there`` where it has no sample. A scalar
    has no labels, and one row. ``ranked``: rows are in an order that was asked for."""

    labels: Sequence[Labels] | None
    numbers: Floats
    there: npt.NDArray[np.bool_]
    ranked: bool = False


def parsed(text: str) -> Any:
    """Raises InvalidArgument."""
    try:
        import promql_parser
    except ImportError:
        raise Unsupported("PromQL needs the package promql-parser on the server: pip install 'kivi[http]'") from None
    try:
        return promql_parser.parse(text)
    except ValueError as error:
        raise InvalidArgument(f"this is no PromQL: {error}") from None


def matching_of(selector: Any) -> list[Matching]:
    """Of a parsed vector selector, with the name. Raises Unsupported."""
    if selector.matchers.or_matchers:
        raise Unsupported("matchers joined by or are not supported")
    ops = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
    found = [
        Matching(each.name, ops[str(each.op).rpartition(".")[2]], each.value) for each in selector.matchers.matchers
    ]
    return found if selector.name is None else [Matching(NAME, "=", selector.name), *found]


class Evaluation:
    """At ``times_ms``. ``select`` gives the series that match and have samples, with those
    that may be looked for between two moments in milliseconds."""

    def __init__(
        self, times_ms: npt.NDArray[np.int64], select: Callable[[list[Matching], int, int], Sequence[Series]]
    ) -> None:
        self.times_ms = times_ms
        self._select = select

    def value(self, node: Any) -> Value:
        """Raises InvalidArgument, Unsupported."""
        kind = type(node).__name__
        made: Callable[[Any], Value] | None = getattr(self, f"_of_{kind}", None)
        if made is None:
            raise Unsupported(f"{_WORDS.get(kind, kind)} is not supported here: {str(node)[:200]}")
        found = made(node)
        if found.numbers.size > _CELLS_MAX:
            raise InvalidArgument(f"the answer has more than {_CELLS_MAX:,} values: ask for fewer series or steps")
        return found

    # -- leaves ---------------------------------------------------------------------------------------------

    def _of_NumberLiteral(self, node: Any) -> Value:
        return self._scalar(float(node.val))

    def _of_ParenExpr(self, node: Any) -> Value:
        return self.value(node.expr)

    def _of_UnaryExpr(self, node: Any) -> Value:
        found = self.value(node.expr)
        return replace(found, labels=_nameless(found.labels), numbers=-found.numbers)

    def _of_VectorSelector(self, node: Any) -> Value:
        times = self.times_ms - _offset_ms(node)
        parts = []
        for series in self._select(matching_of(node), int(times[0]), int(times[-1])):
            last = np.searchsorted(series.ends_ms, times, side="right") - 1
            back = max(_LOOKBACK_MS, series.slot_ms)
            there: Any = (last >= series.first[:, None]) & (series.ends_ms[np.maximum(last, 0)] >= times - back)
            numbers = series.values[:, np.maximum(last, 0)]
            parts.append(Value(series.labels, np.where(there, numbers, np.nan), there))
        return _stacked(parts, len(times))

    def _scalar(self, number: Any) -> Value:
        numbers = np.broadcast_to(np.asarray(number, np.float64), (1, len(self.times_ms))).copy()
        return Value(None, numbers, np.ones_like(numbers, bool))

    # -- functions ------------------------------------------------------------------------------------------

    def _of_Call(self, node: Any) -> Value:
        name, arguments = node.func.name, list(node.args)
        if name in _RANGES or name in _OVER_TIME:
            return self._range(name, arguments)
        if name == "time":
            return self._scalar(self.times_ms / 1_000)
        if name == "vector":
            return replace(self.value(arguments[0]), labels=[{}])
        if name == "histogram_quantile":
            return _histogram_quantile(self.value(arguments[0]).numbers[0], self.value(arguments[1]))
        if name not in _PLAIN and name not in ("scalar", "absent", "timestamp", "sort", "sort_desc", "round", *_CLAMPS):
            raise Unsupported(f"the function {name} is not supported here")
        found = self.value(arguments[0]) if arguments else self._scalar(self.times_ms / 1_000)
        if name == "scalar":
            one = found.there.sum(axis=0) == 1
            return self._scalar(np.where(one, np.where(found.there, found.numbers, 0).sum(axis=0), np.nan))
        if name == "absent":
            none: Any = ~found.there.any(axis=0, keepdims=True)
            equal = _equalities(arguments[0])
            return Value([equal], np.where(none, 1.0, np.nan), none)
        if name == "timestamp":
            return self._timestamps(arguments[0], found)
        if name in ("sort", "sort_desc"):
            return _sorted(found, down=name == "sort_desc")
        with np.errstate(all="ignore"):
            if name in _PLAIN:
                numbers = _PLAIN[name](found.numbers)
            elif name == "round":
                nearest = self.value(arguments[1]).numbers if len(arguments) > 1 else np.ones((1, 1))
                numbers = np.floor(found.numbers / nearest + 0.5) * nearest
            else:
                bounds = [self.value(each).numbers for each in arguments[1:]]
                low = bounds[0] if name != "clamp_max" else -np.inf
                high = bounds[-1] if name != "clamp_min" else np.inf
                numbers = np.maximum(low, np.minimum(high, found.numbers))
        return replace(found, labels=_nameless(found.labels), numbers=np.where(found.there, numbers, np.nan))

    def _timestamps(self, node: Any, found: Value) -> Value:
        if type(node).__name__ != "VectorSelector":
            return replace(
                found, labels=_nameless(found.labels), numbers=np.where(found.there, self.times_ms / 1e3, np.nan)
            )
        times, rows = self.times_ms - _offset_ms(node), []
        for series in self._select(matching_of(node), int(times[0]), int(times[-1])):
            last = np.maximum(np.searchsorted(series.ends_ms, times, side="right") - 1, 0)
            rows += [series.ends_ms[last] / 1_000] * len(series.labels)
        numbers = np.array(rows).reshape(-1, len(times))
        return replace(found, labels=_nameless(found.labels), numbers=np.where(found.there, numbers, np.nan))

    def _range(self, name: str, arguments: Sequence[Any]) -> Value:
        (node,) = arguments
        if type(node).__name__ != "MatrixSelector":
            raise Unsupported(f"{name} of {_WORDS.get(type(node).__name__, type(node).__name__)} is not supported here")
        range_ms = round(node.range.total_seconds() * 1_000)
        high_ms = self.times_ms - _offset_ms(node.vector_selector)
        parts = []
        for series in self._select(matching_of(node.vector_selector), int(high_ms[0]) - range_ms, int(high_ms[-1])):
            low = np.searchsorted(series.ends_ms, high_ms - range_ms, side="left")
            high = np.searchsorted(series.ends_ms, high_ms, side="right") - 1
            window = _Window(series, np.maximum(low, series.first[:, None]), high[None, :], high_ms, range_ms)
            with np.errstate(all="ignore"):
                numbers, there = (_RANGES.get(name) or _OVER_TIME[name])(window)
            labels = series.labels if name == "last_over_time" else _nameless(series.labels)
            parts.append(Value(labels, np.where(there, numbers, np.nan), there))
        return _stacked(parts, len(self.times_ms))

    # -- aggregations ---------------------------------------------------------------------------------------

    def _of_AggregateExpr(self, node: Any) -> Value:
        op = str(node.op)
        found = self.value(node.expr)
        if found.labels is None:
            raise InvalidArgument(f"{op} is of a vector, not of a scalar")
        groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for i, labels in enumerate(found.labels):
            groups.setdefault(tuple(sorted(_grouped(labels, node.modifier).items())), []).append(i)
        parameter = None if node.param is None else self.value(node.param).numbers[0]
        if op in ("topk", "bottomk"):
            assert parameter is not None
            return _ranked(found, list(groups.values()), parameter, down=op == "topk")
        if op not in _AGGREGATIONS:
            raise Unsupported(f"the aggregation {op} is not supported here")
        rows, there = [], []
        for members in groups.values():
            each, here = found.numbers[members], found.there[members]
            with np.errstate(all="ignore"):
                rows.append(_AGGREGATIONS[op](each, here, parameter))
            there.append(here.any(axis=0))
        shape = (len(groups), len(self.times_ms))
        present = np.array(there, bool).reshape(shape)
        return Value([dict(key) for key in groups], np.where(present, np.array(rows).reshape(shape), np.nan), present)

    # -- operators ------------------------------------------------------------------------------------------

    def _of_BinaryExpr(self, node: Any) -> Value:
        op, modifier = str(node.op), node.modifier
        left, right = self.value(node.lhs), self.value(node.rhs)
        if modifier is not None and modifier.group_labels is not None:
            raise Unsupported("group_left and group_right are not supported here")
        if modifier is not None and str(modifier.card).rpartition(".")[2] in ("ManyToOne", "OneToMany"):
            raise Unsupported("group_left and group_right are not supported here")
        matching = None if modifier is None else modifier.matching
        if op in ("and", "or", "unless"):
            return _sets(op, left, right, matching)
        if op not in _OPERATORS:
            raise Unsupported(f"the operator {op} is not supported here")
        gives_bool = modifier is not None and modifier.return_bool
        if left.labels is not None and right.labels is not None:
            left, right = _paired(left, right, matching, keeps_name=op in _COMPARISONS and not gives_bool)
        with np.errstate(all="ignore"):
            numbers = _OPERATORS[op](left.numbers, right.numbers).astype(np.float64)
        there = left.there & right.there
        labels = left.labels if left.labels is not None else right.labels
        if op in _COMPARISONS and not gives_bool:
            if labels is None:
                raise InvalidArgument("comparisons between scalars need bool")
            kept = left.numbers if left.labels is not None else right.numbers
            there = there & (numbers > 0)
            return Value(labels, np.where(there, kept, np.nan), there)
        return Value(_nameless(labels), np.where(there, numbers, np.nan), there)


# -- ranges ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """Of each series (rows) at each step (columns), the samples from ``low`` to ``high``, both included."""

    series: Series
    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    high_ms: npt.NDArray[np.int64]
    range_ms: int

    @property
    def count(self) -> npt.NDArray[np.int64]:
        count: npt.NDArray[np.int64] = np.maximum(self.high - self.low + 1, 0)
        return count

    def at(self, array: npt.NDArray[Any], place: npt.NDArray[np.int64]) -> Floats:
        """Of a row per series; where there is no such place, any."""
        places = np.broadcast_to(np.clip(place, 0, array.shape[1] - 1), self.low.shape)
        return np.take_along_axis(array, places, axis=1)

    def sums(self, array: Floats) -> Floats:
        """Of those of an array in the window, its first left out."""
        return self.at(np.cumsum(array, axis=1), self.high) - self.at(np.cumsum(array, axis=1), self.low)

    def time_s(self, place: npt.NDArray[np.int64]) -> Floats:
        ends = self.series.ends_ms
        return np.broadcast_to(ends[np.clip(place, 0, len(ends) - 1)] / 1_000, self.low.shape)


def _drops(values: Floats) -> Floats:
    """At each place where a counter begins anew, what it had before."""
    out = np.zeros_like(values)
    out[:, 1:] = np.where(values[:, 1:] < values[:, :-1], values[:, :-1], 0)
    return out


def _extrapolated(window: _Window, *, counter: bool, by_second: bool) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Prometheus' extrapolatedRate (promql/functions.go, 2.42)."""
    values, count = window.series.values, window.count
    first, last = window.at(values, window.low), window.at(values, window.high)
    gained = last - first + (window.sums(_drops(values)) if counter else 0)
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
    numbers = gained * (whole / sampled)
    return (numbers / (window.range_ms / 1_000) if by_second else numbers), count >= 2


def _instant(window: _Window, *, by_second: bool) -> tuple[Floats, npt.NDArray[np.bool_]]:
    last, before = window.at(window.series.values, window.high), window.at(window.series.values, window.high - 1)
    gained = np.where(by_second & (last < before), last, last - before)
    if by_second:
        gained = gained / (window.time_s(window.high) - window.time_s(window.high - 1))
    return gained, window.count >= 2


def _counted(window: _Window, happens: Callable[[Floats, Floats], Any]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    values = window.series.values
    flags = np.zeros_like(values)
    flags[:, 1:] = happens(values[:, 1:], values[:, :-1])
    return window.sums(flags), window.count >= 1


def _summed(window: _Window) -> Floats:
    return window.sums(window.series.values) + window.at(window.series.values, window.low)


def _extreme(window: _Window, reduce: Any) -> tuple[Floats, npt.NDArray[np.bool_]]:
    out = np.full(window.low.shape, np.nan)
    for i, k in zip(*np.nonzero(window.count > 0), strict=True):
        out[i, k] = reduce(window.series.values[i, window.low[i, k] : window.high[0, k] + 1])
    return out, window.count >= 1


_Ranged = Callable[[_Window], tuple[Floats, npt.NDArray[np.bool_]]]
_RANGES: Final[dict[str, _Ranged]] = {
    "rate": lambda w: _extrapolated(w, counter=True, by_second=True),
    "increase": lambda w: _extrapolated(w, counter=True, by_second=False),
    "delta": lambda w: _extrapolated(w, counter=False, by_second=False),
    "irate": lambda w: _instant(w, by_second=True),
    "idelta": lambda w: _instant(w, by_second=False),
    "resets": lambda w: _counted(w, operator.lt),
    "changes": lambda w: _counted(w, operator.ne),
}
_OVER_TIME: Final[dict[str, _Ranged]] = {
    "sum_over_time": lambda w: (_summed(w), w.count >= 1),
    "avg_over_time": lambda w: (_summed(w) / w.count, w.count >= 1),
    "count_over_time": lambda w: (w.count.astype(np.float64), w.count >= 1),
    "present_over_time": lambda w: (np.ones(w.count.shape), w.count >= 1),
    "last_over_time": lambda w: (w.at(w.series.values, w.high), w.count >= 1),
    "min_over_time": lambda w: _extreme(w, np.min),
    "max_over_time": lambda w: _extreme(w, np.max),
}
_PLAIN: Final[dict[str, Callable[[Floats], Floats]]] = {
    "abs": np.abs, "ceil": np.ceil, "floor": np.floor, "sqrt": np.sqrt, "exp": np.exp, "ln": np.log,
    "log2": np.log2, "log10": np.log10, "sgn": np.sign,
}  # fmt: skip
_CLAMPS: Final = ("clamp", "clamp_min", "clamp_max")


# -- aggregations and operators ----------------------------------------------------------------------------


def _variance(each: Floats, here: npt.NDArray[np.bool_], _: Any) -> Floats:
    """Welford's, one series after the other, as Prometheus does it: of one infinite value it is 0."""
    count, mean, value = np.zeros(each.shape[1]), np.zeros(each.shape[1]), np.zeros(each.shape[1])
    for row, is_there in zip(each, here, strict=True):
        count = count + is_there
        off = row - mean
        after = np.where(count == 1, row, mean + off / count)
        value = np.where(is_there & (count > 1), value + off * (row - after), value)
        mean = np.where(is_there, after, mean)
    return value / count


def _quantile(each: Floats, here: npt.NDArray[np.bool_], parameter: Any) -> Floats:
    out = np.full(each.shape[1], np.nan)
    for t in np.flatnonzero(here.any(axis=0)):
        q, found = parameter[t], np.sort(each[here[:, t], t])
        if q != q:
            continue
        if not 0 <= q <= 1:
            out[t] = -np.inf if q < 0 else np.inf
            continue
        rank = q * (len(found) - 1)
        low = int(max(0, np.floor(rank)))
        high, weight = min(len(found) - 1, low + 1), rank - np.floor(rank)
        out[t] = found[low] * (1 - weight) + found[high] * weight
    return out


def _histogram_quantile(q: Floats, found: Value) -> Value:
    """Of the series with a label ``le``, by all others (promql/quantile.go, bucketQuantile, 2.42)."""
    groups: dict[tuple[tuple[str, str], ...], list[tuple[float, int]]] = {}
    for i, labels in enumerate(found.labels or ()):
        try:
            bound = float(labels[LE])
        except (KeyError, ValueError):
            continue
        key = _key({name: value for name, value in labels.items() if name not in (NAME, LE) and value})
        groups.setdefault(key, []).append((bound, i))
    shape = (len(groups), len(q))
    numbers, there = np.full(shape, np.nan), np.zeros(shape, bool)
    for row, members in enumerate(groups.values()):
        members.sort()
        bounds, rows = np.array([bound for bound, _ in members]), [i for _, i in members]
        there[row] = found.there[rows].any(axis=0)
        for t in np.flatnonzero(there[row]):
            here = found.there[rows, t]
            numbers[row, t] = _bucket_quantile(q[t], bounds[here], found.numbers[rows, t][here])
    return Value([dict(key) for key in groups], numbers, there)


def _bucket_quantile(q: float, bounds: Floats, counts: Floats) -> float:
    if q != q:
        return np.nan
    if q < 0 or q > 1:
        return -np.inf if q < 0 else np.inf
    if len(bounds) < 2 or not np.isposinf(bounds[-1]):
        return np.nan
    first = np.concatenate([[True], bounds[1:] != bounds[:-1]])  # equal bounds are one bucket
    bounds, counts = bounds[first], np.maximum.accumulate(np.add.reduceat(counts, np.flatnonzero(first)))
    if len(bounds) < 2 or not counts[-1]:
        return np.nan
    rank = q * counts[-1]
    b = int(np.searchsorted(counts[:-1], rank))
    if b == len(bounds) - 1:
        return float(bounds[-2])
    if b == 0 and bounds[0] <= 0:
        return float(bounds[0])
    start, below = (bounds[b - 1], counts[b - 1]) if b else (0.0, 0.0)
    return float(start + (bounds[b] - start) * ((rank - below) / (counts[b] - below)))


_AGGREGATIONS: Final[dict[str, Callable[[Floats, npt.NDArray[np.bool_], Any], Floats]]] = {
    "sum": lambda each, here, _: np.where(here, each, 0).sum(axis=0),
    "avg": lambda each, here, _: np.where(here, each, 0).sum(axis=0) / here.sum(axis=0),
    "min": lambda each, here, _: np.fmin.reduce(each, axis=0),
    "max": lambda each, here, _: np.fmax.reduce(each, axis=0),
    "count": lambda each, here, _: here.sum(axis=0).astype(np.float64),
    "group": lambda each, here, _: np.ones(each.shape[1]),
    "stdvar": _variance,
    "stddev": lambda each, here, _: np.sqrt(_variance(each, here, _)),
    "quantile": _quantile,
}
_COMPARISONS: Final = ("==", "!=", "<", "<=", ">", ">=")
_OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": np.divide, "%": np.fmod, "^": np.power,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_WORDS: Final = {
    "SubqueryExpr": "a subquery", "MatrixSelector": "a range without a function", "StringLiteral": "a text",
}  # fmt: skip


def _offset_ms(selector: Any) -> int:
    if selector.at is not None:
        raise Unsupported("@ is not supported here")
    return 0 if selector.offset is None else round(selector.offset.total_seconds() * 1_000)


def _nameless(labels: Sequence[Labels] | None) -> Sequence[Labels] | None:
    if labels is None:
        return None
    return [{name: value for name, value in each.items() if name != NAME} for each in labels]


def _equalities(node: Any) -> Labels:
    if type(node).__name__ != "VectorSelector":
        return {}
    return {each.name: each.value for each in matching_of(node) if each.op == "=" and each.name != NAME}


def _grouped(labels: Labels, modifier: Any) -> Labels:
    if modifier is None:
        return {}
    if str(modifier.type).endswith("By"):
        return {name: value for name, value in labels.items() if name in modifier.labels and value}
    return {name: value for name, value in labels.items() if name not in modifier.labels and name != NAME and value}


def _matched(labels: Labels, matching: Any) -> Labels:
    """The labels by which two vectors are matched."""
    if matching is not None and str(matching.type).endswith("Include"):
        return {name: labels.get(name, "") for name in matching.labels if labels.get(name, "")}
    ignored = [NAME] if matching is None else [NAME, *matching.labels]
    return {name: value for name, value in labels.items() if name not in ignored and value}


def _key(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _stacked(parts: Sequence[Value], steps: int) -> Value:
    if not parts:
        return Value([], np.zeros((0, steps)), np.zeros((0, steps), bool))
    labels = [each for part in parts for each in part.labels or ()]
    return Value(labels, np.vstack([part.numbers for part in parts]), np.vstack([part.there for part in parts]))


def _taken(value: Value, rows: Sequence[int], labels: Sequence[Labels]) -> Value:
    return Value(labels, value.numbers[list(rows)], value.there[list(rows)])


def _paired(left: Value, right: Value, matching: Any, *, keeps_name: bool) -> tuple[Value, Value]:
    """The rows that match, one to one. Raises InvalidArgument where several do."""
    assert left.labels is not None and right.labels is not None
    of_right = _by_key(right, matching)
    of_left = _by_key(left, matching)
    both = [key for key in of_left if key in of_right]
    for found in (of_left, of_right):
        if any(len(found[key]) > 1 for key in both):
            raise InvalidArgument("several series match one: name the labels by which they do with on or ignoring")
    labels = []
    for key in both:
        of = left.labels[of_left[key][0]]
        kept = dict(key) if matching is not None else {n: v for n, v in of.items() if n != NAME}
        labels.append({**({NAME: of[NAME]} if keeps_name and NAME in of and matching is None else {}), **kept})
    return (
        _taken(left, [of_left[key][0] for key in both], labels),
        _taken(right, [of_right[key][0] for key in both], labels),
    )


def _by_key(value: Value, matching: Any) -> dict[tuple[tuple[str, str], ...], list[int]]:
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for i, labels in enumerate(value.labels or ()):
        found.setdefault(_key(_matched(labels, matching)), []).append(i)
    return found


def _sets(op: str, left: Value, right: Value, matching: Any) -> Value:
    if left.labels is None or right.labels is None:
        raise InvalidArgument(f"{op} is between vectors")
    of_left, of_right = _by_key(left, matching), _by_key(right, matching)
    there = left.there.copy()
    nothing = np.zeros(left.there.shape[1], bool)
    for key, rows in of_left.items():
        other = right.there[of_right[key]].any(axis=0) if key in of_right else nothing
        for row in rows:
            there[row] &= other if op == "and" else True if op == "or" else ~other
    kept = Value(left.labels, np.where(there, left.numbers, np.nan), there)
    if op != "or":
        return kept
    added = right.there.copy()
    for key, rows in of_right.items():
        if key in of_left:
            for row in rows:
                added[row] &= ~left.there[of_left[key]].any(axis=0)
    numbers, place = kept.numbers, {_key(labels): i for i, labels in enumerate(left.labels)}
    others = list[int]()
    for row, labels in enumerate(right.labels):  # which may be the left's at other steps
        if (at := place.get(_key(labels))) is None:
            others.append(row)
        else:
            numbers[at] = np.where(added[row], right.numbers[row], numbers[at])
            there[at] |= added[row]
    rest = _taken(Value(right.labels, np.where(added, right.numbers, np.nan), added), others,
                  [right.labels[row] for row in others])  # fmt: skip
    return _stacked([Value(left.labels, numbers, there), rest], len(nothing))


def _ranked(found: Value, groups: Sequence[Sequence[int]], parameter: Floats, *, down: bool) -> Value:
    there = np.zeros_like(found.there)
    for members in groups:
        each = found.numbers[list(members)]
        order = np.where(found.there[list(members)], -each if down else each, np.inf)
        for t in range(each.shape[1]):
            here = [i for i in np.argsort(order[:, t], kind="stable") if found.there[members[i], t]]
            for i in here[: max(0, int(parameter[t]))]:
                there[members[i], t] = True
    kept = replace(found, numbers=np.where(there, found.numbers, np.nan), there=there)
    return _sorted(kept, down=down)


def _sorted(found: Value, *, down: bool) -> Value:
    """By the last step: Prometheus sorts instants only."""
    last = np.where(found.there[:, -1], found.numbers[:, -1], np.nan)
    order = np.argsort(-last if down else last, kind="stable")
    return Value([(found.labels or [{}])[i] for i in order], found.numbers[order], found.there[order], ranked=True)
