"""Rules under attack: what is raised is what a brute force raises that judges every record at its ``rule_ts`` (R25).

::

    server process    killed with SIGKILL again and again; small segments, consolidation and settling all the time
    2 appenders       batches under tokens of their own, sent until they are answered, and now and then once more
    1 each            events that are each a commit, and come a hundred at a time
    1 Spark           two drivers of one query commit each batch at the same time, under one batch token; their tasks
                      are twins that stage the same rows
    1 transaction     appends that have read at an older snapshot
    1 operator        puts, deltas and deletes of the rows that one of the rules looks up, and retractions of events
    1 log             a follower of the server's log, which keeps the ``rule_ts`` of each record as it is acknowledged

**Histories differ** (``Shape``), each by its seed: how many keys there are, whether all the time, more and more, or a
few at a time that come back after long gaps; how often each comes; whether they are numbers or text; through how many
slots the stream goes, and how many of these are empty; how many events are late, and by how much; how many a batch has.
A part of the events follows another one of the same key by a slot or some, so that there is something to be measured
against however sparse the rest is. What rules keep in memory is of another kind in each: whole, of the newest slots, or
of what was asked for.

One event in two hundred lies below the retention floor: it is left out, raises nothing, and is counted.

What is compared in the end, after one more kill, comes from three places that know nothing of each other: the writers'
own account of what they sent and which commit timestamp they were given; ``rule_ts`` from the log; and what the store
reads. From the first two, plain NumPy says what the rules should have raised, event by event, with the row that each
was measured against. The store must have exactly these, each with the commit timestamp of its event; exactly the events
that were sent and not retracted, each once; and count all of them so. No ``rule_ts`` is older than what its writer knew
to be committed.

``python -m tests.proof.rules --events 1000000`` prints what it compared, history by history.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import kivi
from kivi.errors import CommitUnknown, KiviError, Retryable, SnapshotTooOld, Unavailable
from kivi.log import Kind
from kivi.log.followed import FollowedLog
from kivi.model.outcomes import ABORTED
from kivi.mvcc.record import decode_commit, decode_events, is_events
from kivi.store.opening import read_marker
from tests.oracle import Mismatch
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

__all__ = ["Checked", "check_rules"]

Array = Any
MINUTE_US: Final = 60_000_000
DAY_US: Final = 24 * 60 * MINUTE_US
KEPT_DAYS: Final = 400
TABLES: Final = ("slow", "own", "far", "both", "limited", "again")
"""One for each rule, of the same name."""
SETTINGS: Final = (
    "consolidate_every_s=0.05",
    "fold_every_s=0.5",
    "settle_every_s=0.2",
    "settle_idle_s=0.5",
    "flush_every_s=2",
    "segment_bytes=4194304",
)
ASKED_S: Final = 60.0
"""How long a writer waits for an answer before it asks again: longer than a restart takes."""


@dataclass(frozen=True)
class Shape:
    """What a history is like."""

    keys: int
    come: str
    """``all`` of them from the beginning, ``more`` and more, or a ``few`` at a time, which come back later."""
    is_skewed: bool
    """Whether a key comes as often as its number is low, by Zipf; or all come alike."""
    is_text: bool
    minutes: int
    """Which the stream's event times go through, however many events there are."""
    empty: float
    """The part of these in which nothing happens."""
    late: float
    """The part of the events that come late,"""
    late_us: int
    """and by how much at most."""
    follow: float
    """The part of the events that follow another one of the same key."""
    batch: int
    """How many events a batch has at most."""
    back_m: int
    slots: int
    """How far ``far`` looks back, and at how many slots."""

    @classmethod
    def of(cls, seed: int) -> Shape:
        rng = random.Random(f"shape {seed}")

        def scale(low: float, high: float) -> int:
            """Any order of magnitude as likely as another."""
            return round(low * (high / low) ** rng.random())

        return cls(
            keys=scale(*[(10, 300), (20_000, 100_000), (300, 20_000)][seed % 3]),
            come=rng.choice(["all", "more", "few"]),
            is_skewed=rng.random() < 0.5,
            is_text=rng.random() < 0.5,
            minutes=scale(20, 40_000),
            empty=rng.choice([0, 0.3, 0.95]),
            late=rng.choice([0.01, 0.05, 0.3]),
            late_us=rng.choice([30, 5 * 60, 3 * 24 * 60, 20 * 24 * 60]) * MINUTE_US,
            follow=rng.choice([0.1, 0.3, 0.6]),
            batch=scale(300, 100_000),
            back_m=rng.choice([2, 5, 60, 24 * 60]),
            slots=rng.choice([1, 3, 7]),
        )

    def __str__(self) -> str:
        keys = f"{self.keys:,} keys ({'text' if self.is_text else 'numbers'}, {'Zipf' if self.is_skewed else 'uniform'}"
        return (
            f"{keys}, {self.come}), {self.minutes:,} minutes, {self.empty:.0%} empty, {self.late:.0%} late "
            f"by up to {self.late_us // MINUTE_US:,} minutes, {self.follow:.0%} follow, batches up to {self.batch:,}, "
            f"far {self.back_m} minutes back and {self.slots} slots"
        )

    def awake(self) -> Array:
        """The minutes in which something happens: stretches of them, between silences of any length."""
        draw = np.random.default_rng(self.minutes)
        found = np.zeros(self.minutes, np.bool_)
        while found.mean() < 1 - self.empty:
            at, length = draw.integers(0, self.minutes), 1 + int(draw.exponential(self.minutes / 20))
            found[at : at + length] = True
        return np.flatnonzero(found)

    def numbers(self, draw: Any, part: Array) -> Array:
        """Of keys, where so much of the stream has gone."""
        among = np.full(len(part), self.keys)
        if self.come == "more":
            among = np.maximum(1, (self.keys * (0.1 + 0.9 * part)).astype(np.int64))
        elif self.come == "few":
            among = np.full(len(part), max(1, self.keys // 10))
        chance = draw.random(len(part))
        found = (among**chance if self.is_skewed else among * chance + 1).astype(np.int64) - 1
        if self.come == "few":  # those of each tenth of the stream, and of any other one now and then
            turn = np.where(
                draw.random(len(part)) < 0.05, draw.integers(0, 10, len(part)), (part * 10).astype(np.int64)
            )
            found += turn * (self.keys // 10)
        return np.clip(found, 0, self.keys - 1)


class Events(NamedTuple):
    """Columns of events; ``ancient`` are those below the retention floor."""

    k: Array
    ts: Array
    x: Array
    ancient: Array


class Sent(NamedTuple):
    """What one commit brought, and what its writer knew to be committed before it sent it first."""

    commit_ts: int
    events: Events
    known: int


class Change(NamedTuple):
    """A commit to a row of ``limits``."""

    commit_ts: int
    k: int
    what: str
    value: int


class Retraction(NamedTuple):
    """Of the events of ``k``, or of all, from ``start`` to ``end`` with an ``x`` of ``least`` or more, that were
    committed by ``snapshot``."""

    commit_ts: int
    snapshot: int
    k: int | None
    start: int
    end: int
    least: int

    def takes(self, k: Array, ts: Array, x: Array, commit_ts: Array) -> Array:
        chosen = (ts >= self.start) & (ts < self.end) & (x >= self.least) & (commit_ts <= self.snapshot)
        return chosen if self.k is None else chosen & (k == self.k)


@dataclass
class Checked:
    """What was compared."""

    shape: Shape
    counted: dict[str, int]
    seconds: float

    def __str__(self) -> str:
        told = ", ".join(f"{count:,} {name}" for name, count in self.counted.items())
        return f"{self.shape}:\n    exact in {self.seconds:.0f} s: {told}"


@dataclass
class Run:
    """What all threads share."""

    server: ServerProcess
    wanted: int
    seed: int
    shape: Shape
    base_us: int
    first: int
    """The commit before the rules were made."""
    stop: threading.Event = field(default_factory=threading.Event)
    sent: list[Sent] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    retractions: list[Retraction] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    made: int = 0
    newest: int = 0
    """The newest commit timestamp that was acknowledged to anybody."""

    def __post_init__(self) -> None:
        self.awake = self.shape.awake()
        self.names = names(self.shape)
        self.some = np.zeros((20_000, 2), np.int64)
        """Keys and times of some events of all that were made."""
        self.kept = 0

    def count(self, what: str, more: int = 1) -> None:
        with self.lock:
            self.counted[what] += more

    def key(self, k: int) -> Any:
        return self.names[k].as_py()

    def batch(self, events: Events) -> pa.RecordBatch:
        moments = pa.array(events.ts).cast(pa.timestamp("us", "UTC"))
        keys = self.names.take(pa.array(events.k))
        return pa.RecordBatch.from_arrays([keys, moments, pa.array(events.x)], ["k", "ts", "x"])

    def size(self, rng: random.Random, most: int | None = None) -> int:
        """Of a batch: any order of magnitude as likely as another."""
        return round((most or self.shape.batch) ** rng.random())

    def events(self, rng: random.Random, count: int) -> Events | None:
        """The next ones of the stream; None at its end."""
        shape = self.shape
        with self.lock:
            count = min(count, self.wanted - self.made)
            first, self.made = self.made, self.made + count
            some = self.some[: self.kept].copy()
        if not count:
            return None
        draw = np.random.default_rng(rng.randrange(2**63))
        part = np.arange(first, first + count) / self.wanted
        k = shape.numbers(draw, part)
        ts = self.base_us + self.awake[(part * len(self.awake)).astype(np.int64)] * MINUTE_US
        newest = int(ts[-1]) + MINUTE_US
        ts += draw.integers(0, MINUTE_US, count)
        if len(some):
            follows = np.flatnonzero(draw.random(count) < shape.follow)
            of = some[draw.integers(0, len(some), len(follows))]
            after = draw.choice([0, 1, 1, 1, 2, shape.back_m, 60], len(follows)) * MINUTE_US
            k[follows], ts[follows] = of[:, 0], np.minimum(of[:, 1] + after, newest)
        by = np.exp(draw.uniform(0, np.log(shape.late_us), count)).astype(np.int64)
        is_late = draw.random(count) < (1 if draw.random() < 0.1 else shape.late)
        ts -= np.where(is_late, by, 0)
        with self.lock:
            places = np.arange(self.kept, min(self.kept + count, len(self.some)))
            self.kept += len(places)
            places = np.concatenate([places, draw.integers(0, self.kept, min(count - len(places), count // 10))])
            self.some[places] = np.stack([k, ts], axis=1)[draw.integers(0, count, len(places))]
        ancient = draw.random(count) < 0.005
        ts = np.where(ancient, ts - 2 * KEPT_DAYS * DAY_US, ts)
        x = np.where(draw.random(count) < 0.01, draw.integers(0, 2_000, count), draw.integers(0, 100, count))
        return Events(k, ts, x, ancient)

    def one_of_them(self, rng: random.Random) -> tuple[int, int]:
        """Key and time of an event that was made; the first key as long as none was."""
        with self.lock:
            k, ts = self.some[rng.randrange(self.kept)].tolist() if self.kept else (0, self.base_us)
        return k, ts

    def committed(self, commit_ts: int, events: Events, known: int) -> None:
        with self.lock:
            self.sent.append(Sent(commit_ts, events, known))
            self.newest = max(self.newest, commit_ts)

    def asked(self, ask: Callable[[], Any]) -> Any:
        """The answer of what may be asked again, whatever became of it."""
        while True:
            try:
                return ask()
            except (CommitUnknown, Unavailable, Retryable):
                self.count("questions asked again")
                time.sleep(0.02)


def names(shape: Shape) -> Any:
    """The keys, as the tables have them; many of those that are text begin alike."""
    numbers = range(shape.keys)
    return pa.array([f"{'/api' * (k % 4)}/{k}" for k in numbers] if shape.is_text else list(numbers))


# -- writers -------------------------------------------------------------------------------------------------------


def append(run: Run, db: Any, rng: random.Random, name: str) -> None:
    number = 0
    while (events := run.events(rng, run.size(rng))) is not None:
        number += 1
        known, token, batch = run.newest, f"{name}/{number}", run.batch(events)

        def ask(batch: pa.RecordBatch = batch, token: str = token) -> int:
            return int(db.append("e", batch, token=token, late="drop"))

        commit_ts = run.asked(ask)
        run.committed(commit_ts, events, known)
        if rng.random() < 0.2:
            run.count("retries of what was answered")
            if (again := run.asked(ask)) != commit_ts:
                raise Mismatch(f"R16: {token} was answered {commit_ts}, and then {again}")


def append_each(run: Run, db: Any, rng: random.Random, name: str) -> None:
    """What an application does that has a future for each event."""
    while (events := run.events(rng, rng.choice([10, 100]))) is not None:
        rows = run.batch(events).to_pylist()
        todo = list(range(len(rows)))
        while todo:
            known = run.newest
            with db.appender("e", each=True, late="drop") as appender:
                futures = [(i, appender.append(**rows[i])) for i in todo]
            todo = []
            for i, future in futures:
                try:
                    commit_ts = future.result(ASKED_S)
                except (Retryable, Unavailable):
                    commit_ts = ABORTED
                except CommitUnknown:
                    token, place = future.token, future.place
                    commit_ts = run.asked(partial(known_outcome, db, token, place))
                if commit_ts is ABORTED:
                    todo.append(i)
                else:
                    run.committed(commit_ts, Events(*(column[i : i + 1] for column in events)), known)


def known_outcome(db: Any, token: str, place: int | None = None) -> Any:
    found = db.outcome(token, place)
    if found is not ABORTED and not isinstance(found, int):
        raise Unavailable(f"the outcome of {token} is not known yet")
    return found


def stream(run: Run, db: Any, rng: random.Random, name: str) -> None:
    """Batches of a query in Spark: tasks have twins, and the batch is committed by two drivers at the same time."""
    scope, number = f"spark/e/{name}", 0
    with ThreadPoolExecutor(4) as pool, run.server.connect(timeout=ASKED_S) as other:
        while (events := run.events(rng, 2 + run.size(rng))) is not None:
            known, batch = run.newest, run.batch(events)
            half = batch.num_rows // 2
            tasks = [batch.slice(0, half), batch.slice(half)]

            def stage(task: pa.RecordBatch) -> bytes:
                return bytes(run.asked(lambda: db.stage("e", task)))

            def drive(db: Any, stages: Sequence[bytes], number: int = number) -> int:
                def commit() -> int:
                    with db.transaction(batch=(scope, number)) as tx:
                        tx.append_stages("e", stages, late="drop")
                        return int(tx.commit())

                return int(run.asked(commit))

            first, twins = ([each.result() for each in [pool.submit(stage, task) for task in tasks]] for _ in range(2))
            attempts = [pool.submit(drive, db, first)]
            if rng.random() < 0.5:
                run.count("twin batches")
                attempts.append(pool.submit(drive, other, twins))
            answers = {attempt.result() for attempt in attempts}
            if len(answers) != 1:
                raise Mismatch(f"R16: batch {number} of {scope} was committed as {answers}")
            run.committed(answers.pop(), events, known)
            number += 1


def transact(run: Run, db: Any, rng: random.Random, name: str) -> None:
    """Appends of transactions that began a while ago, and that go on with a new snapshot where theirs is lost."""
    number = 0
    while (events := run.events(rng, run.size(rng, 100))) is not None:
        number += 1
        batch, commit_ts = run.batch(events), None
        while commit_ts is None:
            known, token = run.newest, f"{name}/{number}"
            try:
                with db.transaction(token=token) as tx:
                    tx.get("limits", (run.key(run.one_of_them(rng)[0]),))
                    time.sleep(0.01)
                    tx.append("e", batch, late="drop")
                commit_ts = tx.commit_ts
            except CommitUnknown:
                outcome = run.asked(partial(known_outcome, db, token))
                commit_ts = None if outcome is ABORTED else outcome
            except (Retryable, SnapshotTooOld, Unavailable):
                run.count("transactions begun again")
            number += commit_ts is None
        run.committed(commit_ts, events, known)


def operate(run: Run, db: Any, rng: random.Random, name: str) -> None:
    """Moves the limits, and now and then retracts events, until the others are done."""
    number = 0
    while not run.stop.is_set():
        number += 1
        retracts = rng.random() < 0.02
        (retract if retracts else limit)(run, db, rng, f"{name}/{number}")
        run.stop.wait(0.01)


def limit(run: Run, db: Any, rng: random.Random, token: str) -> None:
    doing = {
        run.one_of_them(rng)[0]: (rng.choice(["put", "put", "delta", "delete"]), rng.randrange(150))
        for _ in range(run.size(rng, 100))
    }

    def write(tx: Any) -> None:
        for k, (what, value) in doing.items():
            match what:
                case "put":
                    tx.put("limits", (run.key(k),), least=value)
                case "delta":
                    tx.delta("limits", (run.key(k),), more=1)
                case _:
                    tx.delete("limits", (run.key(k),))

    if (commit_ts := committed(run, db, token, write)) is not None:
        with run.lock:
            run.changes += [Change(commit_ts, k, what, value) for k, (what, value) in doing.items()]
            run.newest = max(run.newest, commit_ts)


def retract(run: Run, db: Any, rng: random.Random, token: str) -> None:
    """Some minutes of all, the high ones of a day, or all that there is of a key."""
    k, ts = run.one_of_them(rng)
    of, length_us, least = rng.choice([(None, 2 * MINUTE_US, 0), (None, DAY_US, 1_000), (k, 100 * DAY_US, 0)])
    start, end, snapshot = ts - length_us // 2, ts + length_us // 2, 0
    where = kivi.col("x") >= least
    if of is not None:
        where &= kivi.col("k") == run.key(of)

    def write(tx: Any) -> None:
        nonlocal snapshot
        run.count("events found by retractions", tx.retract("e", start=(start,), end=(end,), where=where))
        snapshot = tx.start_ts

    if (commit_ts := committed(run, db, token, write)) is not None:
        with run.lock:
            run.retractions.append(Retraction(commit_ts, snapshot, of, start, end, least))
            run.newest = max(run.newest, commit_ts)


def committed(run: Run, db: Any, token: str, write: Callable[[Any], None]) -> int | None:
    """The commit of a transaction that is tried once; None if it has none."""
    try:
        with db.transaction(token=token) as tx:
            write(tx)
        return None if tx.commit_ts is None else int(tx.commit_ts)
    except CommitUnknown:
        outcome = run.asked(partial(known_outcome, db, token))
        return None if outcome is ABORTED else int(outcome)
    except (Retryable, SnapshotTooOld, Unavailable):
        return None


WRITERS: Final = {"a": append, "b": append, "s": stream, "t": transact, "each": append_each}


# -- the log -------------------------------------------------------------------------------------------------------


class Witness:
    """Follows the log of the server, which truncates it and is killed meanwhile."""

    def __init__(self, data: Path) -> None:
        store_id, _ = read_marker(str(data))
        self.log = FollowedLog(str(data / "log"), after=0, store_id=store_id)
        self.rule_ts: dict[int, int] = {}
        """By commit timestamp, of the commits whose events a rule judged."""
        self.failure: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.log.close()

    def _follow(self) -> None:
        try:
            while not self._end.is_set():
                records = self.log.news()
                for record in records:
                    if record.kind == Kind.COMMIT:
                        body = decode_events(record.body) if is_events(record.body) else decode_commit(record.body)
                        if body.rule_ts is not None:
                            self.rule_ts |= {record.sequence + i: body.rule_ts for i in range(record.count)}
                if not records:
                    self._end.wait(0.02)
        except BaseException as error:
            self.failure = error

    def upto(self, commit_ts: int) -> dict[int, int]:
        """Once it has seen the log up to this commit. Raises what ended it before."""
        wait_until(lambda: self.failure is not None or self.log.last >= commit_ts)
        if self.failure is not None:
            raise self.failure
        return self.rule_ts


# -- the brute force -----------------------------------------------------------------------------------------------


class Slots:
    """Sums and counts of the slots of each key at any snapshot, from the events in the order of their commits, and from
    those that were retracted once more, as of there."""

    def __init__(self, k: Array, slot: Array, x: Array, commit_ts: Array, gone_ts: Array) -> None:
        gone = gone_ts > 0
        code, x = _code(k, slot), np.concatenate([x, -x[gone]])
        sign = np.repeat([1, -1], [len(k), int(gone.sum())])
        self.codes = np.unique(code)
        at = self.codes.searchsorted(np.concatenate([code, code[gone]])) << 40 | np.concatenate(
            [commit_ts, gone_ts[gone]]
        )
        order = np.argsort(at, kind="stable")
        self.at = at[order]
        self.sums, self.counts = (np.concatenate([[0], np.cumsum(each[order])]) for each in (x, sign))

    def read(self, k: Array, slot: Array, upto: Array) -> tuple[Array, Array]:
        """(sum, count) of what was committed up to there."""
        code = _code(k, slot)
        group = np.minimum(self.codes.searchsorted(code), len(self.codes) - 1)
        known = self.codes[group] == code
        begin = self.at.searchsorted(group << 40)
        end = np.maximum(begin, self.at.searchsorted(group << 40 | upto, side="right"))
        total, count = (np.where(known, each[end] - each[begin], 0) for each in (self.sums, self.counts))
        return total, count


def _code(k: Array, slot: Array) -> Array:
    return k << 32 | slot


class Limits:
    """What ``least + more`` of each row of ``limits`` was at any snapshot."""

    def __init__(self, changes: Sequence[Change]) -> None:
        rows: dict[int, tuple[int | None, int] | None] = {}
        found: list[tuple[int, int, bool]] = [(-1, -1, False)]
        for commit_ts, k, what, value in sorted(changes):
            least, more = rows.get(k) or (None, 0)
            row = rows[k] = {"put": (value, more), "delta": (least, more + 1), "delete": None}[what]
            least, more = row or (None, 0)
            found.append((k << 40 | commit_ts, -1 if least is None else least + more, row is not None))
        self.at, self.values, self.there = (np.array(column) for column in zip(*sorted(found), strict=True))

    def read(self, k: Array, upto: Array) -> tuple[Array, Array]:
        """The limit, -1 where it is null, and whether there is a row."""
        place = self.at.searchsorted(k << 40 | upto, side="right") - 1
        known = self.at[place] >> 40 == k
        return np.where(known, self.values[place], -1), known & self.there[place]


def gone_at(retractions: Sequence[Retraction], k: Array, ts: Array, x: Array, commit_ts: Array) -> Array:
    """The commit by which each event is retracted; 0: none."""
    out = np.zeros(len(k), np.int64)
    for each in sorted(retractions):
        out[(out == 0) & each.takes(k, ts, x, commit_ts)] = each.commit_ts
    return out


def expected(
    k: Array, ts: Array, x: Array, commit_ts: Array, rule_ts: Array, gone_ts: Array, run: Run
) -> tuple[dict[str, Array], dict[str, tuple[int, int, int]]]:
    """What each rule should have raised, as sorted rows of (commit, key, time, x, what it was measured against), and
    how many events it should have judged, raised and missed."""
    slot = ts // MINUTE_US
    slots, hours = (Slots(k, each, x, commit_ts, gone_ts) for each in (slot, slot // 60))
    out: dict[str, Array] = {}
    counts: dict[str, tuple[int, int, int]] = {}

    def raised(name: str, holds: Array, against: Array, there: Array, judged: Array | None = None) -> None:
        every = np.stack([commit_ts, k, ts, x, against], axis=1)[holds]
        out[name] = every[np.lexsort(every.T[::-1])]
        of = len(k) if judged is None else int(judged.sum())
        missing = of - int((there if judged is None else there & judged).sum())
        counts[name] = of, int(holds.sum()), missing

    def over(times: int, total: Array, count: Array) -> Array:
        return (count > 0) & (x > times * (total / np.maximum(count, 1)))

    total, count = slots.read(k, slot - 1, rule_ts)
    slow = over(4, total, count)
    raised("slow", slow, total, count > 0)
    again = slow & over(8, total, count)
    raised("again", again, total, count > 0, judged=slow)
    # The events of the commit itself are those up to it, less those up to the one before it.
    for_own = [slots.read(k, slot - 1, upto) for upto in (commit_ts, commit_ts - 1)]
    own_total, own_count = ((upto + own - before) for upto, own, before in zip((total, count), *for_own, strict=True))
    raised("own", over(4, own_total, own_count), own_total, own_count > 0)
    backs = range(run.shape.back_m, run.shape.back_m + run.shape.slots)
    parts = [slots.read(k, slot - back, rule_ts) for back in backs]
    far_total, far_count = (sum(part[i] for part in parts) for i in (0, 1))
    raised("far", over(4, far_total, far_count), far_total, np.asarray(far_count) > 0)
    hour_total, hour_count = hours.read(k, slot // 60 - 1, rule_ts)
    both = over(2, total, count) & over(2, hour_total, hour_count)
    raised("both", both, hour_total, (count > 0) & (hour_count > 0))
    limit, there = Limits(run.changes).read(k, rule_ts)
    raised("limited", there & (limit >= 0) & (x > limit), limit, there)
    return out, counts


# -- the run -------------------------------------------------------------------------------------------------------


def make_tables(db: Any, shape: Shape) -> None:
    key = "string" if shape.is_text else "int64"
    columns = {"k": key, "ts": "timestamp", "x": "int64"}
    db.create_event_table("e", event_time="ts", columns=columns, retention=f"{KEPT_DAYS}d")
    measures = {"s": kivi.sum("x"), "n": kivi.count()}
    groups = ["k", kivi.time_slot("ts", "1m", name="slot")]
    db.create_aggregate("slots", source="e", group_by=groups, measures=measures, derived={"avg": "s / n"})
    groups = ["k", kivi.time_slot("slot", "1h", name="hour")]
    db.create_aggregate("hours", source="slots", group_by=groups, derived={"avg": "s / n"})
    db.create_table("limits", key={"k": key}, columns={"least": "int64", "more": kivi.sum("int64")})
    for name in TABLES:
        db.create_event_table(name, event_time="ts", columns={**columns, "of": "int64"})
    db.create_aggregate("per_key", source="slow", group_by=["k"], measures={"n": kivi.count(), "s": kivi.sum("x")})


def set_floor(db: Any, run: Run) -> int:
    """Two events that no rule has judged, of which one is forgotten: so the retention floor has a place from here on.
    Returns their commit."""
    before = run.base_us - (KEPT_DAYS + 100) * DAY_US
    commit_ts = db.append("e", [{"k": run.key(0), "ts": ts, "x": 0} for ts in (before, run.base_us - 90 * DAY_US)])
    wait_until(lambda: "complete_since_us" in db.describe("e")["statistics"], reason="the floor does not move")
    return int(commit_ts)


def make_rules(db: Any, shape: Shape) -> None:
    before, x = kivi.previous_slot("slots", by=["k"]), kivi.col("x")
    over, select = x > 4 * kivi.ref("avg"), {"of": kivi.ref("s")}
    db.create_rule("slow", source="e", against=before, where=over, into="slow", select=select)
    db.create_rule("own", source="e", against=before, where=over, into="own", select=select, own_events=True)
    far = kivi.previous_slot("slots", by=["k"], back=f"{shape.back_m}m", slots=shape.slots)
    db.create_rule("far", source="e", against=far, where=over, into="far", select=select)
    both = {"last": before, "coarse": kivi.previous_slot("hours", by=["k"])}
    over = (x > 2 * kivi.ref("last.avg")) & (x > 2 * kivi.ref("coarse.avg"))
    select = {"of": kivi.ref("coarse.s")}
    db.create_rule("both", source="e", against=both, where=over, into="both", select=select)
    limit = kivi.ref("least") + kivi.ref("more")
    looked_up = kivi.lookup("limits", by=["k"])
    db.create_rule("limited", source="e", against=looked_up, where=x > limit, into="limited", select={"of": limit})
    again, select = x > 8 * kivi.ref("avg"), {"of": kivi.ref("s")}
    db.create_rule("again", source="slow", against=before, where=again, into="again", select=select)


def check_rules(data: Path, *, events: int, kills: int, seed: int = 0) -> Checked:
    """Runs until so many events were sent, with so many kills on the way, and compares. Raises Mismatch."""
    began, shape = time.monotonic(), Shape.of(seed)
    arguments = [argument for setting in SETTINGS for argument in ("--set", setting)]
    with ServerProcess(data, *arguments) as server:
        base_us = int(time.time()) * 1_000_000 - (shape.minutes + 5) * MINUTE_US
        run = Run(server, events, seed, shape, base_us, 0)
        with server.connect(timeout=ASKED_S) as db:
            make_tables(db, shape)
            run.first = set_floor(db, run)
            make_rules(db, shape)
        with Witness(data) as witness:
            _drive(run, kills)
            server.restart()
            rule_ts = witness.upto(run.newest)
        with server.connect(timeout=ASKED_S) as db:
            counted = _compare(db, run, rule_ts)
        assert server.stop() == 0
    seconds = time.monotonic() - began
    return Checked(shape, {"kills": kills + 1, **counted, **dict(sorted(run.counted.items()))}, seconds)


def _drive(run: Run, kills: int) -> None:
    """Lets the writers write, and kills the server whenever another part of the events has been made."""

    def write(writer: Any, name: str, number: int) -> None:
        with run.server.connect(timeout=ASKED_S) as db:
            writer(run, db, random.Random(run.seed * 100 + number), name)

    with ThreadPoolExecutor(len(WRITERS) + 1) as pool:
        operator = pool.submit(write, operate, "o", 99)
        try:
            busy = [pool.submit(write, writer, name, i) for i, (name, writer) in enumerate(WRITERS.items())]
            for kill in range(kills):
                while run.made < (kill + 1) * run.wanted // (kills + 1) and not any(
                    future.done() and future.exception() for future in (operator, *busy)
                ):
                    time.sleep(0.01)
                run.server.restart()
            for future in busy:
                future.result()
        finally:
            run.made = run.wanted  # what fails ends the others
            run.stop.set()
        operator.result()


def _compare(db: Any, run: Run, rule_ts: dict[int, int]) -> dict[str, int]:
    sent = sorted(run.sent, key=lambda each: each.commit_ts)
    if len({each.commit_ts for each in sent}) != len(sent):
        raise Mismatch("R13: two commits have one timestamp")
    kept = [~each.events.ancient for each in sent]
    k, ts, x = (np.concatenate([each.events[i][keep] for each, keep in zip(sent, kept, strict=True)]) for i in range(3))
    counts = [int(keep.sum()) for keep in kept]
    commit_ts = np.repeat([each.commit_ts for each in sent], counts)
    judged = [each for each, count in zip(sent, counts, strict=True) if count]
    if missing := [each.commit_ts for each in judged if each.commit_ts not in rule_ts]:
        raise Mismatch(f"R25: {len(missing)} records have no rule_ts, such as that of commit {missing[0]}")
    for each in judged:
        if not each.known <= rule_ts[each.commit_ts] < each.commit_ts:
            raise Mismatch(
                f"R25: commit {each.commit_ts} was judged at {rule_ts[each.commit_ts]}, and its writer knew that "
                f"{each.known} was committed"
            )
    at = np.repeat([rule_ts.get(each.commit_ts, 0) for each in sent], counts)
    gone_ts = gone_at(run.retractions, k, ts, x, commit_ts)
    wanted, tallies = expected(k, ts, x, commit_ts, at, gone_ts, run)
    events = np.stack([commit_ts, k, ts, x], axis=1)[gone_ts == 0]
    with db.snapshot() as snapshot:
        _equal("e", _read(snapshot, "e", run), events[np.lexsort(events.T[::-1])])
        for name in TABLES:
            _equal(name, _read(snapshot, name, run), wanted[name])
        per_key = {row["k"]: (row["n"], row["s"]) for row in snapshot.scan("per_key")}
    slow = wanted["slow"]
    numbers, of = np.unique(slow[:, 1], return_inverse=True)
    sums = np.zeros(len(numbers), np.int64)
    np.add.at(sums, of, slow[:, 3])
    summed = zip(np.bincount(of, minlength=len(numbers)).tolist(), sums.tolist(), strict=True)
    if per_key != dict(zip(run.names.take(pa.array(numbers)).to_pylist(), summed, strict=True)):
        raise Mismatch("R25: the aggregate of what was raised is not that of a recount")
    for rule in db.rules():
        told = rule["judged"], rule["raised"], rule["missing"]
        if told != tallies[rule["name"]] or rule["failed"] or rule["late"]:
            raise Mismatch(f"R25: rule {rule['name']!r} counts {told}, and a recount {tallies[rule['name']]}")
    ancient = sum(int(each.events.ancient.sum()) for each in sent)
    dropped = db.describe("e")["statistics"]["late_dropped"]
    if dropped != ancient:
        raise Mismatch(f"{ancient} events were sent below the floor, and {dropped} are counted")
    late = int((np.maximum.accumulate(ts) - ts > MINUTE_US).sum())
    return {
        "commits": len(sent),
        "events": len(k),
        "late by a minute and more": late,
        "below the floor": ancient,
        "keys": len(np.unique(k)),
        "changes of limits": len(run.changes),
        "retractions": len(run.retractions),
        "retracted": int((gone_ts > 0).sum()),
        "judged behind what entered before": int(
            sum(rule_ts[b.commit_ts] < a.commit_ts for a, b in itertools.pairwise(judged))
        ),
        **{f"raised by {name}": len(wanted[name]) for name in TABLES},
    }


def _read(snapshot: Any, table: str, run: Run) -> Array:
    """All events that a table got since the rules were made, with their commits, sorted."""
    columns = ["_commit_ts", "k", "ts", "x", *([] if table == "e" else ["of"])]
    found = snapshot.change_batches(table, since=run.first, retractions="ignore")
    batches = [batch.select(columns) for batch in found]
    if not batches:
        return np.zeros((0, len(columns)), np.int64)
    whole = pa.Table.from_batches(batches)
    if run.shape.is_text:
        whole = whole.set_column(1, "k", pc.index_in(whole["k"].cast(pa.string()), value_set=run.names))
    rows = np.stack([column.combine_chunks().cast(pa.int64()).to_numpy() for column in whole.columns], axis=1)
    return rows[np.lexsort(rows.T[::-1])]


def _equal(name: str, found: Array, wanted: Array) -> None:
    if np.array_equal(found, wanted):
        return
    one, other = Counter(map(tuple, found.tolist())), Counter(map(tuple, wanted.tolist()))
    more, less = one - other, other - one
    raise Mismatch(
        f"R25: {name!r} has {len(found):,} events, {more.total():,} of them that it should not have, and "
        f"{less.total():,} are not there. Some of them: {list(more)[:3]}, {list(less)[:3]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=50_000, help="of all histories together")
    parser.add_argument("--kills", type=int, default=0, help="of each; 0: one for 50,000 events, and two at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--histories", type=int, default=0, help="0: one for 100,000 events")
    args = parser.parse_args()
    histories = args.histories or max(1, args.events // 100_000)
    events = args.events // histories
    for seed in range(args.seed, args.seed + histories):
        with tempfile.TemporaryDirectory(prefix="kivi-rules-") as directory:
            try:
                kills = args.kills or max(2, events // 50_000)
                checked = check_rules(Path(directory) / "data", events=events, kills=kills, seed=seed)
                print(f"history {seed}: {checked}", flush=True)
            except (Mismatch, KiviError) as error:
                print(f"history {seed}: {Shape.of(seed)}:\n    FAILED: {error}")
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
