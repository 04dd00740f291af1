"""A transaction before it commits: its snapshot, its own writes, and how they become one commit record.

Own writes compose per row in program order (R7) and are read back at once (R1). Deltas that the transaction's own
appends derive for aggregates are part of that: they are derived again when a read asks, and once more, for the record,
at commit, with the catalog as it is then.

``prepare`` is step 1 of committing (``kivi.mvcc.commit``): it derives, validates sizes and encodes; nothing is locked.
Events go to the log as Arrow bytes and to pending as the same Arrow columns; no statement runs once per event, except
for commits of a few events, where plain Python is faster than starting column kernels.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.columns import arrow_type, padded, stored_lists, trimmed
from kivi.arrow.dictionaries import coded, compact, held_bytes, plain, together
from kivi.arrow.ipc import encode_ipc
from kivi.arrow.records import DELETES
from kivi.delta.derive import Derivation, derive, derive_few
from kivi.delta.ops import Barrier, RowOp, apply_op, then_delete, then_delta, then_insert, then_put
from kivi.delta.runs import Array, Cells, DeltaRun
from kivi.encoding.base_rows import Version
from kivi.encoding.event_names import EventNames
from kivi.encoding.keys import decode_key, encode_few_keys, encode_key, encode_key_columns
from kivi.errors import InvalidArgument, PermissionDenied, ResourceExhausted, RowExists, SnapshotTooOld
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.groups import Single
from kivi.mvcc.leases import Lease
from kivi.mvcc.record import BLIND, Bulk, Commit, Once
from kivi.mvcc.verdict import EXISTENCE, Collision, Guard
from kivi.runtime.checksum import crc32
from kivi.runtime.settings import Settings
from kivi.store.catalog import RETRACTIONS, TABLES, View, is_judged, late_row, retraction_row, schema_guards
from kivi.store.checks import check_events, check_tenant, too_long
from kivi.store.late_deltas import few_in_time, runs_in_time
from kivi.store.overwrite import Generations
from kivi.store.retention import remembered
from kivi.store.shards import Shards
from kivi.store.staging import Staged

__all__ = ["OWN_CTS", "SMALL_EVENTS", "Brought", "Derived", "Txn", "caller_key", "payload_digest", "prepare"]

SMALL_EVENTS: Final = 32
"""Up to this many events a commit's deltas are derived row by row and pend as row operations."""

SMALL_ROWS: Final = 32
"""Up to this many rows of delta columns are operations, and no run."""

OWN_CTS: Final = 2**63 - 1
"""The timestamp that own writes fold at: after everything committed."""


class Host(Protocol):
    """The part of its store that a transaction uses."""

    def get(
        self,
        lease: Lease,
        schema: TableSchema,
        keys: Sequence[tuple[Any, ...]],
        columns: Sequence[str] | None,
        txn: Txn,
    ) -> list[dict[str, Any] | None]: ...

    def scan(self, lease: Lease, schema: TableSchema, wanted: Scan, txn: Txn) -> Iterator[pa.RecordBatch]: ...

    def maybe_there(self, lease: Lease, schema: TableSchema, keys: pa.LargeBinaryArray) -> Array: ...

    def has_rows(self, lease: Lease, schema: TableSchema, keys: list[bytes], txn: Txn) -> list[bool]: ...

    def load_stages(self, schema: TableSchema, stage_ids: Sequence[bytes]) -> list[Staged]: ...

    def floor(self, schema: TableSchema) -> int | None: ...

    def find_events(self, txn: Txn, schema: TableSchema, wanted: Scan) -> EventNames: ...

    def own_view_ops(self, txn: Txn, schema: TableSchema) -> dict[bytes, RowOp]: ...

    def rollback(self, txn: Txn) -> None: ...


class _Deltas(NamedTuple):
    """What the events of one table are for its aggregates: rows of these where they are few, or runs, and how many
    events were left out of each as late."""

    events: Derivation
    rows: list[tuple[int, list[tuple[bytes, dict[int, Any]]]]]
    runs: list[tuple[TableSchema, DeltaRun]]
    late: dict[int, int]

    @staticmethod
    def of(
        brought: Sequence[pa.RecordBatch],
        aggregates: Sequence[TableSchema],
        floors: Mapping[int, int | None],
        raised: Derivation | None = None,
    ) -> _Deltas:
        events = Derivation(together([*brought, *([] if raised is None else [raised.batch])]))
        if events.rows <= SMALL_EVENTS:
            rows, late = few_in_time(aggregates, floors, events.batch)
            return _Deltas(events, rows, [], late)
        runs, late = runs_in_time(aggregates, floors, events)
        by_id = {aggregate.id: aggregate for aggregate in aggregates}
        return _Deltas(events, [], [(by_id[aggregate], run) for aggregate, run in runs], late)

    def add_to(self, commit: Commit, runs: list[tuple[int, DeltaRun]], shards: Shards) -> None:
        for table, rows in self.rows:
            commit.derived += [(table, key, RowOp(Barrier.PATCH, {}, deltas)) for key, deltas in rows]
        for aggregate, run in self.runs:
            runs.append((aggregate.id, run))
            commit.runs.append(Bulk(aggregate.id, 0, shards.cut_run(aggregate, run)))
        commit.derived += [late_row(table, left_out) for table, left_out in self.late.items()]


