"""Grouping: which events of one commit belong to which row of which aggregate of their source.

**One grouping.** Each key column becomes an integer code in value order (strings: the rank of their dictionary
entry), the codes are packed into one integer, and that is looked up in a table if its range is small and sorted
if not. The groups come out sorted. Arrow's ``group_by`` takes as long or longer, and leaves the sorting
(decision 0014).

**Few events**, as commits bring them, are grouped in plain Python: it takes longer to start each of a hundred kernels
than to encode the key of an event (decision 0109). The groups are the same, and so are the errors.

**Many of one source.** Columns are coded once, whichever aggregates use them, and aggregates with the same key share
a grouping. Where keys end in a time slot, the groups of slots n times as long are runs of neighbouring groups::

    (7, 17:50) (7, 17:51) (7, 17:55) (9, 17:50)        by minute
    (7, 17:50  ---------) (7, 17:55) (9, 17:50)        by five minutes

so a *rolled-up* grouping sorts nothing and looks at no event: exact sums, MIN and MAX are those of the finer groups,
added. So are those of months, of hours or days that nest in them (``Slot.nests_in``). (Float sums are added in the
order of the events, and are taken from these.)

Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import flat, stored_array
from kivi.arrow.dictionaries import is_coded
from kivi.delta.order import numbered
from kivi.delta.runs import Array
from kivi.encoding.keys import encode_key_columns, key_encoder
from kivi.errors import InvalidArgument
from kivi.model.schema import Column, GroupKey, TableSchema
from kivi.model.slots import Slot
from kivi.model.types import INT64_MAX, INT64_MIN, MOMENT_MIN_US, ColumnType
from kivi.states.kinds import ByGroup

__all__ = ["Events", "Groups", "group_value", "null_key"]

_SPAN_MAX: Final = 2**62
_FEW: Final = 64


@dataclass(frozen=True, slots=True)
class _Part:
    """One key column: what it is, and an integer code per row in value order, below ``span``. ``slots``: of slots of
    times, instead of ``array``, where those of some rows start."""

    array: Any
    codes: Array
    span: int
    slots: Callable[[Array], Array] | None = None

    def taken(self, rows: Array) -> Any:
        """The values of some rows, as an Arrow array."""
        return self.array.take(pa.array(rows)) if self.slots is None else pa.array(self.slots(rows))


class Groups:
    """The distinct keys of some aggregate, sorted, and what belongs to them.

    ``keys`` encoded. ``group_of`` each event its number. ``parent``, ``number`` and ``most``, of a rolled-up grouping:
    the finer one, the number here of each of its groups, and of how many of these one is made at most.
    """

    __slots__ = ("_group_of", "_prefix", "_rows", "count", "keys", "most", "number", "parent", "sample", "slots")

    def __init__(self, keys: Any, sample: Array, prefix: Array, slots: Array | None) -> None:
        self.keys = keys
        self.count = len(sample)
        self.sample = sample  # some event of each
        self.parent: Groups | None = None
        self.number: Array | None = None
        self.most = 0
        self._group_of: Array | None = None
        self._rows: ByGroup | None = None
        self._prefix = prefix  # a code of each key without its last column
        self.slots = slots  # where each key's slot starts, if that is its last column

    @staticmethod
    def of(group_of: Array, count: int) -> Groups:
        """Events that are numbered already, by keys that somebody else has."""
        groups = Groups(None, np.zeros(count, np.int64), group_of[:0], None)
        groups._group_of = group_of
        return groups

    @property
    def group_of(self) -> Array:
        if self._group_of is None:
            assert self.parent is not None
            assert self.number is not None
            self._group_of = self.number[self.parent.group_of]
        return self._group_of

    @property
    def rows(self) -> ByGroup:
        """The events in the order of their groups."""
        if self._rows is None:
            self._rows = ByGroup(self.group_of, self.count)
        return self._rows


class Events:
    """The events of one commit, ``batch`` with the source's columns by name, grouped for its aggregates.

    ``commits``: of events that several commits bring, the number of each one's commit, ascending; None: one brings all.
    ``are_stored``: they belong to rows that are there, of which an earlier version may have made some whose slots begin
    before the year 1: those are computed again, named and removed like others.

    Raises InvalidArgument for a null group key, and for a slot that would begin before the year 1.
    """

    def __init__(self, batch: pa.RecordBatch, commits: Array | None = None, *, are_stored: bool = False) -> None:
        self.batch = batch
        self.commits = commits
        self.are_stored = are_stored
        self._first_us = INT64_MIN if are_stored else MOMENT_MIN_US
        self._columns: dict[str, Any] = {}
        self._parts: dict[tuple[str, Slot | None, ColumnType], _Part] = {}
        self._values: dict[tuple[str, Slot | None, ColumnType], list[Any]] = {}
        self._groups: dict[tuple[tuple[str, Slot | None], ...], Groups] = {}
        self._of_commits: dict[Groups, tuple[Groups, Array]] = {}

    @property
    def rows(self) -> int:
        return int(self.batch.num_rows)

    def column(self, name: str) -> Any:
        if name not in self._columns:
            array = self.batch.column(name)
            self._columns[name] = array if is_coded(array) else flat(array)
        return self._columns[name]

    def is_grouped(self, aggregate: TableSchema) -> bool:
        """Whether ``groups`` is known, so that there was no error in it."""
        return _signature(aggregate) in self._groups

    def groups(self, aggregate: TableSchema) -> Groups:
        signature = _signature(aggregate)
        found = self._groups.get(signature)
        if found is None:
            if signature and self.rows <= _FEW:
                found = self._few_grouped(aggregate)
            elif (finer := self._finer(signature) if signature else None) is not None:
                found = self._rolled_up(aggregate, finer)
            else:
                found = self._grouped(aggregate)
            self._groups[signature] = found
        return found

    def of_commits(self, aggregate: TableSchema) -> tuple[Groups, Array]:
        """``groups``, of which each is those events alone that one of several commits brings, and which: sorted by key,
        and then by commit."""
        assert self.commits is not None
        groups = self.groups(aggregate)
        if (found := self._of_commits.get(groups)) is not None:
            return found
        order = groups.rows.order
        key_of, commits = groups.group_of, self.commits
        if order is not None:
            key_of, commits = key_of[order], commits[order]
        first = np.ones(self.rows, np.bool_)
        np.not_equal(key_of[1:], key_of[:-1], out=first[1:])
        first[1:] |= commits[1:] != commits[:-1]
        number = np.cumsum(first) - 1
        if order is not None:
            number[order] = number.copy()
        each = Groups.of(number, int(first.sum()))
        each.keys = groups.keys.take(pa.array(key_of[first]))
        found = self._of_commits[groups] = each, commits[first].astype(np.uint64)
        return found

    def _part(self, aggregate: TableSchema, group: GroupKey, column: Column) -> _Part:
        name = (group.source, group.slot, column.type)
        if name not in self._parts:
            self._parts[name] = _part(aggregate, group, column, self.column(group.source), self._first_us)
        return self._parts[name]

    def _grouped(self, aggregate: TableSchema) -> Groups:
        if not aggregate.group_by:  # all events are of one row
            count = min(self.rows, 1)
            nothing = np.zeros(count, np.int64)
            everything = Groups(pa.array([b""] * count, pa.large_binary()), nothing, nothing, None)
            everything._group_of = np.zeros(self.rows, np.int64)
            return everything
        parts = [self._part(aggregate, group, column) for group, column in _keys(aggregate)]
        codes, span = _packed(parts[:-1])
        last = parts[-1]
        group_of, sample = numbered(*_pack(codes, span, last.codes, last.span))
        prefix = np.zeros(len(sample), np.int64) if codes is None else codes[sample]
        keys = _encoded(aggregate, parts[:-1], sample, prefix, last.taken(sample))
        groups = Groups(keys, sample, prefix, None if last.slots is None else last.slots(sample))
        groups._group_of = group_of
        return groups

    def _few_grouped(self, aggregate: TableSchema) -> Groups:
        of_events = [*zip(*[self._listed(aggregate, *key) for key in _keys(aggregate)], strict=True)]
        encode = key_encoder([column.type for column in aggregate.key])
        ordered = sorted([(encode(values), values) for values in dict.fromkeys(of_events)])
        number = {values: i for i, (_, values) in enumerate(ordered)}
        group_of = np.array([number[values] for values in of_events], np.int64)
        sample = np.empty(len(ordered), np.int64)
        sample[group_of] = np.arange(self.rows)
        slots = None
        if aggregate.group_by[-1].slot is not None:
            slots = np.array([values[-1] for _, values in ordered], np.int64)
        groups = Groups(pa.array([key for key, _ in ordered], pa.large_binary()), sample, group_of[:0], slots)
        groups._group_of = group_of
        return groups

    def _listed(self, aggregate: TableSchema, group: GroupKey, column: Column) -> list[Any]:
        """What each event has in a key column, in stored form."""
        name = (group.source, group.slot, column.type)
        if (found := self._values.get(name)) is None:
            array = self.column(group.source)
            if array.null_count:
                raise null_key(aggregate, group)
            text = column.type.name in ("string", "bytes")
            found = array.to_pylist() if text else stored_array(column.type, array).tolist()
            if group.slot is not None:
                found = [group_value(aggregate, group, value, self._first_us) for value in found]
            self._values[name] = found
        return found

    def _finer(self, signature: tuple[tuple[str, Slot | None], ...]) -> Groups | None:
        """The grouping of fewest groups that this one is a roll-up of."""
        *others, (time, slot) = signature
        best: Groups | None = None
        for (*same, (source, finer)), groups in self._groups.items():
            nested = slot and finer and same == others and source == time and finer.nests_in(slot)
            if nested and (best is None or groups.count < best.count):
                best = groups
        return best

    def _rolled_up(self, aggregate: TableSchema, finer: Groups) -> Groups:
        assert finer.slots is not None
        *others, (group, _) = _keys(aggregate)
        prefix, slots = finer._prefix, _slot_starts(aggregate, group, finer.slots, self._first_us)
        first = np.ones(finer.count, np.bool_)
        np.not_equal(slots[1:], slots[:-1], out=first[1:])
        first[1:] |= prefix[1:] != prefix[:-1]
        starts = np.flatnonzero(first)
        prefix, slots, sample = prefix[starts], slots[starts], finer.sample[starts]
        parts = [self._part(aggregate, *other) for other in others]
        keys = _encoded(aggregate, parts, sample, prefix, pa.array(slots))
        groups = Groups(keys, sample, prefix, slots)
        groups.parent, groups.number = finer, np.cumsum(first) - 1
        groups.most = int(np.diff(starts, append=finer.count).max()) if len(starts) else 0
        return groups


def _signature(aggregate: TableSchema) -> tuple[tuple[str, Slot | None], ...]:
    return tuple((group.source, group.slot) for group in aggregate.group_by)


def _keys(aggregate: TableSchema) -> list[tuple[GroupKey, Column]]:
    return list(zip(aggregate.group_by, aggregate.key, strict=True))


def _encoded(aggregate: TableSchema, parts: Sequence[_Part], sample: Array, prefix: Array, last: Any) -> Any:
    """The keys of the groups: ``parts`` of their samples, and ``last``.

    What comes before a slot is the same in many of them. Where there is text in it, it is built once (decision 0014).
    """
    types = [column.type for column in aggregate.key]
    if all(type_.name not in ("string", "bytes") for type_ in types[:-1]):
        return encode_key_columns(types, [*(part.taken(sample) for part in parts), last])
    first = np.ones(len(prefix), np.bool_)
    np.not_equal(prefix[1:], prefix[:-1], out=first[1:])
    distinct = encode_key_columns(types[:-1], [part.taken(sample[first]) for part in parts])
    return encode_key_columns(types[-1:], [last], distinct.take(pa.array(np.cumsum(first) - 1)))


# -- codes ----------------------------------------------------------------------------------------


def _part(aggregate: TableSchema, group: GroupKey, column: Column, array: Any, first_us: int) -> _Part:
    if array.null_count:
        raise null_key(aggregate, group)
    if column.type.name in ("string", "bytes"):
        encoded = array if is_coded(array) else array.dictionary_encode()
        order = pc.array_sort_indices(encoded.dictionary).to_numpy()
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return _Part(encoded, rank[encoded.indices.to_numpy()], max(1, len(order)))
    values = stored_array(column.type, array)
    if group.slot is not None:
        if group.slot.is_fixed:
            return _fixed_slots(aggregate, group, values, first_us)
        starts = _slot_starts(aggregate, group, values, first_us)
        return _Part(None, *_dense(starts), starts.__getitem__)
    if column.type.name == "float64":
        bits = (values + 0.0).view(np.int64)
        return _Part(array, *_ranged(np.where(bits < 0, bits ^ INT64_MAX, bits)))
    return _Part(array, *_ranged(values.astype(np.int64, copy=False)))


def _fixed_slots(aggregate: TableSchema, group: GroupKey, moments: Array, first_us: int) -> _Part:
    """Slots of one length are numbered, and looked at by who asks for some of them: there are fewer than moments."""
    numbers, length = moments // group.slot_us, group.slot_us
    if len(numbers) and int(numbers.min()) * length < first_us:
        raise _no_slot(aggregate, group)
    codes, span = _ranged(numbers)
    return _Part(None, codes, span, lambda rows: numbers[rows] * length)


def _slot_starts(aggregate: TableSchema, group: GroupKey, moments: Array, first_us: int) -> Array:
    assert group.slot is not None
    try:
        starts = group.slot.starts(moments)
    except OverflowError:
        raise _no_slot(aggregate, group) from None
    if len(starts) and int(starts.min()) < first_us:
        raise _no_slot(aggregate, group)
    return starts


def _ranged(values: Array) -> tuple[Array, int]:
    """Codes that begin at 0, and their span."""
    if not len(values):
        return values, 1
    low, high = int(values.min()), int(values.max())
    return (values - low, high - low + 1) if high - low < _SPAN_MAX else _dense(values)


def _dense(values: Array) -> tuple[Array, int]:
    distinct, codes = np.unique(values, return_inverse=True)
    return codes, max(1, len(distinct))


def _packed(parts: Sequence[_Part]) -> tuple[Any, int]:
    """One code per row, and its span; of no parts a code for all."""
    codes: Any = None
    span = 1
    for part in parts:
        codes, span = (part.codes, part.span) if codes is None else _pack(codes, span, part.codes, part.span)
    return codes, span


def _pack(codes: Any, span: int, more: Array, width: int) -> tuple[Array, int]:
    if codes is None:
        return more, width
    if span * width > _SPAN_MAX:  # at most as many codes as rows are in use: number those
        (codes, span), (more, width) = _dense(codes), _dense(more)
    return codes * width + more, span * width


def group_value(aggregate: TableSchema, group: GroupKey, value: Any, first_us: int) -> Any:
    """What an event with this value has in the key column. Raises InvalidArgument for a slot before ``first_us``."""
    if (slot := group.slot) is None:
        return value
    try:
        start = slot.start(value)
    except OverflowError:
        raise _no_slot(aggregate, group) from None
    if start < first_us:
        raise _no_slot(aggregate, group)
    return start


# -- what events cannot be ------------------------------------------------------------------------


def null_key(aggregate: TableSchema, group: GroupKey) -> InvalidArgument:
    return InvalidArgument(
        f"column {group.source!r} is null in an event, and aggregate {aggregate.name!r} groups by it: give it a value "
        "that stands for none, such as '' or 0",
        column=group.source,
    )


def _no_slot(aggregate: TableSchema, group: GroupKey) -> InvalidArgument:
    return InvalidArgument(
        f"column {group.source!r} is a time whose slot of {group.slot} in {aggregate.name!r} would begin outside the "
        "years 1 to 9999, where nobody could read it: leave such events out, or give them a later time",
        column=group.source,
    )
