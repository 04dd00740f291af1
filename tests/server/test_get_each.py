"""Gets that came together are answered in columns: the same rows as one by one."""

from __future__ import annotations

import datetime as dt
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from kivi_server.row_sizes import RowSizes
from kivi_server.sessions import Sessions

import kivi
from kivi.client.calls import received
from kivi.client.steps import Rows
from kivi.embedded.database import Database
from kivi.wire.frames import Packet, joined
from kivi.wire.v1 import session_pb2
from tests.server.peers import Peer, run
from tests.serverproc import ServerProcess
from tests.waiting import until


def gets(peer: Peer, *rows: int, columns: tuple[str, ...] = ()) -> list[session_pb2.Request]:
    """Of the table of counters, without a transaction."""
    found = []
    for row in rows:
        request = peer.read()
        request.ClearField("first")
        request.txn = 0
        request.get.columns.extend(columns)
        request.get.keys[0].values[0].int_value = row
        found.append(request)
    return found


def got(peer: Peer) -> dict[int, Rows]:
    """As a client reads the answers."""
    _, found = received(joined([Packet(session_pb2.ServerFrame(responses=peer.answers).SerializeToString())]))
    return {number: answer._replace(rows=[*answer.rows]) for number, answer in found if isinstance(answer, Rows)}


def test_gets_that_came_together_are_one_answer(tmp_path: Path) -> None:
    """Of a row each, of several, and of none."""

    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        await peer.ask(*[peer.commit(hits=row * 10, row=row) for row in (1, 2, 3)])
        await _answered(peer, 3)
        peer.forget()
        await peer.ask(*gets(peer, 1, 2, 9, 3))
        (answer,) = peer.answers
        assert [*answer.get.ids] == [4, 5, 6, 7] and [*answer.get.missing] == [2]
        ts = sessions.store.watermark()
        assert answer.start_ts == ts and not answer.get.start_ts and not answer.get.counts
        assert got(peer) == {4: (ts, [(1, 10)]), 5: (ts, [(2, 20)]), 6: (ts, [None]), 7: (ts, [(3, 30)])}
        peer.forget()
        several = gets(peer, 9, 1, 8)
        several[1].get.keys.add().values.add(int_value=7)
        several[1].get.keys.add().values.add(int_value=3)
        await peer.ask(*several)
        (answer,) = peer.answers
        assert [*answer.get.counts] == [1, 3, 1] and answer.get.keys == 5
        assert got(peer) == {8: (ts, [None]), 9: (ts, [(1, 10), None, (3, 30)]), 10: (ts, [None])}
        peer.forget()
        await peer.ask(*gets(peer, 8, 9))
        assert got(peer) == {11: (ts, [None]), 12: (ts, [None])} and not peer.answers[0].get.columns
        peer.forget()
        await peer.ask(*gets(peer, 1, 2, columns=("hits",)), *gets(peer, 3))
        assert got(peer) == {13: (ts, [(10,)]), 14: (ts, [(20,)]), 15: (ts, [(3, 30)])} and len(peer.answers) == 2

    run(story, tmp_path)


