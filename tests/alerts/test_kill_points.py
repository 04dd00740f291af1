"""A process may end anywhere on the road of an alert, from its evaluation to what its receiver answers.

::

    evaluated   a write and a sync of the log, and what they take with them: a new segment, the mark
    folded      a batch of the engine, a flush
    sent        before the message leaves, and after the receiver has taken it, but before that is known
    forgotten   a write and a sync of the log

What a crash leaves is what was done before it, so between two of these calls all points are one: killing at each of
them, once, is killing everywhere. A write is left in half; at any other call what was written and not synced is on the
disk, or is lost, and both are tried.

**Invariant** (``kivi.alerts``). Whatever the point: right after it, and again when the history has gone on to its end,
the states, and every evaluation's own record, are what the definition gives over the log. What the receiver was told
is in the log, even right after the crash, so of a state that never was it is told nothing; at the end it was told all
of it, at least once, and for each alert and key in order.
"""

from __future__ import annotations

import datetime as dt
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from itertools import groupby, product
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from kivi.alerts import Alerts, delivery
from kivi.embedded.database import Database
from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine
from kivi.log.files import Files
from kivi.log.segmented import SegmentedLog
from kivi.store.facade import Store
from tests.alerts.receiver import Receiver
from tests.alerts.test_definition import MINUTE, NAME, SETTINGS, SPARSE, Manner, State, World, check, micros
from tests.log.faults import STORE, FaultyFiles
from tests.seeds import seeds, stories

PARTS: Final = 12
"""Stories that the points of one history are divided among: each takes every twelfth."""


class Killed(BaseException):
    """The process ends here."""


class Gone(OSError):
    """The same, for a thread of the log, which tells it to whoever waits."""


class Points:
    """Counts what the process does on the road, and ends it at the ``dies_at``-th of these. ``dead``: it has ended."""

    def __init__(self, dies_at: int) -> None:
        self.dies_at = dies_at
        self.reached: list[str] = []
        self.counts = self.dead = False

    def reach(self, what: str, error: type[BaseException] = Killed) -> None:
        if self.counts and not self.dead:
            self.reached.append(what)
            self.dead = len(self.reached) == self.dies_at
        if self.dead:
            raise error(what)


