"""Bloom filters of settled files: what pyarrow put into them is found, and row groups without a value stay closed."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kivi
from kivi.errors import DataLoss, InvalidArgument, SchemaError
from kivi.events import file_writing, settled_files
from kivi.events.bloom import BLOCK_BYTES, block_of, digest, has, plain_bytes
from kivi.events.settled_files import SettledFiles

T0 = 1_767_225_600_000_000


def test_digests_are_those_of_the_published_examples() -> None:
    """XXH64 with seed 0, of lengths that take every part of it."""
    assert digest(b"") == 0xEF46DB3751D8E999
    assert digest(b"a") == 0xD24EC4F1A98C6E5B
    assert digest(b"abc") == 0x44BC2CF5AD770999


@pytest.mark.parametrize("kind", ["string", "int64", "bytes"])
def test_what_pyarrow_put_into_a_filter_is_found_in_it(kind: str) -> None:
    rng = random.Random(kind)

    def value() -> Any:
        if kind == "int64":
            return rng.randrange(-(2**63), 2**63)
        word = "".join(rng.choice("abcö") for _ in range(rng.randrange(80)))
        return word if kind == "string" else word.encode()

    values = [value() for _ in range(3000)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"c": values}), sink, bloom_filter_options={"c": {"ndv": 3000, "fpp": 0.01}})
    column = pq.read_metadata(sink).row_group(0).column(0)
    stored = sink.getvalue()[column.bloom_filter_offset :][: column.bloom_filter_length]
    bits = stored[-(1 << (len(stored).bit_length() - 1)) :]

    def found(value: Any) -> bool:
        data = plain_bytes(value)
        assert data is not None
        known = digest(data)
        at = BLOCK_BYTES * block_of(known, len(bits) // BLOCK_BYTES)
        return has(bits[at : at + BLOCK_BYTES], known)

    assert all(map(found, values))
    others = [other for other in (value() for _ in range(3000)) if other not in set(values)]
    assert sum(map(found, others)) < 0.03 * len(others)


def test_values_without_a_plain_form_are_not_looked_for() -> None:
    assert [plain_bytes(value) for value in (1.5, True, None, 2**63, -(2**63) - 1)] == [None] * 5


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Row groups of 256 events, with a trace id each, a user in a hundred of them, and a host that all of them have."""
    for room in (file_writing, settled_files):
        monkeypatch.setattr(room, "GROUP_ROWS", 256)
    rng = random.Random(5)
    events = [
        {
            "ts": T0 + i,
            "trace": f"{rng.getrandbits(64):016x}",
            "user": rng.getrandbits(62),
            "host": f"h{i % 3}",
            "region": f"r{i // 1000}",
            "v": i,
        }
        for i in range(5000)
    ]
    with kivi.open(tmp_path / "data", background=False) as db:
        columns = {"trace": "string", "user": "int64", "host": "string", "region": "string", "v": "int64"}
        db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", **columns})
        db.append("calls", events)
        db.consolidate()
        db.store.settle()
        yield db, events


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    opened: list[int] = []
    read = SettledFiles.read

    def reading(files: Any, file: Any, group: Any, *args: Any, **options: Any) -> Any:
        opened.append(group.start)
        return read(files, file, group, *args, **options)

    monkeypatch.setattr(SettledFiles, "read", reading)
    return opened


