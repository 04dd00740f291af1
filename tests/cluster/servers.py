"""Servers of a stream, in memory and in virtual time, that do to their clients what real ones have been seen to do.

There is one true log, which is what the quorum has acknowledged. Each server has a copy of it, perhaps behind, and
perhaps with holes or with wrong bytes that it does not know of. A publish takes its time, and is lost, comes twice, has
no acknowledgement, or dies with a leader. Everything is decided by the simulation's random numbers, in its one
thread, so a seed gives the same log again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kivi.errors import DiskFull, Unavailable
from kivi.log.stream import Acknowledged, Message, Stream

if TYPE_CHECKING:
    from tests.cluster.simulation import Simulation

__all__ = ["Client", "Faults", "Servers"]

COPIES = 3
OLD_S = 0.25
YEAR_US = 31_536_000_000_000
WINDOW_US = 100_000
"""For so long the servers know names; what comes again later is another message."""


@dataclass
class Faults:
    """How often, of all messages or calls, and how long, in microseconds."""

    lost: float = 0.02
    doubled: float = 0.1
    unacknowledged: float = 0.03
    late: float = 0.1
    behind: float = 0.1
    hole: float = 0.005
    flipped: float = 0.005
    away: float = 0.01
    clock_back: float = 0.02
    clock_ahead: float = 0.0
    old: float = 0.5
    delay_us: int = 2_000
    late_us: int = 2_000_000


@dataclass
class Servers:
    """``log`` is what was acknowledged or will be; ``first`` is the sequence of its first message."""

    simulation: Simulation
    faults: Faults
    log: list[Message] = field(default_factory=list)
    first: int = 1
    tail: list[tuple[str, bytes, Acknowledged]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    spoilt: list[dict[int, bytes | None]] = field(default_factory=lambda: [{} for _ in range(COPIES)])
    clients: list[Client] = field(default_factory=list)
    clock_us: int = 0
    grew: list[tuple[float, int]] = field(default_factory=list)
    """When each message came, by a clock that is right."""
    max_message_bytes: int = 700
    """So small that many a frame comes in parts."""
    max_messages: int = 1_000_000
    room: int = 0
    """Of these, so many are left when the log is full for what clients write."""

    @property
    def last(self) -> int:
        return self.first + len(self.log) - 1

    def arrive(self, name: str, data: bytes, done: Acknowledged) -> None:
        """A message is with the leader, and is not acknowledged yet."""
        self.tail.append((name, data, done))
        self.simulation.after(self.simulation.rng.randint(1, self.faults.delay_us), self._agree)

    def _agree(self) -> None:
        """The quorum has the messages of the leader."""
        sim, faults = self.simulation, self.faults
        tail, self.tail = self.tail, []
        for name, data, done in tail:
            if self.names.get(name, 0) < sim.now_us - WINDOW_US:  # else the servers leave it out
                if len(self.log) >= self.max_messages:
                    sim.after(sim.rng.randint(1, faults.delay_us), partial(done, DiskFull("the stream is full")))
                    continue
                back = sim.rng.random() < faults.clock_back
                ahead = sim.rng.random() < faults.clock_ahead
                self.clock_us = sim.now_us - (sim.rng.randint(0, 3_000_000) if back else 0) + ahead * YEAR_US
                sequence = self.last + 1
                self.log.append(Message(sequence, self.clock_us, data))
                self.grew.append((sim.clock(), sequence))
                self.names[name] = sim.now_us
                self._spoil(sequence, data)
            if sim.rng.random() < faults.unacknowledged:
                sim.after(faults.late_us, partial(done, Unavailable("no acknowledgement came")))
            else:
                sim.after(sim.rng.randint(1, faults.delay_us), partial(done, None))
        for client in self.clients:
            sim.after(sim.rng.randint(1, faults.delay_us), client.tell)

    def _spoil(self, sequence: int, data: bytes) -> None:
        """Some copies have a hole, or a wrong bit; one copy is sound."""
        sim = self.simulation
        sound = sim.rng.randrange(COPIES)
        for copy, spoilt in enumerate(self.spoilt):
            if copy == sound:
                continue
            if sim.rng.random() < self.faults.hole:
                spoilt[sequence] = None
            elif sim.rng.random() < self.faults.flipped:
                wrong = bytearray(data)
                wrong[sim.rng.randrange(len(wrong))] ^= 1 << sim.rng.randrange(8)
                spoilt[sequence] = bytes(wrong)

    def last_at(self, at_s: float) -> int:
        """The last message that there was at this time."""
        place = bisect.bisect_right(self.grew, at_s, key=lambda grown: grown[0])
        return self.grew[place - 1][1] if place else 0

    def change_leader(self) -> None:
        """What only the old leader had is gone; nobody has seen it."""
        tail, self.tail = self.tail, []
        for _, _, done in tail:
            self.simulation.after(self.faults.late_us, partial(done, Unavailable("the leader has changed")))

    def lose(self, messages: int) -> None:
        """Acknowledged messages are gone: three disks that lied, say."""
        del self.log[max(0, len(self.log) - messages) :]
        self.names = {}

    def read(self, copy: int, first: int, count: int, upto: int) -> list[Message]:
        """What a copy has of the log up to ``upto``."""
        found = []
        for message in self.log[max(0, first - self.first) : max(0, first - self.first) + count]:
            if message.sequence > upto:
                break
            data = self.spoilt[copy].get(message.sequence, message.data)
            if data is not None:
                found.append(message._replace(data=data))
        return found

    def purge(self, below: int) -> None:
        gone = min(below, self.last + 1) - self.first
        if gone > 0:
            del self.log[:gone]
            self.first += gone


class Client(Stream):
    """One process's connection. ``cut``: nothing comes through, in either direction."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.max_message_bytes = servers.max_message_bytes
        self.attempts = COPIES
        self.on_news: Callable[[], None] = lambda: None
        self.cut = False
        self.calm = False
        """Every call is answered."""
        self.closed = False
        self._last, self._seen, self._bounds_at = 0, 0, -math.inf
        servers.clients.append(self)

    @property
    def used(self) -> float:
        return len(self.servers.log) / (self.servers.max_messages - self.servers.room)

    def tell(self) -> None:
        if not self.cut and not self.closed:
            self.on_news()

    def publish(self, name: str, data: bytes, done: Acknowledged) -> None:
        sim, faults = self.servers.simulation, self.servers.faults

        doubled = sim.rng.random() < faults.doubled

        def told(error: BaseException | None) -> None:
            if isinstance(error, DiskFull) and doubled:
                error = Unavailable("one of two copies was refused")
            if not self.closed:
                done(error)

        if self.cut or sim.rng.random() < faults.lost:
            sim.after(faults.late_us, lambda: told(Unavailable("no server answered")))
            return
        late = sim.rng.random() < faults.late
        delay = sim.rng.randint(1, faults.late_us if late else faults.delay_us)
        sim.after(delay, lambda: self.servers.arrive(name, data, told))
        if doubled:
            sim.after(sim.rng.randint(1, faults.late_us), lambda: self.servers.arrive(name, data, lambda error: None))

    def fetch(self, first: int, count: int, attempt: int = 0) -> Sequence[Message]:
        servers, rng = self.servers, self.servers.simulation.rng
        self._ask()
        behind = 0 if attempt or rng.random() > servers.faults.behind else rng.randint(1, 5)
        copy = attempt - 1 if attempt else rng.randrange(COPIES)
        found = servers.read(copy, first, count, servers.last - behind)
        self._seen = max([self._seen, *(message.sequence for message in found)])
        return found

    def check_copies(self) -> None:
        self._ask()

    def bounds(self) -> tuple[int, int]:
        """As a real one: the leader is asked now and then, and what was seen since is in it."""
        self._ask()
        simulation = self.servers.simulation
        if (
            self.calm
            or simulation.rng.random() >= self.servers.faults.old
            or simulation.clock() > self._bounds_at + OLD_S
        ):
            self._last, self._bounds_at, self._seen = self.servers.last, simulation.clock(), 0
        return self.servers.first, max(self._last, self._seen)

    @property
    def bounds_at(self) -> float:
        return self._bounds_at

    def _ask(self) -> None:
        if self.calm:
            return
        if self.cut or self.servers.simulation.rng.random() < self.servers.faults.away:
            raise Unavailable("no server answers")

    def purge(self, below: int) -> None:
        self.servers.purge(below)

    def close(self) -> None:
        self.closed = True
        self.servers.clients.remove(self)
