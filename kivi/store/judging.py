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
sum does not fit its type, what was raised could not be an event of ``into`` (a time that no event may have, a null that
an aggregate groups by, a float sum that leaves the finite numbers: ``Judgement.derived``), or more was raised than a
transaction may bring; *late*, where what was raised lies below the retention floor of ``into``; or else the condition
is not true. The sums are rows of ``catalog.JUDGED`` in the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import arrow_schema, arrow_type, flat, rows_batch, stored_array
from kivi.arrow.dictionaries import coded, plain, together
from kivi.arrow.predicates import Known, attempted, spread, true_places
from kivi.delta.derive import Derivation
from kivi.delta.grouping import Groups
from kivi.delta.key_index import KeyIndex
from kivi.delta.ops import Barrier, RowOp, apply_op
from kivi.delta.runs import DeltaRun, stamped
from kivi.encoding.base_rows import FieldRows, RowLayout, Version
from kivi.encoding.key_slots import KeySlot
from kivi.encoding.keys import KEY_BYTES_MAX
from kivi.encoding.projection import Projection
from kivi.encoding.shards import shards_of_keys
from kivi.errors import KiviError, NotFound, OutOfRange, ResourceExhausted, SnapshotTooOld, Unavailable
from kivi.log.shards import EVERY, SHARDS
from kivi.model.rules import Against, Bound, Looked, Nodes, Rule, bind_rule, key_of
from kivi.model.schema import TableSchema
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US, ColumnType
from kivi.mvcc.leases import Lease
from kivi.mvcc.snapshot import Reader
from kivi.runtime.settings import Settings
from kivi.store.catalog import JUDGED as JUDGED_ROWS
from kivi.store.catalog import Catalog, View, judged_row
from kivi.store.checks import check_events, long_columns
from kivi.store.known_rows import KnownRows, Standing, add_run, field_rows, of_slots
from kivi.store.late_deltas import Floors, beyond, runs_in_time
from kivi.store.retention import Retention, remembered
from kivi.store.spanning import Spanning
from kivi.store.transaction import OWN_CTS, Txn

__all__ = ["Judgement", "Judging"]

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
_MOMENT: Final = ColumnType("timestamp")
_FAR_US: Final = 2**61
"""Beyond it, slots before or behind a moment might be no int64."""
T = TypeVar("T")
JUDGED, RAISED, MISSING, FAILED, LATE = range(5)
"""The columns of ``catalog.JUDGED``."""


@dataclass(slots=True)
class _Found:
    """What events are measured against: of each event the row among ``rows``, -1 where there is none; and which events
    failed, as their row could not be read."""

    row_of: Array
    rows: pa.RecordBatch
    failed: Mask | None
    known: Known = field(default_factory=dict)
    """What expressions are for all ``rows``."""
    there: Mask | None = None
    """Which events have a row that could be read; None: all."""
    _places: Any = None

    def __post_init__(self) -> None:
        there = self.row_of >= 0
        if self.failed is not None:
            there &= ~self.failed
        self.there = None if there.all() else there

    def places(self, chosen: Array | None) -> Any:
        """The rows of the events at these places, which have one; None: of all events, null where there is none."""
        if chosen is not None:
            return pa.array(self.row_of[chosen])
        if self._places is None:
            row_of = self.row_of.astype(np.int32)  # which Arrow takes by in half of the time
            self._places = pa.array(row_of, mask=None if self.there is None else row_of < 0)
        return self._places


