"""Rows that are kept for those who look them up: what they give is what a read gives, and they take bounded room."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kivi
from kivi.encoding.base_rows import FieldRows, RowLayout
from kivi.encoding.keys import encode_key_columns
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease
from kivi.store import known_rows
from kivi.store.known_rows import KnownRows

SLOT_US = 10
COLUMNS = {"k": "int64", "ts": "timestamp", "x": "int64"}


def declare(db: Any, **options: Any) -> None:
    db.create_event_table("e", event_time="ts", columns=COLUMNS)
    slot = kivi.time_slot("ts", SLOT_US, name="slot")
    db.create_aggregate("slots", source="e", group_by=["k", slot], measures={"s": kivi.sum("x")}, **options)


def keys_of(schema: TableSchema, *columns: Iterable[int]) -> pa.LargeBinaryArray:
    return encode_key_columns([column.type for column in schema.key], [pa.array([*c], pa.int64()) for c in columns])


def check(known: KnownRows, store: Any, lease: Lease, schema: TableSchema, keys: pa.LargeBinaryArray) -> None:
    """What is known is what a read gives."""
    layout = RowLayout.of(schema)
    with known.lock:
        found = layout.bytes_of(known.rows(lease, schema, keys))
    there = [layout.decode(row).cells if RowLayout.is_alive(row) else None for row in found]
    read = store.reader.get(lease, schema, keys.to_pylist())
    assert there == [None if version is None else version.cells for version in read]


@pytest.mark.parametrize("most", [20, 100, 1 << 18])
@pytest.mark.parametrize("is_large", [False, True], ids=["scanned", "read"])
@pytest.mark.parametrize("seed", range(4))
def test_r25_what_is_known_is_what_a_read_gives_while_names_and_slots_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, is_large: bool, most: int
) -> None:
    """The grid grows, and its places move, between rows of old slots and of new ones, known and not."""
    monkeypatch.setattr(known_rows, "_KEYS_MIN", 1)
    rng = random.Random(seed)
    with kivi.open(tmp_path / "db", background=False) as db:
        declare(db)
        store, schema = db.store, db.store.table("slots")
        layout, judging = RowLayout.of(schema), db.store.commits.judging
        known = KnownRows(store.pending, judging.reader, lambda: store.log.last, most)
        names, newest, stood = 5, 0, 0
        for step in range(40):
            names, newest = names + rng.choice([0, 0, 1, 5]), newest + rng.randrange(2)
            backs = [0, 0, 0, 1, *range(12)]
            events = [
                {"k": rng.randrange(names), "ts": SLOT_US * max(0, newest - rng.choice(backs)), "x": rng.randrange(9)}
                for _ in range(rng.choice([1, 3, 20]))
            ]
            db.append("e", events)
            if is_large and step == 3:
                for followed in known._followed.values():
                    followed.forget()
                    followed.is_large = True
            asked = {(rng.randrange(names + 2), SLOT_US * max(0, newest - rng.choice(backs))) for _ in range(30)}
            lease = store.leases.open()
            check(known, store, lease, schema, keys_of(schema, *zip(*sorted(asked), strict=True)))
            for _ in range(3):
                slot = SLOT_US * max(0, newest - rng.choice([0, 1, 1, 2]))
                keys = keys_of(schema, range(names + 2), [newest * SLOT_US] * (names + 2))
                with known.lock:
                    standing = known.standing(lease, schema, keys, np.array([slot]))
                if standing is not None:
                    rows = layout.bytes_of(standing[0].rows)
                    mine = [rows[i] if i < len(rows) else b"" for i in standing[1].tolist()]
                    there = [layout.decode(row).cells if row and RowLayout.is_alive(row) else None for row in mine]
                    wanted = known_rows.of_slots(schema, keys, np.array([slot])).to_pylist()
                    read = store.reader.get(lease, schema, wanted)
                    assert there == [None if version is None else version.cells for version in read]
                    stood += 1
            store.leases.release(lease)
        assert stood > 10 or is_large or most < 1 << 18


def test_keys_of_many_names_and_many_slots_take_no_more_places_than_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_rows, "_ROWS_MAX", 1_000)
    rows, most = 200, list[int]()
    room = known_rows._Grid._make_room

    def noted(grid: Any, kept: Any, numbers: Any, width: int, blocks: int) -> None:
        most.append(width * blocks)
        room(grid, kept, numbers, width, blocks)

    monkeypatch.setattr(known_rows._Grid, "_make_room", noted)
    with kivi.open(tmp_path / "db", background=False) as db:
        declare(db)
        db.create_event_table("over", event_time="ts", columns=COLUMNS)
        before = kivi.previous_slot("slots", by=["k"])
        db.create_rule("over", source="e", against=before, where=kivi.col("x") > kivi.ref("s"), into="over")
        for turn in range(3):  # first they are scanned, then they come with commits; each has a slot of its own
            events = [{"k": turn * rows + i, "ts": (i + 1) * SLOT_US, "x": 1} for i in range(rows)]
            db.append("e", events)
            db.append("e", [{**event, "ts": event["ts"] + SLOT_US, "x": 2} for event in events])
            with db.snapshot() as snapshot:
                assert len(list(snapshot.scan("over"))) == (turn + 1) * rows
    assert max(most) <= 12 * 1_000  # twice as many places as asked for, and each side grows ahead of need


def test_a_name_that_has_a_number_and_no_place_is_not_kept(tmp_path: Path) -> None:
    """All of its slots are older than those that are known: the place that it would have is another name's."""
    with kivi.open(tmp_path / "db", background=False) as db:
        declare(db)
        layout = RowLayout.of(db.store.table("slots"))
    grid = known_rows._Grid(layout)
    slots = np.array([0, SLOT_US])
    for slot in slots:
        at = grid.added(grid.index.add(pa.array([b"a", b"b"], pa.large_binary())), np.full(2, slot))
        grid.is_known[at] = True
        for place, stamp in zip(at.tolist(), (1, 2), strict=True):
            row = FieldRows.none(layout.dtype, 1)
            row["cts"][:] = stamp + slot
            grid.rows.put(np.array([place]), row)
    late = [b"c%d" % i for i in range(3 * grid._width)]
    grid.index.add(pa.array(late, pa.large_binary()))
    assert grid.keep_newest(2) == SLOT_US
    assert grid.index.last == 2
    for name, stamp in ((b"a", 1), (b"b", 2)):
        numbers = grid.index.find(pa.array([name], pa.large_binary()))
        (place,) = grid.places(numbers, np.array([SLOT_US]))
        assert place and grid.rows["cts"][place] == stamp + SLOT_US


