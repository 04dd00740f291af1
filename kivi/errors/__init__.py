"""The errors of kivi, arranged by what the caller does next.

::

    KiviError
    |-- Retryable                 run the function again on a new snapshot
    |   |-- Conflict              another transaction wrote what this one wrote or guarded
    |   `-- Disconnected          the server went away before the commit was logged (also Unavailable)
    |-- SnapshotTooOld            begin again: the lease ended, or the history is no longer kept
    |-- CommitUnknown             ask outcome(token): the commit may or may not be there
    |-- Unavailable               wait and try again: the server is away, stopping or behind
    |   `-- ResourceExhausted     wait for room, or send less: a published limit was reached
    |       `-- DiskFull          make room on the disk; the same call then succeeds, without a restart
    |-- InvalidArgument           fix the call
    |   |-- SchemaError           ... it does not fit the table's schema
    |   |-- FeatureOff            ... some nodes of the cluster are too old for it: upgrade these first
    |   |-- EventsRetracted       ... a tail of events met a retraction: say what it is to do with one
    |   `-- OutOfSequence         ... a batch token skipped a batch
    |-- RowExists                 strict insert found the row
    |-- NotFound                  no such table (or subscription, or stage)
    |-- AlreadyExists             a table of that name is there already
    |-- OutOfRange                a column's exact value does not fit its type right now
    |-- Unauthenticated           send an access token the server knows
    |-- PermissionDenied          use an access token that may do this
    |-- DataLoss                  stop: files are damaged or missing; names file and offset
    |-- StoreInUse                another process owns the directory
    |-- NotAStore                 the directory holds something else
    `-- FormatTooNew              written by a newer kivi; use that one

Every error has a sentence that says what happened and what to do, and machine-readable
``details`` (plain strings and integers), which travel over the wire unchanged.

Comes in and goes out: nothing but errors. May not touch: anything, and so every room may import this one.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadyExists",
    "CommitUnknown",
    "Conflict",
    "DataLoss",
    "Disconnected",
    "DiskFull",
    "EventsRetracted",
    "FeatureOff",
    "FormatTooNew",
    "InvalidArgument",
    "KiviError",
    "NotAStore",
    "NotFound",
    "OutOfRange",
    "OutOfSequence",
    "PermissionDenied",
    "ResourceExhausted",
    "Retryable",
    "RowExists",
    "SchemaError",
    "SnapshotTooOld",
    "StoreInUse",
    "Unauthenticated",
    "Unavailable",
]


class KiviError(Exception):
    """Base class of everything kivi raises on purpose."""

    def __init__(self, message: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details


class Retryable(KiviError):
    """The transaction did nothing; its function may be run again on a new snapshot.

    ``run`` does so. By itself it says that the commit cannot happen any more: ``outcome`` has answered "aborted".
    """


class Conflict(Retryable):
    """A concurrent transaction that entered the log first wrote a cell that this one wrote or guarded.

    ``table`` and ``key`` (the row key, a tuple) name the row, ``column`` the cell (None: the
    row's existence). ``start_ts`` is this transaction's snapshot, ``commit_ts`` the winner's
    commit timestamp, or None while the winner is still in flight.
    """

    def __init__(
        self,
        message: str = "",
        *,
        table: str = "",
        key: tuple[Any, ...] = (),
        start_ts: int = 0,
        commit_ts: int | None = None,
        column: str | None = None,
    ) -> None:
        if not message:
            won = "a transaction still in flight" if commit_ts is None else f"the commit at {commit_ts}"
            what = f"{table}{key!r}" + (f".{column}" if column else "") + " was written"
            if not key and column is None:
                what = f"table {table!r} itself was created, altered, overwritten, dropped or retracted from"
            message = (
                f"{what} by {won}, after this transaction's snapshot {start_ts}; "
                "nothing was applied: run the transaction again on a new snapshot"
            )
        super().__init__(message, table=table, key=key, start_ts=start_ts, commit_ts=commit_ts, column=column)
        self.table = table
        self.key = key
        self.column = column
        self.start_ts = start_ts
        self.commit_ts = commit_ts


class SnapshotTooOld(KiviError):
    """The snapshot's lease ended, it was cut to save space, or what it would read is no longer kept."""


class CommitUnknown(KiviError):
    """The reply was lost or storage failed during the sync; ``outcome(token, place)`` tells what happened.

    ``place``: which member of the token it is, where one token stands for many transactions; else None.
    """

    def __init__(
        self, message: str = "", *, token: str | None = None, place: int | None = None, **details: Any
    ) -> None:
        asked = repr(token) if place is None else f"{token!r}, {place}"
        details |= {} if place is None else {"place": place}
        super().__init__(
            message or f"the outcome of this commit is unknown: ask outcome({asked})", token=token, **details
        )
        self.token = token
        self.place = place


class Unavailable(KiviError):
    """The store cannot answer now; the same call may succeed later."""


class Disconnected(Retryable, Unavailable):
    """The connection was lost before the commit was logged, and it never will be: nothing was applied."""


class ResourceExhausted(Unavailable):
    """A published limit (bytes, disk, memory, leases) was reached; nothing was applied."""


class DiskFull(ResourceExhausted):
    """The disk has no space; nothing was applied, and reads go on. ``path`` says where room is needed."""


class InvalidArgument(KiviError):
    """The call itself is wrong and will be wrong again; nothing was applied."""


class SchemaError(InvalidArgument):
    """A table, column, type or operator does not fit the schema."""


class FeatureOff(InvalidArgument):
    """Not every node of the cluster is of a version that knows this: upgrade those in ``details['nodes']`` first."""


class EventsRetracted(InvalidArgument):
    """Events that a tail has read before were retracted since: ``retracted_at`` is the first commit that did so.

    Read on with ``retractions="ignore"``, or with "deliver" to be told which events they are.
    """


class OutOfSequence(InvalidArgument):
    """A batch token left out a batch: the scope's next sequence number is in ``details['expected']``."""


class RowExists(KiviError):
    """A strict insert met a row that is there; ``table`` and ``key`` name it."""

    def __init__(self, message: str = "", *, table: str = "", key: tuple[Any, ...] = ()) -> None:
        super().__init__(message or f"{table}{key!r} is already there: use put() to overwrite it", table=table, key=key)
        self.table = table
        self.key = key


class NotFound(KiviError):
    """There is no such table, stage or lease."""


class AlreadyExists(KiviError):
    """A table of that name is there already: drop it first, or use another name."""


class OutOfRange(KiviError):
    """The exact value of a column does not fit the column's type; it recovers when the value fits again."""


class Unauthenticated(KiviError):
    """The server does not know this access token."""


class PermissionDenied(KiviError):
    """This access token may not do that."""


class DataLoss(KiviError):
    """Files are damaged or missing. ``path`` and ``offset`` say where; nothing was changed."""

    def __init__(self, message: str = "", *, path: str = "", offset: int | None = None) -> None:
        super().__init__(message, path=path, offset=offset)
        self.path = path
        self.offset = offset


class StoreInUse(KiviError):
    """Another process has the directory open."""


class NotAStore(KiviError):
    """The directory exists and is not a kivi store."""


class FormatTooNew(KiviError):
    """The store was written by a newer version of kivi."""