def _nothing(table: TableSchema, read: Sequence[str], events: int) -> _Found:
    columns = [pa.nulls(0, arrow_type(table.output_type(column))) for column in read]
    return _Found(np.full(events, -1, np.int64), pa.RecordBatch.from_arrays(columns, list(read)), None)


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
    spanning: Spanning
    _held: dict[int, int] = field(default_factory=dict)
    _plans: tuple[View | None, dict[int, Bound], Nodes] = (None, {}, {})
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
        of, plans, nodes = self._plans
        if of is not view:
            plans, nodes = {}, {}
            self._plans = view, plans, nodes
        if (found := plans.get(rule.id)) is None:
            found = plans[rule.id] = bind_rule(rule, view.table, nodes)
        return found

    def rows(
        self, lease: Lease, table: TableSchema, keys: pa.LargeBinaryArray, slots: Array | None = None
    ) -> FieldRows:
        """As of ``KnownRows``, whose lock is held: rows of shards that do not lie here are asked of other nodes."""
        missing = self._missing(lease, table, keys)
        if not missing:
            return self.known.rows(lease, table, keys, slots)
        there = self.spanning.shards.bits(missing)[shards_of_keys(table, keys, SHARDS)]
        layout = RowLayout.of(table)
        found = FieldRows.none(layout.dtype, len(keys))
        for at, lie_here in ((np.flatnonzero(~there), True), (np.flatnonzero(there), False)):
            if len(at):
                these, own = keys.take(pa.array(at)), slots if slots is None or len(slots) < len(keys) else slots[at]
                if lie_here:
                    found.put(at, self.known.rows(lease, table, these, own))
                else:
                    wanted = of_slots(table, these, own).to_pylist()
                    found.put(at, field_rows(layout, self._of_others(lease, table, wanted, missing)))
        return found

    def standing(
        self, lease: Lease, table: TableSchema, keys: pa.LargeBinaryArray, slots: Array | None
    ) -> tuple[Standing, Array] | None:
        """As of ``KnownRows``, whose lock is held, where all rows lie here."""
        return None if self._missing(lease, table, keys) else self.known.standing(lease, table, keys, slots)

    def versions(self, lease: Lease, table: TableSchema, keys: pa.LargeBinaryArray) -> list[Version | None]:
        """The same of rows that do not fit columns."""
        missing = self._missing(lease, table, keys)
        if missing:
            return self._of_others(lease, table, keys.to_pylist(), missing)
        return self.reader.get(lease, table, keys.to_pylist())

    def _missing(self, lease: Lease, table: TableSchema, keys: pa.LargeBinaryArray) -> int:
        """Of which shards of these rows others are asked. Raises Unavailable if nobody has them."""
        if not table.shard_by:
            return 0
        held = self.spanning.shards.held_at(table, lease.ts)
        if self._held.setdefault(table.id, held) != held:  # a new owner has copied them
            self.known.forget(table)
            self._held[table.id] = held
        if held == EVERY:
            return 0
        asked = sum(1 << shard for shard in set(shards_of_keys(table, keys, SHARDS).tolist()))
        return self.spanning.missing(table, asked, lease.ts)

    def _of_others(self, lease: Lease, table: TableSchema, keys: list[bytes], missing: int) -> list[Version | None]:
        try:
            return self.spanning.get(lease, table, keys, missing)
        except SnapshotTooOld as error:
            raise Unavailable(
                f"rules measure events against rows of {table.name!r} on nodes that have gone on since: nothing "
                f"was applied; try again ({error.message})"
            ) from error


