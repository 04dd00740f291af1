"""What no call takes is said in a typed error, the same wherever the store is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

import kivi
import kivi.aio
from kivi.errors import InvalidArgument


def reading(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(db: Any) -> None:
        with db.snapshot() as snap:
            answer = ask(snap)
            if hasattr(answer, "__next__"):
                next(answer, None)

    return call


def writing(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(db: Any) -> None:
        with db.transaction() as tx:
            ask(tx)

    return call


REFUSED: list[Callable[[Any], Any]] = [
    reading(lambda snap: snap.get(["t"], (1,))),
    reading(lambda snap: snap.get(None, (1,))),
    reading(lambda snap: snap.get_many("t", None)),
    reading(lambda snap: snap.get_many("t", 5)),
    reading(lambda snap: snap.get_many("t", "ab")),
    reading(lambda snap: snap.get("t", (1,), 5)),
    reading(lambda snap: snap.get("t", (1,), [[]])),
    reading(lambda snap: snap.scan({})),
    reading(lambda snap: snap.scan("t", columns=5)),
    reading(lambda snap: snap.scan("t", columns=[["n"]])),
    reading(lambda snap: snap.to_arrow({})),
    writing(lambda tx: tx.put(["t"], (1,), n=1)),
    writing(lambda tx: tx.guard("t", (1,), ["n"])),
    lambda db: db.create_aggregate("a", source=5, group_by=["x"], measures={"n": kivi.count()}),
    lambda db: db.create_aggregate("a", source="ev", group_by=5, measures={"n": kivi.count()}),
    lambda db: db.create_aggregate("a", source="ev", group_by=["x"], measures=5),
    lambda db: db.subscriptions(5),
    lambda db: db.batch_scopes(5),
    lambda db: db.stage("ev", [{"ts": 1, "x": 1}], owner=5),
]


@pytest.mark.parametrize("call", REFUSED, ids=map(str, range(len(REFUSED))))
def test_no_such_argument(db: Any, call: Callable[[Any], Any]) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
    with pytest.raises(InvalidArgument):
        call(db)
    assert db.tables() == ["ev", "t"]


@pytest.mark.parametrize("timeout", ["x", math.nan, True, [1]])
def test_no_such_timeout(db: Any, timeout: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    with db.subscribe("t") as live, pytest.raises(InvalidArgument, match="timeout_s is a number of seconds"):
        live.next(timeout_s=timeout)


def test_for_ever_is_no_end(db: Any) -> None:
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    with db.subscribe("t") as live:
        assert live.next(timeout_s=math.inf) is not None
        assert live.next(timeout_s=0) is None


CONNECTING: list[dict[str, Any]] = [
    {"endpoint": None},
    {"endpoint": 5},
    {"endpoint": ""},
    {"timeout": "x"},
    {"timeout": math.nan},
    {"tls": 5},
]


@pytest.mark.parametrize("arguments", CONNECTING, ids=map(str, range(len(CONNECTING))))
def test_nowhere_to_connect(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        kivi.connect(**{"endpoint": "localhost:1", **arguments})
    with pytest.raises(InvalidArgument):
        asyncio.run(kivi.aio.connect(**{"endpoint": "localhost:1", **arguments}))


def test_what_runs_in_a_transaction_is_a_function() -> None:
    nothing: Any = None
    text: Any = "x"
    with kivi.open() as db:
        with pytest.raises(InvalidArgument):
            db.run(nothing)
        with pytest.raises(InvalidArgument):
            db.run(lambda tx: 1, timeout=text)
    with pytest.raises(InvalidArgument):
        kivi.open(5)
