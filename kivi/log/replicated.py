"""The replicated log: one stream of frames that every node of a cluster reads, in one order, and applies by itself.

::

    gateway     propose   entries -> a frame with an id -> the stream; again until it comes back
    every node  pump      the next message -> is it the next one, whole, ours? -> was its frame seen before?
                          -> its entries are judged and numbered (``append``, while the frame arrives) -> place

A frame that is larger than a message comes in parts, and arrives with the last of them (``kivi.log.parts``).

Nobody has a part of its own in it: who publishes need not be who was first, and no node leads. A *place* is how far a
node has come: the sequence of the stream, the next commit timestamp, the time, the running hash, the frame ids and what
the log says of its nodes, all of which are functions of the log's prefix. Base keeps the place that belongs to its
position, in the same batch.

What is believed, and when:

* **A hole is no end.** The next message has the next sequence, or another copy is asked, or the node stops and names
  what is missing. So are bytes whose checksum is wrong.
* **A message that was applied stays.** What was applied last is read again with every step; other bytes under its
  sequence, an end below it, or a frame of somebody who has applied other messages (by the running hash) or more than
  there are: then the log has lost what it had acknowledged, or this node has read a bad copy. Nothing of it is applied.
  What it had applied before it was started again (``reached``) has to come again, with the same running hash, and it
  proposes nothing before.
* **A clock is believed if another one agrees.** The time of the log never falls, and moves with a frame to the earlier
  one of two clocks: that of the servers' leader, and that of the gateway. One that is a year ahead ages nothing.
* **Who is heard by nobody takes nothing.** While a frame of this node has not come back for some seconds, nor anything
  else has come, it refuses what clients write, and they go to another node: its own server of the log may stand still
  or be cut off. What it has published is published until it comes back, so this ends by itself.
* **An acknowledgement is no verdict.** A frame is committed when it comes back; whether its transactions are, is then
  judged by every node alike.

Numbers are given when a verdict is known, so here they are dense: a commit that is refused has none.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from kivi.errors import DataLoss, DiskFull, FormatTooNew, KiviError, NotFound, Unavailable
from kivi.log import CommitLog, Done, Entry, Kind, LogFailed, Record, Ticket
from kivi.log.features import FEATURES, check_features, feature_off
from kivi.log.frames import NO_HASH, Frame, FrameId, FrameIds, FramePart, decode_frame, decode_message, running_hash
from kivi.log.members import HEARD_S, Member, Members, State, switched_on
from kivi.log.outbox import Outbox
from kivi.log.parts import Parts
from kivi.log.shards import EVERY
from kivi.log.stream import Message, Stream
from kivi.runtime.histogram import Histogram

__all__ = ["Arrived", "Place", "ReplicatedLog"]

_log = logging.getLogger("kivi.log")
_AT_ONCE: Final = 256
MAX_FRAME_BYTES: Final = 64 << 20
"""Of one record; with the records that are published with it a frame may be larger."""

_HELD_UP_S: Final = 5.0
_NEVER_S: Final = 1e9
_WRITTEN: Final = frozenset({Kind.COMMIT, Kind.STAGE})

_Sound: TypeAlias = tuple[Message, Frame | FramePart]


@dataclass(frozen=True, slots=True)
class Place:
    """How far a node has come. ``number``: the last commit timestamp that was given."""

    sequence: int = 0
    number: int = 0
    time_us: int = 0
    hash: bytes = NO_HASH


@dataclass(frozen=True, slots=True)
class Arrived:
    """A frame that counts, at its place in the log. ``sequences``: the messages that it came in; the last one is its
    place. ``mine``: this process published it."""

    frame: Frame
    sequences: tuple[int, ...]
    time_us: int
    mine: bool


@dataclass(slots=True)
class _Prefix:
    """What a place stands for, beside what the store keeps: all of it is a function of the log's prefix."""

    place: Place
    seen: FrameIds
    members: Members
    parts: Parts

    @classmethod
    def of(cls, content: dict[str, Any], genesis: int) -> _Prefix:
        if not content:
            return cls(Place(number=genesis), FrameIds(), Members(), Parts())
        place = Place(content["sequence"], content["number"], content["time_us"], bytes.fromhex(content["hash"]))
        seen = FrameIds(content["frames"].encode())
        return cls(place, seen, Members(content["members"]), Parts(content["parts"]))

    def step(self, step: _Step) -> list[FrameId]:
        """One message further. The frames whose parts are not waited for any longer."""
        self.place = step.place
        if step.part is not None:
            self.parts.note(step.part, step.place.sequence)
        if step.frame is None:
            return []
        for entry in step.entries:
            self.members.enter(entry, step.place.time_us)
        self.seen.see(step.frame)
        return self.parts.forget(lambda id_: not self.seen.is_new(id_) or self.members.is_evicted(id_.node))

    def content(self) -> dict[str, Any]:
        at = self.place
        return {
            "sequence": at.sequence,
            "number": at.number,
            "time_us": at.time_us,
            "hash": at.hash.hex(),
            "frames": self.seen.encode().decode(),
            "members": self.members.encode(),
            "parts": self.parts.encode(),
        }


