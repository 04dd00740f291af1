"""SQL equals brute force over the events visible at a snapshot, and equals ``query`` (R24): with disorder, retention,
retraction and predicates at random, whether events lie in memory, in blocks, in settled files, or in all of these."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import random
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.errors import DataLoss, InvalidArgument, KiviError, NotFound

MINUTE = 60_000_000
T0 = int(dt.datetime(2026, 5, 1, tzinfo=dt.UTC).timestamp() * 1e6)
Event = dict[str, Any]
CONDITIONS: list[tuple[str, Any, Any]] = [  # in SQL, in Python, and as a predicate
    ("true", lambda e: True, None),
    ("v > 5", lambda e: e["v"] is not None and e["v"] > 5, kivi.col("v") > 5),
    ("v is null", lambda e: e["v"] is None, kivi.col("v").is_null()),
    ("g in ('a', 'b')", lambda e: e["g"] in ("a", "b"), kivi.col("g").isin(["a", "b"])),
    ("not (g = 'a')", lambda e: e["g"] is not None and e["g"] != "a", ~(kivi.col("g") == "a")),
    (
        "v >= 2 and g <> 'c' or v = -7",
        lambda e: e["v"] is not None and ((e["v"] >= 2 and e["g"] is not None and e["g"] != "c") or e["v"] == -7),
        ((kivi.col("v") >= 2) & (kivi.col("g") != "c")) | (kivi.col("v") == -7),
    ),
]


def microseconds(at: dt.datetime) -> int:
    return (at - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def moment(us: int) -> str:
    return f"make_timestamptz({us})"


def expected(events: list[Event]) -> dict[Any, tuple[Any, ...]]:
    out = {}
    for group in {event["g"] for event in events}:
        values = [event["v"] for event in events if event["g"] == group]
        known = [value for value in values if value is not None]
        ends = (min(known, default=None), max(known, default=None))
        out[group] = (len(values), len(known), sum(known) if known else None, *ends)
    return out


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_sql_equals_brute_force_and_query_r24(seed: int, on_disk: bool, tmp_path: Path) -> None:
    rng = random.Random(seed)
    path = tmp_path / "data" if on_disk else None
    with kivi.open(path, background=False, block_rows=rng.choice([7, 64, 131_072])) as db:
        retention = rng.choice([None, "90m"])
        columns = {"ts": "timestamp", "g": "string", "v": "int64"}
        db.create_event_table("e", event_time="ts", columns=columns, retention=retention)
        newest = T0
        for _ in range(8):
            newest += rng.randrange(20 * MINUTE)
            more = [
                {
                    "ts": newest - int(rng.expovariate(1 / (10 * MINUTE))),
                    "g": rng.choice(["a", "b", "c", "", None]),
                    "v": rng.choice([None, -7, rng.randrange(12)]),
                }
                for _ in range(rng.randrange(1, 40))
            ]
            db.append("e", more, late="drop")
            if rng.random() < 0.3:
                low = newest - rng.randrange(30 * MINUTE)
                with contextlib.suppress(InvalidArgument), db.transaction() as tx:  # some lie below the floor
                    tx.retract("e", where=kivi.col("v") == 3, start=low)
            if rng.random() < 0.5:
                db.consolidate()
            if rng.random() < 0.5:
                db.store.settle()
            with db.snapshot() as snap:
                visible = list(snap.scan("e"))
                for _ in range(2):
                    text, holds, where = rng.choice(CONDITIONS)
                    low, high = sorted(newest - rng.randrange(150 * MINUTE) for _ in range(2))
                    wanted = expected([e for e in visible if holds(e) and low <= microseconds(e["ts"]) < high])
                    asked = (
                        f"select g, count(*), count(v), sum(v), min(v), max(v) from e where ({text}) "
                        f"and ts >= {moment(low)} and ts < {moment(high)} group by g"
                    )
                    found = {row[0]: row[1:] for row in (tuple(r.values()) for r in snap.sql(asked).to_pylist())}
                    assert found == wanted, asked
                    same = snap.query(
                        "e",
                        start=low,
                        end=high,
                        where=where,
                        group_by=["g"],
                        measures={"n": kivi.count(), "k": kivi.count("v"), "lo": kivi.min("v"), "hi": kivi.max("v")},
                    )
                    assert {r["g"]: (r["n"], r["k"], r["lo"], r["hi"]) for r in same} == {
                        group: (n, k, lo, hi) for group, (n, k, _, lo, hi) in wanted.items()
                    }


def settled_files(path: Path) -> list[Path]:
    return sorted((path / "events").rglob("*.parquet"))


def told(snap: Any, text: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in snap.sql(text).to_pylist()]


def declared(db: Any, name: str = "e") -> None:
    db.create_event_table(name, event_time="ts", columns={"ts": "timestamp", "g": "string", "v": "int64"})
    db.append(name, [{"ts": T0 + i * MINUTE, "g": f"g{i % 3}", "v": i} for i in range(100)])
    settle(db)


def settle(db: Any) -> None:
    db.consolidate()
    db.store.consolidator.flush()
    db.store.settle()
    db.store.consolidator.compact()
    db.store.settle()


def test_a_snapshot_sees_of_settled_files_what_it_saw_before(tmp_path: Path) -> None:
    """Its own commits, before the retraction, without the column that was added; and the files stay while it reads."""
    summed = "select count(*), sum(v), max(v) from e"
    with kivi.open(tmp_path / "data", background=False) as db:
        declared(db)
        with db.snapshot() as old:
            before = told(old, summed)
            assert before == [(100, 4950, 99)]
            db.append("e", [{"ts": T0 + i * MINUTE, "g": "late", "v": 1000} for i in range(50)])
            with db.transaction() as tx:
                assert tx.retract("e", where=kivi.col("v") < 10) == 10
            db.alter_table("e", add_columns={"w": "decimal(9,2)", "_cts": "string"})
            db.append("e", [{"ts": T0, "g": "new", "v": 5000, "w": 3, "_cts": "mine"}])
            settle(db)
            assert len(settled_files(tmp_path / "data")) > 1
            assert told(old, summed) == before
            with db.snapshot() as new:
                assert told(new, "select count(*), sum(v) from e") == [(141, 4950 - 45 + 50_000 + 5000)]
                added = told(new, "select w, _cts, count(*) from e group by all order by 1")
                assert added == [(3, "mine", 1), (None, None, 140)]
                after = told(new, f"select count(*), min(v) from e where _commit_ts > {old.ts}")
                assert after == [(51, 1000)]
                joined = "select count(*) from e a join e b on a.v = b.v where a.v between 10 and 50"
                assert told(new, joined) == [(41,)]


def test_a_text_reads_no_file_by_itself_its_own_tables_neither(tmp_path: Path) -> None:
    """Not past the conditions of its tables, and none of another table's."""
    with kivi.open(tmp_path / "data", background=False) as db:
        declared(db)
        declared(db, "other")
        with db.snapshot() as snap:
            assert told(snap, "select count(*) from e") == [(100,)]
            for file in settled_files(tmp_path / "data"):
                near, whole = os.path.relpath(file), file.read_bytes()
                for hostile in (
                    f"select * from e, read_parquet('{file}')", f"select * from e, '{file}'", f"from e, '{near}'",
                    f'from e, main."{file}"', f"from e, read_blob('{file}')", f"from e, parquet_metadata('{file}')",
                    f"from e, query('from ''{file}'' ')", f"from e, query_table('{file}')", f"describe '{file}'",
                    f"from e, (summarize '{file}')", f"with x as (from '{file}') from x, e", f"from e, glob('{file}')",
                    "from e, read_parquet(current_setting('allowed_paths'))", "from e, duckdb_views()",
                    f"select (select count(*) from '{file}') from e", f"from e where v in (select v from '{near}')",
                    f"from e, json_execute_serialized_sql(json_serialize_sql('from ''{file}'' '))",
                    f"with x as (copy (select 2) to '{file}' (use_tmp_file false)) select * from x, e",
                    f"with x as (copy e to '{file}' (format parquet, use_tmp_file false)) select * from x, e",
                    "with x as (insert into e values (1) returning *) select * from x",
                    "with x as (delete from e returning *) select * from x, e",
                ):  # fmt: skip
                    with pytest.raises(KiviError) as refused:
                        snap.sql(hostile)
                    assert isinstance(refused.value, InvalidArgument | NotFound), hostile
                    assert file.read_bytes() == whole, hostile


