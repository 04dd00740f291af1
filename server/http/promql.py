"""PromQL, a part of it, over the series of aggregates: what is parsed is evaluated for all steps at once.

============== ==================================================================================================
selectors      ``name{label="x", other!~"y.*"}``, ``[5m]``, ``offset``, ``@``, subqueries
functions      rate increase delta irate idelta resets changes, sum_over_time and avg min max count last present
               absent stddev stdvar quantile, abs ceil floor round sqrt exp ln log2 log10 sgn clamp clamp_min clamp_max,
               scalar vector time timestamp absent sort sort_desc, label_replace label_join, histogram_quantile
aggregations   sum avg min max count group stddev stdvar quantile topk bottomk count_values, by and without
operators      ``+ - * / % ^`` atan2, comparisons with and without bool, and or unless, on and ignoring, group_left and
               group_right
============== ==================================================================================================

All else is refused by what it is called (``Unanswerable``, 422), and so is what reads too many samples of ranges
(``prom_ranges.Work``). The meaning is that of Prometheus 2 (ranges include
both of their ends), but that a sample is looked back for as long as a slot, if that is more than five minutes. The test
compares it with a real one.
"""

from __future__ import annotations

import datetime as dt
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from kivi_server.http.prom_ranges import HISTOGRAM, RANGES, Window, Work
from kivi_server.http.prom_series import LE, LOOKBACK_US, NAME, Labels, Matching, Series, Unanswerable, anchored
from kivi_server.http.prom_vectors import (
    Value,
    aggregated,
    count_values,
    distinct,
    fitting,
    grouped,
    histogram_quantile,
    in_order,
    is_on,
    matched,
    nameless,
    ranked,
    sets,
    stacked,
)

from kivi.errors import InvalidArgument

__all__ = ["Evaluation", "Selection", "Value", "matching_of", "parsed", "selections"]

Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]
Selection = tuple[Matching, ...]
_LOOKBACK_MS: Final = LOOKBACK_US // 1_000
_SUBQUERY_STEP_MS: Final = 60_000
"""Of one that names none: Prometheus' evaluation_interval, unless it is configured."""
_MS_MAX: Final = 1e14
_STEPS_MAX: Final = 1_000_000
_LEVELS_MAX: Final = 1_000
_LEVEL: Final = re.compile(r"[-+*/%^<>=!(]|\b(?:and|or|unless|atan2)\b", re.IGNORECASE)
_PASSED_OVER: Final = re.compile(r""""(?:[^"\\\n]|\\.)*+"?|'(?:[^'\\\n]|\\.)*+'?|`[^`]*`?|#[^\n\r]*""")
"""Texts and comments. A text that does not end is none to the parser either, and is looked at once."""
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_REFERENCE: Final = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\}|)", re.ASCII)


