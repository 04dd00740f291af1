"""SQL equals brute force over the events visible at a snapshot, and equals ``query`` (R24): with disorder, retention,
retraction and predicates at random, whether events lie in memory, in blocks, or in both."""

from __future__ import annotations

import contextlib
import datetime as dt
import random
from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument

MINUTE = 60_000_000
T0 = int(dt.datetime(2026, 5, 1, tzinfo=dt.UTC).timestamp() * 1e6)
Event = dict[str, Any]
CONDITIONS: list[tuple[str, Any, Any]] = [  # in SQL, in Python, and as a predicate
    ("true", lambda e: True, None),
    ("v > 5", lambda e: e["v"] is not None and e["v"] > 5, kivi.col("v") > 5),
    ("v is null", lambda e: e["v"] is None, kivi.col("v").is_null()),
    ("g in ('a', 'b')", lambda e: e["g"] in ("a", "b"), kivi.col("g").isin(["a", "b"])),
    ("not (g = 'a')", lambda e: e["g"] is not None and e["g"] != "a", ~(kivi.col("g") == "a")),
    (
        "v >= 2 and g <> 'c' or v = -7",
        lambda e: e["v"] is not None and ((e["v"] >= 2 and e["g"] is not None and e["g"] != "c") or e["v"] == -7),
        ((kivi.col("v") >= 2) & (kivi.col("g") != "c")) | (kivi.col("v") == -7),
    ),
]


def microseconds(at: dt.datetime) -> int:
    return (at - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def moment(us: int) -> str:
    return f"make_timestamptz({us})"


def expected(events: list[Event]) -> dict[Any, tuple[Any, ...]]:
    out = {}
    for group in {event["g"] for event in events}:
        values = [event["v"] for event in events if event["g"] == group]
        known = [value for value in values if value is not None]
        ends = (min(known, default=None), max(known, default=None))
        out[group] = (len(values), len(known), sum(known) if known else None, *ends)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_sql_equals_brute_force_and_query_r24(seed: int) -> None:
    rng = random.Random(seed)
    with kivi.open(background=False, block_rows=rng.choice([7, 64, 131_072])) as db:
        retention = rng.choice([None, "90m"])
        columns = {"ts": "timestamp", "g": "string", "v": "int64"}
        db.create_event_table("e", event_time="ts", columns=columns, retention=retention)
        newest = T0
        for _ in range(8):
            newest += rng.randrange(20 * MINUTE)
            more = [
                {
                    "ts": newest - int(rng.expovariate(1 / (10 * MINUTE))),
                    "g": rng.choice(["a", "b", "c", "", None]),
                    "v": rng.choice([None, -7, rng.randrange(12)]),
                }
                for _ in range(rng.randrange(1, 40))
            ]
            db.append("e", more, late="drop")
            if rng.random() < 0.3:
                low = newest - rng.randrange(30 * MINUTE)
                with contextlib.suppress(InvalidArgument), db.transaction() as tx:  # some lie below the floor
                    tx.retract("e", where=kivi.col("v") == 3, start=low)
            if rng.random() < 0.5:
                db.consolidate()
            with db.snapshot() as snap:
                visible = list(snap.scan("e"))
                for _ in range(2):
                    text, holds, where = rng.choice(CONDITIONS)
                    low, high = sorted(newest - rng.randrange(150 * MINUTE) for _ in range(2))
                    wanted = expected([e for e in visible if holds(e) and low <= microseconds(e["ts"]) < high])
                    asked = (
                        f"select g, count(*), count(v), sum(v), min(v), max(v) from e where ({text}) "
                        f"and ts >= {moment(low)} and ts < {moment(high)} group by g"
                    )
                    found = {row[0]: row[1:] for row in (tuple(r.values()) for r in snap.sql(asked).to_pylist())}
                    assert found == wanted, asked
                    same = snap.query(
                        "e",
                        start=low,
                        end=high,
                        where=where,
                        group_by=["g"],
                        measures={"n": kivi.count(), "k": kivi.count("v"), "lo": kivi.min("v"), "hi": kivi.max("v")},
                    )
                    assert {r["g"]: (r["n"], r["k"], r["lo"], r["hi"]) for r in same} == {
                        group: (n, k, lo, hi) for group, (n, k, _, lo, hi) in wanted.items()
                    }
