"""The copies of a store, its backups and checkpoints: which of them still hold events that were retracted since.

Each copy that this store makes is a row of META: its path, and the watermark that it was made at. It is no commit, so
that a store that goes on and one that is restored from the copy give the same timestamps. A copy holds what a
retraction removed if it is older than the retraction, and not older than all of these events. Copies that are gone from
their paths are left out, and forgotten when the next one is made.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import meta_key
from kivi.engine import Engine, WriteBatch
from kivi.model.schema import TableSchema
from kivi.store.change_reads import ChangeReads

__all__ = ["Copies"]

_COPY: Final = "copy/"
"""META rows: the watermark of a copy (u64 little endian), by its path."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Thread safe."""

    engine: Engine
    changes: ChangeReads

    def remember(self, path: str, watermark: int) -> None:
        """A copy was made; this is durable when it returns."""
        batch = WriteBatch()
        for gone, _ in self._known():
            if not os.path.exists(gone):
                batch.delete(meta_key(_COPY + gone))
        batch.put(meta_key(_COPY + os.path.abspath(path)), watermark.to_bytes(8, "little"))
        self.engine.write(batch)
        self.engine.flush()

    def holding(self, schema: TableSchema) -> list[str]:
        """The paths of the copies that still hold events of a table that were retracted since they were made."""
        retractions = self.changes.retractions(schema, self.changes.watermark.value)
        return [
            path
            for path, watermark in self._known()
            if any(first <= watermark < cts for cts, first, _ in retractions) and os.path.exists(path)
        ]

    def _known(self) -> list[tuple[str, int]]:
        prefix = meta_key(_COPY)
        rows = self.engine.scan(prefix, prefix_end(prefix))
        return [(key[len(prefix) :].decode(), int.from_bytes(value, "little")) for key, value in rows]
