"""Stages: data that is durable and invisible until a commit names it.

A stage is a STAGE record in the commit log. It has no effect; a later commit may name it once, and then its data are
part of that commit. Only the index lives in memory; the data stay in the log, whose truncation waits for the oldest
stage that is live or named by a commit not yet folded into base.

    live -> used: a commit names it, or an ABORT record does (given up, expired, or its batch was a repeat)
         -> forgotten once base includes that: a log that is judged again after a restart finds it live before

Quotas bound what a client that never commits can hold: bytes in all, and a time limit from the record's own time.
They are enforced in ``Stages``, the index, under the committer's entry lock; ``Staging`` is what callers call.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from kivi.arrow.columns import arrow_schema, padded
from kivi.arrow.dictionaries import coded
from kivi.arrow.ipc import encode_ipc, own_batches
from kivi.encoding.keyspaces import meta_key
from kivi.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from kivi.log import CommitLog
from kivi.model.schema import TableSchema
from kivi.mvcc.commit import Committer
from kivi.mvcc.record import Abort, Bulk, Stage, StageKind, decode_stage
from kivi.runtime.settings import Settings
from kivi.store.checks import check_events

__all__ = ["STAGE_INDEX", "LiveStage", "Staged", "Stages", "Staging", "data_of", "sequences_of", "staged_data"]

Done = Callable[[BaseException | None, bytes | None], None]
"""Is called with None and the stage's id, or with what went wrong."""

STAGE_INDEX: Final = meta_key("stages")
_HERE_S: Final = 10.0
"""For so long a node waits for what another one has staged."""


@dataclass(slots=True)
class LiveStage:
    """One stage in the index. ``used_at`` is the CTS of the commit or the number of the record that named it, or 0."""

    sequence: int
    kind: StageKind
    table: int
    rows: int
    nbytes: int
    owner: str
    time_us: int
    used_at: int = 0


