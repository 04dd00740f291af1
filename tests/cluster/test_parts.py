"""Subscriptions out of parts: what is put together is all that was asked for, at each snapshot that is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import kivi
from tests.cluster.inprocess import Loop, Served
from tests.conftest import require
from tests.log.natscluster import NatsCluster
from tests.waiting import wait_until

USERS = [f"user {i}" for i in range(40)]
LOW, HIGH = (1 << 32) - 1, (1 << 32) - 1 << 32


class Halves:
    """``low`` holds the shards 0-31, ``high`` the shards 32-63."""

    def __init__(self, path: Path) -> None:
        self.path, self.opened, self._copies = path, contextlib.ExitStack(), 0
        self.nats = self.opened.enter_context(NatsCluster(path, 1))
        self.loop = self.opened.enter_context(Loop())
        with Served(path / "high", self.nats, self.loop) as one, one.connect() as db:
            columns = {"ts": "timestamp", "user": "string"}
            db.create_event_table("calls", event_time="ts", columns=columns, shard_by=["user"])
            db.create_aggregate("counts", source="calls", group_by=["user"], measures={"n": kivi.count()})
            self.append(one, USERS[:30])
            db.checkpoint(path / "low")
            db.checkpoint(path / "whole")
        self.low = self.start("low", "0-31")
        self.high = self.start("high", "32-63")
        wait_until(lambda: self.low.knows >= {self.high.endpoint})

    def start(self, name: str, shards: str | None = None, listen: str = "localhost:0") -> Served:
        return self.opened.enter_context(Served(self.path / name, self.nats, self.loop, shards, listen))

    @staticmethod
    def append(node: Served, users: Sequence[str] = USERS) -> int:
        """One event of each of these."""
        with node.connect() as db:
            return db.append("calls", [{"ts": 0, "user": user} for user in users])


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Halves]:
    require("nats-server")
    made = Halves(tmp_path)
    with made.opened:
        yield made


def rows(n: int, users: Sequence[str] = USERS) -> list[dict[str, Any]]:
    """Of these users; the first thirty have ``n`` events, the others one fewer."""
    counts = {user: n - (user not in USERS[:30]) for user in users}
    return [{"user": user, "n": counts[user]} for user in sorted(users)]


def come_to(live: Any, ts: int) -> None:
    while live.ts < ts:
        live.next(1)


def test_shards_that_only_a_life_before_had_are_not_left_out(halves: Halves) -> None:
    """Another node, with fewer shards, is where one was that held more: nobody has the others now."""
    with halves.high.connect() as db:
        db.checkpoint(halves.path / "less")
    halves.high.__exit__()
    halves.high = halves.start("less", "32-47", listen=halves.high.endpoint)
    own = halves.high.node.log.node
    wait_until(lambda: any(one.node == own and one.shards for one in halves.low.node.log.members))
    with kivi.connect(halves.low.endpoint, timeout=3) as db, pytest.raises(kivi.Unavailable):  # noqa: SIM117
        with db.subscribe("counts") as live:
            live.next(3)
            assert live.rows == rows(1, USERS[:30])


def test_parts_go_on_from_what_a_whole_node_has_told_after_parts(halves: Halves) -> None:
    def parts(*nodes: Served) -> Any:
        """``low`` names those two for what it does not hold."""
        held = list(zip((node.endpoint for node in nodes), (LOW, HIGH), strict=True))
        return patch.multiple(halves.low.node.store.shards, holders=lambda shards: [], parts=lambda shards: held)

    with kivi.connect(halves.low.endpoint, timeout=60) as db, db.subscribe("counts", interval_ms=0) as live:
        assert live.next(60) is not None
        assert live.rows == rows(1, USERS[:30])
        whole = halves.start("whole")
        wait_until(lambda: halves.low.knows >= {whole.endpoint})
        halves.high.__exit__()
        come_to(live, halves.append(halves.low))
        assert live.rows == rows(2)
        halves.high = halves.start("high", "32-63")
        wait_until(partial(has_come, halves, halves.append(halves.low)))
        with parts(halves.low, halves.high):
            whole.__exit__()
            come_to(live, halves.append(halves.low))
            assert live.rows == rows(4)


def has_come(halves: Halves, ts: int) -> bool:
    return all(node.node.store.watermark() >= ts for node in (halves.low, halves.high))


def test_who_goes_on_from_what_another_program_was_told_is_told_nothing_older(halves: Halves) -> None:
    with halves.high.behind(), kivi.connect(halves.low.endpoint, timeout=3) as db:
        since = halves.append(halves.low)
        with pytest.raises(kivi.Unavailable):
            db.subscribe("counts", since=since, rows=rows(2))
    with (
        kivi.connect(halves.low.endpoint, timeout=60) as db,
        db.subscribe("counts", since=since, rows=rows(2), interval_ms=0) as live,
    ):
        live.next(60)
        assert (live.ts, live.rows) == (since, rows(2))
