"""Alerts as they are declared, and how their instances are: plain data.

An *alert* is a condition on the rows of an aggregate with a time slot in its key. It has an *instance* for each key
without its slot. What an instance does as time passes, ``kivi.alerts`` says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.expressions import Expr, bind, from_plain, names, to_plain
from kivi.model.lifetimes import slot_index
from kivi.model.names import is_text
from kivi.model.schema import TableSchema
from kivi.model.slots import Slot
from kivi.model.types import ColumnType, shown

__all__ = [
    "FIRING",
    "INACTIVE",
    "PENDING",
    "RESOLVED",
    "Alert",
    "AlertStatus",
    "Named",
    "Notify",
    "check_alert_name",
    "watched",
]

INACTIVE: Final = "inactive"
PENDING: Final = "pending"
FIRING: Final = "firing"
RESOLVED: Final = "resolved"
ALERTMANAGER_PATH: Final = "/api/v2/alerts"
_NAME_BYTES: Final = 256
_TEXT_BYTES: Final = 4_096
_LABELS_MAX: Final = 32
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,127}\Z")
_MOMENT: Final = ColumnType("timestamp")


def check_alert_name(name: object) -> str:
    """Raises InvalidArgument."""
    if not is_text(name) or not 1 <= len(name.encode()) <= _NAME_BYTES:
        raise InvalidArgument(f"the name of an alert is a text of 1 to {_NAME_BYTES} bytes, not {shown(name)}")
    return name


def watched(schema: TableSchema) -> tuple[int, Slot]:
    """The place, in the key of the table, of the slot that an alert goes by, and the slots.

    Raises InvalidArgument for a table that alerts cannot be on.
    """
    index = slot_index(schema.group_by) if schema.kind == "aggregate" else None
    slot = None if index is None else schema.group_by[index].slot
    if index is None or slot is None:
        what = f"{schema.name!r} is " + ("an aggregate without one" if schema.kind == "aggregate" else "none")
        raise InvalidArgument(f"alerts are on aggregates with a kivi.time_slot in their key, and {what}")
    return index, slot


# -- who is told ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Notify:
    """Who is told. ``secret`` signs what is sent; ``labels`` are put on every instance."""

    url: str
    secret: str = field(default="", repr=False)
    labels: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(given: object) -> Notify | None:
        """``"https://..."``, or a dict of ``url``, ``secret`` and ``labels``. Raises InvalidArgument."""
        if given is None:
            return None
        plain = {"url": given} if isinstance(given, str) else given
        if not isinstance(plain, Mapping) or not plain.keys() <= {"url", "secret", "labels"} or "url" not in plain:
            raise InvalidArgument(
                "notify is a URL, or a dict of url and, if wanted, secret and labels: "
                'notify={"url": "https://...", "secret": "..."}'
            )
        labels = {} if plain.get("labels") is None else plain["labels"]
        if not isinstance(labels, Mapping) or len(labels) > _LABELS_MAX:
            raise InvalidArgument(f"labels of notify are a dict of at most {_LABELS_MAX} names and texts")
        for name, value in labels.items():
            if not isinstance(name, str) or not _LABEL.match(name) or not _is_short(value):
                raise InvalidArgument(
                    f"the label {shown(name)} of notify is not one: names are letters, digits and '_', values texts"
                )
        secret = "" if plain.get("secret") is None else plain["secret"]
        if not _is_short(secret):
            raise InvalidArgument(f"the secret of notify is a text of at most {_TEXT_BYTES} bytes")
        return Notify(_checked_url(plain["url"]), secret, tuple(sorted(labels.items())))

    @property
    def is_alertmanager(self) -> bool:
        """Whether the URL is that of an Alertmanager's API, and not of a receiver of webhooks."""
        return urlsplit(self.url).path.rstrip("/").endswith(ALERTMANAGER_PATH)

    @property
    def shown(self) -> str:
        """Without what may be a secret: many services have one in the path of their URLs."""
        return shown_url(self.url)


