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
    # -- pending: beyond the soft limit consolidation hurries, at the hard limit writers wait
    pending_soft_bytes: int = 128 * MIB
    pending_hard_bytes: int = 384 * MIB
    # -- consolidation
    background: bool = True
    consolidate_every_s: float = 0.05
    fold_every_s: float = 5.0  # what can be combined in memory is folded into base this often; 0: every time
    consolidate_rows: int = 2_048
    flush_bytes: int = 32 * MIB
    flush_every_s: float = 30.0
    block_rows: int = 131_072
    # -- leases
    lease_ttl_s: float = 60.0
    lease_ttl_max_s: float = 24 * 3600.0
    max_leases: int = 100_000
    version_budget_bytes: int = 1024 * MIB
    # -- conflict facts are kept at least this long, so a transaction may be open this long
    conflict_window_s: float = 300.0
    conflict_entries: int = 400_000
    # -- tokens made by the client library are remembered this long
    request_token_ttl_s: float = 24 * 3600.0
    # -- stages
    stage_bytes: int = 4096 * MIB
    stage_ttl_s: float = 24 * 3600.0
    # -- published limits
    max_value_bytes: int = 16 * MIB
    max_transaction_operations: int = 1_000_000
    max_transaction_bytes: int = 64 * MIB
    max_append_rows: int = 1_000_000
    # -- engine
    cache_bytes: int = 128 * MIB
    memtable_bytes: int = 32 * MIB
    # -- commit: how long a blocking call waits for a sync before it says CommitUnknown
    commit_timeout_s: float = 60.0

    @staticmethod
    def of(values: dict[str, Any]) -> Settings:
        """Settings from keyword arguments; an unknown name or a wrong type is refused by name."""
        known = {field.name: field for field in fields(Settings)}
        for name, value in values.items():
            if name not in known:
                raise InvalidArgument(f"there is no setting {name!r}; known are {', '.join(known)}")
            default = known[name].default
            good = (
                isinstance(value, bool)
                if isinstance(default, bool)
                else (
                    isinstance(value, (int, float))
                    and not isinstance(value, bool)
                    and value >= 0
                    and (isinstance(value, int) or isinstance(default, float))
                )
            )
            if not good:
                raise InvalidArgument(f"setting {name!r} cannot be {value!r}: it is like its default, {default!r}")
        return Settings(**values)
