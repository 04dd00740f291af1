"""Room for records is made ahead of need, and no more of it than a log has shown a use for."""

from __future__ import annotations

from pathlib import Path

from kivi.log.segmented import SegmentedLog
from tests.log.test_contract import STORE, put
from tests.waiting import wait_until

MIB = 1 << 20


def sizes(path: Path) -> list[int]:
    return [file.stat().st_size for file in path.iterdir()]


def test_a_small_log_takes_little_of_a_disk_and_a_long_one_has_segments_as_large_as_it_was_told(tmp_path: Path) -> None:
    path, bodies = tmp_path / "log", [bytes([i]) * (MIB // 4) for i in range(80)]
    log = SegmentedLog(str(path), store_id=STORE, segment_bytes=8 * MIB)
    put(log, b"x")
    assert sum(sizes(path)) < 2 * MIB
    for i, body in enumerate(bodies):
        put(log, body)
        assert sum(sizes(path)) < 9 * MIB + 5 * (i + 1) * len(body)
    wait_until(lambda: max(sizes(path)) == 8 * MIB)
    log.close()
    again = SegmentedLog(str(path), store_id=STORE, segment_bytes=8 * MIB)
    assert [bytes(record.body) for record in again.replay(0)] == [b"x", *bodies]
    put(again, b"y")
    assert sum(sizes(path)) < 20 * MIB + 2 * MIB
    again.close()
