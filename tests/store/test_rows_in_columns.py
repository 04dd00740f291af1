"""Rows of nothing but delta columns that are written in columns: what is read is what writing them one by one gives.

The same rows are put, added to and deleted one by one in between; commits lie in the index, in runs and in base, with
and without history; snapshots are open meanwhile, and the store is killed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kivi
from kivi.delta.ops import Barrier
from kivi.embedded.database import Database
from kivi.errors import Conflict
from kivi.model.scans import Scan
from kivi.runtime.settings import Settings
from kivi.store import transaction
from kivi.store.facade import Store

Row = tuple[int, int | None]


def opened(path: Path) -> Any:
    return Database(Store.open(str(path), settings=Settings(background=False)))


def written(state: Row | None, barrier: Barrier, n: int, hi: int) -> Row | None:
    if barrier is Barrier.DELETE:
        return None
    before = (0, None) if state is None or barrier is Barrier.RESTART else state
    return before[0] + n, hi if before[1] is None else max(before[1], hi)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_as_if_each_row_were_written_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(transaction, "SMALL_ROWS", seed % 3)
    rng = random.Random(seed)
    history = "1h" if seed % 2 else None
    db = opened(tmp_path / "store")
    db.create_table(
        "t", key={"k": "string"}, columns={"n": kivi.sum("int64"), "hi": kivi.max("int64")}, history=history
    )
    names = [f"{'k' * (i % 3)}{i}" for i in range(12)]
    state: dict[str, Row] = {}
    states: dict[int, dict[str, Row]] = {}
    held: list[tuple[Any, int]] = []
    for _ in range(60):
        schema, txn = db.store.table("t"), db.store.transaction()
        chosen = rng.sample(names, rng.randrange(1, 9))
        for name in chosen[: rng.randrange(3)]:
            chosen.remove(name)
            match rng.randrange(3):
                case 0:
                    txn.put(schema, (name,), {"hi": (value := rng.randrange(9))})
                    state[name] = state.get(name, (0, None))[0], value
                case 1:
                    txn.delta(schema, (name,), {"n": (value := rng.randrange(-5, 2**40))})
                    before = state.get(name, (0, None))
                    state[name] = before[0] + value, before[1]
                case _:
                    txn.delete(schema, (name,))
                    state.pop(name, None)
        if chosen:
            barrier = rng.choice([Barrier.PATCH, Barrier.PATCH, Barrier.RESTART, Barrier.DELETE])
            values = [(rng.randrange(-(2**50), 2**50), rng.randrange(-9, 9)) for _ in chosen]
            deltas = {"n": [n for n, _ in values], "hi": [hi for _, hi in values]}
            txn.write_deltas(schema, [pa.array(chosen)], deltas, barrier=barrier)
            for name, (n, hi) in zip(chosen, values, strict=True):
                if (after := written(state.pop(name, None), barrier, n, hi)) is not None:
                    state[name] = after
        ts = db.store.commits.commit_wait(txn)
        states[ts] = dict(state)
        match rng.randrange(8):
            case 0:
                db.store.consolidator.run_light()
            case 1:
                db.store.consolidate()
            case 2 if len(held) < 4:
                held.append((db.store.begin(), ts))
            case 3:
                for lease, _ in held:
                    db.store.release(lease)
                held = []
                db.store.crash()
                db = opened(tmp_path / "store")
        check(db, db.store.begin(), names, state)
        for lease, at in held:
            check(db, lease, names, states[at], release=False)
        if history is not None:
            at = rng.choice([*states])
            check(db, db.store.begin(as_of_ts=at), names, states[at])
    db.store.close()


def check(db: Any, lease: Any, names: list[str], state: dict[str, Row], *, release: bool = True) -> None:
    schema = db.store.table("t")
    found = db.store.reads.get(lease, schema, [(name,) for name in names])
    assert {row["k"]: (row["n"], row["hi"]) for row in found if row is not None} == state
    rows = [row for batch in db.store.scan(lease, schema, Scan()) for row in batch.to_pylist()]
    assert {row["k"]: (row["n"], row["hi"]) for row in rows} == state
    assert [row["k"] for row in rows] == sorted(state)
    if release:
        db.store.release(lease)


def test_a_verdict_looks_at_each_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First committer wins between rows in columns and rows one by one, as between any two (R2)."""
    monkeypatch.setattr(transaction, "SMALL_ROWS", 0)
    with kivi.open(tmp_path / "store") as db:
        db.create_table("t", key={"k": "string"}, columns={"n": kivi.sum("int64"), "hi": kivi.max("int64")})
        schema, store = db.store.table("t"), db.store

        def begun(barrier: Barrier | None) -> Any:
            txn = store.transaction()
            if barrier is None:
                txn.put(schema, ("b",), {"n": 1})
            else:
                txn.write_deltas(
                    schema, [pa.array(["c", "b", "a"])], {"n": [1, 2, 3], "hi": [1, 2, 3]}, barrier=barrier
                )
            return txn

        for first, second in ((Barrier.RESTART, None), (None, Barrier.RESTART), (None, Barrier.PATCH)):
            one, other = begun(first), begun(second)
            store.commits.commit_wait(one)
            with pytest.raises(Conflict) as refused:
                store.commits.commit_wait(other)
            assert refused.value.key == ("b",)
        one, other = begun(Barrier.PATCH), begun(Barrier.PATCH)  # deltas commute
        store.commits.commit_wait(one)
        store.commits.commit_wait(other)
