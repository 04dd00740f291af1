"""One evaluation of an alert: what is due, and the transaction that it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from kivi.alerts.judging import Clock, Span, Told, judged
from kivi.alerts.rows import Kept, Rows, text_of
from kivi.arrow.columns import stored_rows
from kivi.encoding.keys import encode_key
from kivi.encoding.projection import Projection
from kivi.errors import NotFound, ResourceExhausted
from kivi.model.alerts import FIRING, PENDING, Alert, Named, watched
from kivi.model.lateness import AUTO_US
from kivi.model.schema import TableSchema
from kivi.model.types import MOMENT_MIN_US
from kivi.mvcc.leases import Lease
from kivi.store.catalog import ALERT_INSTANCES, ALERT_NOTIFICATIONS, ALERTS
from kivi.store.facade import Store
from kivi.store.rollups import RowsRead
from kivi.store.transaction import Txn

__all__ = ["INSTANCES_MAX", "Evaluator"]

INSTANCES_MAX: Final = 10_000
"""Of one alert. A condition that holds for more keys than that says something about the table, and not about keys."""

Held = dict[bytes, tuple[str, list[tuple[int, str]]]]
"""Of each instance its key, as text, and the slots for which the condition holds, with the values of their rows."""


class Evaluator:
    """Not thread safe, but for ``create``."""

    def __init__(self, store: Store, rows: Rows) -> None:
        self._store = store
        self._rows = rows
        self._idle: dict[str, tuple[int, int, int]] = {}
        """Of alerts of which the newest evaluation found nothing to write: behind which one it came, up to when it
        judged, and as of which commit."""

    def create(self, alert: Alert, schema: TableSchema) -> None:
        """The alert begins with the newest slot that is over now. Raises AlreadyExists."""
        slot = watched(schema)[1]
        if alert.lateness_us == AUTO_US:
            alert = replace(alert, lateness_us=self._store.lateness.auto_us(self._source(schema)))

        def clock_of(txn: Txn) -> Clock:
            now_us = self._store.committer.now_us()
            newest = self._store.reads.extreme_time(txn.lease, self._source(schema), "max")
            return Clock(now_us, MOMENT_MIN_US if newest is None else min(newest, now_us))

        self._rows.create(alert, clock_of, lambda clock: slot.start(_judged_to_us(clock, alert)))

    def evaluate(self, name: str) -> None:
        """Evaluates an alert, if something is due. Raises Conflict where it was changed meanwhile, or evaluated by
        another node; and what reading its table raises."""
        store = self._store
        txn = store.transaction()
        try:
            row = txn.get(ALERTS, [(name,)])[0]
            if row is not None:
                self._evaluate(txn, Kept.of({**row, "name": name}))
                if txn.wrote:
                    store.commits.commit_wait(txn)
        finally:
            store.commits.rollback(txn)

    def _evaluate(self, txn: Txn, kept: Kept) -> None:
        schema = self._store.catalog.table(kept.alert.on, txn.start_ts)
        alert = kept.alert.bound(schema)
        slot = watched(schema)[1]
        now_us = self._store.committer.now_us()
        clock = kept.clock.at(now_us, None)
        newest = self._store.reads.extreme_time(txn.lease, self._source(schema), "max", clock.clock_us)
        is_ahead = newest is not None and min(newest, clock.now_us) > clock.clock_us
        clock = kept.clock.at(now_us, newest)
        time_us = _judged_to_us(clock, alert)
        over_us = max(slot.start(time_us), kept.over_us)
        instances = self._rows.instances(txn.lease, alert.name)
        silenced = alert.notify is None or kept.is_silenced(clock.now_us)
        due = over_us != kept.over_us or any(
            (one.state == PENDING and one.since_us + alert.for_us <= time_us)
            or (one.state == FIRING and not one.told and not silenced)
            for one, _ in instances.values()
        )
        last = self._store.changes.tail_points(schema, kept.seen, 1, txn.start_ts, 0).last
        at = (kept.seen, over_us, last)
        if not (is_ahead or kept.error or (due and self._idle.get(alert.name) != at)):
            return
        span = Span(slot, slot.start(kept.over_us - 1), over_us, time_us)
        held = self._held(txn.lease, schema, alert, span)
        told, changes = kept.told, 0
        for instance in sorted(instances.keys() | held.keys()):
            before, key = instances.get(instance, (None, ""))
            key, slots = held.get(instance, (key, []))
            after, said = judged(before, slots, span, for_us=alert.for_us, now_us=clock.now_us, silenced=silenced)
            if after is None and before is not None:
                txn.delete(ALERT_INSTANCES, (alert.name, instance))
            elif after is not None and after != before:
                columns = {name: getattr(after, name) for name in _INSTANCE}
                txn.put(ALERT_INSTANCES, (alert.name, instance), {"key": key, **columns})
            for one in said:
                txn.insert(ALERT_NOTIFICATIONS, (alert.name, told), _notification(one, instance, key, clock.now_us))
                told += 1
            changes += after != before or bool(said)
        if is_ahead or kept.error or changes or last > kept.seen:
            txn.put(ALERTS, (alert.name,), Kept.position(txn.start_ts, clock, over_us, told))
        else:
            self._idle[alert.name] = at

    # -- what it reads ------------------------------------------------------------------------------

    def _source(self, schema: TableSchema) -> TableSchema:
        found = self._store.catalog.schema_of(schema.source_id)
        if found is None:
            raise NotFound(f"table {schema.source!r} was dropped", table=schema.name)
        return found

    def _held(self, lease: Lease, schema: TableSchema, alert: Alert, span: Span) -> Held:
        """Where the condition holds. Raises OutOfRange for a value that its column cannot hold, ResourceExhausted."""
        place, _ = watched(schema)
        values = alert.value_columns(schema)
        keys = [column for i, column in enumerate(schema.key) if i != place]
        types, slot = [column.type for column in keys], schema.key[place].name
        projection = Projection(schema, (*schema.key_names, *values), None)
        held: Held = {}
        self._store.reads.check_visible(lease, schema)
        selected = self._store.reads.rollups.selected(
            lease, schema, alert.where, (None, None), (span.first, span.over), RowsRead()
        )
        for portion in selected:
            for batch in projection.batches([portion], None):
                for row in stored_rows(batch):
                    instance = encode_key(types, [row[column.name] for column in keys])
                    if instance not in held:
                        if len(held) == INSTANCES_MAX:
                            raise ResourceExhausted(
                                f"the condition of the alert {alert.name!r} holds for more than {INSTANCES_MAX:,} keys "
                                f"of {schema.name!r}: make it narrower, or put the alert on a coarser aggregate"
                            )
                        held[instance] = text_of(Named(c.name, c.type, row[c.name]) for c in keys), []
                    value = text_of(Named(name, schema.output_type(name), row[name]) for name in values)
                    held[instance][1].append((row[slot], value))
        return held


_INSTANCE: Final = ("state", "since_us", "holds_us", "value", "changed_us", "told")


def _judged_to_us(clock: Clock, alert: Alert) -> int:
    """The moment that is judged: slots that end by it are over. No event is before the first moment that there is."""
    return max(clock.clock_us - alert.lateness_us, MOMENT_MIN_US)


def _notification(told: Told, instance: bytes, key: str, now_us: int) -> dict[str, Any]:
    return {
        "instance": instance,
        "key": key,
        "starts_us": told.starts_us,
        "ends_us": told.ends_us,
        "value": told.value,
        "made_us": now_us,
    }