def test_a_damaged_settled_file_is_data_loss_that_names_it_in_sql_too(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data", background=False) as db:
        declared(db)
    file = max(settled_files(tmp_path / "data"), key=lambda file: file.stat().st_size)
    whole = file.read_bytes()
    for at in range(4, len(whole), len(whole) // 9):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with (
            kivi.open(tmp_path / "data", background=False) as db,
            db.snapshot() as snap,
            pytest.raises(DataLoss, match=file.name),
        ):
            snap.sql("select g, sum(v) from e where v > 3 group by all")
    file.write_bytes(whole)
    with kivi.open(tmp_path / "data", background=False) as db, db.snapshot() as snap:
        assert told(snap, "select sum(v) from e") == [(4950,)]
        file.unlink()  # after it was verified
        with pytest.raises(DataLoss, match=file.name):
            snap.sql("select sum(v) from e")


def test_files_that_settling_replaced_are_there_until_the_question_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with kivi.open(path, background=False) as db:
        declared(db)
        with db.snapshot() as snap, db.store.shared_events(snap._lease) as shared:
            (files,) = shared.of(db.store.table("e")).files
            with db.transaction() as tx:
                tx.retract("e", where=kivi.col("v") < 10)
            snap.close()
            settle(db)
            assert {str(file) for file in settled_files(path)} > set(files.paths)
        settle(db)
        assert set(files.paths) - {str(file) for file in settled_files(path)}
