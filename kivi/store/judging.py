"""Judging: what the rules of a table raise from the events that a commit brings (R25).

**The invariant.** A commit that brings events of a table with rules holds, in its own record, exactly what these rules
raise from its events, judged against the state at the record's ``rule_ts``; so a reader sees an event and what it
raised together or neither, and a replay has nothing to judge. Where it is held:

::

    prepare    ``Judgement`` opens a snapshot at W (never below the transaction's own) and looks up, once for the
               distinct keys of all its events, the rows that they are measured against; rules that look at the same
               share them. What is raised are events of the commit like any others, from which aggregates are derived
    record     ``rule_ts``, and the raised events among those that it appends
    entry      a commit that was derived before a rule of its tables came or went is derived again (``Catalog.touch``,
               ``is_behind``), judged then at a newer snapshot; a known token is answered without it. What enters is one
               judgement, whatever was retried
    replay     and the other nodes of a cluster take the record as it is

Every road that brings events goes through ``transaction.prepare`` or ``event_commits.prepare_events``, and both judge
here. A rule whose ``into`` is the source of others comes before these (``order``); circles are refused when a rule is
declared.

**A rule never fails the commit.** An event counts for each rule as one of: *raised*; *missing*, since there is no row
that it could be measured against, or a column that says which is null; *failed*, where an expression is out of range, a
sum does not fit its type, what was raised could not be an event of ``into`` (a null that an aggregate groups by, a
float sum that leaves the finite numbers), or more was raised than a transaction may bring; *late*, where what was
raised lies below the retention floor of ``into``; or else the condition is not true. The sums are rows of
``catalog.JUDGED`` in the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import arrow_schema, arrow_type, flat, rows_batch, stored_array
from kivi.arrow.dictionaries import coded, plain, together
from kivi.arrow.predicates import attempted
from kivi.delta.derive import Derivation
from kivi.delta.key_index import KeyIndex
from kivi.delta.ops import Barrier, RowOp, apply_op
from kivi.delta.runs import DeltaRun, stamped
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import KEY_BYTES_MAX, encode_key_columns
from kivi.encoding.projection import Projection
from kivi.errors import KiviError, NotFound, OutOfRange
from kivi.model.expressions import names
from kivi.model.rules import Against, Bound, Rule, bind_rule, key_of
from kivi.model.schema import TableSchema
from kivi.model.slots import Slot
from kivi.mvcc.leases import Lease
from kivi.mvcc.snapshot import Reader
from kivi.runtime.settings import Settings
from kivi.store.catalog import Catalog, View, judged_row
from kivi.store.checks import check_events
from kivi.store.known_rows import KnownRows, add_run
from kivi.store.late_deltas import runs_in_time
from kivi.store.retention import Retention, remembered
from kivi.store.transaction import OWN_CTS

__all__ = ["Judgement", "Judging"]

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
_MOMENT_MAX_US: Final = 2**61
JUDGED, RAISED, MISSING, FAILED, LATE = range(5)
"""The columns of ``catalog.JUDGED``."""


class _Found(NamedTuple):
    """What events are measured against: of each event the row in ``columns``, -1 where there is none; and which events
    failed, as their row could not be read."""

    row_of: Array
    columns: Mapping[str, Any]
    failed: Mask | None


class _Asked(NamedTuple):
    """One thing to look up for a batch."""

    against: Against
    own_events: bool


@dataclass(slots=True)
class Judging:
    """Of one store; thread safe. ``floor``: a table's retention floor, in microseconds. ``row_floors``: those of
    aggregates."""

    catalog: Catalog
    reader: Reader
    settings: Settings
    floor: Callable[[TableSchema], int | None]
    row_floors: Callable[[Iterable[TableSchema]], Mapping[int, int | None]]
    known: KnownRows
    retention: Retention
    _plans: tuple[View | None, dict[int, Bound]] = (None, {})
    _counted: list[int] = field(default_factory=lambda: [0] * 5)

    def stats(self) -> dict[str, int]:
        """What became of the events that were judged here since the store was opened, once more of those whose commits
        were derived again."""
        names = ("judged", "raised", "missing", "failed", "late")
        return {f"rules_{name}": count for name, count in zip(names, self._counted, strict=True)}

    def count(self, counts: Iterable[int]) -> None:
        self._counted = [before + more for before, more in zip(self._counted, counts, strict=True)]

    def plan(self, view: View, rule: Rule) -> Bound:
        """The rule as it is evaluated by this state of the catalog."""
        of, plans = self._plans
        if of is not view:
            plans = {}
            self._plans = view, plans
        if (found := plans.get(rule.id)) is None:
            found = plans[rule.id] = bind_rule(rule, view.table)
        return found


@dataclass(slots=True)
class Judgement:
    """Of one commit, or of events that are each one. ``snapshot`` opens the one to judge at; ``view``: the catalog that
    the commit is derived with. ``each``: every event is one, whose own events lie in no slot before it. Tables go by
    name: what they are called does not change while a rule names them."""

    judging: Judging
    view: View
    snapshot: Callable[[], Lease]
    each: bool = False
    lease: Lease | None = None
    counts: dict[int, list[int]] = field(default_factory=dict)
    _raised: dict[str, list[tuple[Rule, pa.RecordBatch, Array]]] = field(default_factory=dict)

    @property
    def rule_ts(self) -> int | None:
        """The snapshot that was judged at; None: no rule judged anything."""
        return None if self.lease is None else self.lease.ts

    def order(self, tables: Iterable[TableSchema]) -> list[TableSchema]:
        """The tables, and those that rules may raise events into, each after those that it gets some from."""
        found: dict[str, TableSchema] = {}

        def visit(table: TableSchema) -> None:
            if table.name not in found:
                for rule in self.view.rules_of(table):
                    visit(self.view.table(rule.into))
                found[table.name] = table

        for table in reversed(list(tables)):
            visit(table)
        return list(found.values())[::-1]

    def raised(self, into: TableSchema) -> tuple[pa.RecordBatch, Array] | None:
        """What was raised for a table so far, and of which event each was, ascending; None if nothing was."""
        parts = self._raised.get(into.name)
        if not parts:
            return None
        batch, places = together([batch for _, batch, _ in parts]), np.concatenate([places for *_, places in parts])
        if len(parts) > 1:
            in_order = np.argsort(places, kind="stable")
            batch, places = batch.take(pa.array(in_order)), places[in_order]
        return coded(batch), places

    def give_up(self, into: TableSchema) -> None:
        """What was raised for a table cannot be derived from: it is as if its rules had failed."""
        for rule, batch, _ in self._raised.pop(into.name, ()):
            counts = self.counts[rule.id]
            counts[RAISED] -= batch.num_rows
            counts[FAILED] += batch.num_rows

    def taken(self, into: TableSchema) -> pa.RecordBatch | None:
        """What was raised for a table since this was asked for last."""
        found = self.raised(into)
        self._raised.pop(into.name, None)
        return None if found is None else found[0]

    def rows(self) -> list[tuple[int, bytes, RowOp]]:
        """The counts, as operations of the commit."""
        for counts in self.counts.values():
            self.judging.count(counts)
        return [
            judged_row(rule, {i: count for i, count in enumerate(counts) if count})
            for rule, counts in self.counts.items()
        ]

    def judge(
        self, source: TableSchema, events: Derivation, places: Array | None = None, only: Rule | None = None
    ) -> None:
        """Judges all events that the commit brings for a table. ``places``: of each among the members of a group that
        they are the commits of; None: event i is at i. ``only``: by one of its rules."""
        batch = events.batch
        rules = self.view.rules_of(source) if only is None else [only]
        if not rules or not batch.num_rows:
            return
        plans = [self.judging.plan(self.view, rule) for rule in rules]
        wanted: dict[_Asked, dict[str, str]] = {}
        for plan in plans:
            for against, refs in plan.refs:
                wanted.setdefault(_Asked(against, plan.rule.own_events and not self.each), {}).update(refs)
        with self.judging.known.lock:
            self.lease = self.lease or self.snapshot()
            looked_up = {asked: self._found(source, events, asked, refs, self.lease) for asked, refs in wanted.items()}
        for plan in plans:
            own = plan.rule.own_events and not self.each
            self._apply(plan, batch, {each: looked_up[_Asked(each, own)] for each, _ in plan.refs}, places)

    # -- one rule -------------------------------------------------------------------------------------------

    def _apply(self, plan: Bound, batch: pa.RecordBatch, found: Mapping[Against, _Found], places: Array | None) -> None:
        counts = self.counts.setdefault(plan.rule.id, [0] * 5)
        counts[JUDGED] += batch.num_rows
        there = np.ones(batch.num_rows, np.bool_)
        failed = np.zeros(batch.num_rows, np.bool_)
        for each in found.values():
            if each.failed is not None:
                failed |= each.failed
            there &= each.row_of >= 0
        there &= ~failed
        counts[MISSING] += batch.num_rows - int(there.sum()) - int(failed.sum())
        counts[FAILED] += int(failed.sum())
        chosen = np.flatnonzero(there)
        if plan.where is not None and len(chosen):
            read = self._read(plan, names(plan.where), batch, found, None if there.all() else chosen)
            holds, out = attempted(read, plan.where, plan.types)
            true = np.asarray(holds.fill_null(False))
            if out is not None:
                counts[FAILED] += int(out.sum())
                true &= ~out
            chosen = chosen[true]
        if len(chosen):
            self._raise(plan, batch, found, chosen, places, counts)

    def _read(
        self, plan: Bound, wanted: set[str], batch: pa.RecordBatch, found: Mapping[Against, _Found], at: Array | None
    ) -> pa.RecordBatch:
        """The columns that an expression reads, of the events at these places; None: of all, each of which has rows."""
        if not wanted:
            return batch if at is None else batch.slice(0, len(at))
        places = None if at is None else pa.array(at)
        columns: dict[str, Any] = {}
        for against, refs in plan.refs:
            if asked := [name for name in refs if name in wanted]:
                row_of = found[against].row_of
                rows = pa.array(row_of if at is None else row_of[at])
                columns |= {name: found[against].columns[name].take(rows) for name in asked}
        for name in wanted - columns.keys():
            columns[name] = batch.column(name) if places is None else batch.column(name).take(places)
        return pa.RecordBatch.from_arrays([*columns.values()], [*columns])

    def _raise(
        self,
        plan: Bound,
        batch: pa.RecordBatch,
        found: Mapping[Against, _Found],
        chosen: Array,
        places: Array | None,
        counts: list[int],
    ) -> None:
        into = self.view.table(plan.rule.into)
        read = self._read(plan, set().union(*(names(expr) for _, expr in plan.select)), batch, found, chosen)
        good = np.ones(len(chosen), np.bool_)
        made: dict[str, Any] = {}
        for name, expr in plan.select:
            made[name], out = attempted(read, expr, plan.types)
            if out is not None:
                good &= ~out
        columns = [flat(made[c.name]) if c.name in made else pa.nulls(len(chosen), arrow_type(c.type))
                   for c in into.columns]  # fmt: skip
        raised = pa.RecordBatch.from_arrays(columns, schema=arrow_schema(into, [c.name for c in into.columns]))
        aggregates = self.view.aggregates.get(into.id, ())
        for name in {into.event_time or "", *(group.source for each in aggregates for group in each.group_by)}:
            if (column := raised.column(name)).null_count:
                good &= np.asarray(column.is_valid())
        if not good.all():
            counts[FAILED] += int((~good).sum())
            kept = pa.array(np.flatnonzero(good))
            raised, chosen = raised.take(kept), chosen[good]
        if (floor_us := self.judging.floor(into)) is not None and raised.num_rows:
            times = raised.column(into.event_time or "").cast(pa.int64()).to_numpy()
            in_time = times >= floor_us
            counts[LATE] += int((~in_time).sum())
            raised, chosen = remembered(raised, into, floor_us), chosen[in_time]
        try:
            check_events(raised, self.judging.settings)
            if raised.nbytes > self.judging.settings.max_transaction_bytes:
                raise OutOfRange("more than a transaction may bring")
        except KiviError:
            counts[FAILED] += raised.num_rows
            return
        if raised.num_rows:
            counts[RAISED] += raised.num_rows
            at = chosen.astype(np.uint64) if places is None else places[chosen]
            self._raised.setdefault(into.name, []).append((plan.rule, raised, at))

    # -- what events are measured against ----------------------------------------------------------------------

    def _found(
        self, source: TableSchema, events: Derivation, asked: _Asked, refs: Mapping[str, str], lease: Lease
    ) -> _Found:
        """The row of each event, and the columns ``refs`` of all of them."""
        batch = events.batch
        nothing = _Found(np.full(batch.num_rows, -1, np.int64), {}, None)
        against, time = asked.against, source.event_time or ""
        try:
            table = self.judging.catalog.table(against.table, lease.ts)
            self.judging.catalog.check_seen(table, lease.ts)
        except NotFound:
            table = self.view.table(against.table)
            return nothing._replace(columns=_no_rows(table, refs))
        nothing = nothing._replace(columns=_no_rows(table, refs))
        known = _groupable(batch, against, time)
        grouped = events if known is None else Derivation(batch.take(pa.array(known)))
        if known is not None and not len(known):
            return nothing
        groups = grouped.groups(key_of(against, table, time))
        sample = groups.sample if known is None else known[groups.sample]
        wanted = batch.select(list({*against.by, *([time] if against.kind == "slot" else [])}))
        keys = _keys(against, table, wanted.take(pa.array(sample)), time)
        read = list(dict.fromkeys(refs.values()))
        rows, alive, failed_rows = self._rows(table, keys, events, asked, read, lease)
        row_of = np.full(groups.count, -1, np.int64)
        row_of[alive] = np.arange(len(alive))
        of_events = row_of[groups.group_of]
        if known is not None:
            whole = np.full(batch.num_rows, -1, np.int64)
            whole[known] = of_events
            of_events = whole
        failed = np.isin(of_events, failed_rows) if failed_rows else None
        return _Found(of_events, {name: rows.column(column) for name, column in refs.items()}, failed)

    def _rows(
        self,
        table: TableSchema,
        keys: Sequence[pa.LargeBinaryArray],
        events: Derivation,
        asked: _Asked,
        columns: Sequence[str],
        lease: Lease,
    ) -> tuple[pa.RecordBatch, Array, list[int]]:
        """Columns of the rows that there are, of which of the groups each is, and which of them cannot be told."""
        layout = RowLayout.of(table)
        if not layout.in_columns:  # a row table with text
            versions = self.judging.reader.get(lease, table, keys[0].to_pylist())
            there = [i for i, version in enumerate(versions) if version is not None]
            pairs = [
                (key.as_py(), version) for key, version in zip(keys[0], versions, strict=True) if version is not None
            ]
            rows, failed = _projected(table, columns, pairs)
            return rows, np.array(there, np.int64), failed
        every, at, index = keys[0], None, KeyIndex()
        if len(keys) > 1 or asked.own_events:
            every = pa.concat_arrays(keys)
            at = index.add(every) - 1
        if len(keys) == 1:
            found = self.judging.known.rows(lease, table, every)
        else:
            distinct = np.flatnonzero(at == np.arange(len(every)))
            found = np.zeros(len(every), layout.dtype)
            found[distinct] = self.judging.known.rows(lease, table, every.take(pa.array(distinct)))
        if asked.own_events:
            for run in self._own(table, events):
                add_run(layout, found, index, run)
        floor_us = self.judging.retention.row_floor(table, lease.ts) if table.forgets_rows else None
        if floor_us is not None and len(every):
            found[KeySlot.of(table).below(every, floor_us)] = 0
        if at is not None and len(keys) > 1:
            found = _combined(table, layout, found, np.split(at, len(keys)))
        there_at = np.flatnonzero(found["flags"] & 1)
        last, kept = keys[-1], found
        if len(there_at) < len(found):
            last, kept = last.take(pa.array(there_at)), layout.taken(found, there_at)
        if columns and len(there_at):
            try:
                return next(Projection.of(table, columns).batches([(last, kept)], None)), there_at, []
            except OutOfRange:
                pass
        decoded = map(layout.decode, layout.bytes_of(kept))
        rows, failed = _projected(table, columns, list(zip(last.to_pylist(), decoded, strict=True)))
        return rows, there_at, failed

    def _own(self, table: TableSchema, events: Derivation) -> list[DeltaRun]:
        """The deltas of the commit's own events for an aggregate."""
        try:
            runs, _ = runs_in_time([table], self.judging.row_floors([table]), events)
        except KiviError:
            return []  # the commit will be refused
        return [stamped(run, OWN_CTS) for _, run in runs]


