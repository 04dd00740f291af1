"""Notifications: at least once, in order, signed, after crashes and failures; and read by a real Alertmanager."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import hmac
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.alerts import Alerts, delivery
from kivi.runtime.settings import Settings
from kivi.store.checkpoint import followers_copy
from kivi.store.following import open_follower
from tests.alerts.receiver import Received, Receiver
from tests.alerts.test_definition import MINUTE, NAME, World
from tests.conftest import require
from tests.serverproc import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

BEGIN = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def make(db: Any) -> None:
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "ep": "string", "us": "int64"})
    group_by = ["ep", kivi.time_slot("ts", "5m")]
    db.create_aggregate("ep_5m", source="calls", group_by=group_by, measures={"worst": kivi.max("us")})


def append(db: Any, minute: float, ep: str = "other", us: int = 1) -> None:
    db.append("calls", [{"ts": BEGIN + dt.timedelta(minutes=minute), "ep": ep, "us": us}])


def create(db: Any, notify: Any) -> None:
    db.create_alert("slow", on="ep_5m", where=kivi.col("worst") > 100, for_="2m", notify=notify)


def states(db: Any) -> dict[str, str]:
    return {one["key"]["ep"]: one["state"] for one in db.alerts() if one["key"] is not None}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Any]:
    with kivi.open(tmp_path / "data", alerts_every_s=0.02) as found:
        make(found)
        append(found, 0)
        yield found


def fire(db: Any, *eps: str) -> None:
    for ep in eps:
        append(db, 1, ep, 500)
    append(db, 7.5)
    wait_until(lambda: states(db) == dict.fromkeys(eps, "firing"), reason=lambda: db.alerts())


def resolve(db: Any) -> None:
    append(db, 10.5)
    wait_until(lambda: set(states(db).values()) == {"resolved"}, reason=lambda: db.alerts())


def check_signed(one: Received, secret: bytes) -> None:
    """As a receiver does it by the text of Standard Webhooks 1.0."""
    signed = f"{one.headers['webhook-id']}.{one.headers['webhook-timestamp']}.".encode() + one.body
    expected = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
    assert one.headers["webhook-signature"] == f"v1,{expected}"


def test_a_receiver_gets_what_alertmanager_would_send(db: Any, receiver: Receiver) -> None:
    create(db, {"url": receiver.url, "secret": "s3cret", "labels": {"severity": "page"}})
    fire(db, "a")
    resolve(db)
    wait_until(lambda: len(receiver.taken) == 2)
    fired, over = receiver.taken
    for one in (fired, over):
        check_signed(one, b"s3cret")
        assert one.headers["content-type"] == "application/json"
    labels = {"alertname": "slow", "ep": "a", "severity": "page"}
    message = fired.message
    assert message["alerts"][0].pop("fingerprint")
    assert message == {
        "version": "4",
        "groupKey": '{}:{alertname="slow"}',
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "kivi",
        "groupLabels": {"alertname": "slow"},
        "commonLabels": labels,
        "commonAnnotations": {"worst": "500", "table": "ep_5m", "condition": "(worst > 100)"},
        "externalURL": "",
        "alerts": [
            {
                "status": "firing",
                "labels": labels,
                "annotations": {"worst": "500", "table": "ep_5m", "condition": "(worst > 100)"},
                "startsAt": "2026-01-01T12:07:00.000Z",
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "",
            }
        ],
    }
    (ended,) = over.message["alerts"]
    assert (over.message["status"], ended["status"], ended["startsAt"], ended["endsAt"]) == (
        "resolved",
        "resolved",
        "2026-01-01T12:07:00.000Z",
        "2026-01-01T12:10:00.000Z",
    )
    wait_until(lambda: db.stats()["alert_notifications_waiting"] == 0)
    assert db.stats()["alert_notifications_sent"] == 2


def test_a_secret_of_standard_webhooks_is_base64(db: Any, receiver: Receiver) -> None:
    key = bytes(range(24))
    create(db, {"url": receiver.url, "secret": "whsec_" + base64.b64encode(key).decode()})
    fire(db, "a")
    check_signed(wait_until(lambda: receiver.taken)[0], key)


def test_after_a_failure_the_same_is_sent_again_and_then_what_came_after_it(
    db: Any, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [500, 302]
    create(db, receiver.url)
    fire(db, "a", "b")
    resolve(db)
    wait_until(lambda: len(receiver.taken) == 2, reason=lambda: receiver.received)
    ids = [one.headers["webhook-id"] for one in receiver.received]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert [[a["status"] for a in one.message["alerts"]] for one in receiver.taken] == [
        ["firing"] * 2,
        ["resolved"] * 2,
    ]
    assert db.stats()["alert_notifications_failed"] == 2
    assert "it answered 500" in caplog.text
    assert "SECRET" not in caplog.text + repr(db.alerts())


def test_a_receiver_has_answered_though_its_answer_does_not_end(db: Any, receiver: Receiver) -> None:
    """Nobody waits for the end: as many of these as there are threads would hold up all other alerts for ever."""
    receiver.ends = False
    names = {f"slow {at}" for at in range(delivery._AT_ONCE + 1)}
    for name in names:
        db.create_alert(name, on="ep_5m", where=kivi.col("worst") > 100, for_="2m", notify=receiver.url)
    fire(db, "a")
    wait_until(lambda: db.stats()["alert_notifications_sent"] == len(names), reason=lambda: db.stats())
    assert sorted(one.message["groupLabels"]["alertname"] for one in receiver.received) == sorted(names)


def test_a_receiver_that_does_not_answer_holds_up_no_other_one(db: Any, receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=500) as silent:
        for number in range(40):
            notify = f"http://127.0.0.1:{silent.getsockname()[1]}/{number}"
            db.create_alert(f"slow{number}", on="ep_5m", where=kivi.col("worst") > 100, notify=notify)
        create(db, receiver.url)
        append(db, 1, "a", 500)
        append(db, 7.5)
        began = time.monotonic()
        wait_until(lambda: receiver.taken)
        assert time.monotonic() - began < delivery._TIMEOUT_S


def test_an_alert_that_is_made_anew_does_not_pause_for_another_receiver(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_PAUSE_S", "_PAUSE_S_MAX"):
        monkeypatch.setattr(delivery, name, 600.0)
    with kivi.open(tmp_path / "other", alerts_every_s=0.3) as db:
        make(db)
        append(db, 0)
        create(db, "http://127.0.0.1:9/nobody")
        fire(db, "a")
        wait_until(lambda: db.stats()["alert_notifications_failed"])
        db.drop_alert("slow")
        create(db, receiver.url)
        append(db, 11, "b", 500)
        append(db, 17.5)
        wait_until(lambda: receiver.taken)


def test_what_was_not_delivered_before_a_crash_is_after_it(tmp_path: Path, receiver: Receiver) -> None:
    """The process that evaluated is killed while the receiver is away."""
    with ServerProcess(tmp_path / "data", "--set", "alerts_every_s=0.02") as server:
        with server.connect() as db:
            make(db)
            append(db, 0)
            receiver.answers = [503] * 1_000
            create(db, receiver.url)
            fire(db, "a")
            wait_until(lambda: receiver.received)
        server.kill()
        assert not receiver.taken
        receiver.answers = []  # what the killed process has sent may yet come, and is told then
        server.start()
        assert wait_until(lambda: receiver.taken)[0].message["status"] == "firing"


def test_what_failed_for_a_day_is_given_up_and_what_waited_for_a_process_is_not(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_PAUSE_S", 0.0)
    for is_away, answers in ((True, [503]), (False, [503, 503])):
        receiver.received.clear()
        receiver.answers = list(answers)
        world = World(0, receiver.url)
        for other in world.watches[1:]:
            world.db.drop_alert(other.name)
        times = world.now_us - MINUTE, world.now_us + 7 * MINUTE
        world.now_us = times[-1] + MINUTE
        world.enter([{"ts": ts, "ep": ep, "us": us} for ts, ep, us in zip(times, "az", (500, 1), strict=True)])
        alerts = world.alerts[0]
        alerts._evaluator.evaluate(NAME)
        if not is_away:
            look(alerts)
        world.now_us += 25 * 60 * MINUTE
        look(alerts)
        look(alerts)
        assert [one.message["status"] for one in receiver.taken] == (
            ["firing", "resolved"] if is_away else ["resolved"]
        )
        assert alerts._delivery is not None
        assert (alerts._delivery.given_up > 0) == (not is_away)
        world.store.crash()


def look(alerts: Alerts) -> None:
    """A round, and all that it has begun to send."""
    alerts.round()
    assert alerts._delivery is not None
    for busy in alerts._delivery._busy.values():
        busy.result()


def test_a_silenced_alert_tells_nobody_until_it_is_over(db: Any, receiver: Receiver) -> None:
    create(db, receiver.url)
    db.silence("slow", until=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1))
    fire(db, "a")
    assert db.alerts()[0]["silenced_until"] is not None
    before = db.watermark()
    append(db, 8)
    wait_until(lambda: db.watermark() > before + 1)  # it was evaluated again
    assert not receiver.received
    db.silence("slow", until=None)
    assert wait_until(lambda: receiver.taken)[0].message["status"] == "firing"
    db.silence("slow", until=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1))
    resolve(db)
    wait_until(lambda: len(receiver.taken) == 2)
    assert receiver.taken[1].message["status"] == "resolved"  # as it was told that it fires


def anew(db: Any, notify: str) -> None:
    """The alert is another one, and fires."""
    db.drop_alert("slow")
    create(db, notify)
    append(db, 21, "a", 500)
    append(db, 27.5)
    wait_until(lambda: "firing" in [one["state"] for one in db.alerts() if one["name"] == "slow"])


def test_an_alert_that_was_made_anew_tells_its_own_receiver_though_the_old_one_was_about_to_be_told(
    db: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the old one, what waits for a thread does so until the new one fires."""
    monkeypatch.setattr(delivery, "_AT_ONCE", 1)
    monkeypatch.setattr(delivery, "_TIMEOUT_S", 600.0)
    with Receiver() as busy, Receiver() as new:
        busy.answers_now.clear()
        db.create_alert("a busy one", on="ep_5m", where=kivi.col("worst") > 100, for_="2m", notify=busy.url)
        append(db, 1, "a", 500)
        append(db, 7.5)
        wait_until(lambda: busy.received)  # the only thread is taken before there is anything of the other to tell
        create(db, receiver.url)
        append(db, 11, "b", 500)
        append(db, 17.5)
        wait_until(lambda: "firing" in [one["state"] for one in db.alerts() if one["name"] == "slow"])

        def waits() -> bool:  # what fires is seen before it is told
            line = db._alerts._delivery._lines.get("slow")
            begun = None if line is None else db._alerts._delivery._busy.get(line.notify.shown)
            return begun is not None and not begun.done()

        wait_until(waits)
        anew(db, new.url)
        busy.answers_now.set()
        wait_until(lambda: "firing" in [one.message["status"] for one in new.taken])
        wait_until(lambda: not db.stats()["alert_notifications_waiting"])
        assert not receiver.received


