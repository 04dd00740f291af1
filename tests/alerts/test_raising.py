"""Rules whose judgement is a pattern, against the naive matcher over all events (R25, R26).

Two threads of evaluation, as two nodes have them, look in any order, also in the middle of each other's step; the
process ends at any append of the log, which is on the disk then or is not.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi import col, prev
from kivi.alerts import Alerts
from kivi.delta.ops import Barrier, RowOp
from kivi.embedded.database import Database
from kivi.engine.memory import MemoryEngine
from kivi.errors import Conflict, InvalidArgument, NotFound, ResourceExhausted, SchemaError
from kivi.log.features import MATCHES_RAISED
from kivi.model.rules import Rule
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.runtime.settings import Settings
from kivi.store.catalog import JUDGED_TO, RAISED, features_in, features_of
from kivi.store.decided import Decided
from kivi.store.facade import Store
from kivi.store.raising import Raising
from tests.alerts.test_definition import KeptLog, Killed
from tests.naive_patterns import COLUMNS, Case, event
from tests.seeds import seeds
from tests.waiting import wait_until

S = 1_000_000
T0 = 1_774_000_000 * S
LATENESS = 10 * S
SETTINGS = Settings.of({"background": False, "consolidate_rows": 8, "block_rows": 16})
Row = dict[str, Any]


class World:
    """A store on a clock of its own, with rules over one table, each into a table of its own."""

    def __init__(self, seed: int, rules: int = 6) -> None:
        self.rng = random.Random(seed)
        self.now_us, self.events = T0, list[Row]()
        self.engine, self.log = MemoryEngine(), KeptLog(lambda: self.now_us)
        self.open()
        self.db.create_event_table("calls", event_time="ts", columns={**COLUMNS, "id": "int64"})
        self.cases = dict[str, Case]()
        while len(self.cases) < rules:
            self.declare(f"rule_{len(self.cases)}")

    def open(self) -> None:
        clock = lambda: self.now_us / 1_000_000  # noqa: E731
        self.store = Store.open(None, settings=SETTINGS, engine=self.engine, log=self.log, clock=clock)
        self.db = Database(self.store)
        self.nodes = [Node(self.store, self), Node(self.store, self)]

    def declare(self, name: str, **more: Any) -> None:
        case = Case(self.rng, [1, 3 * S, 10 * S])
        case.pattern = dataclasses.replace(case.pattern, measures=(*case.pattern.measures, ("id", kivi.first("id"))))
        case.measured["id"] = ("", "id", lambda values: values[0])
        types = {"rows": "int64", "first": "int64", "last": "timestamp", "some": "int64", "total": "int64"}
        types |= {"paid": "decimal(18,2)", "least": "float64", "newest": "timestamp", "mean": "float64", "id": "int64"}
        columns = {key: COLUMNS[key] for key in case.pattern.partition_by}
        columns |= {key: types[key] for key, _ in case.pattern.measures}
        self.db.create_event_table(name, event_time="at", columns={**columns, "at": "timestamp"})
        try:
            self.db.create_rule(name, source="calls", into=name, match=case.pattern, lateness=LATENESS, **more)
        except InvalidArgument:  # it looks beside its matches
            self.db.drop(name)
        else:
            self.cases[name] = case

    def rule(self, name: str) -> Rule:
        return next(rule for rule in self.store.catalog.visible.rules.values() if rule.name == name)

    def append(self, late: int = 0) -> None:
        new = [
            {**event(self.rng, self.now_us - late - self.rng.randrange(10) * S), "id": len(self.events) + i}
            for i in range(self.rng.choice([1, 8, 20]))
        ]
        self.db.append("calls", new)
        self.events += new

    def look(self) -> None:
        for name in self.cases:
            for node in self.nodes[: self.rng.randrange(3)]:
                with suppress(Conflict):
                    node.evaluate(self.rule(name))

    def crash(self) -> None:
        self.store.crash()
        self.engine.crash(self.rng.choice((0, 1, 3, 100)))
        self.log.hold, self.log.dies_at = False, -1
        self.log.crash(self.rng.choice((0, 10_000)))
        self.open()

    def raised(self, name: str) -> Counter[str]:
        rows = self.db.snapshot().scan(name)
        return Counter(_shown({key: value for key, value in row.items() if key != "at"}) for row in rows)

    def matches(self, name: str) -> Counter[str]:
        events = [{**row, "ts": moment(row["ts"])} for row in self.events]
        return Counter(map(_shown, self.cases[name].answer(events)))


class Node(Raising):
    """In the middle of some steps another node makes the same one."""

    def __init__(self, store: Store, world: World) -> None:
        super().__init__(store)
        self._world, self._is_inside = world, False

    def _raise(self, txn: Any, rule: Rule, source: TableSchema, *args: Any) -> bool:
        if not self._is_inside and self._world.rng.random() < 0.2:
            other = Node(self._world.store, self._world)
            other._is_inside = True
            other.evaluate(rule)
        return super()._raise(txn, rule, source, *args)


def moment(us: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=us)


def _shown(row: Row) -> str:
    return repr(sorted(row.items()))


def finish(world: World) -> None:
    world.now_us += 100 * S
    for name in world.cases:
        Raising(world.store).evaluate(world.rule(name))


@pytest.mark.parametrize("seed", seeds(1, 2, night=6))
def test_what_is_raised_is_what_matches_each_once_r26(seed: int) -> None:
    """Also over crashes. Of events that come too late nothing is raised twice, and what they change is counted."""
    world = World(seed)
    with_late, crashes = seed % 3 == 2, 0
    for step in range(25):
        world.now_us += world.rng.randrange(8) * S
        world.append(late=30 * S if with_late and step % 5 == 4 else 0)
        if seed % 2 and world.rng.random() < 0.5:
            world.log.dies_at = world.log.appends + world.rng.randrange(1, 4)
        try:
            world.look()
        except Killed:
            world.crash()
            crashes += 1
        world.log.dies_at = -1
        if world.rng.random() < 0.3:
            world.db.consolidate()
        for name in world.cases if with_late else ():
            assert len(ids := ids_of(world, name)) == len(set(ids))
    finish(world)
    known = {rule["name"]: rule for rule in world.db.rules()}
    same = 0
    for name in world.cases:
        found, late = world.raised(name), known[name]["late"]
        assert known[name]["judged"] == known[name]["raised"] == found.total(), name
        assert not late or with_late, name
        if not late and (
            world.cases[name].within == 10 * S or not with_late
        ):  # of others that is too far back to count
            assert found == world.matches(name), (name, str(world.cases[name].pattern))
            same += found.total()
        assert len(ids := ids_of(world, name)) == len(set(ids)), name
    assert crashes or not seed % 2
    assert same > 50 or with_late
    assert not with_late or any(rule["late"] for rule in known.values())
    with world.store.snapshots.opened() as lease:
        assert not list(world.store.scan(lease, RAISED, Scan()))  # nothing is remembered for ever
    for name in world.cases:
        world.db.drop_rule(name)
    with world.store.snapshots.opened() as lease:
        assert not any(batch.num_rows for batch in world.store.scan(lease, JUDGED_TO, Scan()))


def ids_of(world: World, name: str) -> list[int]:
    return [row["id"] for row in world.db.snapshot().scan(name)]


# -- one thing at a time ----------------------------------------------------------------------------------

UP = kivi.pattern(
    "A B{2,} C",
    partition_by="app",
    within="1m",
    define={"B": col("x") > prev("x"), "C": col("x") < prev("x")},
    measures={"peak": kivi.max("B.x"), "total": kivi.sum("x"), "began": kivi.first("ts")},
)
ASCENT = (0, 1, 2, 3, 1)
FOUND = {"app": "string", "at": "timestamp", "peak": "int64", "doubled": "int64"}


class Calls(World):
    """Without random rules; ``up`` has what ``UP`` finds."""

    def __init__(self) -> None:
        super().__init__(0, rules=0)
        self.raising = Raising(self.store)
        self.db.create_event_table("up", event_time="at", columns=FOUND)

    def up(self, **more: Any) -> None:
        select = {"doubled": col("peak") * 2}
        self.db.create_rule("up", source="calls", into="up", match=UP, select=select, lateness="5s", **more)

    def calls(self, app: str, *values: int) -> None:
        """One a second; they end now."""
        ends = self.now_us - len(values) * S
        self.db.append("calls", [{"app": app, "ts": ends + i * S, "x": x} for i, x in enumerate(values, start=1)])

    def go_on(self, seconds: int = 70) -> list[tuple[str, int, int]]:
        """What is there once so much time has passed."""
        self.raising.evaluate(self.rule("up"))
        self.now_us += seconds * S
        self.raising.evaluate(self.rule("up"))
        return [(row["app"], row["peak"], row["doubled"]) for row in self.db.snapshot().scan("up")]

    def counts(self) -> dict[str, Any]:
        return next(rule for rule in self.db.rules() if rule["name"] == "up")


def test_what_is_raised_are_events_like_any_others() -> None:
    """It waits for the lateness, and has the time of the match's last event; aggregates and rules stand on it."""
    world = Calls()
    world.db.create_aggregate("by_app", source="up", group_by=["app"], measures={"n": kivi.count()})
    world.db.create_event_table("high", event_time="at", columns=FOUND)
    world.db.create_rule("high", source="up", into="high", where=col("peak") > 2)
    world.up()
    world.calls("shop", *ASCENT)
    ended = world.now_us
    assert world.go_on(4) == []
    assert world.go_on(2) == [("shop", 3, 6)]
    assert [row["at"] for row in world.db.snapshot().scan("up")] == [moment(ended)]
    assert world.db.get("by_app", ("shop",)) == {"app": "shop", "n": 1}
    assert [row["peak"] for row in world.db.snapshot().scan("high")] == [3]
    watermark = world.db.watermark()
    assert len(world.go_on()) == 1
    assert world.db.watermark() == watermark  # an idle store writes nothing
    found = world.counts()
    assert (found["judged"], found["raised"], found["late"], found["error"]) == (1, 1, 0, "")
    assert found["lateness_us"] == 5 * S
    assert found["match"].startswith("pattern (A B{2,} C) within 0:01:00")
    assert found["judged_us"] >= ended
    world.db.close()


