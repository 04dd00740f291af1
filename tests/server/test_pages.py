"""Scans by pages, one of which may be read before it is asked for: the same rows, in the same order, in any tempo."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kivi_server.pages import Page, Pages
from kivi_server.scheduler import Scheduler
from kivi_server.sessions import Sessions

import kivi
from kivi.api.tokens import new_token
from kivi.client.messages import read_batches
from kivi.errors import DataLoss
from kivi.wire.v1 import session_pb2 as pb
from kivi.wire.v1 import types_pb2
from tests.server.peers import Peer
from tests.server.rawsession import RawSession, rows
from tests.waiting import until, wait_until

ROWS = 70_000  # of one portion of the store's are several of these pages, and several portions


def made(count: int, error: Exception | None) -> Iterator[Page]:
    for i in range(count):
        yield b"%d" % i, i < count - 1
    if error is not None:
        raise error


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 6), st.booleans())
def test_pages_come_in_order_however_they_are_read(ahead: list[bool], count: int, fails: bool) -> None:
    error = DataLoss("a block is damaged") if fails else None
    room = threading.Semaphore(1)
    pool = ThreadPoolExecutor(1)
    pages = Pages(made(count, error), room, pool)
    steps = iter(ahead)

    def read() -> Page:
        if next(steps, False):
            pages.read_ahead()
            assert pages.ahead is not None
        page = pages.next()
        assert pages.ahead is None
        return page

    with pool:
        for i in range(count):
            assert read() == (b"%d" % i, i < count - 1)
        with pytest.raises(DataLoss if fails else StopIteration):
            read()
    assert room.acquire(blocking=False)


def test_only_so_many_pages_are_read_ahead() -> None:
    room = threading.Semaphore(2)
    pool = ThreadPoolExecutor(1)
    scans = [Pages(made(3, None), room, pool) for _ in range(4)]
    with pool:
        for pages in scans:
            pages.read_ahead()
        assert [pages.ahead is not None for pages in scans] == [True, True, False, False]
        scans[0].close()
        scans[0].close()
        scans[0].read_ahead()
        assert scans[0].ahead is None  # it is closed
        assert scans[1].next() == (b"0", True)
        for pages in scans[1:]:
            pages.read_ahead()
        assert [pages.ahead is not None for pages in scans] == [False, True, True, False]
        assert [pages.next() for pages in scans[1:]] == [(b"1", True), (b"0", True), (b"0", True)]
    scans[1].read_ahead()  # which is shut down
    assert scans[1].next() == (b"2", False)
    assert [room.acquire(blocking=False) for _ in range(3)] == [True, True, False]


def test_an_error_that_was_read_ahead_holds_nothing() -> None:
    """No reference cycle: what the scan held in the engine goes at once, asked for or not."""
    gc.collect()
    gc.disable()
    try:
        for asked in (True, False):
            held = HeldScan()
            pool = ThreadPoolExecutor(1)
            pages = Pages(held.pages(), threading.Semaphore(1), pool)
            with pool:
                pages.read_ahead()
            if asked:
                with pytest.raises(DataLoss):
                    pages.next()
            pages.close()
            gone = weakref.ref(held)
            del held, pages
            assert gone() is None
    finally:
        gc.enable()


class HeldScan:
    def pages(self) -> Iterator[Page]:
        raise DataLoss("a block is damaged")
        yield


def fill(db: Any) -> None:
    db.create_event_table("many", event_time="ts", columns={"id": "int64", "ts": "timestamp", "us": "int64"})
    db.create_aggregate("many_5m", source="many", group_by=["id"], measures={"total": kivi.sum("us")})
    ids = pa.array(range(ROWS), pa.int64())
    db.append("many", pa.table({"id": ids, "ts": pa.array([0] * ROWS, pa.timestamp("us", "UTC")), "us": ids}))
    db.consolidate()


@pytest.fixture
def many(db) -> Iterator[int]:
    """The id of an aggregate of ROWS rows: (i, i) for each i."""
    for name in ("many_5m", "many"):
        if name in db.tables():
            db.drop(name)
    fill(db)
    yield db.describe("many_5m")["id"]
    for name in ("many_5m", "many"):
        if name in db.tables():
            db.drop(name)


def opening(number: int, txn: int, table_id: int, page_rows: int = 65_536) -> pb.Request:
    spec = types_pb2.ScanSpec(table="many_5m", table_id=table_id)
    return pb.Request(id=number, txn=txn, scan_open=pb.ScanOpen(spec=spec, page_rows=page_rows))


def following(number: int, txn: int, scan: int, close: bool = False) -> pb.Request:
    return pb.Request(id=number, txn=txn, scan_next=pb.ScanNext(scan=scan, close=close))


def ids(page: bytes) -> list[int]:
    return [i for batch in read_batches(page) for i in batch.column("id").to_pylist()]


def test_every_row_comes_once_in_any_tempo(raw, many):
    """Two scans of one snapshot by turns, asked for late, at once, several at a time, with other requests between."""
    moves = random.Random(7)
    numbers = itertools.count(1)
    raw.send(pb.Request(txn=1, begin=pb.Begin()))
    scans: dict[int, list[int]] = {}
    for page_rows in (5_000, 65_536):
        raw.send(opening(number := next(numbers), 1, many, page_rows))
        page = raw.reply(number).page
        scans[page.scan] = ids(raw.pages[number])
    left = set(scans)
    while left:
        scan = moves.choice(sorted(left))
        asked = [next(numbers) for _ in range(moves.choice([1, 1, 2, 3]))]
        row = next(numbers)
        get = pb.Get(table="many_5m", table_id=many, keys=[types_pb2.Key(values=[types_pb2.Value(int_value=row)])])
        raw.send(*(following(number, 1, scan) for number in asked), pb.Request(id=row, txn=1, get=get))
        for number in asked:
            reply = raw.reply(number)
            if scan not in left:
                assert reply.error.reason == "NotFound"  # it had ended
                continue
            assert not reply.HasField("error"), reply.error
            scans[scan] += ids(raw.pages[number])
            if not reply.page.scan:
                left.discard(scan)
        assert rows(raw.reply(row).get) == [[row, row]]
        time.sleep(moves.choice([0, 0, 0.02]))
    assert all(found == list(range(ROWS)) for found in scans.values())


def test_own_writes_after_a_scan_began_are_not_in_the_page_that_was_read_ahead(raw, db, accounts):
    with db.transaction() as tx:
        for i in range(9_000):
            tx.put(accounts, (i,), name="old")
    table_id = db.describe(accounts)["id"]
    spec = types_pb2.ScanSpec(table=accounts, table_id=table_id)
    raw.send(
        pb.Request(txn=1, begin=pb.Begin()),
        pb.Request(id=1, txn=1, scan_open=pb.ScanOpen(spec=spec, page_rows=2_000)),
    )
    page = raw.reply(1).page
    scan, names = page.scan, [name for batch in read_batches(raw.pages[1]) for name in batch.column("name").to_pylist()]
    for number in itertools.count(2):
        write = pb.Operation(kind=pb.Operation.KIND_PUT, table=accounts, table_id=table_id, columns=["name"])
        write.key.add(int_value=8_990 + number)  # a row of the last page, or one behind it
        write.values.add(string_value="new")
        request = following(number, 1, scan)
        if number > 2:
            request.operations.append(write)
            time.sleep(0.1)  # the page is there when it is asked for
        raw.send(request)
        page = raw.reply(number).page
        names += [name for batch in read_batches(raw.pages[number]) for name in batch.column("name").to_pylist()]
        if not page.scan:
            break
    assert names == ["old"] * 9_000
    raw.send(pb.Request(id=100, txn=1, commit=pb.Commit(token=new_token())))
    assert raw.reply(100).commit.commit_ts
    written = db.get_many(accounts, [(8_990 + i,) for i in range(2, number + 1)], ["name"])
    assert written == [{"name": "old"}, *[{"name": "new"}] * (number - 2)]


def dropped(raw: RawSession, db, many: int, asked: int) -> list[str]:
    """What a scan answers, of which so many pages are asked for before its table is dropped: rows, or the reason."""
    began = time.monotonic()
    raw.send(pb.Request(txn=1, begin=pb.Begin()), opening(1, 1, many))
    page, found = raw.reply(1).page, list[str]()
    for number in range(2, 2 + asked):
        raw.send(following(number, 1, page.scan))
        assert not raw.reply(number).HasField("error") and ids(raw.pages[number])
    time.sleep(max(0.5, 20 * (time.monotonic() - began)))  # many times as long as the pages before have taken
    db.drop("many_5m")
    for number in range(100, 103):
        raw.send(following(number, 1, page.scan))
        reply = raw.reply(number)
        found.append(reply.error.reason if reply.HasField("error") else "rows")
    return found


def test_a_page_is_read_ahead_once_a_second_one_was_asked_for(raw, db, many):
    """It is there before its table is dropped; the one behind it is not, and says so once."""
    assert dropped(raw, db, many, asked=1) == ["rows", "NotFound", "NotFound"]


def test_who_reads_one_page_has_the_server_read_no_other(raw, db, many):
    assert dropped(raw, db, many, asked=0)[0] == "NotFound"


def test_a_scan_may_be_closed_and_a_snapshot_released_while_a_page_is_read(raw, db, many):
    wait_until(lambda: db.stats()["leases"] == 0)  # settling has one of its own for a while
    for txn in range(1, 30):
        raw.send(pb.Request(txn=txn, begin=pb.Begin()), opening(1, txn, many))
        scan = raw.reply(1).page.scan
        raw.send(following(2, txn, scan))
        assert not raw.reply(2).HasField("error") and ids(raw.pages[2])
        if txn % 2:
            raw.send(following(3, txn, scan, close=True), following(4, txn, scan))
            assert not raw.reply(3).HasField("error")
            assert raw.reply(4).error.reason == "NotFound"
        raw.send(pb.Request(txn=txn, release=pb.Release()), following(5, txn, scan))
        assert raw.reply(5).error.reason == "SnapshotTooOld"
    wait_until(lambda: db.stats()["leases"] == 0)


def test_a_page_says_which_snapshot_it_is_of_and_none_is_sent_that_nobody_wants(raw, many):
    raw.send(pb.Request(txn=1, begin=pb.Begin()), opening(1, 1, many))
    first = raw.reply(1)
    found = ids(raw.pages[1])
    raw.send(following(0, 1, first.page.scan))  # the second page, which is not sent
    for number in range(3, 7):
        raw.send(following(number, 1, first.page.scan))
        reply = raw.reply(number)
        assert reply.start_ts == first.start_ts
        found += ids(raw.pages[number])
    assert not reply.page.scan
    assert not raw.replies  # none of number 0
    assert found == [i for i in range(ROWS) if not 4_096 <= i < 4_096 + 16_384]


def beside_a_full_pool(
    path: Path, story: Callable[[Any, Callable[..., Awaitable[None]], Callable[[], None]], Awaitable[None]]
) -> None:
    """A session without a stream, of which a page is read ahead, and a second would be if the pool were not full.

    No turn counts as slow, as one does on a busy machine: reads would be for the pool.
    """

    async def told() -> None:
        with (
            contextlib.closing(kivi.open(str(path / "data"), background=False)) as db,
            mock.patch.object(Scheduler, "took"),
        ):
            fill(db)
            sessions = Sessions(db.store, "test")
            peer, free = Peer(sessions), threading.Event()

            ask = peer.ask
            try:
                await ask(pb.Request(txn=1, begin=pb.Begin()), opening(1, 1, 0))
                await until(lambda: peer.has(1))
                scan = peer.answers[0].page.scan
                await ask(following(2, 1, scan))
                pages = peer.session.txns[1].scans[scan]
                await until(lambda: pages.ahead is not None and pages.ahead.done())
                full = [sessions.reads.submit(free.wait) for _ in range(8)]
                await until(lambda: all(each.running() for each in full))
                await ask(following(3, 1, scan))
                await until(lambda: peer.has(3))  # by this thread, as there is no other
                assert pages.ahead is not None
                assert not pages.ahead.done()
                await story(peer, ask, free.set)
            finally:
                free.set()
                sessions.close()

    asyncio.run(told())


def reading(number: int) -> pb.Request:
    keys = [types_pb2.Key(values=[types_pb2.Value(int_value=7)])]
    return pb.Request(id=number, txn=1, get=pb.Get(table="many_5m", keys=keys))


def test_nobody_waits_for_a_page_but_who_asks_for_it(tmp_path: Path) -> None:
    async def story(peer: Any, ask: Callable[..., Awaitable[None]], free: Callable[[], None]) -> None:
        await ask(reading(4))
        await until(lambda: peer.has(4))  # while the pool is full
        assert [answer.id for answer in peer.replies] == [1, 2, 3, 4]
        scan = peer.answers[0].page.scan
        await ask(following(5, 1, scan), reading(6), following(7, 1, scan), following(8, 1, scan))
        assert peer.has(4)
        free()
        await until(lambda: peer.has(8))
        assert [answer.id for answer in peer.replies] == list(range(1, 9))
        found = [i for answer in peer.answers if answer.HasField("page") for i in ids(peer.pages[answer.id])]
        assert found == list(range(ROWS))
        await until(lambda: not peer.session.txns[1].busy)

    beside_a_full_pool(tmp_path, story)


def test_a_snapshot_ends_at_once_though_a_page_of_it_is_to_be_read(tmp_path: Path) -> None:
    async def story(peer: Any, ask: Callable[..., Awaitable[None]], free: Callable[[], None]) -> None:
        pages = next(iter(peer.session.txns[1].scans.values()))
        await ask(pb.Request(txn=1, release=pb.Release()))
        assert not peer.session.txns
        assert len(peer.session.store.leases) == 0
        assert pages.ahead is None
        assert peer.has(3)

    beside_a_full_pool(tmp_path, story)


def test_a_session_ends_though_somebody_waits_for_a_page(tmp_path: Path) -> None:
    async def story(peer: Any, ask: Callable[..., Awaitable[None]], free: Callable[[], None]) -> None:
        await ask(following(4, 1, peer.answers[0].page.scan), reading(5))
        peer.session._closed = True
        peer.session._release_all()
        free()
        assert not peer.session.txns
        assert len(peer.session.store.leases) == 0
        room = peer.session.sessions.pages_ahead
        assert [room.acquire(blocking=False) for _ in range(33)] == [True] * 32 + [False]

    beside_a_full_pool(tmp_path, story)
