"""Committing through a log that orders: the same steps (``kivi.mvcc.commit``), in another order.

::

    caller's thread   1  encode and derive; wait for room in pending
                      -  a lease that was cut, events below a floor and the like are refused at once
                      -  propose: the group is a frame, published until it comes back; what is small waits while
                         some of this node are on their way, and shares the next one with all that came meanwhile
    log's thread,     3  token known?  -> its first CTS
    each node, in     4  tables and floors as derived with?   -> refused as stale; its gateway derives it again
    log order         5  start_ts >= facts.floor
                      -  events that count once? -> refused if one was taken (``kivi.mvcc.deduplication``)
                      6  verdict against facts; what was gathered for a retraction (``kivi.mvcc.gathering``)
                      7  the next numbers are its CTS
                      8  facts.note, tokens.remember
                     10  applied to pending
    once a frame     11  W moves past all of it
                     12  the gateway's callers are told

Steps 3 to 8 read nothing but what the log's prefix decides, so every node decides alike: tokens, what changed when,
facts, stages, what was gathered or taken, which rows of guarded aggregates were touched (``kivi.mvcc.touches``); and
times are the log's. What steps 4 to 6 compare with is kept in base with the position (``kivi.mvcc.prefix``), so a node
that starts anew, or from the copy of another, goes on with it. Base may be ahead of the position then: nothing is read
or derived until W has come to where base may be.

Of a frame that this process published the parts themselves are applied, of any other one what its entries decode to.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from kivi.encoding.keyspaces import meta_key
from kivi.engine import WriteBatch
from kivi.errors import CommitUnknown, InvalidArgument, KiviError, Unavailable
from kivi.log import Entry
from kivi.log.features import feature_off, on_entry
from kivi.log.replicated import Arrived, ReplicatedLog
from kivi.mvcc.applied import Applied
from kivi.mvcc.commit import Aborted, Committer, StaleCatalog, _Turn
from kivi.mvcc.deduplication import Deduplication
from kivi.mvcc.gathering import Gathering, Window
from kivi.mvcc.groups import Beginning, Outcome, Part, Single, Writes
from kivi.mvcc.pins import Pins
from kivi.mvcc.prefix import Prefix
from kivi.mvcc.record import Abort, Gather, Other, Pin, kind_of
from kivi.mvcc.tokens import FENCED
from kivi.mvcc.touches import Touches
from kivi.mvcc.verdict import Footprint
from kivi.mvcc.watermark import call_all

__all__ = ["PLACE", "Proposed", "ReplicatedCommitter"]

PLACE: Final = meta_key("place")
"""The place in the log that belongs to the recorded position: see ``kivi.log.replicated``."""
_FENCE_S: Final = 10.0
_SWITCH_S: Final = 30.0
_ON_THEIR_WAY: Final = 4
"""So many frames of a node may be, before what is small waits for one of them: a client is busy with what one brought
while the next ones are on their way."""
_SMALL_BYTES: Final = 64 << 10
"""So much waits for nothing: a frame of it costs the log its bytes, and hardly more for being one."""
_COMPANY_S: Final = 0.1
"""Nothing that comes waits for a frame that takes longer than that: it may have been lost, and is published again."""
_NO_GUARDS: Final = (
    "a cluster does not judge guards on rows of aggregates of sharded tables, of which a node may hold a part: guard a "
    "row of a table"
)


_Done: TypeAlias = Callable[[BaseException | None, int], None]


class Proposed(NamedTuple):
    """An entry that is no commit, on its way; ``done(error, number)`` is told what became of it.

    Without ``other`` it is only asked when the frame comes: then ``number`` is the last one before it.
    """

    other: Other | None
    done: Callable[[BaseException | None, int], None]


class ReplicatedCommitter(Committer):
    """Thread safe. ``decode`` makes parts of a foreign frame's entries, ``later`` runs what must not hold
    the log up."""

    log: ReplicatedLog
    prefix: Prefix

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decode: Callable[[Arrived], Sequence[Part | Proposed]] = lambda arrived: ()
        self.later: Callable[[Callable[[], object]], None] = lambda run: threading.Thread(
            target=run, daemon=True
        ).start()
        self.trim: Callable[[Part], None] = lambda part: None
        """Leaves out of a part of its own what this node does not apply."""
        self.is_sharded: Callable[[int], bool] = lambda table: False
        self.gathering, self.deduplication, self.pins = Gathering(), Deduplication(), Pins(self.leases)
        self.touches = Touches()
        self._proposed: dict[int, Sequence[Part | Proposed]] = {}
        self._waiting: list[tuple[Part, Sequence[Entry]]] = []
        self._waiting_bytes = 0
        self._frame_lock = threading.RLock()
        """Held while a frame is made of what waits, so that parts come in the order in which they were submitted; the
        entry lock is taken under it, never the other way round."""
        self.log.on_arrival = self._arrived
        self.log.on_failure = self._failed
        self.log.outbox.refused = self._no_room_in_the_log

    def now_us(self) -> int:
        return self.log.last_time_us

    # -- what a gateway does ----------------------------------------------------------------------

    def submit(self, parts: Sequence[Part], *, may_wait: bool = True) -> Sequence[Part]:
        turn = _Turn()
        ready: list[Part] = []
        try:
            admitted = self._admit(parts, turn, may_wait)
            with self.entry_lock:
                ready = [p for p in admitted if not self._is_known(p, turn) and self._may_be_proposed(p, turn)]
            now = [part for part in ready if not isinstance(part, Single) or part.begins is None]
            if now:
                self._propose_parts(now, turn)
        finally:
            for part in parts:
                if isinstance(part, Single) and (begins := part.begins) is not None:
                    if part in ready:
                        self._gather(part, begins, turn)
                    else:
                        begins.close()
            call_all(turn.answers)
        return turn.given_back

    def _propose_parts(self, parts: Sequence[Part], turn: _Turn) -> None:
        """In a frame of their own, or with others once a frame of this node has come back.

        Whatever waits, waits behind frames that are on their way: whoever takes one out of ``_proposed`` proposes it.
        """
        made = [(part, part.entries()) for part in parts]
        try:
            self.log.check_heard()  # what is to wait for may never come then
            self.log.check_entries([entry for _, entries in made for entry in entries])  # and no others share that
        except KiviError as error:
            for part in parts:
                self._refuse(part, error, turn)
            return
        size = sum(memoryview(data).nbytes for _, entries in made for entry in entries for data in entry.body)
        with self._frame_lock:
            self._waiting += made
            self._waiting_bytes += size
            is_due = len(self._proposed) < _ON_THEIR_WAY or self._waiting_bytes >= _SMALL_BYTES
            if is_due or self.log.awaited_s > _COMPANY_S:
                self._propose_waiting(turn)

    def _propose_waiting(self, turn: _Turn) -> None:
        with self._frame_lock:
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
            if waiting:
                self._propose_frame([part for part, _ in waiting], [e for _, made in waiting for e in made], turn)

    def _propose_frame(self, parts: Sequence[Part], entries: Sequence[Entry], turn: _Turn) -> None:
        derived_at = min(part.derived_at for part in parts)
        for part in parts:  # as every other node reads it: one for the frame, and each member by itself
            part.derived_at = derived_at
            if isinstance(part, Writes):
                part.notes_each = True
        try:
            self._propose(parts, entries, derived_at)
        except KiviError as error:
            for part in parts:
                self._refuse(part, error, turn)

    def _gather(self, part: Single, begins: Beginning, turn: _Turn) -> None:
        """Proposes that what is added to some aggregates is kept from there on; then, as of there, the part."""

        def done(error: BaseException | None, number: int) -> None:
            if error is None:
                self.later(partial(self._begin, part, begins, number))
                return
            begins.close()
            lost = error if isinstance(error, KiviError) else Unavailable(f"the log failed ({error!r}): try again")
            call_all([partial(part.answer.apart, tag, Outcome(None, lost)) for tag in part.tags])

        try:
            self.log_other(Gather(begins.tables), done)
        except KiviError as error:
            begins.close()
            self._refuse(part, error, turn)

    def _begin(self, part: Single, begins: Beginning, number: int) -> None:
        turn = _Turn()
        try:
            begins.at(number)
            self._propose_parts([part], turn)
        except KiviError as error:
            self._refuse(part, error, turn)
        call_all(turn.answers)

    def _propose(self, items: Sequence[Part | Proposed], entries: Sequence[Entry], derived_at: int) -> None:
        def on_id(n: int) -> None:
            self._proposed[n] = items

        if entries:
            self.log.propose(entries, derived_at, on_id)
        else:
            self.log.barrier(on_id)
        if (failed := self.log.failed) is not None:  # perhaps before it was noted: then nobody else tells it
            self._failed(failed)

    def _is_known(self, part: Part, turn: _Turn) -> bool:
        """Whether all of it has an outcome, whatever else could be said against it; then that is told (R16)."""
        if part.tokens and self.tokens.known(part.tokens, self.now_us()) >= {*part.tokens}:
            for i in range(len(part.tokens)):
                self._answer_known(part, i, turn)
            return True
        return isinstance(part, Single) and part.commit.batch is not None and self._answer_batch(part, turn)

    def _may_be_proposed(self, part: Part, turn: _Turn) -> bool:
        """What only its gateway can say against it; the rest is judged when it comes back."""
        try:
            if self.is_behind(part):
                raise StaleCatalog
            if isinstance(part, Single):
                if part.lease is not None and not part.blind:
                    self.leases.check(part.lease)
                if any(self.is_sharded(table) for table in self._guarded_aggregates(part)):
                    raise InvalidArgument(_NO_GUARDS)
                part.lease = None
            if part.on_check is not None:
                part.on_check()
        except StaleCatalog:
            self.counters.rederived += 1
            turn.given_back.append(part)
            return False
        except KiviError as error:
            self._refuse(part, error, turn)
            return False
        return True

    def log_other(self, other: Other, done: Callable[[BaseException | None, int], None]) -> None:
        self._propose([Proposed(other, done)], [Entry(kind_of(other), other.encode())], 0)

    def say(self, entries: Sequence[Entry], done: Callable[[BaseException | None, int], None]) -> None:
        """Publishes entries about nodes, or none: ``done`` is called once this node has applied all that the log had
        before them, and they count. A read of what was acknowledged anywhere before the call waits for its number."""
        self._propose([Proposed(None, done)], entries, 0)

    def staleness(self) -> tuple[float, int]:
        with self.entry_lock:  # no message is half applied
            return self.log.proven_s, self.log.last

    def fresher(self) -> str | None:
        with self.entry_lock:
            return self.log.fresher()

    def newest(self, timeout_s: float, entries: Sequence[Entry] = ()) -> int:
        """``entries`` about nodes are said with it, and count when this returns. Raises FeatureOff."""
        self.need(feature for entry in entries for feature in entry.needs)
        return self._answered(partial(self.say, entries), timeout_s)

    def newest_until(self, time_us: int, timeout_s: float) -> int:
        return 0 if time_us < self.now_us() else self.newest(timeout_s)  # times in the log never fall

    def need(self, features: Iterable[str]) -> None:
        for feature in features:
            with self.entry_lock:
                is_on, lacking = feature in self.log.members.on, self.log.lacking(feature)
            if not is_on and not lacking:
                self.newest(_SWITCH_S, [on_entry(feature)])
                with self.entry_lock:
                    is_on, lacking = feature in self.log.members.on, self.log.lacking(feature)
            if not is_on:
                raise feature_off(feature, map(self.log.named, lacking))

    def _answered(self, propose: Callable[[_Done], None], timeout_s: float) -> int:
        told: Future[int] = Future()

        def done(error: BaseException | None, number: int) -> None:
            if error is None:
                told.set_result(number)
            else:
                told.set_exception(error)

        propose(done)
        try:
            return told.result(timeout_s)
        except FutureTimeout:
            raise Unavailable(
                f"this node has not come to know in {timeout_s:.0f} s what was acknowledged: the log's servers do not "
                "answer it, or it is far behind; ask another one"
            ) from None

    def pin(self, ttl_s: float | None, timeout_s: float, begins: bytes = b"") -> tuple[bytes, int]:
        """A snapshot that every node keeps for so long: its name, and the number that it is at, once it is applied.
        ``begins``: as its name does."""
        name = begins + secrets.token_bytes(16 - len(begins))
        pin = Pin(name, int(self.leases.limit(ttl_s) * 1_000_000), True)
        return pin.name, self._answered(partial(self.log_other, pin), timeout_s)

    def prolong(self, name: bytes, ttl_s: float | None) -> None:
        """A pin that is held, from now; its nodes hear of it. 0 s: it ends."""
        ttl_us = 0 if ttl_s == 0 else int(self.leases.limit(ttl_s) * 1_000_000)
        self.log_other(Pin(name, ttl_us, False), lambda error, number: None)

    def fence(self, token: str) -> bool:
        """Makes sure that ``token`` never commits; False if it has an outcome by the time the fence arrives."""
        arrived = threading.Event()
        failure: list[BaseException] = []

        def told(error: BaseException | None, number: int) -> None:
            failure.extend([error] if error is not None else [])
            arrived.set()

        self.log_other(Abort(tokens=(token,)), told)
        if not arrived.wait(_FENCE_S) or failure:
            raise CommitUnknown(f"the log did not take the fence of {token!r}: ask again, or another node", token=token)
        with self.entry_lock:
            found = self.tokens.find(token)
        return found is not None and found.cts == FENCED

    # -- what every node does ---------------------------------------------------------------------

    def _arrived(self, arrived: Arrived) -> None:
        """Judges the entries of a frame, and applies those that commit. W moves in one step."""
        n = arrived.frame.id.n
        items = self._proposed.pop(n, None) if arrived.mine else None
        if items is None:
            items = self.decode(arrived)
        else:
            for item in items:
                if isinstance(item, Part):
                    self.trim(item)
        turn = _Turn()
        with self.watermark.gathered():
            with self.entry_lock:
                self._let_go()
                parts: list[Part] = []
                for place, item in enumerate(items):
                    if isinstance(item, Part):
                        parts += self._not_behind(item, turn)
                        continue
                    self._enter_all(parts, turn)
                    parts = []
                    self.log.at_entry = place
                    self._enter_proposed(item, turn)
                self._enter_all(parts, turn)
            for done in self.log.take_done():
                done(None)
            self.log.placed()  # before W moves: whoever records a position then has the place that belongs to it
        if any(entry.kind.is_about_nodes for entry in arrived.frame.entries):
            self.hear_nodes()
        if arrived.mine:
            self._propose_waiting(turn)
        call_all(turn.answers)
        if arrived.mine:
            for part in turn.given_back:
                self._derive_again(part)

    def hear_nodes(self) -> None:
        """What they say of their snapshots is kept for them, as of the place."""
        with self.entry_lock:
            bound, opened = self.log.members.snapshots(besides=self.log.node, time_us=self.log.place.time_us)
            self.leases.hold(bound, opened)

    def _check_once(self, part: Part) -> None:
        if isinstance(part, Single) and self.deduplication.has_some(part, self.now_us()):
            raise Aborted("some of these events were taken meanwhile: nothing was applied; try again without them")

    def _added_before(self, part: Single) -> dict[int, Applied]:
        found = self.gathering.since(part.commit.gathered_since, self.now_us())
        if found is None:
            raise StaleCatalog
        return found

    def _enter(self, part: Part, turn: _Turn) -> None:
        for table in self._guarded_aggregates(part):
            self.prefix.watched(self.log.last, table, self.touches.ask(table, self.log.last, self.now_us()))
        super()._enter(part, turn)
        if not part.first:
            return
        if isinstance(part, Single) and (taken := self.deduplication.take(part, self.now_us())) is not None:
            self.prefix.took(taken)
        if self.touches.watches and (touched := self.touches.touched(part.applied())):
            self.touches.touch(touched.items(), part.last)
            self.prefix.touched(part.last, touched)
        if not self.gathering.windows:
            return
        if (kept := self.gathering.keep(part.last, part.applied())) is not None:
            self.prefix.gathered(kept, part.last)
        if isinstance(part, Single):
            self._end_gathering(part.commit.gathered_since, part.last)

    def _guarded_aggregates(self, part: Part) -> set[int]:
        if not isinstance(part, Single):
            return set()
        return {guard.table for guard in part.commit.guards if self.is_aggregate(guard.table)}

    def _newest_of(self, part: Single) -> Callable[[int, bytes], int | None]:
        return lambda table, key: self.touches.newest(table, key) if self.is_aggregate(table) else None

    def _let_go(self) -> None:
        """Of what is over by the log's time."""
        now_us, last = self.now_us(), self.log.last
        for number in self.gathering.over(now_us):
            self._end_gathering(number, last)
        for name in self.pins.over(now_us):
            self.pins.end(name)
            self.prefix.pinned(last, name, None)
        for table in self.touches.over(now_us):
            self.touches.end(table)
            self.prefix.watched(last, table, None)

    def _end_gathering(self, number: int, cts: int) -> None:
        if number in self.gathering.windows:
            self.gathering.end(number)
            self.prefix.gathered_until(cts, number)

    def _not_behind(self, part: Part, turn: _Turn) -> list[Part]:
        """Writes that entered together are judged one by one, as those who read them from the log do."""
        if not isinstance(part, Writes) or not self.is_behind(part):
            return [part]
        every = {*range(len(part.write_sets))}
        behind = {i for i in every if (one := part.without(every - {i})) is not None and self.is_behind(one)}
        if behind and (stale := part.without(every - behind)) is not None:
            self.counters.rederived += 1
            turn.given_back.append(stale)
        rest = part.without(behind)
        return [] if rest is None else [rest]

    def _enter_proposed(self, item: Proposed, turn: _Turn) -> None:
        other, done = item
        if other is None:
            turn.answers.append(partial(done, None, self.log.last))
            return
        if isinstance(other, Abort) and other.tokens:
            unknown = tuple(token for token in other.tokens if self.tokens.find(token) is None)
            other = Abort(other.commits, unknown, other.stages)

        def durable(error: BaseException | None) -> None:
            self.watermark.finish(ticket.first)
            done(error, ticket.first)

        ticket = self.log.append([Entry(kind_of(other), other.encode())], durable)
        self.watermark.enter(ticket.first)
        self.enter_other(other, ticket.first, ticket.time_us)
        if isinstance(other, Gather):
            window = Window(ticket.first, ticket.time_us, other.tables)
            self.gathering.restore(window)
            self.prefix.gathers(window)
        elif isinstance(other, Pin):
            held = self.pins.enter(other, ticket.first, ticket.time_us)
            self.prefix.pinned(ticket.first, other.name, held)

    def _derive_again(self, part: Part) -> None:
        if part.derive_again is not None:
            self.later(part.derive_again)
            return
        changed = Aborted("a table of the commit changed before it was judged: nothing was applied; try again")
        call_all([partial(part.answer.apart, tag, Outcome(None, changed)) for tag in part.tags])

    def _failed(self, error: KiviError) -> None:
        """Whoever waits for what was proposed is told that its outcome is unknown."""
        with self.entry_lock:
            proposed, self._proposed = self._proposed, {}
        for items in proposed.values():
            for item in items:
                if isinstance(item, Part):
                    item.unknown = CommitUnknown(
                        f"the log failed before this commit came back ({error.message}): ask outcome() elsewhere"
                    )
                    self.counters.unknown += item.members
                    call_all([item.settle])
                else:
                    call_all([partial(item.done, error, 0)])
        self._no_longer_waits()

    def _no_longer_waits(self) -> None:
        """What was to come back never does."""
        turn = _Turn()
        self._propose_waiting(turn)
        call_all(turn.answers)

    def _no_room_in_the_log(self, n: int, error: KiviError) -> None:
        """It was never there; an empty frame takes its place."""
        with self.entry_lock:
            items = self._proposed.pop(n, ())
        for item in items:
            if isinstance(item, Part):
                self.counters.storage += item.members
                call_all([partial(item.answer.apart, tag, Outcome(None, error)) for tag in item.tags])
            else:
                call_all([partial(item.done, error, 0)])
        self._no_longer_waits()

    # -- what is kept with the position --------------------------------------------------------------

    def _note(self, footprint: Footprint, cts: int, time_us: int) -> None:
        super()._note(footprint, cts, time_us)
        self.prefix.written(cts, footprint, self.facts.generations)

    def rows(self, batch: WriteBatch, upto: int) -> None:
        self.prefix.save(batch, upto)
        batch.put(PLACE, self.log.save(upto))
