"""Creating aggregates on a table that already has events: exact, while writers go on, without a write lock.

::

    c    catalog commit: the aggregate is BUILDING and unreadable. Every commit that enters the log after c carries
         its deltas (the catalog version is compared under the entry lock), so events above c are summed by writers
    ...  events at or below c are summed in chunks, whose deltas are combined as they come; the result is staged in
         pieces: durable, invisible, no CTS
    b    one commit names all the stages and makes the aggregate readable: their deltas apply at b

Every event is summed once: at or below c by a chunk, above c by its own commit. A crash on the way leaves a BUILDING
table; opening the store drops its stages and builds again, from the beginning, in the background: the logger
``kivi.store`` tells how far it is, and ``describe`` (``kivi tables``) says *building* until it is done. Snapshots below
b do not see the table. If the events cannot be summed, the aggregate is dropped again.

**In a cluster** the node that was asked builds, and says so in its heartbeats (``building``). If it
dies, another one builds again (``kivi.cluster.node``), also if the first was only thought dead: each attempt has stages
of its own, and of two commits b the second conflicts with the first. That attempt finds the tables ready, and is done.

Aggregates that are created together, in one commit c, are built by one pass over the events and become readable in one
commit b, also after a crash; if one of them cannot be, none is.

Memory follows the rows of the aggregate, not the events: a backfill is one transaction, so what its chunks do to one
row is one delta (R10, ``kivi.delta.combine``). Measured: 6 M events of 100,000 keys of 50 bytes, 5.4 s, and nothing on
top of what the store held already, where staging each chunk took 223 MB.

Events at or below c are read at a snapshot from after c, with the retention floor of that snapshot: what had been
forgotten by then is not summed, and ``complete_since`` of the aggregate says so. So it is for an aggregate over an
aggregate, too, whose rows may reach further back: those do not stand in for events, as they would have to be rolled up
beside the chunks without counting an event of both.

**Measures that are added** to an aggregate (``alter_aggregate``) are summed in the same way, beside those that it has,
which go on being read and written. c is the commit that adds their columns, which nobody sees yet; a run for them alone
is staged, in which the other columns change nothing; b makes them readable. If they cannot be summed they are given
up: their columns stay unseen, and have no deltas from then on. Float sums of theirs have the deltas of commits between
c and b first.

Float sums are added in commit order within each chunk, the chunks in commit order, and the result folds at b, before
the deltas after it in CTS order; the log holds the result, so this too is the same for every replay. Chunks end after
so many events, wherever those lie: when consolidation ran changes no bit. (An aggregate that was there from the start
has added them commit by commit, and may differ from one made later in the last bits.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from kivi.arrow.dictionaries import chunks
from kivi.delta.combine import Combining, pieces
from kivi.delta.derive import derive_all
from kivi.delta.runs import DeltaRun, neutral_column
from kivi.delta.sources import Order
from kivi.encoding.event_names import POSITION, STAMP
from kivi.errors import Conflict, KiviError, NotFound, Unavailable
from kivi.events.views import EventView
from kivi.model.schema import Alteration, TableSchema
from kivi.mvcc.record import StageKind
from kivi.store.event_parts import named_events
from kivi.store.host import Running
from kivi.store.retention import first_positions, remembered
from kivi.store.staging import waited
from kivi.store.tables import Tables
from kivi.store.view_filling import ViewFilling

__all__ = ["Backfill", "Progress"]

Progress = Callable[[int, int], None]

_log = logging.getLogger("kivi.store")
_ORDER: Final = (STAMP, POSITION)
_PIECE_ROWS: Final = 131_072
_PIECE_BYTES: Final = 16 << 20
_TELL_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Backfill:
    """Builds aggregates, and has views filled."""

    store: Running
    tables: Tables
    filling: ViewFilling
    building: set[int] = field(default_factory=set)
    """What is being built by this process: ids of tables."""

    def build(self, schemas: Sequence[TableSchema], progress: Progress | None) -> list[TableSchema]:
        """Sums the events at or below the catalog commit of these aggregates of one source, then makes them readable.

        Of views, likewise the rows (``kivi.store.view_filling``). Likewise measures that are being added to one of
        them. Returns their definitions. Whatever goes wrong (a null group key, no memory) is raised, and they are
        dropped again, or the measures given up.
        """
        try:
            return self._build(schemas, progress)
        except Exception:
            whole = [self.store.catalog.entered.successor(schema) for schema in schemas]
            if any(whole):  # the source was overwritten meanwhile: there is nothing older left to sum
                return [schema for schema in whole if schema is not None]
            self._give_up(schemas)
            raise

    def _build(self, schemas: Sequence[TableSchema], progress: Progress | None) -> list[TableSchema]:
        """``build``; after an error the aggregates are still there, BUILDING, and their stages are not."""
        ids = {schema.id for schema in schemas}
        self.building.update(ids)
        try:
            return self._built(schemas, progress)
        except (Conflict, NotFound):
            entered = self.store.catalog.entered
            now = [entered.by_id.get(schema.id) for schema in schemas]
            if all(schema is not None and _is_built(schema) for schema in now):  # by another node
                return [schema for schema in now if schema is not None]
            raise
        finally:
            self.building.difference_update(ids)

    def _built(self, schemas: Sequence[TableSchema], progress: Progress | None) -> list[TableSchema]:
        if schemas[0].kind == "view":
            return [self.filling.fill(schema, progress) for schema in schemas]
        every = f"backfill/{schemas[0].id}"
        owner = f"{every}/{secrets.token_hex(4)}"  # of this attempt; of a node that was thought dead there may be two
        first, upto = _unbuilt(schemas[0])
        parts = [
            dataclasses.replace(
                schema, columns=schema.columns[first:], measures=schema.measures[first:], derived=(), alterations=()
            )
            for schema in schemas
        ]
        try:
            if not self.store.log.is_judged_again:  # what an attempt has left that ended with its process
                self.store.staging.drop(self.store.staging.owned(every))
            done = 0
            combining = [Combining(part, _PIECE_ROWS) for part in parts]
            with self._events(schemas[0], upto) as (view, recent):
                self.store.shards.check(schemas[0])  # it may have given some up since it was asked
                total = view.rows + sum(batch.num_rows for batch in recent)
                batches = itertools.chain(view.scan(naming=_ORDER), recent)
                for chunk in chunks(batches, self.store.settings.block_rows):
                    order = Order(*(chunk.column(name).to_numpy().astype(np.uint64) for name in _ORDER))
                    for sums, run in zip(combining, derive_all(parts, chunk, order=order), strict=True):
                        sums.add(run)
                    done += chunk.num_rows
                    if progress is not None:
                        progress(done, total)
            stages = [
                self._staged(schema, owner, sums.result(), first)
                for schema, sums in zip(schemas, combining, strict=True)
            ]
            if schemas[0].state == "ready":
                altered = functools.partial(_with_measures, schemas[0], view.floor_us)
                built = [self.tables.alter(schemas[0].name, altered, stages[0])]
            else:
                ready = [dataclasses.replace(s, state="ready", complete_since_us=view.floor_us) for s in schemas]
                built = self.tables.redefine(list(zip(ready, stages, strict=True)))
            owner = every  # no attempt has a use for its stages any more
            return built
        finally:
            if self.store.is_open:
                self.store.staging.drop(self.store.staging.owned(owner))

    @contextlib.contextmanager
    def _events(self, schema: TableSchema, upto: int) -> Iterator[tuple[EventView, list[pa.RecordBatch]]]:
        """The source's events at or below ``upto``, a catalog commit: those in blocks, then those in memory.

        Events before ``floor_us`` of the view had been forgotten, and are not given.
        """
        store, source = self.store, schema.source_id
        with store.snapshots.opened(min_snapshot=upto, ttl_s=store.settings.lease_ttl_max_s) as lease:
            events = store.event_tables.of(source)
            if events is None:
                raise NotFound(f"the source of {schema.name!r} was dropped")
            take = functools.partial(events.view, upto, floor_at=lease.ts)
            view, waiting = store.retention.captured(store.pending, source, upto, take, floor_at=lease.ts)
            with view:
                named = map(named_events, waiting, first_positions(waiting))
                kept = (remembered(batch, events.schema, view.floor_us) for batch in named)
                yield view, [batch for batch in kept if batch.num_rows]

    def _staged(self, schema: TableSchema, owner: str, run: DeltaRun | None, first: int) -> list[int]:
        """Stages that hold the run, in key order. It has the columns from ``first`` on."""
        if run is None or not run.rows:
            return []
        before = tuple(neutral_column(column, run.rows) for column in schema.columns[:first])
        run = DeltaRun(run.keys, run.cts, (*before, *run.columns), distinct=run.distinct)
        rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES * run.rows // run.nbytes))
        stages = []
        for piece in pieces(run, rows):
            stage_id = waited(
                lambda settled, piece=piece: self.store.staging.log_stage(  # type: ignore[misc]
                    StageKind.RUN, schema.origin, piece.rows, owner, piece.to_buffers(), settled
                )
            )
            stages.append(self.store.staging.index.sequence_of(stage_id))
        return stages

    def _give_up(self, schemas: Sequence[TableSchema]) -> None:
        """Drops the aggregates, or gives up the measures. Where that cannot be logged, opening builds again."""
        try:
            if schemas[0].state == "ready":
                self.tables.alter(schemas[0].name, functools.partial(_failed, schemas[0]))
            else:
                self.tables.drop_those(schemas)
        except Exception as error:  # the error that led here is the one to raise
            if self.store.is_open:
                _log.error("%s is left building until the store is opened again: %s", _named(schemas), error)

    def unfinished(self) -> list[list[TableSchema]]:
        """What is BUILDING, here or elsewhere or by nobody; those that were created together, together."""
        found: dict[int, list[TableSchema]] = {}
        for schema in list(self.store.catalog.entered.by_id.values()):
            if schema.is_building:  # those of one commit were created together; measures are added to one at a time
                together = schema.created_ts if schema.state == "building" else -schema.id
                found.setdefault(together, []).append(schema)
        return list(found.values())

    def resume(self, unfinished: Sequence[Sequence[TableSchema]]) -> threading.Thread | None:
        """Builds what a crash left BUILDING, in the background; None if there is nothing."""
        if not unfinished:
            return None
        self.building.update(schema.id for schemas in unfinished for schema in schemas)

        def work() -> None:
            for schemas in unfinished:
                self._resume(schemas)

        thread = threading.Thread(target=work, name="kivi-backfill", daemon=True)
        thread.start()
        return thread

    def _resume(self, schemas: Sequence[TableSchema]) -> None:
        """Builds those of one commit, and tells the log: nobody waits for them. What may pass by itself (no space) does
        not drop them."""
        started = told = time.monotonic()
        seen = 0
        name = _named(schemas)

        def progress(done: int, total: int) -> None:
            nonlocal told, seen
            seen = done
            if (now := time.monotonic()) - told >= _TELL_EVERY_S:
                told = now
                if schemas[0].kind == "view":
                    _log.info("%s: %d rows of its source are there", name, done)
                else:
                    _log.info("%s: %d of %d events are summed", name, done, total)

        _log.info("%s was left building: it is built again, from the beginning", name)
        try:
            self._build(schemas, progress)
        except Exception as error:
            if not self.store.is_open or not any(s.id in self.store.catalog.entered.by_id for s in schemas):
                return  # it goes on when the store is opened again; or somebody has dropped it
            if isinstance(error, Unavailable):
                then = "it stays building, until the store is opened again or another node takes it up"
            else:
                self._give_up(schemas)
                added = schemas[0].state == "ready"
                then = "its new measures are given up; add them again" if added else "it is dropped; create it again"
            known = isinstance(error, KiviError)
            _log.error("%s could not be built (%s): %s", name, error, then, exc_info=not known)
            return
        took = time.monotonic() - started
        if schemas[0].kind == "view":
            _log.info("%s is complete after %.1f s", name, took)
        else:
            _log.info("%s is complete: %d events in %.1f s", name, seen, took)


def _named(schemas: Sequence[TableSchema]) -> str:
    return f"{schemas[0].kind} {', '.join(repr(schema.name) for schema in schemas)}"


def _unbuilt(schema: TableSchema) -> tuple[int, int]:
    """The first of the columns that are being built, and the catalog commit after which every commit derives them."""
    if schema.state == "building":
        return 0, schema.created_ts
    return schema.alterations[-1].columns, schema.alterations[-1].cts


def _is_built(schema: TableSchema) -> bool:
    """Whether it is whole, and no measures of it were given up last."""
    return not schema.is_building and not (schema.alterations and schema.alterations[-1].state == "failed")


def _with_measures(schema: TableSchema, floor_us: int | None, now: TableSchema) -> TableSchema:
    """``now`` with the measures that were being added to ``schema``, readable."""
    last = _being_added(schema, now)
    ready = dataclasses.replace(last, cts=0, state="ready", floor_us=floor_us, more=())
    return dataclasses.replace(now, derived=(*now.derived, *last.more), alterations=(*now.alterations[:-1], ready))


def _failed(schema: TableSchema, now: TableSchema) -> TableSchema:
    """``now`` without the measures that were being added to ``schema``: their columns stay, and measure nothing."""
    last = _being_added(schema, now)
    nothing = [
        dataclasses.replace(measure, source="", expression=None, where=None) for measure in now.measures[last.columns :]
    ]
    failed = dataclasses.replace(last, state="failed", more=())
    return dataclasses.replace(
        now, measures=(*now.measures[: last.columns], *nothing), alterations=(*now.alterations[:-1], failed)
    )


def _being_added(schema: TableSchema, now: TableSchema) -> Alteration:
    if now.id != schema.id or now.alterations[-1:] != schema.alterations[-1:]:
        raise NotFound(f"aggregate {schema.name!r} was dropped or overwritten meanwhile", table=schema.name)
    return schema.alterations[-1]
