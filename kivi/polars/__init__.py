"""Polars: a table at a snapshot as a lazy frame, which reads what its query needs.

::

    import kivi.polars

    with db.snapshot() as snap:
        kivi.polars.scan(snap, "invocations").filter(pl.col("resp_time_us") > 1_000_000).select("endpoint_id").collect()

Comes in: a snapshot of a store in this process or of a connected one. Goes out: a ``polars.LazyFrame``. May not touch:
the store. Needs the extra ``kivi[polars]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kivi.errors import InvalidArgument

if TYPE_CHECKING:
    from kivi.api.interface import Snapshot

__all__ = ["scan"]


def scan(snapshot: Snapshot, table: str, *, commits: bool = False) -> Any:
    """The table as a ``polars.LazyFrame``, to be collected while the snapshot is open.

    The columns that a query needs, and those of its filters that compare columns with values, are pushed into the scan
    of the table (``kivi.api.dataset``). ``commits``: of events also ``_commit_ts`` and ``_commit_time``. Raises
    NotFound, and InvalidArgument if Polars is not installed.
    """
    try:
        import polars
    except ImportError:
        raise InvalidArgument("polars is not installed: pip install 'kivi[polars]'") from None
    return polars.scan_pyarrow_dataset(snapshot.dataset(table, commits=commits))
