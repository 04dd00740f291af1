"""The tunables of a store: frozen, with units in their names. Limits here are published numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, Final

from kivi.errors import InvalidArgument

__all__ = ["COMPUTING", "Settings"]

MIB = 1024 * 1024


COMPUTING: Final = max(1, (os.cpu_count() or 2) // 2)
"""How many threads compute in columns at a time: each more is one more that the others take the interpreter from."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How an open store behaves. None of these changes what is on disk or what an answer means."""

    # -- commit log
    segment_bytes: int = 32 * MIB
    """A segment of the commit log; the first ones after an opening are smaller, from 1 MiB on."""
    # -- pending
    pending_soft_bytes: int = 128 * MIB
    """Operations that are not in base yet. Beyond this, consolidation hurries."""
    pending_hard_bytes: int = 384 * MIB
    """Here writers wait for consolidation, and are refused if it cannot go on."""
    # -- consolidation
    background: bool = True
    """Whether the store consolidates by itself; tests say when instead."""
    consolidate_every_s: float = 0.05
    """How often a pass begins."""
    fold_every_s: float = 5.0
    """How often what can be combined in memory is folded into base; 0: with every pass."""
    consolidate_rows: int = 2_048
    """Rows that are folded and written at a time."""
    flush_bytes: int = 32 * MIB
    """When so much has been written to the engine since its last flush it is flushed, and the log is truncated."""
    flush_every_s: float = 30.0
    """The same, by time."""
    block_rows: int = 131_072
    """Events of a block."""
    # -- settling
    settle: bool = True
    """Whether events move from blocks to settled files in the background."""
    settle_every_s: float = 1.0
    """How often it is looked whether there is something to settle."""
    settle_idle_s: float = 30.0
    """After so long without new events, all events of a table are settled."""
    # -- the cold tier
    cold_every_s: float = 10.0
    """How often it is looked whether settled files are old enough to move to their table's object store."""
    cold_cache_bytes: int = 1024 * MIB
    """Of what is read back from object stores so much is kept on disk."""
    cold_timeout_s: float = 30.0
    """How long an object store may take for a range; it is asked again until then."""
    # -- leases
    lease_ttl_s: float = 60.0
    """How long a snapshot lasts that asks for nothing and is not renewed."""
    lease_ttl_max_s: float = 24 * 3600.0
    """The longest time that one may ask for."""
    max_leases: int = 100_000
    """Open snapshots."""
    version_budget_bytes: int = 1024 * MIB
    """What older versions may cost for open snapshots. Beyond it the oldest snapshot is cut: SnapshotTooOld."""
    # -- conflict facts
    conflict_window_s: float = 300.0
    """Facts about commits are kept at least so long, unless they are too many; so long a transaction may be open."""
    conflict_entries: int = 400_000
    """At most so many facts are kept, whatever their age."""
    # -- tokens
    request_token_ttl_s: float = 24 * 3600.0
    """How long tokens that the client library made are remembered. A caller's own are kept for ever."""
    # -- stages
    stage_bytes: int = 4096 * MIB
    """What may be staged and not committed."""
    stage_ttl_s: float = 24 * 3600.0
    """How long a stage waits for its commit."""
    # -- published limits
    max_value_bytes: int = 16 * MIB
    """The value of one column."""
    max_transaction_operations: int = 1_000_000
    """Operations in a transaction."""
    max_transaction_bytes: int = 64 * MIB
    """Bytes in a transaction."""
    max_append_rows: int = 1_000_000
    """Events in one append."""
    # -- questions
    query_bytes: int = 512 * MIB
    """What the groups of one question may take."""
    # -- SQL
    sql_memory_bytes: int = 512 * MIB
    """What DuckDB may take for a question; it does not spill."""
    sql_threads: int = COMPUTING
    """How many threads compute a question."""
    sql_timeout_s: float = 60.0
    """How long a question may take; on a server its process is killed then."""
    sql_rows: int = 10_000_000
    """Rows of an answer."""
    sql_processes: int = 2
    """How many questions a server computes at a time, each in a process of its own; others wait."""
    # -- subscriptions
    subscriptions_bytes: int = 64 * MIB
    """What is remembered of how many durable subscriptions ask for what; the rest is read when an event asks."""
    live_renewals_per_s: int = 200
    """So many windows of live queries, at most, are read again in a second; those who follow them wait for that."""
    # -- alerts
    alerts_every_s: float = 0.5
    """How often it is looked whether an alert has to be evaluated, or somebody told."""
    # -- engine
    cache_bytes: int = 128 * MIB
    """RocksDB's block cache."""
    memtable_bytes: int = 32 * MIB
    """One memtable of RocksDB; up to three are there at a time."""
    # -- commit
    commit_timeout_s: float = 60.0
    """How long a blocking call waits for a sync before it says CommitUnknown."""

    @staticmethod
    def of(values: dict[str, Any]) -> Settings:
        """Settings from keyword arguments; an unknown name or a wrong type is refused by name."""
        known = {field.name: field for field in fields(Settings)}
        for name, value in values.items():
            if name not in known:
                raise InvalidArgument(f"there is no setting {name!r}; known are {', '.join(known)}")
            default = known[name].default
            kinds = (int, float) if isinstance(default, float) else int
            is_like = isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)
            if not is_like or value < 0:
                raise InvalidArgument(f"setting {name!r} cannot be {value!r}: it is like its default, {default!r}")
        return Settings(**values)
