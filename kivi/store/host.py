"""The parts of a store that its helpers may use: never the whole store."""

from __future__ import annotations

from typing import Protocol

from kivi.engine import Engine
from kivi.events.cold_tier import ColdTier
from kivi.log import CommitLog
from kivi.mvcc.commit import Committer
from kivi.mvcc.consolidate import Consolidator
from kivi.mvcc.forgetting import Forgetting
from kivi.mvcc.leases import Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.prefix import Prefix
from kivi.mvcc.timeline import Timeline
from kivi.mvcc.tokens import Tokens
from kivi.runtime.settings import Settings
from kivi.store.catalog import Catalog
from kivi.store.event_tables import EventTables
from kivi.store.opening import Parts
from kivi.store.retention import Retention
from kivi.store.shards import Shards
from kivi.store.snapshots import Snapshots
from kivi.store.staging import Stages, Staging

__all__ = ["Contents", "Running"]


class Contents(Protocol):
    """The contents of a store, on disk and in memory."""

    parts: Parts
    engine: Engine
    log: CommitLog
    catalog: Catalog
    pending: Pending
    timeline: Timeline
    tokens: Tokens
    stages: Stages
    retention: Retention
    event_tables: EventTables
    shards: Shards
    cold: ColdTier
    committer: Committer
    prefix: Prefix | None


class Running(Contents, Protocol):
    """A store that is open: what commits, folds and lets go of it."""

    settings: Settings
    consolidator: Consolidator
    leases: Leases
    forgetting: Forgetting
    staging: Staging
    snapshots: Snapshots

    @property
    def is_open(self) -> bool: ...
