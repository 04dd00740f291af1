"""What a predicate implies of single columns: comparisons that are true wherever it is.

Readers that prune, by ranges of keys, by what is known of a block, or by an index of queries, know comparisons. For
them a prefix is a range of texts, and a circle one of latitudes and longitudes; the predicate itself decides what is
left of it.
"""

from __future__ import annotations

from kivi.model.expressions.nodes import Expr
from kivi.model.expressions.positions import latitudes, longitudes
from kivi.model.expressions.texts import literal_prefix, prefix_end

__all__ = ["bounds_of"]


def bounds_of(expr: Expr) -> tuple[Expr, ...]:
    """Of a bound node: comparisons of columns that are all true wherever it is; none, if nothing plain follows from it.

    ``startswith`` is exactly its bounds; all other nodes may be false where their bounds are true.
    """
    if expr.op in ("startswith", "matches") and expr.column:
        prefix = expr.value if expr.op == "startswith" else literal_prefix(expr.value)
        if not prefix:
            return ()
        end = prefix_end(prefix)
        from_on = Expr(">=", expr.column, prefix)
        return (from_on,) if end is None else (from_on, Expr("<", expr.column, end))
    if expr.op == "within_km":
        found: list[Expr] = []
        lat, lon = expr.args
        if _is_degrees(lat):
            low, high = latitudes(expr.value)
            found += [Expr(">=", lat.column, low), Expr("<=", lat.column, high)]
        ranges = longitudes(expr.value)
        if _is_degrees(lon) and ranges:
            turns = [Expr("and", args=(Expr(">=", lon.column, a), Expr("<=", lon.column, b))) for a, b in ranges]
            found.append(turns[0] if len(turns) == 1 else Expr("or", args=tuple(turns)))
        return tuple(found)
    return ()


def _is_degrees(arg: Expr) -> bool:
    return arg.op == "col" and arg.type is not None and arg.type.name == "float64"
