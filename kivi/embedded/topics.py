"""Durable subscriptions by what they ask for, of the embedded database."""

from __future__ import annotations

from kivi.api import topics
from kivi.api.arguments import takes
from kivi.api.topics import ReachedArguments, StoreArguments, SubscribersArguments, with_texts
from kivi.live.durable import Wanted
from kivi.live.hub import Hub
from kivi.model.expressions import Expr
from kivi.store.facade import Store

__all__ = ["Topics"]


class Topics(topics.Topics):
    store: Store
    hub: Hub

    @takes(StoreArguments)
    def store_subscriptions(self, wanted: StoreArguments) -> int:
        schema = self.store.table(wanted.table)
        wheres: list[Expr | None] = []
        for where, texts in wanted.bound(schema):
            wheres += [None] if where is None else with_texts(where, texts)
        found = Wanted(*wanted.columns, wheres, wanted.at, wanted.ttl_us, wanted.since or 0)
        return self.hub.durable.store(schema, found)

    @takes(ReachedArguments)
    def reached(self, wanted: ReachedArguments) -> list[int]:
        return self.hub.durable.reached(wanted.table, wanted.ts, wanted.since)

    @takes(SubscribersArguments)
    def subscribers(self, wanted: SubscribersArguments) -> list[dict[str, str]]:
        return self.hub.durable.subscribers(wanted.table, wanted.ts, wanted.place, wanted.limit)