def test_it_begins_with_what_is_decided_from_then_on_or_with_all_events() -> None:
    for backfill in (False, True):
        world = Calls()
        world.calls("old", *ASCENT)
        world.now_us += 100 * S
        world.calls("open", *ASCENT[:3])  # this one may end after the rule was made
        world.up(backfill=backfill)
        assert world.counts()["backfilled"] is backfill
        world.now_us += S
        world.calls("open", *ASCENT[4:])
        raised = world.go_on()
        assert raised == [("old", 3, 6), ("open", 2, 4)][0 if backfill else 1 :]
        world.db.close()


def test_much_is_judged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Calls()
    for i in range(40):
        world.now_us += 60 * S
        world.calls(f"app {i % 3}", *ASCENT)
    world.up(backfill=True)
    judged, parts = Decided.judged, list[int]()

    def limited(self: Decided, *args: Any) -> Any:
        found = judged(self, *args)
        if found.matches.num_rows > 7:
            raise ResourceExhausted("more than seven")
        parts.append(found.matches.num_rows)
        return found

    monkeypatch.setattr(Decided, "judged", limited)
    assert len(world.go_on()) == 40
    assert sum(parts) == world.counts()["raised"] == 40
    world.db.close()


def test_what_a_match_cannot_do_is_counted_and_holds_up_no_other() -> None:
    """A sum or an expression out of range, and an aggregate that cannot have what was raised."""
    world = Calls()
    world.up()
    most = 2**63 - 1
    world.calls("sum", most - 5, most - 4, most - 3, most - 2, 1)  # its total
    world.calls("select", -(2**62) - 9, 2**62, 2**62 + 1, 5)  # twice its peak
    world.calls("shop", *ASCENT)
    assert world.go_on() == [("shop", 3, 6)]
    found = world.counts()
    assert (found["judged"], found["raised"], found["failed"], found["error"]) == (3, 1, 2, "")
    world.db.close()


