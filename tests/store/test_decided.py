"""What a subscription to matches is told, position by position, against ``match`` at the same snapshots (R26).

What was told, taken together, is always matches that the snapshot has: each that nothing before the frontier can change
any more, and all of them once the frontier has passed every event. It is taken back only for events that came late.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import kivi
from kivi import col
from kivi.api.match_arguments import MatchArguments
from kivi.arrow.columns import stored_rows
from kivi.errors import EventsRetracted, InvalidArgument
from kivi.model.patterns import check_followed, match_of
from kivi.store.decided import Decided, Position
from tests.golden.driver import EmbeddedDriver
from tests.naive_patterns import COLUMNS, Case, Stream
from tests.seeds import seeds

S = 1_000_000
T0 = 1_774_000_000 * S
END = T0 + 10**6 * S


class Follower:
    """One pattern, told from position to position, and what it was told so far."""

    def __init__(self, driver: Any, pattern: Any, since: Position | None = None, where: Any = None) -> None:
        self.driver, self.pattern, self.at, self.where = driver, pattern, since or Position(0), where
        schema = driver.store.table("calls")
        bound = MatchArguments("calls", pattern, where=where).bound(schema)
        assert bound.match is not None
        self.decided = Decided(driver.store.reads, driver.store.changes, bound.match, bound.where)
        self.has = Counter[str]()

    def goes_to(self, frontier_us: int) -> tuple[int, int]:
        """How many came, and went."""
        store = self.driver.store
        with store.snapshots.opened() as lease:
            schema = store.table("calls")
            told = self.decided.between(lease, schema, self.at, frontier_us)
            for row in told.removed:
                assert self.has[repr(row)] > 0, (str(self.pattern), row)
                self.has[repr(row)] -= 1
            self.has.update(map(repr, told.added))
            if frontier_us > self.at.frontier_us and told.next_us is not None:
                assert told.next_us >= frontier_us
            self.at = Position(lease.ts, frontier_us)
        return len(told.added), len(told.removed)

    def all_matches(self) -> Counter[str]:
        store = self.driver.store
        with store.snapshots.opened() as lease:
            schema = store.table("calls")
            scan = MatchArguments("calls", self.pattern, where=self.where).bound(schema)
            batches = list(store.scan(lease, schema, scan))
        return Counter(repr(row) for batch in batches for row in stored_rows(batch))


@pytest.mark.parametrize("seed", [1, 8])
def test_what_is_told_is_what_is_decided_r26(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    came, went = followed(seed, monkeypatch)
    assert came > 50
    assert went > 0


@pytest.mark.story
@pytest.mark.hypothesis
@pytest.mark.parametrize("seed", seeds(4, night=134))
def test_followers_of_more_streams_r26(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    followed(seed, monkeypatch)


def followed(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Streams of few partitions and many, dense and sparse, in which any batch may be late, by less than ``within`` or
    by many of it, and everybody has the same whether he was there all the time or not. How many matches came, and went.
    """
    rng = random.Random(seed)
    monkeypatch.setattr("kivi.store.patterns._ROWS_MIN", 0 if seed % 2 else 2**62)
    monkeypatch.setattr("kivi.store.patterns._CANDIDATES_MAX", 0.7)
    monkeypatch.setattr("kivi.patterns.automaton._TOGETHER_STEPS", rng.choice([1, 3, 64]))
    stream, unit = Stream.of(rng), rng.choice([S, S // 7])
    driver = EmbeddedDriver(None, block_rows=64)
    db = driver.db
    db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    followers = list[Follower]()
    while len(followers) < 12:
        pattern = Case(rng, [1, 3 * unit - 1, 3 * unit, 3 * unit + 1, 10 * S]).pattern
        try:
            check_followed(match_of(driver.store.table("calls"), pattern))
        except InvalidArgument:
            continue
        followers.append(Follower(driver, pattern, where=rng.choice([None, None, col("host") == 1])))
    steps: list[Callable[[], Any]] = [db.consolidate, lambda: driver.store.settle(64), lambda: None]
    frontier, came, went = T0, 0, 0
    for step in range(10):
        is_late = step in (4, 7) or rng.random() < 0.2
        least = frontier - rng.choice([2, 25, 100]) * unit if is_late else frontier
        moments = [least + rng.randrange(0, 20) * unit for _ in range(rng.choice([1, 8, 20, 40]))]
        db.append("calls", [stream.event(rng, moment) for moment in moments])
        rng.choice(steps)()
        frontier += rng.choice([0, 1, 5, 12, 60]) * unit
        for i, follower in enumerate(followers):
            added, removed = follower.goes_to(frontier)
            came, went = came + added, went + removed
            assert not removed or is_late, (str(follower.pattern), step)
            every = follower.all_matches()
            assert not (+follower.has - every), (str(follower.pattern), step)
            again = Follower(driver, follower.pattern, where=follower.where)  # who begins with all of history has that
            again.goes_to(frontier)
            assert +again.has == +follower.has, (str(follower.pattern), step)
            if rng.random() < 0.3:  # and whoever comes back
                resumed = Follower(driver, follower.pattern, follower.at, follower.where)
                resumed.has = follower.has
                followers[i] = resumed
    for follower in followers:
        follower.goes_to(END)
        assert +follower.has == follower.all_matches(), str(follower.pattern)
    driver.close()
    return came, went


def test_a_match_is_told_when_it_can_change_no_more() -> None:
    """Not before, and no later: an end that is read ends the wait, or the end of ``within`` does."""
    driver = EmbeddedDriver(None)
    driver.db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    define = {"A": col("x") == 1, "B": col("x") == 2, "C": col("x") == 3}
    for text, symbols, over_s in (
        ("A B C", [1, 2, 3], 2),  # its last row
        ("A B+", [1, 2, 2, 9], 3),  # a row that is no B
        ("A B+", [1, 2, 2], 10),  # more may come within ten seconds
        ("A B+?", [1, 2, 2], 1),
        ("A C | B", [1, 2, 9], 1),  # the row before it might have begun one, up to this row
        ("A C* | B", [9, 2], 1),
        ("A B C | B", [1, 2], 10),  # it may yet turn out to be inside another one
    ):
        begin = T0 + 1_000 * S * len(driver.db.snapshot().to_arrow("calls"))
        used = {name: definition for name, definition in define.items() if name in text}
        pattern = kivi.pattern(text, within=10 * S, define=used, measures={"n": kivi.count()})
        driver.db.append("calls", [{"host": 1, "ts": begin + i * S, "x": x} for i, x in enumerate(symbols)])
        with driver.store.snapshots.opened() as lease:
            before = Position(lease.ts, begin)
        follower = Follower(driver, pattern, before)
        assert follower.goes_to(begin + over_s * S) == (0, 0), text
        assert follower.goes_to(begin + over_s * S + 1)[0] == 1, text
    driver.close()


def test_a_retraction_ends_it() -> None:
    """Of events that it may have been told of; not of others."""
    driver = EmbeddedDriver(None)
    driver.db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    driver.db.append("calls", [{"host": 1, "ts": T0, "x": 1}])
    follower = Follower(driver, kivi.pattern("A", within=S, measures={"x": kivi.first("x")}))
    assert follower.goes_to(END) == (1, 0)
    driver.db.append("calls", [{"host": 1, "ts": END, "x": 2}])
    with driver.db.transaction() as tx:
        tx.retract("calls", where=col("x") == 2)
    assert follower.goes_to(END + 5 * S) == (0, 0)
    with driver.db.transaction() as tx:
        tx.retract("calls", where=col("x") == 1)
    with pytest.raises(EventsRetracted, match="subscribe again"):
        follower.goes_to(END + 6 * S)
    driver.close()
