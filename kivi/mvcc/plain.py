"""Plain commits: transactions of deltas and puts and nothing else, many at a time.

What an application that counts sends most is one delta a transaction, from many threads at once. These arrive together
and leave together: under one hold of the entry lock, in one group of the log, with one step of the watermark and one
message of answers; but each is a transaction of its own, with its own verdict, record, CTS and outcome. So what they
have in common is done once, and what they have each is kept in columns (`PlainGroup`), which Python goes through in C.

Deltas never conflict with deltas (R3), so the verdicts of a group do not depend on each other, and its members may take
their CTS together after all were decided: ``commit.Committer.submit_plain``. What a verdict looks at are cells, not
values: those that write the same cells from the same start are decided once. A put may conflict with what came before
it in the group: one that meets a row again is not decided there (``Touched``). On the general way 1,000 puts a second,
in bursts of five, took 0.76 of a core, and 0.36 as deltas are entered here; now they take as much as deltas.

Whatever is not regular (a token that is known, a collision, a start below the floor, a catalog that has changed, no
room, a held commit) is not decided there: it is given back and goes the way of every other commit, which says what is
wrong with it. Records and digests are the same bytes on both ways.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from kivi.delta.ops import RowOp
from kivi.errors import CommitUnknown
from kivi.mvcc.record import deltas_bodies, deltas_body, deltas_section
from kivi.mvcc.verdict import Guard

__all__ = ["Attempt", "PlainGroup", "PlainRows", "Touched"]

_Cells = tuple[tuple[int, bytes, tuple[int, ...], tuple[int, ...]], ...]


class PlainRows:
    """What transactions of deltas and puts do: one may be shared by many that do the same, as who counts often does.

    ``rows`` sorted, of PATCH operations; ``guards`` are their tables' schema guards. ``digest`` is
    that of a token, over the rows as the caller ``sent`` them if that is under other ids; ``varying_bytes`` is what
    the keys and the text in them hold. ``places`` are the rows' tables and keys, ``puts`` those that it puts, and
    ``cells`` says all that a verdict looks at.
    """

    __slots__ = ("cells", "digest", "guards", "places", "puts", "rows", "section", "varying_bytes")

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
        self.cells: _Cells = tuple((table, key, (*op.puts,), (*op.deltas,)) for table, key, op in rows)
        self.section = deltas_section(rows)
        section = self.section if sent is None else deltas_section(sent)
        self.digest = hashlib.blake2b(deltas_body(0, len(rows), section), digest_size=16).digest()
        self.varying_bytes = sum(len(key) + op.varying_bytes for _, key, op in rows)


class Attempt:
    """One of a group, as others meet it that come with its token while it is in flight (``commit.Flying``)."""

    __slots__ = ("cts", "digest", "rows", "runs", "unknown", "waiters")

    def __init__(self, cts: int, does: PlainRows, unknown: CommitUnknown | None) -> None:
        self.cts = cts
        self.digest = does.digest
        self.rows = does.rows
        self.runs: tuple[Any, ...] = ()
        self.unknown = unknown
        self.waiters: list[Callable[[Any], None]] = []


class PlainGroup:
    """Transactions that came together, by columns: what each ``does``, its request token, and the caller's ``tags``.

    They read nothing, and so hold no snapshot: all begin at ``start_ts``, the watermark. Once they are entered, their
    CTS ascend by one from ``first``.
    """

    __slots__ = ("attempts", "does", "first", "runs", "start_ts", "tags", "tokens", "unknown")

    def __init__(self, start_ts: int, does: Sequence[PlainRows], tokens: Sequence[str], tags: Sequence[Any]) -> None:
        self.start_ts = start_ts
        self.does = does
        self.tokens = tokens
        self.tags = tags
        self.first = 0
        self.runs: tuple[Any, ...] = ()
        self.unknown: CommitUnknown | None = None
        self.attempts: dict[str, Attempt] = {}  # of those only that somebody else waits for

    def __len__(self) -> int:
        return len(self.does)

    @property
    def last(self) -> int:
        return self.first + len(self.does) - 1

    @property
    def stamps(self) -> range:
        """The CTS of each."""
        return range(self.first, self.first + len(self.does))

    @property
    def rows(self) -> Iterator[tuple[int, bytes, RowOp]]:
        return chain.from_iterable(does.rows for does in self.does)

    def without(self, left: Iterable[int]) -> PlainGroup:
        """The others, in a group of their own."""
        gone = set(left)
        kept = [i for i in range(len(self.does)) if i not in gone]
        does, tokens = [self.does[i] for i in kept], [self.tokens[i] for i in kept]
        return PlainGroup(self.start_ts, does, tokens, [self.tags[i] for i in kept])

    def bodies(self) -> list[bytes]:
        """The records' bodies."""
        return deltas_bodies(self.start_ts, self.does, self.tokens)

    def attempt(self, token: str) -> Attempt:
        """That of this token, which is one of theirs."""
        found = self.attempts.get(token)
        if found is None:
            i = self.tokens.index(token)
            unknown = None if self.unknown is None else CommitUnknown(self.unknown.message, token=token)
            found = self.attempts[token] = Attempt(self.first + i, self.does[i], unknown)
        return found


class Touched:
    """The rows of those of a group that were decided so far."""

    __slots__ = ("_put", "_written")

    def __init__(self) -> None:
        self._put: set[tuple[int, bytes]] = set()
        self._written: set[tuple[int, bytes]] = set()

    def may_join(self, does: PlainRows) -> bool:
        """Whether no row of it was put there before, nor written at all if it puts it; then its rows are noted."""
        rows, puts = does.places, does.puts
        if not (self._put.isdisjoint(rows) and self._written.isdisjoint(puts)):
            return False
        self._written.update(rows)
        self._put.update(puts)
        return True
