"""Durable subscriptions by what they ask for, over a connection: the steps of both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kivi.api.topics import ReachedArguments, StoreArguments, SubscribersArguments
from kivi.client.steps import Steps
from kivi.wire.codec import to_expr
from kivi.wire.v1 import topics_pb2 as pb

if TYPE_CHECKING:
    from kivi.client.core import Core

__all__ = ["reached", "store_subscriptions", "subscribers"]


def store_subscriptions(core: Core, wanted: StoreArguments) -> Steps[int]:
    schema = yield from core.schema(wanted.table)
    wheres = [
        pb.Asked(where=None if where is None else to_expr(where), texts=texts) for where, texts in wanted.bound(schema)
    ]
    reply = yield from core.call(
        "StoreSubscriptions",
        pb.StoreSubscriptionsRequest(
            table=wanted.table,
            users=wanted.users,
            names=wanted.names,
            wheres=wheres,
            at=wanted.at,
            ttl_us=wanted.ttl_us,
            since=wanted.since or 0,
        ),
    )
    core.saw(reply.commit_ts)
    return int(reply.commit_ts)


def reached(core: Core, wanted: ReachedArguments) -> Steps[list[int]]:
    reply = yield from core.call("Reached", pb.ReachedRequest(table=wanted.table, ts=wanted.ts, since=wanted.since))
    return list(reply.counts)


def subscribers(core: Core, wanted: SubscribersArguments) -> Steps[list[dict[str, str]]]:
    reply = yield from core.call(
        "Subscribers",
        pb.SubscribersRequest(table=wanted.table, ts=wanted.ts, place=wanted.place, limit=wanted.limit),
    )
    return [{"user": user, "name": name} for user, name in zip(reply.users, reply.names, strict=True)]
