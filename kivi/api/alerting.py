"""Alerts: the public methods and their arguments, the same wherever the store is."""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from kivi.api.arguments import table_name, takes, type_of
from kivi.errors import InvalidArgument
from kivi.model.alerts import Alert, Notify, check_alert_name, watched
from kivi.model.expressions import Expr, bind, check_own
from kivi.model.lateness import lateness_us
from kivi.model.schema import TableSchema
from kivi.model.slots import parse_duration_us
from kivi.model.types import ColumnType, shown

__all__ = ["AlertArguments", "Alerting", "SilenceArguments", "drop_alert_name"]

_MOMENT: Final = ColumnType("timestamp")


@dataclass(slots=True)
class AlertArguments:
    """Of ``create_alert``."""

    name: str
    on: str
    _: KW_ONLY
    where: Expr
    for_: str | int | dt.timedelta = 0
    notify: Any = None
    lateness: str | int | dt.timedelta = 0
    told: Notify | None = field(init=False)

    def __post_init__(self) -> None:
        check_alert_name(self.name)
        table_name(self.on)
        if not isinstance(self.where, Expr):
            raise InvalidArgument(f"where is the condition, such as kivi.col('p99') > 1, not {shown(self.where)}")
        self.for_, self.lateness = parse_duration_us(self.for_, "for_", 0), lateness_us(self.lateness)
        self.told = Notify.of(self.notify)

    def alert(self, schema: TableSchema) -> Alert:
        """Bound to the table that it is on. Raises SchemaError, InvalidArgument."""
        watched(schema)
        check_own(self.where, f"the condition of the alert {self.name!r}")
        where = bind(self.where, lambda name: type_of(schema, name))
        assert isinstance(self.for_, int)
        assert isinstance(self.lateness, int)
        return Alert(self.name, self.on, where, self.for_, self.lateness, self.told)


@dataclass(slots=True)
class SilenceArguments:
    """Of ``silence``."""

    name: str
    _: KW_ONLY
    until: dt.datetime | int | None
    until_us: int | None = field(init=False)

    def __post_init__(self) -> None:
        check_alert_name(self.name)
        self.until_us = _MOMENT.to_stored(self.until, "until")


def drop_alert_name(name: str) -> str:
    """Of ``drop_alert``. Raises InvalidArgument."""
    return check_alert_name(name)


class Alerting(ABC):
    """What a database does with alerts."""

    @abstractmethod
    @takes(AlertArguments)
    def create_alert(self, wanted: AlertArguments) -> None:
        """Watches the rows of an aggregate with a time slot in its key, and tells somebody when a condition holds.

        ``db.create_alert("checkout p99", on="endpoint_5m", where=kivi.col("p99_us") > 500_000, for_="2m",
        notify="https://...")``. The alert has an instance for each key without its slot, judged on the newest slot that
        is over by event time: pending once the condition holds for it, firing when it has held for ``for_``, resolved
        when it holds no more or there is no row. A slot is over ``lateness`` after its end; 0 unless said otherwise,
        and "auto" is what 0.999 of the last days' events kept to, as ``describe`` says it when the alert is created.
        ``kivi.alerts`` has the definition.

        ``notify`` is a URL, or a dict of ``url``, ``secret`` and ``labels``; None tells nobody. A URL whose path ends
        in ``/api/v2/alerts`` is an Alertmanager's; any other gets the JSON of Alertmanager's webhooks, signed with the
        secret as Standard Webhooks says. Each notification is delivered at least once.

        Raises AlreadyExists, NotFound, SchemaError, InvalidArgument.
        """

    @abstractmethod
    def alerts(self) -> list[dict[str, Any]]:
        """Every instance that is not inactive, and every alert that has none, with ``key`` None.

        Of each: name, on, key (a dict of columns), state, since (event time), value (a dict of the columns of the
        condition, when the state changed last), last_change (the log's time), silenced_until, notify (without what may
        be a secret) and error (why it cannot be evaluated).
        """

    @abstractmethod
    @takes(SilenceArguments)
    def silence(self, wanted: SilenceArguments) -> None:
        """Nobody is told that the alert fires before ``until``, a moment; None ends that. What fires then is told.

        Its states go on, and whoever was told that it fires is told when it is over. Raises NotFound.
        """

    @abstractmethod
    @takes(drop_alert_name)
    def drop_alert(self, name: str) -> None:
        """Drops an alert with its instances and what nobody was told yet. Raises NotFound."""