def _groupable(batch: pa.RecordBatch, against: Against, time: str) -> Array | None:
    """The events that a row can be looked up for: none of their columns in its key is null; None: all."""
    there: Mask | None = None
    for name in against.by:
        if (column := batch.column(name)).null_count:
            known = np.asarray(column.is_valid())
            there = known if there is None else there & known
    if against.kind == "slot":
        times = batch.column(time).cast(pa.int64()).to_numpy()
        if len(times) and (int(times.min()) < -_MOMENT_MAX_US or int(times.max()) > _MOMENT_MAX_US):
            near = np.abs(times) <= _MOMENT_MAX_US
            there = near if there is None else there & near
    if there is None and not _may_be_too_long(batch, against):
        return None
    known = np.arange(batch.num_rows) if there is None else np.flatnonzero(there)
    if _may_be_too_long(batch, against):
        rows = batch.select(against.by).take(pa.array(known)).to_pylist()
        known = known[np.array([_fits(row.values()) for row in rows], np.bool_)]
    return None if len(known) == batch.num_rows else known


def _may_be_too_long(batch: pa.RecordBatch, against: Against) -> bool:
    """Whether some event's columns may make a key that is longer than keys are."""
    columns = [batch.column(name) for name in against.by]
    values = [column.dictionary if pa.types.is_dictionary(column.type) else column for column in columns]
    text = [each for each in values if each.type in (pa.string(), pa.binary()) and len(each)]
    return sum(pc.max(pc.binary_length(each)).as_py() or 0 for each in text) > KEY_BYTES_MAX // 4