@pytest.mark.parametrize("bad", ["each", "together"])
def test_of_matches_that_are_decided_together_those_alone_fail_that_cannot_be_raised_r25(bad: str) -> None:
    """All of them end at one moment, so no step can tell them apart; a crash changes nothing of what was given up."""
    world = Calls()
    measure = kivi.sum(col("peak") * col("peak")) if bad == "each" else kivi.sum(col("large") * 4e307)
    world.db.create_event_table("ups", event_time="at", columns={**FOUND, "large": "float64"})
    world.db.create_aggregate("by_at", source="ups", group_by=["at"], measures={"n": kivi.count(), "x": measure})
    select = {"doubled": col("peak") * 2, "large": col("peak") * 1.0}
    world.db.create_rule("up", source="calls", into="ups", match=UP, select=select, lateness="5s")
    ended = world.now_us
    for i in range(40):
        world.calls(f"app {i:02}", *(2**40 + x if i % 13 == 5 and bad == "each" else x for x in ASCENT))
    world.raising.evaluate(world.rule("up"))
    world.now_us += 70 * S
    world.log.dies_at = world.log.appends + 1
    with pytest.raises(Killed):
        world.raising.evaluate(world.rule("up"))
    world.crash()
    world.log.dies_at = -1
    for _ in range(2):
        Raising(world.store).evaluate(world.rule("up"))
        names = [row["app"] for row in world.db.snapshot().scan("ups")]
        wanted = (
            [i for i in range(40) if i % 13 != 5] if bad == "each" else [0]
        )  # 12e307 is the most that a float holds
        assert sorted(names) == [f"app {i:02}" for i in wanted]
        found = world.counts()
        assert (found["judged"], found["raised"], found["failed"]) == (40, len(wanted), 40 - len(wanted))
        assert found["error"] == ""
        assert [(row["at"], row["n"]) for row in world.db.snapshot().scan("by_at")] == [(moment(ended), len(wanted))]
        world.now_us += 10 * S
    world.db.close()


