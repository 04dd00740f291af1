"""Secondary views: at every snapshot a view holds its source's rows under another key.

``check`` is the invariant by brute force: of every view and every snapshot that is asked for, the source's rows are
scanned there, put under the view's key, and compared with the view's. What the source itself holds is held to a replay
by the tests of transactions.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kivi
from kivi.errors import AlreadyExists, Conflict, InvalidArgument, KiviError, NotFound, RowExists, SchemaError
from kivi.store import view_filling
from tests.golden.driver import EmbeddedDriver
from tests.mvcc.holding import hold

COLUMNS = {
    "name": "string",
    "city": "string",
    "n": "int64",
    "sum": kivi.sum("int64"),
    "total": kivi.sum("float64"),
    "most": kivi.max("int64"),
}
VIEWS: dict[str, dict[str, Any]] = {
    "by_name": {"key": ["name", "a", "b"]},
    "by_city": {"key": ["city", "b", "name", "a"], "columns": ["sum"]},
    "turned": {"key": ["b", "a"], "columns": ["n", "most"]},
    "keys": {"key": ["name", "b", "a"], "columns": []},
    "one_n": {"key": ["n"], "columns": ["sum", "name"], "unique": True},
    "one_name_b": {"key": ["name", "b"], "unique": True},
}


@pytest.fixture(name="driver", params=["memory", "disk"])
def _driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    driver = EmbeddedDriver(str(tmp_path / "store") if request.param == "disk" else None, consolidate_rows=4)
    driver.db.create_table("t", key={"a": "int64", "b": "string"}, columns=COLUMNS, history="1000d")
    yield driver
    driver.close()


def declare(db: Any, *names: str) -> None:
    for name in names:
        db.create_view(name, source="t", **VIEWS[name])


def check(reader: Any, *names: str) -> int:
    """The invariant, at one snapshot; how many rows there were."""
    rows = list(reader.scan("t"))
    for name in names:
        declared = VIEWS[name]
        key = declared["key"]
        columns = declared.get("columns", list(COLUMNS))
        carried = [c for c in ("a", "b") if c not in key] + [c for c in COLUMNS if c in columns and c not in key]
        wanted = [{c: row[c] for c in (*key, *carried)} for row in rows if all(row[c] is not None for c in key)]
        wanted.sort(key=lambda row, key=key: [row[c] for c in key])  # type: ignore[misc]
        assert list(reader.scan(name)) == wanted, name
        if declared.get("unique"):
            keys = [tuple(row[c] for c in key) for row in wanted]
            assert len(set(keys)) == len(keys), name
    return len(rows)


def write(rng: random.Random, tx: Any) -> None:
    """One random write."""
    key = (rng.randrange(4), rng.choice("xy"))
    values = {"name": rng.choice(["p", "q", None]), "city": rng.choice(["r", "s", None]), "n": rng.choice([1, 2, None])}
    some = {c: v for c, v in values.items() if rng.random() < 0.4}
    match rng.randrange(8):
        case 0 | 1:
            tx.put("t", key, **some)
        case 2:
            tx.put("t", key, **values, sum=rng.randrange(9))
        case 3 | 4:
            tx.delta("t", key, sum=rng.randrange(9), most=rng.randrange(9))
        case 5:
            tx.delta("t", key, total=rng.random())
        case 6:
            tx.delete("t", key)
        case 7:
            if tx.get("t", key) is None:
                tx.insert("t", key, **values)


def step(rng: random.Random, driver: EmbeddedDriver, snapshots: list[int], names: tuple[str, ...]) -> None:
    """Two transactions beside each other, of which one may have read nothing; or something that changes no answer."""
    db: Any = driver.db
    match rng.randrange(10):
        case 0:
            db.consolidate()
        case 1:
            driver.crash()
        case 2:
            driver.reopen()
        case 3 if rng.random() < 0.2:
            with db.transaction() as tx:
                tx.overwrite("t")
                tx.put("t", (1, "x"), name="p", n=1)
                check(tx, *names)
            snapshots.clear()  # what is overwritten has no history
        case _:
            open_ = [db.transaction() for _ in range(2)]
            blind = driver.store.blind_transaction()
            for tx in open_:
                tx._begin()
                for _ in range(rng.randrange(1, 4)):
                    write(rng, tx)
                if rng.random() < 0.5:
                    check(tx, *(name for name in names if not VIEWS[name].get("unique")))
            schema = driver.store.table("t")
            blind.put(schema, (rng.randrange(4), "x"), {"name": rng.choice("pq"), "sum": 5})
            blind.delta(schema, (rng.randrange(4), "y"), {"sum": 7})
            for commit in rng.sample([open_[0].commit, open_[1].commit, lambda: driver.store.commit_wait(blind)], 3):
                try:
                    snapshots.append(commit())
                except (Conflict, RowExists):
                    snapshots.append(db.watermark())


@given(st.integers(0, 2**32), st.booleans())
@settings(suppress_health_check=list(HealthCheck))
def test_views_are_their_source_at_every_snapshot(seed: int, unique: bool) -> None:
    rng = random.Random(seed)
    driver = EmbeddedDriver(None, consolidate_rows=4)
    driver.db.create_table("t", key={"a": "int64", "b": "string"}, columns=COLUMNS, history="1000d")
    several = [name for name in VIEWS if unique or not VIEWS[name].get("unique")]
    names = tuple(rng.sample(several, rng.randrange(1, 4)))
    snapshots: list[int] = []
    for _ in range(6):
        step(rng, driver, snapshots, ())
    made = []
    for name in names:
        try:
            declare(driver.db, name)
        except RowExists:
            assert VIEWS[name].get("unique")
            assert name not in driver.db.tables()
        else:
            made.append(name)
    names, snapshots = tuple(made), []
    for _ in range(20):
        step(rng, driver, snapshots, names)
        with driver.db.snapshot() as newest:
            check(newest, *names)
    since = max((driver.db.describe(name)["created_ts"] for name in names), default=0)
    for ts in [ts for ts in snapshots if ts >= since]:
        with driver.db.snapshot(as_of=ts) as snapshot:
            check(snapshot, *names)
    driver.close()


def test_a_view_is_filled_while_its_source_is_written(driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads write all the time, one of them always the same row; every view is exact from when it is readable."""
    monkeypatch.setattr(view_filling, "_ROWS", 16)
    db = driver.db
    with db.transaction() as tx:
        for i in range(200):
            tx.put("t", (i, "z"), name=f"n{i % 7}", n=1_000 + i, sum=i)
    stopped = threading.Event()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while not stopped.is_set():
            try:
                with db.transaction() as tx:
                    if seed:
                        key = (rng.randrange(200), "z")
                        tx.put("t", key, name=rng.choice(["n0", "moved", None]))
                        tx.delta("t", (rng.randrange(200), "z"), sum=1)
                    else:
                        tx.delta("t", (100, "z"), sum=1, total=0.1)
                        tx.put("t", (50, "z"), city=rng.choice("ab"))
            except Conflict:
                pass
            except BaseException as error:
                failed.append(error)
                raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        declare(db, "by_name", "turned", "one_n")
        for _ in range(3):
            with db.snapshot() as snapshot:
                assert check(snapshot, "by_name", "turned", "one_n") >= 200
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert not failed
    driver.crash()
    with driver.db.snapshot() as snapshot:
        check(snapshot, "by_name", "turned", "one_n")