@dataclass(slots=True)
class Judgement:
    """Of one commit, or of events that are each one. ``snapshot`` opens the one to judge at; ``view``: the catalog that
    the commit is derived with. ``adds_own``: the events may be added to slots; not where each is a commit, whose own
    events lie in no slot before it, nor where they were committed before, and lie there already. Tables go by name:
    what they are called does not change while a rule names them.

    ``members``: of several commits with a record each, how many. What became of events is counted for each then, and
    where an error of one event would be that of all, it is raised: they are judged alone instead. ``may_halve``: that
    rules raise more than a transaction may bring is raised, too, as less can be judged at a time."""

    judging: Judging
    view: View
    snapshot: Callable[[], Lease]
    adds_own: bool = True
    members: int = 1
    may_halve: bool = False
    lease: Lease | None = None
    counts: dict[int, Array] = field(default_factory=dict)
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

    def derived(
        self,
        into: TableSchema,
        aggregates: Sequence[TableSchema],
        floors: Floors,
        derive: Callable[[Sequence[TableSchema], Floors, Derivation], T],
        *,
        beside: Sequence[pa.RecordBatch] = (),
        each: bool = False,
    ) -> tuple[Derivation, T] | None:
        """What was raised for a table so far, in the order of the events that it was raised from, and what ``derive``
        makes of that for the ``aggregates``; None if nothing was. ``beside``: the events that ``derive`` puts before
        them. ``each``: they are of several commits, whose numbers are its ``commits``.

        Rules have failed on what cannot be derived from (``late_deltas.beyond``), and on everything where a measure of
        one's own does not combine what it has observed, which none may do. Raises what ``derive`` says without any of
        what was raised, and where there are several members what it says of that.
        """
        parts = self._raised.get(into.name)
        if not parts:
            return None
        rule_of = np.repeat(np.arange(len(parts)), [len(places) for *_, places in parts])
        batch, places = together([batch for _, batch, _ in parts]), np.concatenate([places for *_, places in parts])
        if len(parts) > 1:
            in_order = np.argsort(places, kind="stable")
            batch, places, rule_of = batch.take(pa.array(in_order)), places[in_order], rule_of[in_order]
        commits = places if each else None
        events = Derivation(coded(batch), commits=commits)
        try:
            return events, derive(aggregates, floors, events)
        except KiviError:
            if self.members > 1:
                raise
        derive(aggregates, floors, events.taken(np.zeros(0, np.int64)))
        given = sum(one.num_rows for one in beside)
        whole = Derivation(together([*beside, events.batch]), commits=commits)
        good = ~beyond(aggregates, floors, whole, given)[given:]
        events, found = events.taken(np.flatnonzero(good)), None
        if good.any():
            try:
                found = events, derive(aggregates, floors, events)
            except KiviError:
                good[:] = False
        for i, (rule, *_) in enumerate(parts):
            failed = self._each(places[~good & (rule_of == i)])
            self.counts[rule.id][RAISED] -= failed
            self.counts[rule.id][FAILED] += failed
        return found

    def _each(self, places: Array) -> int | Array:
        """How many events these are, which have these places, of each of the members."""
        return len(places) if self.members == 1 else np.bincount(places.astype(np.int64), minlength=self.members)

    def taken(self, into: TableSchema) -> pa.RecordBatch | None:
        """What was raised for a table since this was asked for last, and can be an event of it."""
        aggregates = self.view.aggregates.get(into.id, ())
        floors = self.judging.row_floors(aggregates)
        found = self.derived(into, aggregates, floors, runs_in_time)
        self._raised.pop(into.name, None)
        return None if found is None else plain(found[0].batch)

    def counted(self, rule: Rule) -> Array:
        """What became of the events that a rule has judged so far, of each member, to be added to."""
        return self.counts.setdefault(rule.id, np.zeros((5, self.members), np.int64))

    def count(self, txn: Txn, rule: Rule) -> None:
        """The counts of a rule that a transaction judges by itself."""
        names = (column.name for column in JUDGED_ROWS.columns)
        of_each = self.counts.get(rule.id)
        counts = {} if of_each is None else dict(zip(names, of_each.sum(axis=1).tolist(), strict=False))
        if any(counts.values()):
            txn.delta(JUDGED_ROWS, (rule.id,), counts)

    def rows(self, member: int = 0) -> list[tuple[int, bytes, RowOp]]:
        """The counts, as operations of the commit."""
        rows = []
        for rule, of_each in self.counts.items():
            counts = of_each[:, member].tolist()
            self.judging.count(counts)
            if any(counts):
                rows.append(judged_row(rule, {i: count for i, count in enumerate(counts) if count}))
        return rows

    def judge(self, source: TableSchema, events: Derivation, only: Rule | None = None) -> None:
        """Judges all events that the commit, or each of several, brings for a table. ``only``: by one of its rules."""
        batch = events.batch
        rules = self.view.rules_of(source) if only is None else [only]
        if not rules or not batch.num_rows:
            return
        plans = [self.judging.plan(self.view, rule) for rule in rules]
        wanted: dict[_Asked, dict[str, None]] = {}
        for plan in plans:
            for looked in plan.looked:
                wanted.setdefault(self._asked(plan, looked), {}).update(dict.fromkeys(looked.columns))
        with self.judging.known.lock:
            self.lease = self.lease or self.snapshot()
            found = {
                asked: self._found(source, events, asked, list(read), self.lease) for asked, read in wanted.items()
            }
        known: Known = {}
        at = np.arange(batch.num_rows) if events.commits is None else events.commits
        for plan in plans:
            mine = [(looked, found[self._asked(plan, looked)]) for looked in plan.looked]
            self._apply(plan, batch, mine, known, at)

    def _asked(self, plan: Bound, looked: Looked) -> _Asked:
        """The commit's own events are added to slots; what is looked up is as it was before."""
        adds = plan.rule.own_events and looked.against.kind == "slot" and self.adds_own
        return _Asked(looked.against, adds)

    # -- one rule -------------------------------------------------------------------------------------------

    def _apply(
        self,
        plan: Bound,
        batch: pa.RecordBatch,
        found: Sequence[tuple[Looked, _Found]],
        known: Known,
        at: Array,
    ) -> None:
        """``known``: what expressions are for all events of the batch, by those that other rules have, too. ``at``: the
        number of each one's commit, or of the event."""
        counts = self.counted(plan.rule)
        counts[JUDGED] += self._each(at)
        there: Mask | None = None
        failed: Mask | None = None
        for _, each in found:
            if each.there is not None:
                there = each.there if there is None else there & each.there
            if each.failed is not None:
                failed = each.failed if failed is None else failed | each.failed
        if there is not None:
            counts[MISSING] += self._each(at[~there if failed is None else ~(there | failed)])
            if failed is not None:
                counts[FAILED] += self._each(at[failed])
        if plan.where is None:
            chosen = np.arange(batch.num_rows) if there is None else np.flatnonzero(there)
        else:
            for looked, each in found:
                for expr in looked.where:
                    if expr not in known:
                        known[expr] = spread(each.rows, expr, looked.types, each.places(None), each.known)
            holds, out = attempted(batch, plan.where, plan.types, known)
            chosen = true_places(holds)
            if there is not None:
                chosen = chosen[there[chosen]]
            if out is not None:
                counts[FAILED] += self._each(at[out if there is None else out & there])
                chosen = chosen[~out[chosen]]
        if len(chosen):
            self._raise(plan, batch, found, chosen, at[chosen], counts)

    def _raise(
        self,
        plan: Bound,
        batch: pa.RecordBatch,
        found: Sequence[tuple[Looked, _Found]],
        chosen: Array,
        at: Array,
        counts: Array,
    ) -> None:
        """``chosen``: the events that raise something, which are ``at`` these numbers."""
        into = self.view.table(plan.rule.into)
        read = batch.select(plan.selects or batch.schema.names[:1]).take(pa.array(chosen))
        known: Known = {
            expr: spread(each.rows, expr, looked.types, each.places(chosen), each.known)
            for looked, each in found
            for expr in looked.select
        }
        good = np.ones(len(chosen), np.bool_)
        made: dict[str, Any] = {}
        for name, expr in plan.select:
            made[name], out = attempted(read, expr, plan.types, known)
            if out is not None:
                good &= ~out
        columns = [flat(made[c.name]) if c.name in made else pa.nulls(len(chosen), arrow_type(c.type))
                   for c in into.columns]  # fmt: skip
        schema = into.remembered("all columns in Arrow", lambda: arrow_schema(into, [c.name for c in into.columns]))
        raised = pa.RecordBatch.from_arrays(columns, schema=schema)
        aggregates = self.view.aggregates.get(into.id, ())
        for name in {into.event_time or "", *(group.source for each in aggregates for group in each.group_by)}:
            if (column := raised.column(name)).null_count:
                good &= np.asarray(column.is_valid())
        for column in (column for column in into.columns if column.type.name == "timestamp"):
            times = stored_array(column.type, raised.column(column.name))  # null is 1970
            good &= (times >= MOMENT_MIN_US) & (times <= MOMENT_MAX_US)
        for _, lengths in long_columns(raised, self.judging.settings):
            good &= lengths.fill_null(0).to_numpy() <= self.judging.settings.max_value_bytes
        if not good.all():
            counts[FAILED] += self._each(at[~good])
            kept = pa.array(np.flatnonzero(good))
            raised, at = raised.take(kept), at[good]
        if (floor_us := self.judging.floor(into)) is not None and raised.num_rows:
            times = raised.column(into.event_time or "").cast(pa.int64()).to_numpy()
            in_time = times >= floor_us
            counts[LATE] += self._each(at[~in_time])
            raised, at = remembered(raised, into, floor_us), at[in_time]
        try:
            check_events(raised, self.judging.settings)
            if raised.nbytes > self.judging.settings.max_transaction_bytes:
                raise ResourceExhausted("rules raise more of these events than a transaction may bring")
        except ResourceExhausted:
            if self.members > 1 or self.may_halve:
                raise
            counts[FAILED] += self._each(at)
            return
        if raised.num_rows:
            counts[RAISED] += self._each(at)
            self._raised.setdefault(into.name, []).append((plan.rule, raised, at.astype(np.uint64)))

    # -- what events are measured against ----------------------------------------------------------------------

    def _found(
        self, source: TableSchema, events: Derivation, asked: _Asked, read: Sequence[str], lease: Lease
    ) -> _Found:
        """The row of each event, and the columns ``read`` of all of them."""
        batch = events.batch
        against, time = asked.against, source.event_time or ""
        table = self.view.table(against.table)
        try:
            table = self.judging.catalog.table(against.table, lease.ts)
            self.judging.catalog.check_seen(table, lease.ts)
        except NotFound:
            return _nothing(table, read, batch.num_rows)
        key, grouped, known = key_of(against, table, time), events, None
        if not events.is_grouped(key) or not _are_near(against, table, events.groups(key)):
            known = _groupable(batch, against, time)
            if known is not None and not len(known):
                return _nothing(table, read, batch.num_rows)
            grouped = events if known is None else Derivation(batch.take(pa.array(known)))
        groups = grouped.groups(key)
        slots = _slots(against, table, groups)
        of_events, failed_rows = groups.group_of, list[int]()
        if (standing := self._standing(table, groups.keys, slots, asked, read, lease)) is not None:
            row_of, rows, of_rows = standing
            of_events = row_of[of_events]
        else:
            rows, alive, failed_rows = self._rows(table, groups.keys, slots, events, asked, read, lease)
            of_rows = {}
            if len(alive) < groups.count:
                of_events = _placed(alive, groups.count)[of_events]
        if known is not None:
            whole = np.full(batch.num_rows, -1, np.int64)
            whole[known] = of_events
            of_events = whole
        return _Found(of_events, rows, np.isin(of_events, failed_rows) if failed_rows else None, of_rows)

    def _standing(
        self,
        table: TableSchema,
        keys: pa.LargeBinaryArray,
        slots: Sequence[Array | None],
        asked: _Asked,
        columns: Sequence[str],
        lease: Lease,
    ) -> tuple[Array, pa.RecordBatch, Known] | None:
        """As ``_rows``, of a slot whose rows have not changed lately: of each key its row, -1 where there is none; the
        columns of all rows of that slot; and what expressions are for these, remembered from one commit to the next."""
        if len(slots) > 1 or asked.own_events or not columns or not RowLayout.of(table).in_columns:
            return None
        projection, slot = Projection.of(table, columns), slots[0]
        floor_us = self.judging.retention.row_floor(table, lease.ts) if table.forgets_rows else None
        if projection.reads_keys or (floor_us is not None and (slot is None or slot[0] < floor_us)):
            return None
        if (found := self.judging.standing(lease, table, keys, slot)) is None:
            return None
        standing, numbers = found
        made = standing.made.get(tuple(columns))
        if made is None or made[0] is not self.view or made[1] is not table:
            alive = np.flatnonzero(standing.rows["flags"] & 1)
            try:
                no_keys = pa.repeat(pa.scalar(b"", pa.large_binary()), len(alive))
                rows = next(projection.batches([(no_keys, standing.rows.take(alive))], None), None)
            except OutOfRange:
                rows = None
            made = self.view, table, _placed(alive, len(standing.rows)), rows, {}
            standing.made[tuple(columns)] = made
        *_, row_of, rows, known = made
        return None if rows is None else (row_of[np.where(numbers < len(row_of), numbers, 0)], rows, known)

    def _rows(
        self,
        table: TableSchema,
        keys: pa.LargeBinaryArray,
        slots: Sequence[Array | None],
        events: Derivation,
        asked: _Asked,
        columns: Sequence[str],
        lease: Lease,
    ) -> tuple[pa.RecordBatch, Array, list[int]]:
        """Columns of the rows that there are, of which of the groups each is, and which of them cannot be told.

        ``keys``: those of the groups. ``slots``: in place of theirs, the ones that are looked at."""
        layout = RowLayout.of(table)
        if not layout.in_columns:  # a row table with text
            versions = self.judging.versions(lease, table, keys)
            there = [i for i, version in enumerate(versions) if version is not None]
            pairs = [(key.as_py(), version) for key, version in zip(keys, versions, strict=True) if version is not None]
            rows, failed = _projected(table, columns, pairs)
            return rows, np.array(there, np.int64), failed
        if len(slots) == 1 and not asked.own_events:
            found = self.judging.rows(lease, table, keys, slots[0])
        else:
            every, index = pa.concat_arrays([of_slots(table, keys, slot) for slot in slots]), KeyIndex()
            at = index.add(every) - 1
            distinct = np.flatnonzero(at == np.arange(len(every)))
            found = FieldRows.none(layout.dtype, len(every))
            found.put(distinct, self.judging.rows(lease, table, every.take(pa.array(distinct))))
            for run in self._own(table, events) if asked.own_events else ():
                add_run(layout, found, index, run)
        floor_us = self.judging.retention.row_floor(table, lease.ts) if table.forgets_rows else None
        if floor_us is not None and len(keys):
            below = [KeySlot.of(table).below(of_slots(table, keys, slot), floor_us) for slot in slots]
            layout.clear(found, np.concatenate(below))
        if len(slots) > 1:
            found = _combined(table, layout, found, np.split(at, len(slots)))
        projection, there_at = Projection.of(table, columns), np.flatnonzero(found["flags"] & 1)
        last, kept = of_slots(table, keys, slots[-1]) if projection.reads_keys else keys, found
        if len(there_at) < len(found):
            last, kept = last.take(pa.array(there_at)), found.take(there_at)
        if columns and len(there_at):
            try:
                return next(projection.batches([(last, kept)], None)), there_at, []
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


