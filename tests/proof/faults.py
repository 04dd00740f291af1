"""Storage faults, swept over the N-th call that changes a file of the log, with a whole store on top.

One call fails (or it and all after it): no sync, no space, an error on a write or a name. What must hold: every reply
is true (committed, or *unknown* where the log cannot tell, or refused with nothing applied), nothing that was
acknowledged is lost, and an unknown outcome is resolved by its token after the restart. The replay oracle judges what
is read while the fault lasts and after it. (That a sync is never repeated is tested at the log, ``tests/log``.)
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import kivi
from kivi.errors import CommitUnknown, KiviError, ResourceExhausted, Unavailable
from kivi.log import segmented
from kivi.model.outcomes import ABORTED
from tests.log.faults import FaultyFiles
from tests.oracle import Attempt, Mismatch, Op, Oracle, Read
from tests.proof.workloads import TABLES, make_tables, micros, settled

__all__ = ["ERRORS", "calls_in_all", "faulty", "prepare"]

ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
STEPS = 24


class Swept:
    """A history with one fault in it, of a store that begins as ``empty`` is."""

    def __init__(self, path: Path, empty: Path) -> None:
        self.path = path
        self.files = FaultyFiles()
        self.oracle = Oracle(TABLES)
        self.counted: Counter[str] = Counter()
        shutil.copytree(empty, path)

    def _open(self) -> Any:
        with mock.patch.object(segmented, "Files", return_value=self.files):
            return kivi.open(
                self.path,
                background=False,
                segment_bytes=16_384,
                consolidate_rows=2,
                block_rows=32,
                commit_timeout_s=10,
            )

    def ops(self, i: int) -> list[Op]:
        events = [{"a": i % 3, "b": "x", "ts": i, "x": i + j} for j in range(40 if i % 3 == 0 else 1)]
        values = {"n": i, "f": i / 3, "hi": i}
        return [Op("delta", "t", (i % 4,), values), Op("append", "e", events=events)]

    def run(self) -> None:
        """Goes on until the end or until the store stops; a fault at the opening is refused, and that is all."""
        try:
            db = self._open()
        except KiviError:
            self.counted["refused to open"] += 1
            return
        try:
            for i in range(STEPS):
                self._commit(db, i)
                if i % 5 == 4:
                    db.consolidate()
                    db.store.consolidator.flush()
                    db.store.settle(64)
                    self._read(db)
        except KiviError:
            self.counted["stopped"] += 1
        finally:
            self._read(db)
            db.store.crash()

    def _commit(self, db: Any, i: int) -> None:
        token, ops = f"token {i}", self.ops(i)
        tx = db.transaction(token=token)
        tx.delta("t", ops[0].key, **ops[0].values)
        tx.append("e", list(ops[1].events))
        attempt = Attempt(tx.start_ts, ops, "aborted", token=token, who=f"step {i}")
        try:
            attempt.commit_ts = tx.commit()
            attempt.outcome = "committed"
        except CommitUnknown:
            attempt.outcome = "unknown"
        except ResourceExhausted:
            self.counted["no space"] += 1
        except Unavailable:
            self.counted["refused"] += 1
        self.counted[attempt.outcome] += 1
        self.oracle.attempt(attempt)

    def _read(self, db: Any) -> None:
        """Reads go on, whatever the log does."""
        with db.snapshot() as snap:
            for table in ("t", "by_a", "by_b", "e"):
                rows = list(snap.scan(table))
                if table == "e":
                    rows = [{**row, "ts": micros(row["ts"])} for row in rows]
                self.oracle.read(Read(snap.ts, table, None, rows, who="during"))

    def recovered(self) -> None:
        """The disk is well again."""
        self.files.fault = lambda name, number: None
        refused = {a.token for a in self.oracle.attempts if a.outcome == "aborted"}
        with self._open() as db:
            self.oracle.resolve(lambda token: settled(db, token))
            for token in refused:
                if (found := db.outcome(token)) is not ABORTED:
                    raise Mismatch(f"R16: {token} answers {found}, and it was said that nothing was applied")
            self._read(db)
            self.oracle.check()
            db.store.crash()
        with self._open() as db:
            self._read(db)
            db.consolidate()
            self._read(db)
        self.oracle.check()


def prepare(path: Path) -> Path:
    """A store that has the tables, and nothing in them."""
    with kivi.open(path, background=False) as db:
        make_tables(db)
    return path


def calls_in_all(path: Path, empty: Path) -> int:
    """How many calls a history without faults makes."""
    swept = Swept(path, empty)
    swept.run()
    swept.recovered()
    assert swept.counted["committed"] == STEPS
    return len(swept.files.calls)


def faulty(path: Path, empty: Path, number: int, error: str, *, lasts: bool) -> Counter[str]:
    """One history whose ``number``-th call fails, once or from then on. Raises Mismatch."""
    swept = Swept(path, empty)

    def fault(name: str, now: int) -> None:
        if now == number or (lasts and now > number):
            raise OSError(ERRORS[error], "injected")

    swept.files.fault = fault
    swept.run()
    swept.recovered()
    return swept.counted