def test_more_than_one_append_may_bring_is_raised_in_parts() -> None:
    world = Calls()
    for i in range(40):
        world.now_us += 60 * S
        world.calls(f"app {i % 3}", *ASCENT)
    world.up(backfill=True)
    world.store.commits.judging.settings = dataclasses.replace(SETTINGS, max_append_rows=7)
    assert len(world.go_on()) == 40
    found = world.counts()
    assert (found["judged"], found["raised"], found["failed"], found["error"]) == (40, 40, 0, "")
    world.db.close()


@pytest.mark.parametrize("limit", [{"max_append_rows": 7}, {"max_value_bytes": 6}])
def test_what_no_append_may_bring_fails_and_the_rule_goes_on_r25(limit: dict[str, Any]) -> None:
    """More than that in one millisecond, together; a value that is too long, alone."""
    world = Calls()
    world.up()
    for i in range(10):
        world.calls(f"app {i}" if i else "a long name", *ASCENT)
    world.store.commits.judging.settings = dataclasses.replace(SETTINGS, **limit)
    assert len(world.go_on()) == (0 if "max_append_rows" in limit else 9)
    world.calls("shop", *ASCENT)
    assert world.go_on()[-1] == ("shop", 3, 6)
    found, failed = world.counts(), 10 if "max_append_rows" in limit else 1
    assert (found["judged"], found["raised"], found["failed"], found["error"]) == (11, 11 - failed, failed, "")
    world.db.close()


