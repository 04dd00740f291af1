"""The parts of a store that live queries use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import pyarrow as pa

from kivi.model.expressions import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.leases import Lease, Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.snapshot import Reader
from kivi.mvcc.watermark import Watermark
from kivi.store.commits import Commits
from kivi.store.event_tables import EventTables
from kivi.store.reads import Reads
from kivi.store.retention import Retention
from kivi.store.snapshots import Snapshots
from kivi.store.transaction import Txn

__all__ = ["Followed", "Readable"]


class Readable(Protocol):
    """For what windows show."""

    reader: Reader
    retention: Retention
    event_tables: EventTables

    def watermark(self) -> int: ...

    def table(self, name: str, lease: Lease | None = None) -> TableSchema: ...

    def scan(self, lease: Lease, schema: TableSchema, wanted: Scan) -> Iterator[pa.RecordBatch]: ...


class Followed(Readable, Protocol):
    """For the hub, which follows its commits, and for the rows of durable subscriptions."""

    clock: Callable[[], float]
    pending: Pending
    leases: Leases
    moved: Watermark
    snapshots: Snapshots
    reads: Reads
    commits: Commits

    def check_open(self) -> None: ...

    def transaction(self) -> Txn: ...
