"""Nodes of a cluster in this process, each a real store on its own directory, over a stream of real servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

from kivi.embedded.database import Database
from kivi.encoding.keyspaces import Space, meta_key, space_prefix
from kivi.engine import WriteBatch
from kivi.engine.rocks import Records, RocksEngine
from kivi.errors import Unavailable
from kivi.log.replicated import ReplicatedLog
from kivi.log.stream import Stream
from kivi.mvcc.replicated import PLACE
from kivi.runtime.settings import Settings
from kivi.store.facade import Store

__all__ = ["GENERATION", "StoreNode"]

GENERATION = b"a generation    "
_BOOT = meta_key("boot")
_RETRY_S = 0.5


class StoreNode:
    """``seed``: the directory of a closed store, which a node that has none begins with a copy of.

    ``genesis``: the last commit timestamp of the seed.
    """

    def __init__(self, path: Path, id_: int, stream: Stream, *, seed: Path, genesis: int, settings: Settings) -> None:
        self.id, self.stream = id_, stream
        if not path.exists():
            shutil.copytree(seed, path)
            shutil.rmtree(path / "log")
        engine = RocksEngine(
            os.path.join(path, "engine"), records=Records(meta_key("records"), space_prefix(Space.ROW))
        )
        boot = int.from_bytes(engine.get(_BOOT) or b"", "little") + 1
        batch = WriteBatch()
        batch.put(_BOOT, boot.to_bytes(8, "little"))
        engine.write(batch)
        engine.flush()
        self.log = ReplicatedLog(
            stream, generation=GENERATION, node=id_, boot=boot, saved=engine.get(PLACE), genesis=genesis
        )
        self.store = Store.open(str(path), settings=settings, engine=engine, log=self.log)
        self.db = Database(self.store)
        self._news, self._ending = threading.Event(), False
        stream.on_news = self._news.set
        self._thread = threading.Thread(target=self._run, name=f"node {id_}")
        self._thread.start()

    def _run(self) -> None:
        """Reads what is new; what does not come back is published again."""
        retried = time.monotonic()
        while not self._ending:
            self._news.wait(0.02)
            self._news.clear()
            with contextlib.suppress(Unavailable):
                while self.log.pump():
                    pass
            if time.monotonic() - retried > _RETRY_S:
                retried = time.monotonic()
                with contextlib.suppress(Unavailable):
                    self.log.outbox.retry()

    def close(self) -> None:
        self._end()
        self.store.close()

    def crash(self) -> None:
        """As if its process had been killed."""
        self._end()
        self.store.crash()

    def _end(self) -> None:
        self._ending = True
        self._news.set()
        self._thread.join()
