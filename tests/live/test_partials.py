"""Rollups that are subscribed to are kept up by what changed: every state is what a rollup of all rows gives then.

The judge is ``snap.rollup`` at the snapshot of the state, which reads the table. Measures of every kind, deltas that
come one by one and together, late ones, retractions, floors and ranges that move; and ticks of many commits, some of
which were taken from the feed before.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import kivi
from kivi.live import groups, rollups
from kivi.live.shared import Shared
from kivi.store.rollups import Rollups

T0 = 1_767_225_600_000_000
MINUTE = 60_000_000
COMBINING = {
    "n": kivi.count(),
    "total": kivi.sum("x"),
    "least": kivi.min("x"),
    "most": kivi.max("f"),
    "mean": kivi.avg("x"),
    "spread": kivi.stddev("x"),
    "latency": kivi.quantiles("x"),
    "users": kivi.distinct("user"),
    "often": kivi.top("user", 2, most=3),
    "newest": kivi.last("x"),
    "slowest": kivi.argmax("user", by="x"),
    "largest": kivi.largest("x", 2),
}
FLOATS = {"floats": kivi.sum("f"), "mean_f": kivi.avg("f"), "spread_f": kivi.stddev("f")}
EXACT = (*COMBINING, "p90")
Asked = tuple[dict[str, Any], dict[str, Any]]
BY_WHAT_MOVES: Asked = (
    {"by": ["app"], "measures": ["total"], "where": (kivi.col("n") > 1) & (kivi.col("endpoint") != 1)},
    {"last": "3m"},
)
"""Its range ends with the newest slot of a row that is selected, for which all rows would have to be kept."""
QUERIES: list[Asked] = [
    ({"measures": EXACT}, {}),
    ({"measures": EXACT}, {"last": "4m"}),
    ({"by": ["endpoint"], "measures": EXACT}, {"last": "3m"}),
    ({"by": ["app"], "step": "5m", "measures": EXACT}, {}),
    ({"by": ["app"], "step": "2m", "measures": ["least", "often"]}, {"last": "6m"}),
    ({"by": ["endpoint", "app"], "measures": ["p90", "n"]}, {"last": "5m", "order_by": ["-p90", "-n"], "limit": 2}),
    ({"by": ["app"]}, {}),
    ({"by": ["endpoint"], "step": "2m", "measures": [*FLOATS]}, {"last": "4m"}),
    ({"by": ["app"], "measures": ["total"], "where": kivi.col("n") > 2}, {}),
    BY_WHAT_MOVES,
    ({"by": ["app"], "measures": EXACT, "where": kivi.col("endpoint") > 0}, {"last": "3m"}),
    ({"by": ["endpoint"], "step": "5m", "measures": [*FLOATS]}, {"last": "2m"}),
    ({"prefix": ("shop",), "by": ["endpoint"], "start": T0 + 2 * MINUTE, "end": T0 + 9 * MINUTE}, {}),
]


@contextmanager
def opened(**more: Any) -> Iterator[Any]:
    """Floors move when a test moves them."""
    with kivi.open(background=False) as db:
        columns = {
            "app": "string",
            "endpoint": "int64",
            "ts": "timestamp",
            "x": "int64",
            "f": "float64",
            "user": "string",
        }
        db.create_event_table("calls", event_time="ts", columns=columns)
        db.create_aggregate(
            "fine",
            source="calls",
            group_by=["app", "endpoint", kivi.time_slot("ts", "1m")],
            measures={**COMBINING, **FLOATS},
            derived={"p90": "quantile(latency, 0.9)"},
            **more,
        )
        yield db


def events(rng: random.Random, count: int, minute: int) -> list[dict[str, Any]]:
    return [
        {
            "app": rng.choice(["shop", "mail"]),
            "endpoint": rng.randrange(3),
            "ts": T0 + (minute - rng.choice([0, 0, 0, 1, 2, 4])) * MINUTE + rng.randrange(MINUTE),
            "x": rng.randrange(1_000),
            "f": rng.random(),
            "user": f"user-{rng.randrange(5)}",
        }
        for _ in range(count)
    ]


def retract(db: Any, endpoint: int, least: int) -> None:
    with db.transaction() as tx:
        tx.retract("calls", where=(kivi.col("endpoint") == endpoint) & (kivi.col("x") >= least))


def rolled(snap: Any, rollup: dict[str, Any], more: dict[str, Any]) -> list[dict[str, Any]]:
    rows = list(snap.rollup("fine", **rollup, **({"last": more["last"]} if "last" in more else {})))
    if "order_by" in more:
        rows = sorted(rows, key=lambda row: (-row["p90"], -row["n"]))[: more["limit"]]
    return rows


class Followed:
    """Subscriptions, and what each of them has to show."""

    def __init__(self, db: Any, queries: list[Asked], stack: ExitStack) -> None:
        self.db, self.queries = db, queries
        self.lives = [
            stack.enter_context(db.subscribe("fine", rollup=rollup, interval_ms=0, heartbeat_ms=10, **more))
            for rollup, more in queries
        ]

    def check(self) -> None:
        """Nothing is committed meanwhile."""
        with self.db.snapshot() as snap:
            for live, (rollup, more) in zip(self.lives, self.queries, strict=True):
                while live.ts < snap.ts:
                    live.next(timeout_s=0.02)  # heartbeats move ``ts`` too, and are not returned
                assert live.ts == snap.ts
                assert live.rows == rolled(snap, rollup, more), (rollup, more)

    @property
    def shared(self) -> list[Shared]:
        return list(self.db.hub._groups["fine"].shared.values())


def test_a_tick_reads_nothing_for_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, read = random.Random(3), []
    with opened() as db, ExitStack() as stack:
        db.append("calls", events(rng, 40, 5))
        followed = Followed(db, [query for query in QUERIES if query is not BY_WHAT_MOVES], stack)
        followed.check()
        roll = Rollups.roll

        def noting(self: Rollups, *args: Any, **more: Any) -> Any:
            if threading.current_thread().name.startswith("kivi-live"):
                read.append(more)
            return roll(self, *args, **more)

        monkeypatch.setattr(Rollups, "roll", noting)
        for minute in (5, 5, 6, 8):
            db.append("calls", events(rng, 3, minute))
            followed.check()
        assert not read
        retract(db, 1, 500)
        followed.check()
        assert read and all(more["only"] is not None for more in read)  # just what it took from


@pytest.mark.parametrize("where", ["of a window", "of a table"])
def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    rng = random.Random(5)
    with opened() as db, ExitStack() as stack:
        db.append("calls", events(rng, 30, 5))
        followed = Followed(db, QUERIES[:5], stack)
        followed.check()
        assert all(shared.window.partials is not None for shared in followed.shared)
        if where == "of a window":
            monkeypatch.setattr(rollups, "WINDOW_BYTES", 0)
        else:
            kept = [shared.window.partials.nbytes for shared in followed.shared if shared.window.partials is not None]
            monkeypatch.setattr(groups, "TABLE_BYTES", sum(kept) - max(kept))
        for minute in (5, 6, 9):
            db.append("calls", events(rng, 10, minute))
            followed.check()
        kept_by = [shared for shared in followed.shared if shared.window.partials is not None]
        assert len(kept_by) < 5 if where == "of a table" else not kept_by


def test_what_is_too_large_is_not_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollups, "WINDOW_BYTES", 1_000)
    rng = random.Random(6)
    with opened() as db, ExitStack() as stack:
        db.append("calls", events(rng, 40, 5))
        followed = Followed(db, QUERIES[2:4], stack)
        assert all(shared.window.partials is None for shared in followed.shared)
        for minute in (5, 6):
            db.append("calls", events(rng, 3, minute))
            followed.check()


def test_a_window_that_runs_short_is_filled_from_memory() -> None:
    def calls(endpoint: int, *us: int) -> list[dict[str, Any]]:
        return [{"app": "shop", "endpoint": endpoint, "ts": T0, "x": x, "f": 0.5, "user": "one"} for x in us]

    with opened() as db, ExitStack() as stack:
        db.append("calls", [event for endpoint in range(60) for event in calls(endpoint, 10 + endpoint)])
        query = {"by": ["endpoint"], "measures": ["p90", "n"]}, {"order_by": ["-p90", "-n"], "limit": 2}
        followed = Followed(db, [query], stack)
        followed.check()
        (shared,) = followed.shared
        before, renewals = shared.window, db.hub.renewals
        for endpoint in range(59, 20, -1):  # the highest become the lowest
            db.append("calls", calls(endpoint, *[0] * 12))
            followed.check()
        assert shared.window is not before
        assert db.hub.renewals == renewals


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 1, 3, 40]), st.sampled_from([0, 0, 0, 1, 2, 9])),
        st.tuples(st.just("in one tick"), st.integers(2, 4), st.sampled_from([0, 1])),
        st.tuples(st.just("retract"), st.integers(0, 2), st.integers(0, 900)),
        st.tuples(st.just("floor"), st.just(0), st.just(0)),
        st.tuples(st.just("consolidate"), st.just(0), st.just(0)),
    ),
    min_size=3,
    max_size=8,
)


@settings(max_examples=settings().max_examples // 10, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@example([("append", 1, 9), ("append", 1, 1)], QUERIES[1:3], 1, False)
@given(
    STEPS,
    st.lists(st.sampled_from(QUERIES), min_size=3, max_size=4, unique_by=repr),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_states_are_what_rollups_give(
    steps: list[tuple[str, int, int]],
    queries: list[Asked],
    seed: int,
    forgets: bool,
) -> None:
    rng, minute = random.Random(seed), 5
    with opened(**({"retention": "10m"} if forgets else {})) as db, ExitStack() as stack:
        late = {"late": "drop"} if forgets else {}
        db.append("calls", events(rng, 20, minute), **late)
        followed = Followed(db, queries, stack)
        followed.check()
        for what, a, b in steps:
            match what:
                case "append":
                    minute += b
                    db.append("calls", events(rng, a, minute), **late)
                case "in one tick":
                    with db.hub._lock:
                        for i in range(a):
                            minute += b
                            db.append("calls", events(rng, rng.choice([1, 2, 30]), minute), **late)
                            assert i or db.hub._digested()
                case "retract":
                    try:
                        retract(db, a, b)
                    except kivi.InvalidArgument:  # some of what it takes may have been forgotten
                        assert forgets
                case "floor":
                    db.store.housekeeping.move_floors()
                case _:
                    db.consolidate()
            followed.check()
