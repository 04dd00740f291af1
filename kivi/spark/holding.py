"""A job's shared snapshot, as one of its tasks holds it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kivi.errors import KiviError, SnapshotTooOld

if TYPE_CHECKING:
    from kivi.client.database import Snapshot
    from kivi.spark.options import Options

__all__ = ["held"]


@contextmanager
def held(
    options: Options, lease: bytes | None, ts: int, nodes: Sequence[str] = (), heard: int = 0
) -> Iterator[Snapshot]:
    """The snapshot ``lease`` names, or, if it has ended or there is none, what can be read as of ``ts``; at one of
    these nodes, if one is reached. It has heard of all commits up to ``heard``.

    Renewed by a thread of its own, since Spark may take its time between two batches, and at the end, for the task that
    comes next.
    """
    db, ttl_s = options.client_at(nodes), options.lease_ttl_s
    ended = False
    # Of a cluster's nodes this one may not be there yet.
    heard = max(heard, ts)
    named = db.snapshot(lease=lease, min_snapshot=heard, ttl_s=ttl_s) if lease else None
    snapshot = named or db.snapshot(as_of=ts, min_snapshot=heard, ttl_s=ttl_s)
    try:
        snapshot.__enter__()
        snapshot.renew(ttl_s)
    except SnapshotTooOld:
        ended = True
        snapshot = db.snapshot(as_of=ts, min_snapshot=heard, ttl_s=ttl_s)
        snapshot.__enter__()
    done = threading.Event()

    def renew() -> None:
        while not done.wait(ttl_s / 3):
            try:
                snapshot.renew(ttl_s)
            except KiviError:
                return  # the read itself will say what is wrong

    threading.Thread(target=renew, name="kivi-renew", daemon=True).start()
    try:
        yield snapshot
        with suppress(KiviError):
            snapshot.renew(ttl_s)
    except SnapshotTooOld as error:
        if not ended:
            raise
        raise SnapshotTooOld(
            f"no task read table {options.table!r} for {ttl_s:.0f} s, after which the job's snapshot ended "
            f"({error.message}): run the job again, with a longer option leaseTtl",
            **error.details,
        ) from None
    finally:
        done.set()
        snapshot.close()  # lets go of it here; a shared one ends for all only when its maker does so
