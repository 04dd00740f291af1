"""The automaton: which rows, from one on, are the preferred match, and of which symbol each of them is.

A pattern is a program of instructions as in Thompson's construction: *row* (of a symbol, then go on there) and *split*
(in the order of preference). A state of the automaton is the list of row instructions that may come next, in the order
of preference, without repetition, and cut behind the end of the program: a match that is preferred hides what comes
after it. So the last end that a run meets is the end of the preferred match (as in Pike's machine and RE2, which hold
the states, and make them when they are first needed). A step remembers for each item of the new list which item of the
old one it came from; walking these back from the end says which symbol each row is of.

Runs of many beginnings go in step with each other, in columns, while they are many; one by one after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kivi.errors import ResourceExhausted
from kivi.model.pattern_text import Alternation, Node, Repetition, Symbol, symbols

__all__ = ["Automaton"]

_END: Final = 0
_DEAD, _BEGIN, _UNKNOWN = 0, 1, -1
_STATES_MAX: Final = 20_000
_TOGETHER_STEPS: Final = 64

Array = npt.NDArray[Any]


class Automaton:
    """``defined``: the symbols that have a definition, by their bit in the words of ``classes_of``. Not thread safe."""

    def __init__(self, tree: Node, defined: Sequence[str]) -> None:
        self.names = symbols(tree)
        bits = {name: 1 << i for i, name in enumerate(defined)}
        self._bits = [bits.get(name, 0) for name in self.names]
        self._rows: list[tuple[int, int]] = [(-1, _END)]
        """Row instructions: which symbol, and what is next. The first stands for the end."""
        self._splits = dict[int, list[int]]()
        """By negative numbers."""
        begin = self._program(tree, _END)
        self._words: list[int] = []
        self._class_of = dict[int, int]()
        self._states: list[tuple[int, ...]] = [(), tuple(self._closure([begin])[0])]
        self._state_of = {threads: i for i, threads in enumerate(self._states)}
        self._table = np.full((16, 16), _UNKNOWN, np.int32)
        self._ends = np.zeros(16, np.bool_)
        self._final = np.arange(16) == _DEAD
        self.rows_read = 0
        """By runs of one beginning."""
        self._steps = dict[tuple[int, int], tuple[int, tuple[int, ...]]]()

    # -- the program ----------------------------------------------------------------------------

    def _program(self, node: Node, then: int) -> int:
        """Where a program begins that reads what the node says and goes on at ``then``."""
        match node:
            case Symbol(name):
                self._rows.append((self.names.index(name), then))
                return len(self._rows) - 1
            case Alternation(parts):
                return self._split([self._program(part, then) for part in parts])
            case Repetition(body, low, high, greedy):
                begin = then
                if high is None:
                    begin = self._split([])
                    again = self._program(body, begin)
                    self._splits[begin] += [again, then] if greedy else [then, again]
                    if low:
                        begin, low = again, low - 1
                else:
                    for _ in range(high - low):
                        more = self._program(body, begin)
                        begin = self._split([more, then] if greedy else [then, more])
                for _ in range(low):
                    begin = self._program(body, begin)
                return begin
        for part in reversed(node.parts):
            then = self._program(part, then)
        return then

    def _split(self, ways: list[int]) -> int:
        number = -1 - len(self._splits)
        self._splits[number] = ways
        return number

    def _closure(self, begins: Sequence[int]) -> tuple[list[int], list[int]]:
        """The row instructions that are reached, in the order of preference, up to the end; and from which begin."""
        found, origins, seen = list[int](), list[int](), set[int]()
        for origin, begin in enumerate(begins):
            waiting = [begin]
            while waiting:
                at = waiting.pop()
                if at in seen:
                    continue
                seen.add(at)
                if at < 0:
                    waiting += reversed(self._splits[at])
                    continue
                found.append(at)
                origins.append(origin)
                if at == _END:
                    return found, origins
        return found, origins

    # -- states ---------------------------------------------------------------------------------

    def classes_of(self, words: Array) -> Array:
        """Of each row, whose word has a bit for each defined symbol that it may be, its class, as int32."""
        if not len(words):
            return np.zeros(0, np.int32)
        if (most := int(words.max())) < 65_536:  # without sorting
            distinct, at = np.flatnonzero(np.bincount(words)), words
        else:
            distinct, at = np.unique(words, return_inverse=True)
        classes = np.zeros(most + 1 if at is words else len(distinct), np.int32)
        for i, word in enumerate(distinct.tolist()):
            if word not in self._class_of:
                self._class_of[word] = len(self._words)
                self._words.append(word)
            classes[word if at is words else i] = self._class_of[word]
        while self._table.shape[1] < len(self._words):
            self._table = np.pad(self._table, ((0, 0), (0, self._table.shape[1])), constant_values=_UNKNOWN)
        return classes[at]

    def may_be(self, names: frozenset[str]) -> Array:
        """By class, whether its rows may be of one of the symbols."""
        asked = [self._bits[self.names.index(name)] for name in names]
        return np.array([any(word & bit == bit for bit in asked) for word in self._words], np.bool_)

    def _step(self, state: int, row_class: int) -> tuple[int, tuple[int, ...]]:
        """The next state, and for each item of its list the place of the one that it came from."""
        key = state, row_class
        if (known := self._steps.get(key)) is not None:
            return known
        word = self._words[row_class]
        threads = self._states[state]
        live = [
            i for i, at in enumerate(threads) if at != _END and word & (bit := self._bits[self._rows[at][0]]) == bit
        ]
        found, origins = self._closure([self._rows[threads[i]][1] for i in live])
        after = self._state(tuple(found))
        self._steps[key] = step = after, tuple(live[origin] for origin in origins)
        self._table[state, row_class] = after
        return step

    def _state(self, threads: tuple[int, ...]) -> int:
        if (number := self._state_of.get(threads)) is None:
            number = len(self._states)
            if number >= _STATES_MAX:
                raise ResourceExhausted(
                    f"the pattern would need more than {_STATES_MAX:,} states: repeat less by {{m,n}}, or let fewer "
                    "symbols be true of the same row",
                    limit="states of a pattern",
                    maximum=_STATES_MAX,
                )
            self._states.append(threads)
            self._state_of[threads] = number
            if number >= len(self._ends):
                more = len(self._ends)
                self._table = np.pad(self._table, ((0, more), (0, 0)), constant_values=_UNKNOWN)
                self._ends, self._final = np.pad(self._ends, (0, more)), np.pad(self._final, (0, more))
            self._ends[number] = bool(threads) and threads[-1] == _END
            self._final[number] = threads in ((), (_END,))
        return number

    # -- runs -----------------------------------------------------------------------------------

    def ends(self, classes: Array, begins: Array, limits: Array) -> tuple[Array, Array, Array]:
        """For each beginning where the preferred match ends, exclusive, -1: there is none; which are not decided; and
        behind which row nothing more can come of it, -1: that is not known before the limit.

        ``limits``: where a match has to end at the latest. What is long is left undecided: ask ``end`` about it.
        """
        ends, stops = np.full(len(begins), -1, np.int64), np.full(len(begins), -1, np.int64)
        left, at, state = np.arange(len(begins)), begins.copy(), np.full(len(begins), _BEGIN, np.int32)
        for _ in range(_TOGETHER_STEPS):
            going = at < limits[left]
            left, at, state = left[going], at[going], state[going]
            if not len(left):
                break
            read = classes[at]
            after = self._table[state, read]
            while len(unknown := np.flatnonzero(after == _UNKNOWN)):
                width = self._table.shape[1]
                for pair in np.unique(state[unknown].astype(np.int64) * width + read[unknown]).tolist():
                    self._step(*divmod(pair, width))
                after = self._table[state, read]
            at = at + 1
            met = self._ends[after]
            ends[left[met]] = at[met]
            going = ~self._final[after]
            stops[left[~going]] = at[~going]
            left, at, state = left[going], at[going], after[going]
        open_ = np.zeros(len(begins), np.bool_)
        open_[left[at < limits[left]]] = True
        return ends, open_, stops

    def end(self, classes: Array, begin: int, limit: int) -> int:
        """Where the preferred match ends, exclusive; -1: there is none."""
        state, end, table, ends, final = _BEGIN, -1, self._table, self._ends, self._final
        for first in range(begin, limit, 4096):
            for at, row_class in enumerate(classes[first : min(limit, first + 4096)].tolist(), first + 1):
                after = table.item(state, row_class)
                if after == _UNKNOWN:
                    after, _ = self._step(state, row_class)
                    table, ends, final = self._table, self._ends, self._final
                state = after
                if ends[state]:
                    end = at
                if final[state]:
                    self.rows_read += at - begin
                    return end
        self.rows_read += limit - begin
        return end

    def symbols_of(self, classes: Array, begin: int, end: int) -> list[int]:
        """Of each row of the preferred match [begin, end) the place of its symbol in ``names``."""
        state, path = _BEGIN, []
        for row_class in classes[begin:end].tolist():
            after, origins = self._step(state, row_class)
            path.append((self._states[state], origins))
            state = after
        item, found = len(self._states[state]) - 1, []
        for threads, origins in reversed(path):
            item = origins[item]
            found.append(self._rows[threads[item]][0])
        return found[::-1]