class Rules(Protocol):
    """What judges the events of a commit (``kivi.store.judging``)."""

    @property
    def rule_ts(self) -> int | None: ...

    def order(self, tables: Iterable[TableSchema]) -> list[TableSchema]: ...

    def derived(
        self,
        into: TableSchema,
        aggregates: Sequence[TableSchema],
        floors: Mapping[int, int | None],
        derive: Callable[[Sequence[TableSchema], Mapping[int, int | None], Derivation], _Deltas],
        *,
        beside: Sequence[pa.RecordBatch],
    ) -> tuple[Derivation, _Deltas] | None: ...

    def judge(self, source: TableSchema, events: Derivation) -> None: ...

    def rows(self) -> list[tuple[int, bytes, RowOp]]: ...


class Brought(NamedTuple):
    """What the event of a transaction derives and raises, where it was derived together with others."""

    rows: list[tuple[int, bytes, RowOp]]
    raised: list[tuple[int, pa.RecordBatch]]
    rule_ts: int | None


@dataclass(slots=True)
class Derived:
    """What a transaction does to secondary views (``kivi.store.view_rows``): rows of these, and guards on the cells
    that they follow from, as of ``lease``; None: nothing was read for it."""

    rows: list[tuple[int, bytes, RowOp]] = field(default_factory=list)
    guards: set[Guard] = field(default_factory=set)
    lease: Lease | None = None


