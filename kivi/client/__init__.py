"""The client for threads: ``kivi.connect(...)``, and the core that it shares with ``kivi.aio``.

    database        the public interface over a server
    core            one client's state and its calls, as steps; shared with asyncio
    transaction     one transaction or snapshot, as steps; shared with asyncio
    steps           what a step is: a call that says what it needs, and is told
    messages        messages of kivi.v1 made of what a caller wrote, and read
    pages           the pages of a scan, decoded
    writes          writes of rows as the bytes of their messages
    calls           the service's calls over a channel, sessions and gRPC's failures
    transport       the channel and its session stream, for threads
    subscriptions   the stream of all subscriptions of a client; ``lines`` and ``live`` are its threads and faces

Comes in: the public arguments. Goes out: frames, and answers in the caller's form. May not touch: the engine, the log
or any room of the store. Begin reading at ``steps``.
"""

from __future__ import annotations

from kivi.client.database import Appender, Database, Snapshot, Tls, Transaction, connect

__all__ = ["Appender", "Database", "Snapshot", "Tls", "Transaction", "connect"]
