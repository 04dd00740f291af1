"""What another node's gateway published, as parts of a group: the inverse of preparing (``kivi.store.commits``).

A frame that this process published is judged as the parts that it was made of. Of any other, the entries are decoded to
the same parts, except that nobody is told what becomes of them. A stage that was used before, or given up, is not read:
the log may have been cut behind it, and the commit that names it will not find it. Runs of aggregates and events of
tables that are not there (any more) need no schema: such an entry is stale, and nothing of it is applied.
"""

from __future__ import annotations

from functools import partial

from kivi.encoding.event_names import EventNames
from kivi.errors import DataLoss
from kivi.log import Entry, Kind
from kivi.log.replicated import Arrived
from kivi.model.schema import TableSchema
from kivi.mvcc.groups import Events, Outcome, Part, Single, told
from kivi.mvcc.record import (
    decode_abort,
    decode_commit,
    decode_events,
    decode_floor,
    decode_gather,
    decode_pin,
    decode_stage,
    is_events,
)
from kivi.mvcc.replicated import Proposed
from kivi.mvcc.verdict import Collision
from kivi.store.catalog import changes, is_judged, schema_guard, schema_guards
from kivi.store.host import Contents
from kivi.store.replay import decoded_columns
from kivi.store.staging import data_of, sequences_of
from kivi.store.touched_rows import complete

__all__ = ["decoded"]


def decoded(store: Contents, arrived: Arrived) -> list[Part | Proposed]:
    """The entries of a frame, in order. Raises DataLoss."""
    return [
        _decoded(store, entry, arrived.frame.derived_at)
        for entry in arrived.frame.entries
        if not entry.kind.is_about_nodes
    ]


def _decoded(store: Contents, entry: Entry, derived_at: int) -> Part | Proposed:
    body = entry.body[0]
    match entry.kind:
        case Kind.COMMIT if is_events(body):
            return _events(store, body, entry.numbers, derived_at)
        case Kind.COMMIT:
            return _single(store, body, derived_at)
        case Kind.STAGE:
            return Proposed(decode_stage(body), _nobody)
        case Kind.ABORT:
            return Proposed(decode_abort(body), _nobody)
        case Kind.FLOOR:
            return Proposed(decode_floor(body), _nobody)
        case Kind.GATHER:
            return Proposed(decode_gather(body), _nobody)
        case Kind.PIN:
            return Proposed(decode_pin(body), _nobody)
        case _:
            raise DataLoss(f"a frame has an entry of kind {entry.kind.name} among its records")


def _nobody(error: BaseException | None, number: int) -> None:
    pass


def _told_nobody(outcome: Outcome) -> None:
    pass


def _single(store: Contents, body: bytes | memoryview, derived_at: int) -> Single:
    commit = decode_commit(body)
    catalog_rows = changes(commit.rows)
    new = store.catalog.entered.with_rows(catalog_rows, 0).by_id if catalog_rows else {}

    def known(table: int) -> TableSchema | None:  # what it defines it may write, too
        return new.get(table) or store.catalog.schema_of(table)

    commit.derived = store.shards.held_rows(commit.derived, known)
    bulks = (*commit.appends, *commit.runs)
    with store.committer.entry_lock:
        is_there = all(store.stages.is_live(sequence) for sequence in sequences_of(bulks))
    runs = [
        (schema, run)
        for bulk in commit.runs
        if is_there and (schema := known(bulk.table)) is not None
        for run in store.shards.read_run(schema, data_of(store.log, bulk))
    ]
    part = Single(
        commit,
        [body],
        events=[
            (bulk.table, batch)
            for bulk in commit.appends
            if is_there and (source := known(bulk.table)) is not None and source.kind == "event"
            for batch in store.shards.read_events(source, data_of(store.log, bulk))[0]
        ],
        runs=[(schema.id, run) for schema, run in runs],
        derived_at=derived_at,
        schema_guards=schema_guards(commit, known),
        describe=_undescribed,
        aggregate_newest=lambda table, key: None,
        judged=[(schema.id, run) for schema, run in runs if is_judged(schema)],
    )
    part.retracted = [(bulk.table, EventNames.decode(bulk.parts[0])) for bulk in commit.retractions]

    def check() -> None:
        for bulk in bulks:
            if bulk.stage:
                named = known(bulk.table)
                store.stages.check_live(bulk.stage, bulk.table if named is None else named.origin)

    def enter(cts: int) -> None:
        store.stages.use(sequences_of(bulks), cts)
        if any(bulk.stage for bulk in commit.appends):  # of what came otherwise the late ones are left out already
            part.events = [
                (table, batch)
                for table, whole in part.events
                if (source := known(table)) is not None
                for batch in store.retention.staged(source, [whole], cts)
            ]
        if catalog_rows:
            store.catalog.enter(catalog_rows, cts)

    if commit.gathered_since:
        part.on_entry = partial(complete, part, known)
    part.on_check, part.on_enter = check, enter
    if catalog_rows:
        part.on_apply = partial(store.catalog.apply, catalog_rows)
    return part


def _undescribed(collision: Collision) -> tuple[str, tuple[object, ...], str | None]:
    return "", (), None


def _events(store: Contents, body: bytes | memoryview, members: int, derived_at: int) -> Events:
    record = decode_events(body)
    batch, runs, raised = decoded_columns(record, store.catalog.schema_of, store.shards)
    guards = [schema_guard(table) for table in (record.table, *(table for table, _, _ in record.raised))]
    return Events(derived_at, record, batch, runs, members, told(_told_nobody), guards, [body], raised)