def test_a_crash_while_a_view_is_filled_leaves_one_that_is_filled_at_opening(
    driver: EmbeddedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_filling, "_ROWS", 8)
    with driver.db.transaction() as tx:
        for i in range(40):
            tx.put("t", (i, "z"), name=f"n{i % 3}")
    seen = 0
    some = view_filling.ViewFilling._fill_some

    def stops(self: Any, *arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise KeyboardInterrupt
        return some(self, *arguments)

    monkeypatch.setattr(view_filling.ViewFilling, "_fill_some", stops)
    with pytest.raises(KeyboardInterrupt):
        declare(driver.db, "by_name")
    assert driver.db.describe("by_name")["state"] == "building"
    with pytest.raises(NotFound, match="still being built from existing rows"), driver.db.snapshot() as snapshot:
        snapshot.get("by_name", ("n1", 1, "z"))
    with driver.db.transaction() as tx:  # one that is in the view, one that is not
        tx.delta("t", (1, "z"), sum=1)
        tx.delta("t", (39, "z"), sum=1)
        tx.delete("t", (38, "z"))
    driver.crash()
    resumed = driver.store._resumed
    assert resumed is not None
    resumed.join()
    with driver.db.snapshot() as snapshot:
        assert check(snapshot, "by_name") == 39


def test_commits_that_read_nothing_are_derived_again_and_the_last_put_stays(driver: EmbeddedDriver) -> None:
    declare(driver.db, "by_name")
    schema = driver.store.table("t")
    with driver.db.transaction() as tx:
        tx.put("t", (1, "x"), name="p", sum=1)
    commits = []
    for name in "qrs":
        txn = driver.store.blind_transaction()
        txn.put(schema, (1, "x"), {"name": name})
        commits.append(txn)
    outcomes: list[Any] = []
    from kivi.store.facade import Commit

    left = driver.store.commit_together([Commit(txn, None, None, outcomes.append) for txn in commits])
    assert not left
    driver.store.commits.wait_for_entered(5.0)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.commit_ts for outcome in outcomes] == sorted(outcome.commit_ts for outcome in outcomes)
    with driver.db.snapshot() as snapshot:
        assert snapshot.get("t", (1, "x"), ["name"]) == {"name": "s"}
        check(snapshot, "by_name")