def test_each_is_told_its_own_snapshot(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        begun: list[session_pb2.Request] = []
        for row in (1, 2):
            await peer.ask(peer.commit(hits=5, row=row))
            await _answered(peer, 2 * len(begun) + 1)
            begun.append(peer.read())
            await peer.ask(begun[-1])
        for request in begun:
            request.id += 100
            request.ClearField("first")
        peer.forget()
        await peer.ask(*begun)
        (answer,) = peer.answers
        assert len(set(answer.get.start_ts)) == 2
        assert [rows.start_ts for rows in got(peer).values()] == [*answer.get.start_ts]

    run(story, tmp_path)


def test_very_many_cells_are_several_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 256 rows of 32,000 columns fit into no message; each is counted with all that it answers."""
    monkeypatch.setattr("kivi_server.reads._CELLS_MAX", 5 * 2)

    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        await peer.ask(*gets(peer, *[0] * 18))
        assert len(peer.answers) == 4 and peer.counted == peer.session._asked == 18
        assert [*got(peer)] == [*range(1, 19)] and all(each.rows == [(0, 1)] for each in got(peer).values())

    run(story, tmp_path)


async def _texts(sessions: Sessions, *lengths: int) -> Any:
    """A table with text, of rows of these lengths; and what reads rows of it for a peer."""
    db = Database(sessions.store)
    db.create_table("texts", key={"id": "int64"}, columns={"n": "int64", "name": "string"})
    for i, length in enumerate(lengths):
        with db.transaction() as tx:
            tx.put("texts", (i,), n=i, name="x" * length)

    async def read(peer: Peer, *rows: int, columns: tuple[str, ...] = ()) -> bool:
        """Whether the event loop did, and nobody else."""
        wanted = gets(peer, *rows, columns=columns)
        for request in wanted:
            request.get.table, request.get.known_columns = "texts", 0 if columns else 3
        peer.forget()
        peer.threads.clear()
        await peer.ask(*wanted)
        await _answered(peer, len(wanted))
        found = got(peer)
        for row, request in zip(rows, wanted, strict=True):
            (values,) = found[request.id].rows
            there = {"n": row, "name": "x" * lengths[row]}
            assert values == tuple(there[name] for name in columns) if columns else (row, *there.values())
        return peer.threads == {threading.get_ident()}

    return read


def test_rows_with_text_are_read_together_once_they_are_known_to_be_short(tmp_path: Path) -> None:
    """By the answers of a pool, whichever session they were for."""

    async def story(sessions: Sessions) -> None:
        read, first = await _texts(sessions, *range(20), 100_000), Peer(sessions)
        for _ in range(4):
            assert not await read(first, *range(16))
        other = Peer(sessions)
        assert await read(other, *range(18)) and len(other.answers) == 3
        assert not await read(other, 1, 20)  # which it met, and a pool answers
        for _ in range(5):
            assert not await read(first, *range(16))  # it is not yet the time
        assert sessions.row_sizes.are_short(sessions.store.table("texts").id) is False

    run(story, tmp_path)


def test_a_table_of_long_rows_never_holds_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kivi_server.row_sizes._SHORT", 1)
    monkeypatch.setattr("kivi_server.row_sizes._PAUSE_S", 0.0)

    async def story(sessions: Sessions) -> None:
        read = await _texts(sessions, *[70_000] * 8)
        for _ in range(4):  # by a session each
            assert not await read(Peer(sessions), *range(8))
            assert not await read(Peer(sessions), 1, columns=("n",))  # for which the whole row is read
        assert not await read(Peer(sessions), 1, columns=("n",))
        assert not await read(Peer(sessions), 1)

    run(story, tmp_path)


def test_a_table_with_long_rows_is_for_a_pool_for_a_time_that_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("kivi_server.row_sizes.time.monotonic", lambda: now)
    sizes, pauses = RowSizes(), list[float]()
    for _ in range(11):
        assert not sizes.answered(1, 8, 100_000)
        assert not sizes.answered(1, 1, 100_000)  # of those that came together with it
        for _ in range(100):
            assert sizes.answered(1, 1, 64 << 10) and sizes.answered(1, 100, 800_000)
        pauses.append(0.0)
        while not sizes.are_short(1):
            now += 0.5
            pauses[-1] += 0.5
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256]
    assert not sizes.are_short(2)
    for table in range(10, 10 + 2 * 4_096):
        sizes.answered(table, 1, 10)
    assert len(sizes._tables) <= 4_096


async def _answered(peer: Peer, count: int) -> None:
    await until(lambda: peer.has(count))


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ServerProcess(tmp_path_factory.mktemp("data")) as server, server.connect() as connected:
        yield connected


def test_threads_read_the_same_rows_as_a_scan_whatever_they_are_made_of(db: Any) -> None:
    """Timestamps and decimals among integers, nulls, text and rows that are not there; by snapshots and without."""
    db.create_table(
        "mixed",
        key={"id": "int64", "at": "timestamp"},
        columns={"n": kivi.sum("int64"), "fee": "decimal(10,2)", "seen": "timestamp"},
    )
    db.create_table("texts", key={"id": "int64"}, columns={"n": "int64", "name": "string"})
    moment = dt.datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=dt.UTC)
    with db.transaction() as tx:
        for i in range(40):
            tx.delta("mixed", (i, i * 1_000_000), n=-i)
            if i % 3:
                tx.put("mixed", (i, i * 1_000_000), fee=Decimal(i) / 4, seen=moment + dt.timedelta(seconds=i))
            tx.put("texts", (i,), n=i, name=None if i % 2 else f"name {i}")
    with db.snapshot() as snap:
        mixed = {row["id"]: row for row in snap.scan("mixed")}
        texts = {row["id"]: row for row in snap.scan("texts")}
    assert mixed[4]["fee"] == Decimal(1) and mixed[4]["seen"] == moment + dt.timedelta(seconds=4)
    assert mixed[3]["fee"] is None and mixed[0]["n"] == 0
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for n in range(60):
            i = (seed * 7 + n) % 44
            key = (i, i * 1_000_000)
            with db.snapshot() as snap:
                found = [
                    (db.get("mixed", key), mixed.get(i)),
                    (db.get("texts", (i,)), texts.get(i)),
                    (snap.get("mixed", key), mixed.get(i)),
                    (db.get("mixed", key, ["n"]), mixed.get(i) and {"n": mixed[i]["n"]}),
                    (db.get("mixed", key, ["seen", "id"]), mixed.get(i) and {k: mixed[i][k] for k in ("seen", "id")}),
                    (db.get_many("texts", [(i,), (99,)]), [texts.get(i), None]),
                ]
            wrong.extend(pair for pair in found if pair[0] != pair[1])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