def test_what_comes_late_or_goes_raises_nothing_again() -> None:
    world = Calls()
    world.up()
    world.calls("shop", *ASCENT)
    assert world.go_on(10) == [("shop", 3, 6)]
    began = world.now_us - 14 * S
    world.db.append("calls", [{"app": "shop", "ts": began - S, "x": -1}])  # the match would begin with it
    assert world.go_on() == [("shop", 3, 6)]
    assert world.counts()["late"] == 2  # the one that began there, and the one that would
    world.db.append("calls", [{"app": "shop", "ts": 0, "x": 1}])  # it is ages late, and read by nobody
    assert world.go_on() == [("shop", 3, 6)]
    world.calls("shop", *ASCENT)
    with world.db.transaction() as tx:
        tx.retract("calls", where=col("x") == 1)
    assert world.go_on() == [("shop", 3, 6)]
    world.calls("shop", *ASCENT)
    assert world.go_on() == [("shop", 3, 6)] * 2
    world.db.close()


def test_a_match_that_a_late_event_holds_open_is_not_raised_again_r26() -> None:
    """A row in front of it might begin a match that reaches over it, for as long as that may end."""
    world = Calls()
    define = {name: col("x") == x for name, x in {"A": 1, "B": 2, "L": 9, "N": 8}.items()}
    pair = kivi.pattern("A B | L X* N", within="1m", define=define, measures={"peak": kivi.max("x")})
    select = {"doubled": col("peak") * 2, "app": "all"}
    world.db.create_rule("up", source="calls", into="up", match=pair, select=select, lateness="5s")
    world.calls("shop", 1, 2)
    assert world.go_on(10) == [("all", 2, 4)]
    world.db.append("calls", [{"app": "shop", "ts": world.now_us - 20 * S, "x": 9}])
    assert world.go_on(10) == [("all", 2, 4)]
    assert world.counts()["late"] == 1
    assert world.go_on(70) == [("all", 2, 4)]  # it is decided once more
    world.calls("shop", 1, 2)
    assert world.go_on(10) == [("all", 2, 4)] * 2
    world.db.close()


def test_what_concerns_the_whole_rule_is_told_and_it_goes_on_when_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Calls()
    world.up()
    world.db.create_event_table("other", event_time="at", columns=FOUND)
    world.db.create_rule("other", source="calls", into="other", match=UP, lateness="5s")
    world.calls("shop", *ASCENT)
    judged = Decided.judged

    def refused(self: Decided, lease: Any, schema: Any, *args: Any) -> Any:
        if world.rule("up").id == current[0]:
            raise ResourceExhausted("too much")
        return judged(self, lease, schema, *args)

    current = [0]
    evaluate = Raising.evaluate

    def noted(self: Raising, rule: Rule) -> None:
        current[0] = rule.id
        evaluate(self, rule)

    monkeypatch.setattr(Decided, "judged", refused)
    monkeypatch.setattr(Raising, "evaluate", noted)
    Alerts(world.store).round()
    world.now_us += 70 * S
    Alerts(world.store).round()
    found = {rule["name"]: (rule["raised"], rule["error"]) for rule in world.db.rules()}
    assert found == {"up": (0, "too much"), "other": (1, "")}
    monkeypatch.setattr(Decided, "judged", judged)
    assert world.go_on() == [("shop", 3, 6)]
    assert world.counts()["error"] == ""
    world.db.close()


