"""Consolidation: folding pending operations into base, a little all the time (R14).

One pass, up to the watermark F::

    boundaries   F = W and every open S < F, under the leases' mutex: nobody can open an S < F unnoticed after this
    rows         in chunks: base rows fetched together, folded, written in one engine batch, dropped from pending
                 a state that an open S (or the table's history) still needs becomes a row in the version key space
    events       pending batches become blocks, together with the table's ``events_upto``
    position     last of all: tokens, the timeline, and "base includes everything at or below F"

In the background most passes are *light*: they combine what aggregates have pending in memory (``mvcc.combine``),
seal the events that fill a block, and fold the rest; the position stays. A whole pass follows every ``fold_every_s``,
or when light ones do not keep pending below its soft limit, or much log has been written. So a base row is written
every few seconds however many commits touch it, and blocks are of their full size from the start.

The engine keeps some prefix of these batches after a crash. Replay starts after the recorded position; operations
that base has already are at or below its rows' stamps and inert. So a crash anywhere in a pass is harmless, and the
log may be truncated below a position once a flush has made it durable and no live stage lies before it.

A pass touches only rows that have pending operations, and each engine write is bounded, so there are no waves:
RocksDB's write holds the GIL (measured: 0.04 ms per 100 kB), a chunk of 2,048 rows about a millisecond.

What computes in columns takes *turns* (``computing``): a kernel lets go of the GIL for some microseconds and then asks
for it again, and two threads that do so hand it to each other at every kernel, a hundred times a batch, while readers
wait behind both. With turns, on two cores, a read beside the append stream took 4.3 ms instead of 9.5 (median) and 14
instead of 36 (99th percentile), and the stream beside it was a quarter faster. They are taken in order: while a turn
went to whoever was first to ask, folding had it again and again, and every few seconds an append waited for one or two.
For the same reason a whole pass does not combine what it folds: that was one long turn for each table.

Appends go on while a pass lasts, and a long one would leave readers a hundred runs to search. So what comes in
meanwhile is combined between its steps. The last 12 slots of an endpoint, beside batches of 100,000: 12 runs instead of
24 (median; of 99 in 100, 27 instead of 80), 2.6 ms instead of 3.9 (99th percentile: 15 instead of 19). With eight
aggregates, whose folds take long, a stream of such batches is half as fast again (2.0 M events a second, 1.35 without):
the next fold finds fewer runs. (8 and 4 s each, alternately, three times.)

Housekeeping takes its steps between two rounds, and between the steps of a pass where that lasts long: what it writes
goes by the recorded position, as if it came before the pass.

What a pass leaves behind for open snapshots goes later, a bounded step at a time: ``mvcc.sweep``.

Where base cannot be written, for want of disk space most of all, nothing is dropped from pending: the same is tried
again, and only a flush counts as success (`_round`). What happens meanwhile: ``mvcc.shortage``.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from kivi.delta.runs import Array
from kivi.encoding.event_names import EventNames
from kivi.encoding.keyspaces import meta_key
from kivi.engine import Engine, WriteBatch
from kivi.errors import Unavailable
from kivi.log import CommitLog, LogFailed
from kivi.model.schema import TableSchema
from kivi.mvcc.combine import combine, is_combined
from kivi.mvcc.folding import Folding
from kivi.mvcc.leases import Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.shortage import BASE, Shortage
from kivi.mvcc.sweep import Sweeper
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.tokens import Tokens
from kivi.mvcc.turns import Turns
from kivi.runtime.histogram import Histogram
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.runtime.settings import Settings

__all__ = ["AHEAD", "POSITION", "Consolidator", "Sealer"]

POSITION: Final = meta_key("position")
AHEAD: Final = meta_key("ahead")
"""What base may have: of a log whose records behind the position are judged again, when the store is opened."""
"""META row: base includes every commit at or below this CTS (u64 little endian)."""

_RUNS_MEANWHILE: Final = 16
"""So many runs that came in during a pass are worth combining before it ends."""
_TOKENS_AT_ONCE: Final = 2_048
"""So many are written at once."""
_RETRY_S: Final = 0.5
_HOUSEKEEPING_S: Final = 0.25
"""So often housekeeping takes a step while a pass lasts, which may be many seconds."""
_LOG_FACTOR: Final = 2
"""A whole pass is due after so many times the pending budget was committed: the log that a crash leaves to replay."""


class Sealer(Protocol):
    """The part of an event table that consolidation uses: it turns pending batches into blocks."""

    def seal(self, batch: WriteBatch, parts: Sequence[tuple[Array, Array, pa.RecordBatch]], upto: int) -> None: ...

    def erase(self, batch: WriteBatch, cts: int, names: EventNames) -> None: ...

    def compact(self, max_rows: int, unneeded: int) -> int: ...


class StageIndex(Protocol):
    """The part of the stages that consolidation uses: how far back they need the log, and their rows."""

    def oldest(self, upto: int) -> int | None: ...

    def rows(self, upto: int) -> Iterator[tuple[bytes, bytes]]: ...

    def folded(self, upto: int) -> None: ...


@dataclass(eq=False)
class Consolidator:
    """One at a time: ``run`` holds a mutex. ``start`` runs it in the background."""

    engine: Engine
    log: CommitLog
    pending: Pending
    leases: Leases
    tokens: Tokens
    timeline: Timeline
    settings: Settings
    _: KW_ONLY
    schema_of: Callable[[int], TableSchema | None]
    schemas: Callable[[], list[TableSchema]]
    sealer_of: Callable[[int], Sealer | None]
    stages: StageIndex
    before_position: Callable[[int], None]
    with_position: Callable[[WriteBatch, int], None]
    entry_lock: Any
    now_us: Callable[[], int]
    position: int
    computing: Turns
    shortage: Shortage

    def __post_init__(self) -> None:
        self.durable_position = self.position
        self.mutex = threading.RLock()
        """Whoever writes what passes write holds it; a pass itself, while it lets housekeeping take a step."""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._compactable: set[int] = set()
        self._rounds = 0
        self._thread: threading.Thread | None = None
        self._unflushed_bytes = 0
        self._flushed_at = time.monotonic()
        self.sweeper = Sweeper(
            self.engine, self.leases, self.tokens, self.timeline, self.settings,
            schema_of=self.schema_of, schemas=self.schemas, now_us=self.now_us, log=self.log, write=self._write,
        )  # fmt: skip
        self._folding = Folding(
            self.engine, self.pending, self.computing, max_rows=self.settings.consolidate_rows,
            write=self._write, kept=self.sweeper.kept, meanwhile=lambda: self._meanwhile(),
        )  # fmt: skip
        self._seen = self.position
        self._ahead = max(self.log.last, int.from_bytes(self.engine.get(AHEAD) or b"", "little"))
        self._replayed = self._ahead
        self._begun: dict[int, int] = {}  # table -> up to where a fold of it was begun
        self._whole_upto = 0  # F of the newest whole pass
        self._applied_bytes = 0
        self._folded_at = time.monotonic()
        self.passes = 0
        self._events_sealed = 0
        self.busy_s = 0.0
        self.pass_times = Histogram()
        self.compactions = self.compacted_rows = 0
        self._errors_before = 0
        self.failure: BaseException | None = None
        self._also: Callable[[], None] = lambda: None
        self._housekeeping_at = 0.0

    # -- background -----------------------------------------------------------------------------

    def start(self, also: Callable[[], None]) -> None:
        """Runs passes until ``stop``; ``also`` is one bounded step of the store's own housekeeping."""
        self._also = also
        self._thread = threading.Thread(target=self._work, name="kivi-consolidate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Waits for the pass in progress. Nothing is folded after it returns."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """The last pass of a graceful stop: everything visible is in base, durably."""
        with self.paused():
            pass

    @contextmanager
    def paused(self) -> Iterator[int]:
        """Base includes everything at or below the position it gives and nothing else, durably, and stands still.

        One hold of the mutex: a light pass after the whole one would fold what is later than the position.
        """
        with self.mutex:
            self._pass()
            self.flush()
            yield self.position

    def hurry(self) -> int:
        """Writers are waiting for room, or soon will. Gives a number that grows while consolidation gets on."""
        self._wake.set()
        return self.rows_folded + self.passes

    def _work(self) -> None:
        use_batch_scheduling()
        while not self._stop.is_set():
            hurried = self._wake.wait(self.settings.consolidate_every_s)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                if self._round():
                    self._keep_house()
                else:
                    self._stop.wait(_RETRY_S)
            except Unavailable:  # the log has no space, or is behind: service resumes by itself, so does this
                self._stop.wait(_RETRY_S)
            except BaseException as error:  # a damaged store must stop answering, not spin
                self.failure = error
                return
            if hurried:
                time.sleep(0.001)

    def _round(self) -> bool:
        """Whatever is due; False if base could not be written, which the next round tries again."""
        try:
            if self.shortage.why(BASE) is not None:
                with self.paused():  # only a flush shows that base can be written again
                    self.shortage.works(BASE)
            due = self._is_due()
            if not due:
                self.run_light()
                due = self.pending.nbytes > self.settings.pending_soft_bytes  # what is left is not for light passes
            if due:
                self.run()
            self.sweep()
            self.compact()
        except LogFailed:  # at truncation: the log tells that itself, and it has nothing to do with base
            return False
        except Unavailable as error:
            self.shortage.failed(BASE, error)
            return False
        return True

    # -- one pass -------------------------------------------------------------------------------

    def run(self) -> int:
        """Folds everything up to the watermark of now. Returns that watermark."""
        with self.mutex:
            upto = self._pass()
            self._maybe_flush()
            return upto

    def _pass(self) -> int:
        started = time.perf_counter()
        upto, keep = self.leases.boundaries()
        if upto > self.position:
            self._whole_upto = upto
            self._goes_ahead(upto)
            with self.entry_lock:
                self.tokens.cut()
            for schema in self._unfolded():
                if schema.kind == "event":
                    self._seal(schema, upto)
                    self._erase(schema, upto)
                else:
                    if is_combined(schema):
                        self._begun[schema.id] = upto
                    self._folding.fold(schema, upto, keep)
            self._record_position(upto)
            self.passes += 1
        self._seen, self._applied_bytes = upto, self.pending.applied_bytes
        self._folded_at = time.monotonic()
        self._took(time.perf_counter() - started)
        return upto

    def _goes_ahead(self, upto: int) -> None:
        """Base may have what lies above the position, from here on."""
        if self.log.is_judged_again and upto > self._ahead:
            batch = WriteBatch()
            batch.put(AHEAD, upto.to_bytes(8, "little"))
            self._write(batch)
            self._ahead = upto

    def _unfolded(self) -> Iterator[TableSchema]:
        """The tables of which something is pending. What is left of one that was dropped goes.

        Rows are written as their table is defined by now, which may be above what is folded.
        """
        for table in self.pending.tables():
            if (schema := self.schema_of(table)) is not None:
                self._goes_ahead(max((one.cts for one in schema.alterations), default=0))
                yield schema
            else:
                self.pending.drop_table(table)

    def _above(self, table: int) -> int:
        """Base has no later commit of the table: see ``mvcc.combine``."""
        return self._begun.get(table, self._replayed)

    def _is_due(self) -> bool:
        settings, pending = self.settings, self.pending
        return (
            time.monotonic() - self._folded_at >= settings.fold_every_s
            or pending.applied_bytes - self._applied_bytes > _LOG_FACTOR * settings.pending_soft_bytes
        )

    def run_light(self) -> None:
        """A light pass: pending stays small and quick to search, and base is written only where that cannot wait."""
        with self.mutex:
            started = time.perf_counter()
            upto, keep = self.leases.boundaries()
            if upto == self._seen:
                return
            self._goes_ahead(upto)
            for schema in self._unfolded():
                if schema.kind == "event":
                    self._seal(schema, upto, full=True)
                elif is_combined(schema):
                    with self.computing:
                        combine(self.pending, schema, self._above(schema.id), upto, keep)
                else:
                    self._folding.fold(schema, upto, keep)
            self._seen = upto
            self.passes += 1
            self._took(time.perf_counter() - started)

    def _meanwhile(self) -> None:
        """Between two steps of a pass."""
        self._combine_meanwhile()
        if time.monotonic() >= self._housekeeping_at:
            with suppress(Unavailable):  # of the log, perhaps, which is no failure of the pass: the round ends with it
                self._keep_house()

    def _keep_house(self) -> None:
        """What this writes is as if it came before the pass: it goes by the position that is recorded."""
        self._housekeeping_at = time.monotonic() + _HOUSEKEEPING_S
        self._also()

    def _combine_meanwhile(self) -> None:
        """Combines what has come in since the pass began, as a light one would.

        Nothing at or below the F of a whole pass, whether or not it has come to that table: what base will have with
        the position must not become part of a row that it will not have.
        """
        upto, keep = self.leases.boundaries()  # before the definitions: they are those of every commit up to there
        for schema in self._unfolded():
            above = max(self._above(schema.id), self._whole_upto)
            if is_combined(schema) and self.pending.runs_above(schema.id, above) >= _RUNS_MEANWHILE:
                with self.computing:
                    combine(self.pending, schema, above, upto, keep)

    @property
    def rows_folded(self) -> int:
        """Rows that were written to base, and events that were sealed."""
        return self._folding.rows + self._events_sealed

    def _took(self, seconds: float) -> None:
        self.busy_s += seconds
        self.pass_times.observe(seconds)

    def _write(self, batch: WriteBatch) -> None:
        if len(batch):
            self.engine.write(batch)
            self._unflushed_bytes += batch.size_bytes

    def _record_position(self, upto: int) -> None:
        self.before_position(upto)
        batch, tokens = WriteBatch(), self.tokens.rows(upto)
        while part := [*itertools.islice(tokens, _TOKENS_AT_ONCE)]:  # without the position they say what the log says
            if len(batch) and not self.log.is_judged_again:
                self._write(batch)
                batch = WriteBatch()
            keys, values = zip(*part, strict=True)
            batch.put_all(keys, values)
        with self.entry_lock:
            rows = [*self.tokens.batch_rows(upto), *self.stages.rows(upto)]
            self.with_position(batch, upto)
        rows += self.timeline.take(upto)
        for key, value in rows:
            batch.put(key, value)
        batch.put(POSITION, upto.to_bytes(8, "little"))
        self._write(batch)
        self.tokens.drop(upto, self.entry_lock)
        self.timeline.forget(upto)
        self.position = upto

    def _maybe_flush(self) -> None:
        if self.position == self.durable_position:
            return
        settings = self.settings
        waited = time.monotonic() - self._flushed_at
        if self._unflushed_bytes >= settings.flush_bytes or waited >= settings.flush_every_s:
            self.flush()

    @property
    def engine_errors(self) -> int:
        """Errors of the engine's background work that it has not got over by a flush."""
        return max(0, self.engine.stats().get("background_errors", 0) - self._errors_before)

    def flush(self) -> None:
        """Makes the recorded position durable and drops the log below it. Called with the mutex held, or alone."""
        position = self.position
        self.engine.flush()
        self._errors_before = self.engine.stats().get("background_errors", 0)
        self._unflushed_bytes = 0
        self._flushed_at = time.monotonic()
        self.durable_position = position
        with self.entry_lock:
            oldest = self.stages.oldest(position)
            self.stages.folded(position)
        self.log.truncate(position + 1 if oldest is None else min(position + 1, oldest))

    def save_place(self) -> None:
        """Makes durable how far the log was read where nothing else has to be written: entries about nodes only."""
        with self.mutex:
            batch = WriteBatch()
            with self.entry_lock:
                self.with_position(batch, self.position)
            self._write(batch)
            self.flush()

    # -- events ---------------------------------------------------------------------------------

    def _seal(self, schema: TableSchema, upto: int, *, full: bool = False) -> None:
        """Blocks for all that is pending; ``full``: only as many as are of their full size."""
        sealer = self.sealer_of(schema.id)
        if sealer is None or (full and self.pending.event_rows(schema.id) < self.settings.block_rows):
            return  # as nearly always: where each commit brings an event, thousands of them wait for a block
        parts: list[tuple[Array, Array, pa.RecordBatch]] = []
        rows = 0
        waiting = self.pending.events(schema.id, upto)
        for i, item in enumerate(waiting):
            cts = item.last
            parts.append((*item.commits(), item.batch))
            rows += item.batch.num_rows
            last_of_commit = i + 1 == len(waiting) or waiting[i + 1].last != cts
            if last_of_commit and (rows >= self.settings.block_rows or (i + 1 == len(waiting) and not full)):
                writes = WriteBatch()
                with self.computing:
                    sealer.seal(writes, parts, cts)
                    self._write(writes)
                self.pending.drop_events(schema.id, cts)
                self._compactable.add(schema.id)
                self._events_sealed += rows
                parts, rows = [], 0
                self._meanwhile()

    def _erase(self, schema: TableSchema, upto: int) -> None:
        """Tells the blocks which events retractions removed: all of those are sealed, being older."""
        if (sealer := self.sealer_of(schema.id)) is None:
            return
        for cts, names in self.pending.retracted(schema.id, upto):
            writes = WriteBatch()
            sealer.erase(writes, cts, names)
            self._write(writes)
            self._compactable.add(schema.id)
        self.pending.drop_retracted(schema.id, upto)

    def sweep(self) -> None:
        """One bounded step of what nobody needs any more."""
        with self.mutex:
            self.sweeper.step(self.durable_position, trim=self.passes % 64 == 0)

    def compact(self) -> None:
        """One bounded step of block compaction in each event table that has work."""
        self._rounds += 1
        for schema in self.schemas():
            now_and_then = self._rounds % 32 == 0  # for data that nobody needs any more
            due = schema.id in self._compactable or now_and_then
            if due and schema.kind == "event" and not self._stop.is_set():
                with self.mutex:
                    self._compact(schema)

    def unneeded(self) -> int:
        """No snapshot below it is or will be open, and no crash brings back a base from before it."""
        durable = self.durable_position  # read first: a snapshot that opens from here on is not below it
        oldest = self.leases.oldest()
        return durable if oldest is None else min(durable, oldest)

    def _compact(self, schema: TableSchema) -> None:
        if (sealer := self.sealer_of(schema.id)) is not None:
            with self.computing:
                merged = sealer.compact(self.settings.block_rows, self.unneeded())
            if merged:
                self.compactions += 1
                self.compacted_rows += merged
                self._compactable.add(schema.id)
            else:
                self._compactable.discard(schema.id)
