"""A golden history over the wire: the real server and the real client, on loopback, in the process of the test.

::

    script -> Runner -> kivi.connect() ---- loopback TCP ----> grpc.aio server -> Sessions -> Store (disk)
                 |                                             (a thread with the only event loop)   ^
                 +---------- hold, finish, consolidate, stored rows: what only tests do -------------+

Every read, write, commit and definition of a script goes through the public client. The server is what ``kivi serve``
runs (``kivi_server.process.serve.listener``) with its own store on disk. It lives in this process, and not in one of
its own, because a history takes the store by the hand: it stops commits between their CTS and their finish,
consolidates between two steps, and prints stored rows.

Expected output is the same as in process, line by line. What is different on the way, and where it is taken care of:

* *A client outlives a crash.* In process the application dies with the store. Here the server goes away (connections
  break at once, nothing is answered, nothing flushed) and comes back on the same port, and the client that waited for a
  held commit is still there: it hears nothing from the connection, and asks by the commit's token when the server is
  back. So the language asks for more here: whoever waited must be told the timestamp that the commit was held at
  (``Driver.outlives``).
* *Ends are not answered.* ``close`` and ``rollback`` are sent and not waited for, so the server may still hold a
  snapshot that the script has ended, which consolidation respects. Before a history consolidates, ``settle`` waits
  until the server holds what the script holds, and nothing else: a transaction that nobody ends hangs here.
* *A break is noticed when something is sent.* After a restart one read makes the client notice, so that the next line
  does not depend on how fast a thread sees a socket close.

One event loop serves all scripts: gRPC's poller for asyncio belongs to a process, and starting a loop costs more than
starting a server in one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
from kivi_server.auth import Tokens
from kivi_server.options import Options
from kivi_server.process.serve import listener
from kivi_server.sessions import Sessions

import kivi
from tests.golden.driver import EmbeddedDriver
from tests.waiting import wait_until

__all__ = ["GrpcDriver", "LoopThread"]

T = TypeVar("T")
_PATIENCE_S = 60.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="golden-server", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()


class GrpcDriver(EmbeddedDriver):
    """A server on the directory ``path``, and a client of it."""

    outlives = True

    def __init__(self, path: str, loop: LoopThread, **settings: Any) -> None:
        self._loop = loop
        self._endpoint = "localhost:0"
        super().__init__(path, **settings)

    def _open(self) -> None:
        self.store = self._open_store()
        self._sessions = Sessions(self.store, "golden")
        self._server = self._loop.run(self._serve())
        if not hasattr(self, "db"):
            self.db = kivi.connect(self._endpoint, timeout=_PATIENCE_S)
            return
        with self.db.snapshot() as snap:
            assert snap.ts == self.store.watermark()

    async def _serve(self) -> grpc.aio.Server:
        options = Options(data="", listen=self._endpoint)
        server, _, self._endpoint = listener(self._sessions, options, None, Tokens.load(None), self.store.stats)
        await server.start()
        return server

    def crash(self) -> None:
        """Connections first: a store that dies may still tell its callers so, and a process that dies tells nobody."""
        self._halt()
        self.store.crash()
        self._open()

    def reopen(self) -> None:
        """What the server does on SIGTERM, without the grace for streams: nobody waits for anything here."""
        self._sessions.stopping = True
        assert self._loop.run(self._sessions.drained(_PATIENCE_S))
        self._halt()
        self.store.close()
        self._open()

    def _halt(self) -> None:
        """Breaks every connection."""
        self._loop.run(self._server.stop(grace=None))
        self._sessions.close()

    def settle(self, open_: int, committing: int) -> None:
        reason = f"the script has {open_} transactions and snapshots open, the server others"
        wait_until(lambda: self._settled(open_, committing), _PATIENCE_S, reason=reason, pause_s=0.0005)

    def _settled(self, open_: int, committing: int) -> bool:
        """A transaction leaves its session before its lease ends, so both are counted; who commits has left, and keeps
        the lease until the answer. Leases that have run out may be on either side."""
        found = [txn.lease for session in list(self._sessions.live.values()) for txn in list(session.txns.values())]
        leased = sum(lease is not None and not lease.ended for lease in found)
        return len(found) == open_ and len(self.store.leases) <= leased + committing

    def close(self) -> None:
        self.db.close()
        self._halt()
        self.store.close()
