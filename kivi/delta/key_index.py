"""An index from encoded keys of one table to numbers, thousands of keys at a time and without a Python object for any.

A hash table with open addressing in NumPy arrays. A key is words of eight bytes, the last one filled with zeros: keys
of one table are prefix-free (``kivi.encoding.keys``), so no two of them become the same words. A round of probing is a
few array operations over the keys that have not been found yet; at most a quarter of the table is in use, so most keys
are found in the first.

Keys of one word that are near each other, as numbers that somebody counted are, each have the place that their last
bits say, and no other (``_is_direct``). What is asked for in order is then in order in the table, too.

A dictionary of ``bytes`` takes some 400 ns for each of 10,000 keys out of 100,000, half of that for making the objects;
this takes about 60.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kivi.delta.runs import Array

__all__ = ["KeyIndex"]

_FIRST: Final = 1_024
_SPARSE: Final = 4
"""Places in the table for each key at least: with two, a few keys are found only after dozens of rounds."""
_DENSE: Final = 8
"""Keys are near each other if there are no more than so many numbers for each, from the least to the greatest: so the
table is no larger than it is for others."""
_FACTORS: Final = np.random.default_rng().integers(0, 2**63, 64, np.uint64) * np.uint64(2) + np.uint64(1)
"""Drawn anew by each process, so that nobody can send keys that all fall into one place."""


class KeyIndex:
    """Numbers keys from 1 on, in the order in which they come; a number may be left out. 0 is that of no key."""

    __slots__ = ("_high", "_is_direct", "_low", "_shift", "_table", "_words", "last")

    def __init__(self) -> None:
        self.last = 0
        """The last number that was given."""
        self._words = np.zeros((1, _FIRST), np.uint64)  # of each number its key
        self._low, self._high = 2**64, 0  # of keys of one word
        self._is_direct = True
        self._clear(_SPARSE * _FIRST)

    @property
    def nbytes(self) -> int:
        return int(self._words.nbytes + self._table.nbytes)

    def find(self, keys: Any) -> Array:
        """The number of each key of a LargeBinaryArray; 0 where it has none."""
        return self._find(self._words_of(keys))

    def add(self, keys: Any) -> Array:
        """Likewise, where those that have none get one: of these key i the number ``last`` + 1 + i, unless an earlier
        one is the same."""
        words = self._words_of(keys)
        found = self._find(words)
        if len(new := np.flatnonzero(found == 0)):
            found[new] = self._insert(words if len(new) == len(found) else words[:, new])
        return found

    def taken(self, numbers: Array) -> KeyIndex:
        """An index of the keys with these numbers alone, which it numbers anew, in this order."""
        found = KeyIndex()
        found._words = np.zeros((len(self._words), _FIRST), np.uint64)
        found._insert(self._words[:, numbers])
        return found

    def _words_of(self, keys: Any) -> Array:
        """Keys in columns of words; the index has as many columns afterwards."""
        rows = len(keys)
        if not rows:
            return np.zeros((len(self._words), 0), np.uint64)
        offsets = np.frombuffer(keys.buffers()[1], np.int64, rows + 1, 8 * keys.offset)
        lengths = np.diff(offsets)
        most = int(lengths.max())
        if (more := -(-most // 8) - len(self._words)) > 0:
            self._words = np.concatenate([self._words, np.zeros((more, self._words.shape[1]), np.uint64)])
            self._fit()
        count = len(self._words)
        first, width = int(offsets[0]), 8 * count
        data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)[first : int(offsets[-1])]
        if int(lengths.min()) == most == width:
            padded = data
        else:
            padded = np.zeros(rows * width, np.uint8)
            if int(lengths.min()) == most:
                padded.reshape(rows, width)[:, :most] = data.reshape(rows, most)
            else:
                padded[np.arange(len(data)) + np.repeat(np.arange(rows) * width - (offsets[:-1] - first), lengths)] = (
                    data
                )
        return padded.view(">u8").reshape(rows, count).T.astype(np.uint64, order="C")

    def _hashes(self, words: Array) -> Array:
        """Where in the table the search for each begins. Words of zeros add nothing."""
        if self._is_direct:
            at: Array = (words[0] & np.uint64(len(self._table) - 1)).view(np.int64)
            return at
        total = np.zeros(words.shape[1], np.uint64)
        for i, column in enumerate(words):
            total += (column ^ column >> np.uint64(32)) * (_FACTORS[i % len(_FACTORS)] + np.uint64(2 * i))
        total ^= total >> np.uint64(29)
        total *= _FACTORS[-1]
        total >>= self._shift
        return total.view(np.int64)

    def _find(self, words: Array) -> Array:
        at = self._hashes(words)
        found = self._table[at].astype(np.int64)
        left = np.flatnonzero((found > 0) & ~self._same(found, words))
        if self._is_direct:
            found[left] = 0
            return found
        at, words, step = at[left], words[:, left], 0
        while len(left):
            step += 1
            at = at + step & len(self._table) - 1
            numbers = self._table[at].astype(np.int64)
            found[left] = numbers
            on = np.flatnonzero((numbers > 0) & ~self._same(numbers, words))
            left, at, words = left[on], at[on], words[:, on]
        return found

    def _same(self, numbers: Array, words: Array) -> Array:
        """Whether the keys of these numbers are these words."""
        same: Array = self._words[0][numbers] == words[0]
        for known, asked in zip(self._words[1:], words[1:], strict=True):
            same &= known[numbers] == asked
        return same

    def _insert(self, words: Array) -> Array:
        """Numbers keys that are not known, of which some may be the same."""
        numbers = np.arange(self.last + 1, self.last + 1 + words.shape[1])
        self.last += words.shape[1]
        if self.last >= self._words.shape[1]:
            grown = np.zeros((len(self._words), max(self.last + 1, 2 * self._words.shape[1])), np.uint64)
            grown[:, : self._words.shape[1]] = self._words
            self._words = grown
        self._words[:, numbers] = words
        if words.shape[1]:
            self._low, self._high = min(self._low, int(words[0].min())), max(self._high, int(words[0].max()))
        self._fit()
        return self._place(words, numbers)

    def _fit(self) -> None:
        """Makes the table, with all that is in it, one for the keys that there are. It is direct from when it has to
        grow, so that keys that somebody chooses do not have it made anew each time."""
        span = self._high - self._low + 1
        are_near = len(self._words) == 1 and span <= _DENSE * max(self.last, _FIRST)
        least = span if self._is_direct else _SPARSE * self.last
        if least > len(self._table) or (self._is_direct and not are_near):
            known = self._table[self._table > 0].astype(np.int64)
            self._is_direct = are_near
            self._clear(1 << (max(span if are_near else 2 * _SPARSE * self.last, _SPARSE * _FIRST) - 1).bit_length())
            self._place(self._words[:, known], known)

    def _clear(self, size: int) -> None:
        self._table = np.zeros(size, np.int32)
        self._shift = np.uint64(64 - (size.bit_length() - 1))

    def _place(self, words: Array, numbers: Array) -> Array:
        """Enters keys with their numbers; of the same keys, those of the first. Which number each has then."""
        at = self._hashes(words)
        found = numbers.copy()
        left = np.arange(len(numbers))
        step = 0
        while len(left):
            place, own = at[left], numbers[left]
            free = np.flatnonzero(self._table[place] == 0)[::-1]
            self._table[place[free]] = own[free]  # of those that want the same place, the first one stays
            held = self._table[place].astype(np.int64)
            other = np.flatnonzero(held != own)
            left, held = left[other], held[other]
            same = self._same(held, words[:, left])
            found[left[same]] = held[same]
            left = left[~same]
            step += 1
            at[left] = at[left] + step & len(self._table) - 1
        return found