def test_row_groups_without_a_value_are_not_opened(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    db, events = store
    opened = counted(monkeypatch)
    col = kivi.col
    some = events[3210]
    for where, at_most in (
        (col("trace") == some["trace"], 2),
        (col("trace").isin([some["trace"], events[4]["trace"], "none"]), 4),
        (col("trace") == "none of them", 1),
        ((col("trace") == some["trace"]) | (col("v") == 17), 3),
        (col("user") == some["user"], 2),
        (col("region") == "r3", 5),  # by its bounds
        (col("region") > "r4", 0),
        (col("host") == "h7", 0),
        ((col("host") == "h1") & (col("trace") == some["trace"]), 2),
    ):
        expected = [row["v"] for row in events if holds(where, row)]
        with db.snapshot() as snap:
            opened.clear()
            assert sorted(snap.to_arrow("calls", where=where, columns=["v"])["v"].to_pylist()) == expected
            assert len(opened) <= at_most, where
            n = snap.query("calls", where=where, measures={"n": kivi.count()}).to_arrow()["n"].to_pylist()
            assert n == [len(expected)]
            assert [row["v"] for row in snap.scan("calls", where=where)] == expected


def holds(where: Any, row: dict[str, Any]) -> bool:
    match where.op:
        case "and":
            return all(holds(arg, row) for arg in where.args)
        case "or":
            return any(holds(arg, row) for arg in where.args)
        case "isin":
            return row[where.column] in where.value
        case ">":
            return bool(row[where.column] > where.value)
    return bool(row[where.column] == where.value)


def test_an_index_is_a_filter_of_values_that_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (file_writing, settled_files):
        monkeypatch.setattr(room, "GROUP_ROWS", 256)
    opened = counted(monkeypatch)
    reads = []
    for index in ([], ["user"]):
        with kivi.open(tmp_path / f"data{len(index)}", background=False) as db:
            columns = {"ts": "timestamp", "user": "int64"}
            db.create_event_table("calls", event_time="ts", columns=columns, index=index)
            users = [1_000_000 * (i // 8 * 7919 % 997) for i in range(5000)]
            db.append("calls", [{"ts": T0 + i, "user": user} for i, user in enumerate(users)])
            db.consolidate()
            db.store.settle()
            assert db.describe("calls").get("index", []) == index
        with kivi.open(tmp_path / f"data{len(index)}", background=False) as db, db.snapshot() as snap:
            opened.clear()
            assert snap.to_arrow("calls", where=kivi.col("user") == users[77]).num_rows == users.count(users[77])
            reads.append(len(opened))
    assert reads[1] < reads[0] / 3
    with kivi.open() as db:
        for wrong in (["ts"], ["nowhere"]):
            with pytest.raises(SchemaError, match="index="):
                db.create_event_table("calls", event_time="ts", columns=columns, index=wrong)
        with pytest.raises(InvalidArgument, match="a list of names"):
            db.create_event_table("calls", event_time="ts", columns=columns, index=7)  # type: ignore[arg-type]
        db.create_event_table("calls", event_time="ts", columns=columns, index="user")
        assert db.describe("calls")["index"] == ["user"]


def test_no_byte_of_a_file_is_without_a_checksum(store: Any) -> None:
    db, _ = store
    files = db.store.event_tables.of(db.store.table("calls").id).parts[2]
    with db.store.event_tables.of(db.store.table("calls").id).view(db.watermark()) as view:
        for file in view.files:
            assert any(group.filters for group in file.groups)
            assert files.whole(file) == Path(files.place.named(file.number)).read_bytes()


def test_a_damaged_filter_is_data_loss_and_no_answer(store: Any) -> None:
    db, events = store
    place = db.store.event_tables.of(db.store.table("calls").id).parts[2].place
    with db.store.event_tables.of(db.store.table("calls").id).view(db.watermark()) as view:
        for file in view.files:
            path = Path(place.named(file.number))
            data = bytearray(path.read_bytes())
            for group in file.groups:
                for at, size, _ in group.filters.values():
                    data[at + size - 1] ^= 0xFF
            path.write_bytes(data)
    with db.snapshot() as snap, pytest.raises(DataLoss, match="parquet"):
        snap.to_arrow("calls", where=kivi.col("trace") == events[0]["trace"])


def test_manifests_from_before_there_were_filters_are_read(store: Any) -> None:
    db, _ = store
    with db.store.event_tables.of(db.store.table("calls").id).view(db.watermark()) as view:
        (file, *_) = view.files
    raw = json.loads(file.encode())
    raw["v"] = 1
    raw["file"][6] = [group[:-1] for group in raw["file"][6]]
    old = settled_files.decode_file(json.dumps(raw).encode())
    assert old.rows == file.rows and not any(group.filters for group in old.groups)
    assert settled_files.decode_file(file.encode()) == file


def test_a_long_span_is_answered_from_what_is_known_of_files(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    db, events = store
    opened = counted(monkeypatch)
    with db.snapshot() as snap:
        measures = {"n": kivi.count(), "total": kivi.sum("v"), "lo": kivi.min("v"), "hi": kivi.max("v")}
        found = snap.query("calls", measures=measures).to_arrow().to_pylist()
    values = [row["v"] for row in events]
    assert found == [{"n": 5000, "total": sum(values), "lo": 0, "hi": 4999}]
    assert not opened
