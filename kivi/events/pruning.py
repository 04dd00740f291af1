"""What is known of a block or a row group without opening it, and what follows for a predicate or a range of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kivi.model.expressions import Expr, all_of, between, bounds_of

__all__ = ["NO_VALUES", "Facts", "Known", "Stretch", "Values", "all_kept", "always", "equals", "never", "outside"]

Facts = tuple[Any, Any, int, int | None]
"""Of a column: min, max, non-nulls, and the exact sum or None."""
NO_VALUES: Final[Facts] = (None, None, 0, None)


class Known(Protocol):
    """The facts: a block has them, and a row group of a settled file."""

    @property
    def rows(self) -> int: ...

    @property
    def time_min(self) -> int: ...

    @property
    def time_max(self) -> int: ...

    @property
    def columns(self) -> Mapping[str, Facts]: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """What is known of the rows between two moments, however many there are."""

    time_min: int
    time_max: int
    columns: Mapping[str, Facts]
    rows: int = -1


@dataclass(frozen=True, slots=True)
class Values:
    """Between which values a column of numbers lies, by stretches of event time: of those that have any."""

    begins: npt.NDArray[Any]
    ends: npt.NDArray[Any]
    lows: npt.NDArray[Any]
    highs: npt.NDArray[Any]

    @staticmethod
    def of(known: Sequence[tuple[tuple[int, int], Facts]]) -> Values:
        """``known``: of each stretch the least and the greatest event time, and the column's facts."""
        rows = [(begin, end, low, high) for (begin, end), (low, high, count, _) in known if count]
        return Values(*(np.array([row[i] for row in rows]) for i in range(4)))

    def between(self, low_us: int, high_us: int) -> Facts:
        """Of all stretches that have some of these moments, both inclusive, together."""
        inside = np.flatnonzero((self.begins <= high_us) & (self.ends >= low_us))
        if not len(inside):
            return NO_VALUES
        return self.lows[inside].min().item(), self.highs[inside].max().item(), len(inside), None


def all_kept(time_column: str, low: int | None, high: int | None, where: Expr | None, block: Known) -> Expr | None:
    """``where`` and the time bounds, but for bounds that the whole block keeps."""
    low = None if low is None or block.time_min >= low else low
    high = None if high is None or block.time_max < high else high
    return all_of(where, between(time_column, low, high))


def outside(block: Known, low: int | None, high: int | None) -> bool:
    return (low is not None and block.time_max < low) or (high is not None and block.time_min >= high)


def never(where: Expr, block: Known) -> bool:
    """True if the header proves that no row of the block is selected."""
    if where.op == "and":
        return any(never(arg, block) for arg in where.args)
    if where.op == "or":
        return all(never(arg, block) for arg in where.args)
    if any(never(bound, block) for bound in bounds_of(where)):
        return True
    stats = block.columns.get(where.column)
    if stats is None or where.op == "not":
        return False
    low, high, count, _ = stats
    if where.op == "is_null":
        return count == block.rows
    if not count:
        return True
    match where.op:
        case "==":
            return not low <= where.value <= high
        case "!=":
            return bool(low == high == where.value)
        case "isin":
            return all(not low <= value <= high for value in where.value)
        case "<":
            return bool(low >= where.value)
        case "<=":
            return bool(low > where.value)
        case ">":
            return bool(high <= where.value)
        case ">=":
            return bool(high < where.value)
    return False


def equals(where: Expr, has: Callable[[str, Any], bool]) -> bool:
    """False if no row is selected, given which columns may have which values, in stored form."""
    match where.op:
        case "and":
            return all(equals(arg, has) for arg in where.args)
        case "or":
            return any(equals(arg, has) for arg in where.args)
        case "==" if where.column:
            return has(where.column, where.value)
        case "isin" if where.column:
            return any(has(where.column, value) for value in where.value)
    return True


def always(where: Expr, block: Known) -> bool:
    """True if the header proves that every row of the block is selected."""
    if where.op == "and":
        return all(always(arg, block) for arg in where.args)
    if where.op == "or":
        return any(always(arg, block) for arg in where.args)
    negated = where.op == "not"
    if negated:
        where = where.args[0]
    stats = block.columns.get(where.column)
    if stats is None or (negated and where.op != "is_null"):
        return False
    low, high, count, _ = stats
    if where.op == "is_null":
        return count == (block.rows if negated else 0)
    if count < block.rows:
        return False
    if where.op == "isin":
        return bool(low == high and low in where.value)
    opposite = _OPPOSITES.get(where.op)
    return opposite is not None and never(Expr(opposite, where.column, where.value), block)


_OPPOSITES: Final = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
