"""Groups: many transactions entered together, each as if it had come alone (R19)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.delta.ops import Barrier, RowOp
from kivi.embedded.database import Database
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US
from kivi.mvcc.groups import Outcome, Part, Writes, WriteSet, told
from kivi.mvcc.pending import Pending
from kivi.mvcc.record import BLIND, Commit, decode_commit
from kivi.runtime.settings import Settings
from kivi.store.commits import Commit as ToCommit
from kivi.store.commits import Opened
from kivi.store.facade import Store
from kivi.store.transaction import payload_digest


@pytest.fixture
def db() -> Iterator[Database]:
    with Database(Store.open(None, settings=Settings(background=False))) as database:
        database.create_table(
            "t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "hi": kivi.max("int64"), "v": "string"}
        )
        yield database


@dataclass(eq=False)
class One:
    """One transaction that has read nothing: what it does, its token, and its timestamp once it has one."""

    does: WriteSet
    token: str
    cts: int = 0


def blind(db: Database, key: int, token: str, *, puts: bool = False, **values: Any) -> One:
    _, plans = db.store.write_plans()
    assert plans is not None
    plan = plans["t"]
    raw, op = plan.key([key]), (plan.puts if puts else plan.deltas)(list(values), list(values.values()))
    assert raw is not None and op is not None
    does = db.store.write_set([(plan, raw, op)])
    assert does is not None
    return One(does, token)


class Heard:
    """What the members of a group were told, each once."""

    def __init__(self) -> None:
        self.outcomes: dict[Any, Any] = {}
        self.changed = threading.Condition()

    def tell(self, one: Any, outcome: Any) -> None:
        with self.changed:
            assert one not in self.outcomes
            self.outcomes[one] = outcome
            self.changed.notify_all()

    def entered(self, part: Any, unknown: Any) -> None:
        for cts, one in enumerate(part.tags, part.first):
            one.cts = cts
            self.tell(one, cts if unknown is None else unknown)

    def apart(self, one: Any, outcome: Outcome) -> None:
        self.tell(one, outcome.commit_ts if outcome.error is None else outcome.error)

    def of(self, ones: list[One]) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: all(one in self.outcomes for one in ones), 60)
        return [self.outcomes[one] for one in ones]


def submitted(db: Database, ones: list[One], version: int | None = None) -> tuple[Heard, Any]:
    heard = Heard()
    version = db.store.changed_at if version is None else version
    return heard, db.store.write(version, [one.does for one in ones], [one.token for one in ones], ones, heard)


def committed(db: Database, ones: list[One]) -> list[Any]:
    """The outcome of each."""
    heard, stale = submitted(db, ones)
    assert not stale
    return heard.of(ones)


def refused(db: Database, ones: list[One], version: int) -> None:
    heard, stale = submitted(db, ones, version)
    assert [*stale] == ones and not heard.outcomes


def row(db: Database, key: int = 1) -> dict[str, Any] | None:
    with db.snapshot() as snap:
        return snap.get("t", (key,))


def test_each_has_its_own_timestamp_and_all_are_seen_once_acknowledged(db):
    group = [blind(db, 1, f"token {i}", n=i, hi=i) for i in range(1, 101)]
    stamps = committed(db, group)
    assert stamps == list(range(stamps[0], stamps[0] + 100))
    assert db.watermark() == stamps[-1]
    found = row(db)
    assert found is not None and (found["n"], found["hi"]) == (5050, 100)
    assert [db.outcome(one.token) for one in group] == stamps


def test_records_and_digests_are_the_same_bytes_as_of_any_other_commit():
    rows = [
        (300, b"\x80key", RowOp(Barrier.PATCH, {}, {0: 2**62, 1: -5})),
        (301, b"", RowOp(Barrier.PATCH, {}, {2: 0.5})),
        (301, b"x", RowOp(Barrier.PATCH, {3: "text", 0: 7}, {})),
    ]
    does = WriteSet(rows, [])
    body = WriteSet.bodies([does], ["k1-1-abc"])[0]
    general = Commit(BLIND, rows=list(rows))
    general.request = ("k1-1-abc", payload_digest(general))
    assert does.digest == general.request[1]
    assert body == b"".join(bytes(part) for part in general.encode())
    assert decode_commit(body) == general


def test_each_member_says_that_it_has_read_nothing():
    """Of one row and of two, of long and short tokens, in any order."""
    one = WriteSet([(300, b"k", RowOp(Barrier.PATCH, {}, {0: 1}))], [])
    two = WriteSet([(300, b"k", RowOp(Barrier.PATCH, {}, {0: 1})), (300, b"m", RowOp(Barrier.PATCH, {1: 5}, {}))], [])
    does, tokens = [one, two, two, one, one], ["a", "a longer one", "b", "\N{SNOWMAN}", "d"]
    for each, token, body in zip(does, tokens, WriteSet.bodies(does, tokens), strict=True):
        assert decode_commit(body) == Commit(BLIND, rows=each.rows, request=(token, each.digest))


def test_a_member_that_has_read_nothing_conflicts_with_nobody(db):
    """R19: it sees the cells of all that entered before it, those of its own group too."""
    with db.transaction() as tx:
        tx.put("t", (1,), n=10, v="x")
    group = [
        blind(db, 1, "d1", n=1),
        blind(db, 1, "p1", puts=True, n=5, v="a"),
        blind(db, 1, "d2", n=2),
        blind(db, 1, "p2", puts=True, v="b"),
        blind(db, 2, "p3", puts=True, v="c"),
    ]
    stamps = committed(db, group)
    assert stamps == list(range(stamps[0], stamps[0] + 5))
    assert row(db) == {"id": 1, "n": 7, "hi": None, "v": "b"}
    for upto, n, v in [(0, 11, "x"), (1, 5, "a"), (2, 7, "a"), (3, 7, "b")]:
        with db.snapshot(as_of=stamps[upto]) as snap:
            assert snap.get("t", (1,)) == {"id": 1, "n": n, "hi": None, "v": v}


def test_members_whose_tokens_are_known_are_answered_apart_and_the_others_committed(db):
    (known,) = committed(db, [blind(db, 1, "known", n=1)])
    other_payload, fine = blind(db, 1, "known", n=2), blind(db, 2, "fine", n=5)
    twice = [blind(db, 1, "twice", n=1), blind(db, 1, "twice", n=1)]
    outcomes = committed(db, [blind(db, 1, "known", n=1), other_payload, *twice, fine])
    assert outcomes[0] == known and isinstance(outcomes[1], kivi.InvalidArgument)
    assert outcomes[2] == outcomes[3] == known + 1 and outcomes[4] == known + 2
    assert [found["n"] for found in (row(db, key) or {} for key in (1, 2))] == [2, 5]


def test_a_commit_that_meets_any_of_a_group_is_told_of_the_last_of_those(db):
    """What the group wrote is noted once for each cell, at the newest of its timestamps; the floor rises by it too."""
    with db.transaction() as tx:
        assert tx.start_ts
        group = [blind(db, i % 2, f"{i}", n=i) for i in range(7)]
        committed(db, group)
        tx.put("t", (1,), n=0)
        with pytest.raises(kivi.Conflict) as conflict:
            tx.commit()
    assert (conflict.value.key, conflict.value.commit_ts) == ((1,), group[5].cts)
    assert db.store.committer.facts._last == group[6].cts


@pytest.mark.parametrize("change", ["drop", "alter", "view"])
def test_a_table_that_has_changed_since_gives_all_back(db, change):
    version = db.store.changed_at
    group = [blind(db, 1, "a", n=1)]
    if change == "drop":
        db.drop("t")
    elif change == "alter":
        db.alter_table("t", add_columns={"m": "int64"})
    else:  # every write of the table has to follow it
        db.create_view("t_by_v", source="t", key=["v", "id"], columns=[])
    refused(db, group, version)


def test_another_table_that_has_changed_since_is_nothing_to_it(db):
    version = db.store.changed_at
    group = [blind(db, 1, "a", n=1)]
    db.create_table("u", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    db.drop("u")
    heard, stale = submitted(db, group, version)
    assert not stale and heard.of(group) == [db.watermark()]


def test_of_a_stale_group_those_with_known_tokens_are_answered_and_all_others_given_back(db):
    """Nobody is told twice, and a token that comes twice is given back twice: that it did not enter would be untrue
    once its first has come again."""
    version = db.store.changed_at
    known = blind(db, 1, "known", n=1)
    (stamp,) = committed(db, [known])
    again, first, repeat = One(known.does, "known"), blind(db, 1, "new", n=1), blind(db, 1, "new", n=1)
    db.alter_table("t", add_columns={"m": "int64"})
    heard, stale = submitted(db, [again, first, repeat], version)
    assert [*stale] == [first, repeat] and heard.of([again]) == [stamp] and len(heard.outcomes) == 1
    stamps = committed(db, [first, repeat])
    assert stamps[0] == stamps[1] > stamp
    assert row(db) == {"id": 1, "n": 2, "hi": None, "v": None, "m": None}


def test_without_room_all_are_given_back_at_once_and_nothing_has_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server calls it where many connections are served: a caller that may wait commits them one by one."""
    settings = Settings(background=False, pending_soft_bytes=1_000, pending_hard_bytes=2_000)
    with Database(Store.open(None, settings=settings)) as db:
        db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
        group = [blind(db, key, f"token {key}", n=1) for key in range(100)]
        stamps = committed(db, group)
        assert db.store.is_full
        again, other = One(group[0].does, "token 0"), blind(db, 0, "another", n=1)
        with monkeypatch.context() as patch:
            patch.setattr(Pending, "wait_for_room", lambda *_: pytest.fail("it waits for room"))
            refused(db, [again, other], db.store.changed_at)
        assert db.store.log.last == stamps[-1]
        db.consolidate()
        assert committed(db, [again, other]) == [stamps[0], stamps[-1] + 1]
        assert row(db, 0) == {"id": 0, "n": 2}


