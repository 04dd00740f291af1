"""Alerts over a connection: the steps of both clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kivi.api.alerting import AlertArguments, SilenceArguments
from kivi.client.steps import Steps
from kivi.model.alerts import AlertStatus, Named
from kivi.model.types import ColumnType
from kivi.wire.codec import from_values, to_expr
from kivi.wire.v1 import alerts_pb2 as pb

if TYPE_CHECKING:
    from kivi.client.core import Core

__all__ = ["alerts", "create_alert", "drop_alert", "silence"]


def create_alert(core: Core, wanted: AlertArguments) -> Steps[None]:
    schema = yield from core.schema(wanted.on)
    alert, told = wanted.alert(schema), wanted.told
    yield from core.call(
        "CreateAlert",
        pb.CreateAlertRequest(
            name=alert.name,
            on=alert.on,
            where=to_expr(alert.where),
            for_us=alert.for_us,
            lateness_us=alert.lateness_us,
            notify=None if told is None else pb.Notify(url=told.url, secret=told.secret, labels=dict(told.labels)),
        ),
    )


def alerts(core: Core) -> Steps[list[dict[str, Any]]]:
    reply = yield from core.call("ListAlerts", pb.ListAlertsRequest())
    return [_status(one).described() for one in reply.alerts]


def _status(one: pb.AlertStatus) -> AlertStatus:
    return AlertStatus(
        name=one.name,
        on=one.on,
        notify=one.notify,
        key=_named(one.key) if one.is_instance else None,
        state=one.state,
        since_us=one.since_us if one.HasField("since_us") else None,
        value=_named(one.value),
        changed_us=one.changed_us if one.HasField("changed_us") else None,
        silenced_us=one.silenced_us if one.HasField("silenced_us") else None,
        error=one.error,
    )


def _named(sent: Iterable[pb.NamedValue]) -> list[Named]:
    return [Named(each.name, ColumnType.read(each.type), *from_values([each.value])) for each in sent]


def silence(core: Core, wanted: SilenceArguments) -> Steps[None]:
    yield from core.call("SilenceAlert", pb.SilenceAlertRequest(name=wanted.name, until_us=wanted.until_us))


def drop_alert(core: Core, name: str) -> Steps[None]:
    yield from core.call("DropAlert", pb.DropAlertRequest(name=name))