def test_what_conflicts(driver: EmbeddedDriver) -> None:
    """Deltas of what a view carries never conflict with each other, and do with a move of the row, in both orders."""
    db = driver.db
    declare(db, "by_name")
    with db.transaction() as tx:
        tx.put("t", (1, "x"), name="p", sum=1)

    def both(first: Any, second: Any) -> bool:
        a, b = db.transaction(), db.transaction()
        a._begin(), b._begin()
        first(a), second(b)
        a.commit()
        try:
            b.commit()
        except Conflict:
            return False
        with db.snapshot() as snapshot:
            check(snapshot, "by_name")
        return True

    def delta(tx: Any) -> None:
        tx.delta("t", (1, "x"), sum=1)

    def move(tx: Any) -> None:
        tx.put("t", (1, "x"), name="q")

    def city(tx: Any) -> None:
        tx.put("t", (1, "x"), city="c")

    assert both(delta, delta)
    assert both(delta, city)
    assert not both(delta, move)
    assert not both(move, delta)
    assert not both(city, move)
    assert not both(move, city)


def test_a_guard_on_a_row_of_a_view_conflicts_with_what_writes_it(driver: EmbeddedDriver) -> None:
    db = driver.db
    declare(db, "by_name")
    with db.transaction() as tx:
        tx.put("t", (1, "x"), name="p")
    guarding = db.transaction()
    guarding.guard("by_name", ("p", 1, "x"))
    guarding.put("t", (3, "x"), city="c")
    with db.transaction() as tx:
        tx.put("t", (1, "x"), name="q")
    with pytest.raises(Conflict, match="by_name"):
        guarding.commit()


def test_one_row_under_a_unique_key(driver: EmbeddedDriver) -> None:
    db = driver.db
    declare(db, "one_n")
    with db.transaction() as tx:
        tx.put("t", (1, "x"), n=1)
        tx.put("t", (2, "x"), n=2)
        tx.put("t", (3, "x"), n=None)
        tx.put("t", (4, "x"), name="p")
    for values in ({"n": 1}, {"n": 2, "name": "r"}):
        with pytest.raises(RowExists) as refused, db.transaction() as tx:
            tx.put("t", (4, "x"), **values)
        assert (refused.value.table, refused.value.key) == ("one_n", (values["n"],))
    with pytest.raises(RowExists, match="unique view"), db.transaction() as tx:
        tx.put("t", (5, "x"), n=7)
        tx.put("t", (6, "x"), n=7)
    with db.transaction() as tx:  # they change places
        tx.put("t", (1, "x"), n=2)
        tx.put("t", (2, "x"), n=1)
    two = [db.transaction(), db.transaction()]
    for i, tx in enumerate(two):
        tx.put("t", (10 + i, "x"), n=99)
        tx._begin()
    two[0].commit()
    with pytest.raises((Conflict, RowExists)):
        two[1].commit()
    with db.snapshot() as snapshot:
        check(snapshot, "one_n")
        assert snapshot.get("one_n", (2,)) == {"n": 2, "a": 1, "b": "x", "name": None, "sum": 0}


def test_a_token_is_answered_before_a_row_is_found_in_the_way(driver: EmbeddedDriver) -> None:
    """R16: what had committed is a repeat, whatever the rows are by now."""
    db = driver.db
    declare(db, "one_n")
    rows = [{"a": 1, "b": "x", "n": 1}]
    first = db.write("t", rows, token="again")
    with db.transaction() as tx:
        tx.put("t", (1, "x"), n=2)
        tx.put("t", (2, "x"), n=1)
    assert db.write("t", rows, token="again") == first
    with pytest.raises(RowExists):
        db.write("t", rows, token="another")


