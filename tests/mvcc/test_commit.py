"""R18: the order of a commit's steps, seen from outside; and what each step leaves behind when it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kivi
from kivi.embedded.database import Database
from kivi.engine.memory import MemoryEngine
from kivi.errors import CommitUnknown, Conflict, InvalidArgument, KiviError
from kivi.log.memory import MemoryLog
from kivi.mvcc.groups import Outcome
from kivi.runtime.settings import Settings
from kivi.store.commits import Commits
from kivi.store.facade import Store


class Held:
    """A store whose log holds records back until it is told to write them."""

    def __init__(self) -> None:
        self.engine, self.log = MemoryEngine(), MemoryLog()
        chosen = Settings.of({"background": False, "commit_timeout_s": 0.2})
        self.store = Store.open(None, settings=chosen, engine=self.engine, log=self.log)
        self.db = Database(self.store)
        self.db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "v": "int64"})
        self.db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
        self.log.hold = True

    def submit(self, **values: Any) -> list[Outcome]:
        tx = self.db.transaction()
        tx.delta("t", (1,), **values)
        outcomes: list[Outcome] = []
        assert tx._txn is not None
        self.store.commit(tx._txn, done=outcomes.append)
        return outcomes

    def seen(self) -> Any:
        with self.db.snapshot() as snap:
            return snap.get("t", (1,))


@pytest.fixture(name="held")
def _held() -> Iterator[Held]:
    held = Held()
    yield held
    held.log.hold = False
    held.log.release()
    held.store.close()


def test_r18_nothing_is_seen_or_acknowledged_before_the_sync(held: Held) -> None:
    before = held.db.watermark()
    outcomes = [held.submit(n=1) for _ in range(3)]
    assert held.log.last == before + 3, "the timestamps are taken on entering the queue"
    assert (held.db.watermark(), held.seen()) == (before, None)
    assert held.store.consolidate() == before
    held.log.release(1)
    assert held.db.watermark() == before + 1
    assert held.seen()["n"] == 1
    assert [len(done) for done in outcomes] == [1, 0, 0]
    held.log.release()
    assert [done[0].commit_ts for done in outcomes] == [before + 1, before + 2, before + 3]
    assert held.seen()["n"] == 3


def test_r18_the_verdict_counts_what_is_not_durable_yet(held: Held) -> None:
    """First is who enters the log first."""
    one, two = held.db.transaction(), held.db.transaction()
    one.put("t", (1,), v=1)
    two.put("t", (1,), v=2)
    done: list[Outcome] = []
    assert one._txn is not None
    held.store.commit(one._txn, done=done.append)
    with pytest.raises(Conflict) as caught:
        two.commit()
    assert caught.value.commit_ts is None
    assert done == []
    held.log.release()
    assert done[0].commit_ts is not None


def test_r18_an_acknowledged_commit_is_visible_to_the_callback_itself(held: Held) -> None:
    """R17: done() runs when W >= CTS, so whoever it wakes may read what it wrote."""
    seen: list[Any] = []
    tx = held.db.transaction()
    tx.delta("t", (1,), n=7)
    assert tx._txn is not None
    held.store.commit(tx._txn, done=lambda outcome: seen.append((outcome.commit_ts, held.db.watermark(), held.seen())))
    held.log.release()
    ((commit_ts, watermark, row),) = seen
    assert watermark >= commit_ts
    assert row["n"] == 7


def test_r18_an_abort_before_the_record_releases_everything(held: Held) -> None:
    before = held.log.last
    winner = held.db.transaction()
    loser = held.db.transaction()
    winner.put("t", (1,), v=1)
    loser.put("t", (1,), v=2)
    held.log.hold = False
    held.log.release()
    winner.commit()
    with pytest.raises(Conflict):
        loser.commit()
    with pytest.raises(InvalidArgument, match="over"):
        loser.commit()
    assert held.log.last == before + 1
    assert held.store.stats()["in_flight"] == 0
    assert len(held.store.leases) == 0, "the lease ends with the commit, whatever came of it"


def test_r12_who_stops_waiting_has_an_unknown_outcome_and_the_commit_goes_on(held: Held) -> None:
    tx = held.db.transaction(token="slow")
    tx.delta("t", (1,), n=1)
    with pytest.raises(CommitUnknown) as caught:
        tx.commit()
    assert caught.value.token == "slow"
    assert held.seen() is None
    held.log.release()
    assert held.seen()["n"] == 1
    assert isinstance(held.db.outcome("slow"), int)


def test_a_commit_is_derived_again_when_an_aggregate_appears_meanwhile(held: Held, monkeypatch: Any) -> None:
    """R18: what was derived with an older catalog never enters; the writer does not notice."""
    held.log.hold = False
    held.log.release()
    real = held.store.commits._prepare

    def prepare(*args: Any) -> Any:
        prepared = real(*args)
        measures = {"n": kivi.count(), "x": kivi.sum("x")}
        held.db.create_aggregate("agg", source="e", group_by=[kivi.time_slot("ts", "1h")], measures=measures)
        return prepared

    tx = held.db.transaction()
    tx.append("e", [{"ts": 0, "x": 5}, {"ts": 1, "x": 6}])
    calls = iter([prepare])
    monkeypatch.setattr(Commits, "_prepare", lambda self, *args: (next(calls, None) or real)(*args))
    tx.commit()
    assert held.store.stats()["rederived"] == 1
    with held.db.snapshot() as snap:
        (row,) = list(snap.scan("agg"))
        assert (row["n"], row["x"]) == (2, 11)


def test_r13_commits_from_many_threads_have_distinct_growing_timestamps() -> None:
    with Database(Store.open(None, settings=Settings(background=False))) as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        stamps: list[list[int]] = [[] for _ in range(8)]
        failures: list[KiviError] = []

        def work(mine: list[int]) -> None:
            try:
                for _ in range(40):
                    with db.transaction() as tx:
                        tx.delta("t", (1,), n=1)
                        assert tx.start_ts >= max(mine, default=0), "R17"
                    mine.append(tx.commit_ts or 0)
            except KiviError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(mine,)) for mine in stamps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, "R3: deltas never conflict"
        assert all(mine == sorted(mine) for mine in stamps)
        assert len({stamp for mine in stamps for stamp in mine}) == 320
        with db.snapshot() as snap:
            assert snap.get("t", (1,)) == {"id": 1, "n": 320}
