"""Equal questions at one snapshot are computed once, and whoever has the answer already is told so (304).

A question about tables is answered alike at all snapshots between two changes of these (``Store.last_change``). So an
answer is kept under the question and that change; who asks while it is being computed waits for it, and who asks later
gets it as it is, until a table changes or newer answers need the room. Its ETag is the change, what the token is for,
the form and this process, which makes tags of a store that was restored from a backup others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from kivi_server.auth import Grant
from kivi_server.sessions import Sessions

from kivi.model.rollups import stored_slot
from kivi.store.facade import Store

__all__ = ["Answer", "Shared"]

_BYTES_MAX: Final = 32 << 20
_ANSWER_BYTES_MAX: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """``ts``: the snapshot that it was read at. ``more``: rows follow beyond the limit; None where that means nothing.
    ``explanation``: how it was computed."""

    body: bytes
    media: str
    ts: int
    more: bool | None = None
    explanation: str = ""


class Shared:
    """Of one server; its event loop's."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._store: Store = sessions.store
        self._instance = sessions.instance[:8]
        self._running: dict[Hashable, asyncio.Task[Answer]] = {}
        self._kept: OrderedDict[Hashable, Answer] = OrderedDict()
        self._bytes = 0

    def changed(self, tables: Iterable[str]) -> tuple[int, int]:
        """The watermark, and the newest change of the tables up to it. Raises NotFound."""
        upto = self._store.watermark()
        schemas = [self._store.table(name) for name in tables]
        return upto, max(self._store.last_change(schema, upto) for schema in schemas)

    def ends(self, table: str, upto: int) -> int | None:
        """Where the ``last`` time of an aggregate may end at a snapshot, which another table's commit may move on."""
        schema = self._store.table(table)
        return self._store.reads.rollups.ends_before(upto, schema) if stored_slot(schema) is not None else None

    def tag(self, changed: int, grant: Grant, form: str = "") -> str:
        return f'"{self._instance}-{changed}-{grant.view}-{form}"'

    async def answer(self, question: Hashable, changed: int, compute: Callable[[], Awaitable[Answer]]) -> Answer:
        """``changed`` is of the tables that the question is about: that a name means another table is a change of that.
        What ``compute`` raises is raised to all that wait for it."""
        key = question, changed
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self._sessions.http_shared += 1
            return kept
        if key in self._running:
            self._sessions.http_shared += 1
        else:
            self._sessions.http_computed += 1
        return await self.once(key, compute, keeps=True)

    async def once(self, key: Hashable, compute: Callable[[], Awaitable[Answer]], *, keeps: bool = False) -> Answer:
        """Whoever asks while it is computed gets the same; whoever asks later another, unless it is kept."""
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.ensure_future(compute())
            running.add_done_callback(lambda task: self._done(key, task, keeps))
        return await asyncio.shield(running)

    def _done(self, key: Hashable, task: asyncio.Task[Answer], keeps: bool) -> None:
        del self._running[key]
        if not keeps or task.cancelled() or task.exception() or len(task.result().body) > _ANSWER_BYTES_MAX:
            return
        self._kept[key] = task.result()
        self._bytes += len(task.result().body)
        while self._bytes > _BYTES_MAX:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest.body)
