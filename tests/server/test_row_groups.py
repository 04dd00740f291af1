"""Scans of settled events: whole row groups travel as they are stored, and nobody can tell but by the time it takes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kivi
from kivi.arrow.parquet import footer_of
from kivi.client.pages import PageReader
from kivi.client.steps import Page
from kivi.errors import DataLoss
from kivi.wire.frames import padded
from kivi.wire.v1 import session_pb2 as pb
from kivi.wire.v1 import types_pb2
from tests.seeds import seeds
from tests.server.rawsession import RawSession
from tests.serverproc import ServerProcess
from tests.store.test_settling import COLUMNS, MINUTE, T0, append, files

TYPES = {**COLUMNS, "raw": "bytes", "y": "int64"}


class Counted:
    """How many events came in row groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        decoded = PageReader._decoded

        def counting(reader: PageReader, group: pb.RowGroup, bodies: Any) -> Any:
            self.rows += group.rows
            return decoded(reader, group, bodies)

        monkeypatch.setattr(PageReader, "_decoded", counting)

    def taken(self) -> int:
        rows, self.rows = self.rows, 0
        return rows


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def rows_of(db: Any, ts: int | None = None, **scan: Any) -> tuple[pa.Schema, Counter[tuple[Any, ...]]]:
    """The columns that a scan gives, and its rows, in no order."""
    with db.snapshot(as_of=ts) as snapshot:
        table = snapshot.to_arrow("calls", **scan)
    return table.schema, Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def some(rng: random.Random, first: int, rows: int) -> list[dict[str, Any]]:
    """Events, one in five of them late and nearly everything null now and then."""

    def or_null(value: Any) -> Any:
        return None if rng.random() < 0.05 else value

    return [
        {
            "ts": T0 + i * MINUTE - (rng.randrange(2_000) * MINUTE if rng.random() < 0.2 else 0),
            "k": i,
            "x": or_null(rng.uniform(-1e9, 1e9)),
            "d": or_null(rng.randrange(10_000)),
            "s": or_null(f"s{rng.randrange(5)}"),
            "b": or_null(rng.random() < 0.5),
            "raw": or_null(rng.randbytes(rng.randrange(20))),
            "y": or_null(rng.randrange(-5, 5)),
        }
        for i in range(first, first + rows)
    ]


@pytest.mark.parametrize("seed", seeds(2, night=20))
def test_r23_whatever_is_asked_at_any_snapshot_is_what_the_store_gives_in_process(
    tmp_path: Path, counted: Counted, seed: int
) -> None:
    """Late events, commits after the snapshot, a column that was added, predicates and bounds that cut row groups."""
    rng = random.Random(seed)
    asked: list[dict[str, Any]] = [{}, {"columns": ["x", "d", "s", "ts"]}]
    asked += [{"columns": rng.sample(list(TYPES), rng.randrange(1, 6))} for _ in range(3)]
    asked += [
        {"where": kivi.col("k") >= 0, "columns": ["s", "k"]},
        {"where": kivi.col("k") < 3_100, "columns": ["k", "raw"]},
        {"where": kivi.col("s") == "s2"},
        {"start": T0 + 500 * MINUTE, "end": T0 + 4_000 * MINUTE, "columns": ["y"]},
    ]
    expected = list[tuple[int, dict[str, Any], Any]]()
    with kivi.open(tmp_path / "data", background=False, block_rows=64) as db:
        db.create_event_table("calls", event_time="ts", columns=TYPES)
        for step in range(8):
            for _ in range(rng.randrange(1, 4)):
                events = some(rng, 1_000 * step, rng.randrange(20, 300))
                db.append("calls", [{**event, "added": step} for event in events] if step >= 4 else events)
                with db.snapshot() as snapshot:
                    at = snapshot.ts
                expected += [(at, one, rows_of(db, at, any_order=False, **one)) for one in asked]
            if step == 3:
                db.alter_table("calls", add_columns={"added": "int64"})
                asked += [{"columns": ["added", "k"]}, {"columns": ["added"]}]
            db.consolidate()
            if step < 7:
                db.store.settle(rng.choice([100, 1_000]))
    with ServerProcess(tmp_path / "data") as server, server.connect() as remote:
        for at, one, found in expected:
            assert rows_of(remote, at, **one) == found
        assert counted.taken() > 0