def test_one_row_that_is_read_may_be_one_of_a_slot_that_is_forgotten(tmp_path: Path) -> None:
    with kivi.open(tmp_path / "db", background=False) as db:
        declare(db, retention="1h")
        db.create_event_table("over", event_time="ts", columns=COLUMNS)
        before = kivi.previous_slot("slots", by=["k"])
        db.create_rule("over", source="e", against=before, where=kivi.col("x") > kivi.ref("s"), into="over")
        db.append("e", [{"k": 1, "ts": SLOT_US, "x": 1}])
        db.append("e", [{"k": 1, "ts": 5 * SLOT_US, "x": 1}])
        db.store.retention.set_floor(db.store.table("slots"), 3 * SLOT_US)
        db.append("e", [{"k": 1, "ts": 6 * SLOT_US, "x": 2}])
        with db.snapshot() as snapshot:
            assert len(list(snapshot.scan("over"))) == 1


def test_r25_late_events_of_new_names_change_no_row_of_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are followed by whoever did not judge them, and are all of slots that are not known whole: their names have
    numbers, for which there is no room in the grid."""
    monkeypatch.setattr(known_rows, "_KEYS_MIN", 1)
    with kivi.open(tmp_path / "db", background=False) as db:
        declare(db)
        store, schema = db.store, db.store.table("slots")
        known = KnownRows(store.pending, store.commits.judging.reader, lambda: store.log.last, 2_000)

        def check_slot(names: range, slot: int) -> None:
            lease = store.leases.open()
            check(known, store, lease, schema, keys_of(schema, names, [slot] * len(names)))
            store.leases.release(lease)

        newest, old = 59 * SLOT_US, 5 * SLOT_US
        db.append("e", [{"k": k, "ts": SLOT_US * slot, "x": 1 + k} for slot in range(60) for k in range(60)])
        check_slot(range(60), newest)
        check_slot(range(20), old)
        (followed,) = known._followed.values()
        assert followed.whole_from is not None and old < followed.whole_from < newest
        db.append("e", [{"k": k, "ts": old, "x": 1_000 + k} for k in range(100, 130)])
        for slot in (newest, newest - 2 * SLOT_US, old):
            check_slot(range(130), slot)


def test_rows_in_fields_are_a_copy() -> None:
    rows = np.frombuffer(bytes(9), [("cts", "<u8"), ("flags", "u1")])
    fields = FieldRows.of(rows)
    fields.put(np.array([True]), FieldRows.none(rows.dtype, 1))
