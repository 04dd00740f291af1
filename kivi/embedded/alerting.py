"""Alerts of the embedded database."""

from __future__ import annotations

from typing import Any

from kivi.alerts import Alerts
from kivi.api import alerting
from kivi.api.alerting import AlertArguments, SilenceArguments, drop_alert_name
from kivi.api.arguments import takes
from kivi.store.facade import Store

__all__ = ["Alerting"]


class Alerting(alerting.Alerting):
    store: Store
    _alerts: Alerts

    @takes(AlertArguments)
    def create_alert(self, wanted: AlertArguments) -> None:
        self._alerts.create(wanted.alert(self.store.table(wanted.on)))

    def alerts(self) -> list[dict[str, Any]]:
        return [status.described() for status in self._alerts.listed()]

    @takes(SilenceArguments)
    def silence(self, wanted: SilenceArguments) -> None:
        self._alerts.silence(wanted.name, wanted.until_us)

    @takes(drop_alert_name)
    def drop_alert(self, name: str) -> None:
        self._alerts.drop(name)
