"""The replicated log: one stream of frames that every node of a cluster reads, in one order, and applies by itself.

::

    gateway     propose   entries -> a frame with an id -> the stream; again until it comes back
    every node  pump      the next message -> is it the next one, whole, ours? -> was its frame seen before?
                          -> its entries are judged and numbered (``append``, while the frame arrives) -> place

Nobody has a part of its own in it: who publishes need not be who was first, and no node leads. A *place* is how far a
node has come: the sequence of the stream, the next commit timestamp, the time, the running hash and the frame ids, all
of which are functions of the log's prefix. Base keeps the place that belongs to its position, in the same batch.

What is believed, and when:

* **A hole is no end.** The next message has the next sequence, or another copy is asked, or the node stops and names
  what is missing. So are bytes whose checksum is wrong.
* **A message that was applied stays.** What was applied last is read again with every step; other bytes under its
  sequence, an end below it, or a frame of somebody who has applied other messages (by the running hash) or more than
  there are: then the log has lost what it had acknowledged, or this node has read a bad copy. Nothing of it is applied.
* **An acknowledgement is no verdict.** A frame is committed when it comes back; whether its transactions are, is then
  judged by every node alike.

Numbers are given when a verdict is known, so here they are dense: a commit that is refused has none.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kivi.errors import DataLoss, KiviError, NotFound, Unavailable
from kivi.log import CommitLog, Done, Entry, Kind, LogFailed, Record, Ticket
from kivi.log.frames import NO_HASH, Frame, FrameId, FrameIds, decode_frame, running_hash
from kivi.log.stream import Message, Stream
from kivi.runtime.histogram import Histogram

__all__ = ["Arrived", "Place", "ReplicatedLog"]

_log = logging.getLogger("kivi.log")
_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class Place:
    """How far a node has come. ``number``: the last commit timestamp that was given."""

    sequence: int = 0
    number: int = 0
    time_us: int = 0
    hash: bytes = NO_HASH


@dataclass(frozen=True, slots=True)
class Arrived:
    """A frame that counts, at its place in the log. ``mine``: this process published it."""

    frame: Frame
    sequence: int
    time_us: int
    mine: bool


class ReplicatedLog(CommitLog):
    """``saved`` is what ``save`` gave for the position that the node goes on from; None: from the log's first message.

    ``pump`` is called by one thread at a time; what it delivers may call ``append``, and nobody else may.
    """

    is_judged_again = True

    def __init__(
        self, stream: Stream, *, generation: bytes, node: int, boot: int, saved: bytes | None = None, genesis: int = 0
    ) -> None:
        self._stream = stream
        self.generation, self.node, self.boot = generation, node, boot
        content: dict[str, Any] = json.loads(saved) if saved else {}
        self.place = Place(
            content.get("sequence", 0),
            content.get("number", genesis),
            content.get("time_us", 0),
            bytes.fromhex(content["hash"]) if content else NO_HASH,
        )
        self.seen = FrameIds(content["frames"].encode() if content else None)
        self._saved = self.place
        self._flushed = self.place.sequence
        self._saved_seen = FrameIds(self.seen.encode())
        self._since: deque[tuple[Place, FrameId]] = deque()  # behind the saved place
        self._hashes: deque[tuple[int, bytes]] = deque([(self.place.sequence, self.place.hash)], maxlen=4096)
        self._stages: dict[int, tuple[int, int]] = {int(n): tuple(at) for n, at in content.get("stages", {}).items()}
        self._last_message: bytes | None = None
        self._lock = threading.Lock()
        self._outbox: dict[int, bytes] = {}
        self._flying: set[int] = set()
        self._n = 0
        self._arriving: Arrived | None = None
        self._done: list[Done] = []
        self.failed: KiviError | None = None
        self.lost_suffix: KiviError | None = None
        """Why nothing may be written: the log has lost what it had acknowledged. Reads go on."""
        self.sync_times = Histogram()
        self.on_room = lambda error: None
        self.on_arrival: Callable[[Arrived], None] = lambda arrived: None
        self.on_failure: Callable[[KiviError], None] = lambda error: None
        self._max_record_bytes = stream.max_message_bytes

    # -- what a gateway does ----------------------------------------------------------------------

    def propose(self, entries: Sequence[Entry], derived_at: int, on_id: Callable[[int], None]) -> None:
        """Publishes a frame, again and again until it comes back. ``on_id`` is called with its n before it can.

        Raises what keeps anything from being written; then nothing was.
        """
        self.check_writable()
        self._lengths([entry for entry in entries if entry.numbers])
        with self._lock:
            self._n += 1
            n = self._n
            at = self.place
            id_ = FrameId(self.node, self.boot, n)
            data = Frame(self.generation, id_, derived_at, at.sequence, at.hash, entries).encode()
            self._outbox[n] = data
            on_id(n)
        self._publish(n)

    def check_writable(self) -> None:
        """Raises LogFailed, or Unavailable, if nothing can be written."""
        if self.failed is not None:
            raise LogFailed(self.failed.message)
        if self.lost_suffix is not None:
            raise Unavailable(self.lost_suffix.message)

    def _publish(self, n: int) -> None:
        with self._lock:
            data = self._outbox.get(n)
            if data is None or n in self._flying:
                return
            self._flying.add(n)

        def acknowledged(error: BaseException | None) -> None:
            with self._lock:
                if error is not None:
                    self._flying.discard(n)

        self._stream.publish(f"{self.node:x}.{self.boot:x}.{n:x}", data, acknowledged)

    def retry(self, *, all_of_them: bool = False) -> int:
        """Publishes again what is not known to be there; ``all_of_them``: also what is on its way. How many."""
        with self._lock:
            if all_of_them:
                self._flying.clear()
            due = [n for n in self._outbox if n not in self._flying]
        for n in due:
            self._publish(n)
        return len(due)

    @property
    def proposed(self) -> int:
        """Frames that have not come back."""
        return len(self._outbox)

    # -- what every node does ---------------------------------------------------------------------

    def pump(self, count: int = _AT_ONCE) -> int:
        """Applies the next messages, at most ``count``; how many. Raises Unavailable if no copy can be asked.

        A node that may not go on fails for good: ``failed`` says why, naming the sequence.
        """
        if self.failed is not None:
            return 0
        try:
            messages = self._next(count)
            for message in messages:
                self._apply(message)
            return len(messages)
        except Unavailable:
            raise
        except KiviError as error:
            self.fail(error)
            return 0

    def fail(self, error: KiviError) -> None:
        """The node stops: it applies nothing any more, and what it proposed is unknown."""
        self.failed = error
        _log.error("the replicated log stopped: %s", error.message)
        self.on_failure(error)

    def _next(self, count: int) -> list[Message]:
        """The messages behind the place, sound and without a hole."""
        at = self.place.sequence
        first, last = self._stream.bounds()
        if last < at:
            self._lost(f"the log ends at {last}, and this node has applied {at}")
            return []
        if first > at + 1:
            raise DataLoss(f"the log begins at {first}, and this node has applied {at} only: bootstrap it again")
        begin = at if at >= first and self._last_message is not None else at + 1
        found = self._sound(begin, count + 1)
        if begin == at:
            if not found or found[0].data != self._last_message:
                raise DataLoss(f"message {at} of the log is not what this node has applied: bootstrap it again")
            found = found[1:]
        return found[:count]

    def _sound(self, first: int, count: int) -> list[Message]:
        """Messages from ``first`` on that follow on one another; [] if the log ends before."""
        for asked in range(self._stream.attempts + 1):
            found: list[Message] = []
            for message in self._stream.fetch(first, count, asked):
                if message.sequence != first + len(found) or not self._is_whole(message):
                    break
                found.append(message)
            if found:
                return found  # what is behind a hole is asked for with the next step
            if not asked and self._stream.bounds()[1] < first:
                return []
        self._stream.check_copies()
        raise DataLoss(
            f"message {first} of the log cannot be read from any copy: nothing behind it is applied; repair the "
            "log's servers, or bootstrap the cluster from the best node"
        )

    def _is_whole(self, message: Message) -> bool:
        try:
            return decode_frame(message.data).generation == self.generation
        except DataLoss:
            return False

    def _apply(self, message: Message) -> None:
        frame = decode_frame(message.data)
        self._compare(frame, message.sequence)
        before = self.place
        time_us = max(before.time_us, message.time_us)
        hash_ = running_hash(before.hash, message.data)
        self._arriving = Arrived(frame, message.sequence, time_us, self._is_mine(frame.id))
        self._number = before.number
        try:
            if self.seen.is_new(frame.id):
                self.on_arrival(self._arriving)  # which may ask for what cannot be read now: then it comes again
        finally:
            self._arriving = None
        self.seen.see(frame.id)
        self.place = Place(message.sequence, self._number, time_us, hash_)
        self._since.append((self.place, frame.id))
        self._hashes.append((message.sequence, hash_))
        self._last_message = message.data
        if self._is_mine(frame.id):
            with self._lock:
                self._outbox.pop(frame.id.n, None)
                self._flying.discard(frame.id.n)

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

    def _lost(self, how: str) -> None:
        if self.lost_suffix is None:
            self.lost_suffix = Unavailable(
                f"{how}: the log has lost what it had acknowledged, so nothing is written; reseed it from the node "
                "that has applied most (kivi cluster reseed)"
            )
            _log.error("%s", self.lost_suffix.message)

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
        for kind, _, numbers in records:
            if kind is Kind.STAGE:
                self._stages[self._number + 1] = (arriving.sequence, self.at_entry)
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
        while self._since and self._since[0][0].number <= upto:
            self._saved, id_ = self._since.popleft()
            self._saved_seen.see(id_)
        at = self._saved
        content = {
            "sequence": at.sequence,
            "number": at.number,
            "time_us": at.time_us,
            "hash": at.hash.hex(),
            "frames": self._saved_seen.encode().decode(),
            "stages": {n: where for n, where in self._stages.items() if n <= upto},
        }
        return json.dumps(content).encode()

    @property
    def needed(self) -> int:
        """The least sequence that this node may have to read again, after a crash too."""
        stages = [sequence for sequence, _ in self._stages.values()]
        return min([self._flushed + 1, *stages])

    def read(self, sequence: int) -> Record:
        where = self._stages.get(sequence)
        if where is None:
            raise NotFound(f"the log has no record {sequence}")
        message = self._sound(where[0], 1)[0]
        entry = decode_frame(message.data).entries[where[1]]
        return Record(sequence, message.time_us, entry.kind, entry.body[0], entry.numbers)

    def replay(self, after: int) -> Iterator[Record]:
        """None: what comes after the saved place arrives by ``pump``, and is judged."""
        return iter(())

    def truncate(self, below: int) -> None:
        """What was saved last is on disk, and stages below are not needed. What leaves the log is not decided here."""
        self._flushed = self._saved.sequence
        for number in [number for number in self._stages if number < below]:
            del self._stages[number]

    @property
    def first(self) -> int:
        return 1

    def stats(self) -> dict[str, int | float]:
        return {"sequence": self.place.sequence, "proposed": self.proposed}

    def close(self) -> None:
        self._stream.close()
