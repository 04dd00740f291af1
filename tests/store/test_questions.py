"""Questions equal brute force over the events that the snapshot sees (R24), whatever answers them.

Events are in pending, in blocks, in compacted ones, in settled files, some retracted, some below a floor. Aggregates
are beside them, and questions are asked with and without these. The brute force groups the rows of a scan.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi import col
from kivi.store.questions import Questions
from tests.golden.driver import EmbeddedDriver

MINUTE = 60_000_000
T0 = 1_774_000_000_000_000 // (60 * MINUTE) * 60 * MINUTE
COLUMNS = {
    "app": "string", "endpoint": "int64", "ts": "timestamp", "x": "int64", "f": "float64", "price": "decimal(18,2)",
    "user": "string", "trace": "string", "ok": "bool",
}  # fmt: skip
Row = dict[str, Any]


def us(moment: dt.datetime) -> int:
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def event(rng: random.Random, low: int, high: int) -> Row:
    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.15 else value

    return {
        "app": rng.choice(["shop", "", "a\0b"]), "endpoint": rng.randrange(-2, 3),
        "ts": T0 + rng.randrange(low, high) * MINUTE + rng.randrange(MINUTE), "x": maybe(rng.randrange(-50, 1_000)),
        "f": maybe(rng.uniform(-5, 5)), "price": maybe(Decimal(rng.randrange(10_000)).scaleb(-2)),
        "user": maybe(f"u{rng.randrange(9)}"), "trace": f"t{rng.randrange(10**6)}", "ok": maybe(rng.random() < 0.5),
    }  # fmt: skip


def values(rows: Sequence[Row], name: str) -> list[Any]:
    return [row[name] for row in rows if row[name] is not None]


def ordered(rows: Sequence[Row]) -> list[Row]:
    """By the total order: rows come in that of commits."""
    return sorted(rows, key=lambda row: row["ts"])


Brute = Callable[[Sequence[Row]], Any]
MEASURES: dict[str, tuple[Any, Brute]] = {
    "n": (kivi.count(), len),
    "some": (kivi.count("x"), lambda rows: len(values(rows, "x"))),
    "total": (kivi.sum("x"), lambda rows: sum(values(rows, "x"))),
    "paid": (kivi.sum("price"), lambda rows: sum(values(rows, "price"), Decimal(0))),
    "least": (kivi.min("f"), lambda rows: min(values(rows, "f"), default=None)),
    "newest": (kivi.max("ts"), lambda rows: max(values(rows, "ts"), default=None)),
    "late": (kivi.count(where=col("x") > 900), lambda rows: sum(v > 900 for v in values(rows, "x"))),
    "double": (kivi.sum(col("x") * 2), lambda rows: 2 * sum(values(rows, "x"))),
    "latency": (kivi.quantiles("x", accuracy=0.01), lambda rows: len(values(rows, "x"))),
    "users": (kivi.distinct("user", error=0.01), lambda rows: len(set(values(rows, "user")))),
    "mean": (kivi.avg("x"), lambda rows: pytest.approx(mean(values(rows, "x")))),
    "began": (kivi.first("trace"), lambda rows: ordered(rows)[0]["trace"] if rows else None),
    "ended": (kivi.last("trace"), lambda rows: ordered(rows)[-1]["trace"] if rows else None),
    "top3": (kivi.largest("x", 3), lambda rows: sorted(values(rows, "x"), reverse=True)[:3]),
}
CHUNK = 70


def in_chunks(rows: Sequence[Row]) -> float:
    """Floats are added in commit order within each chunk of selected events, and chunks in commit order."""
    sums: dict[int, float] = defaultdict(float)
    for row in rows:
        sums[row["#"] // CHUNK] += row["f"] or 0.0
    return sum(sums.values(), 0.0)


FLOATS: dict[str, tuple[Any, Brute]] = {"real": (kivi.sum("f"), in_chunks)}


def mean(found: Sequence[Any]) -> Any:
    return sum(found) / len(found) if found else None


def grouped(rows: Iterable[Row], keys: Sequence[Callable[[Row], Any]]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """By key, in order, nulls last."""
    found: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(key(row) for key in keys)].append(row)
    if not keys and not found:
        found[()] = []
    return sorted(found.items(), key=lambda item: [(value is None, value is not None and value) for value in item[0]])


def slot_of(minutes: int) -> Callable[[Row], Any]:
    return lambda row: us(row["ts"]) // (minutes * MINUTE) * minutes * MINUTE


GROUPS: dict[str, tuple[Any, Callable[[Row], Any]]] = {
    "app": ("app", lambda row: row["app"]),
    "endpoint": ("endpoint", lambda row: row["endpoint"]),
    "user": ("user", lambda row: row["user"]),
    "ok": ("ok", lambda row: row["ok"]),
    "hour": (kivi.time_slot("ts", "1h", name="hour"), slot_of(60)),
    "part": (kivi.time_slot("ts", "10m", name="part"), slot_of(10)),
    "slow": (("slow", col("x") > 500), lambda row: None if row["x"] is None else row["x"] > 500),
    "half": (("half", col("x") - 7), lambda row: None if row["x"] is None else row["x"] - 7),
}
WHERES: list[tuple[Any, Callable[[Row], Any]]] = [
    (None, lambda row: True),
    (col("app") == "shop", lambda row: row["app"] == "shop"),
    ((col("endpoint") >= 0) & (col("app") != ""), lambda row: row["endpoint"] >= 0 and row["app"] != ""),
    (col("x") > 300, lambda row: row["x"] is not None and row["x"] > 300),
    (col("ts") >= T0 + 95 * MINUTE + 1, lambda row: us(row["ts"]) >= T0 + 95 * MINUTE + 1),
    (
        (col("ts") < T0 + 200 * MINUTE) & (col("endpoint") == 1),
        lambda row: us(row["ts"]) < T0 + 200 * MINUTE and row["endpoint"] == 1,
    ),
]


def check_cell(name: str, cell: Any, expected: Any) -> None:
    if name == "latency":
        assert cell.count == expected
    elif name in ("hour", "part", "window_start", "window_end"):
        assert us(cell) == expected, name
    else:
        assert cell == expected, name


def check(snap: Any, rng: random.Random) -> None:
    """One question at random."""
    low, high = sorted(rng.sample(range(300), 2))
    start = rng.choice([None, T0 + low * MINUTE, T0 + low // 10 * 10 * MINUTE])
    end = rng.choice([None, T0 + high * MINUTE + 7, T0 + high // 60 * 60 * MINUTE])
    where, selects = rng.choice(WHERES)
    chosen = rng.sample(sorted(GROUPS), rng.randrange(4))
    measures = {**MEASURES, **(FLOATS if rng.random() < 0.3 else {})}
    names = rng.sample(sorted(measures), rng.randrange(1, 6))
    result = snap.query(
        "calls", start, end, where, [GROUPS[name][0] for name in chosen], {name: measures[name][0] for name in names}
    )
    rows = [row for row in snap.scan("calls", start=start, end=end) if selects(row)]
    rows = [{**row, "#": i} for i, row in enumerate(rows)]
    expected = grouped(rows, [GROUPS[name][1] for name in chosen])
    found = list(result)
    assert len(found) == len(expected), result.explain()
    for row, (key, events) in zip(found, expected, strict=True):
        assert list(row) == [*chosen, *names]
        for name, value in zip(chosen, key, strict=True):
            check_cell(name, row[name], value)
        for name in names:
            check_cell(name, row[name], measures[name][1](events))


def check_parts(snap: Any, rng: random.Random) -> None:
    """Some rows of an answer, in some order; of what was committed after some snapshot."""
    since, least = rng.randrange(snap.ts + 1), rng.randrange(4)
    term, down = rng.choice(["total", "half", "most", "real"]), rng.random() < 0.5
    limit, offset = rng.choice([None, 3, 50]), rng.choice([0, 2, 40])
    where = (col("_commit_ts") > since) & (col("x") > 300) if since else col("x") > 300
    result = snap.query(
        "calls", where=where, group_by=["user", GROUPS["part"][0]], having=col("n") > least,
        measures={"n": kivi.count(), "total": kivi.sum("x"), "most": kivi.max("f"), "real": kivi.sum("f")},
        derived={"half": "total / 2"}, order_by=f"-{term}" if down else term, limit=limit, offset=offset,
        columns=["part", "user", "n", term],
    )  # fmt: skip
    rows = snap.changes("calls", since=since, remembered_at=snap.ts, retractions="ignore", partial=True)
    rows = [{**row, "#": i} for i, row in enumerate(row for row in rows if (row["x"] or 0) > 300)]
    expected = []
    for (user, part), events in grouped(rows, [GROUPS["user"][1], GROUPS["part"][1]]):
        total = sum(event["x"] for event in events)
        most = max(values(events, "f"), default=None)
        known = {"total": total, "half": total / 2, "most": most, "real": in_chunks(events)}
        expected += [(part, user, len(events), known[term])] if len(events) > least else []
    expected.sort(key=lambda row: (row[3] is None, (-row[3] if down else row[3]) if row[3] is not None else 0))
    found = [(us(row["part"]), row["user"], row["n"], row[term]) for row in result]
    assert found == expected[offset:][:limit], result.explain()


def check_windows(snap: Any, rng: random.Random) -> None:
    """Windows at random, of some groups."""
    where, selects = rng.choice(WHERES)
    chosen = rng.sample(["app", "endpoint", "user"], rng.randrange(3))
    names = rng.sample(sorted(MEASURES), rng.randrange(1, 5))
    wanted = {"group_by": [GROUPS[n][0] for n in chosen], "measures": {n: MEASURES[n][0] for n in names}}
    size, slide = rng.choice([(10, 10), (10, 5), (15, 5), (15, 10), (60, 1), (30, 20), (5, 5), (120, 7)])
    start = rng.choice([None, T0 + rng.randrange(200) * MINUTE])
    gap = rng.choice([1, 3 * MINUTE, 7 * MINUTE, 100 * MINUTE])
    rows = [row for row in snap.scan("calls", start=start) if selects(row)]
    keys = [GROUPS[name][1] for name in chosen]
    if rng.random() < 0.3:
        result = snap.windows("calls", session=gap, start=start, where=where, **wanted)
        expected = [(*key, *session) for key, found in grouped(rows, keys) for session in sessions(found, gap)]
    else:
        more = {} if slide == size else {"slide": f"{slide}m"}
        result = snap.windows("calls", f"{size}m", **more, start=start, where=where, **wanted)
        expected = [(*key, *window) for key, found in grouped(rows, keys) for window in windows(found, size, slide)]
    found = list(result)
    assert len(found) == len(expected), result.explain()
    for row, (*key, begins, ends, events) in zip(found, expected, strict=True):
        assert list(row) == [*chosen, "window_start", "window_end", *names]
        for name, value in zip([*chosen, "window_start", "window_end"], [*key, begins, ends], strict=True):
            check_cell(name, row[name], value)
        for name in names:
            check_cell(name, row[name], MEASURES[name][1](events))


def windows(rows: Sequence[Row], size: int, slide: int) -> Iterator[tuple[int, int, list[Row]]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        last = us(row["ts"]) // (slide * MINUTE) * slide * MINUTE
        for begins in range(last, us(row["ts"]) - size * MINUTE, -slide * MINUTE):
            found[begins].append(row)
    for begins in sorted(found):
        yield begins, begins + size * MINUTE, found[begins]


def sessions(rows: Sequence[Row], gap: int) -> Iterator[tuple[int, int, list[Row]]]:
    held: list[Row] = []
    ends = 0
    for row in sorted(rows, key=lambda row: row["ts"]):
        if held and us(row["ts"]) - ends > gap:
            yield us(held[0]["ts"]), ends, held
            held = []
        held.append(row)
        ends = us(row["ts"])
    if held:
        yield us(held[0]["ts"]), ends, held


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    """In memory; one seed on disk."""
    path = str(tmp_path / "data") if "[2]" in request.node.name else None
    made = EmbeddedDriver(path, block_rows=64)
    made.db.create_event_table("calls", event_time="ts", retention="4h", columns=COLUMNS)
    yield made
    made.close()


AGGREGATES: dict[str, list[Any]] = {
    "fine": ["app", "endpoint", kivi.time_slot("ts", "5m")],
    "app_1h": ["app", kivi.time_slot("ts", "1h")],
    "quarter": ["app", "endpoint", kivi.time_slot("ts", "15m")],
}


@pytest.mark.parametrize("seed", range(3))
def test_questions_equal_brute_force(driver: EmbeddedDriver, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    db, rng = driver.db, random.Random(seed)
    monkeypatch.setattr("kivi.store.questions.CHUNK_ROWS", CHUNK)
    steps: list[Callable[[], Any]] = [
        db.consolidate, driver.store.consolidator.compact, lambda: driver.store.settle(64), lambda: None,
    ]  # fmt: skip

    def forget(table: str, low: int, high: int, width: int) -> None:
        """A floor, at a moment of events, or where a slot of an aggregate begins."""
        if low < high:
            floor = T0 + rng.randrange(low, high) // width * width * MINUTE + (5 if width == 1 else 0)
            driver.store.retention.set_floor(db._schema(table), floor)

    for i in range(6):
        db.append("calls", [event(rng, 40 * i + 40, 40 * i + 90) for _ in range(rng.choice([1, 30, 150]))], late="drop")
        if i == 1:
            for name, groups in AGGREGATES.items():
                measures = {name: call for name, (call, _) in MEASURES.items()}
                more = {"retention": "3h"} if name == "quarter" else {}
                db.create_aggregate(name, source="calls", group_by=groups, measures=measures, **more)
        if i == 3:
            with db.transaction() as tx:
                tx.retract("calls", where=col("endpoint") == rng.randrange(-2, 3), start=T0 + 60 * MINUTE)
        old = db.snapshot()
        forget("calls", 40, 25 * i, 1)
        if i > 1:
            forget("quarter", 40, 40 * i, 15)
        rng.choice(steps)()
        for snap in (old, db.snapshot()):
            for _ in range(10):
                check(snap, rng)
            for _ in range(3):
                check_windows(snap, rng)
                check_parts(snap, rng)
    with db.snapshot(as_of=old.ts - 2) as past:
        check(past, rng)


def test_aggregates_answer_where_they_say_the_same(driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    db, rng = driver.db, random.Random(4)
    for name, groups in AGGREGATES.items():
        db.create_aggregate(name, source="calls", group_by=groups, measures={n: c for n, (c, _) in MEASURES.items()})
    db.append("calls", [event(rng, 0, 230) for _ in range(300)])
    latency = {"latency": MEASURES["latency"][0]}
    with db.snapshot() as snap:
        asked: list[tuple[dict[str, Any], list[str]]] = [
            ({"group_by": ["app"]}, ["app_1h"]),
            ({"group_by": ["endpoint"]}, ["quarter"]),
            ({"group_by": ["app", GROUPS["part"][0]]}, ["fine"]),
            ({"group_by": ["app"], "start": T0 + 3 * MINUTE}, ["events", "fine", "quarter", "app_1h"]),
            ({"group_by": ["app"], "end": T0 + 61 * MINUTE}, ["app_1h", "events"]),
            ({"where": col("endpoint") == 1}, ["quarter"]),
            ({"where": col("x") > 1}, ["events"]),
            ({"group_by": ["user"]}, ["events"]),
            ({"measures": {"real": kivi.sum("f")}, "group_by": ["app"]}, ["events"]),
            ({"measures": {"q": kivi.quantiles("x", accuracy=0.05)}, "group_by": ["app"]}, ["events"]),
        ]
        for arguments, parts in asked:
            result = snap.query("calls", **{"measures": latency, **arguments})
            told = result.explain().split("\n")
            of = [line.split(": ")[1].removeprefix("rows of ") for line in told[1:] if line.startswith("from ")]
            assert of == parts, result.explain()
            with monkeypatch.context() as patch:
                patch.setattr(Questions, "_candidates", lambda *_: [])
                plain = snap.query("calls", **{"measures": latency, **arguments})
            assert plain.to_arrow().equals(result.to_arrow())


def test_aggregates_of_too_many_rows_are_given_up(driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kivi.store.questions._ROWS_MIN", 50)
    db, rng = driver.db, random.Random(4)
    count = {"n": kivi.count(), "users": MEASURES["users"][0]}
    db.create_aggregate("coarse", source="calls", group_by=["app"], measures=count)
    db.create_aggregate("dense", source="calls", group_by=["app", "trace"], measures=count)
    db.append("calls", [event(rng, 0, 200) for _ in range(400)])
    with db.snapshot() as snap:
        told = snap.query("calls", group_by=["app"], measures=count).explain()
        assert "rows of coarse" in told
        traces = snap.query("calls", group_by=["trace"], measures=count)
        assert "from the first event on: events" in traces.explain()
        assert len(traces) > 350
        assert driver.store.questions.dense == {db._schema("dense").id}
        few = snap.query("calls", where=col("app") == "shop", group_by=["trace"], measures=count)
        assert "events" in few.explain().split("\n")[1]
        monkeypatch.setattr("kivi.store.questions._ROWS_MIN", 300)  # of one application there are so few
        again = snap.query("calls", where=col("app") == "shop", group_by=["trace"], measures=count)
        assert "rows of dense" in again.explain()
        assert again.to_arrow().equals(few.to_arrow())


def test_coded_columns_and_null_groups(driver: EmbeddedDriver) -> None:
    """Thousands of events at once have their text in codes; computed groups, slots and derived columns may be null."""
    db, rng = driver.db, random.Random(9)
    db.alter_table("calls", add_columns={"done": "timestamp"})
    for _ in range(2):
        events = [event(rng, 0, 200) for _ in range(2_500)]
        db.append("calls", [{**each, "done": rng.choice([None, each["ts"] + 5 * MINUTE])} for each in events])
        with db.snapshot() as snap:
            rows = list(snap.scan("calls"))
            who = ("who", kivi.coalesce(col("user"), col("app")))
            asked = snap.query(
                "calls", where=(col("_commit_ts") > 0) & (kivi.coalesce(col("user"), "nobody") != "u3"),
                group_by=[who, kivi.time_slot("done", "1h", name="hour"), "ok"],
                measures={"n": kivi.count(), "top": kivi.top("app", 3), "ended": kivi.last("trace")},
            )  # fmt: skip
            keys: list[Callable[[Row], Any]] = [
                lambda row: row["app"] if row["user"] is None else row["user"],
                lambda row: None if row["done"] is None else us(row["done"]) // (60 * MINUTE) * 60 * MINUTE,
                lambda row: row["ok"],
            ]
            expected = grouped([row for row in rows if row["user"] != "u3"], keys)
            for row, (key, found) in zip(asked, expected, strict=True):
                assert (row["who"], None if row["hour"] is None else us(row["hour"]), row["ok"]) == key
                assert (row["n"], row["ended"]) == (len(found), ordered(found)[-1]["trace"])
                assert sum(count for _, count in row["top"]) == len(found)
            halves = snap.query(
                "calls", where=col("x").is_null() | (col("x") > 990), group_by=[GROUPS["half"][0], "app"],
                measures={"n": kivi.count()},
                derived={"twice": "half * 2", "each": "n / 2"}, order_by=["-twice", "app"],
            )  # fmt: skip
            told = [(row["half"], row["app"], row["n"], row["twice"], row["each"]) for row in halves]
            chosen = [row for row in rows if row["x"] is None or row["x"] > 990]
            expected = grouped(chosen, [GROUPS["half"][1], GROUPS["app"][1]])
            listed = [
                (half, app, len(some), None if half is None else half * 2.0, len(some) / 2)
                for (half, app), some in expected
            ]
            assert told == sorted(listed, key=lambda row: (row[3] is None, -(row[3] or 0), row[1]))
        db.consolidate()


def test_events_of_the_last_moment(driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds and windows do not run over the end of time: not where events are in memory, nor in blocks."""
    monkeypatch.setattr("kivi.arrow.records.check_moment", lambda value, what: value)  # as earlier stores have them
    db, last = driver.db, 2**63 - 1
    db.create_event_table("ends", event_time="ts", columns={"ts": "timestamp"})
    db.append("ends", [{"ts": 0}])
    db.append("ends", [{"ts": last}])
    count = {"n": kivi.count()}
    for _ in range(2):
        with db.snapshot() as snap:
            for where, expected in (
                (col("ts") > last, 0), (col("ts") >= last, 1), (col("ts") == last, 1), (col("ts") <= last, 2),
                (col("ts") > last - 1, 1), (col("ts") <= last - 1, 1),
            ):  # fmt: skip
                assert [row["n"] for row in snap.query("ends", where=where, measures=count)] == [expected]
            for size, slide, windows_each in (("5m", None, 1), ("5m", "1m", 5), ("1h", "1m", 60)):
                with pytest.raises(kivi.OutOfRange, match="end after time"):
                    list(snap.windows("ends", size, slide=slide, measures=count))
                inside = snap.windows("ends", size, slide=slide, end=last - 10**10, measures=count)
                assert sum(row["n"] for row in inside) == windows_each
        db.consolidate()


