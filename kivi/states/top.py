"""The most frequent values: an item is (value, hash, count); the item of the others has the empty mark ``_OTHERS``.

Up to ``most`` distinct values are counted exactly. Beyond, those with the least hashes (``kivi.states.hashing``) are
counted, and all observations of the rest are *others*. Which values are counted is thus a function of the set of values
alone: one that is among the least of many was among the least of each part of them, so its count has missed nothing.
That makes the state a commutative monoid, whatever the order and the batches; a rule such as "the first to come" does
not. What it costs: beyond ``most`` values the counted ones are a fair sample of the values, not the most frequent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import flat
from kivi.model import varints
from kivi.model.values import ordered, top_items
from kivi.states.hashing import hashed
from kivi.states.kinds import Array, Items, Kind, Observed, offsets_of

__all__ = ["TopKind"]

_OTHERS: Final = np.uint64(2**64 - 1)
"""The hash of the others. A value with this hash is taken for one of them: of 2**64 hashes it is one."""


class TopKind(Kind):
    columns = ("binary", "uint64", "int64")

    def of_events(self, seen: Observed) -> Items:
        values = seen.values
        if isinstance(values, pa.Array):
            values = flat(values).cast(pa.large_binary())
            return values, hashed(values), None
        words = np.ascontiguousarray(ordered(values)).astype("<i8")
        data = pa.py_buffer(words.tobytes())
        offsets = pa.py_buffer(np.arange(len(words) + 1, dtype=np.int64) * 8)
        values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(words), [None, offsets, data])
        return values, hashed(values), None

    def reduce(self, items: Items, offsets: Array) -> tuple[Items, Array]:
        values, hashes, counts = items
        lengths = np.diff(offsets)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        counts = np.ones(len(rows), np.int64) if counts is None else counts
        codes = values.dictionary_encode().indices.to_numpy(zero_copy_only=False) if len(values) else rows
        order = np.lexsort((codes, hashes, rows))
        same = (rows[order][1:] == rows[order][:-1]) & (hashes[order][1:] == hashes[order][:-1])
        same &= (codes[order][1:] == codes[order][:-1]) | (hashes[order][1:] == _OTHERS)
        starts = np.flatnonzero(np.append(True, ~same)) if len(order) else np.zeros(0, np.int64)
        index = order[starts]
        sums = np.add.reduceat(counts[order], starts) if len(starts) else counts
        row, hash_ = rows[index], hashes[index]
        distinct = np.bincount(row, minlength=len(lengths))
        rank = np.arange(len(row)) - np.repeat(offsets_of(distinct)[:-1], distinct)
        others = (rank >= self.state.size) | (hash_ == _OTHERS)
        rest = np.zeros(len(lengths), np.int64)
        np.add.at(rest, row[others], sums[others])
        kept = np.flatnonzero(~others & (sums != 0))
        with_rest = np.flatnonzero(rest)
        row = np.concatenate([row[kept], with_rest])
        blank = pa.array([b""] * len(with_rest), pa.large_binary())
        listed = pa.concat_arrays([values.take(pa.array(index[kept])), blank])
        hash_ = np.concatenate([hash_[kept], np.full(len(with_rest), _OTHERS)])
        sums = np.concatenate([sums[kept], rest[with_rest]])
        order = np.argsort(row, kind="stable")
        reduced = (listed.take(pa.array(order)), hash_[order], sums[order])
        return reduced, offsets_of(np.bincount(row, minlength=len(lengths)))

    def encode(self, items: Items, offsets: Array) -> list[bytes]:
        values, hashes, counts = items
        listed, others = values.to_pylist(), (hashes == _OTHERS).tolist()
        numbers, bounds = counts.tolist(), offsets.tolist()
        out = []
        for a, b in itertools.pairwise(bounds):
            if a == b:
                out.append(b"")
                continue
            end = b - others[b - 1]
            found = sorted(zip(listed[a:end], numbers[a:end], strict=True))
            head = [numbers[b - 1] if others[b - 1] else 0]
            for value, count in found:
                head += (count, len(value))
            encoded = varints.encode_one(head)
            out.append(len(encoded).to_bytes(4, "little") + encoded + b"".join([value for value, _ in found]))
        return out

    def decode(self, states: Sequence[bytes]) -> tuple[Items, Array]:
        values: list[bytes] = []
        counts: list[int] = []
        is_other: list[bool] = []
        lengths = []
        for state in states:
            found, others = top_items(state)
            values += [value for value, _ in found]
            counts += [count for _, count in found]
            is_other += [False] * len(found)
            if others:
                values.append(b"")
                counts.append(others)
                is_other.append(True)
            lengths.append(len(found) + bool(others))
        array = pa.array(values, pa.large_binary())
        hashes = hashed(array)
        hashes[np.array(is_other, np.bool_)] = _OTHERS
        return (array, hashes, np.array(counts, np.int64)), offsets_of(np.array(lengths, np.int64))

    def values(self, states: Sequence[bytes]) -> list[Any]:
        return list(states)
