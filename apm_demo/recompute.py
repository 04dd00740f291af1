"""Aggregates rebuilt by Spark from events, and compared with those that kivi keeps, row by row and exactly.

What an aggregate is comes from the catalog (``describe``), so none is left out and none is written down twice. Times
are compared as microseconds, sums as 38-digit decimals, and quantiles by the counts of their buckets: nothing is
rounded on either side. What depends on the order of events (sums of floats, first, last, argmax, argmin) or on a hash
(distinct, top) is not compared, nor are variances, nor aggregates whose slots are of a calendar.

Events below a table's retention floor are gone, aggregates are not. Only slots that begin at or past the floor, and at
or past the moment since which the aggregate is complete, can be rebuilt, so only these are compared.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Aggregate", "Comparison", "aggregates", "compare", "rebuild", "whole"]

_SHOWN: Final = 5  # differing rows told in full
_COMPARED: Final = frozenset({"sum", "count", "min", "max", "avg", "quantiles"})


class Measure(NamedTuple):
    """What is measured, as the catalog writes it: the kind, its source and ``where`` (None: neither), and its type."""

    kind: str
    source: ast.expr | None
    where: ast.expr | None
    type: str

    @property
    def counts_all(self) -> bool:
        return self.kind == "count" and self.source is None and self.where is None

    @property
    def scale(self) -> int:
        """Of quantiles, whose type is ``quantiles(6)``."""
        return int(self.type.removeprefix("quantiles(").rstrip(")"))

    @staticmethod
    def of(text: str, type_: str) -> Measure | None:
        """``sum((tokens * price), where=(status >= 500))``; None for one that is not compared."""
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name), text
        kind = call.func.id
        if kind not in _COMPARED or type_ == "sum(float64)":
            return None
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        return Measure(kind, call.args[0] if call.args else None, given.get("where"), type_)


class Key(NamedTuple):
    """A key column: the source's column as it is, or the start of the slot of that width it falls in."""

    name: str
    source: str
    slot_us: int = 0


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What the catalog says of an aggregate, and from which event time on it can be rebuilt (None: all of it)."""

    name: str
    source: str
    keys: tuple[Key, ...]
    measures: dict[str, Measure]
    since_us: int | None

    @property
    def slot(self) -> Key | None:
        return next((key for key in self.keys if key.slot_us), None)


class Comparison(NamedTuple):
    """Rows on either side, those that differ, and the first of these in words."""

    rows: int
    differing: int
    first: list[str]


def aggregates(db: Any) -> list[Aggregate]:
    """All that are ready and can be compared, in the order of their names.

    Call it after the snapshot is open, as floors only rise.
    """
    found = []
    for name in sorted(db.tables()):
        described = db.describe(name)
        if described["kind"] != "aggregate" or described["state"] != "ready":
            continue
        source = db.describe(described["source"])
        if any("tz" in key for key in described["group_by"] if not isinstance(key, str)):
            continue
        floors = (source["statistics"].get("complete_since_us"), described["complete_since_us"])
        since = max((floor for floor in floors if floor is not None), default=None)
        keys = tuple(Key(k, k) if isinstance(k, str) else Key(**k) for k in described["group_by"])
        measures = {}
        for measure, text in described["measures"].items():
            found_measure = Measure.of(text, described["columns"][measure])
            if found_measure is not None and not _is_float_avg(found_measure, source):
                measures[measure] = found_measure
        found.append(Aggregate(name, described["source"], keys, measures, since))
    return found


def rebuild(events: DataFrame, wanted: Aggregate) -> DataFrame:
    """The aggregate's keys and measures, from scratch, in the form of ``whole``."""
    from pyspark.sql import functions as F

    def measure(wanted: Measure) -> Column:
        source = F.lit(1) if wanted.source is None else _computed(events, wanted.source)
        if wanted.where is not None:
            source = F.when(_computed(events, wanted.where), source)
        match wanted.kind:
            case "count":
                return F.count(source)
            case "sum":  # nulls are skipped, and the sum of none is 0
                return F.coalesce(F.sum(source), F.lit(0))
            case "min":
                return F.min(source)
            case "avg":
                quotient: Column = _quotient()(F.sum(source), F.count(source))
                return quotient
            case "quantiles":
                buckets: Column = _bucketed(wanted.scale)(F.collect_list(source))
                return buckets
            case _:
                return F.max(source)

    keys = [_slot(F.unix_micros(k.source), k.slot_us).alias(k.name) if k.slot_us else F.col(k.source).alias(k.name)
            for k in wanted.keys]  # fmt: skip
    grouped = events.groupBy(*keys).agg(*(measure(what).alias(name) for name, what in wanted.measures.items()))
    return whole(grouped, wanted)


