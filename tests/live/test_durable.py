"""Durable subscriptions: remembered by the store, each event delivered, seen ones left out, expired ones gone."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kivi
import kivi.aio
from kivi.embedded.database import Database
from kivi.errors import InvalidArgument, NotFound, PermissionDenied, ResourceExhausted, StoreInUse
from kivi.live import durable
from kivi.runtime.settings import Settings
from kivi.store.catalog import SUBSCRIPTIONS
from kivi.store.facade import Scan, Store
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

T0 = 1_750_000_000_000_000
COLUMNS = {"seq": "int64", "service": "string", "ts": "timestamp", "us": "int64"}


class Clock:
    def __init__(self) -> None:
        self.now = 1_760_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def db(clock: Clock) -> Iterator[Any]:
    with Database(Store.open(clock=clock)) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        yield db


def add(db: Any, first: int, count: int, rng: random.Random | None = None) -> list[dict[str, Any]]:
    rng = rng or random.Random(first)
    events = [
        {"seq": first + i, "service": rng.choice("xyz"), "ts": T0 + first + i, "us": rng.randrange(1_000)}
        for i in range(count)
    ]
    db.append("calls", events)
    return events


def numbers(update: Any) -> list[int]:
    return [change.row["seq"] for change in update.changes]


def drain(live: Any, least: int, quiet_s: float = 0.3) -> list[int]:
    """What comes: ``least`` of it however long it takes, and then until nothing does for so long."""
    found: list[int] = []
    while (update := live.next(quiet_s if len(found) >= least else 60.0)) is not None:
        found += numbers(update)
    return found


def test_it_goes_on_behind_what_was_delivered(tmp_path: Path) -> None:
    """By the end of a with block, by asking for more, by acknowledging; not by what failed on the way."""
    with kivi.open(tmp_path / "store") as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        add(db, 0, 5)
        with db.subscribe("calls", name="one", interval_ms=0) as live:
            assert drain(live, 5) == [0, 1, 2, 3, 4]
        add(db, 5, 5)
        with pytest.raises(ZeroDivisionError), db.subscribe("calls", name="one", interval_ms=0) as live:
            assert numbers(live.next(60.0)) == [5, 6, 7, 8, 9]
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), db.subscribe("calls", name="one", interval_ms=0) as live:
            assert numbers(live.next(60.0)) == [5, 6, 7, 8, 9]
            live.acknowledge()
            raise ZeroDivisionError
        (known,) = db.subscriptions()
        assert (known["name"], known["table"], known["ts"]) == ("one", "calls", db.watermark() - 1)  # its own row's
    with kivi.open(tmp_path / "store") as db:
        add(db, 10, 1)
        with db.subscribe("calls", name="one", interval_ms=0) as live:
            assert drain(live, 1) == [10]
        db.unsubscribe("one")
        assert db.subscriptions() == []
        with db.subscribe("calls", name="one", interval_ms=0) as live:
            assert drain(live, 11) == list(range(11))


def test_nobody_connected_is_a_row_and_nothing_else(db: Any) -> None:
    for i in range(200):
        db.subscribe("calls", name=f"s{i:03}", user="u", where=kivi.col("us") >= i).close()
    wait_until(lambda: not db.hub.count and not db.store.pending.feed.on)
    assert not db.hub._connections
    assert len(db.subscriptions("u")) == 200
    assert db.subscriptions() == []
    events = add(db, 0, 1_000)
    for i in (0, 77, 199):
        with db.subscribe("calls", name=f"s{i:03}", user="u", where=kivi.col("us") >= i, interval_ms=0) as live:
            wanted = [event["seq"] for event in events if event["us"] >= i]
            assert drain(live, len(wanted)) == wanted


def test_one_query_and_one_connection_by_name(db: Any) -> None:
    add(db, 0, 3)
    first = db.subscribe("calls", name="one", where=kivi.col("us") >= 0, interval_ms=0)
    assert drain(first, 3) == [0, 1, 2]
    first.acknowledge()
    with pytest.raises(InvalidArgument, match=r"another query.*unsubscribe\('one'\)"):
        db.subscribe("calls", name="one", where=kivi.col("us") > 5)
    second = db.subscribe("calls", name="one", where=kivi.col("us") >= 0, interval_ms=0)
    with pytest.raises(StoreInUse, match="taken over"):
        first.next(30.0)
    add(db, 3, 1)
    assert drain(second, 1) == [3]
    second.close()


def test_those_that_come_together_are_one_commit_and_each_has_its_own_answer() -> None:
    """One that is refused takes no other with it, neither for what is stored of its name nor for its size."""
    with Database(Store.open(settings=Settings(max_value_bytes=2_000))) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.subscribe("calls", name="there", where=kivi.col("us") >= 1).close()
        gate, durables = db.store.committer.entry_lock, db.hub.durable
        few = [(f"s{i}", kivi.col("us") == i) for i in range(6)]
        with ThreadPoolExecutor(16) as threads:

            def opened(name: str, where: Any) -> Future[Any]:
                known = len(durables._opening)
                live = threads.submit(db.subscribe, "calls", name=name, where=where)
                wait_until(lambda: len(durables._opening) > known)
                return live

            def commits(wanted: list[tuple[str, Any]], refused: dict[str, str]) -> int:
                """How many they are for those that come while another is on its way."""
                with gate:
                    first = opened("first", None)
                    wait_until(durables._committing.locked)
                    lives = [(name, opened(name, where)) for name, where in wanted]
                    before = db.watermark()
                first.result().close()
                for name, live in lives:
                    if name in refused:
                        with pytest.raises((InvalidArgument, ResourceExhausted), match=refused[name]):
                            live.result()
                    else:
                        live.result().close()
                return db.watermark() - before - 1

            other = ("there", kivi.col("us") >= 2)
            assert commits([*few, other], {"there": "to another query"}) == 1
            assert commits([*few, few[0]], {}) == 2  # of one name one after the other
            large = ("large", kivi.col("service") == "x" * 3_000)
            refused = {"there": "to another query", "large": "over the limit of 2000"}
            commits([other, large, ("last", kivi.col("us") > 7)], refused)
        assert {known["name"] for known in db.subscriptions()} == {"first", "last", "there", *dict(few)}
        ts = db.append("calls", [{"seq": 0, "service": "x", "ts": T0, "us": 5}])
        assert db.reached("calls", ts) == [3]  # there, first, and s5


def test_whatever_goes_wrong_with_one_is_nothing_to_the_others_of_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody has foreseen."""
    answer = durable._stored

    def failing(user: str, name: str, row: dict[str, Any]) -> Any:
        return 1 / 0 if name == "bad" else answer(user, name, row)

    monkeypatch.setattr(durable, "_stored", failing)
    with Database(Store.open()) as db, ThreadPoolExecutor(16) as threads:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        durables = db.hub.durable
        with db.store.committer.entry_lock:
            first = threads.submit(db.subscribe, "calls", name="first")
            wait_until(durables._committing.locked)
            names = ["a", "b", "c", "bad", "d", "e", "f"]
            lives = {name: threads.submit(db.subscribe, "calls", name=name) for name in names}
            wait_until(lambda: len(durables._opening) == 1 + len(names))
            before = db.watermark()
        first.result().close()
        with pytest.raises(ZeroDivisionError):
            lives.pop("bad").result()
        for live in lives.values():
            live.result().close()
        assert db.watermark() - before <= 1 + 3  # halves of seven
        assert not durables._opening


