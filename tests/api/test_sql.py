"""SQL over a snapshot equals brute force over what it sees (R24), and DuckDB sees that and nothing else."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import random
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kivi
from kivi.errors import InvalidArgument, KiviError, NotFound
from kivi.events.blocks import Blocks

T0 = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
COLUMNS = {"host": "string", "ts": "timestamp", "x": "int64", "f": "float64", "price": "decimal(10,2)", "ok": "bool"}


def events(rng: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "host": rng.choice([None, "", "h1", "h2", "ü'\"\0"]),
            "ts": T0 + dt.timedelta(seconds=rng.randrange(7200)),
            "x": rng.choice([None, rng.randrange(-50, 50), 2**62]),
            "f": rng.choice([None, -0.0, rng.random()]),
            "price": rng.choice([None, Decimal(rng.randrange(10_000)) / 100]),
            "ok": rng.choice([None, True, False]),
        }
        for _ in range(count)
    ]


def declare(db: Any) -> None:
    db.create_event_table("calls", event_time="ts", columns=COLUMNS)
    db.create_aggregate(
        "calls_5m",
        source="calls",
        group_by=["host", kivi.time_slot("ts", "5m", name="slot")],
        measures={"n": kivi.count(), "total": kivi.sum("price"), "latency": kivi.quantiles("price")},
        derived={"p99": "quantile(latency, 0.99)", "mean": "total / n"},
    )
    db.create_table(
        "hosts", key={"name": "string", "rack": "int64"}, columns={"owner": "string", "visits": kivi.sum("int64")}
    )


def one(db: Any, text: str, parameters: Any = None) -> list[Any]:
    with db.snapshot() as snap:
        return [tuple(row.values()) for row in snap.sql(text, parameters).to_pylist()]


def test_answers_equal_brute_force_at_every_snapshot_r24(db: Any) -> None:
    rng = random.Random(1)
    declare(db)
    known: list[dict[str, Any]] = []
    seen = []
    for count in (300, 40, 1):
        known += (more := [event for event in events(rng, count) if event["host"] is not None])
        seen.append((db.append("calls", more), list(known)))
        if count == 40:
            db.consolidate()
    for ts, visible in seen:
        with db.snapshot(as_of=ts) if ts != seen[0][0] else db.snapshot() as snap:
            visible = visible if ts != seen[0][0] else known
            groups = defaultdict(list)
            for event in visible:
                if event["x"] is None or event["x"] > -20:
                    groups[event["host"]].append(event)
            found = snap.sql(
                "select host, count(*) n, count(x) nx, sum(x) sx, min(price) lo, max(price) hi, sum(f) sf, "
                "max(ts) last from calls where x is null or x > $least group by all",
                {"least": -20},
            )
            assert found.schema.field("last").type.tz == "UTC"
            assert found.num_rows == len(groups)
            for row in found.to_pylist():
                group = groups[row["host"]]
                xs, prices = ([e[c] for e in group if e[c] is not None] for c in ("x", "price"))
                assert row["n"] == len(group)
                assert (row["nx"], row["sx"]) == (len(xs), sum(xs) if xs else None)
                assert (row["lo"], row["hi"]) == (min(prices, default=None), max(prices, default=None))
                assert (
                    row["sf"] == pytest.approx(sum(fs))
                    if (fs := [e["f"] for e in group if e["f"] is not None])
                    else True
                )
                assert row["last"] == max(e["ts"] for e in group)


def test_predicates_of_duckdb_select_what_they_would_without_pushing(db: Any) -> None:
    """Each condition over columns that are read through the snapshot, and over the same rows in an Arrow table."""
    duckdb = pytest.importorskip("duckdb")
    rng = random.Random(2)
    declare(db)
    db.append("calls", [event for event in events(rng, 500) if event["host"] is not None])
    conditions = [
        "x > 3", "x = 4611686018427387904", "x <> 5 or x is null", "not (x > 3)", "x in (1, 2, 3)", "x not in (1, 2)",
        "host = 'h1'", "host in ('h1', 'h2')", "host >= 'h'", "host like 'h%'", "host = ''", "host = 'ü''\"' || chr(0)",
        "ok", "not ok", "ok is null", "price = 1.5", "price >= 20 and price < 50.25", "f = 0", "f > 0.5 and x < 10",
        "x > 3.5", "x + 1 > 3", "ts >= timestamptz '2026-03-01 00:30:00Z'",
        "date_trunc('hour', ts) = '2026-03-01 01:00:00Z'",
        "ts between timestamptz '2026-03-01 00:10Z' and timestamptz '2026-03-01 00:20Z' and (host = 'h1' or x is null)",
        "x > (select avg(x) from calls where x < 50)", "false", "coalesce(x, 0) = 0",
        "x = -1 or host = 'h2' or f is null",
    ]  # fmt: skip
    with db.snapshot() as snap, duckdb.connect() as beside:
        beside.execute("set timezone = 'UTC'")
        beside.register("calls", snap.to_arrow("calls"))
        for condition in conditions:
            text = f"select host, x, f, price, ok, ts from calls where {condition} order by all"
            assert snap.sql(text).to_pylist() == beside.sql(text).to_arrow_table().to_pylist(), condition


def test_rows_and_aggregates_are_tables_like_others(db: Any) -> None:
    declare(db)
    with db.transaction() as tx:
        for rack in range(3):
            tx.insert("hosts", ("h1", rack), owner="ada", visits=rack)
        tx.insert("hosts", ("h2", 0), owner=None, visits=5)
    db.append("calls", [{"host": "h1", "ts": T0, "price": Decimal(i)} for i in range(1, 101)])
    assert one(db, "select owner, sum(visits) from hosts where name = 'h1' and rack >= 1 group by all") == [("ada", 3)]
    assert one(db, "select n, total, mean, slot from calls_5m") == [(100, Decimal("5050.00"), 50.5, T0)]
    ((p99,),) = one(db, "select p99 from calls_5m where host = 'h1' and p99 > 90")
    assert p99 == pytest.approx(99, rel=0.01)
    joined = "select rack, n from hosts join calls_5m on name = host where rack in (0, 2) order by rack desc"
    assert one(db, joined) == [(2, 100), (0, 100)]
    assert one(db, 'select count(*) from CALLS c join "calls_5m" a on c.host = a.host') == [(100,)]  # as SQL has it
    assert one(db, "with calls as (select 7 as n) select n from calls") == [(7,)]
    assert one(db, "from hosts select count(*) where owner = ?", ["nobody"]) == [(0,)]


def test_an_empty_answer_has_its_columns_and_a_long_one_all_its_rows(db: Any) -> None:
    declare(db)
    with db.snapshot() as snap:
        none = snap.sql("select host, x * 2 as twice from calls")
        assert (none.num_rows, none.schema.names) == (0, ["host", "twice"])
        many = snap.sql("select range as i, repeat('x', 40) as text from range(300000)")
        assert many.num_rows == 300_000
        assert many["i"].to_pylist() == list(range(300_000))


def test_errors_say_what_duckdb_says(db: Any) -> None:
    declare(db)
    with db.snapshot() as snap:
        with pytest.raises(InvalidArgument, match=r'"nope".*not found in FROM clause'):
            snap.sql("select nope from calls")
        with pytest.raises(InvalidArgument, match="syntax error at or near"):
            snap.sql("selct 1")
        with pytest.raises(NotFound, match="there is no table 'nowhere'"):
            snap.sql("select * from nowhere")
        with pytest.raises(InvalidArgument, match="Values were not provided"):
            snap.sql("select ?")
        for wrong in ("", "  ", None, 7):
            with pytest.raises(InvalidArgument, match="a question in SQL is a text"):
                snap.sql(wrong)
        for parameters in ("x", 3, [object()], {1: 2}):
            with pytest.raises(InvalidArgument, match="parameter"):
                snap.sql("select ?", parameters)
        assert snap.sql("select 1 as still").to_pylist() == [{"still": 1}]


def test_parameters_are_values_of_numpy_too(db: Any) -> None:
    values = [np.int64(-4), np.float64(0.5), np.bool_(True), np.str_("é")]
    assert one(db, "select ?, ?, ?, ?", values) == [(-4, 0.5, True, "é")]


secret = {"x": [42]}  # a variable of Python that a question would like to see

HOSTILE = [
    "select * from read_csv('{file}')", "select * from '{file}'", "select * from read_text('{file}')",
    "select * from read_blob('{file}')", "select * from glob('{folder}/*')", "select * from read_parquet('{file}')",
    "select * from parquet_metadata('{file}')", "select * from sniff_csv('{file}')", "from read_json('{file}')",
    "attach '{folder}/new.db'", "attach '{file}' as other", "copy calls to '{folder}/out.csv'",
    "copy (select 1) to '{folder}/out.csv'", "export database '{folder}/out'", "install httpfs", "load httpfs",
    "load '{file}'", "pragma database_list", "pragma memory_limit = '1TB'", "set memory_limit = '1TB'", "reset threads",
    "set enable_external_access = true", "set lock_configuration = false", "call pragma_version()", "checkpoint",
    "create table t (a int)", "create view v as select 1", "create macro m() as 1", "create secret (type s3)",
    "insert into calls values (1)", "update calls set x = 1", "delete from calls", "drop view calls", "vacuum", "begin",
    "prepare p as select 1", "use memory", "explain analyze select 1", "select 1; select 2",
    "select 1; drop view calls",
    "select * from secret", "select * from python_map_function((select 1))", "select getenv('HOME')",
    "select * from duckdb_secrets()", "select * from arrow_scan(1, 2, 3)", "select * from pandas_scan(1)",
    "select * from enable_logging()", "select * from query('select * from read_text(''{file}'')')",
    "select * from query_table('hosts')", "select * from query('select * from secret')", "from temp.hosts",
    "select * from json_execute_serialized_sql(json_serialize_sql('select * from read_text(''{file}'')'))",
]  # fmt: skip


def test_it_reaches_nothing_but_the_tables_that_it_names(db: Any, tmp_path: Path) -> None:
    declare(db)
    db.append("calls", [{"host": "h1", "ts": T0}])
    file = tmp_path / "passwords.csv"
    file.write_text("name,word\nada,kept-from-everybody\n")
    before = sorted(os.listdir(tmp_path))
    with db.snapshot() as snap:
        for hostile in HOSTILE:
            text = hostile.format(file=file, folder=tmp_path)
            with pytest.raises(KiviError) as refused:
                snap.sql(text)
            assert isinstance(refused.value, InvalidArgument | NotFound), text
            assert "kept-from-everybody" not in str(refused.value)
        assert sorted(os.listdir(tmp_path)) == before
        told = str(snap.sql("select name, value from duckdb_settings()").to_pylist())
        assert str(tmp_path) not in told
        listed = snap.sql("select table_name from information_schema.tables")["table_name"].to_pylist()
        assert sorted(listed) == ["calls", "calls_5m", "hosts"]
        assert snap.sql("select count(*) as n from calls").to_pylist() == [{"n": 1}]


def test_tables_leave_as_frames(db: Any) -> None:
    declare(db)
    db.append("calls", [{"host": "h1", "ts": T0 + dt.timedelta(seconds=i), "x": i} for i in range(5)])
    with db.snapshot() as snap:
        pandas = snap.to_pandas("calls", columns=["ts", "x"], where=kivi.col("x") >= 2, limit=2)
        assert pandas["x"].tolist() == [2, 3]
        assert pandas["ts"].tolist() == [T0 + dt.timedelta(seconds=i) for i in (2, 3)]
        polars = snap.to_polars("calls", columns=["ts", "x"], start=(T0 + dt.timedelta(seconds=3),))
        assert polars.rows() == [(T0 + dt.timedelta(seconds=i), i) for i in (3, 4)]


def off_the_loop(db: Any, work: Any) -> Any:
    """Of the client for asyncio the loop runs meanwhile, as it does in a program."""
    if not hasattr(db, "_loop"):
        return work()
    return db._loop.run_until_complete(asyncio.to_thread(work))


def test_datasets_are_read_lazily_by_duckdb_and_polars(db: Any) -> None:
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    declare(db)
    db.append("calls", [{"host": f"h{i % 3}", "ts": T0 + dt.timedelta(seconds=i), "x": i} for i in range(90)])
    with db.snapshot() as snap, duckdb.connect() as connection:
        relation = snap.relation("calls", connection)
        late = off_the_loop(
            db, lambda: relation.filter("x >= 60 and host = 'h1'").aggregate("count(*), sum(x)").fetchall()
        )
        assert late == [(10, sum(range(61, 90, 3)))]
        frame = (
            kivi.polars.scan(snap, "calls")
            if not hasattr(db, "_loop")
            else polars.scan_pyarrow_dataset(snap.dataset("calls"))
        )
        query = frame.filter((polars.col("x") >= 60) & (polars.col("host") == "h1")).select("x", "ts")
        assert off_the_loop(db, query.collect)["x"].to_list() == list(range(61, 90, 3))
        assert off_the_loop(db, frame.head(2).collect).height == 2
    with pytest.raises(KiviError):
        off_the_loop(db, snap.dataset("calls").to_table)  # of a snapshot that has ended


def test_when_events_arrived_is_a_hidden_column(db: Any) -> None:
    """In SQL where a statement names it, in scans and frames where a caller does; and it prunes."""
    declare(db)
    stamps = [
        db.append("calls", [{"host": "h1", "ts": T0 - dt.timedelta(days=i), "x": i} for _ in range(3)])
        for i in range(4)
    ]
    db.consolidate()
    stamps.append(db.append("calls", [{"host": "h1", "ts": T0, "x": 4}]))
    with db.snapshot() as snap:
        assert "_commit_ts" not in snap.sql("select * from calls").column_names
        found = snap.sql(
            "select _commit_ts, x, count(*) as n from calls where _commit_ts > ? group by all order by 1", [stamps[1]]
        )
        assert [tuple(row.values()) for row in found.to_pylist()] == [
            (stamps[2], 2, 3),
            (stamps[3], 3, 3),
            (stamps[4], 4, 1),
        ]
        arrived = snap.to_arrow(
            "calls", columns=["x", "_commit_ts", "_commit_time"], where=kivi.col("_commit_ts") >= stamps[3]
        )
        assert arrived["_commit_ts"].to_pylist() == [stamps[3]] * 3 + [stamps[4]]
        moment = arrived["_commit_time"].to_pylist()[-1]
        assert abs((dt.datetime.now(dt.UTC) - moment).total_seconds()) < 60
        late = snap.sql("select x from calls where _commit_time >= $at", {"at": moment}).to_pylist()
        assert late[-1] == {"x": 4}
        rows = list(snap.scan("calls", order_by="-_commit_ts", columns=["x"], limit=1))
        assert rows == [{"x": 4}]
        for wrong in ({"reverse": True}, {"columns": ["_retracted"]}):
            with pytest.raises(InvalidArgument):
                list(snap.scan("calls", **{"columns": ["_commit_ts"], **wrong}))
        with pytest.raises(KiviError):
            list(snap.changes("calls", since=0, columns=["_commit_time"]))
        with pytest.raises(InvalidArgument, match="_commit_ts"):
            snap.sql("select _commit_ts from hosts")
    with db.transaction() as tx:
        named = [row["_commit_ts"] for row in tx.scan("calls", columns=["_commit_ts"])]
        assert sorted(set(named)) == stamps
        tx.put("hosts", ("h1", 1), owner="o")
        assert [row["_commit_ts"] for row in tx.scan("calls", columns=["_commit_ts"])] == named
        tx.append("calls", [{"host": "h1", "ts": T0, "x": 9}])
        with pytest.raises(InvalidArgument, match="_commit_ts"):  # its own events have none yet
            list(tx.scan("calls", columns=["_commit_ts"]))


def test_a_question_opens_no_block_that_its_conditions_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kivi.open(tmp_path / "data", block_rows=100, background=False) as db:
        declare(db)
        for hour in range(20):
            db.append("calls", [{"host": "h1", "ts": T0 + dt.timedelta(hours=hour), "x": hour} for _ in range(100)])
        db.consolidate()
        stamp = db.watermark()
        db.append("calls", [{"host": "h2", "ts": T0, "x": 99} for _ in range(100)])
        db.consolidate()
        opened: list[Any] = []
        read = Blocks.read

        def counted(base: Any, block: Any, columns: list[str]) -> Any:
            opened.append(block)
            return read(base, block, columns)

        monkeypatch.setattr(Blocks, "read", counted)
        for text, blocks in (
            ("select sum(x) from calls where ts >= timestamptz '2026-03-01 18:30Z'", 1),
            ("select sum(x) from calls where x = 7", 1),
            (f"select sum(x) from calls where _commit_ts > {stamp}", 1),
            ("select sum(x) from calls where x in (3, 4)", 2),
            ("select sum(x) from calls", 21),
        ):
            opened.clear()
            assert len(one(db, text)) == 1
            assert len(opened) <= blocks, text


def settled(db: Any, table: str, rows: list[dict[str, Any]]) -> None:
    db.append(table, rows)
    db.consolidate()
    db.store.settle()


def test_a_directory_that_is_called_like_a_partition_is_none(tmp_path: Path) -> None:
    """DuckDB would take ``v=7`` in a path for the value of a column."""
    (tmp_path / "v=7").mkdir()
    with kivi.open(tmp_path / "v=7" / "store") as db:
        db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", "v": "int64"})
        settled(db, "e", [{"ts": i, "v": i} for i in range(300)])
        with db.snapshot() as snap:
            assert snap.sql("select count(distinct v) as n, max(v) as m from e").to_pylist() == [{"n": 300, "m": 299}]
            assert snap.sql("select * from e limit 1").column_names == ["ts", "v"]


@pytest.mark.parametrize("name", ["_CTS", "_Cts", "_pos", "_POS", "_cts"])
def test_a_column_that_is_called_like_one_of_a_file(tmp_path: Path, name: str) -> None:
    with kivi.open(tmp_path / "store") as db:
        db.create_event_table("e", event_time="ts", columns={"ts": "timestamp", name: "int64"})
        db.append("e", [{"ts": 2 * i, name: 10**9 + i} for i in range(300)])
        with db.snapshot() as snap:
            settled(db, "e", [{"ts": 2 * i + 1, name: 0} for i in range(300)])
            assert snap.sql(f'select count(*) as n, min("{name}") as m from e').to_pylist() == [{"n": 300, "m": 10**9}]


@pytest.mark.parametrize("is_settled", [False, True])
def test_tables_in_two_spellings(tmp_path: Path, is_settled: bool) -> None:
    with kivi.open(tmp_path / "store") as db:
        for name, rows in (("a", 3), ("A", 5), ("b", 2)):
            db.create_event_table(name, event_time="ts", columns={"ts": "timestamp"})
            db.append(name, [{"ts": i} for i in range(rows)])
        db.consolidate()
        if is_settled:
            db.store.settle()
        with db.snapshot() as snap:
            assert snap.sql('select count(*) as n from "A"').to_pylist() == [{"n": 5}]
            assert snap.sql("select count(*) as n from b, B as c").to_pylist() == [{"n": 4}]
            with pytest.raises(InvalidArgument, match="does not tell 'A' from 'a'"):
                snap.sql('select (select count(*) from a) as x, (select count(*) from "A") as y')


def test_a_statement_is_told_which_tables_and_columns_there_are(db: Any) -> None:
    declare(db)
    with db.snapshot() as snap:
        assert [row["name"] for row in snap.sql("show tables").to_pylist()] == ["calls", "calls_5m", "hosts"]
        listed = "select column_name, data_type from information_schema.columns where table_name = ? order by all"
        assert snap.sql(listed, ["hosts"]).to_pylist() == [
            {"column_name": "name", "data_type": "VARCHAR"},
            {"column_name": "owner", "data_type": "VARCHAR"},
            {"column_name": "rack", "data_type": "BIGINT"},
            {"column_name": "visits", "data_type": "BIGINT"},
        ]
        names = {row["table_name"] for row in snap.sql("select table_name from duckdb_tables()").to_pylist()}
        assert names == {"calls", "calls_5m", "hosts"}
        for made_up in ('"calls in memory and blocks"', '"calls: what no file has"', '"listed:"'):
            with pytest.raises(NotFound):
                snap.sql(f"select count(*) from {made_up}, calls")


def test_tables_are_found_where_the_lists_say_that_they_are(db: Any) -> None:
    declare(db)
    db.append("calls", [{"host": f"h{i % 2}", "ts": T0, "x": i} for i in range(6)])
    with db.snapshot() as snap:
        places = snap.sql("select table_catalog, table_schema, table_name from information_schema.tables").to_pylist()
        assert {tuple(row.values()) for row in places} == {
            ("memory", "main", name) for name in ("calls", "calls_5m", "hosts")
        }
        for place in ("main.calls", "memory.main.calls", "memory.calls", "MAIN.Calls", "calls", "main.calls as calls"):
            # not the empty table that is listed, in a statement that lists; nor what else has this name
            text = f"select (select count(*) from {place} where x > 1) as n, (select count(*) from show_them) as m"
            listing = f"with show_them as (from information_schema.tables) {text}"
            assert snap.sql(listing).to_pylist()[0]["n"] == 4, place
        assert snap.sql("select count(*) as n from hosts, information_schema.tables").to_pylist() == [{"n": 0}]
        listed = (
            "select table_name from information_schema.tables where 'h0' in (select host from main.calls) order by 1"
        )
        assert snap.sql(listed)["table_name"].to_pylist() == ["calls", "calls_5m", "hosts"]
        both = "with calls as (select 7 as x) select sum(c.x) as c, max(calls.x) as x from main.calls c, calls"
        assert snap.sql(both).to_pylist() == [{"c": Decimal(15), "x": 7}]
        assert snap.sql("select max(main.calls.x) as x from main.calls").to_pylist() == [{"x": 5}]
        for nowhere in ("main.nowhere", "memory.main.nowhere", "main.secret"):
            with pytest.raises(NotFound):
                snap.sql(f"select * from {nowhere}")


def test_functions_of_states_are_those_of_kivi(db: Any) -> None:
    declare(db)
    db.append("calls", [{**each, "host": each["host"] or ""} for each in events(random.Random(2), 400)])
    with db.snapshot() as snap:
        found = snap.sql(
            'select /* ü */ host, slot, p99, quantile(latency, 0.99) as same, a.slot as "ü", '
            "Fraction_Below(a.LATENCY, 50), count(latency) over () as n "
            "from calls_5m a where quantile(latency, 0.5) > $least order by host, slot",
            {"least": 20.0},
        )
        rows = [row for row in snap.scan("calls_5m") if (row["latency"].quantile(0.5) or 0) > 20]
        assert found["same"].to_pylist() == found["p99"].to_pylist() == [row["p99"] for row in rows]
        below = [row["latency"].fraction_below(50) for row in rows]
        assert found["fraction_below(latency, 50)"].to_pylist() == below and len(set(below)) > 1
        assert set(found["n"].to_pylist()) == {len(rows)}
        grouped = "select host, max(quantile(latency, 0.9)) as most from calls_5m group by host order by host"
        most = {
            host: max(r["latency"].quantile(0.9) or 0 for r in snap.scan("calls_5m") if r["host"] == host)
            for host in {row["host"] for row in snap.scan("calls_5m")}
        }
        assert {row["host"]: row["most"] for row in snap.sql(grouped).to_pylist()} == most
        for wrong in ("max(latency)", "quantile_cont(latency, 0.5)", "quantile(latency, x)", "hex(a.latency)"):
            with pytest.raises(InvalidArgument, match="state of a measure"):
                snap.sql(f"select {wrong} from calls_5m a, (select 0.5 as x)")
        with pytest.raises(KiviError, match="quantile"):
            snap.sql("select quantile(latency, 7) from calls_5m")
        renamed = "with a as (select p99 as latency from calls_5m) select max(latency) as most from a"
        assert snap.sql(renamed)["most"].to_pylist() == [max(row["p99"] or 0 for row in snap.scan("calls_5m"))]


def states_of(db: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of ``calls_5m``, whose ``latency`` is a state, and of ``raw``, where it is a number."""
    declare(db)
    db.create_table("raw", key={"host": "string"}, columns={"latency": "float64"})
    db.append("calls", [{**each, "host": each["host"] or ""} for each in events(random.Random(3), 400)])
    with db.transaction() as tx:
        for i, host in enumerate(("", "h1", "h2")):
            tx.put("raw", (host,), latency=i + 0.5)
    with db.snapshot() as snap:
        return list(snap.scan("calls_5m")), list(snap.scan("raw"))


