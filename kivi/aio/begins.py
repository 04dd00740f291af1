"""Snapshots that tasks begin at about the same time, begun together.

A snapshot's ``ts`` is an attribute, so entering one waits for the server's answer. Tasks that enter while a message is
on its way join the next: one request begins all their snapshots, on one timestamp, which is the newest when the server
gets to it, later than any of them asked. Each is released on its own.
"""

from __future__ import annotations

import asyncio

from kivi.aio.transport import Transport
from kivi.client_steps import Timeout, timeout_ms
from kivi.client_transaction import TransactionCore
from kivi.errors import KiviError
from kivi.wire.v1 import session_pb2

__all__ = ["Begins"]

_Joined = list[tuple[TransactionCore, "asyncio.Future[bool]"]]


class Begins:
    """Of one client."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._joining: _Joined = []
        self._asking: set[asyncio.Task[None]] = set()

    async def begin(self, transaction: TransactionCore) -> bool:
        """Begins a snapshot that ``is_plain``. False: the connection was lost, begin it by itself."""
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[bool] = loop.create_future()
        self._joining.append((transaction, begun))
        if len(self._joining) == 1:
            task = loop.create_task(self._ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        return await begun

    async def _ask(self) -> None:
        core = self._transport.core
        joined: _Joined = []
        numbers: list[int] = []

        def leaving() -> session_pb2.Request:
            nonlocal joined
            joined, self._joining = self._joining, []
            numbers.extend(next(core.numbers) for _ in joined)  # one after the other: nobody else runs meanwhile
            begin = session_pb2.Begin(min_snapshot=core.seen_ts, count=len(joined))
            request = session_pb2.Request(txn=numbers[0], timeout_ms=timeout_ms(core.timeout_s))
            if len(joined) > 1:
                request.begin.CopyFrom(begin)
            else:
                request.first.CopyFrom(begin)
                request.apply.SetInParent()
            return request

        failure: KiviError | None = None
        try:
            session = self._transport.open()
            reply = await session.ask(leaving, core.timeout_s)
        except KiviError as error:
            failure = error
        if not joined:  # it never left
            joined, self._joining = self._joining, []
        if failure is None:
            core.saw(reply.start_ts)
        for i, (transaction, begun) in enumerate(joined):
            if failure is None:
                transaction.begun(numbers[i], session.epoch, reply.start_ts)
            if begun.cancelled():
                transaction.release()
            elif isinstance(failure, Timeout):
                begun.set_exception(Timeout(failure.message))
            else:
                begun.set_result(failure is None)
