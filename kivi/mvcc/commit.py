"""Committing, in outline (R18). The order of these steps is the invariant.

::

    caller's thread   1  encode and derive; nothing is locked                     store.transaction.prepare
                      2  wait for room in pending (writers slow down, memory does not grow); a retry does not wait
    entry lock        3  token known?  -> its first CTS       fenced? -> aborted      in flight? -> wait with it
    (no I/O inside)   4  tables and floors as derived with?     -> else back to 1
                      5  lease still held, start_ts >= facts.floor   -> SnapshotTooOld
                      6  verdict against facts                  -> Conflict; then ``on_entry``
                      7  log.append: the record gets its CTS in chain order
                      8  watermark.enter, facts.note, tokens.remember
    log's thread      9  write, sync, acknowledged mark
                     10  applied to pending (invisible: CTS > W)
                     11  watermark.finish: W moves over the gap-free prefix
                     12  acknowledge once W >= CTS (R17)

What enters is a group (``groups``): steps 2 to 8 are taken by its parts one after the other, under one hold of the
lock. So a member is judged against those before it, and CTS ascend in the group's order. Steps 5 and 6 are for those
that have read something; a member that has not begins just before its own CTS, and has nothing to conflict with.

An abort before 7 leaves no trace. After 7 the outcome is the log's: a failed sync is UNKNOWN, W stays below it for
ever, and the process has to be restarted. A commit that is past 7 completes whatever its client does.

The entry lock is held for microseconds and never across I/O; commits that queue meanwhile share one write and one
sync in the log. ``hold`` lets tests stop commits between 9 and 10, to finish or abort them in any order.

The verdict is the pure function ``verdict.Facts.check`` over records in log order. Here it runs before the append,
under the lock that fixes the order, which is the same decision: with a log that orders records elsewhere, it runs
when the record comes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import repeat
from typing import Final

from kivi.engine import WriteBatch
from kivi.errors import (
    CommitUnknown,
    Conflict,
    DiskFull,
    InvalidArgument,
    KiviError,
    ResourceExhausted,
    Retryable,
    SnapshotTooOld,
    Unavailable,
)
from kivi.log import CommitLog, Entry, Kind
from kivi.mvcc.applied import Applied
from kivi.mvcc.groups import Outcome, Part, Single, Tell, Writes
from kivi.mvcc.leases import Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.record import Abort, Commit, Other, Stage, kind_of
from kivi.mvcc.shortage import BASE, Shortage
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.tokens import FENCED, Remembered, Tokens
from kivi.mvcc.verdict import Collision, Facts, Footprint
from kivi.mvcc.watermark import Watermark, call_all
from kivi.runtime.histogram import Histogram

__all__ = ["Aborted", "Committer", "Counters", "StaleCatalog"]


class Aborted(Retryable):
    """The attempt was fenced off or given up; it did nothing and never will. Clients get it as a Retryable."""


class StaleCatalog(Exception):
    """The catalog, a retention floor or rows changed since the commit was derived: derive again. Never leaves the
    store."""


@dataclass(slots=True)
class Counters:
    commits: int = 0
    commits_grouped: int = 0
    """Of these, the ones that entered together with at least one other (R19)."""
    conflicts: int = 0
    too_old: int = 0
    unknown: int = 0
    rederived: int = 0
    no_room: int = 0
    storage: int = 0


_ADMISSION_TIMEOUT_S: Final = 10.0
"""A commit that waits for room is refused if consolidation did nothing for so long."""


class _Turn:
    """What one ``submit`` has to say once it has let go of the lock, and what it could not enter."""

    __slots__ = ("answers", "given_back", "repeats")

    def __init__(self) -> None:
        self.answers: list[Callable[[], None]] = []
        self.repeats: list[tuple[Part, int]] = []
        self.given_back: list[Part] = []


def _other_payload(token: str, how: str) -> InvalidArgument:
    return InvalidArgument(f"the token {token!r} {how} for another payload; nothing was applied")


@dataclass(eq=False)
class Committer:
    """Thread safe. The only way into the log."""

    log: CommitLog
    pending: Pending
    watermark: Watermark
    leases: Leases
    facts: Facts
    tokens: Tokens
    _: KW_ONLY
    pending_soft_bytes: int
    pending_hard_bytes: int
    is_behind: Callable[[Part], bool]
    """Whether what a part was derived by has changed since."""
    is_aggregate: Callable[[int], bool]
    timeline: Timeline
    shortage: Shortage
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.entry_lock = threading.Lock()
        """Held while a record enters the log; tokens and stages live under it too."""
        self._by_token: dict[str, Part] = {}
        self._by_batch: dict[tuple[str, int], Single] = {}
        self._in_flight: dict[int, Part] = {}  # by the first CTS of each
        self._held: dict[int, Single] = {}
        self._fencing: dict[str, list[Callable[[Outcome], None]]] = {}
        self.hold: Callable[[Commit], bool] | None = None
        self.counters = Counters()
        self.times = Histogram()  # from when a commit was asked for until it was acknowledged; of those that committed
        self.on_pressure: Callable[[], int] = lambda: 0
        """Makes consolidation hurry; gives how much it has done so far, in any unit that grows."""
        self.enter_other: Callable[[Other, int, int], None] = lambda other, sequence, time_us: None
        """Called under the entry lock with what a record that is no commit holds, its sequence number and its time."""

    @property
    def facts_floor(self) -> int:
        return self.facts.floor

    @property
    def facts_size(self) -> int:
        return len(self.facts)

    @property
    def is_full(self) -> bool:
        """Whether a commit would wait for room in pending."""
        return self.pending.nbytes > self.pending_hard_bytes

    def staleness(self) -> tuple[float, int]:
        """Everything that was acknowledged so many seconds ago, by whomever, can be read at the commit timestamp."""
        return 0.0, self.watermark.value

    def fresher(self) -> str | None:
        """The address of a node that may answer something newer; None: none is known."""
        return None

    def newest(self, timeout_s: float) -> int:
        """A commit timestamp that is not below any that was acknowledged before the call, by whomever.

        Waits until it is known; Unavailable when the time is up.
        """
        return self.watermark.value

    def newest_until(self, time_us: int, timeout_s: float) -> int:
        """A commit timestamp behind which this process knows of every commit with a time up to ``time_us`` that was
        acknowledged before the call, by whomever; and of every one at all, if that is before ``now_us`` then.

        Waits until it is known; Unavailable when the time is up. A commit has told the timeline of its time, here.
        """
        return 0

    def need(self, features: Iterable[str]) -> None:
        """Makes sure that the log may have these (``kivi.log.features``); a log of this process alone may. Waits.

        Raises FeatureOff, which names the nodes that are too old.
        """

    def now_us(self) -> int:
        """Microseconds UTC, never before the newest record: a clock that was set back revives no token."""
        return max(int(self.clock() * 1_000_000), self.log.last_time_us)

    # -- 2 to 8 ---------------------------------------------------------------------------------

    def submit(self, parts: Sequence[Part], *, may_wait: bool = True) -> Sequence[Part]:
        """Enters a group. What becomes of its members is told to the parts' ``answer``, now or by the log's thread.

        Returns the parts that have not entered and of which nobody is told: those that were derived by another catalog
        than there is now, or of rows that have changed (``Single.derives_again``), to be derived again; and all, if it
        may not wait for room in pending and would have to.
        """
        turn = _Turn()
        try:
            parts = self._admit(parts, turn, may_wait)
            with self.entry_lock:
                self._enter_all(parts, turn)
        finally:
            call_all(turn.answers)
        return turn.given_back

    def _enter_all(self, parts: Sequence[Part], turn: _Turn) -> None:
        """Steps 3 to 8 of each part. Holds the entry lock."""
        alone = len(parts) == 1 and parts[0].members == 1
        for part in parts:
            if (new := self._new_of(part, turn)) is not None:
                new.alone = alone
                self._enter(new, turn)
        if not turn.repeats:
            return
        back = {token for part in turn.given_back for token in part.tokens}
        for part, i in turn.repeats:
            if part.tokens[i] in back and (later := part.without({*range(len(part.tokens))} - {i})):
                turn.given_back.append(later)  # the first comes again, and it is a repeat of that
            else:
                self._answer_known(part, i, turn)

    def _admit(self, parts: Sequence[Part], turn: _Turn, may_wait: bool) -> Sequence[Part]:
        """Waits for room in pending; those whose tokens are known need none, since they were applied before."""
        if self.pending.nbytes <= self.pending_soft_bytes:
            return parts
        self.on_pressure()
        if not self.is_full:
            return parts
        if not may_wait:
            turn.given_back += parts
            return ()
        with self.entry_lock:
            parts = [new for part in parts if (new := self._new_of(part, turn)) is not None]
        short = self.shortage.why(BASE)
        if short is None and self._comes_to_have_room():
            return parts
        for part in parts:
            self._refuse(part, self._no_room(), turn)
        return ()

    def _comes_to_have_room(self) -> bool:
        """Waits for as long as consolidation gets on: there is room only when the fold of a whole table ends."""
        done: int | None = None
        while done != (done := self.on_pressure()):
            if self.pending.wait_for_room(self.pending_hard_bytes, _ADMISSION_TIMEOUT_S):
                return True
            if self.shortage.why(BASE) is not None:
                return False
        return False

    def _no_room(self) -> KiviError:
        short = self.shortage.why(BASE)
        if short is not None:
            return self._base_takes_nothing(short)
        self.counters.no_room += 1
        return ResourceExhausted(
            f"{self.pending.nbytes} bytes are waiting to be consolidated; nothing was applied: try again"
        )

    def _base_takes_nothing(self, short: KiviError) -> KiviError:
        self.shortage.refused()
        self.counters.storage += 1
        full = isinstance(short, DiskFull)
        todo = "make room on the disk, and try again" if full else "restart the server if this stays, and try again"
        return (DiskFull if full else Unavailable)(
            f"{self.pending.nbytes} bytes in memory cannot be written ({short.message}); nothing was applied: {todo}",
            **short.details,
        )

    def _refuse(self, part: Part, error: KiviError, turn: _Turn) -> None:
        turn.answers += [partial(part.answer.apart, tag, Outcome(None, error)) for tag in part.tags]

    def _new_of(self, part: Part, turn: _Turn) -> Part | None:
        """Step 3, of all tokens of the part: what is left of it is new. The others are answered, or wait."""
        tokens = part.tokens
        if not tokens:
            known_batch = isinstance(part, Single) and part.commit.batch and self._answer_batch(part, turn)
            return None if known_batch else part
        known = self.tokens.known(tokens, self.now_us())
        flying, fencing = self._by_token.keys(), self._fencing.keys()
        if not (flying.isdisjoint(tokens) and fencing.isdisjoint(tokens)):
            known = known.union(flying & {*tokens}, fencing & {*tokens})
        if not known and len(set(tokens)) == len(tokens):
            return part
        gone, before = set[int](), set[str]()
        for i, token in enumerate(tokens):
            if token in known:
                gone.add(i)
                self._answer_known(part, i, turn)
            elif token in before:  # it came twice in this part: it is a repeat once the first has entered
                gone.add(i)
                turn.repeats.append((part, i))
            before.add(token)
        return part.without(gone) if gone else part

    def _answer_known(self, part: Part, i: int, turn: _Turn) -> None:
        """The i-th token of the part is known, or too old to be: its members get the first outcome, or wait for it."""
        token, tell = part.tokens[i], partial(part.answer.apart, part.tags[i])
        flying = self._by_token.get(token)
        found = None if flying is not None else self.tokens.find(token)
        outcome: Outcome | None = None
        if flying is not None:
            if flying.digests[flying.tokens.index(token)] != part.digests[i]:
                outcome = Outcome(None, _other_payload(token, "is in use"))
            elif flying.unknown is not None:
                outcome = Outcome(None, CommitUnknown(flying.unknown.message, token=token))
            else:
                flying.waiters.setdefault(token, []).append(tell)
        elif token in self._fencing:
            self._fencing[token].append(tell)
        elif found is None:
            try:
                self.tokens.check_age(token, self.now_us())
                outcome = Outcome(None, Aborted(f"the attempt {token!r} did not enter; nothing was applied"))
            except InvalidArgument as error:
                outcome = Outcome(None, error)
        elif found.cts == FENCED:
            fenced = Aborted(f"the attempt {token!r} was given up before it arrived; nothing was applied")
            outcome = Outcome(None, fenced)
        elif found.digest != part.digests[i]:
            outcome = Outcome(None, _other_payload(token, "was used"))
        else:
            outcome = Outcome(found.cts, repeated=True)
        if outcome is not None:
            turn.answers.append(partial(self._tell, tell, outcome))

    def _answer_batch(self, part: Single, turn: _Turn) -> bool:
        assert part.commit.batch is not None
        tell = partial(part.answer.apart, None)
        flying = self._by_batch.get(part.commit.batch)
        if flying is not None:
            if flying.unknown is not None:
                turn.answers.append(partial(tell, Outcome(None, flying.unknown)))
            else:
                flying.waiters.setdefault("", []).append(tell)
            return True
        try:
            first = self.tokens.find_batch(*part.commit.batch)
        except KiviError as error:
            turn.answers.append(partial(tell, Outcome(None, error)))
            return True
        if first is not None:
            turn.answers.append(partial(self._tell, tell, Outcome(first, repeated=True)))
        return first is not None

    def _tell(self, tell: Tell, outcome: Outcome) -> None:
        """A repeat may be of what nobody can see yet."""
        if outcome.commit_ts is None:
            tell(outcome)
        else:
            self.watermark.when(outcome.commit_ts, lambda: tell(outcome))

    def _enter(self, part: Part, turn: _Turn) -> None:
        """Steps 4 to 8."""
        single = part if isinstance(part, Single) else None
        reader = None if single is None or single.blind else single
        try:
            if self.is_behind(part):
                raise StaleCatalog
            if reader is not None:
                self._check_start(reader)
            if part.on_check is not None:
                part.on_check()
            self._check_once(part)
            if reader is not None:
                self._judge(reader)
            if single is not None and single.on_entry is not None:
                single.on_entry(self._added_before(single))
            ticket = self.log.append(part.entries(), lambda error: self._durable(part, error))
        except StaleCatalog:
            self.counters.rederived += 1
            turn.given_back.append(part)
            return
        except KiviError as error:
            if isinstance(error, DiskFull):
                self.counters.storage += 1
                self.shortage.refused()
            self._refuse(part, error, turn)
            return
        first = part.first = ticket.first
        self.watermark.enter(first, ticket.last)
        self.timeline.note(first, ticket.time_us, part.members)
        self._in_flight[first] = part
        self._by_token.update(zip(part.tokens, repeat(part)))
        if single is not None:
            for guard in single.commit.guards:
                if self.is_aggregate(guard.table):
                    self.facts.is_aggregate(guard.table)
            if single.commit.batch:
                self._by_batch[single.commit.batch] = single
                self.tokens.remember_batch(*single.commit.batch, first)
        if part.on_enter:
            part.on_enter(first)
        for cts, footprint in part.written(first):
            self._note(footprint, cts, ticket.time_us)

    def _note(self, footprint: Footprint, cts: int, time_us: int) -> None:
        self.facts.note(footprint, cts, time_us)

    def _check_once(self, part: Part) -> None:
        """Raises Aborted if events that count once are there; where one process orders, whoever sends them knows."""

    def _added_before(self, part: Single) -> dict[int, Applied]:
        """What has entered and is not in pending yet. None of it aborts, but for what tests abort (``abort_held``):
        it is durable in the end, or the store stops."""
        return {one.last: one.applied() for one in self._in_flight.values() if not isinstance(one, Writes)}

    def _check_start(self, part: Single) -> None:
        """Step 5. Raises SnapshotTooOld."""
        try:
            if part.lease is not None:
                self.leases.check(part.lease)
            if part.commit.start_ts < self.facts.floor:
                if part.derives_again:
                    raise StaleCatalog
                raise SnapshotTooOld(
                    f"the transaction began at {part.commit.start_ts}, and conflicts are only known from "
                    f"{self.facts.floor} on; nothing was applied: begin again"
                )
        except SnapshotTooOld:
            self.counters.too_old += 1
            raise

    def _judge(self, part: Single) -> None:
        """Step 6. Raises Conflict."""
        collision = self.facts.check(part.footprint, self._newest_of(part))
        collision = collision or self._derived_collision(part)
        if collision is not None:
            if part.derives_again:
                part.behind = collision.commit_ts
                raise StaleCatalog
            self.counters.conflicts += 1
            table, key, column = part.describe(collision)
            flying = collision.commit_ts > self.watermark.value
            raise Conflict(
                table=table,
                key=key,
                column=column,
                start_ts=part.commit.start_ts,
                commit_ts=None if flying else collision.commit_ts,
            )

    def _newest_of(self, part: Single) -> Callable[[int, bytes], int | None]:
        def newest(table: int, key: bytes) -> int | None:
            stamp = part.aggregate_newest(table, key)
            if stamp is None:
                return None
            return max([stamp, *(one.last for one in self._in_flight.values() if one.touches(table, key))])

        return newest

    def _derived_collision(self, part: Single) -> Collision | None:
        """Deltas that an append derives, against guards on the aggregate rows they touch."""
        start = part.commit.start_ts
        for table, key, _ in part.commit.derived:
            stamp = self.facts.guarded(table, key)
            if stamp > start:
                return Collision(table, key, None, stamp)
        for table, run in part.runs:
            for key, stamp in self.facts.guarded_rows(table, start):
                if run.find(key):
                    return Collision(table, key, None, stamp)
        return None

    # -- 9 to 12 --------------------------------------------------------------------------------

    def _durable(self, part: Part, error: BaseException | None) -> None:
        """Called by the log, in log order, on its thread."""
        with self.entry_lock:  # the log may be faster than ``_enter``, which gives the part its CTS under this lock
            if error is not None:
                self.counters.unknown += part.members
                self._in_flight.pop(part.first, None)
                part.unknown = CommitUnknown(
                    f"the log failed while this commit was being made durable ({error}): "
                    "restart the store, then ask outcome()",
                    token=part.tokens[0] if len(part.tokens) == 1 else None,
                )
            elif isinstance(part, Single) and self.hold is not None and self.hold(part.commit):
                self._held[part.first] = part
                return
        if part.unknown is not None:
            part.settle()
            return
        self._finish(part)

    def _finish(self, part: Part) -> None:
        self.pending.apply(part.last, part.applied())
        if isinstance(part, Single) and part.on_apply:
            part.on_apply(part.first)
        with self.entry_lock:
            self._in_flight.pop(part.first, None)
            self._remember(part)
        self.counters.commits += part.members
        if not part.alone:
            self.counters.commits_grouped += part.members
        self.watermark.finish(part.last, part.settle)

    def _remember(self, part: Part) -> None:
        """Its tokens are no longer those of commits in flight."""
        if len(part.tokens) == 1:
            self.tokens.remember(part.tokens[0], part.first, part.digests[0], part.members)
        elif part.tokens:
            self.tokens.remember_many(part.tokens, part.first, part.digests)
        for token in part.tokens:
            del self._by_token[token]
        if isinstance(part, Single) and part.commit.batch:
            self._by_batch.pop(part.commit.batch, None)

    # -- held commits: for tests ------------------------------------------------------------------

    @property
    def held(self) -> list[int]:
        """The CTS of commits that are durable and not finished."""
        return sorted(self._held)

    def finish_held(self, cts: int) -> None:
        self._finish(self._held.pop(cts))

    def abort_held(self, cts: int) -> None:
        """Aborts a commit after its CTS was taken: W passes it once the abort record is durable."""
        part = self._held.pop(cts)
        settled = threading.Event()

        def durable(error: BaseException | None, sequence: int) -> None:
            if error is None:
                with self.entry_lock:
                    self._in_flight.pop(cts, None)
                    for token in part.tokens:
                        self._by_token.pop(token, None)
                        self.tokens.forget(token)
                    if part.commit.batch:
                        self._by_batch.pop(part.commit.batch, None)
                        self.tokens.forget_batch(*part.commit.batch)
                    if part.on_abort:
                        part.on_abort(cts)
                aborted = Outcome(None, Aborted("the commit was aborted; it did nothing"))
                waiters = [tell for tells in part.waiters.values() for tell in tells]
                told: list[Tell] = [partial(part.answer.apart, None), *waiters]
                self.watermark.finish(cts, lambda: call_all([partial(tell, aborted) for tell in told]))
            settled.set()

        self.log_other(Abort(commits=(cts,)), durable)
        settled.wait()

    def rows(self, batch: WriteBatch, upto: int) -> None:
        """Adds what has to be in base with the position ``upto``: nothing, where the log is replayed as it was.

        Holds the entry lock.
        """

    # -- records that are not commits ---------------------------------------------------------------

    def log_other(self, other: Other, done: Callable[[BaseException | None, int], None]) -> None:
        """Enters a record that is no commit. ``done(error, sequence number)`` runs once it is durable, or unknown."""

        def durable(error: BaseException | None) -> None:
            with self.entry_lock:  # the log may be faster than this
                sequence = ticket.first
            done(error, sequence)
            if error is None:
                self.watermark.finish(sequence)

        try:
            body = other.encode()
            with self.entry_lock:
                ticket = self.log.append([Entry(kind_of(other), body)], durable)
                self.watermark.enter(ticket.first)
                self.enter_other(other, ticket.first, ticket.time_us)
        except DiskFull:
            if isinstance(other, Stage):
                self.shortage.refused()
            raise

    def find_token(self, token: str, done: Tell) -> tuple[Remembered | None, bool]:
        """(what is remembered of it, whether ``done`` now waits for an attempt or a fence in flight)."""
        with self.entry_lock:
            flying = self._by_token.get(token)
            if flying is None and token not in self._fencing:
                return self.tokens.find(token), False
            if flying is None:
                self._fencing[token].append(done)
            elif flying.unknown is None:
                flying.waiters.setdefault(token, []).append(done)
        if flying is not None and flying.unknown is not None:
            done(Outcome(None, CommitUnknown(flying.unknown.message, token=token)))
        return None, True

    def fence(self, token: str) -> bool:
        """Makes sure that ``token`` never commits, durably. False if it has an attempt in flight or an outcome."""
        settled = threading.Event()
        failure: list[BaseException] = []

        def durable(error: BaseException | None) -> None:
            outcome = Outcome(None, Aborted(f"the attempt {token!r} was given up; it did nothing and never will"))
            if error is not None:
                failure.append(error)
                outcome = Outcome(None, CommitUnknown(f"the log failed while fencing {token!r}", token=token))
            with self.entry_lock:
                if error is None:
                    self.tokens.forget(token)
                waiters = self._fencing.pop(token)
            call_all([partial(done, outcome) for done in waiters])
            if error is None:  # here, since who fences may be interrupted while it waits
                self.watermark.finish(ticket.first)
            settled.set()

        with self.entry_lock:
            if token in self._by_token or token in self._fencing or self.tokens.find(token) is not None:
                return False
            ticket = self.log.append([Entry(Kind.ABORT, Abort(tokens=(token,)).encode())], durable)
            self._fencing[token] = []
            self.watermark.enter(ticket.first)
        settled.wait()
        if failure:
            raise CommitUnknown(f"the log failed while fencing {token!r}: restart the store", token=token)
        return True
