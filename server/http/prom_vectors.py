"""Vectors of PromQL, at all steps at once: how they are aggregated, matched with each other, and put in order.

Two vectors are matched as Prometheus' VectorBinop does it (promql/engine.go, 2.42). At a step at which both have
samples, no two of the side that is one have the same labels to match by; and of what the operator keeps no two have met
the same one (one to one), or not with the same labels in the answer (group_left, group_right). So a comparison that
holds for one of many has an answer, and where it holds for two of them it has none.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kivi_server.http.prom_series import LE, NAME, Labels, Unanswerable

__all__ = [
    "Value",
    "aggregated",
    "count_values",
    "distinct",
    "fitting",
    "grouped",
    "histogram_quantile",
    "in_order",
    "is_on",
    "matched",
    "nameless",
    "quantile_of",
    "ranked",
    "sets",
    "stacked",
]

Floats = npt.NDArray[np.float64]
_Key = tuple[tuple[str, str], ...]
_CELLS_MAX: Final = 20_000_000


def fitting(rows: int, steps: int) -> None:
    """Raises Unanswerable."""
    if rows * steps > _CELLS_MAX:
        raise Unanswerable(f"the answer has more than {_CELLS_MAX:,} values: ask for fewer series or steps")


@dataclass(frozen=True)
class Value:
    """A vector at each step: ``numbers[i, t]`` of ``labels[i]``, NaN and not ``there`` where it has no sample. A scalar
    has no labels, and one row. No label is empty. ``ranked``: rows are in an order that was asked for."""

    labels: Sequence[Labels] | None
    numbers: Floats
    there: npt.NDArray[np.bool_]
    ranked: bool = False


def nameless(labels: Sequence[Labels] | None) -> Sequence[Labels] | None:
    return None if labels is None else [_without(each, (NAME,)) for each in labels]


def _only(labels: Labels, names: Sequence[str]) -> Labels:
    return {name: value for name, value in labels.items() if name in names}


def _without(labels: Labels, names: Sequence[str]) -> Labels:
    return {name: value for name, value in labels.items() if name not in names}


# -- aggregations --------------------------------------------------------------------------------------------


def grouped(value: Value, modifier: Any, also: Sequence[str] = ()) -> dict[_Key, list[int]]:
    """The rows of each group, by the group's labels: those of ``by`` and ``also``, or all but those of ``without``."""
    found: dict[_Key, list[int]] = {}
    for i, labels in enumerate(value.labels or ()):
        if modifier is not None and not str(modifier.type).endswith("By"):
            kept = _without(labels, [NAME, *modifier.labels])
        else:
            kept = _only(labels, also if modifier is None else [*modifier.labels, *also])
        found.setdefault(_key(kept), []).append(i)
    return found


def aggregated(op: str, value: Value, groups: dict[_Key, list[int]], parameter: Floats | None) -> Value:
    """A row for each group. Raises Unanswerable."""
    if op not in _AGGREGATIONS:
        raise Unanswerable(f"the aggregation {op} is not supported here")
    shape = (len(groups), value.there.shape[1])
    numbers, there = np.full(shape, np.nan), np.zeros(shape, bool)
    for row, members in enumerate(groups.values()):
        there[row] = value.there[members].any(axis=0)
        numbers[row] = _AGGREGATIONS[op](value.numbers[members], value.there[members], parameter)
    return Value([dict(key) for key in groups], np.where(there, numbers, np.nan), there)


def count_values(name: str, value: Value) -> Value:
    """A row for each number that a row has, with it as a label, where it has it."""
    labels, there = list[Labels](), list[npt.NDArray[np.bool_]]()
    for each, row, here in zip(value.labels or (), value.numbers, value.there, strict=True):
        found = np.unique(row[here])
        fitting(len(labels) + len(found), len(row))
        for number in found:
            labels.append({**each, name: _decimal(float(number))})
            there.append(here & ((row == number) | (np.isnan(row) & np.isnan(number))))
    present = np.array(there, bool).reshape(len(labels), value.there.shape[1])
    return Value(labels, np.where(present, 1.0, np.nan), present)


def _decimal(number: float) -> str:
    """As Go's strconv writes it in the format f."""
    if not np.isfinite(number):
        return {np.inf: "+Inf", -np.inf: "-Inf"}.get(number, "NaN")
    return np.format_float_positional(number, trim="-")


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
    """``quantile_of`` what is there, at all steps."""
    found = np.take_along_axis(each, np.lexsort([each, ~np.isnan(each), ~here], axis=0), axis=0)
    valid, most = (parameter >= 0) & (parameter <= 1), np.maximum(here.sum(axis=0) - 1, 0)
    rank = np.where(valid, parameter, 0) * most
    low = np.floor(rank).astype(np.int64)
    (least,), (next_,) = (np.take_along_axis(found, at[None], axis=0) for at in (low, np.minimum(most, low + 1)))
    within = least * (1 - (rank - low)) + next_ * (rank - low)
    return np.where(valid, within, np.where(parameter < 0, -np.inf, np.where(parameter > 1, np.inf, np.nan)))


