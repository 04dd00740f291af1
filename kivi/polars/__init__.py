"""Polars: a table at a snapshot as a lazy frame, which reads what its query needs.

::

    import kivi.polars

    with db.snapshot() as snap:
        kivi.polars.scan(snap, "invocations").filter(pl.col("resp_time_us") > 1_000_000).select("endpoint_id").collect()

Comes in: a snapshot of a store in this process or of a connected one; of one for asyncio the call is awaited. Goes out:
a ``polars.LazyFrame``. May not touch: the store. Needs the extra ``kivi[polars]``.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from kivi.errors import InvalidArgument

__all__ = ["scan"]


class Snapshot(Protocol):
    """Any of kivi's."""

    def dataset(self, table: str, *, commits: bool = False) -> Any: ...


def scan(snapshot: Snapshot, table: str, *, commits: bool = False) -> Any:
    """The table as a ``polars.LazyFrame``, to be collected while the snapshot is open.

    The columns that a query needs, and those of its filters that compare columns with values, are pushed into the scan
    of the table (``kivi.api.dataset``). ``commits``: of events also ``_commit_ts`` and ``_commit_time``. Of a snapshot
    of ``kivi.aio`` the call is awaited, and the frame collected in another thread (``asyncio.to_thread``). Raises
    NotFound, and InvalidArgument if Polars is not installed.
    """
    try:
        import polars
    except ImportError:
        raise InvalidArgument("polars is not installed: pip install 'kivi[polars]'") from None
    dataset = snapshot.dataset(table, commits=commits)
    if not isinstance(dataset, Awaitable):
        return polars.scan_pyarrow_dataset(dataset)

    async def scanned(dataset: Awaitable[Any]) -> Any:
        return polars.scan_pyarrow_dataset(await dataset)

    return scanned(dataset)
