"""A snapshot whose connection is lost while it is read: one timestamp and one place for whoever reads it (R1)."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import kivi
import kivi.aio
from kivi.client.steps import Ask, Sleep
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

PAGES = 3
ROWS = PAGES * 65_536
TABLES = {"again_ones": 1, "again_tens": 10}
READERS = 8


@pytest.fixture(scope="module")
def tables(server: ServerProcess) -> Iterator[None]:
    with server.connect(timeout=60) as db:
        for name, n in TABLES.items():
            db.create_table(name, key={"id": "int64"}, columns={"n": "int64"})
            db.write(name, pa.table({"id": range(ROWS), "n": [n] * ROWS}))
        yield
        for name in TABLES:
            db.drop(name)


def cut(db: Any) -> None:
    """Its connection is lost."""
    db._transport._current.end(kivi.Unavailable("cut by the test"))


def total(batches: list[pa.RecordBatch]) -> int:
    return sum(sum(batch["n"].to_pylist()) for batch in batches)


@pytest.mark.story
def test_a_stream_never_goes_on_in_the_pages_of_another(server: ServerProcess, tables: None) -> None:
    """Each session counts its scans from 1 on, and the snapshot is in another one by then."""
    ones, tens = TABLES
    with server.connect(timeout=60) as db, db.snapshot() as snap:
        first = snap.scan_batches(ones)
        next(first)
        cut(db)
        second = snap.scan_batches(tens)
        found = [next(second)]
        with pytest.raises(kivi.SnapshotTooOld, match="begin it again"):
            list(first)
        third = snap.scan_batches(ones)
        next(third)
        third.close()
        assert total([*found, *second]) == ROWS * 10


@pytest.mark.story
def test_a_scan_of_a_shared_snapshot_may_be_begun_again(server: ServerProcess, tables: None) -> None:
    """It has not ended, which SnapshotTooOld would say."""
    ones, _ = TABLES
    with server.connect(timeout=60) as db, db.snapshot(shared=True) as made, db.snapshot(lease=made.lease) as opened:
        for snap in (made, opened):
            first = snap.scan_batches(ones)
            next(first)
            cut(db)
            with pytest.raises(kivi.Unavailable, match="begin it again"):
                list(first)
            assert total([*snap.scan_batches(ones)]) == ROWS


def test_nor_does_one_of_a_task(server: ServerProcess, tables: None) -> None:
    ones, tens = TABLES

    async def test() -> None:
        async with await kivi.aio.connect(server.endpoint, timeout=60) as db, db.snapshot() as snap:
            first = snap.scan_batches(ones)
            await anext(first)
            cut(db)
            second = snap.scan_batches(tens)
            found = [await anext(second)]
            with pytest.raises(kivi.SnapshotTooOld, match="begin it again"):
                await anext(first)
            assert total(found + [batch async for batch in second]) == ROWS * 10

    asyncio.run(test())


def nobody_reads(db: Any) -> None:
    """Long before a lease ends by itself. A release is not waited for, and settling has one of its own for a while."""
    wait_until(lambda: db.stats()["leases"] == 0, timeout_s=10)


@pytest.fixture
def counter(db: Any, accounts: str) -> str:
    with db.transaction() as tx:
        tx.put(accounts, (1,), balance=1)
    return accounts


def balance(snap: Any, table: str) -> int:
    return int(snap.get(table, (1,))["balance"])


@pytest.mark.parametrize("wanted", ["newest", "moment", "bound"])
def test_it_keeps_its_timestamp(server: ServerProcess, db: Any, counter: str, wanted: str) -> None:
    """That of a moment that is not over, too, for which there are newer ones by then."""
    hows: dict[str, dict[str, Any]] = {
        "newest": {},
        "moment": {"as_of": dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)},
        "bound": {"max_staleness": dt.timedelta(hours=1)},
    }
    with db.snapshot() as kept, server.connect() as other, other.snapshot(**hows[wanted]) as snap:
        ts = snap.ts
        assert ts == kept.ts  # whose rows are kept
        with db.transaction() as tx:
            tx.put(counter, (1,), balance=2)
        cut(other)
        assert (balance(snap, counter), snap.ts) == (1, ts)


def test_one_that_is_begun_again_elsewhere_in_time_is_refused(server: ServerProcess, db: Any, counter: str) -> None:
    with server.connect() as other, other.snapshot() as snap:
        assert snap.ts
        with db.transaction() as tx:
            tx.put(counter, (1,), balance=2)
        snap._core.start_ts += 1
        with pytest.raises(kivi.SnapshotTooOld, match="begin another"):
            snap.get(counter, (1,))


def test_one_whose_first_read_was_refused_is_begun_again(server: ServerProcess, db: Any, counter: str) -> None:
    """That it is not there yet tells nothing of what it holds."""
    with (
        db.snapshot() as newest,
        server.connect() as other,
        other.snapshot(min_snapshot=newest.ts + 1) as snap,
    ):
        assert other.get(counter, (1,)) is not None  # the table's schema is known from here on
        other._core.timeout_s, patience_s = 0.5, other._core.timeout_s
        with pytest.raises(kivi.Unavailable):
            snap.get(counter, (1,))
        other._core.timeout_s = patience_s
        with db.transaction() as tx:
            tx.put(counter, (1,), balance=2)
        cut(other)
        assert (balance(snap, counter), snap.ts) == (2, tx.commit_ts)


def test_of_threads_that_lose_it_at_once_one_begins_it_again(server: ServerProcess, db: Any, counter: str) -> None:
    nobody_reads(db)
    with server.connect() as other, ThreadPoolExecutor(READERS) as threads, other.snapshot() as snap:
        assert snap.ts
        tell, all_lost = other._transport.tell, threading.Barrier(READERS)
        perform = other._transport.perform
        mine = threading.local()

        def held(effect: Any) -> Any:
            if not hasattr(mine, "lost"):
                mine.lost = True
                all_lost.wait(60)
            return perform(effect)

        begun = []

        def counted(request: Any, epoch: int | None = None) -> int:
            if epoch is None:
                begun.append(request)
            return tell(request, epoch)

        cut(other)
        other._transport.perform, other._transport.tell = held, counted
        assert {each.result(60) for each in [threads.submit(balance, snap, counter) for _ in range(READERS)]} == {1}
        assert len(begun) == 1
        wait_until(lambda: db.stats()["leases"] == 1)
    nobody_reads(db)


@pytest.mark.parametrize("when", ["before it is begun again", "just then"])
def test_one_that_is_closed_meanwhile_leaves_nothing(server: ServerProcess, db: Any, counter: str, when: str) -> None:
    nobody_reads(db)
    with server.connect() as other:
        snap = other.snapshot().__enter__()
        assert snap.ts
        perform, tell = other._transport.perform, other._transport.tell

        def paused(effect: Any) -> Any:
            if isinstance(effect, Sleep) and when == "before it is begun again":
                snap.close()
            return perform(effect)

        def told(request: Any, epoch: int | None = None) -> int:
            if epoch is None:
                snap.close()
            return tell(request, epoch)

        cut(other)
        other._transport.perform, other._transport.tell = paused, told
        with contextlib.suppress(kivi.InvalidArgument):
            snap.get(counter, (1,))
        assert snap._core.ended
        other._transport.perform, other._transport.tell = perform, tell
        nobody_reads(db)


def test_closing_while_its_first_answer_is_on_its_way_leaves_nothing(
    server: ServerProcess, db: Any, counter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read has taken its Begin along, and leaves behind the release."""
    monkeypatch.setattr("kivi.client.transport._COMPANY_S", 1.0)
    nobody_reads(db)
    with server.connect() as other:
        assert other.get(counter, (1,)) is not None
        snap = other.snapshot().__enter__()
        perform = other._transport.perform

        def late(effect: Any) -> Any:
            if isinstance(effect, Ask) and effect.request.txn:
                snap.close()
                assert other.get(counter, (1,)) is not None
            return perform(effect)

        other._transport.perform = late
        assert balance(snap, counter) == 1
        nobody_reads(db)