def test_one_whose_thread_is_interrupted_while_it_commits_is_in_nobodys_way() -> None:
    with Database(Store.open()) as db, ThreadPoolExecutor(4) as threads:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        durables, held, others = db.hub.durable, threading.Event(), list[Future[Any]]()
        main = threading.get_ident()

        def interrupt() -> None:
            with db.store.committer.entry_lock:
                held.set()
                wait_until(durables._committing.locked)
                others.extend(threads.submit(db.subscribe, "calls", name=name) for name in ("mine", "other"))
                wait_until(lambda: len(durables._opening) == 3)
                signal.pthread_kill(main, signal.SIGINT)
                wait_until(lambda: len(durables._opening) == 2)

        interrupting = threads.submit(interrupt)
        held.wait()
        with pytest.raises(KeyboardInterrupt):
            db.subscribe("calls", name="mine")
        interrupting.result()
        for other in others:
            other.result(60).close()
        assert {known["name"] for known in db.subscriptions()} == {"mine", "other"}


def test_what_others_of_the_user_saw_is_left_out(db: Any) -> None:
    """One after the other: slow calls were seen, then all of a service; another user sees all."""
    events = add(db, 0, 300)
    slow, service = kivi.col("us") >= 700, kivi.col("service") == "x"

    def gets(live: Any, wanted: list[dict[str, Any]]) -> bool:
        return drain(live, len(wanted)) == [e["seq"] for e in wanted]

    with db.subscribe("calls", name="slow", user="ada", where=slow, unseen=True, columns=["seq"], interval_ms=0) as one:
        assert gets(one, [e for e in events if e["us"] >= 700])
    with db.subscribe("calls", name="x", user="ada", where=service, unseen=True, columns=["seq"], interval_ms=0) as two:
        assert gets(two, [e for e in events if e["service"] == "x" and e["us"] < 700])
        late = add(db, 300, 100)  # nobody has seen these
        assert gets(two, [e for e in late if e["service"] == "x"])
    with db.subscribe("calls", name="slow", user="ada", where=slow, unseen=True, columns=["seq"], interval_ms=0) as one:
        assert gets(one, [e for e in late if e["us"] >= 700 and e["service"] != "x"])
    with db.subscribe("calls", name="x", user="bob", where=service, unseen=True, interval_ms=0) as other:
        assert gets(other, [e for e in (*events, *late) if e["service"] == "x"])