def quantile_of(q: float, values: Floats) -> float:
    if not 0 <= q <= 1:
        return -np.inf if q < 0 else np.inf if q > 1 else np.nan
    found = values[np.lexsort([values, ~np.isnan(values)])]  # NaN is less than all
    rank = q * (len(found) - 1)
    low = int(np.floor(rank))
    high, weight = min(len(found) - 1, low + 1), rank - low
    return float(found[low] * (1 - weight) + found[high] * weight)


def histogram_quantile(q: Floats, found: Value, count: Callable[[int], None]) -> Value:
    """Of the series with a label ``le``, by all others (promql/quantile.go, bucketQuantile, 2.42). ``count`` is told of
    how many histograms it is."""
    groups: dict[_Key, list[tuple[float, int]]] = {}
    for i, labels in enumerate(found.labels or ()):
        try:
            bound = float(labels[LE])
        except (KeyError, ValueError):
            continue
        groups.setdefault(_key(_without(labels, (LE,))), []).append((bound, i))
    shape = (len(groups), len(q))
    numbers, there = np.full(shape, np.nan), np.zeros(shape, bool)
    for row, members in enumerate(groups.values()):
        members.sort()
        bounds, rows = np.array([bound for bound, _ in members]), [i for _, i in members]
        there[row] = found.there[rows].any(axis=0)
        count(int(np.count_nonzero(there[row])))
        for t in np.flatnonzero(there[row]):
            here = found.there[rows, t]
            numbers[row, t] = _bucket_quantile(q[t], bounds[here], found.numbers[rows, t][here])
    return Value([_without(dict(key), (NAME,)) for key in groups], numbers, there)


def _bucket_quantile(q: float, bounds: Floats, counts: Floats) -> float:
    if not 0 <= q <= 1:
        return -np.inf if q < 0 else np.inf if q > 1 else np.nan
    if len(bounds) < 2 or not np.isposinf(bounds[-1]):
        return np.nan
    first = np.concatenate([[True], bounds[1:] != bounds[:-1]])  # equal bounds are one bucket
    bounds, counts = bounds[first], np.add.reduceat(counts, np.flatnonzero(first))
    if not np.isnan(counts[0]):  # one that is no number raises none, and is not raised
        counts = np.where(np.isnan(counts), np.nan, np.fmax.accumulate(counts))
    if len(bounds) < 2 or not counts[-1]:
        return np.nan
    rank = q * counts[-1]
    b = bisect.bisect_left(range(len(bounds) - 1), True, key=lambda i: bool(counts[i] >= rank))
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


# -- matching ------------------------------------------------------------------------------------------------


def is_on(matching: Any) -> bool:
    """Whether it names the labels that count, and not those that do not."""
    return matching is not None and str(matching.type).endswith("Include")


def _matching(labels: Labels, matching: Any) -> Labels:
    """Those that on names, or all but those that ignoring names."""
    if matching is None:
        return labels
    return (_only if is_on(matching) else _without)(labels, matching.labels)


def _key(labels: Labels) -> _Key:
    return tuple(sorted(labels.items()))


def stacked(parts: Sequence[Value], steps: int) -> Value:
    if not parts:
        return Value([], np.zeros((0, steps)), np.zeros((0, steps), bool))
    labels = [each for part in parts for each in part.labels or ()]
    return Value(labels, np.vstack([part.numbers for part in parts]), np.vstack([part.there for part in parts]))


def _taken(value: Value, rows: Sequence[Any], labels: Sequence[Labels]) -> Value:
    return Value(labels, value.numbers[list(rows)], value.there[list(rows)])


def distinct(value: Value) -> Value:
    """Series with equal labels are one, with what one of them has at each step.

    Raises Unanswerable where two of them have a sample.
    """
    rows: dict[_Key, list[int]] = {}
    for i, labels in enumerate(value.labels or ()):
        rows.setdefault(_key(labels), []).append(i)
    if value.labels is None or len(rows) == len(value.labels):
        return value
    if any((value.there[members].sum(axis=0) > 1).any() for members in rows.values()):
        raise Unanswerable(_SAME)
    joined = _joined(value, list(rows.values()))
    return replace(joined, labels=[value.labels[each[0]] for each in rows.values()], ranked=value.ranked)