def test_a_drop_conflicts_with_what_entered_since_it_began(db):
    """The schema cell: in flight together, one of them does not commit."""
    late = blind(db, 1, "late", n=1)
    version = db.store.changed_at
    db.drop("t")
    refused(db, [late], version)
    db.create_table("t", key={"id": "int64"}, columns={"n": kivi.sum("int64")})
    txn = db.store.transaction()
    committed(db, [blind(db, 1, "first", n=1)])
    from kivi.store.catalog import TABLES

    txn.delete(TABLES, (db.store.table("t").id,))
    with pytest.raises(kivi.Conflict):
        db.store.commit_wait(txn)


def test_those_who_began_before_a_group_conflict_with_it_by_cell(db):
    with db.transaction() as tx:
        tx.put("t", (1,), n=1)
        assert tx.start_ts
        committed(db, [blind(db, 1, "between", n=5)])
        with pytest.raises(kivi.Conflict):
            tx.commit()
    with db.transaction() as tx:  # another cell
        assert tx.start_ts
        committed(db, [blind(db, 1, "p4", puts=True, v="d")])
        tx.put("t", (1,), n=9)
    with pytest.raises(kivi.Conflict), db.transaction() as tx:
        assert tx.start_ts
        committed(db, [blind(db, 1, "p5", puts=True, n=1)])
        tx.delta("t", (1,), n=1)
    assert row(db) == {"id": 1, "n": 1, "hi": None, "v": "d"}