def test_r22_what_was_retracted_is_in_no_row_group_and_a_snapshot_of_before_has_it(
    tmp_path: Path, counted: Counted
) -> None:
    with kivi.open(tmp_path / "data", background=False, block_rows=64) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        for first in range(0, 600, 100):
            append(db, first, 100, late=0)
            db.store.settle()

    def seen(of: Any) -> list[int]:
        return sorted(of.to_arrow("calls", columns=["k"])["k"].to_pylist())

    every = list(range(600))
    with ServerProcess(tmp_path / "data") as server, server.connect() as remote, remote.snapshot() as before:
        assert seen(before) == every and counted.taken() == 600
        for gone in (110, 111, 350):
            with remote.transaction() as tx:
                tx.retract("calls", where=kivi.col("k") == gone)
                every.remove(gone)
                own = sorted(row["k"] for row in tx.scan("calls", columns=["k"]))
            assert own == every
            for consolidated in (False, True):
                if consolidated:
                    remote.consolidate()
                assert seen(before) == list(range(600)) and counted.taken() == 600
                with remote.snapshot() as after:
                    assert seen(after) == every
                    assert 0 < counted.taken() < 600 - 90 * (1 + (gone == 350))


ROWS = 300_000
"""Five row groups, in one file."""


@pytest.fixture
def many(tmp_path: Path) -> Iterator[ServerProcess]:
    k = np.arange(ROWS)
    events = pa.table(
        {
            "ts": pa.array(T0 + k * 1_000_000, pa.timestamp("us", "UTC")),
            "k": k,
            "x": np.sqrt(k),
            "s": pa.array([f"s{i % 7}" for i in range(ROWS)]),
        }
    )
    with kivi.open(tmp_path / "data", background=False) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        db.append("calls", events)
        db.consolidate()
        db.store.settle()
    with ServerProcess(tmp_path / "data") as server:
        yield server


def test_batches_of_row_groups_come_one_by_one_in_any_order_and_not_where_one_is_asked_for(
    many: ServerProcess, counted: Counted
) -> None:
    with many.connect() as db, db.snapshot() as snapshot:
        batches = list(snapshot.scan_batches("calls", columns=["s", "k"], any_order=True))
        assert counted.taken() == ROWS
        assert all(batch.schema.names == ["s", "k"] and batch.num_rows <= 65_536 for batch in batches)
        found = pa.Table.from_batches(batches)
        assert found["k"].to_pylist() == list(range(ROWS))
        assert found["s"].to_pylist() == [f"s{i % 7}" for i in range(ROWS)]
        next(snapshot.scan_batches("calls", any_order=True)).validate(full=True)
        assert counted.taken() == 65_536  # one that is asked for is one that is decoded
        for one in ({"any_order": False}, {"order_by": "-k"}, {"limit": ROWS}, {"offset": 1}, {"reverse": True}):
            left = ROWS - ("offset" in one)
            assert snapshot.to_arrow("calls", columns=["k"], **one).num_rows == left
            assert counted.taken() == 0
        where = kivi.col("k") < 100_000  # true of the first row group, and cuts the second
        assert snapshot.to_arrow("calls", columns=["k"], where=where)["k"].to_pylist() == list(range(100_000))
        assert counted.taken() == 65_536
        span = {"start": T0 + 1_000_000, "end": T0 + 200_000 * 1_000_000}
        assert snapshot.to_arrow("calls", columns=["k"], **span)["k"].to_pylist() == list(range(1, 200_000))
        assert counted.taken() == 2 * 65_536

        async def all_of() -> tuple[pa.Table, list[Any]]:
            async with await kivi.aio.connect(many.endpoint) as other, other.snapshot() as seen:
                batches = [batch async for batch in seen.scan_batches("calls", columns=["s", "k"], any_order=True)]
                return await seen.to_arrow("calls", columns=["s", "k"]), batches

        table, batches = asyncio.run(all_of())
        assert table == found and pa.Table.from_batches(batches) == found
        assert counted.taken() == 2 * ROWS


def scanned(raw: RawSession, **opening: Any) -> list[tuple[pb.ScanPage, bytes]]:
    """The pages of a scan of two columns."""
    spec = types_pb2.ScanSpec(table="calls", columns=["k", "b"], any_order=True)
    raw.send(
        pb.Request(txn=1, begin=pb.Begin()),
        pb.Request(id=1, txn=1, scan_open=pb.ScanOpen(spec=spec, page_rows=65_536, **opening)),
    )
    number, pages = 1, [(raw.reply(1).page, raw.pages[1])]
    while scan := pages[-1][0].scan:
        number += 1
        raw.send(pb.Request(id=number, txn=1, scan_next=pb.ScanNext(scan=scan)))
        pages.append((raw.reply(number).page, raw.pages[number]))
    return pages


def decoded(pages: list[tuple[pb.ScanPage, bytes]]) -> list[Any]:
    reader = PageReader()
    return [batch for page, body in pages for batch in reader.batches(Page(0, 0, body, (), row_groups=page.row_groups))]


