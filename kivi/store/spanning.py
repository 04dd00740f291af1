"""Reads that span owners: what a node of a cluster does not hold it asks others for, at the S of the snapshot.

::

    asker   shards of the read  =  those held here  +  those of other nodes, each of one that holds it (``Owners``)
            rows      merged by key, as one table has them
            events    merged in commit order
    owner   waits for W >= S -> a lease at S -> its own rows or events of these shards, and no others -> frames

**One S.** A row at S is a function of the log's prefix up to S (C1), whoever answers. An owner that has folded past S
says SnapshotTooOld, never something else; nodes that lack shards tell the others which S they may ask for, and these
are kept there (``Leases.hold``). An owner answers for shards that it holds when it is asked, and asks nobody in turn.

**One road.** What is asked of an owner is a scan of shards: of rows by key, of a range of rows with a predicate, or of
events. Reads, rollups, questions, patterns and SQL are made of what comes back, here, by the code that makes them of
what lies here: so sums of floats are added in the same order wherever rows lie.

**The order of events.** If one node holds all shards that are asked for, it is asked alone, and the order is its own.
Else the order is (commit, shard, order within both), which every owner gives by itself: the order in which one commit
brought events of several shards is known to whoever holds these together, and to nobody else.

An owner that goes away in the middle is replaced by another one, from the row or the event on that came last; so is
one that has not come to S within a third of the time. One that was asked alone is replaced by another one that has all,
since these have one order. Where there is none, the read fails with Unavailable.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.dictionaries import plain, together
from kivi.arrow.ipc import encode_ipc, own_batches
from kivi.delta.overlay import FixedRows
from kivi.delta.runs import Array
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.event_names import POSITION, STAMP
from kivi.encoding.shards import shards_of_events, shards_of_keys
from kivi.errors import NotFound, Unavailable
from kivi.events.summing import Sums
from kivi.events.views import EventView
from kivi.log.shards import EVERY, SHARDS, parse_shards, shown_shards
from kivi.model.expressions import Expr, bind, from_plain, to_plain
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.snapshot import Reader
from kivi.runtime import deadlines
from kivi.store.catalog import Catalog
from kivi.store.shards import Shards
from kivi.store.slot_ranges import KeyRange, Times
from kivi.store.snapshots import Snapshots

__all__ = ["Owners", "SpannedView", "Spanning"]

_FRAME_BYTES: Final = 512 << 10
_HIDDEN: Final = b"hidden_upto"
_CODE: Final = "\0code"
"""The column that events of several owners are merged by: the commit, and the shard below it."""
_SHARD_BITS: Final = 6
_POSITION_BITS: Final = 40
_ROWS: Final = 4_096
_FIRST_ROWS: Final = 64
_MANY: Final = 2**62
_NOW: Final = 2**64
_WAIT_S: Final = 5.0
_IN_TURN: Final = 3
"""How many owners that have not come to S a read waits for, within its time."""
Pairs = list[tuple[bytes, Version]]


class Owners(Protocol):
    """The other nodes, and the way to them."""

    def plan(self, shards: int, without: frozenset[int], ts: int) -> Sequence[tuple[int, int]]:
        """Which node is asked for which of the shards, as of a commit timestamp. Raises Unavailable if nobody holds
        some of them."""

    def ask(self, node: int, request: bytes) -> Iterator[bytes]:
        """The frames of ``Spanning.serve`` there, which begins at the call. Raises what it raises, and Unavailable."""


class Events(Protocol):
    """What this store has of an event table at a snapshot (``kivi.store.event_selection.Captured``)."""

    @property
    def schema(self) -> TableSchema: ...

    @property
    def view(self) -> Any: ...

    def in_memory(self, times: Times, where: Expr | None, columns: Sequence[str]) -> Iterator[pa.RecordBatch]: ...


class Selecting(Protocol):
    """The part of ``kivi.store.rollups`` that is used."""

    def selected_here(
        self, lease: Lease, schema: TableSchema, where: Expr | None, bounds: KeyRange, times: Times
    ) -> Iterator[FixedRows]: ...


class Here(Protocol):
    """The part of ``kivi.store.reads`` that is used."""

    catalog: Catalog
    reader: Reader
    leases: Leases

    @property
    def rollups(self) -> Selecting: ...

    def check_visible(self, lease: Lease, schema: TableSchema, shards: int) -> None: ...

    def captured(self, lease: Lease, schema: TableSchema) -> Events: ...

    def hidden_upto(self, captured: Any) -> int: ...


@dataclass(slots=True)
class Spanning:
    """Thread safe. ``owners``: of a node of a cluster."""

    reads: Here
    snapshots: Snapshots
    shards: Shards
    owners: Owners | None = None

    def missing(self, schema: TableSchema, asked: int, ts: int) -> int:
        """The shards of a read at a snapshot that this store lacks. Raises Unavailable if nobody has them."""
        if not self.shards.is_partial(schema) or not (missing := asked & ~self.shards.held_at(schema, ts)):
            return 0
        if self.owners is None:
            self.shards.check(schema, asked, ts)
        else:
            self._plan(schema, missing, frozenset(), ts)
        return missing

    def check(self, schema: TableSchema) -> None:
        """Raises Unavailable if some shards of a table have nobody who can be asked for them now."""
        self.missing(schema, EVERY, _NOW)

    def _plan(self, schema: TableSchema, shards: int, without: frozenset[int], ts: int) -> Sequence[tuple[int, int]]:
        assert self.owners is not None
        try:
            return self.owners.plan(shards, without, _NOW if schema.kind == "event" else ts)
        except Unavailable as error:
            raise Unavailable(
                f"this read of {schema.name!r} may have rows of the shards {shown_shards(shards)}: {error.message}",
                **error.details,
            ) from None

    # -- rows -------------------------------------------------------------------------------------

    def get(self, lease: Lease, schema: TableSchema, keys: Sequence[bytes], missing: int) -> list[Version | None]:
        """Rows by key, of whomever."""
        shards = shards_of_keys(schema, pa.array(keys, pa.large_binary()), SHARDS).tolist()
        here = [key for key, shard in zip(keys, shards, strict=True) if not missing >> shard & 1]
        found = dict(zip(here, self.reads.reader.get(lease, schema, here), strict=True))
        layout = RowLayout.of(schema)
        there = [key for key, shard in zip(keys, shards, strict=True) if missing >> shard & 1]
        for at in range(0, len(there), _ROWS):
            asked = {"keys": [key.hex() for key in there[at : at + _ROWS]]}
            for portion in self._rows_elsewhere(lease, schema, missing, asked):
                found |= _pairs(layout, portion)
        return [found.get(key) for key in keys]

    def rows(
        self,
        lease: Lease,
        schema: TableSchema,
        asked: int,
        bounds: KeyRange = (None, None),
        *,
        here: Callable[[], Iterator[FixedRows | Pairs]],
        where: Expr | None = None,
        times: Times = (None, None),
        reverse: bool = False,
    ) -> Iterator[FixedRows]:
        """The rows of a range of keys, of whomever, in key order: those of which ``where`` and ``times`` are true.
        ``here`` gives those of this store, and perhaps of shards that it does not hold."""
        held = self.shards.held_at(schema, lease.ts)
        request = {
            "where": None if where is None else to_plain(where),
            "times": times,
            "start": None if bounds[0] is None else bounds[0].hex(),
            "end": None if bounds[1] is None else bounds[1].hex(),
            "reverse": reverse,
        }
        sources = list[Iterator[FixedRows]]()
        if missing := asked & ~held:
            sources.append(self._rows_elsewhere(lease, schema, missing, request))
        if asked & held:
            sources.append(self._of(schema, here(), asked & held))
        return _merged_rows(RowLayout.of(schema), sources, reverse)

    def pairs(
        self, lease: Lease, schema: TableSchema, asked: int, bounds: KeyRange, *, reverse: bool
    ) -> Iterator[tuple[bytes, Version]]:
        """``rows`` one by one."""

        def here() -> Iterator[Pairs]:
            found = self.reads.reader.scan(lease, schema, *bounds, reverse=reverse, check_every=_FIRST_ROWS)
            return iter(lambda: list(itertools.islice(found, _FIRST_ROWS)), [])

        layout = RowLayout.of(schema)
        for portion in self.rows(lease, schema, asked, bounds, here=here, reverse=reverse):
            yield from _pairs(layout, portion)

    def _of(self, schema: TableSchema, portions: Iterator[FixedRows | Pairs], shards: int) -> Iterator[FixedRows]:
        """Portions as they are laid out in the schema that the snapshot sees, and of these shards alone."""
        layout = RowLayout.of(schema)
        bits = self.shards.bits(shards)
        for portion in portions:
            if isinstance(portion, list):
                portion = FixedRows.of_versions(layout, portion)
            kept = np.flatnonzero(bits[shards_of_keys(schema, portion.keys, SHARDS)])
            if len(kept) < len(portion.rows):
                portion = FixedRows(portion.keys.take(pa.array(kept)), portion.rows[kept])
            if len(portion.rows):
                yield portion

    def _rows_elsewhere(
        self,
        lease: Lease,
        schema: TableSchema,
        shards: int,
        asked: dict[str, Any],
        without: frozenset[int] = frozenset(),
    ) -> Iterator[FixedRows]:
        layout = RowLayout.of(schema)
        parts = [
            self._rows_of(lease, schema, node, part, asked, without, self._begun(lease, schema, node, part, asked))
            for node, part in self._plan(schema, shards, without, lease.ts)
        ]
        return _merged_rows(layout, parts, asked.get("reverse", False))

    def _rows_of(
        self,
        lease: Lease,
        schema: TableSchema,
        node: int,
        shards: int,
        asked: dict[str, Any],
        without: frozenset[int],
        frames: Iterator[bytes],
    ) -> Iterator[FixedRows]:
        layout = RowLayout.of(schema)
        try:
            for frame in frames:
                portion = _rows_in(layout, frame)
                yield portion
                last = portion.keys[len(portion.rows) - 1].as_py()
                asked = {**asked, **({"end": last.hex()} if asked.get("reverse") else {"start": (last + b"\0").hex()})}
        except Unavailable:
            yield from self._rows_elsewhere(lease, schema, shards, asked, without | {node})

    def _begun(
        self, lease: Lease, schema: TableSchema, node: int, shards: int, asked: dict[str, Any]
    ) -> Iterator[bytes]:
        assert self.owners is not None
        named = {"table": schema.name, "id": schema.id, "ts": lease.ts, "shards": shown_shards(shards)}
        named["layout"] = len(schema.alterations)
        named["wait_s"] = min(_WAIT_S, deadlines.left_s() / _IN_TURN)
        return self.owners.ask(node, json.dumps({**named, **asked}).encode())

    # -- events -----------------------------------------------------------------------------------

    def events(
        self, lease: Lease, captured: Events, asked: int, missing: int, wanted: dict[str, Any], columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Of whomever, with the columns, and STAMP and POSITION behind them. ``missing``: the shards that this store
        lacked before ``captured`` was. ``wanted`` as a request has it."""
        schema = captured.schema
        wanted = {**wanted, "columns": [*columns]}
        if not missing:
            return self._events_here(captured, asked, wanted)
        whole = self._of_whole(lease, schema, asked, wanted)
        try:
            first = [*itertools.islice(whole, 1)]
        except Unavailable:  # others go on, in an order of their own, as long as nothing has been told
            pass
        else:
            return itertools.chain(first, whole)
        wanted["by_shard"] = True
        reverse = wanted["reverse"]
        sources = [self._events_elsewhere(lease, schema, missing, wanted)]
        if held := asked & ~missing:
            sources.append(self._events_here(captured, held, wanted))
        return (batch.drop_columns([_CODE]) for batch in _merged_events(sources, reverse))

    def _of_whole(
        self, lease: Lease, schema: TableSchema, asked: int, wanted: dict[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        """What a node answers that holds all of these shards, in its own order; if it goes away, the rest of what
        another one answers. Raises Unavailable if there is none.

        All of them have one commit after the other, and of each commit the events of a shard in one order. So it is
        enough to know how many events of each shard of the last commit have been told.
        """
        shown = [*wanted["columns"], STAMP, POSITION]
        wanted = {**wanted, "columns": _with_shards(schema, wanted["columns"])}
        gone, told = frozenset[int](), _Told(schema, wanted["reverse"])
        while (node := self._whole(asked, gone)) is not None:
            left = told.counts.copy()
            try:
                for frame in self._begun(lease, schema, node, asked, wanted):
                    for batch in own_batches(frame):
                        if (rest := told.without(batch, left)).num_rows:
                            yield rest.select(shown)
                            told.note(rest)
                return
            except Unavailable:
                gone |= {node}
        raise Unavailable(
            f"no other node that was heard lately holds all of {shown_shards(asked)}, and answers: try again, and the "
            "events of one commit come by shard"
        )

    def _whole(self, asked: int, without: frozenset[int]) -> int | None:
        """A node that holds all of these; None: there is none."""
        assert self.owners is not None
        try:
            plan = self.owners.plan(asked, without, _NOW)
        except Unavailable:
            return None
        return plan[0][0] if len(plan) == 1 else None

    def _events_elsewhere(
        self,
        lease: Lease,
        schema: TableSchema,
        shards: int,
        wanted: dict[str, Any],
        without: frozenset[int] = frozenset(),
        note: Callable[[int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """``note`` is told by each node what it was asked for as "hidden", before its events."""
        parts = list[Iterator[pa.RecordBatch]]()
        for node, part in self._plan(schema, shards, without, lease.ts):
            frames = self._begun(lease, schema, node, part, wanted)
            if note is not None:
                frames = _noted(frames, note, lease.ts)
            parts.append(self._events_of(lease, schema, node, part, wanted, without, frames, note))
        return _merged_events(parts, wanted["reverse"])

    def _events_of(
        self,
        lease: Lease,
        schema: TableSchema,
        node: int,
        shards: int,
        wanted: dict[str, Any],
        without: frozenset[int],
        frames: Iterator[bytes],
        note: Callable[[int], None] | None,
    ) -> Iterator[pa.RecordBatch]:
        count = 0
        try:
            for frame in frames:
                for batch in own_batches(frame):
                    yield batch
                    count += batch.num_rows
        except Unavailable:
            again = self._events_elsewhere(lease, schema, shards, wanted, without | {node}, note)
            for batch in again:
                if count < batch.num_rows:
                    yield batch.slice(count)
                count = max(0, count - batch.num_rows)

    def _events_here(self, captured: Events, shards: int, wanted: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Those of some shards, in the order of a request."""
        schema, columns, reverse = captured.schema, wanted["columns"], wanted["reverse"]
        where, times = _where(schema, wanted["where"]), tuple(wanted["times"])
        named = [*_with_shards(schema, columns), STAMP, POSITION]
        assert isinstance(captured.view, EventView)
        stored = captured.view.scan(
            after=wanted["after"],
            time_from=times[0],
            time_to=times[1],
            where=where,
            columns=named[:-2],
            naming=(STAMP, POSITION),
            reverse=reverse,
        )
        memory: Iterable[pa.RecordBatch] = captured.in_memory(times, where, named)
        if reverse:
            memory = (batch.take(pa.array(np.arange(batch.num_rows)[::-1])) for batch in reversed(list(memory)))
        bits = self.shards.bits(shards)
        shown = [*columns, STAMP, POSITION]

        def found() -> Iterator[pa.RecordBatch]:
            for batch in itertools.chain(memory, stored) if reverse else itertools.chain(stored, memory):
                of = shards_of_events(schema, batch, SHARDS)
                kept = np.flatnonzero(bits[of])
                batch = plain(batch.select(shown))
                if len(kept) < len(of):
                    batch, of = batch.take(pa.array(kept)), of[kept]
                if not batch.num_rows:
                    continue
                if wanted.get("by_shard"):
                    batch = _coded(batch, of.astype(np.uint64))
                yield batch

        return _by_code(found(), reverse) if wanted.get("by_shard") else found()

    # -- what a new owner copies (kivi.store.moving) ------------------------------------------------

    def rows_to_take(self, lease: Lease, schema: TableSchema, shards: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Keys and rows of these shards, as base has them, of whoever holds them."""
        layout = RowLayout.of(schema)
        everything = {"where": None, "times": (None, None), "start": None, "end": None, "reverse": False}
        for portion in self._rows_elsewhere(lease, schema, shards, everything):
            yield portion.keys.to_pylist(), layout.bytes_of(portion.rows)

    def events_to_take(
        self, lease: Lease, captured: Events, shards: int, note: Callable[[int], None]
    ) -> Iterator[pa.RecordBatch]:
        """All events of these shards, of whoever holds them, among those of the shards that are held here: in commit
        order, with STAMP. ``note`` is told, before the last of them, up to which commit some are not among them since
        the retention floor hides them: by each node that gives some."""
        schema = captured.schema
        columns = [column.name for column in schema.columns]
        wanted = {
            "after": 0,
            "times": (None, None),
            "where": None,
            "reverse": False,
            "columns": columns,
            "by_shard": True,
            "hidden": True,
        }
        note(self.reads.hidden_upto(captured))
        sources = [self._events_elsewhere(lease, schema, shards, wanted, note=note)]
        if self.shards.held:
            sources.append(self._events_here(captured, self.shards.held, wanted))
        return (batch.drop_columns([_CODE, POSITION]) for batch in _merged_events(sources, reverse=False))

    # -- what an owner does -----------------------------------------------------------------------

    def serve(self, data: bytes, timeout_s: float = _WAIT_S) -> Iterator[bytes]:
        """The frames of an answer; the snapshot is held as long as they are asked for.

        Raises Unavailable if this store has not come to S in time, or does not hold the shards; SnapshotTooOld if it
        has folded past S; and what reading raises.
        """
        asked = json.loads(data)
        reads, shards = self.reads, parse_shards(asked["shards"])
        timeout_s = min(timeout_s, asked.get("wait_s", timeout_s))
        lease = self.snapshots.begin(as_of_ts=asked["ts"], min_snapshot=asked["ts"], timeout_s=timeout_s)
        try:
            schema = reads.catalog.table(asked["table"], lease.ts)
            if schema.id != asked["id"]:
                raise NotFound(f"table {asked['table']!r} is another one at {lease.ts} here", table=asked["table"])
            reads.check_visible(lease, schema, shards)
            for frame in self._served(lease, schema, shards, asked):
                yield frame
                reads.leases.renew(lease)
        finally:
            self.snapshots.release(lease)

    def _served(self, lease: Lease, schema: TableSchema, shards: int, asked: dict[str, Any]) -> Iterator[bytes]:
        if schema.kind == "event":
            captured = self.reads.captured(lease, schema)
            with captured.view:
                if asked.get("hidden"):
                    yield _said(self.reads.hidden_upto(captured))
                for batch in self._events_here(captured, shards, asked):
                    self.reads.reader.check_events(lease, schema)
                    yield from _event_frames(batch)
            return
        layout = RowLayout.of(schema)
        if "keys" in asked:
            keys = sorted({bytes.fromhex(key) for key in asked["keys"]})
            versions = self.reads.reader.get(lease, schema, keys)
            pairs = [(key, version) for key, version in zip(keys, versions, strict=True) if version is not None]
            portions: Iterator[FixedRows | Pairs] = iter([pairs] if pairs else [])
        else:
            start, end = (None if key is None else bytes.fromhex(key) for key in (asked["start"], asked["end"]))
            where = _where(schema, asked["where"])
            if asked["reverse"]:
                found = self.reads.reader.scan(lease, schema, start, end, reverse=True, check_every=_FIRST_ROWS)
                sizes = itertools.chain([_FIRST_ROWS], itertools.repeat(_ROWS))
                pages = (list(itertools.islice(found, size)) for size in sizes)
                portions = itertools.takewhile(bool, pages)
            else:
                low, high = asked["times"]
                portions = self.reads.rollups.selected_here(lease, schema, where, (start, end), (low, high))
        for portion in self._of(schema, portions, shards):
            yield from _row_frames(layout, portion, asked.get("layout", layout.number))


class SpannedView:
    """The events of a snapshot, of whomever, for those who read an ``EventView``: what lies here is in ``captured``,
    but for the shards that were ``missing`` before it was taken.

    Counts are those of this store, made larger as if all shards were alike: they are for plans.
    """

    def __init__(self, spanning: Spanning, lease: Lease, captured: Events, asked: int, missing: int) -> None:
        assert isinstance(captured.view, EventView)
        self._spanning, self._lease, self._captured = spanning, lease, captured
        self._asked, self._missing = asked, missing
        self._view = captured.view
        self._share = SHARDS / max(1, spanning.shards.held.bit_count())
        self.upto, self.floor_us = self._view.upto, self._view.floor_us

    def __enter__(self) -> SpannedView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._view.close()

    def take_files(self) -> list[Any]:
        """None: files have events of this store alone."""
        return []

    def scan(
        self,
        *,
        after: int = 0,
        time_from: int | None = None,
        time_to: int | None = None,
        where: Expr | None = None,
        columns: Sequence[str] | None = None,
        reverse: bool = False,
        naming: Sequence[str] = (),
        may_have: Callable[[int, int], bool] | None = None,
        ordered: bool = True,
        coded: bool = False,
        stored_bytes: int = 0,
    ) -> Iterator[pa.RecordBatch]:
        """As of ``EventView``, in memory or in blocks."""
        outputs = [*self._captured.schema.output_columns(columns)]
        wanted = {
            "after": after,
            "times": (time_from, time_to),
            "where": None if where is None else to_plain(where),
            "reverse": reverse,
        }
        shown = [*outputs, *naming]
        batches = self._spanning.events(self._lease, self._captured, self._asked, self._missing, wanted, outputs)
        if self.upto < self._lease.ts:  # of others comes what the snapshot sees
            batches = (batch.filter(pa.array(batch.column(STAMP).to_numpy() <= self.upto)) for batch in batches)
        return (batch.select(shown) for batch in batches if batch.num_rows)

    def sum_up(
        self, into: Sums, *, time_from: int | None = None, time_to: int | None = None, where: Expr | None = None
    ) -> tuple[int, int]:
        """As of ``EventView``."""
        columns = into.columns or (self._captured.schema.event_time or "",)
        read = 0
        for batch in self.scan(time_from=time_from, time_to=time_to, where=where, columns=columns):
            into.add(batch)
            read += 1
        return 0, read

    @property
    def rows(self) -> int:
        """About how many."""
        return int(self._share * self._view.rows)

    def rows_between(self, time_from: int | None, time_to: int | None) -> int:
        """About how many."""
        return int(self._share * self._view.rows_between(time_from, time_to))

    def rows_perhaps(
        self,
        time_from: int | None,
        time_to: int | None,
        where: Expr,
        may_have: Callable[[int, int], bool] | None = None,
    ) -> int:
        """About how many."""
        return int(self._share * self._view.rows_perhaps(time_from, time_to, where, may_have))

    def cut_rows(self, time_from: int | None, time_to: int | None) -> int:
        """No header is known of other nodes."""
        return _MANY

    def parts(self) -> list[Any]:
        """Those of this store."""
        return self._view.parts()


# -- frames -----------------------------------------------------------------------------------------


def _row_frames(layout: RowLayout, portion: FixedRows, known: int) -> Iterator[bytes]:
    """``known``: the number of the layout that whoever asks knows, if the table has been altered since."""
    rows = layout.bytes_of(portion.rows)
    if known < layout.number:
        earlier = layout.earlier(known)
        rows = [earlier.cut(row, layout) for row in rows]
    size = sum(map(len, rows)) + portion.keys.nbytes
    at_once = max(1, int(len(rows) * _FRAME_BYTES / max(size, 1)))
    for at in range(0, len(rows), at_once):
        columns = [portion.keys.slice(at, at_once), pa.array(rows[at : at + at_once], pa.large_binary())]
        yield bytes(encode_ipc(pa.RecordBatch.from_arrays(columns, ["key", "row"])))


def _rows_in(layout: RowLayout, frame: bytes) -> FixedRows:
    """Of a layout that this node knows already. Raises Unavailable for rows of a later one."""
    (batch,) = own_batches(frame)
    rows = batch.column("row").to_pylist()
    if any(map(layout.is_later, rows)):
        raise Unavailable("the table was altered, and this node has yet to hear of it: try again")
    return FixedRows(batch.column("key"), layout.rows_of([layout.current(row) for row in rows]))


def _event_frames(batch: pa.RecordBatch) -> Iterator[bytes]:
    at_once = max(1, int(batch.num_rows * _FRAME_BYTES / max(batch.nbytes, 1)))
    for at in range(0, batch.num_rows, at_once):
        yield bytes(encode_ipc(batch.slice(at, at_once)))


def _said(hidden_upto: int) -> bytes:
    """A frame without events."""
    schema = pa.schema([], {_HIDDEN: str(hidden_upto)})
    return bytes(encode_ipc(pa.RecordBatch.from_arrays([], schema=schema)))


def _noted(frames: Iterator[bytes], note: Callable[[int], None], otherwise: int) -> Iterator[bytes]:
    """What comes behind that frame. A node of an earlier version does not begin with it."""
    first = next(frames, None)
    with pa.ipc.open_stream(first) if first is not None else contextlib.nullcontext() as reader:
        said = (reader.schema.metadata or {}).get(_HIDDEN) if reader is not None else None
    note(otherwise if said is None else int(said))
    if first is not None and said is None:
        yield first
    yield from frames


def _pairs(layout: RowLayout, portion: FixedRows) -> Iterator[tuple[bytes, Version]]:
    return zip(portion.keys.to_pylist(), map(layout.decode, layout.bytes_of(portion.rows)), strict=True)


def _where(schema: TableSchema, told: Any) -> Expr | None:
    """The predicate of a request, whose literals are in stored form."""
    if told is None:
        return None
    return bind(from_plain(told), schema.output_type, lambda type_, value, name: value)


# -- merged -----------------------------------------------------------------------------------------


def _merged_rows(layout: RowLayout, sources: Sequence[Iterator[FixedRows]], reverse: bool) -> Iterator[FixedRows]:
    """Portions in key order of sources that have no key in common."""

    def split(portion: FixedRows, bound: bytes) -> tuple[FixedRows, FixedRows]:
        if not reverse:
            return portion.split(bound + b"\0")
        at = int(pc.sum(pc.greater_equal(portion.keys, bound)).as_py() or 0)
        return FixedRows(portion.keys.slice(0, at), portion.rows[:at]), FixedRows(
            portion.keys.slice(at), portion.rows[at:]
        )

    def last(portion: FixedRows) -> Any:
        return portion.keys[len(portion.rows) - 1].as_py()

    def joined(parts: Sequence[FixedRows]) -> FixedRows:
        keys = pa.concat_arrays([part.keys for part in parts])
        order = pc.array_sort_indices(keys, order="descending" if reverse else "ascending")
        return FixedRows(keys.take(order), np.concatenate([part.rows for part in parts])[order.to_numpy()])

    return _merged(sources, last, split, joined, max if reverse else min)


def _merged_events(sources: Sequence[Iterator[pa.RecordBatch]], reverse: bool) -> Iterator[pa.RecordBatch]:
    """Batches in the order of their codes, of sources that have no code in common."""

    def codes(batch: pa.RecordBatch) -> Array:
        found: Array = batch.column(_CODE).to_numpy()
        return ~found if reverse else found

    def last(batch: pa.RecordBatch) -> int:
        return int(codes(batch)[-1])

    def split(batch: pa.RecordBatch, bound: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        at = int(np.searchsorted(codes(batch), np.uint64(bound), "right"))
        return batch.slice(0, at), batch.slice(at)

    def joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        batch = together(parts)
        return batch.take(pa.array(np.argsort(codes(batch), kind="stable")))

    return _merged(sources, last, split, joined, min)


def _merged(
    sources: Sequence[Iterator[Any]],
    last: Callable[[Any], Any],
    split: Callable[[Any, Any], tuple[Any, Any]],
    joined: Callable[[Sequence[Any]], Any],
    first_of: Callable[[Iterable[Any]], Any],
) -> Iterator[Any]:
    """What lies at or before the least of the last of each source's portion is complete, and goes on together."""
    if len(sources) == 1:
        yield from sources[0]
        return
    heads: dict[Iterator[Any], Any] = {}
    live = list(sources)
    while live:
        for source in list(live):
            if source not in heads and (head := next(source, None)) is not None:
                heads[source] = head
            elif source not in heads:
                live.remove(source)
        if len(live) < 2:
            for source in live:
                yield heads.pop(source)
                yield from source
            return
        bound = first_of(last(heads[source]) for source in live)
        taken = []
        for source in live:
            before, after = split(heads.pop(source), bound)
            if _rows(before):
                taken.append(before)
            if _rows(after):
                heads[source] = after
        yield taken[0] if len(taken) == 1 else joined(taken)


def _rows(portion: FixedRows | pa.RecordBatch) -> int:
    return len(portion.rows) if isinstance(portion, FixedRows) else portion.num_rows


def _coded(batch: pa.RecordBatch, shards: Array) -> pa.RecordBatch:
    """With the code of each event."""
    codes = batch.column(STAMP).to_numpy().astype(np.uint64) << np.uint64(_SHARD_BITS) | shards
    return batch.append_column(_CODE, pa.array(codes))


def _with_shards(schema: TableSchema, columns: Sequence[str]) -> list[str]:
    """These, and those that say of which shard an event is."""
    return [*dict.fromkeys((*columns, *schema.shard_by))]


class _Told:
    """How far an answer has come, whose commits come one after the other: ``counts`` are of the last one, by shard."""

    def __init__(self, schema: TableSchema, reverse: bool) -> None:
        self._schema, self._reverse = schema, reverse
        self._last: int | None = None
        self.counts = np.zeros(SHARDS, np.int64)

    def note(self, batch: pa.RecordBatch) -> None:
        stamps = batch.column(STAMP).to_numpy()
        if stamps[-1] != self._last:
            self._last, self.counts = int(stamps[-1]), np.zeros(SHARDS, np.int64)
        newest = batch.filter(pa.array(stamps == self._last))
        self.counts += np.bincount(shards_of_events(self._schema, newest, SHARDS), minlength=SHARDS)

    def without(self, batch: pa.RecordBatch, left: Array) -> pa.RecordBatch:
        """What it has of an answer from the start. ``left``: of each shard of the last commit, how many events were
        told and have not come again; it is changed."""
        stamps = batch.column(STAMP).to_numpy()
        if not left.any():  # it is past that, or begins
            return batch
        kept = ~(stamps > self._last if self._reverse else stamps < self._last)
        (rows,) = np.nonzero(stamps == self._last)
        if len(rows):
            shards = shards_of_events(self._schema, batch.take(pa.array(rows)), SHARDS)
            order = np.argsort(shards, kind="stable")
            places = np.empty(len(rows), np.int64)  # of each event among those of its shard
            places[order] = np.arange(len(rows)) - np.searchsorted(shards[order], shards[order])
            kept[rows] = places >= left[shards]
            left -= np.minimum(left, np.bincount(shards, minlength=SHARDS))
        return batch.filter(pa.array(kept))


def _placed(batch: pa.RecordBatch, reverse: bool) -> pa.RecordBatch:
    """Whole commits in the order of their codes, with positions that are the same whoever tells them: the shard, and
    the place among the events of the commit that are of this shard and are told."""
    codes = batch.column(_CODE).to_numpy()
    begins = np.flatnonzero(np.diff(codes, prepend=~codes[:1]))
    counts = np.diff(begins, append=len(codes))
    places = np.arange(len(codes)) - begins.repeat(counts)
    if reverse:
        places = counts.repeat(counts) - 1 - places
    shards = (codes & np.uint64(SHARDS - 1)).astype(np.int64)
    positions = shards << _POSITION_BITS | places
    return batch.set_column(batch.schema.get_field_index(POSITION), POSITION, pa.array(positions))


def _by_code(batches: Iterator[pa.RecordBatch], reverse: bool) -> Iterator[pa.RecordBatch]:
    """Batches in commit order, in the order of their codes: a commit is held until all of it is there."""
    held: list[pa.RecordBatch] = []

    def ordered(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        batch = together(list(parts))
        codes = batch.column(_CODE).to_numpy()
        codes = ~codes if reverse else codes
        return _placed(batch.take(pa.array(np.argsort(codes, kind="stable"))), reverse)

    for batch in batches:
        stamps = batch.column(STAMP).to_numpy()
        at = int(np.argmax(stamps == stamps[-1]))  # of the first event of the last commit
        if at or (held and int(held[-1].column(STAMP)[0].as_py()) != int(stamps[0])):
            yield ordered([*held, batch.slice(0, at)] if at else held)
            held = []
        held.append(batch.slice(at))
    if held:
        yield ordered(held)
