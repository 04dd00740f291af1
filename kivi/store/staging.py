"""Stages: data that is durable and invisible until a commit names it (design, section 9).

A stage is a STAGE record in the commit log. It has no effect; a later commit may name it once, and then its data are
part of that commit. Only the index lives in memory; the data stay in the log, whose truncation waits for the oldest
stage that is live or named by a commit not yet folded into base.

    live -> committed (named by the commit at CTS c) -> forgotten once base includes c
         -> dropped   (an ABORT record names it: given up, expired, or its batch turned out to be a repeat)

Quotas bound what a client that never commits can hold: bytes in all, and a time limit from the record's own time.
Enforced here, under the committer's entry lock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kivi.encoding.keyspaces import meta_key
from kivi.errors import NotFound, ResourceExhausted
from kivi.mvcc.record import StageKind

__all__ = ["LiveStage", "Stages"]

_INDEX: Final = meta_key("stages")


@dataclass(slots=True)
class LiveStage:
    """One stage in the index. ``committed_at`` is the CTS of the commit that named it, or 0."""

    sequence: int
    kind: StageKind
    table: int
    rows: int
    nbytes: int
    owner: str
    time_us: int
    committed_at: int = 0


class Stages:
    """The index. Not thread safe: lives under the committer's entry lock."""

    def __init__(self, store_id: bytes, *, max_bytes: int) -> None:
        self._store_id = store_id
        self._max_bytes = max_bytes
        self._stages: dict[int, LiveStage] = {}
        self.live_bytes = 0
        """Of the stages that no commit has named."""

    # -- ids --------------------------------------------------------------------------------------

    def id_of(self, sequence: int) -> bytes:
        """16 bytes: the sequence number and a check that this store made it."""
        head = sequence.to_bytes(8, "big")
        return head + hashlib.blake2b(self._store_id + head, digest_size=8).digest()

    def sequence_of(self, stage_id: bytes) -> int:
        sequence = int.from_bytes(bytes(stage_id[:8]), "big")
        if self.id_of(sequence) != bytes(stage_id):
            raise NotFound("that is not a stage of this store")
        return sequence

    # -- life ---------------------------------------------------------------------------------------

    def check_quota(self, nbytes: int) -> None:
        held = self.live_bytes
        if held + nbytes > self._max_bytes:
            raise ResourceExhausted(
                f"{held} bytes are staged and not committed, and {nbytes} more would pass the limit of "
                f"{self._max_bytes}: commit or discard stages first"
            )

    def add(self, stage: LiveStage) -> None:
        self._stages[stage.sequence] = stage
        self._count(stage, 1)

    def _count(self, stage: LiveStage, sign: int) -> None:
        if not stage.committed_at:
            self.live_bytes += sign * stage.nbytes

    def live(self, sequences: Iterable[int], table: int) -> list[LiveStage]:
        """These stages, all live and of ``table``. Raises NotFound."""
        out = []
        for sequence in sequences:
            stage = self._stages.get(sequence)
            if stage is None or stage.committed_at or stage.table != table:
                raise NotFound(
                    f"stage {sequence} is not there (any more), was committed before, or is of another table: "
                    "stage the data again"
                )
            out.append(stage)
        return out

    def is_live(self, sequence: int, table: int | None = None) -> bool:
        """Whether a commit may name the stage: for ``table``, if one is given."""
        stage = self._stages.get(sequence)
        return stage is not None and not stage.committed_at and table in (None, stage.table)

    def commit(self, sequences: Iterable[int], cts: int) -> None:
        for sequence in sequences:
            stage = self._stages.get(sequence)
            if stage is not None:
                self._count(stage, -1)
                stage.committed_at = cts

    def drop(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            stage = self._stages.pop(sequence, None)
            if stage is not None:
                self._count(stage, -1)

    def undo(self, cts: int) -> None:
        """The commit at ``cts`` aborted: its stages are given up with it."""
        self.drop([s.sequence for s in self._stages.values() if s.committed_at == cts])

    def expired(self, before_us: int) -> list[int]:
        """Stages of events that nobody committed in time. Backfills manage their own."""
        return [
            s.sequence
            for s in self._stages.values()
            if not s.committed_at and s.time_us < before_us and s.kind is StageKind.EVENTS
        ]

    def owned(self, owner: str) -> list[int]:
        return [s.sequence for s in self._stages.values() if s.owner == owner and not s.committed_at]

    def held_by(self, prefix: str) -> int:
        """Bytes of live stages whose owner begins so."""
        return sum(s.nbytes for s in self._stages.values() if not s.committed_at and s.owner.startswith(prefix))

    def folded(self, upto: int) -> None:
        """Base includes every commit at or below ``upto``: the stages they named are no longer needed."""
        self.drop([s.sequence for s in self._stages.values() if 0 < s.committed_at <= upto])

    def oldest(self, upto: int) -> int | None:
        """The log must be kept from here on, once base includes everything at or below ``upto``."""
        return min((s.sequence for s in self._stages.values() if not 0 < s.committed_at <= upto), default=None)

    def __len__(self) -> int:
        return len(self._stages)

    # -- persistence: recorded with the position, rebuilt from the log after it -------------------------

    def rows(self, upto: int) -> Iterator[tuple[bytes, bytes]]:
        """The engine row for stages at or below ``upto`` that are still needed after it."""
        index = [
            [s.sequence, int(s.kind), s.table, s.rows, s.nbytes, s.owner, s.time_us]
            for s in self._stages.values()
            if s.sequence <= upto and not 0 < s.committed_at <= upto
        ]
        yield _INDEX, json.dumps({"store": self._store_id.hex(), "stages": index}).encode()

    def load(self, data: bytes | None) -> None:
        """What ``rows`` wrote. A checkpoint has its own identity and log: stages of the store it was made from are
        not in it, and nobody could name them."""
        saved: dict[str, Any] = json.loads(data) if data else {"store": "", "stages": []}
        if saved["store"] != self._store_id.hex():
            return
        for sequence, kind, table, rows, nbytes, owner, time_us in saved["stages"]:
            self.add(LiveStage(sequence, StageKind(kind), table, rows, nbytes, owner, time_us))

    @staticmethod
    def index_key() -> bytes:
        return _INDEX


def sequences_of(bulks: Sequence[object]) -> list[int]:
    """The stages that a commit's appends and runs name."""
    return [stage for bulk in bulks if (stage := getattr(bulk, "stage", 0))]
