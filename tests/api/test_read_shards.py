"""Reads of some shards alone, on every kind of database: for any division of the shards, each row is in one part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

import kivi
from kivi.encoding.shards import shard_of
from kivi.errors import InvalidArgument
from kivi.log.shards import SHARDS
from kivi.model.declarations import event_table_schema

COLUMNS = {"ts": "timestamp", "user": "string", "n": "int64"}
EVENTS = event_table_schema("calls", "ts", COLUMNS, shard_by=["user"])
USERS = [f"user {i}" for i in range(50)]
CUTS = [0, 7, 31, 32, 64]


def bits(low: int, high: int) -> int:
    return (1 << high) - (1 << low)


PARTS = [bits(low, high) for low, high in pairwise(CUTS)]


@pytest.fixture
def filled(db: Any) -> Iterator[Any]:
    db.create_event_table("calls", event_time="ts", columns=COLUMNS, shard_by=["user"])
    db.create_event_table("plain", event_time="ts", columns=COLUMNS)
    db.create_aggregate("sums", source="calls", group_by=["user"], measures={"n": kivi.sum("n")})
    for i in range(6):
        db.append("calls", [{"ts": 60 * i, "user": user, "n": i} for user in USERS])
    return db


def shard(row: dict[str, Any]) -> int:
    return shard_of(EVENTS, (row["user"],), SHARDS)


def scanned(snap: Any, table: str, **wanted: Any) -> list[dict[str, Any]]:
    return [row for batch in snap.scan_batches(table, **wanted) for row in batch.to_pylist()]


@pytest.mark.parametrize(
    "reading",
    [
        lambda snap, **more: scanned(snap, "calls", **more),
        lambda snap, **more: scanned(snap, "calls", columns=["n", "_commit_ts"], where=kivi.col("n") > 1, **more),
        lambda snap, **more: scanned(snap, "calls", order_by=["-n", "user"], offset=0, **more),
        lambda snap, **more: scanned(snap, "calls", any_order=True, **more),
        lambda snap, **more: scanned(snap, "calls", reverse=True, **more),
        lambda snap, **more: scanned(snap, "sums", **more),
        lambda snap, **more: scanned(snap, "sums", reverse=True, columns=["n", "user"], **more),
        lambda snap, **more: snap.changes("calls", since=snap.ts - 3, columns=["n"], **more),
        lambda snap, **more: snap.changes("calls", since=0, retractions="deliver", **more),
        lambda snap, **more: snap.changes("sums", since=0, **more),
        lambda snap, **more: snap.changes("sums", since=snap.ts - 1, **more),
    ],
)
def test_each_row_is_in_one_part(filled: Any, reading: Any) -> None:
    with filled.snapshot() as snap:
        whole = list(reading(snap))
        parts = [list(reading(snap, shards=part)) for part in PARTS]
    assert whole
    assert sorted(map(str, whole)) == sorted(str(row) for part in parts for row in part)
    for part, rows in zip(PARTS, parts, strict=True):
        assert all(part >> shard(row) & 1 for row in rows if "user" in row)
        kept = [row for row in whole if row in rows]
        assert "user" not in whole[0] or rows == kept, "in the order of the whole"


def test_a_limit_counts_rows_of_the_shards(filled: Any) -> None:
    with filled.snapshot() as snap:
        for part in PARTS:
            for more in ({}, {"reverse": True}, {"where": kivi.col("n") > 0}):
                rows = scanned(snap, "sums", shards=part, **more)
                assert (scanned(snap, "sums", shards=part, limit=2, **more)) == rows[:2]


def test_what_cannot_be_of_some_shards_is_refused(filled: Any) -> None:
    with filled.snapshot() as snap:
        for refused, why in (
            (lambda: scanned(snap, "plain", shards=1), "not sharded"),
            (lambda: scanned(snap, "calls", shards=0), "a set of the shards"),
            (lambda: scanned(snap, "calls", shards=1 << 64), "a set of the shards"),
            (lambda: list(snap.changes("calls", since=0, take=3, shards=1)), "leave shards out"),
        ):
            with pytest.raises(InvalidArgument, match=why):
                refused()
    with filled.transaction() as tx:
        tx.append("calls", [{"ts": 0, "user": USERS[0], "n": 0}])
        with pytest.raises(InvalidArgument, match="in a snapshot"):
            list(tx.scan_batches("calls", shards=1))
        tx.rollback()
