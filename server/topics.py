"""The calls about durable subscriptions by what they ask for: decode, ask, encode."""

from __future__ import annotations

from kivi_server.auth import Access, Grant
from kivi_server.sessions import Sessions
from kivi_server.translate import Translator

from kivi.api.topics import check_subscriptions, names_in_columns, takes_texts, with_texts
from kivi.errors import InvalidArgument
from kivi.live.durable import Wanted
from kivi.model.expressions import Expr
from kivi.model.slots import parse_duration_us
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
        if not len(request.users) == len(request.names) == len(request.at):
            raise InvalidArgument("each subscription has a user, a name and a predicate")
        users, names = names_in_columns(request.users, request.names)
        schema = self.sessions.store.table(request.table)
        wheres: list[Expr | None] = []
        for asked in request.wheres:
            where = self.translator.where(schema, asked.where) if asked.HasField("where") else None
            if asked.texts and (where is None or not takes_texts(where)):
                raise InvalidArgument("texts are in the place of that of a predicate that says one of one column")
            wheres += [None] if where is None else with_texts(where, asked.texts)
        if max(request.at, default=-1) >= len(wheres):
            raise InvalidArgument("a subscription asks for a predicate that was not sent")
        wanted = Wanted(users, names, wheres, request.at, parse_duration_us(request.ttl_us, "ttl_us"), request.since)
        return pb.StoreSubscriptionsResponse(commit_ts=self.sessions.hub.durable.store(schema, wanted))

    def Reached(self, request: pb.ReachedRequest, _: Grant) -> pb.ReachedResponse:
        since = request.since if request.HasField("since") else None
        return pb.ReachedResponse(counts=self.sessions.hub.durable.reached(request.table, request.ts, since))

    def Subscribers(self, request: pb.SubscribersRequest, _: Grant) -> pb.SubscribersResponse:
        durable = self.sessions.hub.durable
        found = durable.subscribers(request.table, request.ts, request.place, request.limit)
        return pb.SubscribersResponse(users=[one["user"] for one in found], names=[one["name"] for one in found])