class Stages:
    """The index. Not thread safe: lives under the committer's entry lock."""

    def __init__(self, store_id: bytes, *, max_bytes: int) -> None:
        self._store_id = store_id
        self._max_bytes = max_bytes
        self._stages: dict[int, LiveStage] = {}
        self.live_bytes = 0
        """Bytes of the stages that no commit has named."""

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
        if self.live_bytes + nbytes > self._max_bytes:
            raise ResourceExhausted(
                f"{self.live_bytes} bytes are staged and not committed, and {nbytes} more would pass the limit of "
                f"{self._max_bytes}: commit or discard stages first"
            )

    def add(self, sequence: int, stage: Stage, time_us: int) -> None:
        """The stage was logged at ``sequence``."""
        self._add(LiveStage(sequence, stage.kind, stage.table, stage.rows, stage.nbytes, stage.owner, time_us))

    def _add(self, stage: LiveStage) -> None:
        self._stages[stage.sequence] = stage
        self._count(stage, 1)

    def _count(self, stage: LiveStage, sign: int) -> None:
        if not stage.used_at:
            self.live_bytes += sign * stage.nbytes

    def check_live(self, sequence: int, table: int) -> None:
        """Raises NotFound unless a commit may name the stage for ``table``."""
        if not self.is_live(sequence, table):
            raise NotFound(
                f"stage {sequence} is not there (any more), was committed before, or is of another table: "
                "stage the data again"
            )

    def is_live(self, sequence: int, table: int | None = None) -> bool:
        """Whether a commit may name the stage: for ``table``, if one is given."""
        stage = self._stages.get(sequence)
        return stage is not None and not stage.used_at and table in (None, stage.table)

    def use(self, sequences: Iterable[int], number: int) -> None:
        """The commit ``number`` names them, or the record that gives them up: those that are live still."""
        for sequence in sequences:
            stage = self._stages.get(sequence)
            if stage is not None and not stage.used_at:
                self._count(stage, -1)
                stage.used_at = number

    def undo(self, cts: int) -> None:
        """The commit at ``cts`` aborted: its stages are given up with it."""
        for sequence in [s.sequence for s in self._stages.values() if s.used_at == cts]:
            del self._stages[sequence]

    def expired(self, before_us: int) -> list[int]:
        """Stages of events that nobody committed in time. Backfills manage their own."""
        return [
            s.sequence
            for s in self._stages.values()
            if not s.used_at and s.time_us < before_us and s.kind is StageKind.EVENTS
        ]

    def live(self) -> list[int]:
        """All that a commit may name."""
        return [s.sequence for s in self._stages.values() if not s.used_at]

    def owned(self, owner: str) -> list[int]:
        parts = f"{owner}/"
        return [
            s.sequence
            for s in self._stages.values()
            if (s.owner == owner or s.owner.startswith(parts)) and not s.used_at
        ]

    def held_by(self, prefix: str) -> int:
        """Bytes of live stages whose owner begins so."""
        return sum(s.nbytes for s in self._stages.values() if not s.used_at and s.owner.startswith(prefix))

    def folded(self, upto: int) -> None:
        """Base includes everything at or below ``upto``: the stages that were used by then are no longer needed."""
        for sequence in [s.sequence for s in self._stages.values() if 0 < s.used_at <= upto]:
            del self._stages[sequence]

    def oldest(self, upto: int) -> int | None:
        """The log must be kept from here on, once base includes everything at or below ``upto``."""
        return min((s.sequence for s in self._stages.values() if not 0 < s.used_at <= upto), default=None)

    def __len__(self) -> int:
        """How many a commit may name."""
        return len(self.live())

    def __contains__(self, sequence: object) -> bool:
        """Whether it is live, or base does not include its use."""
        return sequence in self._stages

    # -- persistence: recorded with the position, rebuilt from the log after it -------------------------

    def rows(self, upto: int) -> Iterator[tuple[bytes, bytes]]:
        """The engine row for stages at or below ``upto`` that are still needed after it."""
        index = [
            [s.sequence, int(s.kind), s.table, s.rows, s.nbytes, s.owner, s.time_us]
            for s in self._stages.values()
            if s.sequence <= upto and not 0 < s.used_at <= upto
        ]
        yield STAGE_INDEX, json.dumps({"store": self._store_id.hex(), "stages": index}).encode()

    def load(self, data: bytes | None) -> None:
        """Takes back what ``rows`` wrote.

        A checkpoint has its own identity and log: stages of the store it was made from are not in it, and nobody could
        name them.
        """
        saved: dict[str, Any] = json.loads(data) if data else {"store": "", "stages": []}
        if saved["store"] != self._store_id.hex():
            return
        for sequence, kind, table, rows, nbytes, owner, time_us in saved["stages"]:
            self._add(LiveStage(sequence, StageKind(kind), table, rows, nbytes, owner, time_us))


def sequences_of(bulks: Iterable[Bulk]) -> list[int]:
    """The stages that a commit's appends and runs name."""
    return [bulk.stage for bulk in bulks if bulk.stage]


def staged_data(log: CommitLog, sequence: int) -> Any:
    """What a stage brings, from its record in the log. Raises NotFound if the log was truncated behind it."""
    return decode_stage(log.read(sequence).body).data[0]


def data_of(log: CommitLog, bulk: Bulk) -> Any:
    """The bytes of a bulk, from its stage if it names one. Raises NotFound likewise."""
    return staged_data(log, bulk.stage) if bulk.stage else bulk.parts[0]


# -- what callers call ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Staged:
    """A stage as a transaction has it. ``drop_late``: late events of it are left out."""

    sequence: int
    batch: pa.RecordBatch
    drop_late: bool = False


