"""``max_staleness`` and ``read``, on every kind of database: one process is never older than now (R27)."""

from __future__ import annotations

import datetime as dt

import pytest

import kivi
from kivi import errors


@pytest.fixture
def row(db):
    db.create_table("t", key={"id": "int64"}, columns={"n": "int64"})
    with db.transaction() as tx:
        tx.put("t", (1,), n=5)
    return {"id": 1, "n": 5}


@pytest.mark.parametrize("how", ["5s", 0, "250ms", dt.timedelta(seconds=1), dt.timedelta(), 1])
def test_what_one_process_answers_is_of_now(db, row, how):
    assert db.get("t", (1,), max_staleness=how) == row
    assert db.get_many("t", [(1,), (2,)], max_staleness=how) == [row, None]
    with db.transaction() as tx:
        tx.put("t", (2,), n=6)
    with db.snapshot(max_staleness=how) as snap:
        assert snap.ts >= tx.commit_ts
        assert snap.get("t", (2,)) == {"id": 2, "n": 6}


@pytest.mark.parametrize("how", ["soon", -1, "", 1.5, True])
def test_what_is_no_time_span_is_refused(db, row, how):
    for ask in (
        lambda: db.get("t", (1,), max_staleness=how),
        lambda: db.get_many("t", [(1,)], max_staleness=how),
        lambda: db.snapshot(max_staleness=how),
    ):
        with pytest.raises(errors.InvalidArgument, match="max_staleness"):
            ask()


def test_a_snapshot_of_a_moment_is_as_old_as_it_is(db, row):
    with pytest.raises(errors.InvalidArgument, match="as_of"):
        db.snapshot(as_of=db.watermark(), max_staleness="5s")


def test_a_session_reads_what_it_has_seen_however_old_it_might_be(db, row):
    with db.snapshot(min_snapshot=db.watermark(), max_staleness="1h") as snap:
        assert snap.get("t", (1,)) == row


def test_read_is_any_or_fresh(server):
    with kivi.connect(server.endpoint, read="fresh") as db:
        db.create_table("fresh", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        with db.transaction() as tx:
            tx.delta("fresh", (1,), n=5)
            assert tx.get("fresh", (1,)) == {"id": 1, "n": 5}
        assert db.get("fresh", (1,)) == {"id": 1, "n": 5}
        with db.snapshot() as snap:
            assert snap.get("fresh", (1,)) == {"id": 1, "n": 5}
        db.drop("fresh")
    with pytest.raises(errors.InvalidArgument, match="fresh"):
        kivi.connect(server.endpoint, read="newest")
