"""The calls of alerts: decode, ask, encode."""

from __future__ import annotations

from collections.abc import Iterable

from kivi_server.auth import Access, Grant
from kivi_server.sessions import Sessions
from kivi_server.translate import Translator

from kivi.errors import InvalidArgument
from kivi.model.alerts import Alert, AlertStatus, Named, Notify, check_alert_name
from kivi.model.lateness import AUTO_US
from kivi.wire.codec import fill_values
from kivi.wire.v1 import alerts_pb2 as pb
from kivi.wire.v1 import types_pb2

__all__ = ["NEEDS", "AlertCalls"]

NEEDS = {
    "CreateAlert": Access.ADMIN,
    "ListAlerts": Access.READ,
    "SilenceAlert": Access.WRITE,
    "DropAlert": Access.ADMIN,
}


class AlertCalls:
    sessions: Sessions
    translator: Translator

    def CreateAlert(self, request: pb.CreateAlertRequest, grant: Grant) -> None:
        if request.HasField("notify"):  # this machine calls there, wherever it is
            grant.require_everything("notify")
        if request.for_us < 0 or request.lateness_us < AUTO_US or not request.HasField("where"):
            raise InvalidArgument("an alert has a condition, and times that are not negative")
        told = request.notify
        notify = {"url": told.url, "secret": told.secret, "labels": dict(told.labels)}
        self.sessions.alerts.create(
            Alert(
                check_alert_name(request.name),
                request.on,
                self.translator.where(self.sessions.store.table(request.on), request.where),
                request.for_us,
                request.lateness_us,
                Notify.of(notify) if request.HasField("notify") else None,
            )
        )

    def ListAlerts(self, _: pb.ListAlertsRequest, grant: Grant) -> pb.ListAlertsResponse:
        found = self.sessions.alerts.listed()
        return pb.ListAlertsResponse(alerts=[_message(one) for one in found if grant.allows(one.on)])

    def SilenceAlert(self, request: pb.SilenceAlertRequest, grant: Grant) -> None:
        self._check("SilenceAlert", request.name, grant)
        self.sessions.alerts.silence(request.name, request.until_us if request.HasField("until_us") else None)

    def DropAlert(self, request: pb.DropAlertRequest, grant: Grant) -> None:
        self._check("DropAlert", request.name, grant)
        self.sessions.alerts.drop(request.name)

    def _check(self, method: str, name: str, grant: Grant) -> None:
        """Which table an alert is on, and so whether the caller may, is known once it is found."""
        check_alert_name(name)
        if grant.tables and (table := self.sessions.alerts.table_of(name)) is not None:
            grant.require(NEEDS[method], method, table)


def _message(one: AlertStatus) -> pb.AlertStatus:
    return pb.AlertStatus(
        name=one.name,
        on=one.on,
        notify=one.notify,
        is_instance=one.key is not None,
        key=_named(one.key or ()),
        state=one.state,
        since_us=one.since_us,
        value=_named(one.value),
        changed_us=one.changed_us,
        silenced_us=one.silenced_us,
        error=one.error,
    )


def _named(values: Iterable[Named]) -> list[pb.NamedValue]:
    sent = []
    for each in values:
        holder = types_pb2.Key()
        fill_values(holder.values, [each.value])
        sent.append(pb.NamedValue(name=each.name, type=str(each.type), value=holder.values[0]))
    return sent
