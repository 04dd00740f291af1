"""Aggregates as Prometheus' series.

A sum or a count of an aggregate with a time slot is a counter, ``<table>_<measure>``. Its labels are the key columns
without the slot, as text; ``Counter.labels`` says what those are called whose name is taken. It is cumulative, and has
a sample at the end of every slot, as a server has that is scraped then, from 0 where the first slot of the series
begins that is kept; so ``increase(calls_5m_n[5m])`` where a slot ends is that slot's count, the first one's too, and
``rate`` is it by the second. A slot that has not ended has no sample.

A distribution (``kivi.quantiles``) is a histogram, ``<table>_<measure>_bucket``, with the label ``le``: both bounds of
all buckets that have values in what is selected, so that ``histogram_quantile`` of any sum of them lies in the bucket
of the value at that rank. Prometheus supposes that values are spread evenly between its bounds: at worst it is off by
the width of the bucket, which is twice what buckets are accurate to (1.09 % where they are wanted to be accurate to
1 %, and their own answer is within 0.54 %). Histograms that are put together have the same bounds: those of all that
are.

All of one answer is read at one snapshot: what was counted later in a slot that is over changes all samples from there
on alike.

**Invariant.** A question holds no more than the slots that it looks at, and one more number for each series: what the
slots before them count is put together by the store (R21), however many there are.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.api.arguments import OrderedScanArguments, RollupArguments
from kivi.arrow.columns import rows_from_batch
from kivi.errors import InvalidArgument, OutOfRange
from kivi.model.expressions import Expr
from kivi.model.quantiles import Quantiles, upper_bounds
from kivi.model.rollups import stored_slot
from kivi.model.schema import TableSchema
from kivi.model.slots import Slot
from kivi.model.types import shown
from kivi.store.facade import Lease, Store

__all__ = [
    "LE",
    "LOOKBACK_US",
    "NAME",
    "SAMPLES_IN_ALL_MAX",
    "SAMPLES_MAX",
    "Counter",
    "Labels",
    "Matching",
    "Reading",
    "Series",
    "Unanswerable",
    "anchored",
    "counters",
    "holding",
    "selected",
]

NAME: Final = "__name__"
LE: Final = "le"
LOOKBACK_US: Final = 300_000_000
SAMPLES_MAX: Final = 5_000_000
SAMPLES_IN_ALL_MAX: Final = 20_000_000
Labels = Mapping[str, str]
Floats = npt.NDArray[np.float64]
_Found = tuple[Labels, list[tuple[int, Any]]]
_Span = tuple[int, int]
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_EARLIEST_US: Final = -62_000_000_000_000_000  # in the year 5: before it is no slot, and slots of calendars can be made
_BELOW_ZERO: Final = -5e-324
_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)


class Unanswerable(InvalidArgument):
    """A question that is understood, and not answered: it is not supported here, or what is there has no answer."""


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
    def labels(self) -> dict[str, str]:
        """Which key column each label is of. One that has the name of a label of ours is called ``exported_...``, as
        Prometheus calls it, as often as it has to be."""
        columns = [group.name for group in self.table.group_by if group.slot is None]
        ours, labels = {NAME, LE} if self.is_histogram else {NAME}, dict[str, str]()
        for column in columns:
            label = column
            while label in ours or (label != column and label in columns):
                label = f"exported_{label}"
            labels[label] = column
        return labels


@dataclass(frozen=True)
class Series:
    """Some of one metric: ``values[i, k]`` is that of ``labels[i]`` at ``ends_ms[k]``, from ``first[i]`` on. The first
    of ``ends_ms`` is where the first slot begins, or some end before what is looked for."""

    labels: Sequence[Labels]
    ends_ms: npt.NDArray[np.int64]
    values: Floats
    first: npt.NDArray[np.int64]
    slot_ms: int


def counters(store: Store, sees: Callable[[TableSchema], bool]) -> list[Counter]:
    """All metrics of the tables that may be read, by name. Measures of two tables may have one name: ``a_b`` and ``c``
    make the one that ``a`` and ``b_c`` make."""
    found = list[Counter]()
    for table in store.tables():
        stored = stored_slot(table) if table.kind == "aggregate" and sees(table) else None
        if stored is None:
            continue
        for column in table.columns:
            is_histogram = column.type.name == "quantiles"
            if is_histogram or (column.operator == "sum" and not column.type.is_state and column not in table.key):
                name = f"{table.name}_{column.name}{'_bucket' if is_histogram else ''}"
                found.append(Counter(name, table, column.name, stored[2], is_histogram))
    return sorted(found, key=lambda each: each.name)


def selected(known: Sequence[Counter], matching: Iterable[Matching]) -> list[Counter]:
    """Those whose name matches."""
    names = holding([each for each in matching if each.name == NAME], [{NAME: each.name} for each in known])
    return [known[i] for i in names]


def holding(matching: Iterable[Matching], labels: Sequence[Labels]) -> list[int]:
    """The places of those that match. Raises InvalidArgument."""
    places = list(range(len(labels)))
    for each in matching:
        values = [labels[i].get(each.name, "") for i in places]
        if each.op in ("=", "!="):
            held = {each.value}
        else:  # RE2, as in Prometheus: takes time in proportion to the text
            some = pa.array(set(values), pa.string())
            held = set(some.filter(pc.match_substring_regex(some, anchored(each.value))).to_pylist())
        places = [i for i, value in zip(places, values, strict=True) if (value in held) == (each.op in ("=", "=~"))]
    return places


def anchored(pattern: str) -> str:
    """A regular expression of all of a text. Raises InvalidArgument."""
    whole = f"^(?:{pattern})$"
    try:
        for each in (pattern, whole):  # as it stands, too: a bracket of it closes none around it
            pc.match_substring_regex(pa.array([""]), each)  # of no text, nothing is looked at
    except ValueError as error:  # of Arrow
        raise InvalidArgument(f"{shown(pattern)} is no regular expression: {error}") from None
    return whole


class Reading:
    """What one question reads of metrics, at one snapshot: each selection once, however often it is asked for."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store, self._lease = store, lease
        self._read: dict[tuple[str, str, tuple[Matching, ...], _Span | None], list[_Found]] = {}
        self._held = 0

    def labelled(self, counter: Counter, matching: Sequence[Matching]) -> list[Labels]:
        """The labels of the series that match. What they count is not read: it may not fit its type."""
        if counter.is_histogram:
            return [labels for labels, _ in self._buckets(counter, matching, [(counter, matching)], None)]
        return [labels for labels, _ in self._rows(counter, matching, self._keys(counter, matching))]

    def series(
        self,
        counter: Counter,
        matching: Sequence[Matching],
        span_us: tuple[int, int],
        bounding: Sequence[tuple[Counter, Sequence[Matching]]],
    ) -> Series:
        """The series that match, with the samples that may be looked for in a span of time; of a histogram with the
        bounds of all ``bounding``, which has what matches among it."""
        since_us, until_us = max(span_us[0], _EARLIEST_US), max(span_us[1], _EARLIEST_US)
        seen_us = max(since_us - max(LOOKBACK_US, counter.slot.nominal_us), _EARLIEST_US)
        span = counter.slot.start(counter.slot.start(seen_us) - 1), until_us
        if counter.is_histogram:
            found = self._buckets(counter, matching, bounding, span)
        else:
            found = self._found(counter, matching, span)
        series = _cumulative(counter, found, span)
        self._held += series.values.size
        if self._held > SAMPLES_IN_ALL_MAX:
            raise Unanswerable(f"the question has more than {SAMPLES_IN_ALL_MAX:,} samples in all: ask for its parts")
        return series

    def _buckets(
        self,
        counter: Counter,
        matching: Sequence[Matching],
        bounding: Sequence[tuple[Counter, Sequence[Matching]]],
        span: _Span | None,
    ) -> list[_Found]:
        """Of each distribution a series for each bound of a bucket that any of those ``bounding`` has values in, both
        its ends, so that what is interpolated between them is within the bucket; of the values up to it. The bounds are
        those of all time: what is asked of other times beside it has the same."""
        named = self._found(counter, matching, span)
        among = [each for of, by in bounding if of.is_histogram for each in self._found(of, by, None)]
        parts = [part for _, found in among for _, part in found if isinstance(part, Quantiles)]
        if len({part.scale for part in [*parts, *(part for _, found in named for _, part in found)]}) > 1:
            raise Unanswerable("histograms of several accuracies are put together here: ask for each by itself")
        codes = np.unique(np.concatenate([np.zeros(0, np.int64), *(part.codes for part in parts)]))
        lower = codes[codes != 0] - 1
        if len(codes) and codes[0] < 0 <= codes[-1]:  # else nothing is below the zeros that they could be taken for
            lower = np.append(lower, -1)
        codes = np.unique(np.concatenate([codes, lower]))
        if len(codes) * sum(len(found) for _, found in named) > SAMPLES_MAX:
            raise InvalidArgument(f"the histograms have more than {SAMPLES_MAX:,} samples here: select fewer series")
        ends = upper_bounds(codes, parts[0].scale) if parts else codes
        ends = np.where((codes == -1) & (ends == 0), _BELOW_ZERO, ends)
        ends, last = np.unique(ends[::-1], return_index=True)  # those of subnormal values are rounded to few float64
        codes, bounds = codes[::-1][last], [repr(float(end)) for end in ends]
        out = list[_Found]()
        for labels, found in named:
            below = [(start, [*part.counts_up_to(codes), part.count]) for start, part in found]
            for k, bound in enumerate([*bounds, "+Inf"]):
                out.append(({**labels, LE: bound}, [(start, counts[k]) for start, counts in below]))
        return _chosen(matching, out)

    def _found(self, counter: Counter, matching: Sequence[Matching], span: _Span | None) -> list[_Found]:
        """The labels of each series that matches, with what its slots count that begin from the start of a span on and
        not behind its end, and, as that of the slot before, what all slots before the span do; of a histogram without
        ``le``. Without a span all slots are together."""
        wanted = tuple(each for each in matching if not (counter.is_histogram and each.name == LE))
        asked = counter.table.name, counter.measure, wanted, span
        if (found := self._read.get(asked)) is None:
            found = self._read[asked] = self._rows(counter, wanted, self._counted(counter, wanted, span))
        return found

    def _counted(
        self, counter: Counter, matching: Sequence[Matching], span: _Span | None
    ) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """Rows of the rollup, and the slot that they are of, None: their own."""
        table, slot = self._store.table(counter.table.name, self._lease), counter.slot
        where = _pushed(table, counter, matching)

        def rolled(step: str | None, start_us: int | None, end_us: int | None) -> Iterable[pa.RecordBatch]:
            start, end = (None if us is None else _EPOCH + dt.timedelta(microseconds=us) for us in (start_us, end_us))
            zone = slot.zone or None if step is not None else None
            by, measures = [*counter.labels.values()], [counter.measure]
            rollup = RollupArguments(table.name, by, step, start, end, where=where, measures=measures, tz=zone)
            return self._store.answer(self._lease, table, rollup.bound(table))

        if span is None:
            yield from ((0, batch) for batch in rolled(None, None, None))
            return
        since_us, until_us = span
        try:
            yield from ((slot.start(since_us - 1), batch) for batch in [*rolled(None, None, since_us)])
        except OutOfRange:  # each may fit its type, and all of them together not, as they do a float64
            yield from ((None, batch) for batch in rolled(slot.width, None, since_us))
        if since_us <= until_us:
            yield from ((None, batch) for batch in rolled(slot.width, since_us, slot.end(slot.start(until_us))))

    def _keys(self, counter: Counter, matching: Sequence[Matching]) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """Rows without what they count."""
        table = self._store.table(counter.table.name, self._lease)
        keys = OrderedScanArguments(table.name, where=_pushed(table, counter, matching), columns=table.key_names)
        yield from ((0, batch) for batch in self._store.scan(self._lease, table, keys.bound(table)))

    def _rows(
        self, counter: Counter, matching: Sequence[Matching], batches: Iterable[tuple[int | None, pa.RecordBatch]]
    ) -> list[_Found]:
        """By series, of those that match; nothing is kept of others. Raises InvalidArgument."""
        slot = next(group.name for group in counter.table.group_by if group.slot is not None)
        columns, count = [*counter.labels.values()], 0
        series: dict[tuple[str, ...], _Found | None] = {}
        for start, batch in batches:
            rows = rows_from_batch(batch)
            keys = [tuple(_text(row[name]) for name in columns) for row in rows]
            new = [key for key in dict.fromkeys(keys) if key not in series]
            named = [
                {NAME: counter.name, **{name: text for name, text in zip(counter.labels, key, strict=True) if text}}
                for key in new
            ]
            series.update(dict.fromkeys(new))
            for i in holding(matching, named):
                series[new[i]] = named[i], []
            if counter.measure not in batch.schema.names:
                continue
            starts = batch.column(slot).cast("int64").to_pylist() if start is None else [start] * len(rows)
            for at, key, row in zip(starts, keys, rows, strict=True):
                if (found := series[key]) is not None:
                    found[1].append((at, row[counter.measure]))
                    count += 1
            if count > SAMPLES_MAX:
                raise InvalidArgument(f"{counter.name} has more than {SAMPLES_MAX:,} samples here: select fewer series")
        return [found for found in series.values() if found is not None]