def whole(rows: DataFrame, wanted: Aggregate) -> DataFrame:
    """Keys and measures, moments as microseconds and whole numbers exact; only slots that can be rebuilt."""
    from pyspark.sql import functions as F

    names = [*(key.name for key in wanted.keys), *wanted.measures]
    scales = {name: measure.scale for name, measure in wanted.measures.items() if measure.kind == "quantiles"}
    out = rows.select(*(_exact(rows, name, scales.get(name)).alias(name) for name in names))
    slot = wanted.slot
    if wanted.since_us is not None and slot is not None:
        out = out.where(F.col(slot.name) >= wanted.since_us)
    return out


def compare(
    online: DataFrame, rebuilt: Mapping[str, DataFrame], wanted: Aggregate
) -> tuple[int | None, list[Comparison]]:
    """How many events kivi's rows are about (their count(), or None), and a comparison with each of ``rebuilt``.

    All are in the form of ``whole``; the keys of ``rebuilt`` name them in sentences. One pass over all of them.
    """
    from pyspark.sql import functions as F

    keys = [key.name for key in wanted.keys]  # no key column of an aggregate is ever null
    sides = [online, *rebuilt.values()]
    tagged = [side.select(*keys, F.struct(*wanted.measures).alias("row"), F.lit(n).alias("side"))
              for n, side in enumerate(sides)]  # fmt: skip
    rows = functools.reduce(lambda one, other: one.unionByName(other), tagged).groupBy(*keys).agg(
        *(F.first(F.when(F.col("side") == n, F.col("row")), ignorenulls=True).alias(f"s{n}") for n in range(len(sides)))
    )  # fmt: skip
    differs = [~F.col("s0").eqNullSafe(F.col(f"s{n}")) for n in range(1, len(sides))]
    counts = [name for name, what in wanted.measures.items() if what.counts_all]
    (found,) = rows.agg(
        (F.sum(F.col("s0")[counts[0]]) if counts else F.lit(0)).alias("events"),
        *(
            F.count_if(F.col("s0").isNotNull() | F.col(f"s{n}").isNotNull()).alias(f"rows{n}")
            for n in range(1, len(sides))
        ),
        *(F.count_if(differ).alias(f"differing{n}") for n, differ in enumerate(differs, 1)),
    ).collect()
    comparisons = []
    for n, (what, differ) in enumerate(zip(rebuilt, differs, strict=True), 1):
        first: list[str] = []
        if found[f"differing{n}"]:
            some = rows.where(differ).orderBy(*keys).limit(_SHOWN)
            first = [_told(row.asDict(), wanted, what, row["s0"], row[f"s{n}"]) for row in some.collect()]
        comparisons.append(Comparison(found[f"rows{n}"], found[f"differing{n}"], first))
    return int(found["events"] or 0) if counts else None, comparisons


def _told(row: Mapping[str, Any], wanted: Aggregate, what: str, online: Any, rebuilt: Any) -> str:
    key = ", ".join(f"{key.name}={row[key.name]}" for key in wanted.keys)
    if online is None or rebuilt is None:
        return f"{wanted.name} ({key}): {'kivi has no such row' if online is None else f'{what} give no such row'}"
    told = [f"{name} is {online[name]} in kivi, {rebuilt[name]} from {what}"
            for name in wanted.measures if online[name] != rebuilt[name]]  # fmt: skip
    return f"{wanted.name} ({key}): {', '.join(told)}"