def _joined(value: Value, groups: Sequence[Sequence[int]]) -> Value:
    """A row for each group of rows, of which at each step one at most has a sample."""
    shape = len(groups), value.numbers.shape[1]
    numbers, there = np.full(shape, np.nan), np.zeros(shape, bool)
    for row, members in enumerate(groups):
        here = value.there[list(members)]
        there[row] = here.any(axis=0)
        numbers[row] = np.where(here, value.numbers[list(members)], 0).sum(axis=0)
    return Value([{}] * len(groups), np.where(there, numbers, np.nan), there)


_SAME: Final = "several series have the same labels here: sum them up, or select one of their names"
_SEVERAL: Final = "several series match one: name the labels by which they do with on or ignoring, or use group_left"


def matched(
    left: Value, right: Value, modifier: Any, operate: Callable[[Floats, Floats], tuple[Floats, Any]], *, named: bool
) -> Value:
    """What an operator gives for the samples that match, and whether it keeps them; ``named``: with their names.

    Raises Unanswerable where more match than may.
    """
    matching, card, included = None, "OneToOne", list[str]()
    if modifier is not None:
        matching, card = modifier.matching, str(modifier.card).rpartition(".")[2]
        included = modifier.group_labels or []
    many, one = (right, left) if card == "OneToMany" else (left, right)
    both = many.there.any(axis=0) & one.there.any(axis=0)  # at the other steps there is nothing to match
    one = replace(one, there=one.there & both)
    given: dict[_Key, dict[_Key, list[int]]] = {}
    for key, members in _by_key(one, matching).items():
        _at_most_one(one.there[members])
        for row in members:
            given.setdefault(key, {}).setdefault(_key(_only((one.labels or ())[row], included)), []).append(row)
    once = _joined(one, [members for parts in given.values() for members in parts.values()])
    places = iter(range(len(once.numbers)))
    place = {key: [(next(places), part) for part in parts] for key, parts in given.items()}
    rows, others, labels, groups = list[int](), list[int](), list[Labels](), dict[tuple[_Key, _Key], list[int]]()
    keys = _by_key(many, matching)
    fitting(sum(len(members) * len(place.get(key, ())) for key, members in keys.items()), both.size)
    for key, members in keys.items():
        for row in members:
            of = (many.labels or ())[row] if named else _without((many.labels or ())[row], (NAME,))
            for other, part in place.get(key, ()):
                is_one = card == "OneToOne"
                shown = _matching(of, matching) if is_one else {**_without(of, included), **dict(part)}
                groups.setdefault((key, () if is_one else _key(shown)), []).append(len(rows))
                rows.append(row)
                others.append(other)
                labels.append(shown)
    sides = many.numbers[rows], once.numbers[others]
    numbers, kept = operate(*(sides if card != "OneToMany" else sides[::-1]))
    there = many.there[rows] & once.there[others] & kept
    for members in groups.values():
        _at_most_one(there[members])
    return Value(labels, np.where(there, numbers, np.nan), there)


def _at_most_one(there: Any) -> None:
    if len(there) > 1 and (there.sum(axis=0) > 1).any():
        raise Unanswerable(_SEVERAL)


def _by_key(value: Value, matching: Any) -> dict[_Key, list[int]]:
    found: dict[_Key, list[int]] = {}
    for i, labels in enumerate(value.labels or ()):
        compared = labels if is_on(matching) else _without(labels, (NAME,))
        found.setdefault(_key(_matching(compared, matching)), []).append(i)
    return found


def sets(op: str, left: Value, right: Value, matching: Any) -> Value:
    if left.labels is None or right.labels is None:
        raise Unanswerable(f"{op} is between vectors")
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
    return stacked([Value(left.labels, numbers, there), rest], len(nothing))


def ranked(found: Value, groups: Iterable[Sequence[int]], parameter: Floats, *, down: bool) -> Value:
    there, order, most = np.zeros_like(found.there), list[int](), np.trunc(parameter)
    if not (np.abs(parameter) < 1 << 63).all():
        raise Unanswerable(f"topk and bottomk are of a number of series, not {parameter[0]:g}")
    for members in groups:
        each, here = found.numbers[list(members)], found.there[list(members)]
        each = np.where(here, -each if down else each, np.inf)
        places = np.lexsort([each, ~here], axis=0).argsort(axis=0)  # of each, among those that are there
        there[list(members)] = here & (places < most)
        order += [members[i] for i in np.argsort(each[:, -1], kind="stable")]
    kept = replace(found, numbers=np.where(there, found.numbers, np.nan), there=there)
    return replace(_taken(kept, order, [(found.labels or [{}])[i] for i in order]), ranked=True)


def in_order(found: Value, *, down: bool) -> Value:
    """By the last step: Prometheus sorts instants only."""
    last = np.where(found.there[:, -1], found.numbers[:, -1], np.nan)
    order = np.argsort(-last if down else last, kind="stable").tolist()
    return replace(_taken(found, order, [(found.labels or [{}])[i] for i in order]), ranked=True)