def test_of_many_users_only_those_of_late_are_remembered(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is forgotten is read again: whoever asks gets the others as they are."""
    monkeypatch.setattr(durable, "_USERS_KNOWN", 3)
    known, schema, rng = db.hub.durable, db.store.table("calls"), random.Random(1)
    names: dict[str, set[str]] = {f"u{i}": set() for i in range(8)}
    for step in range(120):
        user = rng.choice(list(names))
        if names[user] and rng.random() < 0.4:
            db.unsubscribe(gone := rng.choice(sorted(names[user])), user=user)
            names[user].discard(gone)
        else:
            with db.subscribe("calls", name=f"s{step}", user=user):
                names[user].add(f"s{step}")
        for asks in rng.sample(sorted(names), 3):
            assert {other.name for other, _ in known.others(asks, "", schema)} == names[asks]
        assert len(known._known_of) <= 3


def test_of_two_that_are_connected_one_gets_it(db: Any) -> None:
    """Both read while events come, at their own pace: of what both select each gets a part, and nothing is missing."""
    queries = {"slow": kivi.col("us") >= 500, "x": kivi.col("service") == "x"}
    got: dict[str, list[int]] = {name: [] for name in queries}
    done = threading.Event()
    last: list[int] = []

    def follow(name: str) -> None:
        rng = random.Random(name)
        wanted = {"where": queries[name], "unseen": True, "interval_ms": 0, "heartbeat_ms": 50}
        with db.subscribe("calls", name=name, user="u", **wanted) as live:
            while not done.is_set() or live.ts < last[0]:
                update = live.next(0.1)
                if update is not None:
                    got[name] += [change.row["seq"] for change in update.changes]
                    time.sleep(rng.random() / 50)

    threads = [threading.Thread(target=follow, args=(name,)) for name in queries]
    for thread in threads:
        thread.start()
    rng, events = random.Random(1), []
    for i in range(60):
        events += add(db, 10 * i, 10, rng)
        time.sleep(0.005)
    last.append(db.watermark())
    done.set()
    for thread in threads:
        thread.join()
    wanted = {e["seq"] for e in events if e["us"] >= 500 or e["service"] == "x"}
    assert Counter(got["slow"] + got["x"]) == Counter(wanted)
    assert set(got["slow"]) <= {e["seq"] for e in events if e["us"] >= 500}
    assert set(got["x"]) <= {e["seq"] for e in events if e["service"] == "x"}


def test_one_that_is_not_heard_of_expires(db: Any, clock: Clock) -> None:
    add(db, 0, 3)
    with db.subscribe("calls", name="short", expires_in="1h", interval_ms=0) as live:
        assert drain(live, 3) == [0, 1, 2]
    clock.now += 3_000
    with db.subscribe("calls", name="short", expires_in="1h", interval_ms=0) as live:  # heard of: another hour
        assert drain(live, 0) == []
    clock.now += 3_000
    assert [known["name"] for known in db.subscriptions()] == ["short"]
    clock.now += 700
    assert db.subscriptions() == []
    with pytest.raises(NotFound, match="expired"):
        db.unsubscribe("short")
    with db.subscribe("calls", name="other", interval_ms=0):  # whose coming deletes what has expired
        pass
    lease = db.store.begin()
    kept = [row["name"] for batch in db.store.scan(lease, SUBSCRIPTIONS, Scan()) for row in batch.to_pylist()]
    db.store.release(lease)
    assert kept == ["other"]
    with db.subscribe("calls", name="short", where=kivi.col("us") >= 0, interval_ms=0) as live:  # as good as new
        assert drain(live, 3) == [0, 1, 2]


@pytest.mark.story
def test_one_that_waits_does_not_expire(tmp_path: Path) -> None:
    """Its subscriber is there, and nothing comes for longer than it would be kept."""
    with kivi.open(tmp_path / "store") as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        # However seldom it wants to hear that all is well: it is heard of before it expires.
        with db.subscribe("calls", name="waits", expires_in="3s", interval_ms=0, heartbeat_ms=60_000) as live:
            assert live.next(6.5) is None
            assert [known["name"] for known in db.subscriptions()] == ["waits"]
        time.sleep(3.1)
        assert db.subscriptions() == []


def test_bad_arguments(db: Any) -> None:
    with pytest.raises(InvalidArgument, match="have a name"):
        db.subscribe("calls", user="ada")
    with pytest.raises(InvalidArgument, match="1 to 256 bytes"):
        db.subscribe("calls", name="")
    with pytest.raises(InvalidArgument, match="are to events"):
        db.subscribe("calls", name="x", limit=3)
    with pytest.raises(InvalidArgument, match="duration"):
        db.subscribe("calls", name="x", expires_in="soon")
    with db.subscribe("calls") as live, pytest.raises(InvalidArgument, match="have a name"):
        live.acknowledge()


def test_over_grpc_with_servers_and_clients_that_die(tmp_path: Path) -> None:
    """A program is killed again and again, and so is the server: every event is worked on, in order."""
    with ServerProcess(tmp_path / "store") as server:
        with server.connect(timeout=30.0) as db:
            db.create_event_table("calls", event_time="ts", columns=COLUMNS)
            worked: list[int] = []
            for i in range(6):
                add(db, 100 * i, 100)
                with server.connect(timeout=30.0) as client:
                    live = client.subscribe("calls", name="worker", user="ops", interval_ms=0)
                    found: list[int] = []
                    while len(found) < 100 or found[-1] != 100 * i + 99:
                        update = live.next(60.0)
                        if update is not None:
                            found += [change.row["seq"] for change in update.changes]
                    worked += found
                    if i % 2:
                        live.acknowledge()
                    if i == 3:
                        server.kill()
                        server.start()
                    live.close()  # without a word, as if it had been killed
            assert sorted(set(worked)) == list(range(600))
            assert len(worked) == 900  # what was not acknowledged came again, whole
            (known,) = db.subscriptions("ops")
            assert known["name"] == "worker"

        async def rest() -> list[int]:
            async with await kivi.aio.connect(server.endpoint) as client:
                found: list[int] = []
                async with client.subscribe("calls", name="worker", user="ops", interval_ms=0) as live:
                    while (update := await live.next(0.5)) is not None:
                        found += [change.row["seq"] for change in update.changes if change.row is not None]
                assert [known["name"] for known in await client.subscriptions("ops")] == ["worker"]
                await client.unsubscribe("worker", "ops")
                assert await client.subscriptions("ops") == []
                return found

        assert asyncio.run(rest()) == []


def test_tokens_of_some_tables(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root-token-0123456789 admin\nreader-token-0123456789 reader tables=calls*\n")
    tokens.chmod(0o600)
    with (
        ServerProcess(tmp_path / "store", "--token-file", str(tokens)) as server,
        server.connect(access_token="root-token-0123456789") as root,
        server.connect(access_token="reader-token-0123456789") as reader,
    ):
        for table in ("calls", "secrets"):
            root.create_event_table(table, event_time="ts", columns=COLUMNS)
            root.subscribe(table, name=table, user="u").close()
        assert [known["name"] for known in reader.subscriptions("u")] == ["calls"]
        with pytest.raises(PermissionDenied):
            reader.unsubscribe("secrets", "u")
        with pytest.raises(PermissionDenied):
            reader.subscribe("secrets", name="secrets", user="u")
        with reader.subscribe("calls", name="calls", user="u") as live:
            add(root, 0, 2)
            assert drain(live, 2, 1.0) == [0, 1]
        reader.unsubscribe("calls", "u")
        assert [known["name"] for known in root.subscriptions("u")] == ["secrets"]
