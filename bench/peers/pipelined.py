"""PostgreSQL through psycopg's pipeline mode: one event a transaction, many of them on their way at a time.

A client is a thread with a connection of its own. It sends ``depth`` INSERTs, each with a sync behind it, and each of
these is a commit, without waiting for one of them; then it takes all the answers, and begins again. So up to clients x
depth events are outstanding. The statement is prepared once for each connection.

The module runs in the environment of the peers, in a process of its own, and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from bench.data import make
from bench.together import in_threads

__all__ = ["Order", "Taken"]

_INSERT: Final = "INSERT INTO events VALUES (%s, %s, %s)"
_EVENTS: Final = 100_000  # made before the clock starts, and sent in turn


@dataclass(frozen=True, slots=True)
class Order:
    """``socket``: the directory that the server's socket is in."""

    socket: str
    kind: str
    clients: int
    depth: int
    warm_up_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Taken:
    """``committed`` in all, the warm-up too; the others are of the time that counts."""

    committed: int
    events: int
    seconds: float
    about: str


def main(order: Order) -> Taken:
    import psycopg
    from psycopg.types.numeric import Int8

    pool = make(order.kind, order.depth, _EVENTS)
    columns = [column.tolist() for column in (pool.endpoint, pool.ts_us, pool.resp_us)]
    events = [tuple(map(Int8, values)) for values in zip(*columns, strict=True)]
    parts = [events[at : at + order.depth] for at in range(0, len(events), order.depth)]

    def job(connection: Any, first: int) -> Callable[[], None]:
        turn = first

        def once() -> None:
            nonlocal turn
            turn += 1
            with connection.pipeline() as pipeline, connection.cursor() as cursor:
                for event in parts[turn % len(parts)]:
                    cursor.execute(_INSERT, event, prepare=True)
                    pipeline.sync()

        return once

    with ExitStack() as opened:
        jobs = []
        for client in range(order.clients):
            connection = psycopg.connect(host=order.socket, user="bench", dbname="postgres", autocommit=True)
            jobs.append(job(opened.enter_context(connection), client * len(parts) // order.clients))
        before, _ = in_threads(jobs, order.warm_up_s)
        done, seconds = in_threads(jobs, order.seconds)
    about = f"psycopg {psycopg.__version__}, {psycopg.pq.__impl__}, libpq {psycopg.pq.version()}"
    return Taken((before + done) * order.depth, done * order.depth, seconds, about)


if __name__ == "__main__":
    print(json.dumps(asdict(main(Order(**json.loads(sys.argv[1]))))))
