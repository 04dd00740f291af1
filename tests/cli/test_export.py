"""``kivi export``: what it writes is the table at the snapshot, for readers that know no kivi, whole or not at all."""

from __future__ import annotations

import datetime as dt
import errno
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import kivi
from kivi.cli.export import export
from kivi.errors import DataLoss, InvalidArgument

duckdb = pytest.importorskip("duckdb")
deltalake = pytest.importorskip("deltalake")
T0 = dt.datetime(2026, 2, 28, 22, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def db() -> Iterator[Any]:
    with kivi.open() as opened:
        columns = {"ts": "timestamp", "day": "string", "x": "int64", "price": "decimal(10,2)"}
        opened.create_event_table("calls", event_time="ts", columns=columns)
        opened.create_aggregate(
            "by_day",
            source="calls",
            group_by=["day"],
            measures={"n": kivi.count(), "latency": kivi.quantiles("x")},
            derived={"p50": "quantile(latency, 0.5)"},
        )
        opened.create_event_table("none", event_time="ts", columns={"ts": "timestamp"})
        for part in range(3):
            opened.append(
                "calls",
                [
                    {"ts": T0 + dt.timedelta(hours=i % 30), "day": f"d{i % 2}", "x": i, "price": Decimal(i) / 4}
                    for i in range(part * 50, part * 50 + 50)
                ],
            )
        yield opened


def rows(db: Any, table: str, as_of: int | None = None) -> list[Any]:
    with db.snapshot(as_of=as_of) as snap:
        return sorted(snap.to_arrow(table).to_pylist(), key=str)


@pytest.mark.parametrize("by", ["day", "none"])
@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_duckdb_reads_what_the_snapshot_sees(db: Any, tmp_path: Path, form: str, by: str) -> None:
    target = tmp_path / "deep" / "out"
    with db.snapshot() as snap:
        db.append("calls", [{"ts": T0, "day": "d0", "x": 10_000}])  # which it does not see
        said = export(snap, "calls", db.describe("calls"), str(target), format_=form, by=by)
        wanted = sorted(snap.to_arrow("calls").to_pylist(), key=str)
        assert said["rows"] == len(wanted)
        assert said["snapshot"] == snap.ts
    files = [str(path) for path in target.rglob("*.parquet")]
    assert said["files"] == len(files) and said["bytes"] == sum(map(os.path.getsize, files))
    days = {row["ts"].date() for row in wanted}
    assert {path.parent.name for path in target.rglob("*.parquet")} == (
        {f"_day={day}" for day in days} if by == "day" else {"out"}
    )
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        found = connection.sql(f"select ts, day, x, price from read_parquet({files})").to_arrow_table()
        assert sorted(found.to_pylist(), key=str) == wanted
    if form == "parquet":
        for file in files:
            metadata = pq.read_schema(file).metadata
            assert metadata[b"kivi.snapshot"] == str(said["snapshot"]).encode()
            assert metadata[b"kivi.table"] == b"calls"
        return
    table = deltalake.DeltaTable(str(target))
    assert table.history()[0]["kivi.snapshot"] == str(said["snapshot"])
    assert sorted(table.file_uris()) == sorted(files)
    read = table.to_pyarrow_table(columns=["ts", "day", "x", "price"])
    assert sorted(read.to_pylist(), key=str) == wanted
    protocol = table.protocol()  # of the first readers of Delta tables
    assert (protocol.min_reader_version, protocol.reader_features) == (1, None)
    dataset = table.to_pyarrow_dataset()  # which DuckDB reads with its filters pushed down
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.register("exported", dataset)
        where = f"where _day = date '{T0.date()}'" if by == "day" else f"where ts::date = date '{T0.date()}'"
        found = connection.sql(f"select ts, day, x, price from exported {where}").to_arrow_table()
    assert sorted(found.to_pylist(), key=str) == [row for row in wanted if row["ts"].date() == T0.date()]


def test_aggregates_and_tables_of_no_rows_have_their_columns(db: Any, tmp_path: Path) -> None:
    with db.snapshot() as snap:
        for table in ("by_day", "none"):
            for form in ("parquet", "delta"):
                export(snap, table, db.describe(table), str(tmp_path / table / form), format_=form)
            wanted = rows(db, table, snap.ts)
            delta = deltalake.DeltaTable(str(tmp_path / table / "delta")).to_pyarrow_table()
            for read in (pq.read_table(tmp_path / table / "parquet"), delta):
                assert sorted(read.to_pylist(), key=str) == wanted
                assert read.schema.names == snap.to_arrow(table).schema.names


def interrupted(rows: Any, folder: Path) -> None:
    (folder / "part-0.parquet").write_bytes(b"some")
    raise KeyboardInterrupt


def test_it_is_whole_or_not_there(db: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = db.describe("calls")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with db.snapshot() as snap:
        with pytest.raises(InvalidArgument, match="is there already"):
            export(snap, "calls", found, str(tmp_path / "full"))
        with pytest.raises(InvalidArgument, match="cannot write"):
            export(snap, "calls", found, str(tmp_path / "full" / "file" / "below"))
        with pytest.raises(InvalidArgument, match="no event table"):
            export(snap, "by_day", db.describe("by_day"), str(tmp_path / "new"), by="day")

        def damaged(table: str, any_order: bool) -> Any:
            yield from snap.to_arrow(table).to_batches()
            raise DataLoss("a block is damaged")

        class Broken:
            ts, dataset, scan_batches = snap.ts, snap.dataset, staticmethod(damaged)

        for form in ("parquet", "delta"):
            with pytest.raises(DataLoss, match="a block is damaged"):
                export(Broken(), "calls", found, str(tmp_path / "new"), format_=form)

        def full(path: Any) -> None:
            if Path(path) == tmp_path:  # the last one
                assert (tmp_path / "new").is_dir()
                raise OSError(errno.ENOSPC, "No space left on device")

        for error in (KeyboardInterrupt, InvalidArgument):
            with monkeypatch.context() as patched, pytest.raises(error):
                if error is KeyboardInterrupt:
                    patched.setattr("kivi.cli.export._parquet", interrupted)
                else:
                    patched.setattr("kivi.runtime.files.sync_directory", full)
                export(snap, "calls", found, str(tmp_path / "new"))
    assert sorted(os.listdir(tmp_path)) == ["full"]
    assert os.listdir(tmp_path / "full") == ["file"]