def test_what_arrives_late_of_an_alert_is_not_taken_for_what_another_one_of_its_name_has_to_tell(
    db: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_TIMEOUT_S", 600.0)
    receiver.answers_now.clear()
    create(db, receiver.url)
    fire(db, "a")
    wait_until(lambda: receiver.received)
    with Receiver() as new:
        new.answers = [503]
        anew(db, new.url)
        wait_until(lambda: new.received)
        receiver.answers_now.set()
        assert wait_until(lambda: new.taken)[0].headers["webhook-id"] == new.received[0].headers["webhook-id"]


def test_a_follower_evaluates_nothing(db: Any, tmp_path: Path) -> None:
    """It has the alerts, and commits nothing: who it follows evaluates them."""
    create(db, None)
    followers_copy(db.store, str(tmp_path / "copy"))
    follower = open_follower(str(tmp_path / "copy"), str(tmp_path / "data" / "log"), Settings())
    try:
        alerts = Alerts(follower.store)
        assert [one.name for one in alerts.listed()] == ["slow"]
        assert alerts._thread is None
    finally:
        follower.close()


# -- a real Alertmanager ----------------------------------------------------------------------------------


class Alertmanager:
    """Debian's, which notifies ``receiver`` of what it is told."""

    def __init__(self, folder: Path, receiver: str) -> None:
        self.url = ""
        (folder / "config.yml").write_text(
            "route: {receiver: hook, group_by: [alertname], group_wait: 0s, group_interval: 1s}\n"
            f"receivers: [{{name: hook, webhook_configs: [{{url: '{receiver}', send_resolved: true}}]}}]\n"
        )
        self._process = subprocess.Popen(
            [
                require("prometheus-alertmanager"),
                f"--config.file={folder}/config.yml",
                f"--storage.path={folder}/data",
                "--web.listen-address=127.0.0.1:0",
                "--cluster.listen-address=",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "Listening on" in line or "address=127.0.0.1:" in line:
                self.url = "http://" + line.rpartition("address=")[2].split()[0]
                break

    def alerts(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=PATIENCE_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)
            return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def alertmanager(tmp_path: Path, receiver: Receiver) -> Iterator[Alertmanager]:
    running = Alertmanager(tmp_path, receiver.url)
    try:
        yield running
    finally:
        running.close()


def test_alertmanager_notifies_of_what_fires_and_of_its_end(
    db: Any, alertmanager: Alertmanager, receiver: Receiver
) -> None:
    create(db, {"url": alertmanager.url + "/api/v2/alerts", "labels": {"severity": "page"}})
    fire(db, "a", "b")
    wait_until(lambda: len(alertmanager.alerts()) == 2, reason=lambda: db.stats())
    found = {one["labels"]["ep"]: one for one in alertmanager.alerts()}
    assert found["a"]["labels"] == {"alertname": "slow", "ep": "a", "severity": "page"}
    assert found["a"]["annotations"]["worst"] == "500"
    assert found["a"]["startsAt"] == "2026-01-01T12:07:00.000Z"
    assert found["a"]["status"]["state"] == "active"
    wait_until(lambda: {a["labels"]["ep"] for one in receiver.taken for a in one.message["alerts"]} == {"a", "b"})
    resolve(db)
    wait_until(lambda: not alertmanager.alerts(), reason=alertmanager.alerts)
    wait_until(lambda: receiver.taken[-1].message["status"] == "resolved", reason=lambda: receiver.taken)
    assert {a["endsAt"] for a in receiver.taken[-1].message["alerts"]} == {"2026-01-01T12:10:00Z"}

    # What Alertmanager calls its instances by is what kivi's own messages do, whose form is the same.
    with Receiver() as ours:
        db.drop_alert("slow")
        create(db, {"url": ours.url, "labels": {"severity": "page"}})
        append(db, 21, "a", 500)
        append(db, 27.5)
        message = wait_until(lambda: ours.taken)[0].message
        assert message["alerts"][0]["fingerprint"] == found["a"]["fingerprint"]
        theirs = receiver.taken[0].message
        assert message.keys() == theirs.keys()
        assert message["alerts"][0].keys() == theirs["alerts"][0].keys()
