"""Gets that are answered in columns: the same rows as one by one, and whatever does not fit comes by itself."""

from __future__ import annotations

import datetime as dt
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from kivi_server import limits
from kivi_server.sessions import Sessions

import kivi
from kivi.client.calls import answers
from kivi.wire.v1 import session_pb2
from tests.server.peers import Peer, run
from tests.serverproc import ServerProcess
from tests.waiting import until


def gets(peer: Peer, *rows: int, each: bool = True, columns: tuple[str, ...] = ()) -> list[session_pb2.Request]:
    """Of the table of counters, without a transaction."""
    found = []
    for row in rows:
        request = peer.read()
        request.ClearField("first")
        request.txn = 0
        request.get.packed, request.get.each = True, each
        request.get.columns.extend(columns)
        request.get.keys[0].values[0].int_value = row
        found.append(request)
    return found


def test_rows_of_integers_come_in_columns_and_what_is_not_there_by_itself(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        peer.by_the_worker(*[peer.commit(hits=row * 10, row=row) for row in (1, 2, 3)])
        await _answered(peer, 3)
        peer.answers.clear()
        peer.by_the_worker(*gets(peer, 1, 2, 9, 3))
        await _answered(peer, 2)
        (columns,) = [answer for answer in peer.answers if answer.HasField("get_each")]
        (missing,) = [answer for answer in peer.answers if answer.id]
        assert [*columns.get_each.ids] == [4, 5, 7] and [*columns.get_each.integers] == [1, 10, 2, 20, 3, 30]
        assert columns.start_ts == missing.start_ts == sessions.store.watermark() and not columns.get_each.start_ts
        assert missing.id == 6 and not missing.get.rows[0].found
        ts = columns.start_ts
        frame = session_pb2.ServerFrame(responses=peer.answers)
        assert dict(answers(frame)) == {4: (ts, [1, 10]), 5: (ts, [2, 20]), 7: (ts, [3, 30]), 6: missing}

    run(story, tmp_path)


def test_each_is_told_its_own_snapshot(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        begun: list[session_pb2.Request] = []
        for row in (1, 2):
            peer.by_the_worker(peer.commit(hits=5, row=row))
            await _answered(peer, len(begun) + 1)
            begun.append(peer.read())
            peer.by_the_worker(begun[-1])
            peer.answers.pop()
        for request in begun:
            request.id += 100
            request.ClearField("first")
            request.get.packed = request.get.each = True
        peer.answers.clear()
        peer.by_the_worker(*begun)
        await _answered(peer, 1)
        (answer,) = peer.answers
        assert len(set(answer.get_each.start_ts)) == 2
        found = dict(answers(session_pb2.ServerFrame(responses=[answer])))
        assert [ts for ts, _ in found.values()] == [*answer.get_each.start_ts]  # type: ignore[misc]

    run(story, tmp_path)


def test_columns_of_very_many_integers_are_several_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 256 rows of 32,000 columns fit into no message; each is counted with all that it answers."""
    monkeypatch.setattr("kivi_server.reading._INTEGERS_MAX", 9)

    async def story(sessions: Sessions) -> None:
        for most in (limits.MESSAGE_BYTES_MAX, 40):  # all in one message, and each in its own
            monkeypatch.setattr(limits, "MESSAGE_BYTES_MAX", most)
            peer = Peer(sessions)
            peer.by_the_worker(*gets(peer, *[0] * 18))
            assert len(peer.answers) == 4 and peer.counted == peer.session._asked == 18
            found = dict(answers(session_pb2.ServerFrame(responses=peer.answers)))
            assert [*found] == [*range(1, 19)] and all(got == [0, 1] for _, got in found.values())  # type: ignore[misc]

    run(story, tmp_path)


def test_who_does_not_ask_for_columns_gets_each_answer(tmp_path: Path) -> None:
    async def story(sessions: Sessions) -> None:
        peer = Peer(sessions)
        peer.by_the_worker(peer.commit(hits=7))
        await _answered(peer, 1)
        peer.answers.clear()
        (old,), (new,) = gets(peer, 1, each=False), gets(peer, 1, columns=("hits",))
        both = gets(peer, 1)[0]
        both.get.keys.add().values.add(int_value=2)
        peer.by_the_worker(old, new, both)
        await _answered(peer, 3)
        assert {answer.WhichOneof("body") for answer in peer.answers if answer.id} == {"get"}
        (columns,) = [answer.get_each for answer in peer.answers if answer.HasField("get_each")]
        assert [*columns.ids] == [new.id] and [*columns.integers] == [7]

    run(story, tmp_path)


async def _answered(peer: Peer, count: int) -> None:
    await until(lambda: len(peer.answers) == count)


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
