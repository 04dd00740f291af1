"""Delivering notifications over HTTP: at least once each, those of one alert in order, with a pause after a failure.

A notification is a row until a server has answered it with success (2xx). After a failure its alert waits, twice as
long each time up to a minute; other alerts do not wait for it. A server gets one message at a time, so one that does
not answer keeps a thread, and not those for other servers. One that has failed for a day is given up, and counted:
the day begins with the first failure that this process saw, as one that waited for a process has not failed.
Redirects are not followed: what is signed for one server is not for another.

An alert may be dropped and made anew, under its name and with another receiver, while something of it is on its way: it
is read at the snapshot at which its notifications are, so nothing of the new one goes to the receiver of the old one,
and what arrived is forgotten only if it is still the same (`Rows.delivered`).
"""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import urlsplit

from kivi.alerts.judging import Told
from kivi.alerts.messages import REPEAT_S, body_of, headers_of
from kivi.alerts.rows import Kept, Notification, Rows
from kivi.errors import KiviError
from kivi.model.alerts import FIRING, Alert, Notify
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.store.facade import Store

__all__ = ["Delivery"]

_log = logging.getLogger("kivi.alerts")
_TIMEOUT_S: Final = 10.0
_AT_ONCE: Final = 16
"""Servers that are told something at the same time."""
_TOGETHER: Final = 64
_LOOKED_AT: Final = 1_024
_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 60.0
_GIVEN_UP_US: Final = 24 * 3600 * 1_000_000


class _Line:
    """What is known of an alert's receiver, in this process."""

    def __init__(self, notify: Notify) -> None:
        self.notify = notify
        self.failures = 0
        self.failing_since_us = 0
        self.next_at = 0.0
        self.repeated_at = -REPEAT_S
        self.waiting = 0


