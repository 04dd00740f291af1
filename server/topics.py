"""The calls about durable subscriptions by what they ask for: decode, ask, encode."""

from __future__ import annotations

from kivi_server.auth import Access, Grant
from kivi_server.sessions import Sessions
from kivi_server.translate import Translator

from kivi.api.arguments import check_names
from kivi.api.topics import check_subscriptions
from kivi.errors import InvalidArgument
from kivi.live.durable import Wanted
from kivi.wire.v1 import topics_pb2 as pb

__all__ = ["NEEDS", "TopicCalls"]

NEEDS = {
    "StoreSubscriptions": Access.READ,
    "Reached": Access.READ,
    "Subscribers": Access.READ,
}


class TopicCalls:
    sessions: Sessions
    translator: Translator

    def StoreSubscriptions(self, request: pb.StoreSubscriptionsRequest, _: Grant) -> pb.StoreSubscriptionsResponse:
        check_subscriptions(len(request.names))
        if not len(request.users) == len(request.names) == len(request.at) or request.ttl_us <= 0:
            raise InvalidArgument("each subscription has a user, a name and a predicate, and lasts for some time")
        if any(at >= len(request.wheres) for at in request.at):
            raise InvalidArgument("a subscription asks for a predicate that was not sent")
        for user, name in zip(request.users, request.names, strict=True):
            check_names(user, name)
        schema = self.sessions.store.table(request.table)
        wheres = [
            self.translator.where(schema, asked.where) if asked.HasField("where") else None for asked in request.wheres
        ]
        wanted = Wanted(request.users, request.names, wheres, request.at, request.ttl_us, request.since)
        return pb.StoreSubscriptionsResponse(commit_ts=self.sessions.hub.durable.store(schema, wanted))

    def Reached(self, request: pb.ReachedRequest, _: Grant) -> pb.ReachedResponse:
        since = request.since if request.HasField("since") else None
        return pb.ReachedResponse(counts=self.sessions.hub.durable.reached(request.table, request.ts, since))

    def Subscribers(self, request: pb.SubscribersRequest, _: Grant) -> pb.SubscribersResponse:
        durable = self.sessions.hub.durable
        found = durable.subscribers(request.table, request.ts, request.place, request.limit)
        return pb.SubscribersResponse(users=[one["user"] for one in found], names=[one["name"] for one in found])
