"""Writers whose server is killed again and again, and who write each thing until they are told that it is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kivi
from tests.serverproc import ServerProcess

__all__ = ["written_under_kills"]


def written_under_kills(
    server: ServerProcess,
    write: Callable[[Any, int], object],
    *,
    kills: int,
    pause_s: float,
    writers: int = 1,
    at_least: int = 1,
) -> int:
    """How many numbers were written, from 0 on: ``write(db, number)`` is called again until it returns.

    The server is killed and started so many times, each after a pause, and then the ``writers``, who take turns with
    the numbers, are stopped once each has written ``at_least`` so many.
    """
    done = threading.Event()

    def run(writer: int) -> int:
        written = 0
        while not done.is_set() or written < at_least:
            try:
                with server.connect(timeout=5) as db:
                    while not done.is_set() or written < at_least:
                        write(db, writer + written * writers)
                        written += 1
            except (kivi.Unavailable, kivi.CommitUnknown):
                time.sleep(0.05)
        return written

    with ThreadPoolExecutor(writers) as pool:
        running = [pool.submit(run, writer) for writer in range(writers)]
        try:
            for _ in range(kills):
                time.sleep(pause_s)
                server.restart()
        finally:
            done.set()
        return sum(each.result() for each in running)
