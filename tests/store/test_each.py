"""Events that are each a transaction of their own, where the store decides: what passes fold, combine and replace."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.arrow.records import event_batch
from kivi.errors import NotFound
from tests.golden.driver import EmbeddedDriver


@pytest.fixture(params=["memory", "disk"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedDriver]:
    made = EmbeddedDriver(None if request.param == "memory" else str(tmp_path / "data"), block_rows=16)
    made.db.create_event_table("e", event_time="ts", retention="1h", columns={"ts": "timestamp", "x": "int64"})
    made.db.create_aggregate("by_x", source="e", group_by=["x"], measures={"n": kivi.count()})
    yield made
    made.close()


def append(driver: EmbeddedDriver, values: list[int], token: str, late: str = "fail") -> int:
    """The CTS of the first."""
    rows = [{"ts": i, "x": x} for i, x in enumerate(values)]
    first: Any = driver.db._append("e", event_batch(driver.db._schema("e"), rows), token, late, each=True)
    assert isinstance(first, int)
    return first


@pytest.mark.parametrize(("members", "later"), [(3, 8), (20, 300)])
def test_r14_a_snapshot_inside_a_group_is_not_combined_over(driver: EmbeddedDriver, members: int, later: int) -> None:
    """No table here has a history: the snapshot is open before a pass has been over the group."""
    first = append(driver, [0] * members, "a")
    snaps = [(inside, driver.db.snapshot(as_of=first + inside)) for inside in (0, members // 2)]
    for step in range(3):
        append(driver, [0] * later, f"later {step}")
        driver.store.consolidator.run_light()
        for inside, snap in snaps:
            assert list(snap.scan("by_x")) == [{"x": 0, "n": inside + 1}], step
            assert snap.get("by_x", (0,)) == {"x": 0, "n": inside + 1}, step
    for _, snap in snaps:
        snap.close()
    driver.db.consolidate()
    assert driver.db.get("by_x", (0,)) == {"x": 0, "n": members + 3 * later}


def test_late_members_are_counted_once_in_stats(driver: EmbeddedDriver) -> None:
    driver.store.retention.set_floor(driver.store.table("e"), 4)
    first = append(driver, [0] * 10, "a", late="drop")
    assert append(driver, [0] * 10, "a", late="drop") == first
    assert driver.db.describe("e")["statistics"]["late_dropped"] == 4
    assert driver.db.stats()["late_dropped"] == 4


def test_r19_a_group_meets_an_overwrite_and_goes_to_the_new_content(driver: EmbeddedDriver, monkeypatch: Any) -> None:
    """It has read nothing, so it begins just before its own CTS: there is nothing to conflict with, and a table."""
    schema, submit, overwrites = driver.store.table("e"), driver.store.committer.submit, [1, 2]

    def overtaken(parts: Any, **how: Any) -> Any:
        if len(overwrites) and type(parts[0]).__name__ == "Events":
            overwrites.pop()
            with driver.db.transaction() as tx:
                tx.overwrite("e")
                tx.append("e", [{"ts": 0, "x": 7}])
        return submit(parts, **how)

    append(driver, [1, 1], "a")
    monkeypatch.setattr(driver.store.committer, "submit", overtaken)
    first = append(driver, [2, 2, 2], "b")
    assert not overwrites
    batch = event_batch(schema, [{"ts": i, "x": 2} for i in range(3)])
    again = driver.store.wait(partial(driver.store.append_each, schema, batch, token="b"), token="b")
    assert again == first
    for step in (lambda: None, driver.db.consolidate, driver.crash, driver.reopen):
        step()
        with driver.db.snapshot(as_of=first + 1) as snap:
            assert [row["x"] for row in snap.scan("e", columns=["x"])] == [7, 2, 2]
        with driver.db.snapshot() as snap:
            assert list(snap.scan("by_x")) == [{"x": 2, "n": 3}, {"x": 7, "n": 1}]
    driver.db.drop("by_x")
    driver.db.drop("e")
    with pytest.raises(NotFound, match="dropped"):
        driver.store.wait(partial(driver.store.append_each, schema, batch, token="c"), token="c")