def _placed(at: Array, count: int) -> Array:
    """Of so many places which of ``at`` each is; -1: none."""
    row_of = np.full(count, -1, np.int64)
    row_of[at] = np.arange(len(at))
    return row_of


def _groupable(batch: pa.RecordBatch, against: Against, time: str) -> Array | None:
    """The events that a row can be looked up for: none of their columns in its key is null; None: all."""
    there: Mask | None = None
    for name in against.by:
        if (column := batch.column(name)).null_count:
            known = np.asarray(column.is_valid())
            there = known if there is None else there & known
    if against.kind == "slot":
        times = batch.column(time).cast(pa.int64()).to_numpy()
        if len(times) and (int(times.min()) < -_FAR_US or int(times.max()) > _FAR_US):
            near = (times >= -_FAR_US) & (times <= _FAR_US)
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


def _own_slots(table: TableSchema, groups: Groups) -> Array:
    """Of each group, or one of all."""
    starts = groups.slots if groups.slots is not None else KeySlot.of(table).slots(groups.keys)
    return starts[:1] if (starts == starts[:1]).all() else starts


def _are_near(against: Against, table: TableSchema, groups: Groups) -> bool:
    """Whether all are so near that there are slots before theirs."""
    if against.kind == "row":
        return True
    slots = _own_slots(table, groups)
    return bool(((slots > -_FAR_US) & (slots < _FAR_US)).all())  # the least integer has no opposite


