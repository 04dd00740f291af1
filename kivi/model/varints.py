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
    """The bytes of each sequence: i is ``values[offsets[i]:offsets[i + 1]]``, of uint64; ``offsets`` begin at 0."""
    values = values.astype(np.uint64, copy=False)
    lengths = np.ones(len(values), np.int64)
    top = int(values.max()) if len(values) else 0
    for bits in range(7, max(8, top.bit_length()), 7):
        lengths += values >> np.uint64(bits) != 0
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    out = np.empty(int(ends[-1]), np.uint8)
    starts, left = ends[:-1], values
    for place in range(int(lengths.max()) if len(values) else 0):
        more = lengths > place + 1
        out[starts + place] = (left & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7)
        if not more.all():
            starts, left, lengths = starts[more], left[more], lengths[more]
        left = left >> np.uint64(7)
    data = out.tobytes()
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
    ends = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, sequences), np.int64, len(sequences)), out=ends[1:])
    data = np.frombuffer(b"".join(sequences), np.uint8)
    goes_on = data >= 0x80
    if goes_on[ends[1:][ends[1:] > ends[:-1]] - 1].any():
        raise DataLoss("a stored state is cut short: run kivi verify")
    values = data[~goes_on].astype(np.uint64)  # the last byte of each, which for most is the only one
    places = goes_on.nonzero()[0]
    if len(places):
        _add_others(values, data[places] & 0x7F, places - np.arange(len(places)))
    offsets = ends - places.searchsorted(ends)
    return values, offsets


def _add_others(values: Array, others: Array, number: Array) -> None:
    """Adds the bytes before the last, in order, each with the number of its value, whose last byte is there."""
    begins = np.ones(len(number), np.bool_)
    np.not_equal(number[1:], number[:-1], out=begins[1:])
    first = begins.nonzero()[0]
    counts = np.diff(first, append=len(number))
    if int(counts.max()) >= _BYTES_MAX:
        raise DataLoss("a stored state has an integer of more than 64 bits: run kivi verify")
    values[number[first]] <<= (7 * counts).astype(np.uint64)
    for place in range(int(counts.max())):
        at = first[counts > place] + place
        values[number[at]] |= others[at].astype(np.uint64) << np.uint64(7 * place)