class DyingFiles(FaultyFiles):
    """Of a disk that may lose what was written to it since the last sync, as a loss of power does."""

    def __init__(self, points: Points, torn: bool) -> None:
        super().__init__(lambda name, number: points.reach(name, Gone))
        self._points, self._torn = points, torn
        self.unsynced: list[tuple[int, int, bytes]] = []
        """What stood where something was written: of which file, and from where on."""

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        whole = b"".join(bytes(part) for part in buffers)
        dead = self._points.dead
        try:
            self.unsynced.append((fd, offset, self.pread(fd, len(whole), offset).ljust(len(whole), b"\0")))
            return super().pwritev(fd, buffers, offset)
        except Gone:
            if self._torn and not dead:
                Files.pwritev(self, fd, [whole[: len(whole) // 2]], offset)
            raise

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync")  # whether the machine's own disk has it is not the question here
        self.unsynced = [one for one in self.unsynced if one[0] != fd]

    def close(self, fd: int) -> None:
        self.unsynced = [one for one in self.unsynced if one[0] != fd]
        super().close(fd)

    def lose(self) -> None:
        for fd, offset, before in reversed(self.unsynced):
            Files.pwritev(self, fd, [before], offset)


class DyingEngine(MemoryEngine):
    points: Points

    def write(self, batch: WriteBatch) -> None:
        self.points.reach("batch")
        super().write(batch)

    def flush(self) -> None:
        self.points.reach("flush")
        super().flush()


class KeptLog(SegmentedLog):
    """The definition is replayed over all of it."""

    def truncate(self, below: int) -> None:
        pass


class Road(World):
    """A history by the script of a seed, of a process that evaluates and notifies as it does, whenever that lets it."""

    def __init__(self, path: Path, receiver: Receiver, seed: int, dies_at: int, on_disk: str) -> None:
        self.path, self.receiver, self.on_disk = path, receiver, on_disk
        self.points = Points(dies_at)
        self.crashes = 0
        manner, self.script = (Manner(), SCRIPT) if seed == 0 else drawn(seed)
        super().__init__(seed, receiver.url, manner)

    def make(self) -> None:
        self.engine = DyingEngine()
        self.engine.points = self.points

    def open(self) -> None:
        self.files = DyingFiles(self.points, self.on_disk == "torn")
        self.log = self.disk = KeptLog(
            str(self.path), store_id=STORE, files=self.files, segment_bytes=8_192, clock=lambda: self.now_us * 1_000
        )
        self.store = Store.open(
            None, settings=SETTINGS, engine=self.engine, log=self.log, clock=lambda: self.now_us / 1_000_000
        )
        self.db = Database(self.store)
        self.alerts = [Alerts(self.store)]

    def run(self) -> None:
        for minutes, events, also in self.script:
            self.now_us += minutes * MINUTE
            ts = self.now_us - MINUTE // 2
            if events:
                self.enter([{"ts": ts - late * MINUTE, "ep": ep, "us": us} for ep, us, late in events])
            for step in (*also, looks):
                try:
                    step(self)
                except (Killed, Exception):
                    if not self.points.dead:
                        raise
                if self.points.dead:
                    self.crash()
        for _ in range(3):  # whatever waits for another round
            looks(self)
        self.judge_what_was_told(check(self), to_the_end=True)

    def crash(self, keep: int = 0) -> None:
        if self.on_disk == "lost":
            self.files.lose()
        self.end()
        self.engine.crash(0 if self.on_disk == "lost" else self.engine.stats()["unflushed_batches"])
        self.points.dead, self.points.dies_at = False, 0
        self.crashes += 1
        self.open()
        self.judge_what_was_told(check(self), to_the_end=False)

    def end(self) -> None:
        self.alerts[0].stop()
        self.store.crash()
        self.disk.abandon()

    def judge_what_was_told(self, of_watches: list[tuple[dict[str, State], list[State]]], *, to_the_end: bool) -> None:
        told = defaultdict[tuple[str, str], list[State]](list)
        columns = {watch.name: watch.column for watch in self.watches}
        for message in self.receiver.taken:
            for one in message.message["alerts"]:
                name, ep = one["labels"]["alertname"], one["labels"]["ep"]
                ends = None if one["status"] == "firing" else moment(one["endsAt"])
                value = int(one["annotations"][columns[name]])
                told[name, ep].append((ep, moment(one["startsAt"]), ends, value))
        for watch, (_, said) in zip(self.watches, of_watches, strict=True):
            for ep in self.manner.keys:
                expected = [one for one, _ in groupby(one for one in said if one[0] == ep)]
                found = [one for one, _ in groupby(told[watch.name, ep])]  # what is said again comes at once
                assert found == expected[: len(expected) if to_the_end else len(found)]


def moment(text: str) -> int:
    return micros(dt.datetime.fromisoformat(text))


# -- what the script is made of ---------------------------------------------------------------------------


def looks(road: Road) -> None:
    """A round of the thread, and all that it has begun to send."""
    alerts = road.alerts[0]
    road.points.counts = True
    alerts.round()
    if alerts._delivery is not None:
        sending = [*alerts._delivery._busy.values()]
        wait(sending)
        for one in sending:
            one.result()
    road.points.counts = False


def folds(road: Road) -> None:
    road.points.counts = True
    road.db.consolidate()
    road.store.consolidator.flush()
    road.points.counts = False


def restarts(road: Road) -> None:
    """In good order."""
    road.alerts[0].stop()
    road.store.close()
    road.log.close()
    road.engine.reopen()
    road.open()


def silences(name: str, minutes: int | None) -> Callable[[Road], None]:
    return lambda road: road.db.silence(name, until=None if minutes is None else road.now_us + minutes * MINUTE)


Event = tuple[str, int, int]
"""Its key, its duration, and how many minutes late it comes."""
Step = tuple[int, list[Event], tuple[Callable[[Road], None], ...]]
"""How many minutes later, what comes, and what else is done then."""
Script = tuple[Step, ...]
SCRIPT: Script = (
    (0, [("a", 500, 0), ("a", 400, 0), ("b", 1, 0)], ()),
    (6, [("a", 500, 0), ("b", 1, 0)], ()),
    (3, [("a", 300, 0), ("b", 900, 5)], ()),
    (4, [("a", 1, 0), ("a", 2, 0), ("b", 300, 9)], (folds,)),
    (0, [], (silences(NAME, 9),)),
    (5, [("b", 500, 0), ("b", 500, 0)], ()),
    (6, [("b", 500, 0), ("a", 700, 1)], (restarts,)),
    (17, [], ()),  # nothing came for three slots: all is over
    (3, [("a", 500, 0), ("b", 500, 0), ("b", 2, 4)], (silences(NAME, 60),)),
    (6, [("a", 500, 0)], (folds,)),
    (4, [("a", 600, 0)], (silences(NAME, None),)),
    (9, [("b", 1, 0)], ()),
    (30, [], ()),
)


def drawn(seed: int) -> tuple[Manner, Script]:
    """At random: keys that are seldom seen, silences of a day, events that are late by an hour, or ahead."""
    rng = random.Random(seed)
    manner = Manner(keys=SPARSE[: rng.choice([1, 3, 10])], lateness=rng.choice([0, 1, 7]))
    also: list[tuple[Callable[[Road], None], ...]] = [(), (), (), (folds,), (restarts,)]
    also += [(silences(rng.choice([NAME, "busy", "quiet"]), rng.choice([None, 9, 60])),) for _ in range(2)]
    first: Step = (0, [(manner.keys[0], 500, 0)], ())
    steps = [
        (
            rng.choice([0, 3, 5, 6, 17, 25 * 60]),
            [
                (rng.choice(manner.keys), rng.choice([1, 300, 900]), rng.choice([0, 0, 0, 4, 9, 60, -20]))
                for _ in range(rng.choice([0, 1, 2, 6]))
            ],
            rng.choice(also),
        )
        for _ in range(10)
    ]
    return manner, (first, *steps)


# -- the points -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def ran(path: Path, receiver: Receiver, seed: int = 0, dies_at: int = 0, on_disk: str = "kept") -> Road:
    """A whole history; ``dies_at`` 0: in which nothing happens."""
    receiver.received.clear()
    receiver.answers = [200, 503]
    with patch.object(delivery, "_PAUSE_S", 0.0), patch.object(delivery, "_AT_ONCE", 1):
        road = Road(path, receiver, seed, dies_at, on_disk)
        with patch.object(delivery, "_posted", sending(road.points)):
            road.run()
    road.end()
    shutil.rmtree(path)
    return road


def sending(points: Points) -> Callable[..., str]:
    def posted(url: str, body: bytes, headers: dict[str, str]) -> str:
        points.reach("sent")
        wrong = real(url, body, headers)
        points.reach("taken")
        return wrong

    real = delivery._posted
    return posted


def test_the_history_has_what_alerts_do(tmp_path: Path, receiver: Receiver) -> None:
    road = ran(tmp_path / "log", receiver)
    assert road.crashes == 0
    assert {"pwritev", "fdatasync", "rename", "batch", "flush", "sent", "taken"} <= set(road.points.reached)
    assert [one.status for one in receiver.received].count(503) == 1
    told = {(one["labels"]["alertname"], one["labels"]["ep"], one["status"])
            for message in receiver.taken for one in message.message["alerts"]}  # fmt: skip
    assert told >= set(product(("slow", "busy"), "ab", ("firing", "resolved")))
    assert ("quiet", "a", "resolved") in told


@pytest.mark.parametrize("part", stories(*range(PARTS)))
def test_wherever_the_process_ends_all_is_as_defined(part: int, tmp_path: Path, receiver: Receiver) -> None:
    ends_everywhere(tmp_path, receiver, 0, part)


@pytest.mark.story
@pytest.mark.parametrize("seed", seeds(1, 2, night=25))
def test_drawn_histories_are_as_defined(seed: int, tmp_path: Path, receiver: Receiver) -> None:
    ends_everywhere(tmp_path, receiver, seed, seed % PARTS)


def ends_everywhere(tmp_path: Path, receiver: Receiver, seed: int, part: int) -> None:
    points = ran(tmp_path / "log", receiver, seed).points.reached
    crashes = 0
    for number in range(1 + part, len(points) + 1, PARTS):
        for on_disk in ("torn",) if points[number - 1] == "pwritev" else ("kept", "lost"):
            crashes += ran(tmp_path / "log", receiver, seed, number, on_disk).crashes
    assert crashes >= len(points) // PARTS - 1  # how often the mark is synced is up to a thread of the log