def _fits(values: Iterable[Any]) -> bool:
    """Whether values surely make a key that is not too long: one that is has no row."""
    text = [value.encode() if isinstance(value, str) else value for value in values if isinstance(value, str | bytes)]
    return sum(len(value) + value.count(0) for value in text) + 256 <= KEY_BYTES_MAX


def _keys(against: Against, table: TableSchema, sample: pa.RecordBatch, time: str) -> list[pa.LargeBinaryArray]:
    """The keys of what events like the ones of ``sample`` are measured against; of several slots each, the last at the
    end."""
    by = iter(against.by)
    types = [column.type for column in table.key]
    if against.kind == "row":
        return [encode_key_columns(types, [sample.column(next(by)) for _ in types])]
    columns: list[Any] = []
    slot_at, slot = 0, Slot("us", 1)
    for i, group in enumerate(table.group_by):
        if group.slot is not None:
            slot_at, slot = i, group.slot
            columns.append(None)
        else:
            columns.append(flat(sample.column(next(by))))
    own = slot.starts(stored_array(types[slot_at], flat(sample.column(time))))
    starts = slot.starts(own - (against.back_us or 1))
    found: list[pa.LargeBinaryArray] = []
    for n in range(against.slots):
        if n:
            starts = slot.starts(starts - 1)
        columns[slot_at] = pa.array(starts)
        found.append(encode_key_columns(types, columns))
    return found[::-1]


