"""Changes: what was committed to a table after a timestamp, in commit order. Data only.

An event table's *tail* after ``a`` is the events of the commits above ``a``, each commit as it was. It does not change
any more: commits are never altered, and a snapshot has all commits up to its timestamp. Only retention takes events
out of it, from the moment when it drops their blocks; ``kept_since`` says from where on nothing was dropped. That
a floor has made events invisible to later snapshots is no reason to leave them out of the tail while they are there.

*A retraction* (R22) at ``r`` takes events out of every tail that is read at or past ``r``. Whoever has read such an
event before, in a tail up to some ``a`` >= its commit, meets the retraction in the tail after ``a``: that is an error,
``EventsRetracted``, unless the reader says what to do. With "ignore" the tail goes on; with "deliver" the removed
events come, too, where the retraction was committed.

An aggregate's changes after ``a``, at a snapshot ``b``: each row that events committed in (a, b] belong to, once, as it
is at ``b``. A row is among them even if its values came out as they were. So is a row of events that were retracted in
(a, b], and one that a retention floor has taken away: what is not there any more is a *removed row*, and has its key
and null in every other column. When the values of retracted events are gone from the store, all rows are among the
changes instead; whoever asks for removed rows is told SnapshotTooOld, and reads the table again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kivi.errors import InvalidArgument, SchemaError
from kivi.model.given import is_among, shown

__all__ = [
    "COMMIT_TIME",
    "COMMIT_TS",
    "REMOVED",
    "RETRACTED",
    "Changes",
    "TailPoints",
    "check_not_hidden",
    "check_retractions",
]

COMMIT_TS: Final = "_commit_ts"
"""The column that a scan of changes adds: of an event its commit's timestamp, of an aggregate's row that of the last
commit at or below the snapshot that changed the aggregate."""

COMMIT_TIME: Final = "_commit_time"
"""The hidden column of an event's commit time. Null once the store has forgotten when that commit was."""

REMOVED: Final = "_removed"
"""The column that a scan of an aggregate's changes adds: true of a row that is not there any more."""

RETRACTED: Final = "_retracted"
"""The column that a tail with retractions="deliver" adds: true for an event that a retraction removed."""

_RETRACTIONS: Final = ("fail", "ignore", "deliver")


def check_not_hidden(what: str, columns: Iterable[str]) -> None:
    """Raises SchemaError for a column that would hide one of those above. Stores of before may have such columns."""
    for name in columns:
        if name in (COMMIT_TS, COMMIT_TIME, REMOVED, RETRACTED):
            raise SchemaError(f"{what}: a column cannot be named {name!r}, which is what kivi shows of every commit")


def check_retractions(wanted: object) -> str:
    """What a reader does with a retraction. Raises InvalidArgument."""
    if not is_among(wanted, _RETRACTIONS):
        raise InvalidArgument(f'retractions is "fail", "ignore" or "deliver", not {shown(wanted)}')
    return str(wanted)


@dataclass(frozen=True, slots=True)
class Changes:
    """Makes a scan one of what was committed after ``since``. ``commit_ts`` adds the column ``COMMIT_TS``.

    Of event tables only: ``skip`` leaves out so many events from the first on, and at most ``take`` are looked at, both
    before any predicate; ``remembered_at`` leaves out what a snapshot at this timestamp has forgotten by retention, and
    what was retracted up to it: to a reader who has never had them, no such retraction is told.

    ``retractions``: what becomes of events that were read before ``since`` and retracted after it. "fail" raises
    EventsRetracted. "ignore": nothing. "deliver", of event tables and without ``skip`` and ``take``, adds the column
    ``RETRACTED`` and gives those events once more, with the commit timestamp of the retraction.

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
    retractions: str = "fail"


@dataclass(frozen=True, slots=True)
class TailPoints:
    """The places where the commits of an event table (of an aggregate: of its source) after ``since`` can be cut.

    ``points``: (commit timestamp, events after the point before), each part as large as the rows asked for allow, but
    at least one commit. ``last``: the newest of these commits and of the retractions, ``since`` if there is none.
    ``kept_since``: every event committed after this is still there. ``store`` names the store: a restored backup has
    another name. ``table_id`` and ``created_ts`` are those of the table asked for: a table dropped and created again
    has others.
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