@dataclass(frozen=True, slots=True)
class _Step:
    """What a message does to the prefix: ``frame`` counts here, ``part`` came, ``entries`` are about nodes."""

    place: Place
    part: FramePart | None
    frame: FrameId | None
    entries: tuple[Entry, ...]


class ReplicatedLog(CommitLog):
    """``saved`` is what ``save`` gave for the position that the node goes on from; None: from the log's first message.
    ``features``: which this version knows. ``reached``: a message that the node had applied once, and the running hash
    there. Raises FormatTooNew if others are on there.

    ``pump`` is called by one thread at a time; what it delivers may call ``append``, and nobody else may.
    """

    is_judged_again = True

    def __init__(
        self,
        stream: Stream,
        *,
        generation: bytes,
        node: int,
        boot: int,
        saved: bytes | None = None,
        genesis: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        lost_after_s: float = 30.0,
        features: Collection[str] = FEATURES,
        reached: tuple[int, bytes] = (0, b""),
    ) -> None:
        self._stream, self.reached = stream, reached
        self.generation, self.node, self.boot = generation, node, boot
        content: dict[str, Any] = json.loads(saved) if saved else {}
        self._now, self._saved = _Prefix.of(content, genesis), _Prefix.of(content, genesis)
        self.features = features
        check_features("the log of this cluster", self.members.on, features)
        self._saved_on = frozenset[str]()
        self.on_features: Callable[[Collection[str]], None] = lambda features: None
        """Called with those that are on at a place, before it is saved."""
        self._flushed, self._flushed_parts = self.place.sequence, self._saved.parts.first()
        self._since: deque[_Step] = deque()  # behind the saved place
        self._hashes: deque[tuple[int, bytes]] = deque([(self.place.sequence, self.place.hash)], maxlen=4096)
        self._stages: dict[int, tuple[tuple[int, ...], int]] = {
            int(n): (tuple(at), entry) for n, (at, entry) in content.get("stages", {}).items()
        }
        self._last_read: tuple[bytes, Frame | FramePart] | None = None  # each look at the log begins with it
        self.outbox = Outbox(stream, generation, node, boot)
        self._arriving: Arrived | None = None
        self._number = self.place.number
        self._done: list[Done] = []
        self._placed = True
        self._place: Callable[[], None] = lambda: None
        self.failed: KiviError | None = None
        self.lost_suffix: KiviError | None = None
        """Why nothing may be written: the log has lost what it had acknowledged. Reads go on."""
        self._clock, self._wall_clock, self._lost_after_s = clock, wall_clock, lost_after_s
        self._short_since: float | None = None
        self._ends: deque[tuple[int, float]] = deque(maxlen=64)
        self.current_at = -math.inf
        self._came_at = -math.inf  # when it applied something last
        self._put_at: dict[int, float] = {}  # when each frame of this node that has not come back was made
        self._began = self._clock()
        self._spoke: dict[int, tuple[int, float]] = {}
        """When something of a node was applied last: by the log's time, and by ``clock``."""
        self.proven_at = -math.inf
        """Everything that the log had at this moment, by ``clock``, has been applied."""
        self.sync_times = Histogram()
        self.server_restarts: Callable[[], int] = lambda: 0
        """How often the server of the log that this node runs was started again; 0 if it runs none."""
        self.disagreements: Callable[[], int] = lambda: 0
        """Sets of shards whose content nodes do not agree about."""
        self.on_room = lambda error: None
        self.on_arrival: Callable[[Arrived], None] = lambda arrived: None
        self.on_failure: Callable[[KiviError], None] = lambda error: None
        self._max_record_bytes = MAX_FRAME_BYTES
        self._compare_reached()  # an earlier start may have saved the place where it noticed

    @property
    def place(self) -> Place:
        return self._now.place

    @property
    def age_s(self) -> float:
        """Everything that the log had so long ago has been applied, if who said what it had was its leader; one that
        was cut off and has not noticed may say it, too. So this is for people, and no answer relies on it."""
        return max(0.0, self._clock() - self.current_at)

    @property
    def proven_s(self) -> float:
        """Everything that was acknowledged so long ago has been applied: a frame that was made then has come back, and
        lies behind it in the log."""
        return max(0.0, self._clock() - self.proven_at)

    @property
    def members(self) -> Members:
        """As of the place."""
        return self._now.members

    def silent_s(self, member: Member) -> float:
        """For so long at least the log has had nothing of a node, whatever its own clock or this node's says.

        By the log's time, which tells of what was before this start, too; and, as that time stands while the clock of
        the log's leader or of every node that speaks is behind, by ``clock`` up to the newest frame of this node that
        has come back. What this node has not applied yet, and a log that brings nothing, make nobody silent.
        """
        said_us, at = self._spoke.get(member.node, (member.said_us, self._began))
        return max(0.0, (self.place.time_us - said_us) / 1e6, self.proven_at - at)

    def is_heard(self, member: Member, within_s: float = HEARD_S) -> bool:
        """Whether it is live, and has said something lately."""
        return member.state is State.LIVE and self.silent_s(member) < within_s

    def fresher(self) -> str | None:
        """The address of the other node that was the newest when it was heard last; None: none is known."""
        others = [m for m in self.members if m.state is State.LIVE and m.node != self.node and m.about.get("address")]
        found = min(others, key=lambda m: m.about.get("age_s", _NEVER_S) - m.said_us / 1e6, default=None)
        return None if found is None else str(found.about["address"])

    def addresses(self, shards: int) -> list[str]:
        """Of the live nodes that hold all of these shards: those that answer, if any do."""
        members, time_us = self.members, self.place.time_us
        found = members.holders(shards)
        found = [member for member in found if members.answers(member.node, time_us)] or found
        return [member.about.get("address") or f"node {member.node:x}" for member in found]

    def is_whole_elsewhere(self) -> bool:
        """Whether another node that was heard lately holds all shards."""
        return any(member.node != self.node and self.is_heard(member) for member in self.members.holders(EVERY))

    def parts(self, shards: int) -> list[tuple[str, int]]:
        """Of each live node that others can reach its address, and which of these shards it holds. Of those that have
        had one address in turn the last one is there now."""
        live = [one for one in self.members if one.state is State.LIVE and one.about.get("address")]
        there = {one.about["address"]: one for one in sorted(live, key=lambda one: one.said_us)}
        return [(address, one.shards & shards) for address, one in there.items()]

    # -- what a gateway does ----------------------------------------------------------------------

    def propose(self, entries: Sequence[Entry], derived_at: int, on_id: Callable[[int], None]) -> None:
        """Publishes a frame, again and again until it comes back. ``on_id`` is called with its n before it can.

        Raises what keeps anything from being written; then nothing was. DiskFull: of what a client writes. What says
        how the nodes are, and gives up what was written, has room beyond: else the log could not be truncated.
        FeatureOff: of what some node may not be able to read. Unavailable, ``stopping``: `is_held_up`, and it is not
        what nodes say of themselves.
        """
        if not all(entry.kind.is_about_nodes for entry in entries):
            self.check_heard()
        self.check_entries(entries)
        self._put(entries, derived_at, on_id)

    def check_entries(self, entries: Sequence[Entry]) -> None:
        """Raises what keeps these from being written, whatever they are published with: see ``propose``."""
        for feature in (feature for entry in entries for feature in entry.needs):
            if feature not in self.members.on:
                raise feature_off(feature, map(self.named, self.lacking(feature)))
        if self._stream.used >= 1 and any(entry.kind in _WRITTEN for entry in entries):
            raise DiskFull(
                "the log is full: nothing was applied; kivi cluster status says for whom it is kept, and what to do"
            )
        if not entries or any(entry.numbers for entry in entries):
            self._sizes([entry for entry in entries if entry.numbers])

    def lacking(self, feature: str) -> list[Member]:
        """The nodes because of which a feature cannot be switched on."""
        return self.members.lacking(feature, self.place.time_us)

    def boot_of(self, node: int) -> int:
        """The newest start of a node that the log tells of."""
        return self._now.seen.boot_of(node)

    @staticmethod
    def named(member: Member) -> str:
        """Its address, or its number."""
        return str(member.about.get("address") or f"{member.node:x}")

    def barrier(self, on_id: Callable[[int], None]) -> None:
        """Publishes a frame of nothing: when it comes back, all has been applied that was acknowledged before."""
        self.check_heard()
        self._put((), 0, on_id)

    def _put(self, entries: Sequence[Entry], derived_at: int, on_id: Callable[[int], None]) -> None:
        self.check_writable()

        def made(id_: FrameId) -> Frame:
            self._put_at[id_.n] = self._clock()
            at = self.place
            now_us = int(self._wall_clock() * 1_000_000)
            return Frame(self.generation, id_, derived_at, now_us, at.sequence, at.hash, entries)

        self.outbox.add(made, on_id)

    def check_heard(self) -> None:
        """Raises what `check_writable` does, and Unavailable, ``stopping``, if it `is_held_up`: a log that has lost
        something brings nothing either, and no other node helps then."""
        self.check_writable()
        if self.is_held_up:
            raise Unavailable(
                f"the log has brought this node nothing for {_HELD_UP_S:.0f} s, nor what it has published: nothing was "
                "applied; ask another node",
                stopping=True,
            )

    @property
    def is_held_up(self) -> bool:
        """Whether what it has published does not come back, nor anything else comes, while it waits for that. A node
        that is slow, or far behind, is not held up: it moves on."""
        return self._clock() - self._came_at >= _HELD_UP_S and self.awaited_s > _HELD_UP_S

    @property
    def awaited_s(self) -> float:
        """For how long the oldest frame of this node that has not come back has been on its way; below 0 for none."""
        return self._clock() - min(self._put_at.copy().values(), default=math.inf)

    def check_writable(self) -> None:
        """Raises LogFailed, or Unavailable, if nothing can be written."""
        if self.failed is not None:
            raise LogFailed(self.failed.message)
        if self.lost_suffix is not None:
            raise Unavailable(self.lost_suffix.message)
        if self.place.sequence < self.reached[0]:
            raise Unavailable(f"this node had applied message {self.reached[0]} once, and has not read it again yet")

    @property
    def proposed(self) -> int:
        """Frames that have not come back."""
        return len(self.outbox)

    # -- what every node does ---------------------------------------------------------------------

    def pump(self, count: int = _AT_ONCE) -> int:
        """Applies the next messages, at most ``count``; how many. Raises Unavailable if no copy can be asked.

        A node that may not go on fails for good: ``failed`` says why, naming the sequence.
        """
        if not self._goes_on():
            return 0
        try:
            messages = self._next(count)
            for message, held in messages:
                if self._goes_on():
                    self._apply(message, held)
            while self._ends and self._ends[0][0] <= self.place.sequence:
                self.current_at = self._ends.popleft()[1]
            return len(messages)
        except Unavailable:
            raise
        except KiviError as error:
            self.fail(error)
            return 0

    def _goes_on(self) -> bool:
        return self.failed is None and self.lost_suffix is None

    def fail(self, error: KiviError) -> None:
        """The node stops: it applies nothing any more, and what it proposed is unknown."""
        self.failed = error
        _log.error("the replicated log stopped: %s", error.message)
        self.on_failure(error)

    def stop(self) -> None:
        """The node ends: nobody waits any longer for what was proposed."""
        self.failed = self.failed or Unavailable("this node is being stopped")
        self.on_failure(self.failed)

    def _next(self, count: int) -> list[_Sound]:
        """The messages behind the place, sound and without a hole."""
        at = self.place.sequence
        first, last = self._stream.bounds()
        asked_at = self._stream.bounds_at
        if not self._ends or self._ends[-1][0] < last:
            self._ends.append((last, asked_at))
        else:
            self._ends[-1] = (last, asked_at)
        if last < (known := max(at, self.reached[0])):  # a leader that was cut off may say so, too, for a while
            self._short_since = asked_at if self._short_since is None else self._short_since
            if last <= at:  # what there is has been applied
                if asked_at - self._short_since < self._lost_after_s:
                    raise Unavailable(f"the log ends at {last}, and this node has applied {known}")
                self._lost(f"the log ends at {last}, and this node has applied {known}")
                return []
        else:
            self._short_since = None
        if first > at + 1:
            raise DataLoss(f"the log begins at {first}, and this node has applied {at} only: bootstrap it again")
        last_read = self._last_read if at >= first else None
        found, is_cut = self._sound(at + 1 if last_read is None else at, count + 1)
        if last_read is not None:
            if not found:  # a leader that has not caught up with itself has answered
                raise Unavailable(f"the log ends before {at} now, which this node has applied")
            if found[0][0].data != last_read[0]:
                raise DataLoss(f"message {at} of the log is not what this node has applied: bootstrap it again")
            found = found[1:]
            if not found and is_cut:  # the copy that has the one has not the other
                found, _ = self._sound(at + 1, count)
        return found[:count]

    def _sound(self, first: int, count: int) -> tuple[list[_Sound], bool]:
        """Messages from ``first`` on that follow on one another, [] if the log ends before; and whether the copy that
        they are of has a hole behind them, or something else, which is asked for with the next step."""
        for asked in range(self._stream.attempts + 1):
            found: list[_Sound] = []
            messages = self._stream.fetch(first, count, asked)
            for message in messages:
                held = self._decoded(message)
                if message.sequence != first + len(found) or held is None:
                    break
                found.append((message, held))
            if found:
                return found, len(found) < len(messages)
            if not asked and self._stream.bounds()[1] < first:
                return [], False
        self._stream.check_copies()
        raise DataLoss(
            f"message {first} of the log cannot be read from any copy: nothing behind it is applied; repair the "
            "log's servers, or bootstrap the cluster from the best node"
        )

    def _decoded(self, message: Message) -> Frame | FramePart | None:
        """None if it is damaged."""
        last_read = self._last_read
        if last_read is not None and message.data == last_read[0]:
            return last_read[1]
        try:
            held = decode_message(message.data)
        except DataLoss:
            return None
        except FormatTooNew as error:
            raise FormatTooNew(f"message {message.sequence} of the log cannot be read: {error.message}") from None
        return held if held.generation == self.generation else None

    def _apply(self, message: Message, held: Frame | FramePart) -> None:
        before = self.place
        part: FramePart | None = None
        frame: Frame | None = None
        sequences: tuple[int, ...] = (message.sequence,)
        if isinstance(held, Frame):
            frame = held
        elif self._now.seen.is_new(held.id):
            part = held
            self._now.parts.note(part, message.sequence, keep=True)
            data = self._now.parts.joined(part.id, self._part)
            if data is not None:
                frame, sequences = decode_frame(data), self._now.parts.sequences(part.id)
        if frame is not None:
            self._compare(frame, message.sequence)
            if self.lost_suffix is not None:
                return
            if frame.id.node == self.node and frame.id.boot > self.boot:
                raise DataLoss("another process runs as this node, on a copy of its directory: stop one of them")
        time_us = before.time_us if frame is None else max(before.time_us, min(message.time_us, frame.clock_us))
        if frame is not None and not self._now.seen.is_new(frame.id):
            frame = None
        for entry in () if frame is None else frame.entries:
            on = [feature for feature in switched_on(entry) if not self.members.lacking(feature, time_us)]
            check_features(f"message {message.sequence} of the log", on, self.features)
        self._number, self._placed = before.number, False

        def place() -> None:
            """What the message has done, with the hash of all messages and of all verdicts."""
            self._placed = True
            self._came_at = self._clock()  # before anything is proposed on its arrival: the node is not held up now
            if frame is not None:
                self._spoke[frame.id.node] = time_us, self._came_at
            hash_ = running_hash(before.hash, self._number, message.data)
            entries = () if frame is None else tuple(entry for entry in frame.entries if entry.kind.is_about_nodes)
            at = Place(message.sequence, self._number, time_us, hash_)
            step = _Step(at, part, None if frame is None else frame.id, entries)
            self._since.append(step if part is None else replace(step, part=replace(part, data=b"")))
            self._hashes.append((message.sequence, hash_))
            for id_ in self._now.step(step):
                if self._is_mine(id_):
                    self.outbox.again(id_.n)
            self._compare_reached()

        self._place = place
        if frame is not None:
            self._arriving = Arrived(frame, sequences, time_us, self._is_mine(frame.id))
            try:
                self.on_arrival(self._arriving)  # which may ask for what cannot be read now: then it comes again
            finally:
                self._arriving = None
        self.placed()
        self._last_read = message.data, held
        came = held if isinstance(held, Frame) else frame
        if came is not None and self._is_mine(came.id):
            self.proven_at = max(self.proven_at, self._put_at.pop(came.id.n, -math.inf))
            self.outbox.arrived(came.id.n)

    def placed(self) -> None:
        """The place moves to the message that arrives, whose entries have all been judged; once."""
        if not self._placed:
            self._place()

    def _part(self, sequence: int) -> FramePart:
        """Read again. Raises Unavailable, DataLoss."""
        message, held = self._one(sequence)
        if not isinstance(held, FramePart):
            raise DataLoss(f"message {message.sequence} of the log is no part of a frame any more")
        return held

    def _one(self, sequence: int) -> _Sound:
        first = self._stream.bounds()[0]
        if first > sequence:
            raise DataLoss(f"the log begins at {first}, and this node needs {sequence} again: bootstrap it again")
        found, _ = self._sound(sequence, 1)
        if not found:
            raise DataLoss(f"message {sequence} of the log is gone")
        return found[0]

    def _is_mine(self, id_: FrameId) -> bool:
        return (id_.node, id_.boot) == (self.node, self.boot)

    def _compare(self, frame: Frame, sequence: int) -> None:
        """With what the gateway of the frame had applied. Raises DataLoss if it was something else."""
        if frame.applied >= sequence:
            self._lost(f"node {frame.id.node} has applied message {frame.applied}, and {sequence} came after it")
        for at, hash_ in reversed(self._hashes):
            if at == frame.applied:
                if hash_ != frame.hash:
                    raise DataLoss(
                        f"this node and node {frame.id.node} have applied different messages up to {at}: one of them "
                        "has to be bootstrapped again"
                    )
                return
            if at < frame.applied:
                return

    def _compare_reached(self) -> None:
        """At that place, with what this node had applied before it was started again."""
        at = self.place
        if 0 < at.sequence == self.reached[0] and at.hash != self.reached[1]:
            self._lost(f"message {at.sequence} of the log, or one before, is not what this node had applied")

    def has_applied(self, sequence: int, hash_: str) -> bool | None:
        """Whether this node, too, had this hash there; None if it is not there yet, or has forgotten."""
        return next((have.hex() == hash_ for at, have in list(self._hashes) if at == sequence), None)

    def _lost(self, how: str) -> None:
        if self.lost_suffix is None:
            self.lost_suffix = Unavailable(
                f"{how}: the log has lost what it had acknowledged, so nothing is written; reseed it from the node "
                "that has applied most (kivi cluster reseed)"
            )
            _log.error("%s", self.lost_suffix.message)
            self.on_failure(self.lost_suffix)

    # -- the log that a committer sees ------------------------------------------------------------

    @property
    def last(self) -> int:  # type: ignore[override]
        return self._number if self._arriving is not None else self.place.number

    @property
    def next(self) -> int:  # type: ignore[override]
        return self.last + 1

    @property
    def durable(self) -> int:  # type: ignore[override]
        return self.last

    @property
    def last_time_us(self) -> int:  # type: ignore[override]
        return self._arriving.time_us if self._arriving is not None else self.place.time_us

    def append(self, records: Sequence[Entry], done: Done) -> Ticket:
        """Numbers entries of the frame that arrives, which are durable: ``take_done`` has their ``done``."""
        arriving = self._arriving
        if arriving is None:
            raise Unavailable("entries of a replicated log are proposed, and numbered when their frame arrives")
        first = self._number + 1
        for kind, _, numbers, _ in records:
            if kind is Kind.STAGE:
                self._stages[self._number + 1] = (arriving.sequences, self.at_entry)
            self._number += numbers
        self._done.append(done)
        return Ticket(first, self._number, arriving.time_us)

    at_entry = 0
    """Which entry of the frame is being judged, where that matters: a stage."""

    def take_done(self) -> list[Done]:
        """The callbacks of what was appended since the last call, in order."""
        done, self._done = self._done, []
        return done

    def save(self, upto: int) -> bytes:
        """The place that belongs to the last commit timestamp ``upto``, for ``saved``."""
        while self._since and self._since[0].place.number <= upto:
            self._saved.step(self._since.popleft())
        if (on := frozenset(self._saved.members.on)) != self._saved_on:
            self.on_features(on)
            self._saved_on = on
        content = self._saved.content()
        content["stages"] = {n: where for n, where in self._stages.items() if n <= upto}
        return json.dumps(content).encode()

    def keep_stages(self, needed: Container[int]) -> None:
        """After a restart: what was saved has stages, too, that no commit behind the place can name."""
        self._stages = {number: where for number, where in self._stages.items() if number in needed}

    def message_of(self, stage: int) -> int:
        """The first message that has a stage, or a part of it."""
        return min(self._stages[stage][0])

    @property
    def needed(self) -> int:
        """The first message that this node may have to read again, after a crash too."""
        return self.needs()[0]

    def needs(self) -> tuple[int, str]:
        """``needed``, and what for: a name of ``kivi.log.members.NEEDS``."""
        stages = [min(sequences) for sequences, _ in list(self._stages.values())]  # by any thread, while others come
        found = [(self._flushed + 1, "fold"), *((first, "stage") for first in stages)]
        if (part := self._flushed_parts) is not None:
            found.append((part, "part"))
        return min(found)

    def read(self, sequence: int) -> Record:
        where = self._stages.get(sequence)
        if where is None:
            raise NotFound(f"the log has no record {sequence}")
        sequences, place = where
        found = [self._one(at) for at in sequences]
        parts = [held.data for _, held in found if isinstance(held, FramePart)]
        frame = found[0][1] if not parts else decode_frame(b"".join(parts))
        if not isinstance(frame, Frame):
            raise DataLoss(f"messages {sequences} of the log are no frame any more")
        entry = frame.entries[place]
        return Record(sequence, found[-1][0].time_us, entry.kind, entry.body[0], entry.numbers)

    def replay(self, after: int) -> Iterator[Record]:
        """None: what comes after the saved place arrives by ``pump``, and is judged."""
        return iter(())

    def truncate(self, below: int) -> None:
        """What was saved last is on disk, and stages below are not needed. What leaves the log is not decided here."""
        self._flushed, self._flushed_parts = self._saved.place.sequence, self._saved.parts.first()
        for number in list(self._stages):  # while others come
            if number < below:
                del self._stages[number]

    @property
    def first(self) -> int:
        return 1

    def stats(self) -> dict[str, int | float]:
        return {
            "sequence": self.place.sequence,
            "proposed": self.proposed,
            "proposed_bytes": self.outbox.nbytes,
            "age_s": min(self.age_s, _NEVER_S),
            "used": self._stream.used,
            "lost_suffix": int(self.lost_suffix is not None),
            "nodes_live": self.members.count(State.LIVE),
            "nodes_evicted": self.members.count(State.EVICTED),
            "server_restarts": self.server_restarts(),
            "disagreements": self.disagreements(),
        }

    def close(self) -> None:
        self._stream.close()
