"""Durable subscriptions by what they ask for, of the embedded database."""

from __future__ import annotations

from kivi.api import topics
from kivi.api.arguments import takes
from kivi.api.topics import ReachedArguments, StoreArguments, SubscribersArguments
from kivi.live.durable import Wanted
from kivi.live.hub import Hub
from kivi.store.facade import Store

__all__ = ["Topics"]


class Topics(topics.Topics):
    store: Store
    hub: Hub

    @takes(StoreArguments)
    def store_subscriptions(self, wanted: StoreArguments) -> int:
        schema = self.store.table(wanted.table)
        found = Wanted(wanted.users, wanted.names, wanted.bound(schema), wanted.at, wanted.ttl_us, wanted.since or 0)
        return self.hub.durable.store(schema, found)

    @takes(ReachedArguments)
    def reached(self, wanted: ReachedArguments) -> list[int]:
        return self.hub.durable.reached(wanted.table, wanted.ts, wanted.since)

    @takes(SubscribersArguments)
    def subscribers(self, wanted: SubscribersArguments) -> list[dict[str, str]]:
        return self.hub.durable.subscribers(wanted.table, wanted.ts, wanted.place, wanted.limit)
