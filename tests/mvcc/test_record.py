"""The bytes of log records: what goes in comes out, and anything else is refused by name."""

from __future__ import annotations

from decimal import Decimal

import pytest

import kivi
from kivi.arrow.ipc import encode_ipc
from kivi.arrow.records import event_batch
from kivi.delta.ops import Barrier, RowOp
from kivi.errors import DataLoss
from kivi.model.schema import COLUMNS_MAX
from kivi.mvcc.record import Abort, Bulk, Commit, Stage, StageKind, decode_abort, decode_commit, decode_stage
from kivi.mvcc.verdict import EXISTENCE, Guard
from tests.golden.driver import EmbeddedDriver

MANY = 65_536 + 7
"""More than 16 bits can count."""


def body_of(record: Commit | Stage | Abort) -> bytes:
    return b"".join(bytes(part) for part in record.encode())


def full() -> Commit:
    puts = {0: None, 1: 2**63 - 1, 2: -(2**100), 3: 0.5, 4: "text", 5: b"bytes", 6: True, 7: False}
    return Commit(
        start_ts=5,
        rows=[(16, b"a", RowOp(Barrier.RESTART, puts, {})), (16, b"b", RowOp(Barrier.PATCH, {}, {COLUMNS_MAX - 1: 3}))],
        guards=[Guard(16, b"a", EXISTENCE), Guard(16, b"b", COLUMNS_MAX - 1)],
        derived=[(17, b"c", RowOp(Barrier.PATCH, {}, {0: 1}))],
        appends=[Bulk(18, 0, [b"arrow"]), Bulk(18, 7, [])],
        runs=[Bulk(17, 0, [b"run of eight ok"]), Bulk(17, 9, [])],
        batch=("scope", 3),
    )


def test_a_commit_record_is_read_as_it_was_written() -> None:
    for commit in (full(), Commit(1), Commit(1, request=("token", bytes(range(16))))):
        found = decode_commit(body_of(commit))
        for bulk in (*found.appends, *found.runs):
            bulk.parts = [bytes(part) for part in bulk.parts]
        assert found == commit


def test_a_commit_of_more_stages_than_16_bits_can_count() -> None:
    """Appends and delta runs alike."""
    bulks = [Bulk(18, sequence, []) for sequence in range(1, MANY + 1)]
    found = decode_commit(body_of(Commit(5, appends=bulks, runs=bulks[::-1])))
    assert (found.appends, found.runs) == (bulks, bulks[::-1])


def test_a_record_that_is_cut_short_or_of_another_version_is_data_loss() -> None:
    """The widths of its counts have changed once: what an older program wrote is not taken for something else."""
    body = body_of(full())
    for size in range(len(body)):
        with pytest.raises(DataLoss):
            decode_commit(body[:size])
    records = [
        (body, decode_commit),
        (body_of(Stage(StageKind.RUN, 17, 3, "owner", [b"data"])), decode_stage),
        (body_of(Abort((1, 2), ("token",), (3,))), decode_abort),
    ]
    for good, decode in records:
        decode(good)
        for version in (0, 1, good[0] + 1):
            with pytest.raises(DataLoss, match=f"version {version}; this program knows {good[0]}"):
                decode(bytes([version]) + good[1:])


@pytest.mark.story
def test_a_transaction_of_more_stages_than_16_bits_can_count() -> None:
    """It commits, is read and is folded."""
    driver = EmbeddedDriver(lease_ttl_s=3_600)  # to enter them all may take a busy machine a minute
    try:
        db, columns = driver.db, {"ts": "timestamp", "a": "int64", "cost": "decimal(9,2)"}
        db.create_event_table("e", event_time="ts", columns=columns)
        measures = {"n": kivi.count(), "cost": kivi.sum("cost")}
        db.create_aggregate("agg", source="e", group_by=["a"], measures=measures)
        store, schema = driver.store, driver.store.table("e")
        data = encode_ipc(event_batch(schema, [{"ts": 1, "a": 1, "cost": Decimal("0.01")}]))
        ids: list[bytes] = []

        def staged(error: BaseException | None, stage_id: bytes | None) -> None:
            assert error is None and stage_id is not None
            ids.append(stage_id)

        for _ in range(MANY):
            store.log_stage(StageKind.EVENTS, schema.id, 1, "task", [data], staged)
        store.begin(min_snapshot=store.log.last, timeout_s=60)
        with db.transaction() as tx:
            tx.append_stages("e", ids)
        assert store.stages.live_bytes == 0
        for step in (lambda: None, db.consolidate):
            step()
            with db.snapshot() as snap:
                assert snap.get("agg", (1,)) == {"a": 1, "n": MANY, "cost": Decimal(MANY) / 100}
    finally:
        driver.close()
