"""Rows of a table under a secondary view's key: which row of the view is whose, and what becomes of it.

Pure, and of one row at a time. Which transactions derive what from it is ``kivi.store.view_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kivi.delta.ops import Barrier, RowOp
from kivi.encoding.base_rows import Version
from kivi.encoding.keys import decode_key, key_encoder
from kivi.model.schema import TableSchema
from kivi.model.types import ColumnType

__all__ = ["Rekeying"]

Place = tuple[bool, int]
"""Of a column of the view in its source: whether that is a key column, and which."""


@dataclass(frozen=True, slots=True)
class Rekeying:
    """How the rows of one view follow from those of its source.

    ``moving``: the columns of the source that the view's key is made of, besides its key; ``carried``: of a column of
    the source the view's. ``encoded``: values of the view's key as its bytes.
    """

    source_types: tuple[ColumnType, ...]
    encoded: Callable[[Sequence[Any]], bytes]
    key: tuple[Place, ...]
    cells: tuple[Place, ...]
    moving: frozenset[int]
    carried: dict[int, int]
    whole: bool
    """Whether the source's whole key is part of the view's."""
    observed: frozenset[int]
    """The columns of the source that the view's rows are made of, besides its key."""

    @staticmethod
    def of(view: TableSchema, source: TableSchema) -> Rekeying:
        """Columns are added at the end, so it holds for every later definition of the source, too."""
        return view.remembered("rekeying", lambda: _made(view, source))

    @property
    def is_fixed(self) -> bool:
        """Whether a row's key in the view follows from its own key, whatever it holds."""
        return self.whole and not self.moving

    def concerns(self, op: RowOp) -> bool:
        """Whether an operation on a row of the source may change the view. One that makes a row may, where a row is in
        the view from its beginning."""
        if op.barrier is not Barrier.PATCH or not self.moving:
            return True
        return not (self.observed.isdisjoint(op.puts) and self.observed.isdisjoint(op.deltas))

    def values_of(self, key: bytes) -> tuple[Any, ...]:
        """The values of a row's own key."""
        return tuple(decode_key(self.source_types, key))

    def key_of(self, values: tuple[Any, ...], version: Version | None) -> bytes | None:
        """The view's key of a row of the source; None if it is not in the view. ``values``: those of its own key."""
        if version is None or not version.alive:
            return None
        cells = version.cells
        found = [values[i] if own else cells[i] for own, i in self.key]
        return None if None in found else self.encoded(found)

    def row_of(self, values: tuple[Any, ...], version: Version) -> RowOp:
        """The whole row, whatever was there."""
        cells = version.cells
        found = [values[i] if own else cells[i] for own, i in self.cells]
        return RowOp(Barrier.RESTART, dict(enumerate(found)), {})

    def same_row(self, op: RowOp) -> RowOp:
        """A PATCH of a row that keeps its key in the view: the part of it that the view carries. If the key is fixed,
        any operation."""
        puts = {self.carried[i]: value for i, value in op.puts.items() if i in self.carried}
        return RowOp(op.barrier, puts, {self.carried[i]: d for i, d in op.deltas.items() if i in self.carried})

    def is_of(self, values: tuple[Any, ...], version: Version) -> bool:
        """Whether a row of the view is that of the source's row with this key; their keys in the view are the same."""
        return all(version.cells[place] == values[i] for place, (own, i) in enumerate(self.cells) if own)


def _made(view: TableSchema, source: TableSchema) -> Rekeying:
    own = {column.name: i for i, column in enumerate(source.key)}
    names = {column.name: i for i, column in enumerate(source.columns)}

    def place(name: str) -> Place:
        return (True, own[name]) if name in own else (False, names[name])

    key = tuple(place(column.name) for column in view.key)
    cells = tuple(place(column.name) for column in view.columns)
    moving = frozenset(i for own_key, i in key if not own_key)
    carried = {i: at for at, (own_key, i) in enumerate(cells) if not own_key}
    return Rekeying(
        tuple(column.type for column in source.key),
        key_encoder([column.type for column in view.key]),
        key,
        cells,
        moving,
        carried,
        len([1 for own_key, _ in key if own_key]) == len(source.key),
        moving | carried.keys(),
    )
