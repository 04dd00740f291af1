"""Aggregates rebuilt by Spark from events, and compared with those that kivi keeps, row by row and exactly.

What an aggregate is comes from the catalog (``describe``), so none is left out and none is written down twice. Times
are compared as microseconds and sums as 38-digit decimals: nothing is rounded on either side. Sums of floats depend on
the order of adding and are not compared.

Events below a table's retention floor are gone, aggregates are not. Only slots that begin at or past the floor, and at
or past the moment since which the aggregate is complete, can be rebuilt, so only these are compared.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Aggregate", "Comparison", "aggregates", "compare", "rebuild", "whole"]

_SHOWN: Final = 5  # differing rows told in full
_CALL: Final = re.compile(r"(sum|count|min|max)\((\w*)\)\Z")


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
    measures: dict[str, tuple[str, str]]  # name -> (operator, source column; "" for count())
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
    """All that are ready, in the order of their names; call it after the snapshot is open, as floors only rise."""
    found = []
    for name in sorted(db.tables()):
        described = db.describe(name)
        if described["kind"] != "aggregate" or described["state"] != "ready":
            continue
        source = db.describe(described["source"])
        floors = (source["statistics"].get("complete_since_us"), described["complete_since_us"])
        since = max((floor for floor in floors if floor is not None), default=None)
        keys = tuple(Key(k, k) if isinstance(k, str) else Key(**k) for k in described["group_by"])
        measures = {}
        for measure, text in described["measures"].items():
            match = _CALL.match(text)
            assert match is not None, text
            if described["columns"][measure] != "sum(float64)":
                measures[measure] = (match[1], match[2])
        found.append(Aggregate(name, described["source"], keys, measures, since))
    return found


def rebuild(events: DataFrame, wanted: Aggregate) -> DataFrame:
    """The aggregate's keys and measures, from scratch, in the form of ``whole``."""
    from pyspark.sql import functions as F

    def measure(kind: str, source: str) -> Column:
        match kind:
            case "count":
                return F.count(source or F.lit(1))
            case "sum":  # nulls are skipped, and the sum of none is 0
                return F.coalesce(F.sum(_exact(events, source)), F.lit(0))
            case "min":
                return F.min(source)
            case _:
                return F.max(source)

    keys = [_slot(F.unix_micros(k.source), k.slot_us).alias(k.name) if k.slot_us else F.col(k.source).alias(k.name)
            for k in wanted.keys]  # fmt: skip
    grouped = events.groupBy(*keys).agg(*(measure(*what).alias(name) for name, what in wanted.measures.items()))
    return whole(grouped, wanted)


def whole(rows: DataFrame, wanted: Aggregate) -> DataFrame:
    """Keys and measures, moments as microseconds and whole numbers exact; only slots that can be rebuilt."""
    from pyspark.sql import functions as F

    names = [*(key.name for key in wanted.keys), *wanted.measures]
    out = rows.select(*(_exact(rows, name).alias(name) for name in names))
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
    counts = [name for name, what in wanted.measures.items() if what == ("count", "")]
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


def _exact(frame: DataFrame, name: str) -> Column:
    """Of a column whose numbers are whole: as many digits as Spark has. Moments: microseconds since the epoch."""
    from pyspark.sql import functions as F

    match frame.schema[name].dataType.typeName():
        case "timestamp":
            return F.unix_micros(name)
        case "long" | "integer":
            return F.col(name).cast("decimal(38,0)")
        case _:
            return F.col(name)


def _slot(moment_us: Column, width_us: int) -> Column:
    from pyspark.sql import functions as F

    return moment_us - F.pmod(moment_us, F.lit(width_us))