def test_the_parts_of_a_group_are_judged_as_if_one_had_come_after_the_other(db):
    """Two that began before it, between writes that have read nothing: one writes a cell that the part before wrote."""
    store = db.store
    table, outcomes = store.table("t"), dict[str, Outcome]()

    def single(name: str, key: int) -> Part:
        txn = store.transaction()
        txn.put(table, (key,), {"v": name})
        commit = ToCommit(txn, None, None, lambda outcome: None)
        part = store.commits._prepare(commit, store.changed_at, store.catalog.entered, Opened(store.leases))
        part.lease, part.answer = txn.lease, told(lambda outcome: outcomes.update({name: outcome}))
        return part

    def writes(ones: list[One]) -> tuple[Heard, Part]:
        heard = Heard()
        tokens = [one.token for one in ones]
        return heard, Writes(store.changed_at, [one.does for one in ones], tokens, ones, heard)

    before, after = [blind(db, 1, "before", puts=True, v="b")], [blind(db, key, f"after {key}", n=1) for key in (1, 2)]
    (heard, one), (heard_later, other) = writes(before), writes(after)
    late, fine = single("late", 1), single("fine", 2)
    last, grouped = store.log.last, store.committer.counters.commits_grouped
    assert not store.committer.submit([one, late, fine, other])
    assert [*heard.of(before), *heard_later.of(after)] == [last + 1, last + 3, last + 4]
    assert isinstance(outcomes["late"].error, kivi.Conflict) and outcomes["fine"].commit_ts == last + 2
    assert store.committer.counters.commits_grouped == grouped + 4
    assert [row(db, key) for key in (1, 2)] == [
        {"id": 1, "n": 1, "hi": None, "v": "b"},
        {"id": 2, "n": 1, "hi": None, "v": "fine"},
    ]


