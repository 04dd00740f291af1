"""The commit log: one sequence of records that says what happened, and in which order.

A record gets the next *sequence number* when it enters the log, or as many consecutive ones as it asks for: the
sequence numbers of a commit record **are** the commit timestamps of the transactions that it holds. Nothing above may
assume that the log is a local file: this page speaks of records, never of paths, offsets or segments, so that a
replicated log can stand here later (a stream whose own sequence numbers become the timestamps).

Invariants, for every log:

* **Numbers only grow.** Every record's numbers are greater than those of every record before it, across
  restarts, crashes and truncation, and no number is used twice: also not the number of a record that
  was lost in a crash before anybody was told about it. Inside one `CommitLog.append` they are
  consecutive; otherwise *they may skip* (they do after a crash), so nothing may rely on density.
* **Times never fall.** ``time_us`` never decreases along the log, whatever the clock does.
* **Order.** The order of `append` calls is the order of the numbers, of the records in the log and
  of the ``done`` calls.
* **Durable before done.** ``done(None)`` is called after the records, and everything before them, are
  synced, and after the log has noted, outside itself, that they were acknowledged. From then on a log
  that does not have them refuses to open (`DataLoss`), it never opens without them.
* **Unknown is not aborted.** After a failed write or sync the log is failed for good: nothing is
  retried, every group in flight and every later one gets `LogFailed`. Whether the records in flight
  are there is decided by the next open.
* **After a crash** the log holds exactly a prefix of what was appended, at least everything that was
  acknowledged. A group that was not acknowledged may be there in part: only a record is atomic.

Comes in: records, in order. Goes out: numbers at once, ``done`` when they are durable, and the records again. May not
touch: tables, the engine. Begin reading here, then at ``segmented``.

    segmented   the local log: its queue, its writer, acknowledging
    room        segments that are made ahead; ``direct``: bytes past the page cache
    records     how records and segments lie on disk; ``reading`` reads them
    mark        what was acknowledged, kept outside the log; ``recovery`` opens what a crash left
    replicated  a log that orders elsewhere: ``frames`` of many nodes in one ``stream``; numbers come with the verdicts
    members     the nodes of a replicated log, and from where it is kept for them; ``features`` that all of them know
    stream      what that asks of an engine; ``jetstream`` is NATS, by ``natslink``; ``natsserver`` runs one of our own
    memory      a log for tests that can crash on purpose; it passes ``tests/log/test_contract.py`` like the other
    inspect     a log as people read it; ``files``: the system's calls, which tests let fail
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from kivi.errors import InvalidArgument, KiviError, Unavailable
from kivi.runtime.histogram import Histogram

__all__ = [
    "MAX_RECORD_BYTES",
    "MAX_RECORD_NUMBERS",
    "Buffers",
    "CommitLog",
    "Done",
    "Entry",
    "Kind",
    "LogFailed",
    "Record",
    "Ticket",
]

MAX_RECORD_BYTES = 256 << 20
"""Default limit of one record's body."""

MAX_RECORD_NUMBERS = 1 << 20
"""How many numbers one record may take."""


class Kind(IntEnum):
    """The kind of a record; stored, so the numbers are permanent."""

    COMMIT = 1
    STAGE = 2
    ABORT = 3
    FLOOR = 4
    MEMBER = 5
    TRUNCATE = 6
    GATHER = 7
    """Only frames of a replicated log have it: see ``kivi.mvcc.gathering``."""
    PIN = 8
    """Likewise: see ``kivi.mvcc.pins``."""

    @property
    def is_about_nodes(self) -> bool:
        """Only frames of a replicated log have it; it takes no number (``kivi.log.members``)."""
        return self in (Kind.MEMBER, Kind.TRUNCATE)


@dataclass(frozen=True, slots=True)
class Record:
    """One durable record, with the numbers ``sequence`` to ``last``.

    ``time_us``: microseconds since 1970, UTC; never less than the record before's.
    """

    sequence: int
    time_us: int
    kind: Kind
    body: bytes | memoryview
    count: int = 1

    @property
    def last(self) -> int:
        """The last of its numbers."""
        return self.sequence + self.count - 1


@dataclass(frozen=True, slots=True)
class Ticket:
    """The consecutive numbers (both inclusive) and the time that the records of one call were given."""

    first: int
    last: int
    time_us: int


Buffers: TypeAlias = Sequence[bytes | memoryview]
"""A body in parts (anything with the buffer protocol); written one after the other, never joined."""


class Entry(NamedTuple):
    """A record to be: its kind, its body, how many numbers it takes, and which features (``kivi.log.features``) a
    node needs to read it."""

    kind: Kind
    body: Buffers
    numbers: int = 1
    needs: tuple[str, ...] = ()


