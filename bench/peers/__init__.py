"""What kivi is compared with. Each peer runs in a process of its own, and is told what to do on its command line.

A peer that is a library (the limit, DuckDB, ClickHouse, SQLite) is a module with ``main``: it gets a ``Job`` as JSON,
makes the same events as everybody from the seed, takes batches one after the other until the time is up, reads its
aggregate back, and prints one line of JSON, an ``Outcome``. PostgreSQL is a server, and has its own module.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.data import Pool, Totals, make

__all__ = ["Job", "Outcome", "PeerFailed", "answer", "asked", "read_in_turn", "run", "said", "take_turns"]

_ROOT: Final = Path(__file__).resolve().parent.parent.parent
_MARK: Final = "outcome: "
WARM_UP: Final = 8  # batches before the clock; one after the other


@dataclass(frozen=True, slots=True)
class Job:
    """``pool`` is a name of ``data.make``; ``directory`` is empty and on the disk under test.

    ``measures``: besides sum and count, percentiles and distinct counts, in one of the ways that the peer has.
    ``read``: endpoints. Then every batch is taken once, and what is measured is reading the percentile of the last
    slots of each of them in turn.
    """

    pool: str
    batch_rows: int
    events: int
    seconds: float
    directory: str
    measures: str = ""
    read: tuple[int, ...] = ()

    def made(self) -> Pool:
        return make(self.pool, self.batch_rows, self.events)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was sent (as in ``streaming.Streamed``), what is held now, and what it was measured with."""

    sent: list[int]
    events: int
    seconds: float
    rows: int
    count: int
    total: int
    about: str
    """The peer's version and settings, for people."""

    @property
    def rate(self) -> float:
        return self.events / self.seconds

    @property
    def totals(self) -> Totals:
        return Totals(self.rows, self.count, self.total)


class PeerFailed(Exception):
    """A peer could not be run; the message is the end of what it said."""


def run(module: str, job: Job, python: str = sys.executable) -> Outcome:
    """Runs ``bench.peers.<module>`` with this Python. Raises PeerFailed."""
    return Outcome(**asked(module, asdict(job), python))


def asked(module: str, arguments: dict[str, Any], python: str) -> dict[str, Any]:
    """The same, of one that has arguments and an outcome of its own."""
    command = [python, "-m", f"bench.peers.{module}", json.dumps(arguments)]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    for line in ended.stdout.splitlines():
        if line.startswith(_MARK):
            outcome: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return outcome
    said = (ended.stderr or ended.stdout).strip().splitlines()
    raise PeerFailed(f"exit code {ended.returncode}: {''.join(said[-1:])}")  # lines before it name files of a machine


def answer(main: Callable[[Job], Outcome]) -> None:
    """Does the job of the command line and prints its outcome."""
    said(asdict(main(Job(**json.loads(sys.argv[1])))))


def said(outcome: dict[str, Any]) -> None:
    """A peer's last line."""
    print(_MARK + json.dumps(outcome), flush=True)


def take_turns(pool: Pool, once: Callable[[int], None], seconds: float) -> tuple[list[int], int, float]:
    """``once(i)`` makes batch i durable. The first three fields of an Outcome."""
    sent = [0] * len(pool)
    count = 0

    def turn() -> None:
        nonlocal count
        i = count % len(pool)
        once(i)
        sent[i] += 1
        count += 1

    for _ in range(WARM_UP):
        turn()
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        turn()
    return sent, (count - WARM_UP) * pool.batch_rows, time.perf_counter() - began


def read_in_turn(read: Callable[[int], None], job: Job) -> tuple[int, float]:
    """``read(endpoint)`` for those of the job in turn until the time is up: how many reads, and the seconds."""
    for endpoint in job.read:
        read(endpoint)
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + job.seconds:
        read(job.read[count % len(job.read)])
        count += 1
    return count, time.perf_counter() - began