def test_columns_of_an_answer_have_names_of_their_own(driver: EmbeddedDriver) -> None:
    driver.db.alter_table("calls", add_columns={"window_end": "string"})
    count = {"n": kivi.count()}
    with driver.db.snapshot() as snap:
        for name, ask in (
            ("app", lambda: snap.query("calls", group_by=["app"], measures=count, derived={"app": "n + 1"})),
            ("n", lambda: snap.query("calls", group_by=["app"], measures=count, derived={"n": "n + 1"})),
            ("window_end", lambda: snap.windows("calls", "5m", group_by=["window_end"], measures=count)),
            ("window_end", lambda: snap.windows("calls", "5m", measures={"window_end": kivi.count()})),
            ("window_end", lambda: snap.windows("calls", session="5m", measures=count, derived={"window_end": "n"})),
        ):
            with pytest.raises(kivi.SchemaError, match=f"{name!r} twice"):
                ask()


def test_a_literal_that_no_key_holds(driver: EmbeddedDriver) -> None:
    """It selects what it would without the aggregate that answers (R24)."""
    db, rng = driver.db, random.Random(3)
    db.append("calls", [event(rng, 0, 200) for _ in range(50)])
    count, long = {"n": kivi.count()}, "x" * 70_000
    wheres = [col("app") == long, col("app").isin([long, "shop"]), col("app") < long, col("app") >= long]
    wheres += [col("app").startswith(long)]
    with db.snapshot() as snap:
        before = [[row["n"] for row in snap.query("calls", where=where, measures=count)] for where in wheres]
    db.create_aggregate("by_app", source="calls", group_by=["app"], measures=count)
    with db.snapshot() as snap:
        for where, expected in zip(wheres, before, strict=True):
            result = snap.query("calls", where=where, group_by=["app"], measures=count)
            assert "rows of by_app" in result.explain()
            assert sum(row["n"] for row in result) == expected[0]
            assert sum(row["n"] for row in snap.scan("by_app", where=where)) == expected[0]
    assert before[0] == [0]


