"""Notifications as others read them: the API of Alertmanager, and what Alertmanager sends to receivers of webhooks.

* **Alertmanager**, a URL whose path ends in ``/api/v2/alerts``: a list of alerts. Alertmanager forgets one that is not
  said again, so one that fires ends four minutes from now, and is sent once a minute; one that is over ends when it
  did.
* **A receiver**, any other URL: the JSON of Alertmanager's ``webhook_config``, version 4, with one group for an alert.

The labels are ``alertname``, the columns of the key and what ``notify`` adds; annotations are the columns of the
condition, ``table``, and ``condition``. What is sent to a receiver is signed as Standard Webhooks 1.0 says, with HMAC
and SHA-256, if ``notify`` has a secret: ``webhook-signature`` is of ``webhook-id``, ``webhook-timestamp`` and the body.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kivi.alerts.rows import Notification, named_of
from kivi.errors import KiviError
from kivi.model.alerts import Alert, Named

__all__ = ["body_of", "fingerprint", "headers_of", "labels_of"]

REPEAT_S: Final = 60.0
_ENDS_S: Final = 4 * REPEAT_S
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_NEVER: Final = "0001-01-01T00:00:00Z"
_NOT_IN_LABELS: Final = re.compile(r"[^a-zA-Z0-9_]")
_SECRET: Final = "whsec_"


def body_of(alert: Alert, sent: Sequence[Notification], now_us: int) -> bytes:
    """Some notifications of one alert, no two of one instance."""
    assert alert.notify is not None
    if alert.notify.is_alertmanager:
        return _json([_posted(alert, one, now_us) for one in sent])
    alerts = [_received(alert, one) for one in sent]
    firing = any(one["status"] == "firing" for one in alerts)
    group = {"alertname": alert.name}
    return _json(
        {
            "version": "4",
            "groupKey": "{}:{alertname=" + json.dumps(alert.name, ensure_ascii=False) + "}",
            "truncatedAlerts": 0,
            "status": "firing" if firing else "resolved",
            "receiver": "kivi",
            "groupLabels": group,
            "commonLabels": _common([one["labels"] for one in alerts]),
            "commonAnnotations": _common([one["annotations"] for one in alerts]),
            "externalURL": "",
            "alerts": alerts,
        }
    )


def headers_of(alert: Alert, sent: Sequence[Notification], body: bytes, now_s: int) -> dict[str, str]:
    """The same notifications sent again have the same ``webhook-id``, by which a receiver knows them."""
    assert alert.notify is not None
    headers = {"content-type": "application/json"}
    if alert.notify.is_alertmanager:
        return headers
    made = "".join(f"{one.alert}\0{one.number}\0{one.made_us}\0" for one in sent).encode()
    headers |= {"webhook-id": f"msg_{hmac.digest(b'kivi', made, 'sha256').hex()[:32]}", "webhook-timestamp": str(now_s)}
    if alert.notify.secret:
        text = f"{headers['webhook-id']}.{now_s}.".encode() + body
        signature = base64.b64encode(hmac.digest(_key_of(alert.notify.secret), text, "sha256"))
        headers["webhook-signature"] = f"v1,{signature.decode()}"
    return headers


def _key_of(secret: str) -> bytes:
    if secret.startswith(_SECRET):
        try:
            return base64.b64decode(secret.removeprefix(_SECRET), validate=True)
        except binascii.Error:
            pass
    return secret.encode()


def labels_of(alert: Alert, key: Sequence[Named]) -> dict[str, str]:
    """Of an instance. A column that is called as one of the other labels has ``key_`` before its name."""
    assert alert.notify is not None
    labels = {**dict(alert.notify.labels), "alertname": alert.name}
    for each in key:
        name = _NOT_IN_LABELS.sub("_", each.name)
        labels[f"key_{name}" if name in labels or name[:1].isdigit() else name] = _text(each)
    return labels


def _annotations(alert: Alert, value: str) -> dict[str, str]:
    values = {_NOT_IN_LABELS.sub("_", each.name): _text(each) for each in named_of(value)}
    return {**values, "table": alert.on, "condition": str(alert.where)}


def _posted(alert: Alert, one: Notification, now_us: int) -> dict[str, Any]:
    ends_us = now_us + int(_ENDS_S * 1_000_000) if one.told.ends_us is None else one.told.ends_us
    return {
        "labels": labels_of(alert, named_of(one.key)),
        "annotations": _annotations(alert, one.told.value),
        "startsAt": _moment(one.told.starts_us),
        "endsAt": _moment(ends_us),
    }


def _received(alert: Alert, one: Notification) -> dict[str, Any]:
    labels = labels_of(alert, named_of(one.key))
    return {
        "status": "firing" if one.told.ends_us is None else "resolved",
        "labels": labels,
        "annotations": _annotations(alert, one.told.value),
        "startsAt": _moment(one.told.starts_us),
        "endsAt": _NEVER if one.told.ends_us is None else _moment(one.told.ends_us),
        "generatorURL": "",
        "fingerprint": fingerprint(labels),
    }


def fingerprint(labels: Mapping[str, str]) -> str:
    """What Alertmanager calls an alert by: FNV-1a with 64 bits over its labels by name, each behind a byte 0xff."""
    text = b"".join(part.encode() + b"\xff" for item in sorted(labels.items()) for part in item)
    found = 0xCBF29CE484222325
    for byte in text:
        found = (found ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{found:016x}"


def _common(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *others = each
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in others)}


def _text(one: Named) -> str:
    try:
        value = one.shown()
    except KiviError:  # a sum that has outgrown its column, say
        value = one.value
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes):
        return "0x" + value.hex()
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _moment(time_us: int) -> str:
    return (_EPOCH + dt.timedelta(microseconds=time_us)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
