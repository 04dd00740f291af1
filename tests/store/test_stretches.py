"""Row groups of a settled file are read several at a time: the same events as one by one, wherever they are cut."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.events import file_writing, settled_files
from kivi.events.settled_files import SettledFiles
from kivi.model.expressions import Expr

T0 = 1_767_268_800_000_000
COLUMNS = {"ts": "timestamp", "k": "int64", "host": "string", "note": "string", "b": "bytes"}
WHERES: list[tuple[Expr | None, Any]] = [
    (None, lambda row: True),
    (kivi.col("host") == "h3", lambda row: row["host"] == "h3"),
    (kivi.col("host").isin(["h1", "n77", "none"]), lambda row: row["host"] in ("h1", "n77")),
    (kivi.col("k") >= 700, lambda row: row["k"] >= 700),
    (kivi.col("note").is_null() & (kivi.col("k") < 900), lambda row: row["note"] is None and row["k"] < 900),
]


def event(rng: random.Random, k: int) -> dict[str, Any]:
    """Hosts have other names from time to time, so that neither dictionaries are alike nor all columns are coded."""
    return {
        "ts": T0 + k - (rng.randrange(600) if rng.random() < 0.2 else 0),
        "k": k,
        "host": f"h{rng.randrange(4) + k // 300}" if k % 400 < 300 else f"n{k}",
        "note": rng.choice([None, "a", "b" * (k % 9)]),
        "b": str(k % 7).encode(),
    }


def listed(rows: Any) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.items()) for row in rows)


@pytest.mark.parametrize("seed", range(3))
def test_r23_row_groups_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    for room in (file_writing, settled_files):
        monkeypatch.setattr(room, "GROUP_ROWS", 64)
    taken = list[tuple[int, int]]()
    read = SettledFiles.read

    def reading(files: Any, file: Any, part: Any, *args: Any, **options: Any) -> Any:
        taken.append((file.number, len(part.groups)))
        return read(files, file, part, *args, **options)

    with kivi.open(tmp_path, background=False) as db:
        db.create_event_table("calls", event_time="ts", columns=COLUMNS)
        every, seen = list[dict[str, Any]](), list[tuple[Any, list[dict[str, Any]]]]()
        for first in range(0, 1500, 250):
            events = [event(rng, k) for k in range(first, first + 250)]
            db.append("calls", events)
            every = [*every, *events]
            if rng.random() < 0.5:
                low = rng.randrange(first + 250)
                with db.transaction() as tx:
                    tx.retract("calls", where=kivi.col("k").isin(list(range(low, low + 9))))
                every = [row for row in every if not low <= row["k"] < low + 9]
            seen.append((db.snapshot(ttl_s=600), every))
        db.consolidate()
        for snap, _ in seen[::2]:
            snap.close()
        db.store.settle()
        assert db.stats()["settling"] == 0
        monkeypatch.setattr(SettledFiles, "read", reading)
        for snap, rows in [*seen[1::2], (db.snapshot(), every)]:
            for where, selects in WHERES:
                start, end = sorted(T0 + rng.randrange(-50, 1600) for _ in range(2))
                chosen = [row for row in rows if selects(row) and start <= row["ts"] < end]
                for columns in (["k"], ["host", "k"], ["b", "note", "host"]):
                    found = snap.to_arrow("calls", columns=columns, where=where, start=start, end=end)
                    expected = [{name: row[name] for name in columns} for row in chosen]
                    assert listed(found.to_pylist()) == listed(expected)
                measures = {"n": kivi.count(), "total": kivi.sum("k")}
                summed = list(snap.query("calls", where=where, start=start, end=end, measures=measures))
                assert summed == [{"n": len(chosen), "total": sum(row["k"] for row in chosen)}]
                by = list(snap.query("calls", where=where, start=start, end=end, group_by=["host"], measures=measures))
                assert {row["host"]: row["n"] for row in by} == dict(Counter(row["host"] for row in chosen))
    assert max(groups for _, groups in taken) == 4
    assert min(groups for _, groups in taken) == 1
