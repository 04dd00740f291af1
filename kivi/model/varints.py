"""Sequences of integers as bytes, many sequences at once: the form in which the states of measures are stored.

An integer is a *varint*: its bits in groups of seven, the lowest group first, the top bit of every byte but the last
set (as in Protocol Buffers and LEB128). Signed integers are mapped to unsigned ones first, by *zigzag*: 0, -1, 1, -2
become 0, 1, 2, 3. A sequence is its varints one after the other; how many there are follows from its bytes.

``encode`` and ``decode`` take thousands of sequences by NumPy kernels: no Python statement runs for an integer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kivi.errors import DataLoss

__all__ = ["decode", "encode", "encode_one", "gaps_of", "summed_gaps", "unzigzag", "zigzag"]

Array = npt.NDArray[Any]
_BYTES_MAX = 10  # of 64 bits


def zigzag(values: Array) -> Array:
    """Signed int64 as uint64."""
    values = values.astype(np.int64, copy=False)
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def unzigzag(values: Array) -> Array:
    """``zigzag`` backwards."""
    signs = (values & np.uint64(1)).view(np.int64)
    np.negative(signs, out=signs)
    signs ^= (values >> np.uint64(1)).view(np.int64)
    return signs


def gaps_of(values: Array, offsets: Array) -> Array:
    """Of sequences of int64 the first value of each, and then the distance of every value from the one before, modulo
    2**64."""
    gaps = np.diff(values, prepend=0)
    starts = offsets[:-1][offsets[1:] > offsets[:-1]]
    gaps[starts] = values[starts]
    return gaps


def summed_gaps(gaps: Array, offsets: Array) -> Array:
    """``gaps_of`` backwards."""
    values = np.zeros(len(gaps) + 1, np.int64)
    gaps.cumsum(out=values[1:])
    before = values[offsets[:-1]].repeat(offsets[1:] - offsets[:-1])
    return values[1:] - before


def encode(values: Array, offsets: Array) -> list[bytes]:
    """The bytes of each sequence: i is ``values[offsets[i]:offsets[i + 1]]``, of uint64; ``offsets`` begin at 0.

    Every integer is made in a word of as many bytes as the longest needs, and then the bytes that are used are taken:
    3 ns an integer of up to two bytes, 6 of up to four, where writing each byte to its place took 31.
    """
    width = -(-int(values.max(initial=1)).bit_length() // 7)
    size = 2 if width <= 2 else 4 if width <= 4 else 8
    word = np.dtype(f"<u{size}").type
    count, words = len(values), -(-width // 8)
    out = np.zeros((words, count), word)
    used = np.zeros((words, count), word)
    used[0] = 1
    lengths = np.ones(count, np.int64)
    left = values.astype(word)
    for place in range(width):
        byte = left & word(0x7F)
        left >>= word(7)
        if place + 1 < width:
            more = (left != 0).astype(word)
            lengths += more.view(f"<i{size}")
            byte |= more << word(7)
            used[(place + 1) // 8] |= more << word(8 * ((place + 1) % 8))
        out[place // 8] |= byte << word(8 * (place % 8))
    is_used = np.ascontiguousarray(used.T).view(np.bool_).ravel()
    data = np.compress(is_used, np.ascontiguousarray(out.T).view(np.uint8).ravel()).tobytes()
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    bounds = ends[offsets].tolist()
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def encode_one(values: Sequence[int]) -> bytes:
    """The bytes of one short sequence of unsigned integers."""
    out = bytearray()
    for value in values:
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


def decode(sequences: Sequence[bytes]) -> tuple[Array, Array]:
    """(values of uint64, offsets) of ``encode``. Raises DataLoss for bytes that end within an integer."""
    bounds = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, sequences), np.int64, len(sequences)), out=bounds[1:])
    data = np.frombuffer(b"".join(sequences), np.uint8)
    goes_on = data >= 0x80
    if goes_on[bounds[1:][bounds[1:] > bounds[:-1]] - 1].any():
        raise DataLoss("a stored state is cut short: run kivi verify")
    values = np.compress(~goes_on, data).astype(np.uint64)  # the last byte of each, which for most is the only one
    others = goes_on.nonzero()[0]
    offsets = bounds - others.searchsorted(bounds)
    number = others - np.arange(len(others))
    for place in range(1, _BYTES_MAX):  # those that lie so many places before the last, each of another integer
        more = goes_on[others + place]
        if not more.any():
            values[number] = values[number] << np.uint64(7) | (data[others] & 0x7F)
            return values, offsets
        at = (~more).nonzero()[0]
        values[number[at]] = values[number[at]] << np.uint64(7) | (data[others[at]] & 0x7F)
        others, number = others[more], number[more]
    raise DataLoss("a stored state has an integer of more than 64 bits: run kivi verify")
