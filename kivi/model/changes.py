"""Changes: what was committed to a table after a timestamp, in commit order. Data only.

An event table's *tail* after ``a`` is the events of the commits above ``a``, each commit as it was. It does not change
any more: commits are never altered, and a snapshot has all commits up to its timestamp. Only retention takes events
out of it, from the moment when it drops their blocks; ``kept_since`` says from where on nothing was dropped. That
a floor has made events invisible to later snapshots is no reason to leave them out of the tail while they are there.

An aggregate's changes after ``a``, at a snapshot ``b``: each row that events committed in (a, b] belong to, once, as it
is at ``b``. A row is among them even if its values came out as they were. So is a row that a retention floor has taken
away in (a, b]: a *removed row* has its key, and null in every other column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["COMMIT_TS", "REMOVED", "Changes", "TailPoints"]

COMMIT_TS: Final = "_commit_ts"
"""The column that a scan of changes adds: of an event its commit's timestamp, of an aggregate's row that of the last
commit at or below the snapshot that changed the aggregate."""

REMOVED: Final = "_removed"
"""The column that a scan of an aggregate's changes adds: true of a row that is not there any more."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Makes a scan one of what was committed after ``since``. ``commit_ts`` adds the column ``COMMIT_TS``.

    Of event tables only: ``skip`` leaves out so many events from the first on, and at most ``take`` are looked at, both
    before any predicate; ``remembered_at`` leaves out what a snapshot at this timestamp has forgotten by retention.

    SnapshotTooOld says that events after ``since`` were dropped, or removed rows erased; with ``partial`` what is left
    is read (of an aggregate: every row). Of aggregates only: ``removed`` adds the column ``REMOVED``.
    """

    since: int
    commit_ts: bool = False
    skip: int = 0
    take: int | None = None
    remembered_at: int | None = None
    partial: bool = False
    removed: bool = False


@dataclass(frozen=True, slots=True)
class TailPoints:
    """The places where the commits of an event table (of an aggregate: of its source) after ``since`` can be cut.

    ``points``: (commit timestamp, events after the point before), each part as large as the rows asked for allow, but
    at least one commit. ``last``: the newest of these commits, ``since`` if there is none. ``kept_since``: every event
    committed after this is still there. ``store`` names the store: a restored backup has another name. ``table_id``
    and ``created_ts`` are those of the table asked for: a table dropped and created again has others.
    """

    points: tuple[tuple[int, int], ...]
    last: int
    watermark: int
    kept_since: int
    table_id: int
    created_ts: int
    store: str

    def changed_at(self, upto: int) -> int:
        """Of an aggregate: the last commit at or below ``upto`` that changed it, whether or not its events are kept."""
        return max(at for at in (self.last, self.created_ts, self.kept_since, 0) if at <= upto)