Done: TypeAlias = Callable[[BaseException | None], None]


class LogFailed(Unavailable):
    """Writing or syncing the log failed. What was in flight is UNKNOWN; open the store again to find out.

    Raised by `CommitLog.append` itself, it means that the group did not enter and never will.
    """


class CommitLog(ABC):
    """An append-only sequence of records; see the module's docstring for its invariants."""

    _max_record_bytes: int

    last: int
    """The highest number that a record in the log or on its way into it has; 0 for a new log."""

    next: int
    """The number that the next record gets, if nobody appends before."""

    durable: int
    """The highest number such that it and everything before it is durable; 0 for a new log."""

    last_time_us: int
    """The time of the newest record in the log or on its way into it; 0 for a new log."""

    sync_times: Histogram
    """How long each sync took."""

    is_judged_again = False
    """Whether records behind a position are judged again, where others are replayed: nothing may be known of these."""

    failed: KiviError | None = None
    """Why a log that others write too is at its end for this process, which answers nothing from then on."""

    is_followed = False
    """Whether another process writes it, and this one only reads it (``kivi.log.followed``)."""

    on_room: Callable[[KiviError | None], None]
    """Called, by a thread of the log, with why there is no room for more, and with None when there is (again)."""

    @abstractmethod
    def append(self, records: Sequence[Entry], done: Done) -> Ticket:
        """Enter the records, in order and with no other record between them.

        Does no I/O, and may be called under a mutex that makes the order of the calls meaningful. It
        can only block while a log that has no room yet makes some. The buffers must not change until
        ``done`` is called: exactly once, by a thread of the log or one that is leading, in log order, with
        None or with the `LogFailed` that makes the outcome unknown. ``done`` may take the caller's mutex; it
        should be short, since the next group's ``done`` waits for it, and what it raises is logged and dropped.

        When this raises, nothing has entered, no number was taken and ``done`` is never called:
        `DiskFull` if there is no disk space for the group, `ResourceExhausted` if too much is waiting to be
        written (the log goes on by itself when there is room), `InvalidArgument` for an empty group or
        one over the limits, `LogFailed` if the log has failed, `Unavailable` if it is closed.
        """

    def _sizes(self, records: Sequence[Entry]) -> tuple[list[int], list[int]]:
        """How long the bodies are, and how many numbers each takes.

        Raises `InvalidArgument` for an empty group and for a record that is over the limits.
        """
        lengths = [
            len(parts[0]) if len(parts) == 1 and type(parts[0]) is bytes else sum(memoryview(p).nbytes for p in parts)
            for _, parts, *_ in records
        ]
        if not lengths:
            raise InvalidArgument("a group needs at least one record")
        if (longest := max(lengths)) > self._max_record_bytes:
            raise InvalidArgument(f"a record of {longest} bytes is over the limit of {self._max_record_bytes}")
        counts = [record.numbers for record in records]
        if not 0 < min(counts) <= max(counts) <= MAX_RECORD_NUMBERS:
            raise InvalidArgument(f"a record takes between 1 and {MAX_RECORD_NUMBERS} numbers")
        return lengths, counts

    def leading(self) -> AbstractContextManager[object]:
        """A hint: the calling thread has time to write and sync by itself what it appends as long as this is entered.

        It does so as it leaves, and calls ``done``, so it holds no mutex then that ``done`` takes. Or a thread of the
        log does, as ever, where that is better.
        """
        return nullcontext()

    def is_quick(self) -> bool:
        """Whether who is ``leading`` now would most likely not wait long for the disk."""
        return False

    @abstractmethod
    def replay(self, after: int) -> Iterator[Record]:
        """Every record with a number above ``after`` that is durable at the call, in order.

        Raises `DataLoss` if some of them are not kept any more, or if the log ends before ``after``.
        """

    @abstractmethod
    def read(self, sequence: int) -> Record:
        """The durable record that has this number. Raises `NotFound` if there is none, or no longer."""

    @abstractmethod
    def truncate(self, below: int) -> None:
        """Allow records whose numbers are all below ``below`` to be forgotten; more of them may be kept.

        The highest number and time are remembered for ever, so neither can regress.
        """

    @property
    @abstractmethod
    def first(self) -> int:
        """The lowest readable number; ``durable + 1`` or more if no record is kept."""

    @abstractmethod
    def stats(self) -> dict[str, int | float]:
        """Figures for metrics; names end in their unit (``_bytes``, ``_s``), everything else is a count."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is queued, calling every ``done``, and release the files. Idempotent."""
