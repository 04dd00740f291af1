"""Aggregates as Prometheus' series.

A sum or a count of an aggregate with a time slot is a counter, ``<table>_<measure>``. Its labels are the key columns
without the slot, as text. It is cumulative, and has a sample at the end of every slot, as a server has that is scraped
then, from 0 where the first slot of the series begins that is kept; so ``increase(calls_5m_n[5m])`` where a slot ends
is that slot's count, the first one's too, and ``rate`` is it by the second. A slot that has not ended has no sample.

A distribution (``kivi.quantiles``) is a histogram, ``<table>_<measure>_bucket``, with the label ``le``: both bounds of
all buckets that have values in the answer, so that ``histogram_quantile`` of any sum of them is within the accuracy.

All of one answer is read at one snapshot: what was counted later in a slot that is over changes all samples from there
on alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kivi.api.arguments import RollupArguments
from kivi.arrow.columns import rows_from_batch
from kivi.errors import InvalidArgument
from kivi.model.expressions import Expr
from kivi.model.quantiles import Quantiles, upper_bounds
from kivi.model.rollups import stored_slot
from kivi.model.schema import TableSchema
from kivi.model.slots import Slot
from kivi.store.facade import Lease, Store

__all__ = [
    "LE",
    "LOOKBACK_US",
    "NAME",
    "Counter",
    "Labels",
    "Matching",
    "Series",
    "counters",
    "matches",
    "read",
    "selected",
]

NAME: Final = "__name__"
LE: Final = "le"
LOOKBACK_US: Final = 300_000_000
_SAMPLES_MAX: Final = 5_000_000
Labels = Mapping[str, str]
Floats = npt.NDArray[np.float64]
_Found = tuple[Labels, list[tuple[int, Any]]]


class Matching(NamedTuple):
    """Of one label: ``op`` is =, !=, =~ or !~."""

    name: str
    op: str
    value: str


class Counter(NamedTuple):
    """A metric: a measure of an aggregate."""

    name: str
    table: TableSchema
    measure: str
    slot: Slot
    is_histogram: bool = False

    @property
    def labels(self) -> list[str]:
        return [group.name for group in self.table.group_by if group.slot is None]


@dataclass(frozen=True)
class Series:
    """Some of one metric: ``values[i, k]`` is that of ``labels[i]`` at ``ends_ms[k]``, from ``first[i]`` on. The first
    of ``ends_ms`` is where the first slot begins, or some end before what is looked for."""

    labels: Sequence[Labels]
    ends_ms: npt.NDArray[np.int64]
    values: Floats
    first: npt.NDArray[np.int64]
    slot_ms: int


def counters(store: Store, sees: Callable[[TableSchema], bool]) -> dict[str, Counter]:
    """All metrics of the tables that may be read, by name."""
    found: dict[str, Counter] = {}
    for table in store.tables():
        stored = stored_slot(table) if table.kind == "aggregate" and sees(table) else None
        if stored is None:
            continue
        for column in table.columns:
            is_histogram = column.type.name == "quantiles"
            if is_histogram or (column.operator == "sum" and not column.type.is_state and column not in table.key):
                name = f"{table.name}_{column.name}{'_bucket' if is_histogram else ''}"
                found[name] = Counter(name, table, column.name, stored[2], is_histogram)
    return found


def selected(known: Mapping[str, Counter], matching: Iterable[Matching]) -> list[Counter]:
    """Those whose name matches."""
    tests = [each for each in matching if each.name == NAME]
    return [counter for name, counter in known.items() if all(_holds(each, name) for each in tests)]


def matches(matching: Iterable[Matching], labels: Labels) -> bool:
    return all(_holds(each, labels.get(each.name, "")) for each in matching)


def _holds(matching: Matching, value: str) -> bool:
    if matching.op in ("=", "!="):
        return (value == matching.value) == (matching.op == "=")
    try:
        found = re.fullmatch(matching.value, value, re.DOTALL) is not None
    except re.error as error:
        raise InvalidArgument(f"{matching.value!r} is no regular expression: {error}") from None
    return found == (matching.op == "=~")


def read(
    store: Store, lease: Lease, counter: Counter, matching: Sequence[Matching], span_us: tuple[int, int]
) -> Series:
    """The series of a metric that match, with the samples that may be looked for in a span of time."""
    table = store.table(counter.table.name, lease)
    where = _pushed(table, counter, matching)
    arguments = RollupArguments(table.name, counter.labels, counter.slot.width, where=where, measures=[counter.measure],
                                tz=counter.slot.zone or None)  # fmt: skip
    slot = next(group.name for group in table.group_by if group.slot is not None)
    rows: dict[tuple[str, ...], list[tuple[int, Any]]] = {}
    for batch in store.answer(lease, table, arguments.bound(table)):
        starts = batch.column(slot).cast("int64").to_pylist()
        for start, row in zip(starts, rows_from_batch(batch), strict=True):
            key = tuple(_text(row[name]) for name in counter.labels)
            rows.setdefault(key, []).append((start, row[counter.measure]))
    named: list[_Found] = [
        ({NAME: counter.name, **dict(zip(counter.labels, key, strict=True))}, found) for key, found in rows.items()
    ]
    if counter.is_histogram:
        named = _bucketed([each for each in named if matches([m for m in matching if m.name != LE], each[0])])
    chosen = [(labels, found) for labels, found in named if matches(matching, labels)]
    return _cumulative(counter, chosen, span_us)


def _bucketed(named: Sequence[_Found]) -> list[_Found]:
    """Of each distribution a series for each bound of a bucket that any of them has values in, both its ends, so that
    what is interpolated between them is within the bucket; of the values up to it."""
    parts = [part for _, found in named for _, part in found if isinstance(part, Quantiles)]
    codes = np.unique(np.concatenate([np.zeros(0, np.int64), *(part.codes for part in parts)]))
    codes = np.unique(np.concatenate([codes, codes[codes != 0] - 1]))
    if len(codes) * sum(len(found) for _, found in named) > _SAMPLES_MAX:
        raise InvalidArgument(f"the histograms have more than {_SAMPLES_MAX:,} samples here: select fewer series")
    bounds = [repr(float(bound)) for bound in upper_bounds(codes, parts[0].scale)] if parts else []
    out = list[_Found]()
    for labels, found in named:
        below = [(start, [*part.counts_up_to(codes), part.count]) for start, part in found]
        for k, bound in enumerate([*bounds, "+Inf"]):
            out.append(({**labels, LE: bound}, [(start, counts[k]) for start, counts in below]))
    return out


def _cumulative(counter: Counter, chosen: Sequence[_Found], span_us: tuple[int, int]) -> Series:
    slot, ends = counter.slot, list[int]()
    since_us, until_us = span_us
    if chosen:
        seen_us = since_us - max(LOOKBACK_US, slot.nominal_us)
        end = max(min(start for _, found in chosen for start, _ in found), slot.start(slot.start(seen_us) - 1))
        while end <= until_us:
            ends.append(end)
            end = slot.end(end)
            if len(ends) * len(chosen) > _SAMPLES_MAX:
                raise InvalidArgument(
                    f"{counter.name} has more than {_SAMPLES_MAX:,} samples here: select fewer series"
                )
    place = {end: k for k, end in enumerate(ends)}
    values = np.zeros((len(chosen), len(ends)))
    first = np.full(len(chosen), len(ends), np.int64)
    for i, (_, found) in enumerate(chosen):
        for start, value in found:
            ended = slot.end(start)
            if ends and ended <= ends[0]:  # before what is looked for
                values[i, 0] += value
                first[i] = 0
            else:
                first[i] = min(first[i], place.get(start, len(ends)))
                if (k := place.get(ended)) is not None:
                    values[i, k] += value
    labels = [labels for labels, _ in chosen]
    ends_ms = np.array(ends, np.int64) // 1_000
    return Series(labels, ends_ms, np.cumsum(values, axis=1), first, int(slot.nominal_us) // 1_000)


def _pushed(table: TableSchema, counter: Counter, matching: Iterable[Matching]) -> Expr | None:
    """What the store can select: texts that are equal. Everything is looked at again."""
    where: Expr | None = None
    for each in matching:
        column = table.by_name.get(each.name)
        if each.op == "=" and each.value and each.name in counter.labels and column and str(column.type) == "string":
            term = Expr("==", each.name, each.value)
            where = term if where is None else where & term
    return where


def _text(value: Any) -> str:
    """A label; null is a label that is empty, which is none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return "0x" + value.hex() if isinstance(value, bytes) else str(value)