def parsed(text: str) -> Any:
    """Raises InvalidArgument.

    The parser's stack grows with how deep a question is, and some thousands of levels end the process. Each level has
    an operator or a bracket, so these are counted first, but for those in texts and comments.
    """
    if len(_LEVEL.findall(_PASSED_OVER.sub(" ", text))) > _LEVELS_MAX:
        raise Unanswerable(f"the question has more than {_LEVELS_MAX:,} operators and brackets: ask for its parts")
    try:
        import promql_parser
    except ImportError:
        raise Unanswerable("PromQL needs the package promql-parser on the server: pip install 'kivi[http]'") from None
    try:
        return promql_parser.parse(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also a panic, which is no Exception: of a time span that is infinite, for one
        raise InvalidArgument(f"this is no PromQL: {error}") from None


def matching_of(selector: Any) -> Selection:
    """Of a parsed vector selector, with the name. Raises InvalidArgument, Unanswerable."""
    if selector.matchers.or_matchers:
        raise Unanswerable("matchers joined by or are not supported")
    ops = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
    found = [
        Matching(each.name, ops[str(each.op).rpartition(".")[2]], each.value) for each in selector.matchers.matchers
    ]
    for each in found:
        if each.op in ("=~", "!~"):  # the parser takes those that closing a bracket around them makes right
            anchored(each.value)
    return tuple(found if selector.name is None else [Matching(NAME, "=", selector.name), *found])


def selections(node: Any) -> Iterator[Selection]:
    """What all selectors of an expression select. Raises InvalidArgument, Unanswerable."""
    nodes = [node]
    while nodes:  # as deep as a question may be
        node = nodes.pop()
        if type(node).__name__ == "VectorSelector":
            yield matching_of(node)
            continue
        parts = [*(getattr(node, name, None) for name in _PARTS), *getattr(node, "args", ())]
        nodes += [each for each in parts if each is not None]


@dataclass(frozen=True)
class Evaluation:
    """At ``times_ms``. ``select`` gives the series that match and have samples, with those that may be looked for
    between two moments in milliseconds; of a histogram with the bounds of all those that ``bounding`` selects, or with
    its own if that is empty. ``asked_ms``: where the whole question starts and ends, for ``@``."""

    times_ms: Times
    select: Callable[[Selection, int, int, Sequence[Selection]], Sequence[Series]]
    asked_ms: tuple[int, int]
    bounding: tuple[Selection, ...] = ()
    work: Work = field(default_factory=Work)

    def value(self, node: Any) -> Value:
        """Raises InvalidArgument, Unanswerable.

        What the parts of an expression are is held until it is evaluated, and let go then.
        """
        kind, held = type(node).__name__, self.work.held
        made: Callable[[Any], Value] | None = getattr(self, f"_of_{kind}", None)
        if made is None:
            raise Unanswerable(f"{_WORDS.get(kind, kind)} is not supported here")
        with np.errstate(all="ignore"):
            found = distinct(made(node))
        self.work.hold(held + found.numbers.size)
        return found

    # -- leaves ---------------------------------------------------------------------------------------------

    def _of_NumberLiteral(self, node: Any) -> Value:
        return self._scalar(float(node.val))

    def _of_ParenExpr(self, node: Any) -> Value:
        return self.value(node.expr)

    def _of_UnaryExpr(self, node: Any) -> Value:
        found = self.value(node.expr)
        return replace(found, labels=nameless(found.labels), numbers=-found.numbers)

    def _of_VectorSelector(self, node: Any) -> Value:
        return self._looked_up(node, lambda series, last: series.values[:, last])

    def _looked_up(self, node: Any, numbers_of: Callable[[Series, Times], Floats]) -> Value:
        """Of each series what a function says of the place of the last sample at each step."""
        times, parts = self._times(node), list[Value]()
        for series in self._selected(node, times):
            fitting(len(series.labels), len(times))
            last = np.searchsorted(series.ends_ms, times, side="right") - 1
            back = max(_LOOKBACK_MS, series.slot_ms)
            there: Any = (last >= series.first[:, None]) & (series.ends_ms[np.maximum(last, 0)] >= times - back)
            parts.append(Value(series.labels, np.where(there, numbers_of(series, np.maximum(last, 0)), np.nan), there))
        return stacked(parts, len(times))

    def _selected(self, selector: Any, times: Times, range_ms: int = 0) -> Sequence[Series]:
        return self.select(matching_of(selector), int(times[0]) - range_ms, int(times[-1]), self.bounding)

    def _times(self, node: Any) -> Times:
        """Where a selector or a subquery looks, at each step."""
        times = self.times_ms
        if node.at is not None:
            said = str(node.at).removeprefix("@ ")
            known = {"start()": self.asked_ms[0], "end()": self.asked_ms[1]}
            at_ms = known[said] if said in known else float(said) * 1_000
            if said not in known and not 0 < at_ms < _MS_MAX:  # the parser makes 0 of what is before
                raise Unanswerable("@ is of a moment after 1970, in seconds")
            times = np.full_like(times, round(at_ms))
        return times - (_ms(node, "offset") or 0)

    def _scalar(self, number: Any) -> Value:
        numbers = np.broadcast_to(np.asarray(number, np.float64), (1, len(self.times_ms))).copy()
        return Value(None, numbers, np.ones_like(numbers, bool))

    # -- functions ------------------------------------------------------------------------------------------

    def _of_Call(self, node: Any) -> Value:
        name, arguments = node.func.name, [_bare(each) for each in node.args]
        if name in RANGES:
            return self._of_ranges(name, arguments)
        if name in _PLAIN:
            return self._of_each(name, arguments)
        made: Callable[..., Value] | None = getattr(self, f"_call_{name}", None)
        if made is None:
            raise Unanswerable(f"the function {name} is not supported here")
        return made(*arguments)

    def _of_each(self, name: str, arguments: Sequence[Any]) -> Value:
        found, *others = [self.value(each) for each in arguments]
        parameters = [each.numbers for each in others]
        if name == "clamp":
            found = replace(found, there=found.there & ~(parameters[1] < parameters[0]))
        numbers = _PLAIN[name](found.numbers, *parameters)
        return replace(found, labels=nameless(found.labels), numbers=np.where(found.there, numbers, np.nan))

    def _call_time(self) -> Value:
        return self._scalar(self.times_ms / 1_000)

    def _call_vector(self, of: Any) -> Value:
        return replace(self.value(of), labels=[{}])

    def _call_scalar(self, of: Any) -> Value:
        found = replace(self, bounding=()).value(of)
        one = found.there.sum(axis=0) == 1
        return self._scalar(np.where(one, np.where(found.there, found.numbers, 0).sum(axis=0), np.nan))

    def _call_absent(self, of: Any) -> Value:
        none: Any = ~self.value(of).there.any(axis=0, keepdims=True)
        return Value([_equalities(of)], np.where(none, 1.0, np.nan), none)

    def _call_absent_over_time(self, of: Any) -> Value:
        none: Any = ~self._of_ranges("present_over_time", [of]).there.any(axis=0, keepdims=True)
        return Value([_equalities(getattr(of, "vector_selector", of))], np.where(none, 1.0, np.nan), none)

    def _call_timestamp(self, of: Any) -> Value:
        if type(of).__name__ == "VectorSelector":
            found = self._looked_up(of, lambda series, last: series.ends_ms[last][None, :] / 1_000)
        else:
            found = self.value(of)
            found = replace(found, numbers=np.where(found.there, self.times_ms / 1_000, np.nan))
        return replace(found, labels=nameless(found.labels))

    def _call_sort(self, of: Any) -> Value:
        return in_order(self.value(of), down=False)

    def _call_sort_desc(self, of: Any) -> Value:
        return in_order(self.value(of), down=True)

    def _call_histogram_quantile(self, q: Any, of: Any) -> Value:
        """What is put together for it has the same bounds. Its 0 is the least one of the metric, selected or not."""
        wanted = self.value(q).numbers[0]
        bounding = [matching_of(each) for each in _selectors(of)]
        if (wanted == 0).any():
            bounding = [tuple(each for each in matching if each.name == NAME) for matching in bounding]
        found = replace(self, bounding=tuple(bounding)).value(of)
        return histogram_quantile(wanted, found, lambda count: self.work.add(HISTOGRAM * count))

    def _call_label_replace(self, of: Any, into: Any, replacement: Any, source: Any, pattern: Any) -> Value:
        found = self.value(of)
        values = pa.array([each.get(source.val, "") for each in found.labels or ()], pa.string())
        try:
            whole, said = anchored(pattern.val), _groups(replacement.val, pattern.val)
            hits = pc.match_substring_regex(values, whole).to_pylist()
            # A group that the pattern has not is empty: those behind it are there for that.
            made = pc.replace_substring_regex(values, whole + "()" * 9, said, max_replacements=1).to_pylist()
        except (InvalidArgument, ValueError) as error:  # of Arrow
            raise Unanswerable(f"label_replace: {error}") from None
        return _labelled(found, into, [new if hit else None for new, hit in zip(made, hits, strict=True)])

    def _call_label_join(self, of: Any, into: Any, between: Any, *sources: Any) -> Value:
        found = self.value(of)
        return _labelled(
            found, into, [between.val.join(each.get(s.val, "") for s in sources) for each in found.labels or ()]
        )

    # -- ranges ---------------------------------------------------------------------------------------------

    def _of_ranges(self, name: str, arguments: Sequence[Any]) -> Value:
        function, least = RANGES[name]
        parts, (*scalars, node) = list[Value](), arguments
        parameters = [self.value(each).numbers[0] for each in scalars]
        range_ms = _above_0(node, "range")
        selector = getattr(node, "vector_selector", node)
        high_ms = self._times(selector)
        of_range = (
            self._selected(selector, high_ms, range_ms) if selector is not node else self._subquery(node, high_ms)
        )
        for series in of_range:
            fitting(len(series.labels), len(high_ms))
            low = np.searchsorted(series.ends_ms, high_ms - range_ms, side="left")
            high = np.searchsorted(series.ends_ms, high_ms, side="right") - 1
            low = np.maximum(low, series.first[:, None])
            window = Window(series, low, high[None, :], high_ms, range_ms, self.work)
            self.work.add(low.size)
            numbers = function(window, *parameters)
            labels = series.labels if name == "last_over_time" else nameless(series.labels)
            there = window.count >= least
            parts.append(Value(labels, np.where(there, numbers, np.nan), there))
        return stacked(parts, len(self.times_ms))

    def _subquery(self, node: Any, high_ms: Times) -> list[Series]:
        """Of each series of the answer, at the multiples of its step in all ranges, those of its samples there are."""
        step = _above_0(node, "step", _SUBQUERY_STEP_MS)
        low = -(-(int(high_ms[0]) - _above_0(node, "range")) // step)
        steps = int(high_ms[-1]) // step - low + 1
        if steps > _STEPS_MAX:
            raise Unanswerable(
                f"a subquery has more than {_STEPS_MAX:,} steps: ask for larger ones, or a shorter range"
            )
        if steps <= 0:
            return []
        times = np.arange(low, low + steps, dtype=np.int64) * step
        found = replace(self, times_ms=times).value(node.expr)
        return [
            Series([labels], times[here], numbers[None, here], np.zeros(1, np.int64), step)
            for labels, numbers, here in zip(found.labels or (), found.numbers, found.there, strict=True)
            if here.any()
        ]

    # -- aggregations and operators -------------------------------------------------------------------------

    def _of_AggregateExpr(self, node: Any) -> Value:
        op, found, parameter, also = str(node.op), self.value(node.expr), None, list[str]()
        if op == "count_values":
            op, also = "count", [_label(node.param)]
            found = count_values(also[0], found)
        elif node.param is not None:
            parameter = self.value(node.param).numbers[0]
        groups = grouped(found, node.modifier, also)
        if op in ("topk", "bottomk"):
            assert parameter is not None
            return ranked(found, groups.values(), parameter, down=op == "topk")
        return aggregated(op, found, groups, parameter)

    def _of_BinaryExpr(self, node: Any) -> Value:
        op, modifier = str(node.op), node.modifier
        left = self.value(node.lhs)
        right = (replace(self, bounding=()) if _chooses(node) else self).value(node.rhs)
        if op in ("and", "or", "unless"):
            return sets(op, left, right, None if modifier is None else modifier.matching)
        if op not in _OPERATORS:
            raise Unanswerable(f"the operator {op} is not supported here")
        gives_bool = modifier is not None and modifier.return_bool
        filters = op in _COMPARISONS and not gives_bool

        def operate(one: Floats, other: Floats) -> tuple[Floats, Any]:
            said = _OPERATORS[op](one, other)
            if not filters:
                return said.astype(np.float64), True
            return other if left.labels is None else one, said

        if left.labels is not None and right.labels is not None:
            found = matched(left, right, modifier, operate, named=filters)
            return replace(found, labels=nameless(found.labels)) if gives_bool else found
        numbers, holds = operate(left.numbers, right.numbers)
        there = left.there & right.there & holds
        labels = left.labels if left.labels is not None else right.labels
        return Value(labels if filters else nameless(labels), np.where(there, numbers, np.nan), there)


def _greater(one: Floats, other: Floats) -> Floats:
    """As Go's ``math.Max``: NaN if one of them is, unless one is infinite."""
    return np.where((one == np.inf) | (other == np.inf), np.inf, np.maximum(one, other))


def _less(one: Floats, other: Floats) -> Floats:
    return -_greater(-one, -other)


_PLAIN: Final[dict[str, Callable[..., Floats]]] = {
    "abs": np.abs, "ceil": np.ceil, "floor": np.floor, "sqrt": np.sqrt, "exp": np.exp, "ln": np.log,
    "log2": np.log2, "log10": np.log10, "sgn": np.sign,
    "clamp": lambda numbers, low, high: _greater(low, _less(high, numbers)),
    "clamp_min": lambda numbers, low: _greater(numbers, low),
    "clamp_max": lambda numbers, high: _less(numbers, high),
    "round": lambda numbers, nearest=1.0: np.floor(numbers * (1 / nearest) + 0.5) / (1 / nearest),
}  # fmt: skip
_COMPARISONS: Final = ("==", "!=", "<", "<=", ">", ">=")
_OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": np.divide, "%": np.fmod, "^": np.power,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "atan2": np.arctan2,
}  # fmt: skip
_WORDS: Final = {
    "SubqueryExpr": "a subquery without a function", "MatrixSelector": "a range without a function",
    "StringLiteral": "a text",
}  # fmt: skip


def _ms(node: Any, name: str) -> int | None:
    """The time span of that name; None where there is none. Raises Unanswerable."""
    try:
        span: dt.timedelta | None = getattr(node, name)
    except ValueError:  # it is found when it is asked for that no timedelta holds it
        span = dt.timedelta.max
    if span is None:
        return None
    if not abs(ms := span.total_seconds() * 1_000) < _MS_MAX:
        raise Unanswerable("a range, an offset or a step is of less than 3,000 years")
    return round(ms)


def _above_0(node: Any, name: str, otherwise_ms: int = 0) -> int:
    """Raises InvalidArgument: the parser takes a 0 without a unit."""
    ms = _ms(node, name)
    if (ms := otherwise_ms if ms is None else ms) <= 0:
        raise InvalidArgument("this is no PromQL: a range, or the step of a subquery, is longer than 0")
    return ms


def _bare(node: Any) -> Any:
    while type(node).__name__ == "ParenExpr":
        node = node.expr
    return node


_PARTS: Final = ("expr", "lhs", "rhs", "param", "vector_selector")


def _chooses(node: Any) -> bool:
    """Whether the right side of an operator only says which series of the left stay, whatever buckets they are of."""
    if type(node).__name__ != "BinaryExpr" or str(node.op) not in ("and", "unless"):
        return False
    matching = None if node.modifier is None else node.modifier.matching
    return matching is not None and is_on(matching) != (LE in matching.labels)


def _selectors(node: Any) -> Iterator[Any]:
    """The selectors of which an expression may have series: of others it has a number, or whether there are any."""
    kind = type(node).__name__
    if kind == "VectorSelector":
        yield node
    if kind == "VectorSelector" or (kind == "Call" and node.func.name in ("scalar", "histogram_quantile")):
        return
    names = ("expr", "lhs", "param", "vector_selector") if _chooses(node) else _PARTS
    parts = [getattr(node, name, None) for name in names]
    for each in [*parts, *getattr(node, "args", ())]:
        if each is not None:
            yield from _selectors(each)


def _equalities(node: Any) -> Labels:
    """Of labels that a selector says something else about, too, none."""
    if type(node).__name__ != "VectorSelector":
        return {}
    matching = [each for each in matching_of(node) if each.name != NAME]
    said = Counter(each.name for each in matching)
    return {each.name: each.value for each in matching if each.op == "=" and each.value and said[each.name] == 1}


def _label(node: Any) -> str:
    """What a text names. Raises Unanswerable."""
    if not _LABEL.fullmatch(node.val):
        raise Unanswerable(f"{node.val!r} is no name of a label")
    return str(node.val)


def _labelled(found: Value, into: Any, values: Sequence[str | None]) -> Value:
    """With one more label, or one less where it is empty; those of None stay as they are."""
    name = _label(into)
    labels = [
        each
        if value is None
        else {**{key: of for key, of in each.items() if key != name}, **({name: value} if value else {})}
        for each, value in zip(found.labels or (), values, strict=True)
    ]
    return replace(found, labels=labels)


def _groups(replacement: str, pattern: str) -> str:
    """A replacement of Go's regular expressions as RE2 has it. Raises Unanswerable."""

    def group(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name is None:
            return "$"
        if f"?P<{name}>" in pattern or (name.isdigit() and len(name) > 1):
            raise Unanswerable(f"label_replace has groups by their numbers, $1 to $9, and not ${name}")
        return "\\" + name if name.isdigit() else ""

    return _REFERENCE.sub(group, replacement.replace("\\", "\\\\"))
