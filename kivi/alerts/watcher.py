"""The thread that evaluates a store's alerts, and rules whose judgement is a pattern; what callers do with these."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from kivi.alerts.delivery import Delivery
from kivi.alerts.evaluator import Evaluator
from kivi.alerts.rows import Rows
from kivi.errors import (
    CommitUnknown,
    Conflict,
    DataLoss,
    InvalidArgument,
    KiviError,
    ResourceExhausted,
    SnapshotTooOld,
    Unavailable,
)
from kivi.model.alerts import FIRING, PENDING, RESOLVED, Alert, AlertStatus
from kivi.model.rules import Rule
from kivi.model.types import check_moment
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.store.facade import Store
from kivi.store.raising import Raising

__all__ = ["Alerts"]

_log = logging.getLogger("kivi.alerts")
_PAUSE_S: Final = 30.0
"""So long an alert or a rule that cannot be evaluated is left alone."""
_SHARE: Final = 3.0
"""A rule is left alone so many times as long as its evaluation took."""
_TURN_US: Final = 15_000_000
_JOIN_S: Final = 10.0
_PASSING: Final = (CommitUnknown, Conflict, SnapshotTooOld, Unavailable)
"""What another round will not meet again, or no alert is to blame for."""


class Alerts:
    """Thread safe. Its thread runs while there is an alert, or such a rule, unless the store has no background or
    follows another one; in a cluster always, as an alert may come from another node."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows = Rows(store)
        self._evaluator = Evaluator(store, self._rows)
        self._raising = Raising(store)
        self._delivery: Delivery | None = None
        self._name = secrets.token_hex(8)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._paused: dict[tuple[str, str, int], float] = {}
        """By kind, name and newest evaluation or id, so that one that is created anew is another."""
        if self._evaluates and (store.prefix is not None or self._rows.any() or self._matched()):
            self._start()

    @property
    def _evaluates(self) -> bool:
        return self._store.settings.background and not self._store.is_follower

    # -- for callers --------------------------------------------------------------------------------

    def create(self, alert: Alert) -> None:
        """``alert.where`` is bound to the table. Raises NotFound, SchemaError, InvalidArgument, AlreadyExists."""
        schema = self._store.table(alert.on)
        if schema.state != "ready":
            raise InvalidArgument(
                f"{alert.on!r} is still being built: declare the alert {alert.name!r} when it is ready"
            )
        self._evaluator.create(alert.bound(schema), schema)
        if self._evaluates:
            self._start()

    def create_rule(self, rule: Rule, *, backfill: bool = False) -> None:
        """See ``kivi.store.rules``."""
        self._store.create_rule(rule, backfill=backfill)
        if rule.match is not None and self._evaluates:
            self._start()

    def _matched(self) -> list[Rule]:
        return [rule for rule in self._store.catalog.visible.rules.values() if rule.match is not None]

    def listed(self) -> list[AlertStatus]:
        self._store.check_open()
        return self._rows.listed()

    def silence(self, name: str, until_us: int | None) -> None:
        """Raises NotFound, InvalidArgument for a time that no datetime holds: nobody could list the alerts."""
        self._rows.silence(name, None if until_us is None else check_moment(until_us, "until"))

    def drop(self, name: str) -> None:
        """Raises NotFound."""
        self._rows.drop(name)

    def table_of(self, name: str) -> str | None:
        """The table that an alert is on; None if there is no such alert."""
        with self._store.snapshots.opened() as lease:
            kept = self._rows.one_kept(lease, name)
            return None if kept is None else kept.alert.on

    def stats(self) -> dict[str, int | float]:
        """Instances as they are now; notifications as this process has delivered them."""
        found = self._rows.listed()
        states, delivery = Counter(one.state for one in found if one.key is not None), self._delivery
        return {
            "alerts_pending": states[PENDING],
            "alerts_firing": states[FIRING],
            "alerts_resolved": states[RESOLVED],
            "alerts_failing": len({one.name for one in found if one.error}),
            "alert_notifications_waiting": 0 if delivery is None else delivery.waiting,
            "alert_notifications_sent": 0 if delivery is None else delivery.sent,
            "alert_notifications_failed": 0 if delivery is None else delivery.failed,
            "alert_notifications_given_up": 0 if delivery is None else delivery.given_up,
        }

    # -- the thread ---------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="kivi-alerts", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread, before its store is closed. Harmless twice."""
        self._stop.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)
        if self._delivery is not None:
            self._delivery.close()

    def _run(self) -> None:
        use_batch_scheduling()
        while not self._stop.wait(self._store.settings.alerts_every_s):
            try:
                self.round()
            except KiviError as error:
                _log.debug("alerts are not evaluated now: %s", error.message)
            except Exception:
                _log.exception("evaluating alerts has failed")

    def round(self) -> None:
        """Evaluates every alert and rule for which something is due, and begins to deliver what waits."""
        with self._store.snapshots.opened() as lease:
            alerts = self._rows.kept(lease)
        rules, known = self._matched(), self._store.catalog.visible.by_name
        lacked = {on for kept in alerts if self._store.shards.is_partial(known.get(on := kept.alert.on))}
        if not (alerts or rules) or not self._has_turn(is_partial=bool(lacked)):
            return
        for kept in alerts:
            alert = kept.alert
            self._evaluate(
                ("alert", alert.name, kept.seen),
                partial(_refuse, alert) if alert.on in lacked else partial(self._evaluator.evaluate, alert.name),
                partial(self._rows.fail, alert.name),
            )
        for rule in rules:  # behind the alerts, as it may take its time
            self._evaluate(
                ("rule", rule.name, rule.id),
                partial(self._raising.evaluate, rule),
                lambda error, rule=rule: self._rows.run(lambda txn: self._raising.fail(txn, rule, error)),  # type: ignore[misc]
            )
        if any(kept.alert.notify is not None for kept in alerts):
            if self._delivery is None:
                self._delivery = Delivery(self._store, self._rows)
            self._delivery.round(alerts)

    def _evaluate(self, what: tuple[str, str, int], evaluate: Callable[[], None], fail: Callable[[str], None]) -> None:
        if self._stop.is_set() or time.monotonic() < self._paused.get(what, 0.0):
            return
        kind, name, _ = what
        began, pause_s = time.thread_time(), 0.0
        try:
            evaluate()
            if kind == "rule":
                pause_s = _SHARE * (time.thread_time() - began)
        except DataLoss:
            raise
        except KiviError as error:
            if isinstance(error, _PASSING) and not isinstance(error, ResourceExhausted):
                _log.debug("the %s %r is not evaluated now: %s", kind, name, error.message)
            else:
                pause_s = _PAUSE_S
                _log.warning("the %s %r cannot be evaluated: %s", kind, name, error.message)
                fail(error.message)
        now = time.monotonic()
        self._paused = {one: until for one, until in self._paused.items() if until > now}
        self._paused[what] = now + pause_s

    def _has_turn(self, *, is_partial: bool) -> bool:
        """Whether this process evaluates: in a cluster one node does, as long as it says so every few seconds: one that
        has all of the tables, unless none is there; ``is_partial``: this one does not.

        Two that think so do no harm: of two evaluations that begin with the same one, one conflicts.
        """
        if self._store.prefix is None:
            return True
        if is_partial and self._store.shards.is_whole_elsewhere():
            return False
        return self._rows.take_turn(self._name, self._store.committer.now_us(), _TURN_US)


def _refuse(alert: Alert) -> None:
    raise InvalidArgument(
        f"{alert.on!r} is sharded, and its alerts are judged by a node that holds all shards, of which none was heard "
        "lately: start one"
    )
