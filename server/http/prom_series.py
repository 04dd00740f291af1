"""Aggregates as Prometheus' series.

A sum or a count of an aggregate with a time slot is a counter, ``<table>_<measure>``. Its labels are the key columns
without the slot, as text. It is cumulative, and has a sample at the end of every slot, as a server has that is scraped
then, from 0 where the first slot of the series begins that is kept; so ``increase(calls_5m_n[5m])`` where a slot ends
is that slot's count, the first one's too, and ``rate`` is it by the second. A slot that has not ended has no sample.
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
from kivi.model.rollups import stored_slot
from kivi.model.schema import TableSchema
from kivi.model.slots import Slot
from kivi.store.facade import Lease, Store

__all__ = ["NAME", "Counter", "Labels", "Matching", "Series", "counters", "matches", "read", "selected"]

NAME: Final = "__name__"
_SAMPLES_MAX: Final = 5_000_000
Labels = Mapping[str, str]
Floats = npt.NDArray[np.float64]


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

    @property
    def labels(self) -> list[str]:
        return [group.name for group in self.table.group_by if group.slot is None]


@dataclass(frozen=True)
class Series:
    """Some of one metric: ``values[i, k]`` is that of ``labels[i]`` at ``ends_ms[k]``, from ``first[i]`` on. The first
    of ``ends_ms`` is where the first slot begins."""

    labels: Sequence[Labels]
    ends_ms: npt.NDArray[np.int64]
    values: Floats
    first: npt.NDArray[np.int64]
    slot_ms: int


def counters(store: Store, allows: Callable[[str], bool]) -> dict[str, Counter]:
    """All metrics of the tables that may be read, by name."""
    found: dict[str, Counter] = {}
    for table in store.tables():
        stored = stored_slot(table) if table.kind == "aggregate" and allows(table.name) else None
        if stored is None:
            continue
        for column in table.columns:
            if column.operator == "sum" and not column.type.is_state and column not in table.key:
                name = f"{table.name}_{column.name}"
                found[name] = Counter(name, table, column.name, stored[2])
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


def read(store: Store, lease: Lease, counter: Counter, matching: Sequence[Matching], until_us: int) -> Series:
    """The series of a metric that match, with the samples of the slots that end up to ``until_us``."""
    table = store.table(counter.table.name, lease)
    where = _pushed(table, counter, matching)
    arguments = RollupArguments(table.name, counter.labels, counter.slot.width, where=where, measures=[counter.measure],
                                tz=counter.slot.zone or None)  # fmt: skip
    slot = next(group.name for group in table.group_by if group.slot is not None)
    rows: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for batch in store.answer(lease, table, arguments.bound(table)):
        starts = batch.column(slot).cast("int64").to_pylist()
        for start, row in zip(starts, rows_from_batch(batch), strict=True):
            key = tuple(_text(row[name]) for name in counter.labels)
            rows.setdefault(key, []).append((start, float(row[counter.measure])))
    named = [
        ({NAME: counter.name, **dict(zip(counter.labels, key, strict=True))}, found) for key, found in rows.items()
    ]
    chosen = [(labels, found) for labels, found in named if matches(matching, labels)]
    return _cumulative(counter, chosen, until_us)


def _cumulative(counter: Counter, chosen: Sequence[tuple[Labels, list[tuple[int, float]]]], until_us: int) -> Series:
    slot, ends = counter.slot, list[int]()
    if chosen:
        end = min(start for _, found in chosen for start, _ in found)
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
            k = place.get(slot.end(start))
            if k is not None:
                values[i, k] += value
                first[i] = min(first[i], k - 1)
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
