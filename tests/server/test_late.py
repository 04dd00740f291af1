"""Late events as they travel: a client that does not know of them is refused as ever, and no kill counts one twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kivi.arrow.ipc import encode_ipc
from kivi.wire.v1 import session_pb2
from tests.server.killed import written_under_kills
from tests.server.rawsession import RawSession
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

HOUR = 3_600_000_000


def events(late: int, good: int) -> list[dict[str, int]]:
    return [{"ts": 0, "x": i} for i in range(late)] + [{"ts": 10 * HOUR, "x": i} for i in range(good)]


def with_floor(db: Any) -> None:
    """The table ``kept``, whose floor has forgotten one of its first two events."""
    db.create_event_table("kept", event_time="ts", retention="1h", columns={"ts": "timestamp", "x": "int64"})
    db.append("kept", events(1, 1))
    db.consolidate()
    wait_until(
        lambda: "complete_since_us" in db.describe("kept")["statistics"], reason="the floor does not move", pause_s=0.02
    )


def found(db: Any) -> tuple[int, int]:
    statistics = db.describe("kept")["statistics"]
    return statistics["rows"] - 1, statistics.get("late_dropped", 0)


@pytest.mark.parametrize("good", [3, 20_000])  # those of a large append are read by another thread
def test_an_append_that_does_not_say_what_becomes_of_late_events_fails(tmp_path: Path, good: int) -> None:
    with ServerProcess(tmp_path / "data") as server, server.connect() as db:
        with_floor(db)
        batch = pa.RecordBatch.from_pylist(events(2, good))
        data = bytes(encode_ipc(batch.set_column(0, "ts", batch.column("ts").cast(pa.timestamp("us", "UTC")))))
        append = session_pb2.Operation(kind=session_pb2.Operation.KIND_APPEND, table="kept", arrow_bytes=len(data))
        raw = RawSession(server.endpoint)
        raw.send((session_pb2.Request(id=1, operations=[append], commit=session_pb2.Commit(token="t")), data))
        assert "2 events lie before the retention floor" in raw.reply(1).error.message
        append.drop_late = True
        for number in (2, 3):
            raw.send((session_pb2.Request(id=number, operations=[append], commit=session_pb2.Commit(token="t")), data))
        assert raw.reply(2).commit.commit_ts == raw.reply(3).commit.commit_ts > 0
        raw.close()
        assert found(db) == (good, 2)


def test_kill_9_and_repeats_count_every_late_event_once(tmp_path: Path) -> None:
    """A writer that repeats whatever it was not told of, under its token, while the server is killed and started."""
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db:
            with_floor(db)

        def write(db: Any, number: int) -> None:
            for _ in range(1 if number % 7 else 2):  # some are sent again, though they were answered
                db.append("kept", events(2, 3), f"token-{number}", late="drop")

        written = written_under_kills(server, write, kills=4, pause_s=0.5)
        with server.connect() as db:
            assert found(db) == (3 * written, 2 * written)