def test_who_does_not_read_parquet_gets_arrow(many: ServerProcess) -> None:
    for accepts in (False, True):
        raw = RawSession(many.endpoint)
        pages = scanned(raw, row_groups=accepts)
        assert [bool(page.row_groups) for page, _ in pages] == [accepts] * len(pages)
        found = pa.Table.from_batches(decoded(pages))
        assert found["k"].to_pylist() == list(range(ROWS)) and found["b"].null_count == ROWS
        raw.close()
    groups = [group for page, _ in pages for group in page.row_groups]
    assert len({group.name for group in groups}) < len(groups)
    assert [group.name for group in groups if group.footer_bytes] == list(dict.fromkeys(group.name for group in groups))


def test_what_is_no_row_group_after_all_is_data_loss_that_names_the_file(many: ServerProcess) -> None:
    """Every byte of it, of which the server says that they are right: an error, or events that are well formed."""
    raw = RawSession(many.endpoint)
    ((page, body),) = scanned(raw, row_groups=True)
    raw.close()
    only = pb.ScanPage(row_groups=page.row_groups[:1])
    (group,) = only.row_groups
    assert group.name.endswith("of event table 'calls'")
    whole = bytearray(body[: padded(group.footer_bytes) + sum(map(padded, group.chunk_bytes))])
    assert decoded([(only, bytes(whole))])[0].num_rows == 65_536
    assert footer_of(memoryview(bytes(whole[: group.footer_bytes]))) == whole[: group.footer_bytes]
    lost = list[DataLoss]()
    chance = random.Random(4)
    for _ in range(300):
        at, spoilt = chance.randrange(len(whole)), bytearray(whole)
        spoilt[at] ^= 1 << chance.randrange(8)
        try:
            (batch,) = decoded([(only, bytes(spoilt))])
            batch.validate(full=True)
        except DataLoss as error:
            lost.append(error)
    assert len(lost) > 10
    assert all(error.details["path"] == group.name and group.name in str(error) for error in lost)
    for said in ({"rows": 65_535}, {"index": 5}, {"file_bytes": 100}, {"columns": [1, 77]}, {"columns": [1, 2]}):
        other = pb.RowGroup()
        other.CopyFrom(group)
        for name, value in said.items():
            if isinstance(value, list):
                del other.columns[:]
                other.columns.extend(value)
            else:
                setattr(other, name, value)
        with pytest.raises(DataLoss, match="cannot be read"):
            decoded([(pb.ScanPage(row_groups=[other]), bytes(whole))])


def test_a_damaged_file_is_data_loss_that_names_it_and_what_does_not_need_it_can_be_read(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "data", background=False, block_rows=64) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        for first in (0, 1_000):
            append(db, first, 100, late=0)
            db.store.settle()
        expected = rows_of(db, columns=["s"])
    file = files(tmp_path / "data")[0]
    data = bytearray(file.read_bytes())
    chunk = pq.read_metadata(file).row_group(0).column(list(COLUMNS).index("k"))
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    file.write_bytes(data)
    with ServerProcess(tmp_path / "data") as server, server.connect() as remote:
        for columns in (["k"], ["s", "k"], None):
            with pytest.raises(DataLoss, match=file.name) as caught:
                rows_of(remote, columns=columns)
            assert caught.value.details["path"] == str(file)
        assert rows_of(remote, columns=["s"]) == expected
        file.write_bytes(bytes(data[: len(data) // 2]))
        with pytest.raises(DataLoss, match=file.name):
            rows_of(remote, columns=["s"])
        later: dict[str, Any] = {"start": T0 + 1_000 * MINUTE, "columns": ["k"]}
        assert rows_of(remote, **later)[1] == Counter((k,) for k in range(1_000, 1_100))


def test_cold_row_groups_travel_and_an_object_that_is_gone_is_data_loss(tmp_path: Path, counted: Counted) -> None:
    cold = tmp_path / "cold"
    with kivi.open(tmp_path / "data", background=False, block_rows=64) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS, local="100m", cold=f"file://{cold}")
        for first in (0, 1_000):
            append(db, first, 100, late=0)
            db.store.settle()
        expected = rows_of(db)
        assert db.store.cooler.cool() > 0
    objects = list(cold.rglob("*.parquet"))
    with ServerProcess(tmp_path / "data") as server, server.connect() as remote:
        assert rows_of(remote) == expected
        assert counted.taken() == 200
        for away in objects:
            away.rename(away.with_suffix(".away"))
        assert rows_of(remote, columns=["k"])[1].total() == 200  # from the cache
    for cached in (tmp_path / "data" / "cold" / "cache").rglob("*"):
        if cached.is_file():
            cached.unlink()
    with ServerProcess(tmp_path / "data") as server, server.connect() as remote:
        with pytest.raises(DataLoss, match=cold.name):
            rows_of(remote)
        later: dict[str, Any] = {"start": T0 + 1_050 * MINUTE, "columns": ["k"]}
        assert rows_of(remote, **later)[1].total() == 50