def _combined(table: TableSchema, layout: RowLayout, rows: Array, slots: Sequence[Array]) -> Array:
    """Rows of an aggregate, of each slot those at these places, as one row each."""
    versions = [layout.decode(row) for row in layout.bytes_of(rows)]
    out = []
    for places in zip(*(at.tolist() for at in slots), strict=True):
        there = [versions[i] for i in places if versions[i].alive]
        ops = (RowOp(Barrier.PATCH, {}, {i: cell for i, cell in enumerate(v.cells) if cell is not None}) for v in there)
        whole: Version | None = None
        for op in ops:
            whole = apply_op(table, whole, OWN_CTS, op)
        out.append(bytes(layout.width) if whole is None else layout.encode(whole))
    return layout.rows_of(out)


def _no_rows(table: TableSchema, refs: Mapping[str, str]) -> Mapping[str, Any]:
    return {name: pa.nulls(0, arrow_type(table.output_type(column))) for name, column in refs.items()}


def _projected(
    table: TableSchema, columns: Sequence[str], pairs: Sequence[tuple[bytes, Version]]
) -> tuple[pa.RecordBatch, list[int]]:
    """The columns of rows, and which rows have a value that cannot be told, which are null then."""
    if not columns:
        return pa.RecordBatch.from_pylist([{}] * len(pairs)), []
    projection = Projection.of(table, columns)
    try:
        return rows_batch(table, columns, _some(projection.rows(pairs))), []
    except OutOfRange:
        pass
    batches, failed = [], []
    for i, pair in enumerate(pairs):
        try:
            batches.append(rows_batch(table, columns, _some(projection.rows([pair]))))
        except OutOfRange:
            failed.append(i)
            batches.append(rows_batch(table, columns, [dict.fromkeys(columns)]))
    return plain(together(batches)), failed


def _some(rows: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    return [row for row in rows if row is not None]
