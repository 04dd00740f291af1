"""What is known of a block or a row group without opening it, and what follows for a predicate or a range of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from kivi.model.expressions import Expr, all_of, between, bounds_of

__all__ = ["Known", "all_kept", "always", "equals", "never", "outside"]


class Known(Protocol):
    """The facts: a block has them, and a row group of a settled file."""

    @property
    def rows(self) -> int: ...

    @property
    def time_min(self) -> int: ...

    @property
    def time_max(self) -> int: ...

    @property
    def columns(self) -> Mapping[str, tuple[Any, Any, int, int | None]]: ...


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
