"""What to read of a table: a ``Scan``, which is a predicate with a range of keys, columns and a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kivi.model.changes import Changes
from kivi.model.expressions import Expr
from kivi.model.orders import Order
from kivi.model.patterns import Match
from kivi.model.questions import Question
from kivi.model.rollups import Rollup

__all__ = ["Scan"]


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan. ``prefix``, ``start`` (inclusive) and ``end`` (exclusive) are keys or their first columns, in
    stored form; ``where`` is bound; ``limit`` counts rows that match. ``changes``: only what is new since then."""

    prefix: tuple[Any, ...] = ()
    start: tuple[Any, ...] | None = None
    end: tuple[Any, ...] | None = None
    where: Expr | None = None
    columns: Sequence[str] | None = None
    limit: int | None = None
    reverse: bool = False
    order: Order = ()
    """Rows by some columns, instead of in key order (events: in commit order)."""
    offset: int = 0
    """So many rows, from the first on, are left out."""
    any_order: bool = False
    """Of events: as they lie, if neither limit nor order, offset or reverse asks for some."""
    stored_bytes: int = 0
    """Of events in any order: whole row groups of up to so many bytes may come as they are stored."""
    changes: Changes | None = None
    rollup: Rollup | None = None
    """Of an aggregate: its rows combined, instead of the rows. ``where`` selects rows before that."""
    question: Question | None = None
    """Of events, or of an aggregate: its answer, instead of the rows. ``where`` selects what it is about."""
    shards: int | None = None
    """Rows and changes of these shards only, a bit for each (``kivi.store.shards``)."""
    match: Match | None = None
    """Of events: the matches of a pattern, instead of the rows. ``where`` selects events before that."""

    @property
    def is_answered(self) -> bool:
        """Whether rows that were computed are asked for."""
        return self.rollup is not None or self.question is not None or self.match is not None

    @property
    def is_ordered(self) -> bool:
        """Whether it is of events in an order."""
        return not self.any_order or self.reverse or bool(self.order or self.offset) or self.limit is not None

    @property
    def times(self) -> tuple[Any, Any]:
        """Of events: the moment from which on and the one before which they lie; None is no bound."""
        return self.start[0] if self.start else None, self.end[0] if self.end else None
