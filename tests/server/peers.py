"""Sessions without a stream: what a server does with frames, and by which of its threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kivi_server import scheduler
from kivi_server.asked import parsed
from kivi_server.auth import Allowance, Grant
from kivi_server.session import Session
from kivi_server.sessions import Sessions

import kivi
from kivi.api.tokens import new_token
from kivi.log.segmented import SegmentedLog
from kivi.store.facade import Store
from kivi.wire.frames import Packet
from kivi.wire.v1 import session_pb2
from tests.server.rawsession import Sent, each_alone, frame
from tests.waiting import PATIENCE_S, until

__all__ = ["Peer", "hits", "log_of", "quick", "run", "slow"]

DELTA = session_pb2.Operation.KIND_DELTA


class Peer:
    """A session without a stream: frames in, and what is answered, by which thread."""

    def __init__(self, sessions: Sessions, grant: Grant | None = None) -> None:
        grant = grant or Grant()
        self.session = Session(sessions, grant, sessions.clients.of(grant, "peer"), asyncio.get_running_loop())
        self.answers: list[session_pb2.Response] = []
        self.replies: list[session_pb2.Response] = []  # the answers, those to many as one to each
        self.pages: dict[int, bytes] = {}
        self.counted = 0  # answers, as the session counts them
        self.threads: set[int] = set()
        self._ids = 0
        self.session._send = self._send  # type: ignore[method-assign]

    def _send(self, data: Packet, answers: int) -> None:
        self.threads.add(threading.get_ident())
        self.counted += answers
        responses = session_pb2.ServerFrame.FromString(data.header).responses
        self.pages |= {response.id: bytes(body) for response, body in zip(responses, data.bodies, strict=False)}
        self.answers += responses
        # Last, as this may be a thread of the pool, and the event loop waits for so many of them.
        self.replies += [reply for answer in responses for reply in each_alone(answer)]

    def forget(self) -> None:
        """What was answered until now."""
        self.answers.clear()
        self.replies.clear()

    def has(self, answers: int) -> bool:
        return len(self.replies) == answers

    def commit(self, hits: int = 1, token: str | None = None, row: int = 1) -> session_pb2.Request:
        self._ids += 1
        request = session_pb2.Request(id=self._ids)
        operation = request.operations.add(kind=DELTA, table="counters", columns=["hits"])
        operation.key.add(int_value=row)
        operation.values.add(int_value=hits)
        request.commit.token = token or new_token()
        return request

    def commit_each(self, *commits: session_pb2.Request, same: bool = False) -> session_pb2.Request:
        """These in columns; ``same``: all do what the first does, which is said once."""
        request = session_pb2.Request()
        each = request.commit_each
        for place, commit in enumerate(commits):
            each.ids.append(commit.id)
            each.tokens.append(commit.commit.token)
            if not same or not place:
                each.writes.append(session_pb2.Writes(operations=commit.operations).SerializeToString())
            if not same:
                each.does.append(place)
        return request

    def outcomes(self) -> dict[int, int | str]:
        """Of each request that was answered its commit timestamp, or why it has none."""
        return {reply.id: reply.error.message or reply.commit.commit_ts for reply in self.replies}

    def read(self) -> session_pb2.Request:
        self._ids += 1
        request = session_pb2.Request(id=self._ids, txn=self._ids)
        request.first.SetInParent()
        request.get.table = "counters"
        request.get.keys.add().values.add(int_value=1)
        return request

    def hand_in(self, *requests: Sent) -> None:
        """A frame of these has come: they are done in the event loop's next turn, with those of others."""
        self.session._take(parsed(frame(*requests)))

    async def ask(self, *requests: Sent) -> None:
        """A frame of these has come, and each has been begun."""
        await self.session._receive(frame(*requests))
        while self.session._scheduled:  # noqa: ASYNC110
            await asyncio.sleep(0)


def hits(store: Store, row: int = 1) -> int | None:
    lease = store.begin()
    try:
        (found,) = store.get(lease, store.table("counters"), [(row,)], None)
        return None if found is None else found["hits"]
    finally:
        store.release(lease)


@contextlib.asynccontextmanager
async def served(path: Path, allowance: Allowance | None = None) -> AsyncIterator[Sessions]:
    """Sessions of a store with a table of counters, whose log is idle and has been quick.

    No turn of their event loop ends, or is thought slow, because a machine is busy: what comes together is done so.
    Nothing is folded or settled meanwhile, which has snapshots and syncs of its own.
    """
    patient = patch.multiple(scheduler, _TURN_S=PATIENCE_S, _QUICK_S_MAX=PATIENCE_S, _STUCK_S_MAX=PATIENCE_S)
    with patient, contextlib.closing(kivi.open(str(path / "data"), background=False)) as db:
        db.create_table("counters", key={"id": "int64"}, columns={"hits": kivi.sum("int64")})
        with db.transaction() as tx:
            tx.delta("counters", (0,), hits=1)
        sessions = Sessions(db.store, "test", allowance)
        await quick(db.store)
        yield sessions
        sessions.close()


def log_of(store: Store) -> SegmentedLog:
    assert isinstance(store.log, SegmentedLog)
    return store.log


def slow(store: Store) -> None:
    """Commits are for the log's threads."""
    log_of(store)._sync_s = 1.0


async def quick(store: Store) -> None:
    """Whatever this disk took until now."""
    log_of(store)._sync_s = 0.0
    await until(store.log.is_quick)


def run(story: Callable[[Sessions], Coroutine[Any, Any, None]], path: Path, allowance: Allowance | None = None) -> None:
    async def told() -> None:
        async with served(path, allowance) as sessions:
            await story(sessions)

    asyncio.run(told())
