"""Views that are kept up by the store's subscriptions, and shared by all browsers that look at the same.

::

    kivi --subscriptions--> Source, one for each part --> View: the newest snapshot that all its parts know
                            (shared by views)                   --> a state --> each browser: what it lacks

**Invariants.**

* A state is of one snapshot, which it names. A subscription tells what its query gave at some snapshots, and by its
  heartbeats for how long that stayed so: a *span*. ``together`` finds the newest snapshot that lies in a span of every
  part; there the rows of all parts belong together, however fast each changes. Nothing else is shown.
* A browser costs a reference to the state it has. It is given the difference to the newest one when it has taken what
  was sent before: one that is slow passes states over, and nothing queues for it.
* Nobody looks: no subscription. ``Views.looking`` counts.
"""

from __future__ import annotations

import asyncio
import json
import operator
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import kivi
import kivi.aio
from apm_demo.tables import micros
from apm_demo.views import Composer, Part, Plan, Question, State, differences, parts, plan, planned

__all__ = ["Found", "Source", "Span", "View", "Views", "said", "together"]

HEARTBEAT_MS: Final = 100.0
_LOOK_S: Final = 0.05  # how often a source that is not told of changes looks how far it has been heard
_SPANS_S: Final = 4.0  # a source remembers spans that were heard so lately; their lists share their rows
_STATE_S: Final = 0.1  # least time between two states
_AGAIN_S: Final = 0.5
_FRESH_S: Final = 1.0  # a browser hears something at least so often
_SILENT_S: Final = 2.5  # then something is wrong


def said(error: kivi.KiviError | None) -> str:
    """A failure in words for the person at the page; None: nothing is heard."""
    if error is None:
        return "kivi does not answer: nothing is heard of it"
    text = error.message or type(error).__name__
    return f"kivi does not answer: {text}" if isinstance(error, kivi.errors.Unavailable) else text


@dataclass(slots=True)
class Span:
    """A query gave ``rows`` at every snapshot from ``ts`` to ``upto``, which was heard at ``at`` (monotonic)."""

    ts: int
    upto: int
    at: float
    rows: list[dict[str, Any]]


class Found(NamedTuple):
    ts: int
    at: float
    rows: list[list[dict[str, Any]]]


def together(histories: Iterable[Iterable[Span]]) -> Found | None:
    """The newest snapshot that lies in a span of each; None if there is none. Spans are given oldest first.

    Goes back in time from one part's gap to the next until none objects: at most a step for each span.
    """
    spans = [list(history) for history in histories]
    if not all(spans):
        return None
    ts = min(history[-1].upto for history in spans)
    while True:
        known = ts
        for history in spans:
            while history and history[-1].ts > known:
                history.pop()  # it begins after what all can know
            if not history:
                return None
            known = min(known, history[-1].upto)
        if known == ts:
            return Found(ts, min(history[-1].at for history in spans), [history[-1].rows for history in spans])
        ts = known


class Source:
    """One part, subscribed to: what it gave lately. It goes on through every failure, and says the last one."""

    def __init__(self, db: kivi.aio.Database, part: Part) -> None:
        self._db = db
        self._part = part
        self._listeners: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self.spans: deque[Span] = deque()
        self.problem = ""

    def listen(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)
        if self._task is None:
            self._task = asyncio.create_task(self._follow())

    def ignore(self, listener: Callable[[], None]) -> bool:
        """Whether somebody listens still; if not it ends."""
        self._listeners.remove(listener)
        if not self._listeners and self._task is not None:
            self._task.cancel()
        return bool(self._listeners)

    async def _follow(self) -> None:
        while True:
            try:
                async with self._part.subscribe(self._db, HEARTBEAT_MS) as live:
                    self.spans.clear()  # what another subscription told may be of another store
                    await self._hear(live)
            except kivi.KiviError as error:
                self.problem = said(error)
            self._tell()
            await asyncio.sleep(_AGAIN_S)

    async def _hear(self, live: Any) -> None:
        while not live.ended:
            update = await live.next(timeout_s=_LOOK_S)
            at = time.monotonic() - live.silent_s
            if update is not None:
                if self.spans and update.ts <= self.spans[-1].ts:
                    self.spans.clear()
                while len(self.spans) > 1 and self.spans[1].at < at - _SPANS_S:
                    self.spans.popleft()
                self.spans.append(Span(update.ts, update.ts, at, live.rows))
            elif not self.spans or at <= self.spans[-1].at:
                continue
            else:
                self.spans[-1].upto, self.spans[-1].at = live.ts, at
            self.problem = ""
            self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()


