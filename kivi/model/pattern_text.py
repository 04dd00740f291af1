"""The text of a pattern, as a tree: ``A (B | C)+? D{2,3}``.

::

    pattern   =  sequence ("|" sequence)*            the first alternative is preferred
    sequence  =  item+
    item      =  (symbol | "(" pattern ")") quantifier?
    quantifier = ("*" | "+" | "?" | "{n}" | "{m,}" | "{,n}" | "{m,n}") "?"?

Quantifiers prefer more rows, with a "?" behind them fewer, as in SQL's row patterns. A pattern matches one row or more,
and what is repeated without an end does so as well: so whatever reads a row moves on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kivi.errors import InvalidArgument
from kivi.model.names import is_name
from kivi.model.types import shown

__all__ = [
    "Alternation",
    "Concatenation",
    "Node",
    "Repetition",
    "Symbol",
    "chain",
    "firsts",
    "is_mandatory",
    "lengths",
    "may_lead",
    "parsed",
    "symbols",
]

_TOKEN: Final = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]{0,127})|(\{\s*\d*\s*(?:,\s*\d*\s*)?\})|(.))", re.S)
_ROWS_MAX: Final = 1_000
"""Symbols of a pattern, those of a repetition as often as it must or may repeat them."""
_DEPTH_MAX: Final = 50
_CHAIN_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """The first one is preferred."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """``low`` times or more, up to ``high``; None: without an end."""

    body: Node
    low: int
    high: int | None
    greedy: bool


Node = Symbol | Concatenation | Alternation | Repetition


def parsed(text: object) -> Node:
    """The tree. Raises InvalidArgument for what is no pattern, or is too large."""
    if not isinstance(text, str):
        raise InvalidArgument(f"a pattern is a text like 'A B+ C', not {shown(text)}")
    tree = _Parser(text).parse()
    if lengths(tree)[0] == 0:
        raise InvalidArgument(
            f"{shown(text)} matches where there is no row at all: let it need one, as by + in place of * or ?"
        )
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split(text))
        self._at = 0

    @staticmethod
    def _split(text: str) -> Iterator[tuple[int, str]]:
        at, text = 0, text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            assert match is not None  # whatever is no space is a token
            yield match.start(match.lastindex or 0), match[match.lastindex or 0]
            at = match.end()

    def _next(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _bad(self, why: str) -> InvalidArgument:
        at = self._tokens[self._at][0] if self._at < len(self._tokens) else len(self._text)
        return InvalidArgument(f"pattern {shown(self._text)} at character {at + 1}: {why}")

    def parse(self) -> Node:
        tree = self._alternation(0)
        if self._next():
            raise self._bad(
                f"{shown(self._next())} is no part of a pattern, which has symbols like A, ( ) | * + ? {{m,n}}"
            )
        if _size(tree) > _ROWS_MAX:
            raise self._bad(f"a pattern has at most {_ROWS_MAX:,} symbols")
        return tree

    def _alternation(self, depth: int) -> Node:
        if depth > _DEPTH_MAX:
            raise self._bad(f"parentheses are nested more than {_DEPTH_MAX} deep")
        parts = [self._concatenation(depth)]
        while self._next() == "|":
            self._at += 1
            parts.append(self._concatenation(depth))
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _concatenation(self, depth: int) -> Node:
        parts = []
        while self._next() == "(" or is_name(self._next()):
            parts.append(self._item(depth))
        if not parts:
            raise self._bad("a symbol, like A, is missing here")
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _item(self, depth: int) -> Node:
        begin, token = self._at, self._next()
        self._at += 1
        node: Node = Symbol(token)
        if token == "(":
            node = self._alternation(depth + 1)
            if self._next() != ")":
                raise self._bad("a ) is missing here")
            self._at += 1
        if (times := self._times()) is None:
            return node
        self._at += 1
        low, high = times
        greedy = self._next() != "?"
        if not greedy:
            self._at += 1
        node = self._checked(Repetition(node, low, high, greedy), begin)
        if self._times() is not None:
            raise self._bad("a quantifier stands behind another one: put parentheses around what it repeats")
        return node

    def _times(self) -> tuple[int, int | None] | None:
        """What the next token says of how often; None: it says nothing."""
        token = self._next()
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if token in simple:
            return simple[token]
        if not token.startswith("{"):
            return None
        low, comma, high = (part.strip() for part in token[1:-1].partition(","))
        if not low and not high:
            raise self._bad("{...} says how often: {2}, {2,}, {,3} or {2,3}")
        if max(len(low), len(high)) > 9:
            raise self._bad(f"a pattern has at most {_ROWS_MAX:,} symbols")
        least = int(low or 0)
        return least, (int(high) if high else None) if comma else least

    def _checked(self, node: Repetition, begin: int) -> Repetition:
        self._at, after = begin, self._at
        if node.high is not None and (node.high < node.low or node.high == 0):
            raise self._bad(f"it repeats from {node.low} up to {node.high} times, which is no range")
        if node.high is None and lengths(node.body)[0] == 0:
            raise self._bad(
                "it repeats without an end what may match no row: write A* in place of (A*)*, or bound it, as by {0,5}"
            )
        if _size(node) > _ROWS_MAX:
            raise self._bad(
                f"a pattern has at most {_ROWS_MAX:,} symbols, those that {{m,n}} repeats counted each time"
            )
        self._at = after
        return node


def _size(node: Node) -> int:
    match node:
        case Symbol():
            return 1
        case Repetition(body, low, high, _):
            return _size(body) * max(1, low if high is None else high)
    return sum(map(_size, node.parts))


# -- what follows from a tree ------------------------------------------------------------------------


def symbols(node: Node) -> list[str]:
    """The names, in the order in which they are first written."""
    match node:
        case Symbol(name):
            return [name]
        case Repetition(body):
            return symbols(body)
    return list(dict.fromkeys(name for part in node.parts for name in symbols(part)))


def lengths(node: Node) -> tuple[int, int | None]:
    """How many rows a match has at least and at most; None: any number."""
    match node:
        case Symbol():
            return 1, 1
        case Repetition(body, low, high, _):
            least, most = lengths(body)
            return least * low, None if most is None or high is None else most * high
    each = [lengths(part) for part in node.parts]
    mosts = [most for _, most in each if most is not None]
    unbounded = len(mosts) < len(each)
    if isinstance(node, Alternation):
        return min(least for least, _ in each), None if unbounded else max(mosts)
    return sum(least for least, _ in each), None if unbounded else sum(mosts)


def firsts(node: Node) -> set[str]:
    """The symbols of which a match's first row may be one."""
    match node:
        case Symbol(name):
            return {name}
        case Repetition(body):
            return firsts(body)
        case Alternation(parts):
            return set().union(*map(firsts, parts))
    found = set[str]()
    for part in node.parts:
        found |= firsts(part)
        if lengths(part)[0]:
            break
    return found