def test_what_is_refused() -> None:
    world = Calls()
    db = world.db
    db.create_aggregate("n", source="calls", group_by=["app"], measures={"n": kivi.count()})
    db.create_event_table("cut", event_time="ts", columns=COLUMNS, shard_by=["app"])
    db.create_event_table("cut_up", event_time="at", columns=FOUND, shard_by=["app"])
    wanted: dict[str, Any] = {"source": "calls", "into": "up", "match": UP}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"match": "A B"}, InvalidArgument, "made by kivi.pattern"),
        ({"match": dataclasses.replace(UP, within_us=None)}, InvalidArgument, "give it a within"),
        ({"against": kivi.lookup("n", by=["app"])}, InvalidArgument, "over events alone"),
        ({"own_events": True}, InvalidArgument, "over events alone"),
        ({"match": None, "lateness": "1s"}, InvalidArgument, "this one has none"),
        ({"lateness": "soon"}, InvalidArgument, "soon"),
        ({"select": {"doubled": col("x")}}, SchemaError, "x"),
        ({"select": {"doubled": "a"}}, Exception, "doubled"),
        ({"select": {"none": 1}}, Exception, "none"),
        ({"where": col("none") > 1}, Exception, "none"),
        ({"where": col("app").under("a")}, InvalidArgument, "of reads"),
        ({"into": "calls"}, SchemaError, "into itself"),
        ({"into": "n"}, SchemaError, "rules judge and raise events"),
        ({"source": "none"}, NotFound, "none"),
        ({"source": "cut"}, SchemaError, "is sharded by app, and a rule knows what it has judged by the places"),
        ({"into": "cut_up"}, SchemaError, "its source 'calls' is not sharded"),
    ]
    for given, error, text in cases:
        with pytest.raises(error, match=text):
            db.create_rule("up", **{**wanted, **given})
    assert db.rules() == []
    db.create_rule("up", **wanted, lateness="auto")
    for name, kept in (("calls", "up"), ("up", "up")):
        with pytest.raises(InvalidArgument, match=f"named by the rules {kept}|is the source of"):
            db.drop(name)
    with pytest.raises(InvalidArgument, match="circle"):
        db.create_rule("back", source="up", into="calls", select={"ts": col("at")})
    with pytest.raises(kivi.AlreadyExists):
        db.create_rule("up", **wanted)
    world.db.drop_rule("up")
    world.db.create_rule("up", **wanted)
    world.db.close()


def test_it_goes_on_in_a_copy_of_the_store(tmp_path: Path) -> None:
    """By its own thread, and where it was: a copy has the position, and what was raised."""

    def says(db: kivi.Database, peaks: list[int]) -> bool:
        return [row["peak"] for row in db.snapshot().scan("up")] == peaks

    with kivi.open(str(tmp_path / "data")) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.create_event_table("up", event_time="at", columns=FOUND)
        db.create_rule("up", source="calls", into="up", match=UP, lateness="0s")
        calls: list[Row] = [{"app": "shop", "ts": T0 + i * S, "x": x} for i, x in enumerate([*ASCENT, *ASCENT, 0])]
        db.append("calls", calls)
        wait_until(lambda: says(db, [3, 3]), reason=db.rules)
        db.checkpoint(str(tmp_path / "copy"))
    with kivi.open(str(tmp_path / "copy")) as db:
        db.append("calls", [{**call, "ts": call["ts"] + 100 * S} for call in calls])
        wait_until(lambda: says(db, [3, 3, 3, 3]), reason=db.rules)
        assert db.rules()[0]["raised"] == 4


def test_versions_that_do_not_know_such_rules_have_none_in_their_log() -> None:
    world = Calls()
    world.db.create_event_table("high", event_time="at", columns=FOUND)
    world.db.create_rule("high", source="up", into="high", where=col("peak") > 2)
    assert not features_in(world.store.catalog.visible)
    assert "match" not in world.rule("high").to_json()
    world.up()
    assert features_in(world.store.catalog.visible) == (MATCHES_RAISED,)
    definition = RowOp(Barrier.PATCH, {1: world.rule("up").to_json()}, {})
    assert features_of([(world.rule("up").id, definition)]) == (MATCHES_RAISED,)
    world.db.close()
