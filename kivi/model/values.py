"""What two kinds of measures are read as: the largest values as a list, the most frequent ones as a ``Top``.

Both stay bytes, the state of the measure, until somebody reads them. Their forms:

* a list: its values, the first one first, as ``ordered`` integers, each but the first as the distance from the last;
* a top: 4 bytes, the length of what follows in varints: how many observations went to the others, then for each value
  its count and its length; and after these the values, one behind the other (text as UTF-8, all else as 8 bytes of its
  ``ordered`` integer), in the order of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kivi.errors import DataLoss
from kivi.model import varints

__all__ = ["Top", "list_of", "ordered", "unordered"]

Array = npt.NDArray[Any]
_INT64_MAX: Final = 2**63 - 1


def ordered(values: Array) -> Array:
    """Numbers in stored form as int64 that order as they do: a float64 by its bits, of which negative ones order
    backwards; a bool as 0 or 1."""
    if values.dtype == np.float64:
        bits = (values + 0.0).view(np.int64)
        return np.where(bits < 0, bits ^ _INT64_MAX, bits)
    return values.astype(np.int64, copy=False)


def unordered(type_name: str, values: Array) -> Array:
    """``ordered`` backwards, for a column type of that name."""
    if type_name == "float64":
        return np.where(values < 0, values ^ _INT64_MAX, values).view(np.float64)
    return values.astype(np.bool_) if type_name == "bool" else values


def list_of(type_name: str, state: bytes) -> list[Any]:
    """The values of a list's state, in stored form."""
    numbers, _ = varints.decode([state])
    with np.errstate(over="ignore"):
        values = np.cumsum(varints.unzigzag(numbers))
    found: list[Any] = unordered(type_name, values).tolist()
    return found


class Top:
    """The most frequent values of a measure: iterates over (value, count), the most frequent first.

    ``exact`` is False once a row has had more distinct values than are counted one by one: the counts that are given
    are exact, ``others`` observations were of values that are not counted, and any of these may have been frequent.
    """

    __slots__ = ("count", "exact", "items", "others")

    def __init__(self, items: list[tuple[Any, int]], others: int, count: int) -> None:
        self.items = items
        self.others = others
        self.count = count
        self.exact = not others

    @staticmethod
    def from_state(type_name: str, read: Callable[[Any], Any], shown: int, state: bytes) -> Top:
        """The ``shown`` most frequent values of a state; of equally frequent ones the least.

        ``read`` makes a caller's value of one in the stored form of the type.
        """
        found, others = top_items(state)
        found.sort(key=lambda item: (-item[1], item[0] if type_name in ("string", "bytes") else _signed(item[0])))
        count = others + sum(n for _, n in found)
        return Top([(read(_stored(type_name, data)), n) for data, n in found[:shown]], others, count)

    def to_plain(self) -> list[list[Any]]:
        """As JSON has it: [value, count] of each; where some were not counted one by one, [None, others] at the end."""
        return [[value, count] for value, count in self.items] + ([[None, self.others]] if self.others else [])

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Top) and (self.items, self.others) == (other.items, other.others)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Top({self.items}, others={self.others})"


def top_items(state: bytes) -> tuple[list[tuple[bytes, int]], int]:
    """(value, count) of a top's state, and how many observations went to others. Raises DataLoss."""
    if not state:
        return [], 0
    head = int.from_bytes(state[:4], "little")
    numbers = varints.decode([state[4 : 4 + head]])[0].astype(np.int64).tolist()
    at, found = 4 + head, []
    if len(numbers) % 2 != 1 or at + sum(numbers[2::2]) != len(state):
        raise DataLoss("a state of top does not have the values that it counts: run kivi verify")
    for count, length in zip(numbers[1::2], numbers[2::2], strict=True):
        found.append((state[at : at + length], count))
        at += length
    return found, numbers[0]


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _stored(type_name: str, data: bytes) -> Any:
    if type_name == "string":
        return data.decode()
    return data if type_name == "bytes" else unordered(type_name, np.array([_signed(data)])).item()
