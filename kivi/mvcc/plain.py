"""Plain commits: transactions of deltas and puts and nothing else, many at a time.

What an application that counts sends most is one delta a transaction, from many threads at once. These arrive together
and leave together: under one hold of the entry lock, in one group of the log, with one step of the watermark and one
message of answers; but each is a transaction of its own, with its own verdict, record, CTS and outcome. Deltas never
conflict with deltas (R3), so the verdicts of a group do not depend on each other, and its members may take their CTS
together after all were decided: ``commit.Committer.submit_plain``. A put may conflict with what came before it in the
group: one that meets a row again is not decided there (``Touched``). On the general way 1,000 puts a second, in bursts
of five, took 0.76 of a core, and 0.36 as deltas are entered here; now they take as much as deltas.

Whatever is not regular (a token that is known, a collision, a start below the floor, a catalog that has changed, no
room, a held commit) is not decided there: it is given back and goes the way of every other commit, which says what is
wrong with it. Records and digests are the same bytes on both ways.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kivi.delta.ops import RowOp
from kivi.mvcc.record import deltas_body, deltas_section
from kivi.mvcc.verdict import Guard

if TYPE_CHECKING:
    from kivi.errors import CommitUnknown

__all__ = ["Plain", "PlainRows", "Touched"]


class PlainRows:
    """What transactions of deltas and puts do: one may be shared by many that do the same, as who counts often does.

    ``rows`` sorted, of PATCH operations; ``guards`` are their tables' schema guards. ``digest`` is
    that of a token, over the rows as the caller ``sent`` them if that is under other ids; ``varying_bytes`` is what
    the keys and the text in them hold. ``places`` are the rows' tables and keys, ``puts`` those that it puts.
    """

    __slots__ = ("digest", "guards", "places", "puts", "rows", "section", "varying_bytes")

    def __init__(
        self,
        rows: list[tuple[int, bytes, RowOp]],
        guards: Sequence[Guard],
        sent: list[tuple[int, bytes, RowOp]] | None = None,
    ) -> None:
        self.rows = rows
        self.guards = guards
        self.places = [(table, key) for table, key, _ in rows]
        self.puts = [(table, key) for table, key, op in rows if op.puts]
        self.section = deltas_section(rows)
        section = self.section if sent is None else deltas_section(sent)
        self.digest = hashlib.blake2b(deltas_body(0, len(rows), section), digest_size=16).digest()
        self.varying_bytes = sum(len(key) + op.varying_bytes for _, key, op in rows)


class Plain:
    """One transaction.

    It reads nothing, and so holds no snapshot: it begins at ``start_ts``, the watermark. ``tag`` is the caller's. Once
    entered it is the attempt in flight (``commit.Flying``).
    """

    __slots__ = ("cts", "does", "guards", "rows", "runs", "start_ts", "tag", "token", "unknown", "waiters")

    def __init__(self, start_ts: int, does: PlainRows, token: str, tag: Any) -> None:
        self.start_ts = start_ts
        self.does = does
        self.rows = does.rows
        self.guards = does.guards
        self.token = token
        self.tag = tag
        self.cts = 0
        self.runs: tuple[Any, ...] = ()
        self.unknown: CommitUnknown | None = None
        self.waiters: list[Callable[[Any], None]] = []

    @property
    def digest(self) -> bytes:
        return self.does.digest

    def body(self) -> bytes:
        """The record's body."""
        does = self.does
        return deltas_body(self.start_ts, len(does.rows), does.section, self.token, does.digest)


class Touched:
    """The rows of those of a group that were decided so far."""

    __slots__ = ("_put", "_written")

    def __init__(self) -> None:
        self._put: set[tuple[int, bytes]] = set()
        self._written: set[tuple[int, bytes]] = set()

    def may_join(self, plain: Plain) -> bool:
        """Whether no row of it was put there before, nor written at all if it puts it; then its rows are noted."""
        rows, puts = plain.does.places, plain.does.puts
        if not (self._put.isdisjoint(rows) and self._written.isdisjoint(puts)):
            return False
        self._written.update(rows)
        self._put.update(puts)
        return True
