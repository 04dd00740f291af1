"""Events that are each a transaction of their own: how a message of them becomes a part of a group (R19).

One insert and its aggregates, once for each event: ten thousand of these are one Arrow batch, one delta run for each
aggregate with a row for each event, and one record. No statement runs once per event. Member i of a message is
(token, i), and has the CTS ``first + i``. That holds for late events that are left out, too: such a member brings
nothing; the last member counts them all.

A message that is refused is refused whole: its caller finds out which event it was by appending halves of it
(``kivi.api.gathering``), each under a token of its own, so that one bad event fails alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import padded, trimmed
from kivi.arrow.dictionaries import coded
from kivi.arrow.ipc import encode_ipc
from kivi.delta.derive import Derivation
from kivi.errors import KiviError, NotFound
from kivi.model.schema import TableSchema
from kivi.mvcc.groups import Answer, Events, Raised
from kivi.mvcc.record import Bulk, Commit, EventsRecord
from kivi.store.catalog import View, late_row, schema_guard
from kivi.store.judging import Judgement
from kivi.store.late_deltas import each_in_time
from kivi.store.retention import Retention, earliest_times
from kivi.store.shards import Shards
from kivi.store.transaction import payload_digest

__all__ = ["prepare_events"]


def prepare_events(
    schema: TableSchema,
    batch: pa.RecordBatch,
    token: str,
    drop_late: bool,
    view: View,
    derived_at: int,
    floor: Callable[[TableSchema], int | None],
    retention: Retention,
    shards: Shards,
    answer: Answer,
    rules: Judgement,
) -> Events:
    """Derives, judges and encodes, without a lock. ``floor`` gives the table's retention floor in microseconds, and
    locks.

    They have read nothing: of a table that was overwritten since its caller looked it up, they go to what is there now.
    Raises NotFound, and what deriving raises: InvalidArgument for a null group key, OutOfRange.
    """
    now = view.by_id.get(schema.id) or view.successor(schema)
    if now is None:
        raise NotFound(f"table {schema.name!r} was dropped", table=schema.name)
    schema = now
    members = batch.num_rows
    whole = coded(padded(batch, schema))
    sent = encode_ipc(trimmed(whole, schema))
    digest = payload_digest(Commit(0, appends=[Bulk(schema.origin, 0, [sent])]), each=True)
    floor_us = floor(schema) if drop_late else None
    kept, places, derived = whole, None, []
    if floor_us is not None:
        times = whole.column(schema.event_time or "").cast(pa.int64()).to_numpy()
        in_time = np.flatnonzero(times >= floor_us)
        if dropped := members - len(in_time):
            kept, places = whole.take(pa.array(in_time)), in_time.astype(np.uint64)
            derived = [late_row(schema.origin, dropped)]
    aggregates = view.aggregates.get(schema.id, ())
    row_floors = retention.newest_of(aggregates)
    events = Derivation(kept)
    runs, late = each_in_time(aggregates, row_floors, events, places)
    derived += [late_row(table, dropped) for table, dropped in late.items()]
    encoded = shards.cut_events(schema, kept) or [sent if kept is whole else encode_ipc(trimmed(kept, schema))]
    raised: list[Raised] = []
    for table in rules.order([schema]):
        if table is schema:
            rules.judge(schema, events, places)
        elif (found := rules.raised(table)) is not None:
            into, of_found = view.aggregates.get(table.id, ()), Derivation(found[0])
            try:
                more, late = each_in_time(into, retention.newest_of(into), of_found, found[1])
            except KiviError:
                rules.give_up(table)
                continue
            runs += more
            derived += [late_row(aggregate, dropped) for aggregate, dropped in late.items()]
            raised.append((table.id, *found))
            rules.judge(table, of_found, found[1])
    derived += rules.rows()
    of_runs = [(table, shards.cut_run(view.by_id.get(table), run)) for table, run in runs]
    bytes_raised = [(table, [encode_ipc(trimmed(batch, view.by_id[table]))], at) for table, batch, at in raised]
    record = EventsRecord(schema.id, (token, digest), derived, encoded, places, of_runs, rules.rule_ts, bytes_raised)
    body = record.encode()
    guards = [schema_guard(table) for table in (schema.id, *(table for table, _, _ in raised))]
    part = Events(derived_at, record, kept, runs, members, answer, guards, body, raised)
    earliest = earliest_times([(schema, [kept])])
    if earliest:
        part.on_check = partial(retention.check, earliest)
    return part
