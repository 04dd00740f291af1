"""Which state a measure keeps: the part of a column that says what its cells hold and how they are combined.

A SUM, COUNT, MIN or MAX is a number, combined by its operator. Every other measure keeps a *state*, bytes that its kind
(``kivi.states``) combines and evaluates. Kinds have permanent ids, which are kept with the definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import InvalidArgument
from kivi.model.types import ColumnType, shown

__all__ = ["KINDS", "OWN", "OWN_ID_MIN", "OwnSpec", "State", "precision_of"]

KINDS: Final = {
    "quantiles": 4, "distinct": 5, "avg": 6, "var": 7, "stddev": 8, "first": 9, "last": 10,
    "argmax": 11, "argmin": 12, "largest": 13, "smallest": 14, "top": 15,
    "weighted_quantiles": 16,
}  # fmt: skip
"""Name -> id, permanent: ids are written to disk and never reused. SUM, MIN and MAX have 1 to 3."""

OWN_ID_MIN: Final = 1_000
"""Ids from here on are for measures that are registered by programs."""


_P_MIN: Final = 4
_P_MAX: Final = 18


@dataclass(frozen=True, slots=True)
class OwnSpec:
    """What a declaration must know of a registered measure: the types of columns that it takes, and of its result."""

    id: int
    takes: tuple[str, ...]
    result: ColumnType


OWN: Final[dict[str, OwnSpec]] = {}
"""Registered measures by name (``kivi.states.own``)."""


def precision_of(error: float) -> int:
    """The least number of bits p whose HyperLogLog has at most the standard error ``error``: 1.04 / sqrt(2**p).

    Raises InvalidArgument.
    """
    least = 1.04 / math.sqrt(2**_P_MAX)
    if not isinstance(error, (int, float)) or isinstance(error, bool) or not least <= error < 1:
        raise InvalidArgument(f"error {shown(error)} is not a relative error from {least:.4f} to below 1, such as 0.01")
    return next(p for p in range(_P_MIN, _P_MAX + 1) if 1.04 / math.sqrt(2**p) <= error)


@dataclass(frozen=True, slots=True)
class State:
    """``value``: the type of what is observed; ``by``: of what argmax and argmin compare, and of weights.

    ``size``: the scale of quantiles, the bits of a distinct count's register numbers, how many values largest and
    smallest keep or top counts; 1 for a var or stddev of the whole population.
    """

    id: int
    kind: str
    value: ColumnType
    by: ColumnType | None = None
    size: int = 0

    def to_plain(self) -> list[Any]:
        return [self.id, self.kind, str(self.value), self.by and str(self.by), self.size]

    @staticmethod
    def from_plain(data: list[Any]) -> State:
        id_, kind, value, by, size = data
        return State(id_, kind, ColumnType.parse(value), by and ColumnType.parse(by), size)
