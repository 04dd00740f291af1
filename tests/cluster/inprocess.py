"""Nodes of a cluster in this process, over a real nats-server, each behind a gRPC server of its own.

They are real ones, but for what a test decides: that nothing of the log comes to a node any more, and whom it takes for
the newest. So what a node answers, and by which timestamp, is decided, and not left to chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kivi_server.auth import Tokens
from kivi_server.options import Options
from kivi_server.process.serve import listener
from kivi_server.sessions import Sessions

import kivi
from kivi.cluster import ClusterNode
from tests.log.natscluster import NatsCluster
from tests.waiting import PATIENCE_S, wait_until

__all__ = ["BOUND_S", "Loop", "Served"]

BOUND_S = 0.1


class Loop:
    """The one event loop of the servers, and of clients for asyncio."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers")
        self._thread.start()

    def run(self, does: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(does, self._loop).result(120)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Served:
    """``shards``: which it holds; all that its directory has."""

    def __init__(
        self, path: Path, nats: NatsCluster, loop: Loop, shards: str | None = None, listen: str = "localhost:0"
    ) -> None:
        about = {"address": "", "version": "test"}
        self.node = ClusterNode(str(path), "apm", nats.urls, about=about, log_bytes=16 << 20, shards=shards)
        self._loop = loop
        self._sessions = Sessions(self.node.store, "test")
        self.endpoint: str = loop.run(self._start(Options(data=str(path), listen=listen)))
        about["address"] = self.endpoint
        self.node._say()

    async def _start(self, options: Options) -> str:
        self._server, _, endpoint = listener(self._sessions, options, None, Tokens(), dict)
        await self._server.start()
        return endpoint

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.run(self._server.stop(0))
        self._sessions.close()
        self.node.close()

    def connect(self, **arguments: Any) -> Any:
        """As ``ServerProcess.connect``."""
        return kivi.connect(self.endpoint, **{"timeout": PATIENCE_S, **arguments})

    @property
    def knows(self) -> set[str]:
        """At which addresses it knows nodes to be."""
        return {one.about.get("address", "") for one in self.node.log.members}

    @property
    def leases(self) -> int:
        """How many snapshots are open here."""
        return int(self.node.store.stats()["leases"])

    @contextlib.contextmanager
    def behind(self, names: Served | None = None) -> Iterator[None]:
        """Nothing of the log comes here meanwhile, and has not for ``BOUND_S``; it takes that node for the newest."""
        log, is_still = self.node.log, threading.Event()

        def nothing() -> bool:
            is_still.set()
            return False

        with patch.object(log, "pump", nothing), patch.object(log, "fresher", lambda: names and names.endpoint):
            self.node._news.set()
            assert is_still.wait(PATIENCE_S)  # what the log's thread had begun to read before that it has applied
            wait_until(lambda: log.proven_s > BOUND_S)
            yield
        self.node._news.set()

    @contextlib.contextmanager
    def proven(self) -> Iterator[None]:
        """What it has applied is all that was acknowledged: else it has ``BOUND_S`` to hear so from the log's server,
        and a busy machine may take longer for that."""
        with patch.object(self.node.log, "proven_at", math.inf):
            yield
