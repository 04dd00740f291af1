"""What applications send that count: many callers of one client at once, in every shape, judged by the replay oracle.

``Client``'s workloads read their snapshot before they commit, so each of their transactions begins at the server and
enters the log alone. A crowd does what an application does. Its callers share one ``db``, ask for no snapshot, and
leave it to client and server what travels and enters together:

::

    blind       deltas and puts that read nothing: of one hot row, of several, the same ones again and again
    read        get and then put or guard, which a blind commit of the same cells has to abort (R4, R8)
    events      one-event ``db.append``, and an appender, whose events share a commit
    each        one appender that all callers share, and whose events are each a transaction (R19)
    glimpses    ``db.get`` and ``db.get_many``, whose snapshot is not told
    retries     a token that has committed, or that is just being committed by another caller (R16)
    past        ``as_of`` a commit of one's own, and just before it: the prefix of a group or of a message (R19)

The callers are 64 tasks of one ``kivi.aio`` client, or as many threads of one blocking client or of a store in this
process. Their steps are written once: what a blocking database answers at once, ``done`` awaits from ``kivi.aio``.

They come in rounds, so that what they send meets, and the store is not busy with nothing else in between.
``Bunches`` makes groups in process, where no public call does so.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import kivi.aio
from kivi.errors import (
    CommitUnknown,
    Conflict,
    InvalidArgument,
    KiviError,
    Retryable,
    SnapshotTooOld,
    Unavailable,
)
from tests.oracle import Attempt, Glimpse, Mismatch, Op, Oracle, Read
from tests.proof.groups import Together
from tests.proof.workloads import ACCOUNTS, KEYS, MOMENTS, Client, MemberToken, micros

__all__ = ["Bunches", "Crowd", "Tasks"]

T = TypeVar("T")
CALLERS = 64
EVERY_S = 0.15  # between the rounds
REMEMBERED = 500  # commits whose tokens may come again
APPENDERS = 4  # callers that have one

SHAPES = {
    "count": 30,
    "deltas": 16,
    "puts": 9,
    "both": 6,
    "transfer": 10,
    "others": 3,
    "read_then_put": 7,
    "guarded": 3,
    "event": 6,
    "appended": 4,
    "each": 6,
    "get": 9,
    "get_many": 6,
    "retry": 4,
    "twin": 3,
    "past": 2,
    "look": 1,
}
"""What a caller does next, by weight."""


async def done(said: Any) -> Any:
    """What a call gives, of whichever database."""
    return await said if inspect.isawaitable(said) else said


@contextlib.asynccontextmanager
async def within(manager: Any) -> AsyncIterator[Any]:
    """``with`` or ``async with``."""
    if hasattr(manager, "__aenter__"):
        async with manager as entered:
            yield entered
    else:
        with manager as entered:
            yield entered


async def rows_of(scan: Any) -> list[dict[str, Any]]:
    return [row async for row in scan] if hasattr(scan, "__aiter__") else list(scan)


def driven(steps: Coroutine[Any, Any, T]) -> T:
    """Runs steps over a blocking database, which never wait."""
    try:
        steps.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("a blocking database was awaited")


@dataclass(frozen=True)
class Sent:
    """A transaction that may come again: only of writes."""

    token: str
    ops: list[Op]
    commit_ts: int


class Crowd(Client):
    """Many threads over one blocking database. Thread safe as far as its callers need it."""

    def __init__(
        self,
        db: Any,
        oracle: Oracle,
        seed: int,
        *,
        first: int = 0,
        callers: int = CALLERS,
        every_s: float = EVERY_S,
    ) -> None:
        super().__init__(db, oracle, seed, first=first)
        self.face = db  # what its callers use, which may be another than what others may close
        self.callers = [Caller(self, i, random.Random(seed * 1_000 + i)) for i in range(callers)]
        self.every_s = every_s
        self.sent: deque[Sent] = deque(maxlen=REMEMBERED)
        self.flying: dict[str, list[Op]] = {}
        self.twinned: set[str] = set()
        self.each: Any = None
        """The appender that the callers share, once one of them has opened it."""

    def token(self) -> str:
        return next(self._tokens)

    def saw(self, ts: int) -> None:
        """What is acknowledged to one caller, every later step of any caller has to see (R17)."""
        if ts > self.acknowledged:
            self.acknowledged = ts

    def run(self, stop: threading.Event) -> None:
        threads = [
            threading.Thread(target=lambda caller=caller: driven(caller.run(stop, time.sleep)), name=caller.name)
            for caller in self.callers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def failed(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error


class Tasks(Crowd):
    """As many tasks of one ``kivi.aio`` client, on an event loop in the thread that runs them."""

    def __init__(self, endpoint: str, oracle: Oracle, seed: int, *, timeout: float = 30.0, **arguments: Any) -> None:
        super().__init__(_Closing(), oracle, seed, **arguments)
        self._endpoint = endpoint
        self._timeout_s = timeout

    def run(self, stop: threading.Event) -> None:
        try:
            asyncio.run(self._main(stop))
        except Unavailable:  # the server went away before anybody was connected
            self.unreachable += 1
        except BaseException as error:
            self.failed(error)

    async def _main(self, stop: threading.Event) -> None:
        async with await kivi.aio.connect(self._endpoint, timeout=self._timeout_s) as self.face:
            closing = asyncio.create_task(self._closed())
            await asyncio.gather(*(caller.run(stop, asyncio.sleep) for caller in self.callers))
            closing.cancel()

    async def _closed(self) -> None:
        while not self.db.is_closed:  # noqa: ASYNC110 (another thread says so)
            await asyncio.sleep(0.02)
        await self.face.close()


class _Closing:
    """Stands for the client of a crowd of tasks, which another thread may close."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Caller:
    """One thread or task of a crowd."""

    def __init__(self, crowd: Crowd, place: int, rng: random.Random) -> None:
        self.crowd = crowd
        self.place = place
        self.random = rng
        self.name = f"{crowd.name}.{place}"
        self.appender: Any = None
        self.open = contextlib.AsyncExitStack()

    @property
    def db(self) -> Any:
        return self.crowd.face

    async def run(self, stop: threading.Event, sleep: Callable[[float], Any]) -> None:
        crowd = self.crowd
        try:
            while not stop.is_set() and crowd.failure is None:
                try:
                    for _ in range(self.random.randint(1, 4)):
                        await self.step()
                        if stop.is_set():
                            break
                except SnapshotTooOld:  # a restart of the server ends every snapshot
                    crowd.restarted += 1
                except (Unavailable, CommitUnknown):
                    crowd.unreachable += 1
                    await done(sleep(0.02))
                if crowd.every_s:
                    await done(sleep(crowd.every_s - time.monotonic() % crowd.every_s))
        except BaseException as error:
            crowd.failed(error)
        finally:
            with contextlib.suppress(KiviError):
                await self.open.aclose()

    async def step(self) -> None:
        (shape,) = self.random.choices([*SHAPES], [*SHAPES.values()])
        await getattr(self, shape)()

    # -- writing, without having read -----------------------------------------------------------

    async def count(self) -> None:
        """One more view of one of few pages: the same bytes again and again."""
        table, key = self.random.choice((("t", 1), ("counters", 2), ("past", 0)))
        await self.blind([Op("delta", table, (key,), {"n": 1})])

    async def deltas(self) -> None:
        """Of several columns of one row, or of several rows. Sums of floats tell in which order they were added."""
        rng, ops = self.random, []
        for key in rng.sample(range(KEYS), rng.choice((1, 1, 2, 3))):
            table = rng.choice(("t", "past"))
            values: dict[str, Any] = {"n": rng.randrange(-50, 50)}
            if rng.random() < 0.7:
                values["f"] = rng.uniform(-1, 1)
            if table == "t" and rng.random() < 0.5:
                values["hi"] = rng.randrange(1_000)
            ops.append(Op("delta", table, (key % 4 if table == "past" else key,), values))
        await self.blind(ops)

    async def puts(self) -> None:
        rng = self.random
        table = rng.choice(("t", "past", "fork"))
        await self.blind([Op("put", table, (rng.randrange(3),), {"v": rng.randrange(1_000)})])

    async def both(self) -> None:
        """A put and deltas, sometimes of one row, which meet those of others."""
        rng = self.random
        first, second = rng.sample(range(KEYS), 2) if rng.random() < 0.7 else (1, 1)
        ops = [
            Op("put", "t", (first,), {"v": rng.randrange(1_000)} if rng.random() < 0.8 else {"n": 7}),
            Op("delta", "t", (second,), {"n": rng.randrange(9), "f": rng.uniform(-1, 1)}),
        ]
        await self.blind(ops)

    async def transfer(self) -> None:
        """The bank's total is the same at every snapshot."""
        (source, target), amount = self.random.sample(range(ACCOUNTS), 2), self.random.randrange(1, 100)
        deltas = ((source, -amount), (target, amount))
        await self.blind([Op("delta", "bank", (key,), {"balance": change}) for key, change in deltas])

    async def others(self) -> None:
        """What is blind as well, and is no put or delta: it comes in one message with those."""
        rng, key = self.random, (self.random.randrange(KEYS),)
        kind = rng.choice(("delete", "guard", "guard"))
        column = rng.choice(("n", "v", None)) if kind == "guard" else None
        ops = [Op(kind, "t", key, {} if column is None else {column: None})]
        if rng.random() < 0.5:
            ops.append(Op("delta", "t", (rng.randrange(KEYS),), {"n": 1}))
        await self.blind(ops)

    async def blind(self, ops: list[Op]) -> int | None:
        """Commits writes; under a token of its own, so that it can come again, or under the client's."""
        crowd = self.crowd
        token = crowd.token() if self.random.random() < 0.6 else None
        if token is not None:
            crowd.flying[token] = ops
        try:
            attempt = await self.commit(self.writing(ops), token)
        finally:
            if token is not None:
                crowd.flying.pop(token, None)
        commit_ts = attempt.commit_ts
        if commit_ts is None:
            if attempt.refused is not None and all(op.table == "counters" for op in ops):
                raise Mismatch(f"R3: refused, where nothing but deltas is ever written: {attempt}")
        elif token is not None:
            crowd.sent.append(Sent(token, ops, commit_ts))
        return commit_ts

    def writing(self, ops: list[Op]) -> Callable[[Any], Awaitable[list[Op]]]:
        async def write(tx: Any) -> list[Op]:
            for op in ops:
                await self.perform(tx, op)
            return ops

        return write

    async def perform(self, tx: Any, op: Op) -> None:
        match op.kind:
            case "delete" | "guard":
                await done(getattr(tx, op.kind)(op.table, op.key, *op.values))
            case _:
                await done(getattr(tx, op.kind)(op.table, op.key, **op.values))

    async def commit(
        self, body: Callable[[Any], Awaitable[list[Op]]], token: str | None = None, *, repeat: bool = False
    ) -> Attempt:
        """One transaction, logged with what became of it; ``body(tx)`` is what it does, and returns that."""
        crowd = self.crowd
        attempt = Attempt(None, [], "aborted", token=token, who=self.name, after=crowd.acknowledged, repeat=repeat)
        try:
            tx = self.db.transaction(token=token)
            async with within(tx):
                attempt.ops = await body(tx)
            attempt.outcome, attempt.commit_ts = "committed", tx.commit_ts
            with contextlib.suppress(KiviError):  # its reply was lost, and its token told only how it ended
                attempt.start_ts = tx.start_ts
            crowd.saw(attempt.commit_ts or 0)
        except Conflict as error:
            attempt.refused = error
        except (Retryable, SnapshotTooOld):
            crowd.restarted += 1
        except CommitUnknown as error:
            attempt.outcome, attempt.token = "unknown", error.token or token
            crowd.unknown += 1
        if token in crowd.twinned:  # whichever of the two came first: the other's snapshot says nothing
            attempt.start_ts = None
        crowd.oracle.attempt(attempt)
        return attempt

    # -- writing what was read ------------------------------------------------------------------

    async def read_then_put(self) -> None:
        """A lost update, if a blind commit to the same cell comes in between and is not noticed."""
        table, key, column = self.random.choice((("fork", 0, "v"), ("t", 1, "v"), ("past", 1, "v"), ("t", 1, "n")))

        async def body(tx: Any) -> list[Op]:
            row = await self.read(tx, table, (key,))
            op = Op("put", table, (key,), {column: 1 + ((row or {}).get(column) or 0)})
            await self.perform(tx, op)
            return [op]

        await self.commit(body, self.crowd.token() if self.random.random() < 0.5 else None)

    async def guarded(self) -> None:
        """The guard makes what was read as good as written (R8). Bounded, or the sums of a long run leave 64 bits."""
        source, target = self.random.sample(range(3), 2)

        async def body(tx: Any) -> list[Op]:
            row = await self.read(tx, "past", (source,))
            ops = [
                Op("guard", "past", (source,), {"n": None}),
                Op("delta", "past", (target,), {"n": ((row or {}).get("n") or 1) % 1_000}),
            ]
            for op in ops:
                await self.perform(tx, op)
            return ops

        await self.commit(body)

    async def read(self, tx: Any, table: str, key: tuple[Any, ...]) -> dict[str, Any] | None:
        row: dict[str, Any] | None = await done(tx.get(table, key))
        self.crowd.oracle.read(Read(tx.start_ts, table, key, row, who=self.name))
        return row

    # -- events ---------------------------------------------------------------------------------

    def made_event(self) -> dict[str, Any]:
        rng = self.random
        return {"a": rng.randrange(5), "b": rng.choice("xyz"), "ts": rng.randrange(MOMENTS), "x": rng.randrange(999)}

    async def event(self) -> None:
        """One, as a commit of its own."""
        crowd, event = self.crowd, self.made_event()
        token = crowd.token() if self.random.random() < 0.5 else None
        attempt = Attempt(
            None, [Op("append", "e", events=[event])], "aborted", token=token, who=self.name, after=crowd.acknowledged
        )
        try:
            attempt.commit_ts = await done(self.db.append("e", [event], token=token))
            attempt.outcome = "committed"
            crowd.saw(attempt.commit_ts or 0)
        except Retryable:
            crowd.restarted += 1
        except CommitUnknown as error:
            attempt.outcome, attempt.token = "unknown", error.token or token
            crowd.unknown += 1
        crowd.oracle.attempt(attempt)

    async def appended(self) -> None:
        """Some events of an appender. Those that share a commit come one behind the other, as they were appended."""
        if self.place >= APPENDERS:
            return await self.event()
        crowd = self.crowd
        if self.appender is None:
            self.appender = await self.open.enter_async_context(within(self.db.appender("e", linger_ms=1)))
        after, events = crowd.acknowledged, [self.made_event() for _ in range(self.random.randint(1, 8))]
        futures = [(event, self.appender.append(**event)) for event in events]
        attempts: list[Attempt] = []
        for event, future in futures:
            attempt = Attempt(None, [], "aborted", who=self.name, after=after)
            try:
                attempt.commit_ts = await future if inspect.isawaitable(future) else future.result(60)
                attempt.outcome = "committed"
                crowd.saw(attempt.commit_ts or 0)
            except (Retryable, Unavailable):
                crowd.restarted += 1
            except CommitUnknown as error:
                attempt.outcome, attempt.token = "unknown", error.token
                crowd.unknown += 1
            shared = attempts[-1] if attempts else None
            if shared is None or (shared.outcome, shared.commit_ts, shared.token) != (
                attempt.outcome,
                attempt.commit_ts,
                attempt.token,
            ):
                attempts.append(attempt)
            attempts[-1].ops.append(Op("append", "e", events=[event]))
        for attempt in attempts:
            crowd.oracle.attempt(attempt)
        return None

    async def each(self) -> None:
        """Some events that are each a transaction of their own: they enter with those of others, and have one token."""
        crowd, after = self.crowd, self.crowd.acknowledged
        if crowd.each is None:
            crowd.each = await self.open.enter_async_context(within(self.db.appender("e", linger_ms=1, each=True)))
        sent: list[tuple[dict[str, Any], Any]] = []
        with contextlib.suppress(Unavailable):  # the caller that opened it has closed it
            for _ in range(self.random.randint(1, 8)):
                event = self.made_event()
                sent.append((event, crowd.each.append(**event)))
        committed: dict[int, dict[str, Any]] = {}
        known: list[Attempt] = []
        for event, future in sent:
            attempt = Attempt(None, [Op("append", "e", events=[event])], "aborted", who=self.name, after=after)
            try:
                attempt.commit_ts = await future if inspect.isawaitable(future) else future.result(60)
                attempt.outcome = "committed"
                committed[attempt.commit_ts or 0] = event
                known.append(attempt)
                crowd.saw(attempt.commit_ts or 0)
            except (Retryable, Unavailable):
                crowd.restarted += 1
            except CommitUnknown as error:
                attempt.outcome = "unknown"
                crowd.unknown += 1
                if (error.token, error.place) != (future.token, future.place):
                    raise Mismatch(f"R19: {future} at {future.token}, {future.place} is another's: {error}") from error
            attempt.token = MemberToken(future.token, future.place)
            crowd.oracle.attempt(attempt)
        if known:  # and logged, all of them: from here on the server may go away
            attempt = self.random.choice(known)
            assert isinstance(attempt.token, MemberToken)
            found = await done(self.db.outcome(attempt.token.token, attempt.token.place))
            if found != attempt.commit_ts:
                raise Mismatch(f"R16, R19: {attempt.token!r} answers {found}, and it committed as {attempt}")
            await self.prefix(committed)

    async def prefix(self, committed: dict[int, dict[str, Any]]) -> None:
        """As of one of these commits: its event is there, with those that came before, and none that came after."""
        moment = self.random.choice([*committed])
        async with self.as_of(moment) as snap:
            rows = await rows_of(snap.changes("e", since=min(committed) - 1, commit_ts=True))
            found = {row.pop("_commit_ts"): {**row, "ts": micros(row["ts"])} for row in rows}
            seen = {cts: found.get(cts) for cts in committed}
            expected = {cts: event if cts <= moment else None for cts, event in committed.items()}
            if seen != expected:
                raise Mismatch(f"R19: {self.name} appended {expected}, and as of {moment} there is {seen}")
            self.crowd.oracle.read(Read(moment, "kept", None, await rows_of(snap.scan("kept")), who=self.name))
            if self.random.random() < 0.1:
                rows = [{**row, "ts": micros(row["ts"])} for row in await rows_of(snap.scan("e"))]
                self.crowd.oracle.read(Read(moment, "e", None, rows, who=self.name))

    # -- reading --------------------------------------------------------------------------------

    def wanted(self) -> tuple[str, tuple[Any, ...]]:
        rng = self.random
        table = rng.choice(("t", "t", "past", "fork", "by_a", "by_b", "kept", "counters"))
        return table, (rng.choice("xyz") if table == "by_b" else rng.randrange(4),)

    async def get(self) -> None:
        table, key = self.wanted()
        await self.glimpse(table, (key,), lambda: self.db.get(table, key), alone=True)

    async def get_many(self) -> None:
        table, _ = self.wanted()
        keys = tuple((key,) for key in ("xyz" if table == "by_b" else range(4)))
        await self.glimpse(table, keys, lambda: self.db.get_many(table, keys))

    async def glimpse(
        self, table: str, keys: tuple[tuple[Any, ...], ...], ask: Callable[[], Any], *, alone: bool = False
    ) -> None:
        after = self.crowd.acknowledged
        found = await done(ask())
        before = await done(self.db.watermark()) if self.random.random() < 0.3 else None
        self.crowd.oracle.glimpse(Glimpse(after, before, table, keys, [found] if alone else found, self.name))

    async def look(self) -> None:
        """Whole tables, at one snapshot that sees all that was acknowledged."""
        after = self.crowd.acknowledged
        async with within(self.db.snapshot()) as snap:
            tables = self.random.sample(("t", "past", "fork", "counters", "by_a", "by_b"), 3)
            for table in tables:
                rows = await rows_of(snap.scan(table))
                self.crowd.oracle.read(Read(snap.ts, table, None, rows, who=self.name))
            if snap.ts < after:
                raise Mismatch(f"R17: {self.name} has seen {after}, and its snapshot is {snap.ts}")

    async def past(self) -> None:
        """A commit among those that enter together, and then the table as of it, and as of just before it."""
        commit_ts = await self.blind([Op("delta", "past", (0,), {"n": 1, "f": self.random.uniform(-1, 1)})])
        for moment in () if commit_ts is None else (commit_ts, commit_ts - 1):
            async with self.as_of(moment) as snap:
                rows = await rows_of(snap.scan("past"))
                self.crowd.oracle.read(Read(moment, "past", None, rows, who=self.name))

    @contextlib.asynccontextmanager
    async def as_of(self, moment: int) -> AsyncIterator[Any]:
        """A snapshot as of what was acknowledged, which no restart takes back (R12, R17)."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                snap = await stack.enter_async_context(within(self.db.snapshot(as_of=moment)))
            except InvalidArgument as error:
                raise Mismatch(f"R12, R17: {self.name} was told of {moment}, and cannot read it: {error}") from error
            yield snap

    # -- the same again -------------------------------------------------------------------------

    async def retry(self) -> None:
        """The reply was dropped, and the commit comes again: it gets the timestamp of the first (R16)."""
        sent = self.crowd.sent
        if sent:
            chosen = sent[self.random.randrange(len(sent))]
            await self.again(chosen.token, chosen.ops, chosen.commit_ts)

    async def twin(self) -> None:
        """The same commit under the same token, while another caller waits for it: one of them commits."""
        flying = [*self.crowd.flying.items()]
        if flying:
            token, ops = self.random.choice(flying)
            self.crowd.twinned.add(token)
            await self.again(token, ops, None)

    async def again(self, token: str, ops: list[Op], commit_ts: int | None) -> None:
        try:
            attempt = await self.commit(self.writing(ops), token, repeat=True)
        except InvalidArgument as error:
            raise Mismatch(f"R16: {token!r} came again with what it had brought before, {ops}: {error}") from error
        if attempt.outcome == "unknown" or commit_ts is None:
            return
        if attempt.commit_ts != commit_ts and not (attempt.outcome == "aborted" and attempt.refused is None):
            raise Mismatch(f"R16: {token!r} had committed at {commit_ts}, and when it comes again: {attempt}")


class Bunches(Client):
    """Groups in process: some blind transactions that reach the store together (``groups``). What the store does not
    decide in the group goes alone, as a server would have it."""

    def __init__(self, db: Any, oracle: Oracle, seed: int, *, first: int = 0) -> None:
        super().__init__(db, oracle, seed, first=first)
        self.sent: deque[Sent] = deque(maxlen=REMEMBERED)
        self.grouped = 0

    def step(self) -> None:
        rng, after = self.random, self.acknowledged
        members = [
            Attempt(None, self.writes(), "aborted", who=self.name, after=after) for _ in range(rng.randint(2, 24))
        ]
        for member in members:
            member.token = next(self._tokens)
        if self.sent and rng.random() < 0.3:
            again = rng.choice(self.sent)
            members.append(Attempt(None, again.ops, "aborted", token=again.token, who=self.name, repeat=True))
        group = Together(self.db.store, members)
        group.enter()
        group.wait()
        self.grouped += len(group.answers) if len(group.answers) > 1 else 0
        for place, answer in group.answers.items():
            assert answer.error is None, answer
            self.committed(members[place], answer.start_ts, answer.commit_ts or 0)
        for place in group.left:
            self.alone(members[place])
        for place, member in enumerate(members):
            if place in group.answers and rng.random() < 0.05:
                self.reads_past(member.commit_ts or 0)
        if rng.random() < 0.3:
            with self.db.snapshot(min_snapshot=self.acknowledged) as snap:
                for table in ("t", "past", "counters"):
                    self.scan(snap, table)

    def writes(self) -> list[Op]:
        rng = self.random
        match rng.randrange(6):
            case 0:
                return [Op("delta", "counters", (1,), {"n": 1})]
            case 1:
                return [Op("put", rng.choice(("t", "past")), (rng.randrange(4),), {"v": rng.randrange(1_000)})]
            case 2:
                put = Op("put", "t", (rng.randrange(KEYS),), {"v": rng.randrange(1_000), "s": "together"})
                return [put, Op("delta", "past", (rng.randrange(4),), {"n": rng.randrange(9)})]
            case 3:
                keys = rng.sample(range(KEYS), 2)
                return [
                    Op("delta", "t", (key,), {"n": 1, "f": rng.uniform(-1, 1), "hi": rng.randrange(99)}) for key in keys
                ]
            case _:
                return [Op("delta", "past", (rng.randrange(2),), {"n": 1, "f": rng.uniform(-1, 1)})]

    def committed(self, member: Attempt, start_ts: int | None, commit_ts: int) -> None:
        member.outcome, member.start_ts, member.commit_ts = "committed", start_ts, commit_ts
        self.acknowledged = max(self.acknowledged, commit_ts)
        self.oracle.attempt(member)
        assert member.token is not None
        self.sent.append(Sent(member.token, member.ops, commit_ts))

    def alone(self, member: Attempt) -> None:
        tx = self.db.transaction(token=member.token)
        for op in member.ops:
            getattr(tx, op.kind)(op.table, op.key, **op.values)
        start_ts = tx.start_ts
        try:
            commit_ts = tx.commit()
        except Conflict as error:
            member.refused = error
            self.oracle.attempt(member)
            return
        except InvalidArgument as error:
            raise Mismatch(f"R16: {member.token!r} came with what it had brought before: {error}") from error
        if member.repeat:
            first = next((sent.commit_ts for sent in self.sent if sent.token == member.token), commit_ts)
            if commit_ts != first:
                raise Mismatch(f"R16: {member.token!r} had committed at {first}, and now at {commit_ts}")
            return
        self.committed(member, start_ts, commit_ts)

    def reads_past(self, moment: int) -> None:
        with self.db.snapshot(as_of=moment) as snap:
            self.oracle.read(Read(moment, "past", None, list(snap.scan("past")), who=self.name))
