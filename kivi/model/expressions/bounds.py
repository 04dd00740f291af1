"""What a predicate implies of single columns: comparisons that are true wherever it is.

Readers that prune, by ranges of keys, by what is known of a block, or by an index of queries, know comparisons. For
them a prefix is a range of texts, and a circle one of latitudes and longitudes; the predicate itself decides what is
left of it.
"""

from __future__ import annotations

from kivi.model.expressions.nodes import Expr
from kivi.model.expressions.positions import latitudes, longitudes
from kivi.model.expressions.quads import cell_bounds
from kivi.model.expressions.texts import literal_prefix, prefix_end

__all__ = ["bounds_of"]


def bounds_of(expr: Expr) -> tuple[Expr, ...]:
    """Of a bound node: comparisons of columns that are all true wherever it is; none, if nothing plain follows from it.

    ``startswith`` of a column is exactly its bounds; all other nodes may be false where their bounds are true.
    """
    if expr.op in ("startswith", "matches") and expr.column:
        prefix = expr.value if expr.op == "startswith" else literal_prefix(expr.value)
        if not prefix:
            return ()
        end = prefix_end(prefix)
        from_on = Expr(">=", expr.column, prefix)
        return (from_on,) if end is None else (from_on, Expr("<", expr.column, end))
    if expr.op == "within_km":
        return _of_position(expr, latitudes(expr.value), longitudes(expr.value))
    if expr.op == "startswith" and expr.args and expr.args[0].op == "quad":
        cell = cell_bounds(expr.value)
        return () if cell is None else _of_position(expr.args[0], *cell)
    return ()


def _of_position(of: Expr, lats: tuple[float, float], lons: list[tuple[float, float]]) -> tuple[Expr, ...]:
    """Bounds of the columns of latitude and longitude; no range of longitudes is all of them."""
    lat, lon = of.args
    found: list[Expr] = []
    if _is_degrees(lat):
        found += [Expr(">=", lat.column, lats[0]), Expr("<=", lat.column, lats[1])]
    if _is_degrees(lon) and lons:
        turns = [Expr("and", args=(Expr(">=", lon.column, a), Expr("<=", lon.column, b))) for a, b in lons]
        found.append(turns[0] if len(turns) == 1 else Expr("or", args=tuple(turns)))
    return tuple(found)


def _is_degrees(arg: Expr) -> bool:
    return arg.op == "col" and arg.type is not None and arg.type.name == "float64"
