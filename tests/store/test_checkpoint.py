"""Checkpoints: where they may be made, and that one which fails leaves nothing behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from kivi.engine.rocks import RocksEngine
from kivi.errors import DiskFull, InvalidArgument, KiviError, NotAStore, Unavailable
from kivi.log.segmented import SegmentedLog
from kivi.store import checkpoint
from tests.golden.driver import EmbeddedDriver


@pytest.fixture(name="driver")
def _driver(tmp_path: Path) -> Iterator[EmbeddedDriver]:
    driver = EmbeddedDriver(str(tmp_path / "store"))
    driver.db.create_table("t", key={"id": "int64"}, columns={"v": "int64"})
    with driver.db.transaction() as tx:
        tx.put("t", (1,), v=7)
    yield driver
    driver.close()


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_a_checkpoint_opens_and_has_what_was_committed(driver: EmbeddedDriver, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("copy", "empty"):
        driver.db.checkpoint(str(tmp_path / name))
        with kivi.open(tmp_path / name) as copy, copy.snapshot() as snap:
            assert snap.get("t", (1,)) == {"id": 1, "v": 7}
    assert names(tmp_path) == {"store", "copy", "empty"}


def test_directories_above_a_checkpoint_are_not_made(driver: EmbeddedDriver, tmp_path: Path) -> None:
    """A mistyped path is an error that names it, not a backup where nobody looks for it."""
    with pytest.raises(InvalidArgument, match=str(tmp_path / "no" / "such")):
        driver.db.checkpoint(str(tmp_path / "no" / "such" / "place"))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=str(tmp_path / "file")):
        driver.db.checkpoint(str(tmp_path / "file" / "place"))
    with pytest.raises(NotAStore):
        driver.db.checkpoint(str(tmp_path / "file"))
    assert names(tmp_path) == {"store", "file"}


@pytest.mark.parametrize(
    ("owner", "attribute"),
    [
        (RocksEngine, "checkpoint"),
        (SegmentedLog, "start_after"),
        (checkpoint, "mark"),
        (os, "rename"),
        (checkpoint, "sync_directory"),
    ],
)
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (OSError(errno.EIO, "Input/output error"), Unavailable),
        (Unavailable("the engine is away"), Unavailable),
        (MemoryError(), MemoryError),
    ],
)
def test_a_checkpoint_that_fails_leaves_nothing(
    driver: EmbeddedDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    attribute: str,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    """At whichever step; and the next attempt succeeds."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(owner, attribute, fail)
        with pytest.raises(raised) as caught:
            driver.db.checkpoint(str(tmp_path / "copy"))
    assert type(caught.value) is raised
    if isinstance(error, OSError) and isinstance(caught.value, KiviError):
        assert str(tmp_path / "copy") in caught.value.message
    assert names(tmp_path) == {"store"}
    driver.db.checkpoint(str(tmp_path / "copy"))
    assert names(tmp_path) == {"store", "copy"}
