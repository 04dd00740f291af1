"""``kivi alerts`` and ``kivi silence``."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import time
from typing import Any

from kivi.cli.text import plain, print_rows
from kivi.errors import InvalidArgument
from kivi.model.predicate_text import parse_value
from kivi.model.slots import parse_duration_us

__all__ = ["alerts", "silence"]

_COLUMNS = ("name", "state", "key", "since", "value", "last_change", "silenced_until", "error")


def alerts(db: Any, args: argparse.Namespace) -> None:
    found = db.alerts()
    if args.output == "json":
        print_rows(found, [*_COLUMNS, "on", "notify"], "json")
        return
    rows = [{**one, "key": _words(one["key"]), "value": _words(one["value"])} for one in found]
    shown = [name for name in _COLUMNS if name in _COLUMNS[:5] or any(row[name] for row in rows)]
    print_rows(rows, shown, args.output)


def _words(values: dict[str, Any] | None) -> str | None:
    if values is None:
        return None
    return " ".join(f"{name}={json.dumps(plain(value), ensure_ascii=False)}" for name, value in values.items())


def silence(db: Any, args: argparse.Namespace) -> None:
    db.silence(args.name, until=_moment(args.until))


def _moment(text: str) -> dt.datetime | int | None:
    """A moment, a duration from now on, or "now", which ends a silence."""
    if text == "now":
        return None
    try:
        return time.time_ns() // 1_000 + parse_duration_us(text)
    except InvalidArgument:
        until: dt.datetime | int = parse_value("timestamp", text, "UNTIL")
        return until