def test_float_sums_have_the_same_bits_wherever_events_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory only, and in small and large blocks, compacted and settled (R23)."""
    monkeypatch.setattr("kivi.store.questions.CHUNK_ROWS", 37)
    rng = random.Random(5)
    commits = [[event(rng, 0, 200) for _ in range(rng.choice([1, 20, 90]))] for _ in range(8)]
    measures = {"real": kivi.sum("f"), "mean": kivi.avg("f"), "spread": kivi.var("f")}
    windows: list[dict[str, Any]] = [
        {"size": "10m"}, {"size": "15m", "slide": "5m"}, {"size": "1h", "slide": "1m"}, {"session": "1m"},
    ]  # fmt: skip
    answers = set()
    for place, block_rows in enumerate((64, 16, 64)):
        driver = EmbeddedDriver(None, block_rows=block_rows)
        driver.db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        for i, events in enumerate(commits):
            driver.db.append("calls", events)
            if place and i % 3 == 0:
                driver.db.consolidate()
                driver.store.settle(64) if place == 2 else driver.store.consolidator.compact()
        with driver.db.snapshot() as snap:
            asked = {"group_by": ["user"], "measures": measures, "where": col("f") > -4.0}
            found = [list(snap.query("calls", **asked)), *(list(snap.windows("calls", **w, **asked)) for w in windows)]
        answers.add(repr(found))
        driver.close()
    assert len(answers) == 1