@dataclass(slots=True)
class View:
    """The newest state of a question's answer; ``state`` is replaced, never changed."""

    question: Question
    state: State | None = None
    ts: int = 0
    at: float = field(default_factory=time.monotonic)  # when the state was last known to be the newest
    heard_at: float = field(default_factory=time.monotonic)  # since when some part says nothing
    problem: str = ""
    browsers: int = 0
    states: int = 0
    _newer: asyncio.Event = field(default_factory=asyncio.Event)
    _change: tuple[State, State, str] | None = None

    def put(self, state: State, found: Found) -> None:
        """``state`` may be the one it has, which is of a later snapshot too then."""
        self.ts, self.at = found.ts, found.at
        if state is not self.state:
            self.state = state
            self.states += 1
            self.wake()

    def trouble(self, problem: str) -> None:
        """Why it is not kept up; "" if it is."""
        if problem != self.problem:
            self.problem = problem
            self.wake()

    def wake(self) -> None:
        self._newer.set()
        self._newer = asyncio.Event()

    async def messages(self) -> AsyncIterator[str]:
        """Server-sent events for one browser: a state, then changes, and how fresh they are at least every second."""
        told: State | None = None
        while True:
            newer, state = self._newer, self.state
            if state is None or state is told:
                yield self._event("fresh", "{}")
            else:
                kind, text = ("state", json.dumps(state)) if told is None else ("change", self._difference(told, state))
                told = state
                yield self._event(kind, text)
            if self.state is told:
                with suppress(TimeoutError):
                    await asyncio.wait_for(newer.wait(), _FRESH_S)

    def _difference(self, told: State, state: State) -> str:
        """Made once for all browsers that are in step."""
        if self._change is None or self._change[0] is not told or self._change[1] is not state:
            self._change = (told, state, json.dumps(differences(told, state)))
        return self._change[2]

    def _event(self, kind: str, data: str) -> str:
        now = time.monotonic()
        problem = self.problem or (said(None) if now - self.heard_at > _SILENT_S else "")
        about = {"ts": self.ts, "age_ms": round((now - self.at) * 1_000), "problem": problem}
        return f"event: {kind}\ndata: {json.dumps(about)}\ndata: {data}\n\n"


class Views:
    """What is looked at now, and the subscriptions for it. For one event loop; nothing here waits to let go."""

    def __init__(self, db: kivi.aio.Database) -> None:
        self._db = db
        self._views: dict[Question, tuple[View, asyncio.Task[None]]] = {}
        self._sources: dict[Part, Source] = {}

    def counts(self) -> dict[str, int]:
        return {
            "browsers": sum(view.browsers for view, _ in self._views.values()),
            "views": len(self._views),
            "subscriptions": len(self._sources),
        }

    @contextmanager
    def looking(self, question: Question) -> Iterator[View]:
        """The view of a question while a browser looks at it."""
        if question not in self._views:
            made = View(question)
            self._views[question] = made, asyncio.create_task(self._keep_up(made))
        view, task = self._views[question]
        view.browsers += 1
        try:
            yield view
        finally:
            view.browsers -= 1
            if not view.browsers:
                del self._views[question]
                task.cancel()

    async def _keep_up(self, view: View) -> None:
        heard = asyncio.Event()
        held: dict[Part, Source] = {}
        try:
            while True:
                try:
                    async with self._db.snapshot() as snapshot:
                        wanted = await plan(snapshot, view.question)
                except kivi.KiviError as error:
                    view.trouble(said(error))
                    await asyncio.sleep(_AGAIN_S)
                    continue
                followed = parts(view.question, wanted)
                before, held = held, self._hold(followed.values(), heard.set)
                self._release(before, heard.set)
                heard.set()  # sources that others have may know all already
                await self._follow(view, wanted, {name: held[part] for name, part in followed.items()}, heard)
        finally:
            self._release(held, heard.set)

    async def _follow(self, view: View, wanted: Plan, sources: dict[str, Source], heard: asyncio.Event) -> None:
        """States, until time or new endpoints have outgrown the plan."""
        composer = Composer(view.question)
        shown: list[list[dict[str, Any]]] = []
        while True:
            await heard.wait()
            heard.clear()
            view.trouble(next((source.problem for source in sources.values() if source.problem), ""))
            if all(source.spans for source in sources.values()):
                view.heard_at = min(source.spans[-1].at for source in sources.values())
            found = together(source.spans for source in sources.values())
            if found is None or view.problem:
                continue
            if view.state is not None and len(shown) and all(map(operator.is_, shown, found.rows)):
                view.put(view.state, found)
                continue
            rows = dict(zip(sources, found.rows, strict=True))
            newest = micros(rows["newest"][0]["slot"]) if rows["newest"] else None
            if planned(view.question, rows["names"], newest) != wanted:
                return
            shown = found.rows
            view.put(composer(rows), found)
            await asyncio.sleep(_STATE_S)

    def _hold(self, wanted: Iterable[Part], listener: Callable[[], None]) -> dict[Part, Source]:
        held = {}
        for part in wanted:
            held[part] = self._sources.setdefault(part, Source(self._db, part))
            held[part].listen(listener)
        return held

    def _release(self, held: dict[Part, Source], listener: Callable[[], None]) -> None:
        for part, source in held.items():
            if not source.ignore(listener):
                del self._sources[part]