def _chosen(matching: Iterable[Matching], named: Sequence[_Found]) -> list[_Found]:
    return [named[i] for i in holding(matching, [labels for labels, _ in named])]


def _cumulative(counter: Counter, chosen: Sequence[_Found], span: _Span) -> Series:
    slot, ends = counter.slot, list[int]()
    since_us, until_us = span
    if chosen:
        end = max(min((start for _, found in chosen for start, _ in found), default=since_us), since_us)
        while end <= until_us:
            ends.append(end)
            end = slot.end(end)
            if len(ends) * len(chosen) > SAMPLES_MAX:
                raise InvalidArgument(f"{counter.name} has more than {SAMPLES_MAX:,} samples here: select fewer series")
    # Decimals are summed up in their last digit, as whole numbers, and are the nearest to what they are.
    scale = 1 if counter.is_histogram else 10 ** counter.table.by_name[counter.measure].type.scale
    place = {end: k for k, end in enumerate(ends)}
    values = np.zeros((len(chosen), len(ends)))
    first = np.full(len(chosen), len(ends), np.int64)
    for i, (_, found) in enumerate(chosen):
        for start, value in found:
            ended, number = slot.end(start), float(value) if scale == 1 else round(float(value) * scale)
            if ends and ended <= ends[0]:  # before what is looked for
                values[i, 0] += number
                first[i] = 0
            else:
                first[i] = min(first[i], place.get(start, len(ends)))
                if (k := place.get(ended)) is not None:
                    values[i, k] += number
    labels = [labels for labels, _ in chosen]
    ends_ms = np.array(ends, np.int64) // 1_000
    longest_us = max([slot.nominal_us, *np.diff(ends).tolist(), *(slot.end(end) - end for end in ends[-1:])])
    return Series(labels, ends_ms, np.cumsum(values, axis=1) / scale, first, longest_us // 1_000)


def _pushed(table: TableSchema, counter: Counter, matching: Iterable[Matching]) -> Expr | None:
    """What the store can select: texts and whole numbers that are equal. Everything is looked at again."""
    where: Expr | None = None
    labels = counter.labels
    for each in matching:
        column = table.by_name.get(labels.get(each.name, ""))
        if each.op != "=" or not each.value or column is None:
            continue
        if str(column.type) == "string" or (str(column.type) == "int64" and _WHOLE.fullmatch(each.value)):
            term = Expr("==", column.name, each.value if str(column.type) == "string" else int(each.value))
            where = term if where is None else where & term
    return where


def _text(value: Any) -> str:
    """A label; one that is empty is none, and null is such a one."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return "0x" + value.hex() if isinstance(value, bytes) else str(value)
