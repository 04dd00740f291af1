"""The client for asyncio: ``await kivi.aio.connect(...)``; the same methods as ``kivi.connect``, awaited.

Made of tasks, not threads: one task sends and one receives on the session's stream. While a frame is
on its way to gRPC, what other tasks ask gathers, and leaves as the next frame. What the calls *do* is
in ``kivi.client.core``, shared with the client for threads; what they take and mean is in ``kivi.api.interface``.

Differences that asyncio makes: ``transaction``, ``snapshot`` and ``appender`` are ``async with``,
``scan`` and ``scan_batches`` are ``async for``, and ``start_ts`` is a property only once an answer has told it
(``await tx.started()`` asks).

A task that is cancelled stops waiting, and that is all: a commit that was sent completes or not
without it, like one whose reply is lost. To find out, commit under a token of your own
(``transaction(token=...)``) and ask ``outcome(token)``.

Comes in: the public arguments, awaited. Goes out: requests on one session stream, and answers. May not touch: the store
and the server. Begin reading at ``database``, then ``transport``.
"""

from __future__ import annotations

from kivi.aio.appender import Appender
from kivi.aio.database import Database, Snapshot, Transaction, connect
from kivi.wire.methods import Tls

__all__ = ["Appender", "Database", "Snapshot", "Tls", "Transaction", "connect"]
