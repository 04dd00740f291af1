"""Folding: what is pending for a table becomes base rows, and versions where somebody still needs an older state.

In chunks: base rows are fetched together, folded, and written in one engine batch before they are dropped from pending.
Rows are folded in columns where they come from delta runs or are many operations on an aggregate, else one by one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from kivi.delta.derive import run_from_rows
from kivi.delta.gather import Gathered, gather
from kivi.delta.ops import RowOp, apply_op, are_deltas, fold
from kivi.delta.runs import DeltaRun, fitted
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.keyspaces import Space, row_key, table_prefix, tombstone_key, version_key
from kivi.engine import Engine, WriteBatch
from kivi.model.schema import TableSchema
from kivi.mvcc.pending import Pending
from kivi.mvcc.turns import Turns

__all__ = ["Folding"]

_FIRST_ROWS: Final = 64
_IN_COLUMNS: Final = 16
"""So many operations on an aggregate are folded in columns though none of them is in a run."""
_STATES: Final = 1 << 16
"""Of a table with history, about so many states are written at once, each of which is a version."""
_CHUNK_BYTES: Final = 4 << 20
"""A chunk of rows is at most ``max_rows``, and as many as will read and write about this much."""


@dataclass(eq=False)
class Folding:
    """Called with consolidation's mutex held. ``write`` writes a batch to base, ``kept`` counts the bytes of versions
    of a table that it has written, ``meanwhile`` is called between two chunks of runs."""

    engine: Engine
    pending: Pending
    computing: Turns
    _: KW_ONLY
    max_rows: int
    write: Callable[[WriteBatch], None]
    kept: Callable[[TableSchema, int], None]
    meanwhile: Callable[[], None]
    rows: int = field(default=0, init=False)
    """How many were folded, ever."""

    def fold(self, schema: TableSchema, upto: int, keep: list[int]) -> None:
        """Everything at or below ``upto``; ``keep``: the open snapshots below that."""
        keys, runs = self.pending.dirty(schema.id, upto)
        deltas = list[bytes]()
        if runs or schema.kind == "aggregate":
            small = {key: [op for cts, op in self.pending.row_ops(schema.id, key) if cts <= upto] for key in keys}
            if runs or sum(map(len, small.values())) >= _IN_COLUMNS:
                deltas = [key for key, ops in small.items() if are_deltas(ops)]
                keys = sorted(small.keys() - deltas)
        self._fold_chunks(schema, keys, upto, keep)  # what runs have of these rows is inert then
        if runs or deltas:
            self._fold_runs(schema, deltas, runs, upto, keep)

    def _fold_chunks(self, schema: TableSchema, keys: list[bytes], upto: int, keep: list[int]) -> None:
        at, size = 0, min(_FIRST_ROWS, self.max_rows)
        while at < len(keys):
            chunk = keys[at : at + size]
            nbytes = self._fold_rows(schema, chunk, upto, keep)
            at += len(chunk)
            fitting = _CHUNK_BYTES * len(chunk) // max(1, nbytes)
            size = max(1, min(2 * size, fitting, self.max_rows))

    def _fold_rows(self, schema: TableSchema, keys: list[bytes], upto: int, keep: list[int]) -> int:
        """One chunk. Returns how many bytes it read and wrote, from which the next one's size follows."""
        layout = RowLayout.of(schema)
        raws = self.engine.get_many([row_key(schema.id, key) for key in keys])
        batch, kept = WriteBatch(), 0
        for key, raw in zip(keys, raws, strict=True):
            base = layout.decode(raw) if raw is not None else None
            ops = self.pending.ops(schema.id, key, upto)
            if keep or schema.history_us is not None:
                states = _states(schema, base, ops)
            else:
                states = [state] if (state := fold(schema, base, ops, upto)) is not None else []
            if not states or states[-1] is base:
                continue
            final = states[-1]
            batch.put(row_key(schema.id, key), layout.encode(final))
            if not final.alive:
                batch.put(tombstone_key(final.cts, schema.id, key), b"")
            for state in states[:-1] if schema.history_us is not None else _needed(states, keep):
                kept += self._keep_version(batch, schema, key, state.cts, layout.encode(state))
            self.rows += 1
        self.write(batch)
        self.kept(schema, kept)
        self.pending.drop_rows(schema.id, keys, upto)
        return batch.size_bytes + sum(len(raw) for raw in raws if raw is not None)

    @staticmethod
    def _keep_version(batch: WriteBatch, schema: TableSchema, key: bytes, cts: int, data: bytes) -> int:
        stored = version_key(schema.id, key, cts)
        batch.put(stored, data)
        return len(stored) + len(data)

    def _fold_runs(
        self, schema: TableSchema, keys: list[bytes], runs: tuple[DeltaRun, ...], upto: int, keep: list[int]
    ) -> None:
        """The same in columns: rows that runs write, and those with ``keys``, which take nothing but deltas."""
        layout = RowLayout.of(schema)
        small = [
            (key, cts, dict(op.deltas))
            for key in keys
            for cts, op in self.pending.row_ops(schema.id, key)
            if cts <= upto
        ]
        every = [fitted(run, schema) for run in runs]
        if small:
            every.append(run_from_rows(schema, small))
        start: bytes | None = None
        limit = self.max_rows if schema.history_us is None else min(_FIRST_ROWS, self.max_rows)
        while True:
            with self.computing:
                gathered = gather(every, start, limit, upto)
                if gathered.keys:
                    prefix = table_prefix(Space.ROW, schema.id)
                    stored = [prefix + key for key in gathered.keys]
                    base = self.engine.get_many(stored)
                    batch = WriteBatch()
                    if schema.history_us is not None:
                        final, kept = self._keep_states(batch, schema, layout, gathered, base)
                    else:
                        final = gathered.fold(layout, base, upto)
                        kept = self._keep_run_versions(batch, schema, layout, gathered, base, final, keep)
                    if None in final:
                        changed = [(key, row) for key, row in zip(stored, final, strict=True) if row is not None]
                        batch.put_all([key for key, _ in changed], [row for _, row in changed])
                    else:
                        batch.put_all(stored, final)  # type: ignore[arg-type]
                    if gathered.may_end_rows:
                        for key, row in zip(gathered.keys, final, strict=True):
                            if row is not None and not RowLayout.is_alive(row):
                                batch.put(tombstone_key(RowLayout.stamp_of(row), schema.id, key), b"")
                    self.write(batch)
                    self.kept(schema, kept)
                    self.rows += len(gathered.keys)
            if gathered.next_start is None:
                break
            start = gathered.next_start
            if schema.history_us is not None:
                fitting = _STATES * len(gathered.keys) // max(1, gathered.rows)
                limit = max(1, min(2 * limit, fitting, self.max_rows))
            self.meanwhile()
        self.pending.drop_rows(schema.id, keys, upto)
        self.pending.drop_runs(schema.id, upto)

    def _keep_states(
        self,
        batch: WriteBatch,
        schema: TableSchema,
        layout: RowLayout,
        gathered: Gathered,
        base: list[bytes | None],
    ) -> tuple[list[bytes | None], int]:
        """Of a table with history: every state but the newest of each row, which it returns with the bytes of the
        others."""
        final: list[bytes | None] = [None] * len(base)
        current, nbytes = list(base), 0
        for changed, rows in gathered.states(layout, base):
            for i, row in zip(changed, rows, strict=True):
                if (before := current[i]) is not None:
                    nbytes += self._keep_version(batch, schema, gathered.keys[i], RowLayout.stamp_of(before), before)
                current[i] = final[i] = row
        return final, nbytes

    def _keep_run_versions(
        self,
        batch: WriteBatch,
        schema: TableSchema,
        layout: RowLayout,
        gathered: Gathered,
        base: list[bytes | None],
        final: list[bytes | None],
        keep: list[int],
    ) -> int:
        """Returns how many bytes they take."""
        changed = gathered.changed(base)
        if not changed:
            return 0
        current, nbytes = list(base), 0
        kept = [0] * len(current)  # per row: the newest version put so far; boundaries ascend, so stamps do
        for boundary in keep:
            folded = gathered.fold(layout, current, boundary)
            for i in changed:
                key = gathered.keys[i]
                if folded[i] is not None:
                    current[i] = folded[i]
                state = current[i]
                if state is not None and final[i] is not None:
                    stamp = RowLayout.stamp_of(state)
                    if kept[i] < stamp <= boundary and stamp < RowLayout.stamp_of(final[i] or b""):
                        nbytes += self._keep_version(batch, schema, key, stamp, state)
                        kept[i] = stamp
        return nbytes


def _states(schema: TableSchema, base: Version | None, ops: list[tuple[int, RowOp]]) -> list[Version]:
    """The base, if there is one, and the row after each CTS above its stamp."""
    states = [] if base is None else [base]
    stamp = base.cts if base is not None else 0
    for cts, op in ops:
        if cts > stamp:
            state = apply_op(schema, states[-1] if states else None, cts, op)
            if states and states[-1].cts == cts:
                states[-1] = state
            else:
                states.append(state)
    return states


def _needed(states: list[Version], keep: list[int]) -> Iterator[Version]:
    """The states, but the last, that some open S in ``keep`` reads."""
    for state, newer in itertools.pairwise(states):
        if bisect_right(keep, newer.cts - 1) > bisect_left(keep, state.cts):
            yield state
