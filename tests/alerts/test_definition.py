"""The state of alerts is what their definition gives over the log, wherever a crash comes.

``defined`` is the definition once more, slot by slot over all events, in plain Python. Of the log it takes what was
appended and silenced, and of each evaluation its snapshot and its time; everything else an evaluation wrote has to be
what comes out: clock, instances and notifications.
"""

from __future__ import annotations

import datetime as dt
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

import kivi
from kivi.alerts import Alerts
from kivi.alerts.rows import Rows
from kivi.embedded.database import Database
from kivi.engine.memory import MemoryEngine
from kivi.log import Done, Kind, Ticket
from kivi.log.memory import MemoryLog
from kivi.model.scans import Scan
from kivi.mvcc.record import decode_commit, is_events
from kivi.runtime.settings import Settings
from kivi.store.catalog import ALERT_NOTIFICATIONS, ALERTS
from kivi.store.facade import Store

SETTINGS = Settings.of({"background": False, "consolidate_rows": 2, "block_rows": 8})
MINUTE = 60_000_000
SLOT, LATENESS = 5 * MINUTE, MINUTE
DAY = 24 * 60 * MINUTE
SLOW = 100
BEGIN = 1_750_000_000_000_000 // SLOT * SLOT
NAME = "slow"


class Killed(BaseException):
    """The process ends here."""


class KeptLog(MemoryLog):
    """Keeps every record, and ends the process at an append: the record is on the disk then, or is not."""

    def __init__(self, now: Any) -> None:
        super().__init__(clock=lambda: now() * 1_000)
        self.appends, self.dies_at = 0, -1

    def append(self, records: Any, done: Done) -> Ticket:
        self.appends += 1
        if self.appends == self.dies_at:
            self.hold = True
            super().append(records, done)
            raise Killed
        return super().append(records, done)

    def truncate(self, below: int) -> None:
        pass


@dataclass
class World:
    seed: int
    now_us: int = BEGIN + 7 * MINUTE
    at_us: int = BEGIN
    appended: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.for_us = (2 * MINUTE, SLOT, 0)[self.seed % 3]
        self.engine, self.log = MemoryEngine(), KeptLog(lambda: self.now_us)
        self.open()
        self.db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "ep": "string", "us": "int64"})
        self.append()
        self.db.create_aggregate(
            "ep_5m",
            source="calls",
            group_by=[kivi.time_slot("ts", "5m"), "ep"],
            measures={"n": kivi.count(), "worst": kivi.max("us")},
        )
        notify = "http://localhost:1/hook"
        self.db.create_alert(
            NAME, on="ep_5m", where=kivi.col("worst") > SLOW, for_=self.for_us, lateness="1m", notify=notify
        )

    def open(self) -> None:
        self.store = Store.open(
            None, settings=SETTINGS, engine=self.engine, log=self.log, clock=lambda: self.now_us / 1_000_000
        )
        self.db = Database(self.store)
        self.alerts = [Alerts(self.store), Alerts(self.store)]

    def append(self) -> None:
        count = self.random.choice((1, 2, 5))
        late = self.random.choice((0, 0, 2 * MINUTE, 9 * MINUTE, -3 * MINUTE))
        events = [
            {
                "ts": min(self.at_us, self.now_us) - late - self.random.randrange(2 * MINUTE),
                "ep": self.random.choice("ab"),
                "us": self.random.choice((1, 500)),
            }
            for _ in range(count)
        ]
        token = f"token {len(self.appended)}"
        self.appended.append((token, events))
        self.db.append("calls", events, token=token)

    def step(self) -> None:
        passes = self.random.choice((0, MINUTE // 2, MINUTE, 3 * MINUTE, 6 * MINUTE, 17 * MINUTE))
        self.now_us += passes
        self.at_us += self.random.choice((passes, passes, 0, 3 * passes))
        kind = self.random.randrange(10)
        if kind < 5:
            self.append()
        elif kind == 5:
            self.db.silence(NAME, until=self.random.choice((None, self.now_us + 4 * MINUTE)))
        elif kind == 6:
            self.db.consolidate()
        elif kind == 7:
            with self.store.snapshots.opened() as lease:
                waiting = Rows(self.store).notifications(lease, NAME, 2)
            Rows(self.store).delivered(waiting)
        for each in self.alerts[: self.random.choice((1, 1, 2))]:
            each._evaluator.evaluate(NAME)

    def crash(self, keep: int) -> None:
        self.store.crash()
        self.engine.crash(self.random.choice((0, 1, 3, 100)))
        self.log.hold = False
        self.log.crash(keep)
        self.open()

    # -- what is there, and what the log says ------------------------------------------------------------

    def found(self) -> dict[str, tuple[Any, ...]]:
        return {
            one["key"]["ep"]: (one["state"], micros(one["since"]), one["value"]["worst"], micros(one["last_change"]))
            for one in self.db.alerts()
            if one["key"] is not None
        }

    def numbers(self) -> set[int]:
        with self.store.snapshots.opened() as lease:
            rows = list(Rows(self.store).scan(lease, ALERT_NOTIFICATIONS, Scan()))
        return {row["number"] for row in rows}

    def logged(self) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]], list[tuple[int, int]]]:
        """What evaluations, and the creation first, put into the alert's row; the notifications; what is delivered."""
        names = [column.name for column in ALERTS.columns]
        told_names = [column.name for column in ALERT_NOTIFICATIONS.columns]
        puts, told, gone = [], dict[int, dict[str, Any]](), list[tuple[int, int]]()
        for record in self.log._records:
            if record.kind is not Kind.COMMIT or is_events(record.body):
                continue
            for table, key, op in decode_commit(record.body).rows:
                if table == ALERTS.id:
                    puts.append({"cts": record.sequence, **{names[i]: value for i, value in op.puts.items()}})
                elif table == ALERT_NOTIFICATIONS.id:
                    number = int.from_bytes(key[-8:], "big") - (1 << 63)
                    if op.puts:
                        told[number] = {told_names[i]: value for i, value in op.puts.items()}
                    else:
                        gone.append((record.sequence, number))
        return puts, told, gone

    def events(self) -> list[tuple[int, dict[str, Any]]]:
        found = []
        for token, events in self.appended:
            cts = self.db.outcome(token)
            found += [(cts, event) for event in events if isinstance(cts, int)]
        return found