@dataclass(slots=True)
class Txn:
    """One open transaction. Not thread safe. Keys are tuples, values named, both in stored form."""

    lease: Lease
    settings: Settings
    host: Host
    rows: dict[tuple[int, bytes], RowOp] = field(default_factory=dict)
    guards: set[Guard] = field(default_factory=set)
    appends: dict[tuple[int, bool], list[pa.RecordBatch]] = field(default_factory=dict)  # (table, drop_late), as sent
    staged: dict[int, list[Staged]] = field(default_factory=dict)
    staged_rows: dict[int, list[int]] = field(default_factory=dict)  # of row tables: whose rows are in ``rows``
    overwritten: set[int] = field(default_factory=set)
    retracted: dict[int, EventNames] = field(default_factory=dict)
    retractions: list[tuple[int, str]] = field(default_factory=list)  # (table, which events), as the caller sent them
    floors: dict[int, int | None] = field(default_factory=dict)  # of tables of which late events are left out
    late: dict[int, int] = field(default_factory=dict)  # how many were when it was prepared last
    schemas: dict[int, TableSchema] = field(default_factory=dict)
    operations: int = 0
    nbytes: int = 0
    run_stages: dict[int, list[int]] = field(default_factory=dict)
    runs: list[tuple[int, DeltaRun]] = field(default_factory=list)  # of row tables, and of no row in ``rows``
    once: Once | None = None  # of a cluster: its events of that table
    judged_at: Lease | None = None  # where what it brings was raised, if it is what a rule raised from older events
    deferred: bool = False  # an insert of a row that is there is ``refused``, where the commit enters
    refused: RowExists | SnapshotTooOld | None = None
    closed: str = ""
    commit_ts: int | None = None

    @property
    def start_ts(self) -> int:
        return self.lease.ts

    @property
    def wrote(self) -> bool:
        return bool(
            self.rows
            or self.runs
            or self.guards
            or self.appends
            or self.staged
            or self.staged_rows
            or self.overwritten
            or self.retracted
        )

    @property
    def blind(self) -> bool:
        """Whether it owes nothing to its snapshot: it has none, or does nothing but overwrite tables."""
        if not self.lease.id:
            return True
        if not self.overwritten or self.guards or self.lease.used:
            return False
        written = {table for table, _ in (*self.rows, *self.runs)} | self.event_tables | {*self.staged_rows}
        return written <= self.overwritten

    @property
    def in_columns(self) -> bool:
        """Whether deltas are derived in columns from what was appended."""
        return bool(self.runs) or any(_row_count(self.events_of(table)) > SMALL_EVENTS for table in self.event_tables)

    @property
    def event_tables(self) -> set[int]:
        """The tables that it brings events for."""
        return {table for table, _ in self.appends}.union(self.staged)

    def lone_event(self) -> tuple[TableSchema, pa.RecordBatch] | None:
        """The one event that it brings, of its table, if there is no more to derive from than that."""
        if len(self.appends) != 1 or self.staged or self.overwritten or self.retracted or self.judged_at is not None:
            return None
        ((table, _),) = self.appends
        batches = self.kept(table)
        return (self.schemas[table], batches[0]) if len(batches) == 1 and batches[0].num_rows == 1 else None

    @property
    def brought(self) -> int:
        """How many events and rows it writes."""
        events = itertools.chain(self.appends.values(), ((one.batch for one in each) for each in self.staged.values()))
        rows = len(self.rows) + sum(run.rows for _, run in self.runs)
        return rows + len(self.retracted) + sum(map(_row_count, events))

    # -- own writes -------------------------------------------------------------------------------

    def put(self, schema: TableSchema, key: tuple[Any, ...], values: Mapping[str, Any]) -> None:
        """Upsert of the named columns."""
        raw = self._own_key(schema, key)
        self._set(schema, raw, then_put(self.rows.get((schema.id, raw)), _indexed(schema, values)), values)

    def delta(self, schema: TableSchema, key: tuple[Any, ...], values: Mapping[str, Any]) -> None:
        """Deltas of the named columns, by their operators."""
        raw = self._own_key(schema, key)
        op = then_delta(schema, self.rows.get((schema.id, raw)), _indexed(schema, values))
        self._set(schema, raw, op, values)

    def insert(self, schema: TableSchema, key: tuple[Any, ...], values: Mapping[str, Any]) -> None:
        """Strict: RowExists if this transaction sees the row, own writes included."""
        raw = self._own_key(schema, key)
        self._check_new(schema, [raw], [False])
        self._set(schema, raw, then_insert(_indexed(schema, values)), values)

    def delete(self, schema: TableSchema, key: tuple[Any, ...]) -> None:
        """The row is gone; harmless if it was not there."""
        self._set(schema, self._own_key(schema, key), then_delete(), {})

    def guard(self, schema: TableSchema, key: tuple[Any, ...], column: str | None) -> None:
        """The commit conflicts with a concurrent write of the cell; ``column`` None: of the row."""
        index = EXISTENCE if column is None else schema.index_of[column]
        raw = self._own_key(schema, key)
        self._count(1, len(raw))
        self._use(schema)
        self.guards.add(Guard(schema.id, raw, index))

    def _own_key(self, schema: TableSchema, key: tuple[Any, ...]) -> bytes:
        """Encoded. Raises PermissionDenied for the key of another tenant's row."""
        if self.lease.tenant is not None:
            self.lease.tenant.check_key(schema, key)
        return encoded_key(schema, key)

    def retract(self, schema: TableSchema, wanted: Scan) -> int:
        """Removes the events of the snapshot that a scan would give.

        Returns how many that are, without those that it has retracted before.
        """
        if schema.kind != "event":
            raise InvalidArgument(f"{schema.name!r} is no event table: only events are retracted", table=schema.name)
        if not self.lease.id:
            raise InvalidArgument("a retraction removes what its snapshot sees: begin the transaction with one")
        if schema.id in self.event_tables or schema.id in self.overwritten:
            raise InvalidArgument(
                f"the transaction has written to {schema.name!r}: retract in a transaction of its own",
                table=schema.name,
            )
        names = self.host.find_events(self, schema, wanted)
        self._count(1, names.nbytes)
        self._use(schema)
        self.retractions.append((schema.id, repr((str(wanted.where), wanted.times))))
        if names.size:
            self.retracted[schema.id] = EventNames.union([self.retracted.get(schema.id, EventNames.none()), names])
        return names.size

    def _not_retracted(self, schema: TableSchema) -> None:
        if schema.id in self.retracted:
            raise InvalidArgument(
                f"the transaction has retracted events of {schema.name!r}: write to it in another one",
                table=schema.name,
            )

    def overwrite(self, schema: TableSchema) -> None:
        """The table is empty from here on; what the transaction writes to it then is its new content."""
        if self.lease.tenant is not None:
            raise PermissionDenied("overwriting a table removes the rows of all: this access token is for some of them")
        schema.check_overwritable()
        self._not_retracted(schema)
        self._count(1, 0)
        self._use(schema)
        self.overwritten.add(schema.id)
        self.rows = {row: op for row, op in self.rows.items() if row[0] != schema.id}
        self.appends = {place: batches for place, batches in self.appends.items() if place[0] != schema.id}
        for mine in (self.staged, self.staged_rows, self.floors):
            mine.pop(schema.id, None)

    def sees_none(self, schema: TableSchema) -> bool:
        """Whether it has overwritten the table, or the source of the aggregate or view: own writes are all there is."""
        return (schema.source_id or schema.id) in self.overwritten

    def get(
        self, schema: TableSchema, keys: Sequence[tuple[Any, ...]], columns: Sequence[str] | None = None
    ) -> list[dict[str, Any] | None]:
        """Rows at the snapshot with own writes, in stored form."""
        return self.host.get(self.lease, schema, keys, columns, self)

    def has(self, schema: TableSchema, keys: Sequence[tuple[Any, ...]]) -> list[bool]:
        """Whether each of these rows is there, at the snapshot with own writes, of a table that is whole here."""
        return self.host.has_rows(self.lease, schema, [encoded_key(schema, key) for key in keys], self)

    def _has_row(self, schema: TableSchema, key: bytes) -> bool:
        return self.host.has_rows(self.lease, schema, [key], self)[0]

    def maybe_there(self, schema: TableSchema, keys: Sequence[Any]) -> list[int]:
        """Which of many rows may be there, of a table that it has not written to; of the others it knows that they are
        not. ``keys`` as for ``write_deltas``. To look for a few costs as much as to read them: these may all be."""
        rows = len(keys[-1])
        if rows <= SMALL_ROWS:
            return [*range(rows)]
        found: list[int] = self.host.maybe_there(self.lease, schema, _encoded_columns(schema, keys)).tolist()
        return found

    def scan(self, schema: TableSchema, wanted: Scan) -> Iterator[pa.RecordBatch]:
        """A scan at the snapshot with own writes."""
        return self.host.scan(self.lease, schema, wanted, self)

    def append_stages(self, schema: TableSchema, stage_ids: Sequence[bytes], *, drop_late: bool = False) -> None:
        """Makes staged events or rows part of the transaction. NotFound for a stage that is gone or of another table.

        Rows are written like any others, in their order: value columns are put, delta columns are added to.
        ``drop_late``: events below the table's retention floor are left out and counted, where else they are refused.
        """
        self._not_retracted(schema)
        staged = self.host.load_stages(schema, stage_ids)
        for stage in staged:
            check_tenant(self.lease.tenant, schema, stage.batch)
        self._use(schema)
        if schema.kind == "row":
            self.staged_rows.setdefault(schema.id, []).extend(dict.fromkeys(stage.sequence for stage in staged))
            for stage in staged:
                self.write(schema, stage.batch)
        else:
            self.staged.setdefault(schema.id, []).extend(replace(one, drop_late=drop_late) for one in staged)
            self._meet_floor(schema, drop_late)

    def _meet_floor(self, schema: TableSchema, drop_late: bool) -> None:
        """Late events are left out from here on, of what its reads see too. What an overwrite begins has no floor."""
        if drop_late and schema.id not in self.overwritten:
            self.floors[schema.id] = self.host.floor(schema)

    def write(self, schema: TableSchema, batch: pa.RecordBatch, *, insert: bool = False) -> None:
        """The rows of ``kivi.arrow.records.row_batch``, in their order: value columns are put, delta columns added to
        (a null is no delta), and rows with ``DELETES`` deleted. ``insert``: the others are strict inserts.

        Raises RowExists, naming the first, before anything is written.
        """
        check_events(batch, self.settings)
        check_tenant(self.lease.tenant, schema, batch)
        self._count(batch.num_rows, int(batch.nbytes))
        self._use(schema)
        batch = plain(batch)
        keys = encode_key_columns([c.type for c in schema.key], [batch.column(c.name) for c in schema.key]).to_pylist()
        lists = stored_lists(batch)
        deleted = lists.get(DELETES) or [False] * batch.num_rows
        if insert:
            self._check_new(schema, keys, deleted)
        named = [
            (i, column) for column in schema.columns if column.name in lists for i in [schema.index_of[column.name]]
        ]
        puts = [(i, lists[column.name]) for i, column in named if column.operator is None]
        deltas = [(i, lists[column.name]) for i, column in named if column.operator is not None]
        written = dict[tuple[int, bytes], RowOp]()  # all of it, or nothing where deltas add up to too much
        for key, gone, put, delta in zip(keys, deleted, _dicts(puts, keys), _dicts(deltas, keys), strict=True):
            row = schema.id, key
            before = written.get(row) or self.rows.get(row)
            if gone:
                op = then_delete()
            else:
                added = {i: value for i, value in delta.items() if value is not None}
                if insert:
                    op = then_insert(put)
                elif puts or not deltas:
                    op = RowOp(Barrier.PATCH, put, {}) if before is None else then_put(before, put)
                elif not added:
                    continue
                else:
                    op = before or RowOp(Barrier.PATCH, {}, {})
                if added:
                    op = then_delta(schema, op, added)
            written[row] = op
        self.rows.update(written)

    def write_deltas(
        self,
        schema: TableSchema,
        keys: Sequence[Any],
        deltas: Mapping[str, int | Sequence[int] | Array],
        *,
        barrier: Barrier = Barrier.PATCH,
    ) -> None:
        """Many rows of a row table of nothing but integer delta columns, in columns from here to base: ``keys`` are its
        key columns, distinct together: Arrow or NumPy arrays, or lists. One number is that of all rows, but in the
        last key column. With a barrier the rows begin anew, or are gone.

        Of a row that it writes so the transaction does nothing else, and it does not read it back. A few are written
        one by one: each reader of the table searches every run that is pending.
        """
        self._use(schema)
        rows = len(keys[-1])
        if rows <= SMALL_ROWS:
            few = encode_few_keys([c.type for c in schema.key], [_of_all(key, rows) for key in keys])
            self._count(rows, sum(map(len, few)) + 8 * len(deltas) * rows)
            listed = [[*map(int, _of_all(deltas[column.name], rows))] for column in schema.columns]
            for i, key in enumerate(few):
                values = {} if barrier is Barrier.DELETE else {c: column[i] for c, column in enumerate(listed)}
                puts, added = (values, {}) if barrier else ({}, values)
                self.rows[schema.id, key] = RowOp(barrier, puts, added)
            return
        encoded = _encoded_columns(schema, keys)
        order = pc.sort_indices(encoded)
        at = order.to_numpy()
        columns = tuple(
            Cells(np.asarray(_of_all(deltas[column.name], rows), np.int64)[at]) for column in schema.columns
        )
        run = DeltaRun(encoded.take(order), 0, columns, barrier=barrier)
        self._count(run.rows, run.nbytes)
        self.runs.append((schema.id, run))

    def _check_new(self, schema: TableSchema, keys: Sequence[bytes], deleted: Sequence[bool]) -> None:
        """Raises RowExists for the first that is there when its turn comes: the transaction sees it, or has it twice,
        and no row before has deleted it; SnapshotTooOld where that cannot be seen any more."""
        there = dict[bytes, bool]()
        try:
            for key, gone in zip(keys, deleted, strict=True):
                if not gone and (there[key] if key in there else self._has_row(schema, key)):
                    raise RowExists(table=schema.name, key=caller_key(schema, key))
                there[key] = not gone
        except (RowExists, SnapshotTooOld) as error:
            if not self.deferred:
                raise
            self.refused = self.refused or error

    def rollback(self) -> None:
        """Gives the transaction up; harmless after a commit."""
        self.host.rollback(self)

    def append(self, schema: TableSchema, batch: pa.RecordBatch, *, drop_late: bool = False) -> None:
        """Events. ``drop_late`` as for ``append_stages``; events that may be dropped come after those that may not."""
        if batch.num_rows == 0:
            return
        check_events(batch, self.settings)
        check_tenant(self.lease.tenant, schema, batch)
        self._not_retracted(schema)
        self._count(1, held_bytes(batch))
        self._use(schema)
        batches = self.appends.setdefault((schema.id, drop_late), [])
        batches.append(batch)
        compact(batches)
        self._meet_floor(schema, drop_late)

    def _set(self, schema: TableSchema, key: bytes, op: RowOp, values: Mapping[str, Any]) -> None:
        size = len(key)
        for name, value in values.items():
            length = len(value.encode()) if isinstance(value, str) else len(value) if isinstance(value, bytes) else 8
            if length > self.settings.max_value_bytes:
                raise too_long(name, length, self.settings)
            size += length
        self._count(1, size)
        self._use(schema)
        self.rows[schema.id, key] = op

    def _count(self, operations: int, nbytes: int) -> None:
        limits = self.settings
        if self.operations + operations > limits.max_transaction_operations:
            raise ResourceExhausted(f"a transaction has at most {limits.max_transaction_operations} operations")
        if self.nbytes + nbytes > limits.max_transaction_bytes:
            raise ResourceExhausted(
                f"a transaction has at most {limits.max_transaction_bytes} bytes; this one would have "
                f"{self.nbytes + nbytes}: split it, or stage the data first"
            )
        self.operations += operations
        self.nbytes += nbytes

    def _use(self, schema: TableSchema) -> None:
        self.schemas[schema.id] = schema

    # -- reading own writes -------------------------------------------------------------------------

    def events_of(self, table: int) -> list[pa.RecordBatch]:
        """The events that it brings for a table, without those that are left out as late."""
        return [*self.kept(table), *(staged.batch for staged in self.staged_kept(table))]

    def kept(self, table: int) -> list[pa.RecordBatch]:
        """Of these, the events that were appended directly."""
        may_go = [self._kept(table, batch) for batch in self.appends.get((table, True), ())]
        return [*self.appends.get((table, False), ()), *may_go]

    def sent(self, table: int) -> list[pa.RecordBatch]:
        """The same as the caller sent them, late ones included."""
        return [*self.appends.get((table, False), ()), *self.appends.get((table, True), ())]

    def staged_kept(self, table: int) -> list[Staged]:
        """Of these, the events that were staged. The log keeps the late ones too: see ``kivi.store.retention``."""
        staged = self.staged.get(table, ())
        return [replace(one, batch=self._kept(table, one.batch)) if one.drop_late else one for one in staged]

    def has_late_stages(self) -> bool:
        """Whether some of the staged events are left out, as of ``late``."""
        return any(
            _row_count(one.batch for one in self.staged_kept(table))
            < _row_count(one.batch for one in self.staged.get(table, ()))
            for table in self.late
        )

    def _kept(self, table: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        return remembered(batch, self.schemas[table], self.floors.get(table))

    def count_late(self) -> dict[int, int]:
        """How many events are left out, of the tables of which some are."""
        counts = dict[int, int]()
        for table in self.floors:
            brought = _row_count(self.sent(table)) + _row_count(one.batch for one in self.staged.get(table, ()))
            counts[table] = brought - _row_count(self.events_of(table))
        return {table: late for table, late in counts.items() if late}

    def own_ops(self, schema: TableSchema) -> dict[bytes, RowOp]:
        """This transaction's net operation per row of ``schema``; of aggregates and views, what its writes derive."""
        if schema.kind == "aggregate":
            if schema.source_id in self.retracted:
                raise InvalidArgument(
                    f"the transaction has retracted events of {schema.source!r}, and {schema.name!r} is computed again "
                    "when it commits: read it in a new snapshot",
                    table=schema.name,
                )
            batches = self.events_of(schema.source_id)
            return {key: RowOp(Barrier.PATCH, {}, deltas) for key, deltas in _derived(schema, batches)}
        if schema.kind == "view":
            return self.host.own_view_ops(self, schema)
        return {key: op for (table, key), op in self.rows.items() if table == schema.id}

    def overlay(self, schema: TableSchema, version: Version | None, op: RowOp | None) -> Version | None:
        if op is not None:
            version = apply_op(schema, version, OWN_CTS, op)
        return version if version is not None and version.alive else None


def caller_key(schema: TableSchema, key: bytes) -> tuple[Any, ...]:
    """An encoded row key as the caller wrote it."""
    values = decode_key([c.type for c in schema.key], key)
    return tuple(c.type.from_stored(v, c.name) for c, v in zip(schema.key, values, strict=True))


def encoded_key(schema: TableSchema, key: tuple[Any, ...]) -> bytes:
    return encode_key([c.type for c in schema.key[: len(key)]], key)


def _of_all(column: Any, rows: int) -> Any:
    """One number as a column."""
    return [column] * rows if isinstance(column, int) else column


def _encoded_columns(schema: TableSchema, keys: Sequence[Any]) -> pa.LargeBinaryArray:
    """The keys of ``Txn.write_deltas``."""
    columns = zip(schema.key, (_of_all(column, len(keys[-1])) for column in keys), strict=True)
    arrays = [
        pa.array(column, arrow_type(key.type)) if isinstance(column, list | np.ndarray) else column
        for key, column in columns
    ]
    return encode_key_columns([key.type for key in schema.key], arrays)


def _dicts(columns: Sequence[tuple[int, list[Any]]], rows: Sequence[Any]) -> Iterable[dict[int, Any]]:
    """Columns by their places, as what each row has."""
    if not columns:
        return ({} for _ in rows)
    places = [i for i, _ in columns]
    return (dict(zip(places, values, strict=True)) for values in zip(*(column for _, column in columns), strict=True))


def _indexed(schema: TableSchema, values: Mapping[str, Any]) -> dict[int, Any]:
    return {schema.index_of[name]: value for name, value in values.items()}


def _derived(aggregate: TableSchema, batches: list[pa.RecordBatch]) -> Iterable[tuple[bytes, dict[int, Any]]]:
    if not batches:
        return []
    if _row_count(batches) <= SMALL_EVENTS:
        return derive_few([aggregate], together(batches))[0]
    run = derive(aggregate, together(batches))
    return [(key, deltas) for key, _, deltas in run.items(range(run.rows))]


def _row_count(batches: Iterable[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def prepare(
    txn: Txn,
    view: View,
    derived_at: int,
    new: Generations,
    *,
    request: str | None,
    batch: tuple[str, int] | None,
    row_floors: Mapping[int, int | None],
    newest: Callable[[int, bytes], int | None],
    name_of: Callable[[int], TableSchema | None],
    in_views: Derived,
    rules: Rules | None,
    shards: Shards,
    brought: Brought | None = None,
) -> Single:
    """Derive, validate and encode. ``view`` is the catalog as entered, of ``derived_at`` or later.

    ``new``: the generations that the tables it overwrites will have. ``row_floors``: of aggregates with retention.
    ``rules``, if there are any, judge what it brings: each table after those from whose events they raise some for it.
    ``brought``: what it brings was judged, and derived from, together with what others do.
    """
    if (tenant := txn.lease.tenant) is not None:
        for table in {table for table, _ in txn.rows}:
            tenant.check_views(txn.schemas[table], view.views.get(table, ()))
    start_ts = txn.start_ts if in_views.lease is None else in_views.lease.ts
    commit = Commit(BLIND if txn.blind and in_views.lease is None else start_ts, batch=batch, once=txn.once)
    own_rows = [(new.id(table), key, op) for (table, key), op in txn.rows.items()]
    retracted = [retraction_row(table, names.size) for table, names in txn.retracted.items()]
    commit.rows = sorted((*own_rows, *in_views.rows, *new.rows, *retracted), key=operator.itemgetter(0, 1))
    commit.guards = sorted(txn.guards | in_views.guards)
    events: list[tuple[int, pa.RecordBatch]] = []
    runs = [(new.id(table), run) for table, run in txn.runs]
    commit.runs = [Bulk(table, 0, run.to_buffers()) for table, run in runs]
    sent: list[Bulk] = []  # as the caller sent it: the record leaves out what is dropped as late
    if txn.event_tables:
        sent = _bring(
            txn, commit, view, new, events, runs, row_floors, rules, shards, brought, in_full=request is not None
        )
    if txn.judged_at is not None:
        commit.rule_ts = txn.judged_at.ts
    for table, sequences in sorted(txn.staged_rows.items()):
        named = [Bulk(new.id(table), sequence, []) for sequence in sequences]
        commit.appends += named
        sent += named
    if request is not None:
        retractions = [(txn.schemas[table].origin, which) for table, which in txn.retractions]
        commit.request = (request, payload_digest(*_as_sent(txn, new, sent), retractions=retractions))
    body = commit.encode()
    guards = schema_guards(commit, lambda table: view.by_id.get(table) or txn.schemas.get(table))

    def describe(collision: Collision) -> tuple[str, tuple[Any, ...], str | None]:
        if collision.table == TABLES.id:
            table = decode_key([c.type for c in TABLES.key], collision.key)[0]
            dropped = txn.schemas.get(table) or view.by_id.get(table)
            return (dropped.name if dropped else TABLES.name), (), None
        schema = name_of(collision.table) or txn.schemas.get(collision.table)
        if schema is None:
            return f"table {collision.table}", (), None
        if collision.table == RETRACTIONS.id:
            retracted = view.by_id.get(decode_key([c.type for c in RETRACTIONS.key], collision.key)[0])
            return (retracted or schema).name, (), None
        column = None if collision.column is None or collision.column < 0 else schema.columns[collision.column].name
        return schema.name, caller_key(schema, collision.key), column

    return Single(
        commit,
        body,
        events=events,
        runs=runs,
        derived_at=derived_at,
        schema_guards=guards,
        describe=describe,
        aggregate_newest=newest,
        judged=[(new.id(table), run) for table, run in txn.runs if is_judged(txn.schemas[table])],
    )


def _bring(
    txn: Txn,
    commit: Commit,
    view: View,
    new: Generations,
    events: list[tuple[int, pa.RecordBatch]],
    runs: list[tuple[int, DeltaRun]],
    row_floors: Mapping[int, int | None],
    rules: Rules | None,
    shards: Shards,
    derived: Brought | None,
    *,
    in_full: bool,
) -> list[Bulk]:
    """Adds to a commit the events that its transaction brings, those that rules raise, and what follows from them.

    Gives them as the caller sent them; ``in_full``: with what was dropped as late, which the record leaves out.
    """
    sent_of: dict[int, list[Bulk]] = {}
    txn.late = txn.count_late()
    tables = [view.by_id.get(old) or txn.schemas[old] for old in sorted(txn.event_tables)]
    for known in tables if rules is None else rules.order(tables):
        old = known.id
        table = new.id(old)
        schema = new.of.get(old) or known  # of a table that has gone: the commit will be refused
        as_sent = sent_of[old] = []
        direct = [padded(batch, schema) for batch in txn.kept(old)]
        brought: list[pa.RecordBatch] = []
        if direct:
            joined = coded(together(direct))
            cut = shards.cut_events(schema, joined)
            bulk = Bulk(table, 0, [encode_ipc(trimmed(joined, schema))] if cut is None or in_full else cut)
            if joined.num_rows:
                commit.appends.append(bulk if cut is None else Bulk(table, 0, cut))
                brought.append(joined)
            if old in txn.late and in_full:
                whole = coded(together([padded(batch, schema) for batch in txn.sent(old)]))
                bulk = Bulk(table, 0, [encode_ipc(trimmed(whole, schema))])
            as_sent.append(bulk)
        for staged in txn.staged_kept(old):
            commit.appends.append(Bulk(table, staged.sequence, []))
            as_sent.append(commit.appends[-1])
            brought.append(padded(staged.batch, schema))
        events += [(table, batch) for batch in brought]
        if derived is not None:
            for into, batch in derived.raised:
                commit.appends.append(Bulk(into, 0, [encode_ipc(trimmed(batch, view.by_id[into]))]))
            events += derived.raised
            commit.derived += derived.rows
            commit.rule_ts = derived.rule_ts
            continue
        derive, aggregates = functools.partial(_Deltas.of, brought), new.aggregates_of(old, view)
        found = None if rules is None else rules.derived(schema, aggregates, row_floors, derive, beside=brought)
        if found is not None:
            raised, deltas = found
            commit.appends.append(Bulk(table, 0, [encode_ipc(trimmed(raised.batch, schema))]))
            events.append((table, raised.batch))
        elif brought:
            deltas = derive(aggregates, row_floors)
        else:
            continue
        deltas.add_to(commit, runs, shards)
        if rules is not None:
            rules.judge(schema, deltas.events)
    if rules is not None:
        commit.rule_ts = rules.rule_ts
        commit.derived += rules.rows()
    commit.derived += [late_row(txn.schemas[table].origin, dropped) for table, dropped in txn.late.items()]
    return [bulk for old in sorted(sent_of) for bulk in sent_of[old]]  # whatever order rules ask for


def _as_sent(txn: Txn, new: Generations, appends: Iterable[Bulk]) -> tuple[Commit, list[int]]:
    """The payload as the caller sent it, and the tables that it overwrites.

    Tables go by their origin: a retry may find that they were overwritten since, by its own first attempt too.
    ``appends`` are with late events, of which a retry may find more; what becomes of them is no part of the payload.
    """
    origin = {table: schema.origin for table, schema in txn.schemas.items()}
    origin |= {schema.id: schema.origin for schema in new.of.values()}
    sent = Commit(0)
    sent.rows = sorted(((origin[table], key, op) for (table, key), op in txn.rows.items()), key=lambda row: row[:2])
    sent.guards = sorted(guard._replace(table=origin[guard.table]) for guard in txn.guards)
    sent.appends = [Bulk(origin[bulk.table], bulk.stage, bulk.parts) for bulk in appends]
    return sent, sorted(origin[table] for table in txn.overwritten)


def payload_digest(
    sent: Commit,
    overwritten: Sequence[int] = (),
    *,
    retractions: Sequence[tuple[int, str]] = (),
    each: bool = False,
) -> bytes:
    """16 bytes over what the caller sent: not over what was derived, nor the snapshot it was sent on.

    ``each``: its events are transactions of their own.
    """
    plain = Commit(0, rows=sent.rows, guards=sent.guards)
    hasher = hashlib.blake2b(b"".join(bytes(part) for part in plain.encode()), digest_size=16)
    for bulk in sent.appends:
        checks = [crc32(part) for part in bulk.parts]
        hasher.update(repr((bulk.table, bulk.stage, bulk.nbytes, checks)).encode())
    if overwritten:
        hasher.update(repr(("overwrite", overwritten)).encode())
    if retractions:
        hasher.update(repr(("retract", retractions)).encode())
    if each:
        hasher.update(b"each")
    return hasher.digest()


def merged(
    rows: Iterator[tuple[bytes, Version]], own: dict[bytes, RowOp], schema: TableSchema, txn: Txn, *, reverse: bool
) -> Iterator[tuple[bytes, Version]]:
    """A snapshot's rows with the transaction's own operations folded over them, in key order."""
    mine = ((key, None) for key in sorted(own, reverse=reverse))
    both: Iterator[tuple[bytes, Version | None]] = heapq.merge(rows, mine, key=_key, reverse=reverse)
    for key, found in itertools.groupby(both, _key):
        version = next((version for _, version in found if version is not None), None)
        if key in own:
            version = txn.overlay(schema, version, own[key])
        if version is not None:
            yield key, version


_key: Final = operator.itemgetter(0)