def is_mandatory(node: Node, name: str) -> bool:
    """Whether each match has a row of the symbol."""
    match node:
        case Symbol():
            return node.name == name
        case Repetition(body, low):
            return low > 0 and is_mandatory(body, name)
        case Alternation(parts):
            return all(is_mandatory(part, name) for part in parts)
    return any(is_mandatory(part, name) for part in node.parts)


def may_lead(node: Node, name: str) -> bool:
    """Whether a match may have its only row of the symbol in front."""
    match node:
        case Symbol():
            return node.name == name
        case Repetition(body, low):
            return may_lead(body, name) and (low <= 1 or not is_mandatory(body, name))
        case Alternation(parts):
            return any(may_lead(part, name) for part in parts)
    for i, part in enumerate(node.parts):
        if may_lead(part, name) and not any(is_mandatory(later, name) for later in node.parts[i + 1 :]):
            return True
        if lengths(part)[0]:
            return False
    return False


def chain(node: Node) -> list[frozenset[str]]:
    """Sets of symbols: each match has, in this order, a row of one symbol of each."""
    match node:
        case Symbol(name):
            return [frozenset({name})]
        case Repetition(body, low, _, _):
            return (chain(body) * min(low, _CHAIN_MAX))[:_CHAIN_MAX]
        case Alternation(parts):
            return [frozenset().union(*each) for each in zip(*map(chain, parts), strict=False)]
    return [each for part in node.parts for each in chain(part)][:_CHAIN_MAX]
