"""R19: many transactions of deltas and puts are entered together, each as if it had come alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kivi
from kivi.delta.ops import Barrier, RowOp
from kivi.embedded.database import Database
from kivi.mvcc.plain import PlainGroup, PlainRows
from kivi.mvcc.record import Commit, decode_commit
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from kivi.store.transaction import _digest


@pytest.fixture
def db() -> Iterator[Database]:
    with Database(Store.open(None, settings=Settings(background=False))) as database:
        database.create_table(
            "t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "hi": kivi.max("int64"), "v": "string"}
        )
        yield database


@dataclass(eq=False)
class One:
    """One transaction: what it does, its token, when it began, and its timestamp once it has one."""

    does: PlainRows
    token: str
    start_ts: int
    cts: int = 0


def plain(db: Database, key: int, token: str, *, puts: bool = False, **values: Any) -> One:
    _, plans = db.store.write_plans()
    assert plans is not None
    plan = plans["t"]
    raw, op = plan.key([key]), (plan.puts if puts else plan.deltas)(list(values), list(values.values()))
    assert raw is not None and op is not None
    does = db.store.plain_rows([(plan, raw, op)])
    assert does is not None
    return One(does, token, db.watermark())


def grouped(ones: list[One]) -> PlainGroup:
    (start_ts,) = {one.start_ts for one in ones}
    return PlainGroup(start_ts, [one.does for one in ones], [one.token for one in ones], ones)


def committed(db: Database, ones: list[One]) -> tuple[list[One], list[One]]:
    """(those that were entered and acknowledged, those that were given back)."""
    done = threading.Event()
    heard: list[One] = []

    def tell(entered: PlainGroup, error: Any) -> None:
        assert error is None
        for one, cts in zip(entered.tags, entered.stamps, strict=True):
            one.cts = cts
            assert db.outcome(one.token) == cts
            heard.append(one)
        done.set()

    left = db.store.submit_plain(grouped(ones), db.store.catalog_version, tell)
    if len(left) < len(ones):
        assert done.wait(10)
    return heard, [ones[i] for i in left]


def refused(db: Database, ones: list[One], version: int) -> None:
    left = db.store.submit_plain(grouped(ones), version, lambda *_: pytest.fail("it was entered"))
    assert [*left] == [*range(len(ones))]


def row(db: Database, key: int = 1) -> dict[str, Any] | None:
    with db.snapshot() as snap:
        return snap.get("t", (key,))


def test_each_has_its_own_timestamp_and_all_are_seen_once_acknowledged(db):
    group = [plain(db, 1, f"token {i}", n=i, hi=i) for i in range(1, 101)]
    entered, left = committed(db, group)
    assert entered == group and not left
    assert [p.cts for p in group] == list(range(group[0].cts, group[0].cts + 100))
    assert db.watermark() == group[-1].cts
    found = row(db)
    assert found is not None and (found["n"], found["hi"]) == (5050, 100)
    assert db.outcome("token 7") == group[6].cts


def test_records_and_digests_are_the_same_bytes_as_on_the_general_way():
    rows = [
        (300, b"\x80key", RowOp(Barrier.PATCH, {}, {0: 2**62, 1: -5})),
        (301, b"", RowOp(Barrier.PATCH, {}, {2: 0.5})),
        (301, b"x", RowOp(Barrier.PATCH, {3: "text", 0: 7}, {})),
    ]
    does = PlainRows(rows, [])
    (body,) = PlainGroup(77, [does], ["k1-1-abc"], [None]).bodies()
    general = Commit(77, rows=list(rows))
    general.request = ("k1-1-abc", _digest(general))
    assert does.digest == general.request[1]
    assert body == b"".join(bytes(part) for part in general.encode())
    assert decode_commit(body) == general


def test_each_body_of_a_group_is_what_it_is_alone():
    """Of one row and of two, of long and short tokens, in any order."""
    one = PlainRows([(300, b"k", RowOp(Barrier.PATCH, {}, {0: 1}))], [])
    two = PlainRows([(300, b"k", RowOp(Barrier.PATCH, {}, {0: 1})), (300, b"m", RowOp(Barrier.PATCH, {1: 5}, {}))], [])
    does, tokens = [one, two, two, one, one], ["a", "a longer one", "b", "\N{SNOWMAN}", "d"]
    bodies = PlainGroup(9, does, tokens, tokens).bodies()
    for body, each, token in zip(bodies, does, tokens, strict=True):
        (alone,) = PlainGroup(9, [each], [token], [None]).bodies()
        assert body == alone
        assert decode_commit(body) == Commit(9, rows=each.rows, request=(token, each.digest))


def test_what_is_not_regular_is_given_back_and_the_rest_committed(db):
    committed(db, [plain(db, 1, "known", n=1)])
    stale = plain(db, 3, "stale", n=1)
    twice = [plain(db, 1, "twice", n=1), plain(db, 1, "twice", n=1)]
    fine = plain(db, 2, "fine", n=5)
    group = [plain(db, 1, "known", n=1), stale, *twice, fine]
    with db.transaction() as tx:
        tx.put("t", (3,), n=10)
    entered, left = committed(db, group)
    assert entered == [twice[0], fine]
    assert left == [group[0], stale, twice[1]]
    assert [found["n"] for found in (row(db, key) or {} for key in (1, 2, 3))] == [2, 5, 10]


def test_of_those_that_write_the_same_cells_all_collide_or_none(db):
    """They are decided together, whatever their values: so are those of other cells of the same row."""
    same = [plain(db, 1, f"n {i}", n=i) for i in range(3)]
    others = [plain(db, 1, f"hi {i}", hi=i) for i in range(3)]
    mixed = [one for pair in zip(same, others, strict=True) for one in pair]
    with db.transaction() as tx:
        tx.put("t", (1,), n=10)
    entered, left = committed(db, mixed)
    assert (entered, left) == (others, same)
    assert row(db) == {"id": 1, "n": 10, "hi": 2, "v": None}


def test_a_commit_that_meets_any_of_a_group_is_told_of_the_last_of_those(db):
    """What the group wrote is noted once for each cell, at the newest of its timestamps; the floor rises by it too."""
    with db.transaction() as tx:
        assert tx.start_ts
        group = [plain(db, i % 2, f"{i}", n=i) for i in range(7)]
        committed(db, group)
        tx.put("t", (1,), n=0)
        with pytest.raises(kivi.Conflict) as conflict:
            tx.commit()
    assert (conflict.value.key, conflict.value.commit_ts) == ((1,), group[5].cts)
    assert db.store.committer._facts._last == group[6].cts


@pytest.mark.parametrize("change", ["drop", "create"])
def test_a_catalog_that_has_changed_since_gives_all_back(db, change):
    version = db.store.catalog_version
    group = [plain(db, 1, "a", n=1)]
    if change == "drop":
        db.drop("t")
    else:
        db.create_table("u", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    refused(db, group, version)


def test_a_drop_conflicts_with_plain_commits_and_they_with_it(db):
    """The schema is a cell too: in flight together, one of them does not commit."""
    late = plain(db, 1, "late", n=1)
    version = db.store.catalog_version
    db.drop("t")
    refused(db, [late], version)
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    txn = db.store.transaction()
    committed(db, [plain(db, 1, "first", n=1)])
    from kivi.store.catalog import TABLES

    txn.delete(TABLES, (db.store.table("t").id,))
    with pytest.raises(kivi.Conflict):
        db.store.commit_wait(txn)


def test_puts_conflict_with_plain_commits_in_both_orders(db):
    with db.transaction() as tx:
        tx.put("t", (1,), n=1)
        assert tx.start_ts
        committed(db, [plain(db, 1, "between", n=5)])
        with pytest.raises(kivi.Conflict):
            tx.commit()
    before = plain(db, 1, "before", n=1)
    with db.transaction() as tx:
        tx.put("t", (1,), v="x")
    assert committed(db, [before])[0] == [before]  # another cell
    before = plain(db, 1, "again", n=1)
    with db.transaction() as tx:
        tx.delete("t", (1,))
    assert committed(db, [before])[1] == [before]


def test_puts_are_entered_with_the_others_and_judged_like_any_put(db):
    """Of one group, and against what came before and after: the table in ``kivi.mvcc.verdict``."""
    first, again = plain(db, 1, "p1", puts=True, v="a", n=5), plain(db, 1, "p2", puts=True, v="b")
    other, delta = plain(db, 2, "p3", puts=True, v="c"), plain(db, 1, "d1", n=1)
    entered, left = committed(db, [first, again, other, delta])
    assert (entered, left) == ([first, other], [again, delta])
    assert row(db) == {"id": 1, "n": 5, "hi": None, "v": "a"}
    with db.transaction() as tx:  # a transaction that began before a put conflicts with it, by column
        assert tx.start_ts
        entered, _ = committed(db, [plain(db, 1, "p4", puts=True, v="d")])
        tx.put("t", (1,), n=9)
    with pytest.raises(kivi.Conflict), db.transaction() as tx:
        assert tx.start_ts
        committed(db, [plain(db, 1, "p5", puts=True, n=1)])
        tx.delta("t", (1,), n=1)
    late = plain(db, 1, "p6", puts=True, n=3)
    committed(db, [plain(db, 1, "d2", n=1)])
    assert committed(db, [late]) == ([], [late])
    assert row(db) == {"id": 1, "n": 2, "hi": None, "v": "d"}


WRITES = st.lists(
    st.tuples(st.integers(1, 3), st.booleans(), st.sets(st.sampled_from(["n", "hi"]), min_size=1), st.integers(-9, 9)),
    min_size=1,
    max_size=12,
)


@given(groups=st.lists(WRITES, min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_of_those_that_are_entered_together_all_commute_and_the_rows_are_their_replay(groups):
    with Database(Store.open(None, settings=Settings(background=False))) as db:
        db.create_table(
            "t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "hi": kivi.max("int64"), "v": "string"}
        )
        model: dict[int, dict[str, int | None]] = {}
        for g, writes in enumerate(groups):
            group = [
                plain(db, key, f"{g} {i}", puts=puts, **dict.fromkeys(sorted(columns), value))
                for i, (key, puts, columns, value) in enumerate(writes)
            ]
            entered, left = committed(db, group)
            assert sorted([*entered, *left], key=group.index) == group
            written: dict[tuple[int, str], set[bool]] = {}
            for one in entered:
                key, puts, columns, value = writes[group.index(one)]
                cells = model.setdefault(key, {"n": 0, "hi": None})
                for column in columns:
                    kinds = written.setdefault((key, column), set())
                    assert not kinds or (kinds == {False} and not puts)
                    kinds.add(puts)
                    held = cells[column]
                    if puts or held is None:
                        cells[column] = value
                    else:
                        cells[column] = held + value if column == "n" else max(held, value)
            for one in left:  # somebody who came before it stands against it: it is not the first of its row
                key = writes[group.index(one)][0]
                assert any(writes[group.index(other)][0] == key for other in entered)
        for key, cells in model.items():
            found = row(db, key)
            assert found is not None and {name: found[name] for name in cells} == cells


def test_a_repeat_in_flight_waits_with_the_first(db):
    first, repeat = plain(db, 1, "same", n=1), plain(db, 1, "same", n=1)
    results: list[Any] = []
    done = threading.Event()

    def tell(entered: PlainGroup, error: Any) -> None:
        first.cts = entered.first
        done.set()

    left = db.store.submit_plain(grouped([first, repeat]), db.store.catalog_version, tell)
    assert left == [1]
    with db.transaction(token="same") as tx:
        tx.delta("t", (1,), n=1)
        results.append(tx.commit())
    assert done.wait(10)
    assert results == [first.cts]
    found = row(db)
    assert found is not None and found["n"] == 1
    with pytest.raises(kivi.InvalidArgument), db.transaction(token="same") as tx:
        tx.delta("t", (1,), n=2)


def test_what_a_plan_does_not_take_goes_the_general_way(db):
    db.create_table(
        "all",
        key={"a": "string", "b": "int64"},
        columns={"f": kivi.sum("float64"), "d": kivi.sum("decimal(4,2)"), "n": kivi.sum("int64"), "v": "int64"},
    )
    plans = db.store.write_plans()[1]
    assert plans is not None
    plan = plans["all"]
    assert plan.key(["x", 1]) is not None
    for key in (["x"], ["x", None], ["x", True], [1, 1], ["x", 1.0], ["x", 1, 2], ["y" * 300, 1]):
        assert plan.key(key) is None
    good = plan.deltas(["f", "d", "n"], [-0.0, 9999, 1])
    assert good is not None and str(good.deltas[0]) == "0.0"
    for names, values in (
        (["v"], [1]), (["none"], [1]), (["n"], [None]), (["n"], [True]), (["n"], [1.0]), (["f"], [1]), ([], []),
        (["f"], [float("nan")]), (["f"], [float("inf")]), (["d"], [10000]), (["n", "n"], [1, 1]),
    ):  # fmt: skip
        assert plan.deltas(names, values) is None
    put = plan.puts(["v", "n", "d"], [7, 1, -9999])
    assert put is not None and (list(put.puts.values()), put.deltas) == ([7, 1, -9999], {})
    wrong: list[tuple[list[str], list[Any]]] = [
        (["none"], [1]), (["a"], ["x"]), (["v"], [None]), (["v"], [True]), (["v"], ["x"]), ([], []), (["d"], [10000]),
        (["f"], [float("inf")]), (["v", "v"], [1, 1]),
    ]  # fmt: skip
    for names, values in wrong:
        assert plan.puts(names, values) is None


def test_text_that_may_be_too_long_is_measured_on_the_general_way():
    with Database(Store.open(None, settings=Settings(background=False, max_value_bytes=400))) as db:
        db.create_table("t", key={"id": "int64"}, columns={"v": "string"})
        plans = db.store.write_plans()[1]
        assert plans is not None
        assert plans["t"].puts(["v"], ["\N{SNOWMAN}" * 100]) is not None
        assert plans["t"].puts(["v"], ["x" * 101]) is None
