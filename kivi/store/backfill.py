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
b do not see the table. If the events cannot be summed, the aggregate is dropped again: **only what is still being built
is ever given up**, which is looked at in the catalog commit that gives it up, so of this one and b the second conflicts
with the first. Whoever fails at what is ready by then is done.

**In a cluster** the node that was asked builds, of events of whoever holds them (``kivi.store.spanning``), at a
snapshot that all nodes keep meanwhile; and says so in its heartbeats (``building``). If it
dies, another one builds again (``kivi.cluster.node``), also if the first was only thought dead: each attempt has stages
of its own, and of two commits b the second conflicts with the first. That attempt finds the tables ready, and is done;
so is one that stood still for longer than its snapshot was kept. Once nothing is left to build, the stages of all
attempts at that are dropped, and of nothing else.

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

from kivi.arrow.dictionaries import chunks
from kivi.delta.combine import Combining, pieces
from kivi.delta.derive import derive_all
from kivi.delta.runs import DeltaRun, neutral_column
from kivi.delta.sources import Order
from kivi.encoding.event_names import POSITION, STAMP
from kivi.errors import KiviError, NotFound, Unavailable
from kivi.log.shards import EVERY
from kivi.model.schema import Alteration, TableSchema
from kivi.mvcc.record import StageKind
from kivi.store.event_selection import Captured
from kivi.store.moving import Owner
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
_PIN_S: Final = 60.0
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Backfill:
    """Builds aggregates, and has views filled."""

    store: Owner
    tables: Tables
    filling: ViewFilling
    building: set[int] = field(default_factory=set)
    """What is being built by this process: ids of tables."""

    def build(
        self, schemas: Sequence[TableSchema], progress: Progress | None, *, is_again: bool = False
    ) -> list[TableSchema]:
        """Sums the events at or below the catalog commit of these aggregates of one source, then makes them readable.

        Of views, likewise the rows (``kivi.store.view_filling``). Likewise measures that are being added to one of
        them. Returns their definitions, also if another node has built them, or if their source was overwritten
        meanwhile: there is nothing older left to sum then. Whatever goes wrong (a null group key, no memory) is raised,
        and they are dropped again, or the measures given up; but what may pass by itself does not drop those that
        ``is_again``: they stay BUILDING.
        """
        ids = {schema.id for schema in schemas}
        self.building.update(ids)
        try:
            return self._build(schemas, progress)
        except Exception as error:
            if not (is_again and isinstance(error, Unavailable)):
                self._give_up(schemas)
            entered = self.store.catalog.entered
            now = [entered.successor(schema) or entered.by_id.get(schema.id) for schema in schemas]
            built = [
                one for schema, one in zip(schemas, now, strict=True) if one is not None and _is_built(schema, one)
            ]
            if built:
                return built
            raise
        finally:
            if self.store.is_open and not self._left(schemas):
                self.store.staging.drop(self.store.staging.owned(_owner(schemas)))
            self.building.difference_update(ids)

    def _build(self, schemas: Sequence[TableSchema], progress: Progress | None) -> list[TableSchema]:
        """``build``, one attempt; after an error the aggregates are as they were, and its stages are not."""
        if schemas[0].kind == "view":
            return [self.filling.fill(schema, progress) for schema in schemas]
        owner = f"{_owner(schemas)}/{secrets.token_hex(4)}"  # there may be two attempts, see above
        first, upto = _unbuilt(schemas[0])
        parts = [
            dataclasses.replace(
                schema, columns=schema.columns[first:], measures=schema.measures[first:], derived=(), alterations=()
            )
            for schema in schemas
        ]
        try:
            if not self.store.log.is_judged_again:  # what an attempt has left that ended with its process
                self.store.staging.drop(self.store.staging.owned(_owner(schemas)))
            done = 0
            combining = [Combining(part, _PIECE_ROWS) for part in parts]
            with self._events(schemas[0], upto) as (captured, goes_on):
                view = captured.view
                columns = captured.schema.output_columns(None)
                recent = list(captured.in_memory((None, None), None, [*columns, *_ORDER]))
                total = view.rows + sum(batch.num_rows for batch in recent)
                batches = itertools.chain(view.scan(columns=columns, naming=_ORDER), recent)
                for chunk in chunks(batches, self.store.settings.block_rows):
                    order = Order(*(chunk.column(name).to_numpy().astype(np.uint64) for name in _ORDER))
                    # Measures are added to rows that are there.
                    runs = derive_all(parts, chunk, order=order, are_stored=schemas[0].state == "ready")
                    for sums, run in zip(combining, runs, strict=True):
                        sums.add(run)
                    done += chunk.num_rows
                    goes_on()
                    if progress is not None:
                        progress(done, max(done, total))
            stages = [
                self._staged(schema, owner, sums.result(), first)
                for schema, sums in zip(schemas, combining, strict=True)
            ]
            if schemas[0].state == "ready":
                altered = functools.partial(_with_measures, schemas[0], view.floor_us)
                return [self.tables.alter(schemas[0].name, altered, stages[0])]
            ready = [dataclasses.replace(s, state="ready", complete_since_us=view.floor_us) for s in schemas]
            return self.tables.redefine(list(zip(ready, stages, strict=True)))
        finally:
            if self.store.is_open:
                self.store.staging.drop(self.store.staging.owned(owner))

    @contextlib.contextmanager
    def _events(self, schema: TableSchema, upto: int) -> Iterator[tuple[Captured, Callable[[], None]]]:
        """The source's events at or below ``upto``, a catalog commit, of whoever holds them, and what is to be called
        every so often while they are read.

        Events before ``floor_us`` of the view had been forgotten, and are not given.
        """
        store = self.store
        with contextlib.ExitStack() as opened:
            if store.shards.is_partial(schema):
                lease, goes_on = opened.enter_context(store.snapshots.kept_by_all(_TIMEOUT_S, _PIN_S))
            else:
                ttl_s = store.settings.lease_ttl_max_s
                lease = opened.enter_context(store.snapshots.opened(min_snapshot=upto, ttl_s=ttl_s))
                goes_on = _goes_on
            events = store.event_tables.of(schema.source_id)
            if events is None:
                raise NotFound(f"the source of {schema.name!r} was dropped")
            captured = store.reads.captured(lease, events.schema.at(lease.ts), asked=EVERY, upto=upto)
            opened.enter_context(captured.view)
            yield captured, goes_on

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

    def _left(self, schemas: Sequence[TableSchema]) -> list[TableSchema]:
        """As they are now: those that are still being built, as they were when ``schemas`` were read."""
        by_id = self.store.catalog.entered.by_id
        return [now for schema in schemas if (now := by_id.get(schema.id)) is not None and _is_left(schema, now)]

    def _give_up(self, schemas: Sequence[TableSchema]) -> None:
        """Drops the aggregates, or gives up the measures, that are still being built. Where that cannot be logged,
        opening builds again."""
        try:
            if schemas[0].state == "building":
                self.tables.drop_those(lambda: self._left(schemas))
            elif self._left(schemas):
                self.tables.alter(schemas[0].name, functools.partial(_failed, schemas[0]))
        except Exception as error:  # the error that led here is the one to raise
            if self.store.is_open and self._left(schemas):
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
            self.build(schemas, progress, is_again=True)
        except Exception as error:
            if not self.store.is_open:
                return  # it goes on when the store is opened again
            if self._left(schemas):
                then = "it stays building, until the store is opened again or another node takes it up"
            elif schemas[0].state == "ready":
                then = "its new measures are given up; add them again"
            else:
                then = "it is dropped; create it again"
            known = isinstance(error, KiviError)
            _log.error("%s could not be built (%s): %s", name, error, then, exc_info=not known)
            return
        took = time.monotonic() - started
        if schemas[0].kind == "view":
            _log.info("%s is complete after %.1f s", name, took)
        else:
            _log.info("%s is complete: %d events in %.1f s", name, seen, took)


