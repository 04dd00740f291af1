"""An append stream in a process of its own, so that who measures something else meanwhile does not share its GIL.

``begun`` runs a module as such a process, this one (``started``) or another (``bench.paced``). ``python -m
bench.appending`` is told an ``Order`` as JSON on its command line. It prints a line when its events are made and it is
connected, begins when it is sent one, and prints a ``Streamed`` as JSON at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, Generic, TypeVar

import kivi
from bench import tables
from bench.data import make
from bench.machine import ROOT
from bench.streaming import Streamed, in_flight, stream

__all__ = ["READY", "Appending", "Order", "begun", "started"]

READY: Final = "ready"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """``pool`` with ``pool_events`` events; for so many ``seconds``, or so many ``batches`` after the warm-up."""

    endpoint: str
    pool: str
    batch_rows: int
    pool_events: int
    seconds: float | None = None
    batches: int | None = None


class Appending(Generic[T]):
    """The running process. What it says at its end is read meanwhile: a pipe holds less than a minute's batches."""

    def __init__(self, process: subprocess.Popen[str], result: Callable[..., T]) -> None:
        self._process, self._result = process, result
        self._said = ""
        self._reading = threading.Thread(target=self._read, name="bench-appending", daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._said = self._process.stdout.read()

    def killed(self) -> None:
        self._process.kill()
        self._reading.join()

    def running(self) -> bool:
        return self._reading.is_alive()

    def streamed(self) -> T:
        """Waits for its end; what it said then. Raises RuntimeError if it failed."""
        self._reading.join()
        if self._process.wait():
            raise RuntimeError(f"the appending process ended with exit code {self._process.returncode}")
        return self._result(**json.loads(self._said))


def started(order: Order) -> AbstractContextManager[Appending[Streamed]]:
    return begun("bench.appending", order, Streamed)


@contextmanager
def begun(module: str, order: Any, result: Callable[..., T]) -> Iterator[Appending[T]]:
    """It has begun to append when this is entered; it is ended when this is left. ``result`` is made of its JSON."""
    command = [sys.executable, "-m", module, json.dumps(asdict(order))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            if process.stdout.readline().strip() != READY:
                raise RuntimeError("the appending process did not come up")
            process.stdin.write("\n")
            process.stdin.flush()
        except BaseException:
            process.kill()
            raise
        appending = Appending(process, result)
        try:
            yield appending
        finally:
            appending.killed()


def _main(order: Order) -> None:
    batches = make(order.pool, order.batch_rows, order.pool_events).batches
    with kivi.connect(order.endpoint, timeout=120.0) as db:
        print(READY, flush=True)
        sys.stdin.readline()
        seconds = float("inf") if order.seconds is None else order.seconds
        threads = in_flight(order.batch_rows)
        done = stream(db, tables.EVENTS, batches, threads, seconds, count=order.batches)
    print(json.dumps(asdict(done)))


if __name__ == "__main__":
    _main(Order(**json.loads(sys.argv[1])))