def _slots(against: Against, table: TableSchema, groups: Groups) -> list[Array | None]:
    """Which slots events are measured against, the last at the end; each is one of every group, or one of all. None:
    those of their keys."""
    if against.kind == "row":
        return [None]
    slot = next(group.slot for group in table.group_by if group.slot is not None)
    starts = _own_slots(table, groups)
    back_us, found = against.back_us or 1, list[Array | None]()
    for _ in range(against.slots):
        starts = slot.starts(starts - back_us)
        found.append(starts)
        back_us = 1
    return found[::-1]


def _combined(table: TableSchema, layout: RowLayout, rows: FieldRows, slots: Sequence[Array]) -> FieldRows:
    """Rows of an aggregate, of each slot those at these places, as one row each."""
    alive = np.flatnonzero(rows["flags"] & 1)  # what is not there is zeros, which no layout has but the first
    versions = dict(zip(alive.tolist(), map(layout.decode, layout.bytes_of(rows.take(alive))), strict=True))
    out = []
    for places in zip(*(at.tolist() for at in slots), strict=True):
        there = [versions[i] for i in places if i in versions]
        ops = (RowOp(Barrier.PATCH, {}, {i: cell for i, cell in enumerate(v.cells) if cell is not None}) for v in there)
        whole: Version | None = None
        for op in ops:
            whole = apply_op(table, whole, OWN_CTS, op)
        out.append(bytes(layout.width) if whole is None else layout.encode(whole))
    return FieldRows.of(layout.rows_of(out))


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
