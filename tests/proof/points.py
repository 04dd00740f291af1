"""A server that kills itself, with SIGKILL, at a named point: ``python -m tests.proof.points POINT N ARGUMENTS``.

The N-th time that the point is reached is the last. Nothing of this is in the product: the points are put around its
methods here, in the process of the test's server.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Literal

from kivi_server.__main__ import main

from kivi.engine.rocks import RocksEngine
from kivi.events.object_store import ObjectStore
from kivi.events.places import Directory
from kivi.events.store import EventStore
from kivi.log.files import Files
from kivi.log.records import BLOCK_BYTES
from kivi.log.segmented import SegmentedLog
from kivi.mvcc import watermark
from kivi.mvcc.consolidate import Consolidator
from kivi.mvcc.groups import Events, Writes
from kivi.mvcc.pending import Pending
from kivi.mvcc.sweep import Sweeper
from kivi.mvcc.verdict import Facts
from kivi.mvcc.watermark import Watermark
from kivi.store import backfill, checkpoint, view_filling
from kivi.store.commits import Commits
from kivi.store.staging import Staging
from kivi.store.tables import Tables
from kivi.store.view_filling import ViewFilling

__all__ = ["POINTS"]

RECORD: Final = b"\x52\x6b"  # how the header of one begins, behind its checksum
When = Literal["before", "after"]

POINTS: Final[dict[str, tuple[Any, str, When]]] = {
    # a commit, in the order of R18
    "verdict": (Facts, "check", "after"),
    "timestamp": (SegmentedLog, "append", "after"),
    "half written": (SegmentedLog, "_write", "before"),
    "written": (SegmentedLog, "_write", "after"),
    "synced": (Files, "fdatasync", "after"),
    "marked": (SegmentedLog, "_complete", "before"),
    "applied": (Pending, "apply", "after"),
    "watermark moved": (watermark, "call_all", "before"),
    "acknowledged": (Watermark, "finish", "after"),
    # a group, on its way through the same steps: where the store takes it, and not how it handles it
    "group encoded": (Writes, "entries", "after"),
    "group entered": (Commits, "write", "after"),
    "half a group written": (SegmentedLog, "_write", "before"),
    "group applied": (Writes, "applied", "after"),
    # events that are each a transaction, likewise
    "events encoded": (Events, "entries", "after"),
    "events entered": (Commits, "append_each", "after"),
    "events applied": (Events, "applied", "after"),
    # the log
    "segment rolled": (SegmentedLog, "_roll", "after"),
    "log truncated": (SegmentedLog, "truncate", "after"),
    # consolidation
    "chunk folded": (Consolidator, "_write", "after"),
    "before the position": (Consolidator, "_record_position", "before"),
    "position recorded": (Consolidator, "_record_position", "after"),
    "flushed": (RocksEngine, "flush", "after"),
    "events sealed": (Pending, "drop_events", "before"),
    "compaction": (Consolidator, "_compact", "after"),
    # settling
    "settled files written": (Directory, "made", "after"),
    "settled": (EventStore, "retire", "after"),
    "settled files deleted": (Directory, "delete", "after"),
    # the cold tier
    "object written": (ObjectStore, "write", "after"),
    "object read back": (ObjectStore, "read_whole", "after"),
    "objects deleted": (ObjectStore, "delete", "after"),
    "swept": (Sweeper, "write_swept", "after"),
    # the rest
    "stage": (Staging, "log_stage", "after"),
    "backfill chunk": (backfill, "derive_all", "after"),
    "backfill done": (Tables, "redefine", "before"),
    "view filled in part": (ViewFilling, "_fill_some", "after"),
    "checkpoint copied": (RocksEngine, "checkpoint", "after"),
    "checkpoint begun": (checkpoint, "mark", "before"),
}


def arm(name: str, number: int) -> None:
    """From now on the ``number``-th time that the point is reached ends the process."""
    owner, attribute, when = POINTS[name]
    real: Callable[..., Any] = getattr(owner, attribute)
    lock = threading.Lock()
    reached = 0

    def count() -> None:
        nonlocal reached
        with lock:
            reached += 1
            if reached == number:
                os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(real)
    def pointed(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            count()
            return real(*args, **kwargs)
        out = real(*args, **kwargs)
        count()
        return out

    setattr(owner, attribute, pointed)


def half_write(number: int, records_min: int = 0) -> None:
    """The N-th write of a record leaves its first half, as a kernel that was stopped in the middle would.

    ``records_min``: only writes of at least so many records count, as those of a group are.
    """
    real = Files.pwritev
    reached = 0

    def pwritev(self: Files, fd: int, buffers: Any, offset: int) -> int:
        nonlocal reached
        whole = b"".join(bytes(part) for part in buffers)
        if whole.count(RECORD) >= records_min:
            reached += 1
        if reached >= number and whole.count(RECORD) >= max(1, records_min):
            half = len(whole) // 2
            if len(whole) % BLOCK_BYTES:
                real(self, fd, [whole[:half]], offset)
            else:  # it may go past the page cache: whole blocks, from where they lie
                real(self, fd, [memoryview(buffers[0])[: half // BLOCK_BYTES * BLOCK_BYTES]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, fd, buffers, offset)

    Files.pwritev = pwritev  # type: ignore[method-assign]


def no_sync() -> None:
    """A planted bug: what is acknowledged was never synced. Only a power loss shows it."""
    Files.fdatasync = lambda self, fd: None  # type: ignore[method-assign]


if __name__ == "__main__":
    view_filling._ROWS = 16  # type: ignore[misc]
    point, nth = sys.argv[1], int(sys.argv[2])
    if point == "no sync":
        no_sync()
    elif point == "half written":
        half_write(nth)
    elif point == "half a group written":
        half_write(nth, 4)
    else:
        arm(point, nth)
    raise SystemExit(main(sys.argv[3:]))
