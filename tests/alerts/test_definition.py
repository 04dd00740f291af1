"""The state of alerts is what their definition gives over the log, wherever a crash comes.

``defined`` is the definition once more, slot by slot over all events, in plain Python. Of the log it takes what was
appended, retracted and silenced, and of each evaluation its snapshot and its time; everything else an evaluation wrote
has to be what comes out, in that evaluation's own record: clock, instances and notifications.

Histories differ (``Manner``): in how many keys there are, how long nothing comes, how late or how much ahead of the
clock events are, and how long an alert waits for them.

At which of its writes a process may end, and what of them was on the disk then, ``test_kill_points`` goes through.
"""

from __future__ import annotations

import datetime as dt
import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

import kivi
from kivi.alerts import Alerts
from kivi.alerts.rows import Rows
from kivi.embedded.database import Database
from kivi.encoding.keys import decode_key
from kivi.engine.memory import MemoryEngine
from kivi.log import CommitLog, Done, Kind, Ticket
from kivi.log.memory import MemoryLog
from kivi.model.scans import Scan
from kivi.mvcc.record import decode_commit, is_events
from kivi.runtime.settings import Settings
from kivi.store.catalog import ALERT_INSTANCES, ALERT_NOTIFICATIONS, ALERTS
from kivi.store.facade import Store
from tests.seeds import AT_NIGHT

SETTINGS = Settings.of({"background": False, "consolidate_rows": 2, "block_rows": 8})
MINUTE = 60_000_000
SLOT = 5 * MINUTE
DAY = 24 * 60 * MINUTE
BEGIN = 1_750_000_000_000_000 // SLOT * SLOT
NAME = "slow"
State = tuple[Any, ...]


@dataclass(frozen=True)
class Manner:
    """How a history goes. Times are minutes."""

    keys: tuple[str, ...] = ("a", "b")
    pauses: tuple[float, ...] = (0, 0.5, 1, 3, 6, 17)
    """Between two steps."""
    late: tuple[int, ...] = (0, 0, 2, 9, -3)
    """By how much all events of a batch are; those that are ahead are less than 0."""
    lateness: int = 1
    """How long the alerts wait for them."""
    batches: tuple[int, ...] = (1, 2, 5)
    retracts: bool = False
    nulls: bool = False


SPARSE: Final = tuple(f"key {i}" for i in range(40))
MANNERS: Final = {
    "two keys": Manner(),
    "sparse keys": Manner(keys=SPARSE, batches=(1, 3, 12), nulls=True),
    "silences": Manner(pauses=(0, 1, 6, 60, 11 * 60, 26 * 60), keys=("a", "b", "c")),
    "very late": Manner(late=(0, 0, 4, 30, 3 * 60, 30 * 60), keys=SPARSE[:6], lateness=12, batches=(1, 8)),
    "ahead": Manner(late=(0, -1, -20, -50 * 60, 5), lateness=0, batches=(1, 2, 9), nulls=True),
    "retracted": Manner(retracts=True, keys=SPARSE[:5], pauses=(0, 0.5, 1, 3, 6, 17, 25 * 60), late=(0, 2, 9)),
}


