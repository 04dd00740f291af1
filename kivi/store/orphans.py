"""Orphans: objects below the URLs of cold tiers that nothing names. They are listed, and deleted by nobody here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kivi.events.cold_tier import OBJECT, ColdTier
from kivi.runtime.settings import Settings

__all__ = ["named_by", "orphans"]


def named_by(store: Any) -> dict[str, set[str]]:
    """The keys of the objects that an open store names, by the URLs that its tables' cold tiers have."""
    found = {schema.cold: set[str]() for schema in store.tables() if schema.cold is not None}
    for one in store.event_tables.objects_in_use():
        found.setdefault(one.url, set()).add(one.key)
    return found


def orphans(named: Mapping[str, set[str]]) -> Iterator[tuple[str, str | None]]:
    """(URL, path of a copy that it is pinned for, or None) of each object below these URLs that is not named."""
    tier = ColdTier(None, cache_bytes=0, timeout_s=Settings().cold_timeout_s)
    keys = set[str]().union(*named.values())  # whatever the URL: several may be one place, or one below another
    for url in sorted(named):
        there = [path for path in tier.store(url).list("") if path.endswith(OBJECT)]
        pinned: dict[str, str] = {}
        for generation in sorted({path.rsplit("/", 2)[0] for path in there}):
            pinned |= tier.pinned(url, generation)
        for path in there:
            key = "/".join(path.split("/")[-3:])
            if key not in keys:
                yield tier.store(url).named(path), pinned.get(key)