WRITES = st.lists(
    st.tuples(st.integers(1, 3), st.booleans(), st.sets(st.sampled_from(["n", "hi"]), min_size=1), st.integers(-9, 9)),
    min_size=1,
    max_size=12,
)


@given(groups=st.lists(WRITES, min_size=1, max_size=3))
def test_all_members_commit_and_every_prefix_is_their_replay(groups):
    with Database(Store.open(None, settings=Settings(background=False))) as db:
        db.create_table(
            "t", key={"id": "int64"}, columns={"n": kivi.sum("int64"), "hi": kivi.max("int64"), "v": "string"}
        )
        model: dict[int, dict[str, int | None]] = {}
        for g, writes in enumerate(groups):
            group = [
                blind(db, key, f"{g} {i}", puts=puts, **dict.fromkeys(sorted(columns), value))
                for i, (key, puts, columns, value) in enumerate(writes)
            ]
            stamps = committed(db, group)
            assert stamps == list(range(stamps[0], stamps[0] + len(group)))
            for cts, (key, puts, columns, value) in zip(stamps, writes, strict=True):
                cells = model.setdefault(key, {"n": 0, "hi": None})
                for column in columns:
                    held = cells[column]
                    if puts or held is None:
                        cells[column] = value
                    else:
                        cells[column] = held + value if column == "n" else max(held, value)
                with db.snapshot(as_of=cts) as snap:
                    found = {k: snap.get("t", (k,)) for k in model}
                assert {k: {name: got[name] for name in model[k]} for k, got in found.items() if got} == model


def test_a_repeat_in_flight_waits_with_the_first(db):
    first, repeat = blind(db, 1, "same", n=1), blind(db, 1, "same", n=1)
    heard, stale = submitted(db, [first, repeat])
    assert not stale
    with db.transaction(token="same") as tx:
        tx.delta("t", (1,), n=1)
        result = tx.commit()
    assert heard.of([first, repeat]) == [result, result]
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
    for name, first in (("timed", {"at": "timestamp", "b": "int64"}), ("named", {"a": "string", "at": "timestamp"})):
        db.create_table(name, key=first, columns={"seen": "timestamp", "newest": kivi.max("timestamp")})
    plans = db.store.write_plans()[1]
    assert plans is not None
    for time in (MOMENT_MIN_US - 1, MOMENT_MIN_US, MOMENT_MAX_US, MOMENT_MAX_US + 1):
        is_moment = MOMENT_MIN_US <= time <= MOMENT_MAX_US
        assert (plans["timed"].key([time, 1]) is not None) is is_moment
        assert (plans["named"].key(["x", time]) is not None) is is_moment
        assert (plans["timed"].puts(["seen"], [time]) is not None) is is_moment
        assert (plans["timed"].deltas(["newest"], [time]) is not None) is is_moment
    assert plans["timed"].key(["x", 1]) is None and plans["timed"].key([1]) is None
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
