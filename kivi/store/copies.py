"""The copies of a store, its backups and checkpoints: which of them still hold events that were retracted since.

Each copy that this store makes is a row of the system table ``kivi.copies``: its path, and the watermark that it was
made at. A copy holds what a retraction removed if it is older than the retraction, and not older than all of these
events. Copies that are gone from their paths are left out, and forgotten when the next one is made.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from kivi.errors import KiviError
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.store.catalog import COPIES
from kivi.store.change_reads import ChangeReads
from kivi.store.commits import Commits
from kivi.store.reads import Reads
from kivi.store.snapshots import Snapshots
from kivi.store.transaction import Txn

__all__ = ["Copies"]

_log: Final = logging.getLogger("kivi.store")


@dataclass(frozen=True, slots=True)
class Copies:
    """Thread safe."""

    reads: Reads
    changes: ChangeReads
    commits: Commits
    snapshots: Snapshots

    def remember(self, txn: Txn, path: str, watermark: int) -> None:
        """Notes in ``txn``, and commits it, that a copy was made. Where that fails it is a copy all the same, and the
        log says so."""
        try:
            for gone in [known for known, _ in self._known() if not os.path.exists(known)]:
                txn.delete(COPIES, (gone,))
            txn.put(COPIES, (os.path.abspath(path),), {"watermark": watermark})
            self.commits.commit_wait(txn)
        except KiviError as error:
            _log.warning("the copy %s is not remembered, and not named after retractions: %s", path, error)
        finally:
            self.commits.rollback(txn)

    def holding(self, schema: TableSchema) -> list[str]:
        """The paths of the copies that still hold events of a table that were retracted since they were made."""
        with self.snapshots.opened() as lease:
            retractions = self.changes.retractions(schema, lease.ts)
        return [
            path
            for path, watermark in self._known()
            if any(first <= watermark < cts for cts, first, _ in retractions) and os.path.exists(path)
        ]

    def _known(self) -> list[tuple[str, int]]:
        with self.snapshots.opened() as lease:
            rows = [row for batch in self.reads.scan(lease, COPIES, Scan()) for row in batch.to_pylist()]
        return [(row["path"], row["watermark"]) for row in rows]