def _exact(frame: DataFrame, name: str, scale: int | None = None) -> Column:
    """Of a column whose numbers are whole: as many digits as Spark has. Moments: microseconds since the epoch.

    ``scale``: of a column of quantiles, which kivi gives as the bytes of its state.
    """
    from pyspark.sql import functions as F

    match frame.schema[name].dataType.typeName():
        case "timestamp":
            return F.unix_micros(name)
        case "long" | "integer":
            return F.col(name).cast("decimal(38,0)")
        case "binary" if scale is not None:
            stored: Column = _stored_buckets(scale)(name)
            return stored
        case _:
            return F.col(name)


def _is_float_avg(measure: Measure, source: Mapping[str, Any]) -> bool:
    """Whether an avg adds floats: of a float column, or of an expression, which may be one."""
    if measure.kind != "avg":
        return False
    return not isinstance(measure.source, ast.Name) or source["columns"][measure.source.id] == "float64"


_BINARY: Final = {
    ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.Div: "__truediv__",
    ast.BitAnd: "__and__", ast.BitOr: "__or__",
    ast.Lt: "__lt__", ast.LtE: "__le__", ast.Gt: "__gt__", ast.GtE: "__ge__", ast.Eq: "__eq__", ast.NotEq: "__ne__",
}  # fmt: skip


def _computed(events: DataFrame, node: ast.expr) -> Column:
    """An expression as the catalog writes it, over the events' columns."""
    from pyspark.sql import functions as F

    def of(node: ast.expr) -> Column:
        match node:
            case ast.Name(id=name):
                return _exact(events, name)
            case ast.Constant(value=value):
                return F.lit(value)
            case ast.UnaryOp(op=ast.Invert(), operand=inner):
                return ~of(inner)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -of(inner)
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                found: Column = getattr(of(left), _BINARY[type(op)])(of(right))
                return found
            case ast.Call(func=ast.Attribute(value=inner, attr="is_null")):
                return of(inner).isNull()
            case ast.Call(func=ast.Attribute(value=inner, attr="isin"), args=[ast.List(elts=values)]):
                return of(inner).isin([ast.literal_eval(value) for value in values])
            case ast.Call(func=ast.Name(id="coalesce"), args=arguments):
                return F.coalesce(*map(of, arguments))
        raise ValueError(f"Spark is not told how to compute {ast.unparse(node)}")

    return of(node)


def _quotient() -> Any:
    """The float64 nearest to a sum through a count."""
    from pyspark.sql import functions as F

    def divided(total: Any, count: int) -> float | None:
        from fractions import Fraction

        return float(Fraction(total) / count) if count else None

    return F.udf(divided, "double", useArrow=False)


def _bucketed(scale: int) -> Any:
    """Values -> "code x count, ...": bucket i holds (g**(i-1), g**i], g = 2**(2**-scale), told by whole numbers."""
    from pyspark.sql import functions as F

    def bucketed(values: Any) -> str:
        from collections import Counter
        from fractions import Fraction

        def code(value: Any) -> int:
            top, bottom = abs(Fraction(float(value))).as_integer_ratio()
            fine = 2 ** max(scale, 0)
            bucket = (top**fine - 1).bit_length() - (bottom.bit_length() - 1) * fine if top else 0
            number = -(-bucket // 2 ** max(-scale, 0)) - (-1075 * fine // 2 ** max(-scale, 0)) + 1
            return 0 if not top else number if value > 0 else -number

        counts: Counter[int] = Counter()
        for value, count in Counter(values).items():
            counts[code(value)] += count
        return ", ".join(f"{code} x {count}" for code, count in sorted(counts.items()))

    return F.udf(bucketed, "string", useArrow=False)


def _stored_buckets(scale: int) -> Any:
    """A state as kivi keeps it, in the same words."""
    from pyspark.sql import functions as F

    def told(state: bytes) -> str:
        import kivi

        return ", ".join(
            f"{code} x {count}" for code, count in kivi.Quantiles.from_state(scale, bytes(state)).buckets()
        )

    return F.udf(told, "string", useArrow=False)


def _slot(moment_us: Column, width_us: int) -> Column:
    from pyspark.sql import functions as F

    return moment_us - F.pmod(moment_us, F.lit(width_us))