def test_what_is_called_like_a_state_and_what_is_one(db: Any) -> None:
    """Aliases, tables and subqueries that have the name, against the rows themselves."""
    rows, raw = states_of(db)
    of = {host: [row for row in rows if row["host"] == host] for host in {row["host"] for row in rows}}
    high = {host: max(row["latency"].quantile(0.9) or 0 for row in each) for host, each in of.items()}
    numbers = {row["host"]: row["latency"] for row in raw}
    both = sorted(
        ((host, row["latency"].quantile(0.5), numbers[host]) for host in numbers for row in of[host]),
        key=lambda found: (found[0], found[1] is None, found[1] or 0),
    )
    first = [row["latency"].quantile(0.9) for row in rows[:3]]
    for text, expected in (
        ("select host, max(quantile(latency, 0.9)) as latency from calls_5m group by host having latency >= 0 "
         "order by latency, host", sorted(high.items(), key=lambda found: (found[1], found[0]))),
        ("select quantile(latency, 0.9) as latency from calls_5m order by host, slot limit 3", [(x,) for x in first]),
        ("select a.host, quantile(a.latency, 0.5), b.latency from calls_5m a join raw b using (host) order by all",
         both),
        ("select host, quantile(latency, 0.5) from raw group by all order by all", sorted(numbers.items())),
        ("select max(latency) from raw where exists (select latency from calls_5m)", [(2.5,)]),
        ("select (select max(latency) from raw) from calls_5m limit 1", [(2.5,)]),
        ("select max(quantile(c.latency, 0.9)) over (), count(c.latency) over () from main.calls_5m c limit 1",
         [(max(high.values()), len(rows))]),
        ("select max(quantile(latency, 0.9)) filter (where host = 'h1') from calls_5m", [(high["h1"],)]),
        ("select h, max(quantile(many, .9)) from calls_5m as c(h, s, n, t, many) group by h order by h",
         sorted(high.items())),
        ("with c as (select host as h, quantile(latency, 0.9) as latency from calls_5m) "
         "select h, max(latency) from c group by h order by h", sorted(high.items())),
        ("select count(*) from calls_5m where latency is not null", [(len(rows),)]),
        ("select list_transform([1, 2], lambda latency: latency + n - n) from calls_5m limit 1", [([1, 2],)]),
        ("select distinct [latency * 2 for latency in [1]] from calls_5m", [([2],)]),
        ("with calls_5m as (select 3 as latency) select max(latency), quantile(latency, 0.5) from calls_5m", [(3, 3)]),
        ("with calls_5m as (from calls_5m) select count(latency) from calls_5m order by 1", [(len(rows),)]),
        ("select n as latency from calls_5m where n > 0 order by 1 desc limit 1", [(max(row["n"] for row in rows),)]),
        ("select max(z) from (select latency as y, n as z from calls_5m)", [(max(row["n"] for row in rows),)]),
        ("select host, p99, q from (select *, quantile(latency, 0.99) as q from calls_5m) where p99 is distinct from q",
         []),
    ):  # fmt: skip
        assert one(db, text) == expected, text