@dataclass(frozen=True, slots=True)
class Staging:
    """Makes stages, finds them, and gives them up."""

    index: Stages
    log: CommitLog
    committer: Committer
    settings: Settings
    check_open: Callable[[], None]

    def stage(self, schema: TableSchema, batch: pa.RecordBatch, *, owner: str, done: Done) -> None:
        """Logs events or rows durably and invisibly; ``done(None, stage id)`` once they are on disk."""
        if schema.kind not in ("event", "row"):
            raise InvalidArgument(f"only events and rows can be staged, and {schema.name!r} is of kind {schema.kind}")
        check_events(batch, self.settings)
        self.log_stage(StageKind.EVENTS, schema.origin, batch.num_rows, owner, [encode_ipc(coded(batch))], done)

    def log_stage(self, kind: StageKind, table: int, rows: int, owner: str, data: Sequence[Any], done: Done) -> None:
        self.check_open()
        stage = Stage(kind, table, rows, owner, data)

        def durable(error: BaseException | None, sequence: int) -> None:
            done(error, None if error else self.index.id_of(sequence))

        with self.committer.entry_lock:
            self.index.check_quota(stage.nbytes)
        self.committer.log_other(stage, durable)

    def stage_wait(self, schema: TableSchema, batch: pa.RecordBatch, *, owner: str) -> bytes:
        """The blocking form of ``stage``."""
        return waited(lambda done: self.stage(schema, batch, owner=owner, done=done))

    def load(self, schema: TableSchema, stage_ids: Sequence[bytes]) -> list[Staged]:
        """The events, or rows, of stages of ``schema``. Raises NotFound for what is no stage of this store.

        A stage that is not live any more loads as no events: whether that is an error is for the commit to say, once
        it has looked its token up. A repeated batch names stages that its first attempt has used up (R16).
        Raises Unavailable if one does not come to this node in time.
        """
        sequences = [self.index.sequence_of(stage_id) for stage_id in stage_ids]
        if len(set(sequences)) != len(sequences):
            raise InvalidArgument("a stage is named twice")
        if sequences and not self.committer.watermark.wait_for(max(sequences), _HERE_S):  # another node made it
            raise Unavailable(f"stage {max(sequences)} has not come to this node yet: try again")
        with self.committer.entry_lock:
            live = {sequence for sequence in sequences if self.index.is_live(sequence, schema.origin)}
        loaded: list[Staged] = []
        for sequence in sequences:
            batches: list[pa.RecordBatch] = []
            if sequence in live:
                with contextlib.suppress(NotFound):  # it expired meanwhile, and the log was truncated behind it
                    batches = own_batches(staged_data(self.log, sequence))
            batches = batches or [pa.RecordBatch.from_pylist([], arrow_schema(schema))]
            if schema.kind == "event":  # of rows, a column that is not there is not written
                batches = [padded(batch, schema) for batch in batches]
            loaded += [Staged(sequence, batch) for batch in batches]
        return loaded

    def held_by(self, owner: str) -> int:
        """Bytes that are staged and not committed, by owners whose name begins so."""
        with self.committer.entry_lock:
            return self.index.held_by(owner)

    def owned(self, owner: str) -> list[int]:
        """The live stages of an owner, and of those whose names begin with its and a slash."""
        with self.committer.entry_lock:
            return self.index.owned(owner)

    def discard(self, stage_ids: Sequence[bytes]) -> None:
        """Gives stages up; those that were committed or dropped before are passed over."""
        self.drop([self.index.sequence_of(stage_id) for stage_id in stage_ids])

    def drop(self, sequences: Sequence[int]) -> None:
        """``discard``, by their sequence numbers."""
        with self.committer.entry_lock:
            live = [s for s in sequences if self.index.is_live(s)]
        if live:  # they are given up where the record enters, which may be behind a commit that names them
            self.committer.log_other(Abort(stages=tuple(live)), lambda error, sequence: None)


def waited(call: Callable[[Done], None]) -> bytes:
    """Makes a stage and waits until it is durable. Returns its id."""
    settled: Future[tuple[BaseException | None, bytes | None]] = Future()
    call(lambda error, stage_id: settled.set_result((error, stage_id)))
    error, stage_id = settled.result()
    if error is not None:
        raise error
    assert stage_id is not None
    return stage_id
