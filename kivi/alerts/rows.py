"""Alerts, their instances and their notifications as rows of the store: read and written in stored form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from kivi.alerts.judging import Clock, Instance, Told
from kivi.errors import AlreadyExists, Conflict, NotFound
from kivi.model.alerts import Alert, AlertStatus, Named
from kivi.model.scans import Scan
from kivi.model.types import ColumnType
from kivi.mvcc.leases import Lease
from kivi.store.catalog import ALERT_INSTANCES, ALERT_NOTIFICATIONS, ALERTS
from kivi.store.facade import Store
from kivi.store.transaction import Txn

__all__ = ["Kept", "Notification", "Rows", "named_of", "text_of"]

R = TypeVar("R")
_TURN: Final = ""
"""The name of the row that says which node evaluates; no alert is called so."""


def text_of(values: Iterable[Named]) -> str:
    return json.dumps(
        [[each.name, str(each.type), each.value.hex() if each.type.name == "bytes" and each.value else each.value]
         for each in values],
        separators=(",", ":"),
    )  # fmt: skip


def named_of(text: str) -> list[Named]:
    found = []
    for name, kind, value in json.loads(text) if text else ():
        type_ = ColumnType.read(kind)
        found.append(Named(name, type_, bytes.fromhex(value) if type_.name == "bytes" and value else value))
    return found


@dataclass(frozen=True, slots=True)
class Kept:
    """An alert as it is kept. ``seen``: the snapshot of its newest evaluation, which judged the slots that begin before
    ``over_us``; ``told``: how many notifications were made."""

    alert: Alert
    silenced_us: int | None
    seen: int
    clock: Clock
    over_us: int
    told: int
    error: str

    @staticmethod
    def of(row: dict[str, Any]) -> Kept:
        return Kept(
            Alert.from_json(row["name"], row["definition"]),
            row["silenced_us"],
            row["seen"],
            Clock(row["now_us"], row["clock_us"]),
            row["over_us"],
            row["told"],
            row["error"] or "",
        )

    def is_silenced(self, now_us: int) -> bool:
        return self.silenced_us is not None and now_us < self.silenced_us

    @staticmethod
    def position(seen: int, clock: Clock, over_us: int, told: int) -> dict[str, Any]:
        """The columns that an evaluation writes."""
        return {
            "seen": seen,
            "now_us": clock.now_us,
            "clock_us": clock.clock_us,
            "over_us": over_us,
            "told": told,
            "error": "",
        }


@dataclass(frozen=True, slots=True)
class Notification:
    """One that is yet to be delivered. ``number``: in the order in which they were made, for its alert."""

    alert: str
    number: int
    instance: bytes
    key: str
    told: Told
    made_us: int

    @staticmethod
    def of(row: dict[str, Any]) -> Notification:
        told = Told(row["starts_us"], row["ends_us"], row["value"])
        return Notification(row["alert"], row["number"], row["instance"], row["key"], told, row["made_us"])


class Rows:
    """Thread safe: each change is a transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- reading ----------------------------------------------------------------------------------

    def scan(self, lease: Lease, table: Any, wanted: Scan) -> Iterator[dict[str, Any]]:
        for batch in self._store.scan(lease, table, wanted):
            yield from batch.to_pylist()

    def kept(self, lease: Lease) -> list[Kept]:
        return [Kept.of(row) for row in self.scan(lease, ALERTS, Scan()) if row["name"] != _TURN]

    def one_kept(self, lease: Lease, name: str) -> Kept | None:
        rows = self.scan(lease, ALERTS, Scan(prefix=(name,)))
        return next((Kept.of(row) for row in rows if row["name"] != _TURN), None)

    def any(self) -> bool:
        with self._store.snapshots.opened() as lease:
            return bool(list(self.scan(lease, ALERTS, Scan(columns=("name",), limit=1))))

    def instances(self, lease: Lease, alert: str) -> dict[bytes, tuple[Instance, str]]:
        """Of an alert: the instance and its key, as text, under the bytes that are its name."""
        return {
            row["instance"]: (
                Instance(
                    row["state"], row["since_us"], row["holds_us"], row["value"], row["changed_us"], row["told"]
                ),
                row["key"],
            )
            for row in self.scan(lease, ALERT_INSTANCES, Scan(prefix=(alert,)))
        }  # fmt: skip

    def notifications(self, lease: Lease, alert: str, most: int) -> list[Notification]:
        """The oldest that wait."""
        rows = self.scan(lease, ALERT_NOTIFICATIONS, Scan(prefix=(alert,), limit=most))
        return [Notification.of(row) for row in rows]

    def listed(self) -> list[AlertStatus]:
        """Every instance that is not inactive, and every alert that has none."""
        found: list[AlertStatus] = []
        with self._store.snapshots.opened() as lease:
            for kept in self.kept(lease):
                alert = kept.alert
                shown = "" if alert.notify is None else alert.notify.shown
                nothing = AlertStatus(alert.name, alert.on, shown, silenced_us=kept.silenced_us, error=kept.error)
                found += [
                    replace(
                        nothing,
                        key=named_of(key),
                        state=one.state,
                        since_us=one.since_us,
                        value=named_of(one.value),
                        changed_us=one.changed_us,
                    )
                    for one, key in self.instances(lease, alert.name).values()
                ] or [nothing]
        return found

    # -- changing ---------------------------------------------------------------------------------

    def run(self, work: Callable[[Txn], R]) -> R:
        """A transaction, again after a conflict."""
        commits = self._store.commits

        def committed(txn: Txn) -> R:
            result = work(txn)
            if txn.wrote:
                commits.commit_wait(txn)
            return result

        return commits.again(self._store.transaction, committed)

    def create(self, alert: Alert, clock_of: Callable[[Txn], Clock], over_us: Callable[[Clock], int]) -> None:
        """Raises AlreadyExists."""

        def work(txn: Txn) -> None:
            if txn.get(ALERTS, [(alert.name,)])[0] is not None:
                raise AlreadyExists(f"there is an alert {alert.name!r} already: drop it first, or use another name")
            clock = clock_of(txn)
            position = Kept.position(txn.start_ts, clock, over_us(clock), 0)
            txn.insert(ALERTS, (alert.name,), {"definition": alert.to_json(), "silenced_us": None, **position})

        self.run(work)

    def drop(self, name: str) -> None:
        """Raises NotFound."""

        def work(txn: Txn) -> None:
            self._known(txn, name)
            txn.delete(ALERTS, (name,))
            for instance in self.instances(txn.lease, name):
                txn.delete(ALERT_INSTANCES, (name, instance))
            for row in self.scan(txn.lease, ALERT_NOTIFICATIONS, Scan(prefix=(name,), columns=("number",))):
                txn.delete(ALERT_NOTIFICATIONS, (name, row["number"]))

        self.run(work)

    def silence(self, name: str, until_us: int | None) -> None:
        """Raises NotFound."""

        def work(txn: Txn) -> None:
            self._known(txn, name)
            txn.put(ALERTS, (name,), {"silenced_us": until_us})

        self.run(work)

    def _known(self, txn: Txn, name: str) -> None:
        if txn.get(ALERTS, [(name,)], ["name"])[0] is None:
            known = ", ".join(repr(kept.alert.name) for kept in self.kept(txn.lease)) or "none yet"
            raise NotFound(f"there is no alert {name!r}; alerts are: {known}")

    def fail(self, name: str, error: str) -> None:
        """Why the alert cannot be evaluated; it is as it was."""

        def work(txn: Txn) -> None:
            row = txn.get(ALERTS, [(name,)], ["error"])[0]
            if row is not None and row["error"] != error:
                txn.put(ALERTS, (name,), {"error": error})

        self.run(work)

    def delivered(self, sent: Sequence[Notification]) -> None:
        """Forgets notifications, in one transaction: those that are still there. An alert that was made anew under the
        name of another begins to number its own where that one did."""

        def work(txn: Txn) -> None:
            names = [(one.alert, one.number) for one in sent]
            for one, row in zip(sent, txn.get(ALERT_NOTIFICATIONS, names), strict=True):
                if row is not None and Notification.of({**row, "alert": one.alert, "number": one.number}) == one:
                    txn.delete(ALERT_NOTIFICATIONS, (one.alert, one.number))

        self.run(work)

    def take_turn(self, node: str, now_us: int, turn_us: int) -> bool:
        """Whether it is this node's turn to evaluate, until ``turn_us`` from now unless it asks again."""
        txn = self._store.transaction()
        try:
            row = txn.get(ALERTS, [(_TURN,)], ["definition", "now_us"])[0]
            if row is not None and row["now_us"] > now_us:
                if row["definition"] != node:
                    return False
                if row["now_us"] - now_us > turn_us // 2:
                    return True
            txn.put(ALERTS, (_TURN,), {"definition": node, "now_us": now_us + turn_us})
            self._store.commits.commit_wait(txn)
            return True
        except Conflict:
            return False
        finally:
            self._store.commits.rollback(txn)