def test_a_star_has_no_column_that_a_function_of_a_state_needs(db: Any) -> None:
    rows, _ = states_of(db)
    names = ["host", "slot", "n", "total", "latency", "p99", "mean"]
    with db.snapshot() as snap:
        for text, more in (
            ("select *, quantile(latency, 0.5) as q from calls_5m", ["q"]),
            ("select c.*, quantile(c.latency, 0.5) as q from calls_5m c", ["q"]),
            ("from calls_5m where fraction_below(latency, 50) >= 0 or true", []),
            ("with c as (from calls_5m) select * from c where exists "
             "(from calls_5m where quantile(latency, 0.5) > 0)", []),
        ):  # fmt: skip
            found = snap.sql(text)
            assert (found.column_names, found.num_rows) == ([*names, *more], len(rows)), text
        found = snap.sql("select * exclude (n, latency) rename (p99 as x) from calls_5m where quantile(latency, 0) < 0")
        assert found.column_names == ["host", "slot", "total", "x", "mean"]


REFUSED = [
    "max(latency)", "max(latency) over ()", "max(n) over (order by latency)", "quantile(latency, 0.5) over ()",
    "quantile(latency, 0.5) filter (where n > 3)", "quantile(distinct latency, 0.5)", "quantile(latency, '0.5')",
    "quantile(latency, 0.5 order by n)", "count(distinct latency)", "count(n order by latency)",
    "latency::varchar", "concat('x', latency)", "latency || 'x'", "latency = latency", "latency in (p99)",
    "max(case when n > 1 then latency end)", "max(coalesce(latency, latency))", "max(columns(*))", "columns('l.*')",
    "* like 'l%'", "max(c)", "max(#5)", "max((select latency from calls_5m limit 1))", "[latency]", "{'a': latency}",
    "latency.max()", "c.latency.max()", "latency.quantile(0.5)", "quantile(latency, ?)", "any_value(latency)",
    "list_transform([1], lambda x: latency)", "[latency for x in [1]]", "latency[1]", "latency as z, max(z) over ()",
    "quantile(coalesce(latency, latency), 0.5)", "n in (select latency from calls_5m)",
]  # fmt: skip
REFUSED_WHOLE = [
    "select max(latency) as latency from calls_5m", "select max(x) from (select latency as x from calls_5m)",
    "select max(x) from (select latency from calls_5m) as c(x)", "with c as (from calls_5m) select max(latency) from c",
    "with c(x) as (select latency from calls_5m) select max(x) from c", "summarize calls_5m",
    "select max(latency) from (select latency from calls_5m union all select null)",
    "select max(latency) from (select null as latency union by name select latency from calls_5m)",
    "with recursive r(x) as (select null::blob union all select latency from calls_5m, r where false) "
    "select max(x) from r", "select * from calls_5m a natural join calls_5m b",
    "select n from calls_5m a join calls_5m b using (latency)", "from calls_5m pivot (sum(n) for host in ('h1'))",
    "select * from calls_5m order by latency", "select latency from calls_5m order by 1 desc",
    "select n as latency from calls_5m order by max(latency)",
    "select host, max(n) as latency from calls_5m group by host having max(latency) > 1",
    "select quantile(latency, 0.5) from (from calls_5m)", "select max(latency) from calls_5m a, raw b",
    "select max(a.latency) from calls_5m a, raw b", "select max(x) from calls_5m c, lateral (select c.latency as x)",
    "select (select max(c.latency)) from calls_5m c",
    "select max(x) from (values ((select latency from calls_5m))) v(x)",
]  # fmt: skip


def test_whatever_would_look_into_a_state_is_refused(db: Any) -> None:
    states_of(db)
    with db.snapshot() as snap:
        for text in [f"select {wrong} from calls_5m c" for wrong in REFUSED] + REFUSED_WHOLE:
            with pytest.raises(InvalidArgument, match=r"state of a measure|number of each row|comes out of a subquery"):
                pytest.fail(f"{text}: {snap.sql(text).to_pylist()[:2]}")