def micros(moment: dt.datetime) -> int:
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def defined(
    puts: list[dict[str, Any]], events: list[tuple[int, dict[str, Any]]], for_us: int
) -> tuple[dict[str, tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The instances after the last of the evaluations, and all notifications in order."""
    created, *others = puts
    clock, now = created["clock_us"], created["now_us"]
    over = (clock - LATENESS) // SLOT * SLOT
    silenced: list[tuple[int, int | None]] = []
    states: dict[str, dict[str, Any]] = {}
    told: list[tuple[Any, ...]] = []
    for put in others:
        if "seen" not in put:
            silenced.append((put["cts"], put["silenced_us"]))
            continue
        seen = [event for cts, event in events if cts <= put["seen"]]
        clock = max(clock + put["now_us"] - now, min(max(event["ts"] for event in seen), put["now_us"]))
        now, time = put["now_us"], clock - LATENESS
        before, over = over, time // SLOT * SLOT
        assert (put["clock_us"], put["over_us"]) == (clock, over)
        until = next((until for cts, until in reversed(silenced) if cts <= put["seen"]), None)
        quiet = until is not None and now < until
        worst: dict[tuple[str, int], int] = {}
        for event in seen:
            place = event["ep"], event["ts"] // SLOT * SLOT
            worst[place] = max(worst.get(place, 0), event["us"])
        for ep in sorted({event["ep"] for event in seen}):
            evaluated(ep, states, told, worst, range(before, over + 1, SLOT), time, now, quiet, for_us)
        assert put["told"] == len(told)
    shown = {ep: (one["state"], one["since"], one["value"], one["changed"]) for ep, one in states.items()}
    return shown, told


def evaluated(
    ep: str,
    states: dict[str, dict[str, Any]],
    told: list[tuple[Any, ...]],
    worst: dict[tuple[str, int], int],
    moments: range,
    time: int,
    now: int,
    quiet: bool,
    for_us: int,
) -> None:
    was = states.get(ep, {"state": "inactive", "holds": None, "told": False, "value": None, "since": 0})
    holds, value, fires, ended = was["holds"], was["value"], was["state"] == "firing", None
    for moment in moments:  # from here to the next one the slot that ends here is the newest that is over
        found = worst.get((ep, moment - SLOT), 0)
        if found > SLOW:
            holds, value = (moment if holds is None else holds), found
        elif holds is not None:
            since = was["since"] if fires else holds + for_us
            if fires or since < moment:
                ended = since, max(moment, since), value
            holds, fires = None, False
    if ended is not None and (was["told"] if was["state"] == "firing" else not quiet):
        told.append((ep, *ended))
    was_told = was["told"] and ended is None
    if holds is not None:
        fires = fires or holds + for_us <= time
        now_is = {
            "state": "firing" if fires else "pending",
            "since": holds + for_us if fires else holds,
            "holds": holds,
        }
    elif ended is not None:
        now_is, value = {"state": "resolved", "since": ended[1], "holds": None}, ended[2]
    elif was["state"] == "resolved" and time - was["since"] < DAY:
        return
    else:
        states.pop(ep, None)
        return
    same = (was["state"], was["holds"]) == (now_is["state"], now_is["holds"]) and now_is["state"] != "resolved"
    if now_is["state"] == "firing" and not was_told and not quiet:
        told.append((ep, now_is["since"], None, was["value"] if same else value))
        was_told = True
    kept = was if same else {**now_is, "value": value, "changed": now}
    states[ep] = {**kept, "told": was_told and now_is["state"] == "firing"}


def check(world: World) -> tuple[dict[str, tuple[Any, ...]], list[tuple[Any, ...]]]:
    world.log.dies_at = -1
    puts, told, gone = world.logged()
    states, notified = defined(puts, world.events(), world.for_us)
    assert world.found() == states
    said = [
        (json.loads(one["key"])[0][2], one["starts_us"], one["ends_us"], json.loads(one["value"])[0][2])
        for _, one in sorted(told.items())
    ]
    assert said == notified
    assert world.numbers() == told.keys() - {number for _, number in gone}
    return states, notified


def test_a_history_with_crashes_is_what_the_definition_gives() -> None:
    seen: set[str] = set()
    ended = 0
    for seed in range(6):
        world = World(seed)
        for i in range(48):
            if i % 7 == 3:
                world.log.appends, world.log.dies_at = 0, world.random.randrange(1, 3)
            try:
                world.step()
            except Killed:
                world.crash(keep=world.random.randrange(2))
            if i % 12 == 11:
                states, notified = check(world)
                seen |= {state for state, *_ in states.values()}
        ended += sum(ends is not None for _, _, ends, _ in notified)
        world.store.crash()
    assert seen == {"pending", "firing", "resolved"}
    assert ended > 10


@pytest.mark.parametrize("keep", [0, 1])
def test_at_every_kill_point(keep: int) -> None:
    """Whatever append to the log is the last, and whether it reached the disk: what goes on behind it is as defined."""
    point, points = 0, 1
    while point < points:
        point += 1
        world = World(seed=4)
        world.log.appends, world.log.dies_at = 0, point
        for _ in range(14):
            try:
                world.step()
            except Killed:
                world.crash(keep)
                check(world)
        check(world)
        points = world.log.appends
        world.store.crash()
    assert points > 15


def test_one_node_evaluates_until_it_has_said_nothing_for_a_while() -> None:
    world = World(seed=0)
    rows, now = Rows(world.store), world.now_us
    assert rows.take_turn("a", now, MINUTE)
    assert not rows.take_turn("b", now + MINUTE // 2, MINUTE)
    assert rows.take_turn("a", now + MINUTE * 2 // 3, MINUTE)
    assert not rows.take_turn("b", now + MINUTE * 3 // 2, MINUTE)
    assert rows.take_turn("b", now + 2 * MINUTE, MINUTE)
    assert not rows.take_turn("a", now + 2 * MINUTE, MINUTE)
    assert [one["name"] for one in world.db.alerts()] == [NAME]
    world.store.crash()