def shown_url(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _is_short(value: object) -> bool:
    return is_text(value) and len(value.encode()) <= _TEXT_BYTES


def _checked_url(url: object) -> str:
    """An error does not repeat the URL, which may have a secret in it."""
    wrong = None
    if not is_text(url) or len(url.encode()) > _TEXT_BYTES or not url.isprintable() or " " in url or not url.isascii():
        wrong = "it is no URL"
    else:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            wrong = "it is no URL"
        else:
            if parts.scheme not in ("http", "https"):
                wrong = "it does not begin with http:// or https://"
            elif not parts.hostname or port == 0:
                wrong = "it names no host"
            elif parts.username is not None or parts.password is not None:
                wrong = "it has a user or a password in it, which would be seen: use secret, which signs what is sent"
            elif parts.fragment:
                wrong = "it has a fragment (#...), which is never sent"
    if wrong is not None or not isinstance(url, str):
        raise InvalidArgument(f"notify cannot go there: {wrong}")
    return url


# -- alerts -----------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """A value in stored form, with its column's name and type."""

    name: str
    type: ColumnType
    value: Any

    def shown(self) -> Any:
        return self.type.from_stored(self.value, self.name)


@dataclass(frozen=True, slots=True)
class Alert:
    """One as it was declared. ``where`` is bound to the table; times are microseconds."""

    name: str
    on: str
    where: Expr
    for_us: int = 0
    lateness_us: int = 0
    notify: Notify | None = None

    def bound(self, schema: TableSchema) -> Alert:
        """The same over the table as it is now. Raises SchemaError, InvalidArgument."""
        watched(schema)
        where = bind(self.where, schema.output_type, _as_it_is)
        if not names(where):
            raise SchemaError(f"the condition of the alert {self.name!r} names no column of {schema.name!r}")
        return Alert(self.name, self.on, where, self.for_us, self.lateness_us, self.notify)

    def value_columns(self, schema: TableSchema) -> tuple[str, ...]:
        """The columns that the condition is about and that are not of the key."""
        about = names(self.where)
        return tuple(name for name in schema.output_names if name in about and name not in schema.key_names) or tuple(
            sorted(about - {*schema.key_names})
        )

    def to_json(self) -> str:
        notify = self.notify
        return json.dumps(
            {
                "on": self.on,
                "where": to_plain(self.where),
                "for_us": self.for_us,
                "lateness_us": self.lateness_us,
                "notify": None
                if notify is None
                else {"url": notify.url, "secret": notify.secret, "labels": dict(notify.labels)},
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(name: str, text: str) -> Alert:
        known = json.loads(text)
        notify = known["notify"]
        return Alert(
            name,
            known["on"],
            from_plain(known["where"]),
            known["for_us"],
            known["lateness_us"],
            None
            if notify is None
            else Notify(notify["url"], notify["secret"], tuple(sorted(notify["labels"].items()))),
        )


def _as_it_is(_: ColumnType, value: Any, __: str) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class AlertStatus:
    """An instance, or an alert that has none: then ``key`` is None, and it is inactive. Times are microseconds."""

    name: str
    on: str
    notify: str = ""
    key: Sequence[Named] | None = None
    state: str = INACTIVE
    since_us: int | None = None
    value: Sequence[Named] = ()
    changed_us: int | None = None
    silenced_us: int | None = None
    error: str = ""

    def described(self) -> dict[str, Any]:
        """As callers see it."""
        return {
            "name": self.name,
            "on": self.on,
            "key": None if self.key is None else {each.name: each.shown() for each in self.key},
            "state": self.state,
            "since": _MOMENT.from_stored(self.since_us),
            "value": None if self.key is None else {each.name: each.shown() for each in self.value},
            "last_change": _MOMENT.from_stored(self.changed_us),
            "silenced_until": _MOMENT.from_stored(self.silenced_us),
            "notify": self.notify or None,
            "error": self.error or None,
        }