class Delivery:
    """``round`` is called by one thread, and does not wait. ``sent``, ``failed`` and ``given_up`` are counted since the
    start of the process."""

    def __init__(self, store: Store, rows: Rows) -> None:
        self._store = store
        self._rows = rows
        self._pool = ThreadPoolExecutor(_AT_ONCE, "kivi-alerts-notify", initializer=use_batch_scheduling)
        self._lines: dict[str, _Line] = {}
        self._busy: dict[str, Future[None]] = {}
        """By server."""
        self._counting = threading.Lock()
        self.sent = self.failed = self.given_up = 0

    @property
    def waiting(self) -> int:
        """Notifications that are yet to be delivered, as of when it was last tried."""
        return sum(line.waiting for line in list(self._lines.values()))

    def round(self, alerts: Sequence[Kept]) -> None:
        """Begins to deliver what waits for each alert that does not pause, and to say again what fires."""
        told = {kept.alert.name: kept.alert.notify for kept in alerts if kept.alert.notify is not None}
        known = self._lines
        self._lines = {
            name: known[name] if name in known and known[name].notify == notify else _Line(notify)
            for name, notify in told.items()
        }
        self._busy = {server: future for server, future in self._busy.items() if not future.done()}
        waiting: dict[str, list[tuple[str, _Line]]] = {}
        for name, line in self._lines.items():
            if (server := line.notify.shown) not in self._busy:
                waiting.setdefault(server, []).append((name, line))
        for server, lines in waiting.items():
            self._busy[server] = self._pool.submit(self._deliver_all, lines)

    def close(self) -> None:
        """What is on its way is not waited for: it is a row, and delivered again."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _now_us(self) -> int:
        return self._store.committer.now_us()

    def _deliver_all(self, lines: list[tuple[str, _Line]]) -> None:
        """Up to the first failure, those first that have had none, or none for the longest time."""
        for name, line in sorted(lines, key=lambda each: each[1].next_at):
            failures = line.failures
            self._deliver(name, line)
            if line.failures > failures:
                return

    def _deliver(self, name: str, line: _Line) -> None:
        try:
            with self._store.snapshots.opened() as lease:
                kept = self._rows.one_kept(lease, name)
                if kept is None or kept.alert.notify != line.notify:
                    return
                found = self._rows.notifications(lease, name, _LOOKED_AT)
            line.waiting = len(found)
            if time.monotonic() >= line.next_at and self._all_sent(kept.alert, found, line):
                self._repeat(name, line)
        except KiviError as error:
            _log.debug("the notifications of %r are not delivered now: %s", name, error.message)
        except Exception:
            _log.exception("delivering the notifications of %r has failed", name)

    def _all_sent(self, alert: Alert, found: list[Notification], line: _Line) -> bool:
        while found:
            part = _first_part(found)
            arrived = self._post(alert, part, line)
            lost_us = self._now_us() - _GIVEN_UP_US
            over = part if arrived else [one for one in part if max(one.made_us, line.failing_since_us) < lost_us]
            if over:
                self._rows.delivered(over)
                line.waiting -= len(over)
                with self._counting:
                    self.sent += len(over) if arrived else 0
                    self.given_up += 0 if arrived else len(over)
            if not arrived:
                if over:
                    _log.warning("%d notifications of the alert %r are given up after a day", len(over), alert.name)
                return False
            found = found[len(part) :]
        return True

    def _repeat(self, name: str, line: _Line) -> None:
        """Alertmanager resolves what is not said again, and knows nothing after a restart."""
        now = time.monotonic()
        if not line.notify.is_alertmanager or now - line.repeated_at < REPEAT_S:
            return
        with self._store.snapshots.opened() as lease:
            kept = self._rows.one_kept(lease, name)
            if kept is None or kept.alert.notify != line.notify or kept.is_silenced(self._now_us()):
                return
            fires = [
                Notification(name, -1, instance, key, Told(one.since_us, None, one.value), 0)
                for instance, (one, key) in self._rows.instances(lease, name).items()
                if one.state == FIRING and one.told
            ]
        line.repeated_at = now
        for at in range(0, len(fires), _TOGETHER):
            if not self._post(kept.alert, fires[at : at + _TOGETHER], line):
                return

    def _post(self, alert: Alert, part: Sequence[Notification], line: _Line) -> bool:
        """Whether it arrived."""
        assert alert.notify is not None
        now_us = self._now_us()
        body = body_of(alert, part, now_us)
        wrong = _posted(alert.notify.url, body, headers_of(alert, part, body, now_us // 1_000_000))
        if not wrong:
            line.failures, line.next_at = 0, 0.0
            return True
        with self._counting:
            self.failed += 1
        line.failures += 1
        if line.failures == 1:
            line.failing_since_us = now_us
        pause_s = min(_PAUSE_S_MAX, _PAUSE_S * 2 ** min(line.failures - 1, 10)) * random.uniform(0.75, 1.0)
        line.next_at = time.monotonic() + pause_s
        _log.warning(
            "notifying %s of the alert %r failed (%s): again in %.0f s", alert.notify.shown, alert.name, wrong, pause_s
        )
        return False


def _first_part(found: Sequence[Notification]) -> list[Notification]:
    """The first of them that go into one message: no two of one instance, as only the order tells these apart."""
    part: list[Notification] = []
    seen: set[bytes] = set()
    for one in found[:_TOGETHER]:
        if one.instance in seen:
            break
        seen.add(one.instance)
        part.append(one)
    return part


def _posted(url: str, body: bytes, headers: dict[str, str]) -> str:
    """What went wrong, without the URL; empty: nothing."""
    parts = urlsplit(url)
    connection: HTTPConnection
    assert parts.hostname is not None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context)
    else:
        connection = HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("POST", path, body, {"user-agent": "kivi", **headers})
        status = connection.getresponse().status  # what follows it may take as long as its sender likes
        return "" if 200 <= status < 300 else f"it answered {status}"
    except (OSError, HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {getattr(error, 'strerror', None) or 'no answer'}"
    finally:
        connection.close()
