"""Snapshots that tasks begin at about the same time, begun together.

A snapshot's ``ts`` is an attribute, so entering one waits for the server's answer. Tasks that enter while a message is
on its way join the next: one request begins all their snapshots, on one timestamp, which is the newest when the server
gets to it, later than any of them asked. Each is released on its own.
"""

from __future__ import annotations

import asyncio

from kivi.aio.transport import Transport
from kivi.client.calls import answer
from kivi.client.steps import Answer, Timeout, timeout_ms
from kivi.client.transaction import TransactionCore
from kivi.errors import KiviError
from kivi.wire.v1 import session_pb2

__all__ = ["Begins"]

_Joined = list[tuple[TransactionCore, "asyncio.Future[bool]"]]


class Begins:
    """Of one client."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._joining: _Joined = []

    async def begin(self, transaction: TransactionCore) -> bool:
        """Begins a snapshot that ``is_plain``. False: the connection was lost, begin it by itself."""
        begun: asyncio.Future[bool] = self._loop.create_future()
        self._joining.append((transaction, begun))
        if len(self._joining) == 1:
            self._ask()
        try:
            return await begun
        except asyncio.CancelledError:
            if transaction.start_ts is not None:  # answered at this very moment; else ``answered`` sees to it
                transaction.release()
            raise

    def _ask(self) -> None:
        """Asks at once, without a task: it would run after those who are woken next, and they would all join."""
        core = self._transport.core
        joined: _Joined = []
        first = 0

        def join() -> int:
            """Takes those who wait. How many they are."""
            nonlocal joined, first
            joined, self._joining = self._joining, []
            numbers = [next(core.numbers) for _ in joined]  # one after the other: nobody else runs meanwhile
            first = numbers[0]
            return len(joined)

        def leaving() -> session_pb2.Request | None:
            if asked.done():  # its time was up before it could leave
                return None
            count = join()
            begin = session_pb2.Begin(min_snapshot=core.seen_ts, count=count)
            request = session_pb2.Request(txn=first, timeout_ms=timeout_ms(core.timeout_s))
            if count > 1:
                request.begin.CopyFrom(begin)
            else:
                request.first.CopyFrom(begin)
                request.apply.SetInParent()
            return request

        def answered(asked: asyncio.Future[Answer]) -> None:
            left = bool(joined)
            if not left:
                join()
            try:
                begun_at = answer(asked.result())
                assert isinstance(begun_at, session_pb2.Response)
            except (KiviError, asyncio.CancelledError) as error:
                if left and isinstance(error, Timeout):  # it may be answered yet, to nobody
                    release = session_pb2.Release(txns=range(first, first + len(joined)))
                    session.put(session_pb2.Request(release=release))
                refuse(error)
                return
            start_ts = begun_at.start_ts
            core.saw(start_ts)
            for i, (transaction, begun) in enumerate(joined):
                transaction.begun(first + i, session.epoch, start_ts)
                if begun.cancelled():
                    transaction.release()
                else:
                    begun.set_result(True)

        def refuse(error: BaseException) -> None:
            for _, begun in joined:
                if begun.done():
                    continue
                if isinstance(error, Timeout):
                    begun.set_exception(Timeout(error.message))
                else:
                    begun.set_result(False)

        try:
            session = self._transport.open()
            asked = session.ask(leaving, core.timeout_s)
        except KiviError as error:
            join()
            refuse(error)
        else:
            asked.add_done_callback(answered)