def _goes_on() -> None:
    pass


def _named(schemas: Sequence[TableSchema]) -> str:
    return f"{schemas[0].kind} {', '.join(repr(schema.name) for schema in schemas)}"


def _owner(schemas: Sequence[TableSchema]) -> str:
    """Of the stages of all attempts at these: what is added later has others."""
    return f"backfill/{schemas[0].id}/{_unbuilt(schemas[0])[1]}"


def _unbuilt(schema: TableSchema) -> tuple[int, int]:
    """The first of the columns that are being built, and the catalog commit after which every commit derives them."""
    if schema.state == "building":
        return 0, schema.created_ts
    return schema.alterations[-1].columns, schema.alterations[-1].cts


def _is_left(schema: TableSchema, now: TableSchema) -> bool:
    """Whether what was being built of ``schema`` is being built still."""
    return now.id == schema.id and now.is_building and _unbuilt(now) == _unbuilt(schema)


def _is_built(schema: TableSchema, now: TableSchema) -> bool:
    """Whether what was being built of ``schema`` is there, in it or in what has overwritten it."""
    if schema.state == "building":
        return now.state == "ready"
    first, _ = _unbuilt(schema)
    return any(one.columns == first and one.state == "ready" for one in now.alterations)


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
    if not _is_left(schema, now):
        raise NotFound(f"aggregate {schema.name!r} was dropped, overwritten or built meanwhile", table=schema.name)
    return schema.alterations[-1]