@dataclass(frozen=True)
class Watch:
    """An alert: that a column of ``ep_5m`` is above a bound, or below it."""

    name: str
    column: str
    bound: int
    for_us: int
    is_below: bool = False

    @property
    def where(self) -> Any:
        column = kivi.col(self.column)
        return column < self.bound if self.is_below else column > self.bound

    def holds(self, value: int | None) -> bool:
        return value is not None and (value < self.bound if self.is_below else value > self.bound)

    def rows(self, events: list[dict[str, Any]]) -> dict[tuple[str, int], int | None]:
        """What the column holds for each key and slot of which there is a row."""
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        for event in events:
            known = found[event["ep"], event["ts"] // SLOT * SLOT]
            known += [event["us"]] if self.column == "worst" and event["us"] is not None else []
            known += [1] if self.column == "n" else []
        return {place: (sum if self.column == "n" else max)(known) if known else None for place, known in found.items()}


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
    notify: str = "http://localhost:1/hook"
    manner: Manner = field(default_factory=Manner)
    now_us: int = BEGIN + 7 * MINUTE
    at_us: int = BEGIN
    appended: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    retracted: list[tuple[str, int, int, int]] = field(default_factory=list)
    """By which token, as of which snapshot, and which event times."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for_us = [2 * MINUTE, SLOT, 0, 12 * MINUTE]
        self.watches = (
            Watch(NAME, "worst", 100, for_us[self.seed % 4]),
            Watch("busy", "n", 1, for_us[(self.seed + 2) % 4]),
            Watch("quiet", "n", 2, for_us[(self.seed + 3) % 4], is_below=True),
        )
        self.make()
        self.open()
        self.db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "ep": "string", "us": "int64"})
        self.append()
        self.db.create_aggregate(
            "ep_5m",
            source="calls",
            group_by=[kivi.time_slot("ts", "5m"), "ep"],
            measures={"n": kivi.count(), "worst": kivi.max("us")},
        )
        for one in self.watches:
            lateness = self.manner.lateness * MINUTE
            self.db.create_alert(
                one.name, on="ep_5m", where=one.where, for_=one.for_us, lateness=lateness, notify=self.notify
            )

    def make(self) -> None:
        """What outlives a crash, in part."""
        self.engine = MemoryEngine()
        self.log: CommitLog = KeptLog(lambda: self.now_us)

    def open(self) -> None:
        self.store = Store.open(
            None, settings=SETTINGS, engine=self.engine, log=self.log, clock=lambda: self.now_us / 1_000_000
        )
        self.db = Database(self.store)
        self.alerts = [Alerts(self.store), Alerts(self.store)]

    def append(self) -> None:
        """Of some events; late ones and some that are ahead among them."""
        count = self.random.choice(self.manner.batches)
        late = self.random.choice(self.manner.late) * MINUTE
        events = [
            {
                "ts": min(self.at_us, self.now_us) - late - self.random.randrange(2 * MINUTE),
                "ep": self.random.choice(self.manner.keys),
                "us": self.random.choice((1, 500, None) if self.manner.nulls else (1, 500)),
            }
            for _ in range(count)
        ]
        self.enter(events)

    def retract(self) -> None:
        """Some minutes, or all that there is."""
        token = f"retraction {len(self.retracted)}"
        length = self.random.choice((MINUTE, 7 * MINUTE, 100 * DAY))
        start = self.random.choice(self.random.choice(self.appended)[1])["ts"] - length // 2
        with self.db.transaction(token=token) as tx:
            self.retracted.append((token, tx.start_ts, start, start + length))
            tx.retract("calls", start=(start,), end=(start + length,))

    def enter(self, events: list[dict[str, Any]]) -> None:
        token = f"token {len(self.appended)}"
        self.appended.append((token, events))
        self.db.append("calls", events, token=token)

    def step(self) -> None:
        passes = int(self.random.choice(self.manner.pauses) * MINUTE)
        self.now_us += passes
        self.at_us += self.random.choice((passes, passes, 0, 3 * passes))
        kind = self.random.randrange(10)
        if kind < 5:
            self.append()
        elif kind == 5:
            until = self.random.choice((None, self.now_us + 4 * MINUTE))
            self.db.silence(self.random.choice(self.watches).name, until=until)
        elif kind == 6:
            self.db.consolidate()
        elif kind == 7:
            with self.store.snapshots.opened() as lease:
                waiting = Rows(self.store).notifications(lease, self.random.choice(self.watches).name, 2)
            Rows(self.store).delivered(waiting)
        elif kind == 8 and self.manner.retracts:
            self.retract()
        for each in self.alerts[: self.random.choice((1, 1, 2))]:
            for one in self.watches:
                each._evaluator.evaluate(one.name)

    def crash(self, keep: int) -> None:
        self.store.crash()
        self.engine.crash(self.random.choice((0, 1, 3, 100)))
        assert isinstance(self.log, KeptLog)
        self.log.hold, self.log.dies_at = False, -1
        self.log.crash(keep)
        self.open()

    # -- what is there, and what the log says ------------------------------------------------------------

    def found(self, watch: Watch) -> dict[str, State]:
        return {
            one["key"]["ep"]: (
                one["state"], micros(one["since"]), one["value"][watch.column], micros(one["last_change"])
            )
            for one in self.db.alerts()
            if one["name"] == watch.name and one["key"] is not None
        }  # fmt: skip

    def waiting(self, watch: Watch) -> set[int]:
        """The numbers of the notifications that are yet to be delivered."""
        with self.store.snapshots.opened() as lease:
            rows = list(Rows(self.store).scan(lease, ALERT_NOTIFICATIONS, Scan(prefix=(watch.name,))))
        return {row["number"] for row in rows}

    def logged(self) -> dict[str, Logged]:
        """What the log says of each alert, by its name."""
        logs = {watch.name: Logged() for watch in self.watches}
        instances: dict[str, dict[bytes, dict[str, Any]]] = {name: {} for name in logs}
        for record in self.log.replay(0):
            if record.kind is not Kind.COMMIT or is_events(record.body):
                continue
            puts: dict[str, dict[str, Any]] = {}
            for table, key, op in decode_commit(record.body).rows:
                schema = _TABLES.get(table)
                if schema is None:
                    continue
                name, *rest = decode_key([column.type for column in schema.key], key)
                columns = {schema.columns[i].name: value for i, value in op.puts.items()}
                if schema is ALERTS:
                    puts[name] = {"cts": record.sequence, **columns}
                elif schema is ALERT_INSTANCES:
                    instances[name][rest[0]] = columns
                elif columns:
                    logs[name].told[rest[0]] = columns
                else:
                    logs[name].gone.add(rest[0])
            for name, put in puts.items():
                states = [one for one in instances[name].values() if one]
                logs[name].puts.append({**put, "instances": {shown(one["key"]): _state(one) for one in states}})
        return logs

    def events(self) -> list[Entered]:
        gone = [(self.db.outcome(token), snapshot, start, end) for token, snapshot, start, end in self.retracted]
        found = []
        for token, events in self.appended:
            cts = self.db.outcome(token)
            if not isinstance(cts, int):
                continue
            for event in events:
                by = [
                    at for at, snapshot, start, end in gone
                    if isinstance(at, int) and cts <= snapshot and start <= event["ts"] < end
                ]  # fmt: skip
                found.append(Entered(cts, min(by, default=None), event))
        return found


@dataclass(frozen=True)
class Entered:
    """An event, by which commit it came, and by which it went; None: by none."""

    came: int
    went: int | None
    event: dict[str, Any]

    def is_seen(self, snapshot: int) -> bool:
        return self.came <= snapshot and (self.went is None or snapshot < self.went)


@dataclass
class Logged:
    """``puts``: what evaluations, and the creation first, put into the alert's row, each with the instances that there
    are behind it. ``told``: all notifications, by number; ``gone``: which of them are delivered, or given up."""

    puts: list[dict[str, Any]] = field(default_factory=list)
    told: dict[int, dict[str, Any]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def said(self) -> list[State]:
        """The notifications, in order."""
        return [
            (shown(one["key"]), one["starts_us"], one["ends_us"], shown(one["value"]))
            for _, one in sorted(self.told.items())
        ]


_TABLES = {table.id: table for table in (ALERTS, ALERT_INSTANCES, ALERT_NOTIFICATIONS)}


def shown(values: str) -> Any:
    """The first of some named values, as they are kept."""
    return json.loads(values)[0][2]


def _state(row: dict[str, Any]) -> State:
    return row["state"], row["since_us"], shown(row["value"]), row["changed_us"]


def micros(moment: dt.datetime) -> int:
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def defined(
    puts: list[dict[str, Any]], events: list[Entered], watch: Watch, lateness: int
) -> tuple[dict[str, State], list[State]]:
    """The instances after the last of the evaluations, and all notifications in order."""
    created, *others = puts
    clock, now = created["clock_us"], created["now_us"]
    over = (clock - lateness) // SLOT * SLOT
    silenced: list[tuple[int, int | None]] = []
    states: dict[str, dict[str, Any]] = {}
    instances: dict[str, State] = {}
    told: list[State] = []
    for put in others:
        if "seen" not in put:
            silenced.append((put["cts"], put["silenced_us"]))
            continue
        seen = [one.event for one in events if one.is_seen(put["seen"])]
        newest = max((event["ts"] for event in seen), default=0)
        clock = max(clock + put["now_us"] - now, min(newest, put["now_us"]))
        now, time = put["now_us"], clock - lateness
        before, over = over, max(over, time // SLOT * SLOT)
        assert (put["clock_us"], put["over_us"]) == (clock, over)
        until = next((until for cts, until in reversed(silenced) if cts <= put["seen"]), None)
        quiet = until is not None and now < until
        rows = watch.rows(seen)
        for ep in sorted({ep for ep, _ in rows} | states.keys()):
            evaluated(ep, states, told, rows, range(before, over + 1, SLOT), time, now, quiet, watch)
        assert put["told"] == len(told)
        instances = {ep: (one["state"], one["since"], one["value"], one["changed"]) for ep, one in states.items()}
        assert put["instances"] == instances
    return instances, told


def evaluated(
    ep: str,
    states: dict[str, dict[str, Any]],
    told: list[State],
    rows: dict[tuple[str, int], int | None],
    moments: range,
    time: int,
    now: int,
    quiet: bool,
    watch: Watch,
) -> None:
    for_us = watch.for_us
    was = states.get(ep, {"state": "inactive", "holds": None, "told": False, "value": None, "since": 0})
    holds, value, fires, ended = was["holds"], was["value"], was["state"] == "firing", None
    for moment in moments:  # from here to the next one the slot that ends here is the newest that is over
        found = rows.get((ep, moment - SLOT))
        if watch.holds(found):
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


def check(world: World) -> list[tuple[dict[str, State], list[State]]]:
    """That everything is what the definition gives over the log; which is returned, for each alert."""
    found = []
    logs, events = world.logged(), world.events()
    for watch in world.watches:
        log = logs[watch.name]
        states, notified = defined(log.puts, events, watch, world.manner.lateness * MINUTE)
        assert world.found(watch) == states
        assert log.said() == notified
        assert world.waiting(watch) == log.told.keys() - log.gone
        found.append((states, notified))
    return found


@pytest.mark.hypothesis
@pytest.mark.parametrize("manner", MANNERS)
def test_a_history_with_crashes_is_what_the_definition_gives(manner: str) -> None:
    seen: set[str] = set()
    ended = 0
    for seed in range(40 if AT_NIGHT else 1):
        world = World(seed, manner=MANNERS[manner])
        log = world.log
        assert isinstance(log, KeptLog)
        for i in range(48):
            if i % 7 == 3:
                log.appends, log.dies_at = 0, world.random.randrange(1, 3)
            try:
                world.step()
            except Killed:
                world.crash(keep=world.random.randrange(2))
            if i % 12 == 11:
                log.dies_at = -1
                found = check(world)
        puts = [put for log in world.logged().values() for put in log.puts]
        seen |= {state for put in puts for state, *_ in put["instances"].values()}
        ended += sum(ends is not None for _, notified in found for _, _, ends, _ in notified)
        world.store.crash()
    assert seen == {"pending", "firing", "resolved"}
    assert ended > 10


def test_one_node_evaluates_until_it_has_said_nothing_for_a_while() -> None:
    world = World(seed=0)
    rows, now = Rows(world.store), world.now_us
    assert rows.take_turn("a", now, MINUTE)
    assert not rows.take_turn("b", now + MINUTE // 2, MINUTE)
    assert rows.take_turn("a", now + MINUTE * 2 // 3, MINUTE)
    assert not rows.take_turn("b", now + MINUTE * 3 // 2, MINUTE)
    assert rows.take_turn("b", now + 2 * MINUTE, MINUTE)
    assert not rows.take_turn("a", now + 2 * MINUTE, MINUTE)
    assert {one["name"] for one in world.db.alerts()} == {one.name for one in world.watches}
    world.store.crash()
