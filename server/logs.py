"""What the server logs, to standard error: a line an event, for people (``text``) or for machines (``json``).

Every event about a call has its request id: the caller's own (metadata ``x-request-id``) or one made here, which errors
that only the log can explain name as well. A session's requests are ``<session>/<number>``. Logged are calls that
failed by a fault of the server (error), that took longer than ``slow_call_s`` (warning), and what the server does by
itself: ``event`` names what a machine may look for (``kivi.mvcc.shortage``: ``disk_full``, ``disk_space``). Never the
content of a request, and of a token only its name (``auth``).
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import secrets
import sys
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["FORMATS", "begin", "request_id"]

FORMATS: Final = ("text", "json")
_OURS: Final = ("call", "request", "client", "ms", "code", "event", "seconds", "refused")
_ID_MAX: Final = 100


def begin(style: str) -> None:
    """From now on the process logs like this."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def request_id(metadata: Iterable[tuple[str, Any]]) -> str:
    """The caller's, if it is a short printable text, or a new one."""
    given = next((value for name, value in metadata if name == "x-request-id"), None)
    if isinstance(given, str) and 0 < len(given) <= _ID_MAX and given.isprintable():
        return given
    return secrets.token_hex(8)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _OURS if hasattr(record, name)}


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{name}={value}" for name, value in _facts(record).items())
        return super().formatMessage(record) + (f" [{facts}]" if facts else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")
        out = {"at": at.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
        out |= {"message": record.getMessage(), **_facts(record)}
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        return json.dumps(out, ensure_ascii=False, default=str)
