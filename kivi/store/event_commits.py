"""Events that are each a transaction of their own: how a message of them becomes a part of a group (R19).

One insert and its aggregates, once for each event: ten thousand of these are one Arrow batch, one delta run for each
aggregate with a row for each event, and one record. No statement runs once per event. Of several events that rules
raise from one, which are of one commit, the deltas are put together, as those of any commit are (``derive_each``).
Member i of a message is (token, i), and has the CTS ``first + i``. That holds for late events that are left out, too:
such a member brings nothing; the last member counts them all.

Transactions of any kind that bring one event each are derived and judged by the same columns where they are prepared
together (``derived_together``), and are records of their own: what is one for all of them is the work.

A message that is refused is refused whole: its caller finds out which event it was by appending halves of it
(``kivi.api.gathering``), each under a token of its own, so that one bad event fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import padded, trimmed
from kivi.arrow.dictionaries import coded, together
from kivi.arrow.ipc import encode_ipc
from kivi.delta.derive import Derivation
from kivi.delta.ops import Barrier, RowOp
from kivi.delta.runs import DeltaRun
from kivi.errors import NotFound
from kivi.model.schema import TableSchema
from kivi.mvcc.groups import Answer, Events, Raised
from kivi.mvcc.record import Bulk, Commit, EventsRecord
from kivi.store.catalog import View, late_row, schema_guard
from kivi.store.judging import Judgement
from kivi.store.late_deltas import each_in_time
from kivi.store.retention import Retention, earliest_times
from kivi.store.shards import Shards
from kivi.store.transaction import Brought, payload_digest

__all__ = ["derived_together", "prepare_events"]


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
    kept, at, derived = whole, np.arange(members), []
    if floor_us is not None:
        times = whole.column(schema.event_time or "").cast(pa.int64()).to_numpy()
        in_time = np.flatnonzero(times >= floor_us)
        if dropped := members - len(in_time):
            kept, at = whole.take(pa.array(in_time)), in_time
            derived = [late_row(schema.origin, dropped)]
    runs, late, raised = _derived(schema, Derivation(kept, commits=at), view, retention, rules)
    derived += [late_row(table, dropped) for table, dropped in late]
    encoded = shards.cut_events(schema, kept) or [sent if kept is whole else encode_ipc(trimmed(kept, schema))]
    derived += rules.rows()
    of_runs = [(table, shards.cut_run(view.by_id.get(table), run)) for table, run in runs]
    bytes_raised = [(table, [encode_ipc(trimmed(batch, view.by_id[table]))], at) for table, batch, at in raised]
    places = None if kept is whole else at.astype(np.uint64)
    record = EventsRecord(schema.id, (token, digest), derived, encoded, places, of_runs, rules.rule_ts, bytes_raised)
    body = record.encode()
    guards = [schema_guard(table) for table in (schema.id, *(table for table, _, _ in raised))]
    part = Events(derived_at, record, kept, runs, members, answer, guards, body, raised)
    earliest = earliest_times([(schema, [kept])])
    if earliest:
        part.on_check = partial(retention.check, earliest)
    return part


def _derived(
    schema: TableSchema,
    events: Derivation,
    view: View,
    retention: Retention,
    rules: Judgement,
) -> tuple[list[tuple[int, DeltaRun]], list[tuple[int, int]], list[Raised]]:
    """What events that are each a commit derive and raise: the runs, how many each aggregate left out as late, and what
    was raised, each at the number of its commit."""
    aggregates = view.aggregates.get(schema.id, ())
    runs, left_out = each_in_time(aggregates, retention.newest_of(aggregates), events)
    late, raised = [*left_out.items()], list[Raised]()
    for table in rules.order([schema]):
        if table is schema:
            rules.judge(schema, events)
            continue
        into = view.aggregates.get(table.id, ())
        if (found := rules.derived(table, into, retention.newest_of(into), each_in_time, each=True)) is not None:
            events, (more, left_out) = found
            runs += more
            late += left_out.items()
            raised.append((table.id, events.batch, events.commits))
            rules.judge(table, events)
    return runs, late, raised


def derived_together(
    schema: TableSchema, brought: Sequence[pa.RecordBatch], view: View, retention: Retention, rules: Judgement
) -> list[Brought] | None:
    """What transactions that bring one event of a table each derive and raise, as each of them alone would.

    ``rules`` judge so many members. None, or a KiviError: one of them is not as the others are, and each goes alone.
    """
    ordered = rules.order([schema])
    if any(rule.own_events for table in ordered if table is not schema for rule in view.rules_of(table)):
        return None  # which may add several that one event has raised
    events = Derivation(together([padded(batch, schema) for batch in brought]), commits=np.arange(len(brought)))
    runs, late, raised = _derived(schema, events, view, retention, rules)
    if late:
        return None
    rows: list[list[tuple[int, bytes, RowOp]]] = [[] for _ in brought]
    for table, run in runs:
        for key, place, deltas in run.items(range(run.rows)):
            rows[place].append((table, key, RowOp(Barrier.PATCH, {}, deltas)))
    of_rules: list[list[tuple[int, pa.RecordBatch]]] = [[] for _ in brought]
    for table, batch, places in raised:
        first = np.searchsorted(places, np.arange(len(brought) + 1)).tolist()
        for place, (start, end) in enumerate(pairwise(first)):
            if start < end:
                of_rules[place].append((table, batch.slice(start, end - start)))
    return [Brought([*rows[i], *rules.rows(i)], of_rules[i], rules.rule_ts) for i in range(len(brought))]
