"""A segment spans as many numbers as its index holds, however few bytes their records have."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kivi.log import Entry, Kind, segmented
from kivi.log.segmented import SegmentedLog


def test_a_segment_ends_before_its_numbers_are_too_many(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(segmented, "NUMBERS_MAX", 2_500)
    path = str(tmp_path / "log")
    log = SegmentedLog(path, store_id=bytes(16))
    for _ in range(7):
        durable = threading.Event()
        log.append([Entry(Kind.COMMIT, [b"x"], 1_000)], lambda error, durable=durable: durable.set())  # type: ignore[misc]
        assert durable.wait(10)
    assert log.stats()["segments"] == 4
    for _ in range(2):
        found = [(record.sequence, record.last) for record in log.replay(0)]
        assert found == [(first, first + 999) for first in range(1, 7_000, 1_000)]
        assert log.read(2_500).sequence == 2_001
        log.close()
        log = SegmentedLog(path, store_id=bytes(16))
    log.close()