def test_a_unique_view_that_is_not_is_not_made(driver: EmbeddedDriver) -> None:
    with driver.db.transaction() as tx:
        tx.put("t", (1, "x"), n=1)
        tx.put("t", (2, "x"), n=1)
    with pytest.raises(RowExists) as refused:
        declare(driver.db, "one_n")
    assert (refused.value.table, refused.value.key) == ("one_n", (1,))
    assert driver.db.tables() == ["t"]
    with driver.db.transaction() as tx:
        tx.delete("t", (2, "x"))
    declare(driver.db, "one_n")


def test_altering_the_source_leaves_its_views_as_they_were_declared(driver: EmbeddedDriver) -> None:
    db = driver.db
    declare(db, "by_name")
    db.alter_table("t", {"late": "int64", "hits": kivi.sum("int64")})
    with db.transaction() as tx:
        tx.put("t", (1, "x"), name="p", late=3)
        tx.delta("t", (1, "x"), hits=2)
    db.create_view("by_late", source="t", key=["late", "a", "b"], columns=["hits"])
    with db.transaction() as tx:
        tx.delta("t", (1, "x"), hits=2)
    with db.snapshot() as snapshot:
        assert list(snapshot.scan("by_late")) == [{"late": 3, "a": 1, "b": "x", "hits": 4}]
        assert "late" not in next(snapshot.scan("by_name"))


def test_staged_rows_reach_views(driver: EmbeddedDriver) -> None:
    db = driver.db
    declare(db, "by_name", "one_n")
    rows = [{"a": i, "b": "x", "name": f"n{i % 2}", "n": i, "sum": 1} for i in range(10)]
    stage = db.stage("t", rows)
    with db.transaction() as tx:
        tx.append_stages("t", [stage])
    with db.snapshot() as snapshot:
        assert check(snapshot, "by_name", "one_n") == 10


def test_an_aborted_commit_leaves_no_row_in_a_view(driver: EmbeddedDriver) -> None:
    declare(driver.db, "by_name")
    tx = driver.db.transaction()
    tx.put("t", (1, "x"), name="p")
    cts, outcomes = hold(driver.store, tx)
    driver.store.committer.abort_held(cts)
    assert outcomes[0].error is not None
    with driver.db.snapshot() as snapshot:
        assert check(snapshot, "by_name") == 0
    driver.crash()
    with driver.db.snapshot() as snapshot:
        assert check(snapshot, "by_name") == 0


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        ({"key": ["name"]}, SchemaError),
        ({"key": ["sum", "a", "b"]}, SchemaError),
        ({"key": ["no", "a", "b"]}, SchemaError),
        ({"key": ["name", "name", "a", "b"]}, SchemaError),
        ({"key": "name"}, SchemaError),
        ({"key": []}, SchemaError),
        ({"key": ["name", "a", "b"], "columns": ["a"]}, SchemaError),
        ({"key": ["name", "a", "b"], "columns": "city"}, SchemaError),
        ({"key": ["name", "a", "b"], "unique": 1}, InvalidArgument),
        ({"key": ["name", "a", "b"], "source": "none"}, NotFound),
        ({"key": ["name", "a", "b"], "source": "by_name"}, SchemaError),
        ({"key": ["name", "a", "b"], "name": "t"}, AlreadyExists),
    ],
)
def test_views_that_are_refused(driver: EmbeddedDriver, declared: dict[str, Any], error: type[KiviError]) -> None:
    declare(driver.db, "by_name")
    with pytest.raises(error):
        driver.db.create_view(**{"name": "v", "source": "t", **declared})
    assert driver.db.tables() == ["by_name", "t"]


def test_a_view_is_written_by_its_source_alone_and_dropped_before_it(driver: EmbeddedDriver) -> None:
    db = driver.db
    declare(db, "by_name")
    for work in (
        lambda tx: tx.put("by_name", ("p", 1, "x"), city="c"),
        lambda tx: tx.insert("by_name", ("p", 1, "x")),
        lambda tx: tx.delta("by_name", ("p", 1, "x"), sum=1),
        lambda tx: tx.delete("by_name", ("p", 1, "x")),
        lambda tx: tx.overwrite("by_name"),
        lambda tx: tx.append("by_name", [{"name": "p"}]),
        lambda tx: db.stage("by_name", [{"name": "p", "a": 1, "b": "x"}]),
        lambda tx: db.alter_table("by_name", {"c": "int64"}),
    ):
        with pytest.raises(InvalidArgument), db.transaction() as tx:
            work(tx)
    with pytest.raises(InvalidArgument, match="source of by_name"):
        db.drop("t")
    db.drop("by_name")
    with db.transaction() as tx:
        tx.put("t", (1, "x"), name="p")
    db.drop("t")
    assert db.tables() == []
