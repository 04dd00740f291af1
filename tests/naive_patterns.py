"""Patterns as they are defined: every way to match is tried, in the order of preference, and the first one counts.

And random patterns over events with the columns ``COLUMNS``, each definition beside a function that says the same.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import kivi
from kivi import col, prev
from kivi.errors import InvalidArgument
from kivi.model.pattern_text import Alternation, Concatenation, Node, Repetition, Symbol
from kivi.model.patterns import Pattern

COLUMNS = {"app": "string", "host": "int64", "ts": "timestamp", "x": "int64", "f": "float64", "price": "decimal(9,2)"}
Row = dict[str, Any]
Rows = Sequence[Row]
Way = tuple[int, tuple[str, ...]]
"""Up to which row, exclusive, and the symbol of each row."""


class Ways:
    """The ways in which rows from one on, before ``limit``, are what a node says, in the order of preference.

    Of those that end at the same row only the first: what may follow is the same for all.
    """

    def __init__(self, limit: int, may_be: Callable[[int, str], bool]) -> None:
        self._limit, self._may_be = limit, may_be
        self.of = functools.cache(self._of)
        self._repeated = functools.cache(self._repeated_from)

    def _of(self, node: Node, at: int) -> list[Way]:
        match node:
            case Symbol(name):
                return [(at + 1, (name,))] if at < self._limit and self._may_be(at, name) else []
            case Alternation(parts):
                return _each_end(way for part in parts for way in self.of(part, at))
            case Concatenation(parts):
                found: list[Way] = [(at, ())]
                for part in parts:
                    found = _each_end(
                        (end, first + rest) for middle, first in found for end, rest in self.of(part, middle)
                    )
                return found
        return self._repeated(node, 0, at)

    def _repeated_from(self, node: Repetition, times: int, at: int) -> list[Way]:
        stop: list[Way] = [(at, ())] if times >= node.low else []
        more: list[Way] = []
        if node.high is None or times < node.high:
            after = times + 1 if node.high is not None else min(times + 1, node.low)
            for middle, first in self.of(node.body, at):
                more += [(end, first + rest) for end, rest in self._repeated(node, after, middle)]
        return _each_end(more + stop if node.greedy else stop + more)


def _each_end(found: Iterable[Way]) -> list[Way]:
    kept = dict[int, tuple[str, ...]]()
    for end, symbols in found:
        kept.setdefault(end, symbols)
    return list(kept.items())


# -- definitions and measures, each beside what it means ----------------------------------------------


def _at(rows: Rows, i: int, name: str, by: int = 0) -> Any:
    return rows[i + by][name] if 0 <= i + by < len(rows) else None


def _less(a: Any, b: Any, by: float | None = None) -> bool:
    """Whether a < b; with ``by``, a + by <= b."""
    return a is not None and b is not None and (a < b if by is None else a + by <= b)


RARE = 9
"""An ``x`` that few events have."""
Definition = tuple[Any, Callable[[Rows, int], bool]]
DEFINITIONS: list[Definition] = [
    (col("x") > 2, lambda rows, i: _less(2, rows[i]["x"])),
    (col("x") == 0, lambda rows, i: rows[i]["x"] == 0),
    (col("x") > prev("x"), lambda rows, i: _less(_at(rows, i, "x", -1), rows[i]["x"])),
    (prev("f", 2) >= col("f"), lambda rows, i: _less(_at(rows, i, "f"), _at(rows, i, "f", -2), 0)),
    (kivi.next("x") < col("x"), lambda rows, i: _less(_at(rows, i, "x", 1), rows[i]["x"])),
    (col("x") - prev("x") >= 2, lambda rows, i: _less(_at(rows, i, "x", -1), rows[i]["x"], 2)),
    (prev("ts").is_null() | (col("f") < 0.5), lambda rows, i: i == 0 or _less(rows[i]["f"], 0.5)),
    (~(col("x") == 1) & ~col("x").is_null(), lambda rows, i: rows[i]["x"] not in (1, None)),
    (col("x").isin([1, 3, 4]), lambda rows, i: rows[i]["x"] in (1, 3, 4)),
    (col("x") == RARE, lambda rows, i: rows[i]["x"] == RARE),
    ((col("x") == RARE) | (col("f") > 2), lambda rows, i: rows[i]["x"] == RARE or _less(2, rows[i]["f"])),
    (col("x") > prev("x", 3), lambda rows, i: _less(_at(rows, i, "x", -3), rows[i]["x"])),
    (kivi.next("f", 2) >= col("f"), lambda rows, i: _less(rows[i]["f"], _at(rows, i, "f", 2), 0)),
    (
        (prev("x") > col("x")) & (kivi.next("x") > col("x")),
        lambda rows, i: all(_less(rows[i]["x"], _at(rows, i, "x", by)) for by in (-1, 1)),
    ),
    (~(prev("x") == 1), lambda rows, i: _at(rows, i, "x", -1) not in (1, None)),
    (~prev("f", 2).is_null(), lambda rows, i: _at(rows, i, "f", -2) is not None),
    (col("price") > prev("price"), lambda rows, i: _less(_at(rows, i, "price", -1), rows[i]["price"])),
    (
        col("app") == prev("app"),
        lambda rows, i: rows[i]["app"] is not None and rows[i]["app"] == _at(rows, i, "app", -1),
    ),
    (col("x") * 2**62 > 0, lambda rows, i: rows[i]["x"] == 1),  # beyond that it is out of range
]

MEASURES: dict[str, tuple[Callable[[Any], Any], str, Callable[[list[Any]], Any]]] = {
    "first": (kivi.first, "x", lambda values: values[0] if values else None),
    "last": (kivi.last, "ts", lambda values: values[-1] if values else None),
    "some": (kivi.count, "x", lambda values: sum(v is not None for v in values)),
    "total": (kivi.sum, "x", lambda values: _of(values, sum)),
    "paid": (kivi.sum, "price", lambda values: _of(values, lambda known: sum(known, Decimal(0)))),
    "least": (kivi.min, "f", lambda values: _of(values, min)),
    "newest": (kivi.max, "ts", lambda values: _of(values, max)),
    "mean": (kivi.avg, "x", lambda values: _of(values, lambda known: sum(known) / len(known))),
}


def _of(values: list[Any], measure: Callable[[list[Any]], Any]) -> Any:
    known = [value for value in values if value is not None]
    return measure(known) if known else None


class Case:
    """A random pattern, and its answer by definition."""

    def __init__(self, rng: random.Random, within: Sequence[int | None]) -> None:
        self.rng = rng
        names = "ABCD"[: rng.randrange(1, 5)]
        self.defined = {name: rng.choice(DEFINITIONS) for name in names if rng.random() < 0.8}
        self.measured: dict[str, tuple[str, str, Callable[[list[Any]], Any]]] = {}
        self.within = rng.choice(within)
        self.pattern = self._pattern(names)

    def _pattern(self, names: str) -> Pattern:
        while True:
            text = self._text(names, 3)
            used = [name for name in names if name in text]
            measures: dict[str, Any] = {"rows": kivi.count()}
            self.measured = {"rows": ("", "ts", len)}
            for name in self.rng.sample(sorted(MEASURES), 3):
                call, column, meaning = MEASURES[name]
                symbol = self.rng.choice(["", *used])
                measures[name] = call(f"{symbol}.{column}" if symbol else column)
                self.measured[name] = (symbol, column, meaning)
            partition_by = self.rng.choice([(), ("app",), ("host",), ("host", "app")])
            to_symbols = [f"{to} {name}" for to in ("to_first", "to_last") for name in used]
            define = {name: definition for name, (definition, _) in self.defined.items() if name in used}
            try:
                return kivi.pattern(
                    text, partition_by=partition_by, within=self.within, define=define, measures=measures,
                    skip=self.rng.choice(["past_last_row", "to_next_row", *to_symbols]),
                )  # fmt: skip
            except InvalidArgument:  # as it matches no row, or the symbol to go on at may be in front
                continue

    def _text(self, names: str, depth: int) -> str:
        rng = self.rng
        items = []
        for _ in range(rng.randrange(1, 4)):
            item = rng.choice(names) if depth == 0 or rng.random() < 0.6 else f"({self._text(names, depth - 1)})"
            if rng.random() < 0.5:
                item += rng.choice(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}"]) + rng.choice(["", "", "?"])
            items.append(item)
        text = " ".join(items)
        if rng.random() < 0.75:
            return text
        other = rng.choice(names) if depth == 0 or rng.random() < 0.5 else self._text(names, depth - 1)
        return " | ".join(rng.sample([text, other], 2))

    def answer(self, events: Rows) -> list[Row]:
        """Of events in the total order of their commits."""
        partitions = defaultdict[tuple[Any, ...], list[tuple[int, Row]]](list)
        ordered = sorted(events, key=lambda row: row["ts"])
        for i, row in enumerate(ordered):
            partitions[tuple(row[name] for name in self.pattern.partition_by)].append((i, row))
        found: list[tuple[int, Row]] = []
        for key, numbered in partitions.items():
            rows = [row for _, row in numbered]
            for begin, symbols in self._matches(rows):
                answer = dict(zip(self.pattern.partition_by, key, strict=True))
                for name, (symbol, column, meaning) in self.measured.items():
                    chosen = [rows[begin + k][column] for k, of in enumerate(symbols) if symbol in ("", of)]
                    answer[name] = meaning(chosen)
                found.append((numbered[begin][0], answer))
        return [answer for _, answer in sorted(found, key=lambda each: each[0])]

    def _matches(self, rows: Rows) -> Iterator[tuple[int, tuple[str, ...]]]:
        skip, begin = self.pattern.skip, 0

        def may_be(at: int, name: str) -> bool:
            return name not in self.defined or self.defined[name][1](rows, at)

        while begin < len(rows):
            limit = len(rows)
            if self.within is not None:
                latest = rows[begin]["ts"] + dt.timedelta(microseconds=self.within)
                limit = sum(row["ts"] <= latest for row in rows)
            ways = Ways(limit, may_be).of(self.pattern.tree, begin)
            if not ways:
                begin += 1
                continue
            end, symbols = ways[0]
            yield begin, symbols
            match skip.to:
                case "past_last_row":
                    begin = end
                case "to_next_row":
                    begin += 1
                case "to_first":
                    begin += symbols.index(skip.symbol)
                case _:
                    begin = end - 1 - symbols[::-1].index(skip.symbol)


@dataclasses.dataclass(frozen=True)
class Stream:
    """What events are like: of how many hosts, and which part of them is rare."""

    hosts: int = 2
    rare: float = 0.0

    @classmethod
    def of(cls, rng: random.Random) -> Stream:
        return cls(rng.choice([1, 2, 5, 60]), rng.choice([0, 0.02, 0.2]))

    def event(self, rng: random.Random, moment: int) -> Row:
        def maybe(value: Any) -> Any:
            return None if rng.random() < 0.1 else value

        return {
            "app": maybe(rng.choice(["shop", "", "a\0b"])), "host": rng.randrange(self.hosts), "ts": moment,
            "x": RARE if rng.random() < self.rare else maybe(rng.randrange(5)),
            "f": maybe(rng.choice([-1.5, 0.0, 0.25, 3.0])),
            "price": maybe(Decimal(rng.randrange(10_000)).scaleb(-2)),
        }  # fmt: skip


event = Stream().event
