"""The shards of tables that a node of a cluster holds (``kivi.log.shards``), where events are cut, and who may read.

::

    gateway     events and runs of a sharded table, derived whole  -> one piece for each of ``cuts``   (into the log)
    every node  the pieces with shards that it holds -> decoded; rows of other shards in them left out -> applied
    reader      which shards has the answer rows of?  all held here -> as ever
                some are not -> other nodes are asked (``kivi.store.spanning``), or Unavailable, and who holds them

What a node holds it has whole: it had everything of these shards when it began with a copy or with the first message,
and applies all of them since. Of other shards it may have some, from before it gave them up, or from what was not
worth cutting. So what is left out is never what keeps an answer right: that is `check`, which lets no read through that
could have rows of shards that are not held; every read passes it, or asks others for these, and leaves out its own.
Verdicts, tokens, timestamps and the catalog are the same on every node, since nothing that they depend on is cut: rows,
guards, counts of late events, names of stages.

The order of events within a commit is kept (``Piece.places``), so where all pieces are read, what is applied is what
would have been without cutting, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import padded, trimmed
from kivi.arrow.dictionaries import coded, together
from kivi.arrow.ipc import encode_ipc, own_batches
from kivi.delta.ops import RowOp
from kivi.delta.runs import Array, DeltaRun
from kivi.encoding.shards import (
    Piece,
    join_pieces,
    pieces_of,
    shard_of,
    shard_of_key,
    shards_of_events,
    shards_of_keys,
)
from kivi.errors import InvalidArgument, ResourceExhausted, Unavailable
from kivi.log.shards import EVERY, SHARDS, shown_shards
from kivi.model.expressions import Expr, terms_of
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.groups import Events, Part, Raised, Single

__all__ = ["Shards", "asked_shards", "check_of_shards", "is_in"]

_CUT_ROWS: Final = 64
"""Fewer events, or rows of a run, are not cut: a piece costs more than it saves."""
_NAMED_MAX: Final = 64
_NOW: Final = 2**64
Row = tuple[int, bytes, RowOp]
Known = Callable[[int], TableSchema | None]


@dataclass(slots=True)
class Shards:
    """``held``: by this store. ``taking``: what it is being given, and applies already. ``since``: commit timestamps,
    and shards whose rows it has from there on only, while it has all of their events (``kivi.store.moving``).

    ``cuts``: sets of shards of which every node holds each wholly or not at all. ``holders``: the addresses of the
    nodes that hold all of some shards; ``parts``: of each node, which of them. ``is_whole_elsewhere``: whether another
    node that was heard lately holds all."""

    held: int = EVERY
    taking: int = 0
    since: tuple[tuple[int, int], ...] = ()
    cuts: Callable[[], Sequence[int]] = lambda: (EVERY,)
    holders: Callable[[int], Sequence[str]] = lambda shards: ()
    parts: Callable[[int], Sequence[tuple[str, int]]] = lambda shards: ()
    is_whole_elsewhere: Callable[[], bool] = lambda: False
    of_cluster: bool = False
    _bits: dict[int, Array] = field(default_factory=dict)

    @property
    def applied(self) -> int:
        """The shards of which this store applies what the log brings."""
        return self.held | self.taking

    def held_at(self, schema: TableSchema, ts: int) -> int:
        """Those of which it has all that a snapshot at ``ts`` sees of a table."""
        held = self.held
        for cts, shards in self.since if schema.kind != "event" else ():
            if cts > ts:
                held &= ~shards
        return held

    # -- what a gateway publishes -----------------------------------------------------------------

    def cut_events(self, schema: TableSchema, batch: pa.RecordBatch) -> list[Any] | None:
        """The events in pieces, to be logged; None: as they are."""
        cuts = self.cuts()
        if not schema.shard_by or len(cuts) < 2 or batch.num_rows < _CUT_ROWS:
            return None
        shards = shards_of_events(schema, batch, SHARDS)
        pieces = []
        for cut in cuts:
            rows = np.flatnonzero(self.bits(cut)[shards])
            if len(rows):
                taken = coded(batch.take(pa.array(rows)))
                pieces.append(Piece(cut, rows, [encode_ipc(trimmed(taken, schema))]))
        return join_pieces(pieces)

    def cut_run(self, schema: TableSchema | None, run: DeltaRun) -> Sequence[Any]:
        """The same of a run of an aggregate."""
        cuts = self.cuts()
        if schema is None or not schema.shard_by or len(cuts) < 2 or run.rows < _CUT_ROWS:
            return run.to_buffers()
        shards = shards_of_keys(schema, run.keys, SHARDS)
        pieces = []
        for cut in cuts:
            rows = np.flatnonzero(self.bits(cut)[shards])
            if len(rows):
                pieces.append(Piece(cut, None, _taken(run, rows).to_buffers()))
        return join_pieces(pieces)

    # -- what a node applies ------------------------------------------------------------------------

    def is_partial(self, schema: TableSchema | None) -> bool:
        """Whether this store may not have all of a table."""
        return self.held != EVERY and schema is not None and bool(schema.shard_by)

    def trim(self, part: Part, known: Known) -> None:
        """Leaves out of a part that this process has published what is not applied here, when it comes back: as all
        others decode it, at the same place of the log."""
        if self.held == EVERY:
            return
        if isinstance(part, Single):
            part.commit.derived = self.held_rows(part.commit.derived, known)
            part.events = [
                (table, batch if (schema := known(table)) is None else self.held_events(schema, batch)[0])
                for table, batch in part.events
            ]
            part.runs = [(table, self.held_run(known(table), run)) for table, run in part.runs]
        elif isinstance(part, Events) and (schema := known(part.record.table)) is not None:
            record = part.record
            part.batch, rows = self.held_events(schema, part.batch)
            if rows is not None:
                record.places = rows if record.places is None else record.places[rows]
            part.runs = [(table, self.held_run(known(table), run)) for table, run in part.runs]
            part.raised = [
                self.held_raised(into, one) if (into := known(one[0])) is not None else one for one in part.raised
            ]

    def held_raised(self, schema: TableSchema, raised: Raised) -> Raised:
        """The same of what rules raised, which is not cut."""
        table, whole, places = raised
        batch, rows = self.held_events(schema, whole)
        return table, batch, places if rows is None else places[rows]

    def held_events(self, schema: TableSchema, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Array | None]:
        """Those of the shards that are applied, and their places; None: all of them."""
        if not self.is_partial(schema) or not batch.num_rows:
            return batch, None
        rows = np.flatnonzero(self.bits(self.applied)[shards_of_events(schema, batch, SHARDS)])
        return (batch, None) if len(rows) == batch.num_rows else (batch.take(pa.array(rows)), rows.astype(np.uint64))

    def held_run(self, schema: TableSchema | None, run: DeltaRun) -> DeltaRun:
        """The rows of the shards that are held."""
        if schema is None or not self.is_partial(schema) or not run.rows:
            return run
        rows = np.flatnonzero(self.bits(self.applied)[shards_of_keys(schema, run.keys, SHARDS)])
        return run if len(rows) == run.rows else _taken(run, rows)

    def held_rows(self, rows: Iterable[Row], known: Known) -> list[Row]:
        """Of rows of aggregates those of the shards that are held."""
        if self.held == EVERY:
            return list(rows)
        return [
            (table, key, op)
            for table, key, op in rows
            if (schema := known(table)) is None
            or not schema.shard_by
            or self.applied >> shard_of_key(schema, key, SHARDS) & 1
        ]

    def read_events(self, schema: TableSchema, data: Any) -> tuple[list[pa.RecordBatch], Array | None]:
        """What ``cut_events`` made, or what was not cut: the events that are held, and their places; None: all."""
        pieces = pieces_of(data)
        if pieces is None:
            whole = [padded(batch, schema) for batch in own_batches(data)]
            if not self.is_partial(schema) or not whole:
                return whole, None
            batch, rows = self.held_events(schema, together(whole))
            return [batch], rows
        found, places = list[pa.RecordBatch](), list[Array]()
        for piece in pieces:
            if not piece.shards & self.applied:
                continue
            batch, rows = together([padded(batch, schema) for batch in own_batches(piece.data[0])]), None
            if piece.shards & ~self.applied:
                batch, rows = self.held_events(schema, batch)
            assert piece.places is not None
            found.append(batch)
            places.append(piece.places if rows is None else piece.places[rows])
        if len(found) < 2:
            return found, places[0] if places else np.array([], np.uint64)
        joined = np.concatenate(places)
        order = np.argsort(joined)
        return [together(found).take(pa.array(order))], joined[order]

    def read_run(self, schema: TableSchema, data: Any) -> list[DeltaRun]:
        """What ``cut_run`` made, or what was not cut: the rows that are held."""
        pieces = pieces_of(data)
        if pieces is None:
            return [self.held_run(schema, DeltaRun.from_buffer(schema, 0, data))]
        runs = [
            (piece.shards, DeltaRun.from_buffer(schema, 0, piece.data[0]))
            for piece in pieces
            if piece.shards & self.applied
        ]
        return [self.held_run(schema, run) if shards & ~self.applied else run for shards, run in runs]

    def bits(self, shards: int) -> Array:
        """By number, whether a shard is among these."""
        found = self._bits.get(shards)
        if found is None:
            found = self._bits[shards] = np.array([bool(shards >> i & 1) for i in range(SHARDS)])
        return found

    # -- what may be read -----------------------------------------------------------------------------

    def of_keys(self, schema: TableSchema, keys: Sequence[bytes]) -> int:
        """Of which shards the rows of an aggregate with these keys are, if that matters."""
        if not self.is_partial(schema):
            return EVERY
        asked = 0
        for key in keys:
            asked |= 1 << shard_of_key(schema, key, SHARDS)
        return asked

    def lacks(self, schema: TableSchema, keys: Sequence[bytes], ts: int = _NOW) -> bool:
        """Whether rows of an aggregate with some of these keys are on other nodes, at a snapshot."""
        return self.is_partial(schema) and bool(self.of_keys(schema, keys) & ~self.held_at(schema, ts))

    def check(self, schema: TableSchema, asked: int = EVERY, ts: int = _NOW, *, may_ask_less: bool = True) -> None:
        """Raises Unavailable for a read that may have rows of shards that are not held here, at a snapshot; it says who
        holds them, and whether to ask for less helps."""
        if not self.is_partial(schema) or not asked & ~self.held_at(schema, ts):
            return
        there = list(self.holders(asked))
        by = ", ".join(schema.shard_by)
        if asked == EVERY and may_ask_less:
            todo = f"ask for values of {by}, with == or isin, or a node that holds all of them"
        else:
            todo = "ask a node that holds them"
        raise Unavailable(
            f"this read of {schema.name!r} may have rows of the shards {shown_shards(asked)}, and this node holds "
            f"{shown_shards(self.held)}: {todo}: {', '.join(there) or 'there is none, start one'}",
            shards=shown_shards(asked),
            addresses=there,
            parts=[] if there else self._parts(asked),
        )

    def _parts(self, asked: int) -> list[tuple[str, int]]:
        """Of each node which of these shards it holds, if together they hold all of them."""
        found, held = list(self.parts(asked)), 0
        for _, shards in found:
            held |= shards
        return found if held == asked else []

    def check_named(self, schema: TableSchema) -> None:
        """Raises InvalidArgument if events of a table have no names that all nodes know."""
        if self.of_cluster and schema.shard_by:
            raise InvalidArgument(
                f"{schema.name!r} is sharded, and in a cluster its events are not retracted: they are named by their "
                "place in a commit, and a node may have a part of one",
                table=schema.name,
            )


def _taken(run: DeltaRun, rows: Array) -> DeltaRun:
    cts = run.cts if isinstance(run.cts, int) else run.cts[rows]
    columns = tuple(column.take(rows) for column in run.columns)
    return DeltaRun(run.keys.take(pa.array(rows)), cts, columns, distinct=run.distinct, barrier=run.barrier)


def is_in(schema: TableSchema, key: bytes, shards: int) -> bool:
    """Whether the row of an aggregate with this key is of one of these shards."""
    return bool(shards >> shard_of_key(schema, key, SHARDS) & 1)


def check_of_shards(schema: TableSchema, wanted: Scan) -> None:
    """Raises InvalidArgument unless a scan can be of some shards alone."""
    if not schema.shard_by:
        raise InvalidArgument(f"{schema.name!r} is not sharded: leave shards out", table=schema.name)
    if wanted.is_answered:
        raise InvalidArgument("shards are of scans and of changes: to an answer rows of all shards belong")


def asked_shards(schema: TableSchema, wanted: Scan) -> int:
    """Of which shards the rows may be that a scan selects, by its prefix and what its predicate asks of the columns."""
    if not schema.shard_by:
        return EVERY
    among = EVERY if wanted.shards is None else wanted.shards
    return among & _asked(schema, wanted.where, dict(zip(schema.key_names, wanted.prefix, strict=False)))


def _asked(schema: TableSchema, where: Expr | None, known: dict[str, Any]) -> int:
    values: dict[str, Sequence[Any]] = {name: (value,) for name, value in known.items()}
    for term in terms_of(where):
        if term.column in schema.shard_by and term.column not in values and term.op in ("==", "isin"):
            values[term.column] = term.value if term.op == "isin" else (term.value,)
    choices = [values.get(name) for name in schema.shard_by]
    asked = 0
    for i, chosen in enumerate(itertools.product(*(choice for choice in choices if choice is not None))):
        if None in choices or i == _NAMED_MAX:
            return EVERY
        try:
            asked |= 1 << shard_of(schema, chosen, SHARDS)
        except ResourceExhausted:  # no key is that long
            return EVERY
    return asked
