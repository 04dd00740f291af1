"""What clients do to the servers of a cluster, and what each server says of it afterwards."""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import kivi
from tests.serverproc import ServerProcess
from tests.waiting import PATIENCE_S

__all__ = ["START", "Client", "answers_of", "make_tables", "make_tables_everywhere", "newest_of", "wait_for"]

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
ENDPOINTS = 5


def commit(ts: dt.datetime, endpoint: int, value: int, tx: kivi.Transaction) -> None:
    tx.append("calls", [{"ts": ts, "endpoint": endpoint, "us": value}])
    tx.delta("totals", (endpoint,), us=value, n=1)


class Client(threading.Thread):
    """Appends events by one node, each with its sum in the same commit, and runs again what was lost before it counted.

    So many ``commits``, and on ``while_``. ``done`` is what was acknowledged, in ``count`` commits."""

    def __init__(
        self,
        endpoint: str,
        seed: int,
        commits: int,
        timeout: float = PATIENCE_S,
        while_: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.endpoint, self.rng, self.commits, self.timeout = endpoint, random.Random(seed), commits, timeout
        self.while_, self.count = while_, 0
        self.done: Counter[int] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with kivi.connect(self.endpoint, timeout=self.timeout) as db:
                while self.count < self.commits or self.while_():
                    endpoint, value = self.rng.randrange(ENDPOINTS), self.rng.randrange(1000)
                    db.run(partial(commit, START + dt.timedelta(seconds=self.count), endpoint, value))
                    self.done[endpoint] += value
                    self.count += 1
        except BaseException as error:
            self.failure = error


def make_tables_everywhere(nodes: Sequence[ServerProcess]) -> None:
    """On one, and all have them."""
    with nodes[0].connect() as db:
        make_tables(db)
        made = db.watermark()
    for node in nodes:
        with node.connect() as db:
            wait_for(made, db)


def wait_for(ts: int, db: kivi.Database) -> None:
    """Until the client's node has come to this commit. It is the read of a snapshot that waits for that: one that is
    only begun is on its way when the client goes on, and taken back if it is closed by then."""
    with db.snapshot(min_snapshot=ts) as snap:
        assert snap.ts >= ts


def make_tables(db: kivi.Database) -> None:
    db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "endpoint": "int64", "us": "int64"})
    db.create_aggregate(
        "by_endpoint", source="calls", group_by=["endpoint"], measures={"us": kivi.sum("us"), "n": kivi.count()}
    )
    db.create_table("totals", key={"endpoint": "int64"}, columns={"us": kivi.sum("int64"), "n": kivi.sum("int64")})


def newest_of(nodes: Sequence[ServerProcess]) -> int:
    """The snapshot at which all of them answer alike once nobody writes: each has what was acknowledged by itself, and
    may not have heard yet of what was acknowledged by another one."""
    with contextlib.ExitStack() as opened:
        return max(opened.enter_context(node.connect()).watermark() for node in nodes)


def answers_of(node: ServerProcess, at_least: int) -> list[object]:
    with node.connect() as db, db.snapshot(min_snapshot=at_least) as snap:
        rows = [
            sorted(({**row} for row in snap.scan(name)), key=lambda row: row["endpoint"])
            for name in ("totals", "by_endpoint")
        ]
        return [
            snap.ts,
            *rows,
            snap.query("calls", measures={"us": kivi.sum("us"), "n": kivi.count()}).to_arrow().to_pylist(),
        ]
