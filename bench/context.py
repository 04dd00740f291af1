"""What every goal is given: how long, how often, against whom, and where on disk."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import environment, peers, tables, verify
from bench.data import Pool, make
from bench.server import Server
from bench.sheet import Sheet

__all__ = ["PEERS", "Context"]

PEERS: Final = ("postgres", "duckdb", "clickhouse", "sqlite")
_ENVIRONMENTS: Final = {"duckdb", "clickhouse"}  # peers that need one of their own


@dataclass(frozen=True)
class Context:
    """``seconds``: of each rate. ``events``: of goal 6. ``operations``: of each case of goal 18. ``disk``: a directory
    on the disk under test."""

    quick: bool
    runs: int
    seconds: float
    peers: frozenset[str]
    disk: Path
    events: int
    operations: int
    results: Path

    @property
    def settings(self) -> dict[str, Any]:
        """Plain data, for the raw results."""
        return {
            "quick": self.quick,
            "runs": self.runs,
            "seconds": self.seconds,
            "peers": sorted(self.peers),
            "events of goal 6": self.events,
            "operations of goal 18": self.operations,
            "server": "kivi serve, default settings",
        }

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """A fresh directory on the disk under test; other users may pass through it (PostgreSQL is one)."""
        path = Path(tempfile.mkdtemp(prefix="kivi-bench-", dir=self.disk))
        path.chmod(0o755)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def server(self, *arguments: str) -> Iterator[Server]:
        """A server on an empty directory, told what ``kivi serve`` is."""
        with self.directory() as path:
            server = Server(path / "data", *arguments)
            with server:
                yield server

    def pool(self, name: str, batch_rows: int) -> Pool:
        return make(name, batch_rows, self.pool_events)

    @property
    def pool_events(self) -> int:
        return 500_000 if self.quick else 4_000_000

    def library(
        self, sheet: Sheet, peer: str, case: str, pool: Pool, measures: str = "", read: tuple[int, ...] = ()
    ) -> None:
        """Measures a peer that is a library, believes it if its totals are right, and records its rate.

        ``measures`` and ``read``: ``peers.Job``.
        One that cannot be installed or run is skipped with its reason; a wrong total is raised.
        """
        if peer in PEERS and peer not in self.peers:
            return
        with self.directory() as path:
            job = peers.Job(
                pool.name, pool.batch_rows, self.pool_events, self.seconds, str(path / "peer"), measures, read
            )
            try:
                python = environment.python() if peer in _ENVIRONMENTS else sys.executable
                outcome = peers.run(peer, job, python)
            except (environment.CannotInstall, peers.PeerFailed) as error:
                if peer not in PEERS:
                    raise
                sheet.skip(peer, str(error))
                return
        verify.same(peer, outcome.totals, pool.expected(outcome.sent).totals)
        sheet.versions[peer] = outcome.about
        sheet.record(peer, case, outcome.rate, "reads/s" if read else "events/s", events=outcome.events)

    def loaded(self, server: Server, pool: Pool) -> Any:
        """A client of the server, with the usual tables and every batch of the pool appended once."""
        db = server.connect()
        tables.create(db)
        for batch in pool.batches:
            db.append(tables.EVENTS, batch)
        tables.check(db, pool.expected([1] * len(pool)), "kivi")
        return db
