"""Durable subscriptions by what they ask for: public methods and their arguments, the same wherever the store is."""

from __future__ import annotations

import datetime as dt
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from kivi.api.arguments import check_names, table_name, takes, type_of
from kivi.errors import InvalidArgument, ResourceExhausted
from kivi.model.expressions import Expr, bind, to_plain
from kivi.model.schema import TableSchema
from kivi.model.slots import parse_duration_us

__all__ = ["SUBSCRIPTIONS_MAX", "ReachedArguments", "StoreArguments", "SubscribersArguments", "Topics"]

SUBSCRIPTIONS_MAX: Final = 20_000
"""Of one ``store_subscriptions``, which is one commit."""
_LIMIT_MAX: Final = 100_000
_NAMED: Final = frozenset({"name", "user", "where"})


@dataclass(slots=True)
class StoreArguments:
    """Of ``store_subscriptions``. ``wheres``: each predicate once; ``at``: which of them each subscription has."""

    table: str
    subscriptions: Iterable[Mapping[str, Any]]
    _: KW_ONLY
    since: int | None = None
    expires_in: str | int | dt.timedelta = "30d"
    ttl_us: int = field(init=False)
    users: list[str] = field(init=False, default_factory=list)
    names: list[str] = field(init=False, default_factory=list)
    wheres: list[Expr | None] = field(init=False, default_factory=list)
    at: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        table_name(self.table)
        self.ttl_us = parse_duration_us(self.expires_in, "expires_in")
        if self.since is not None:
            commit_ts(self.since, "since")
        if isinstance(self.subscriptions, Mapping) or not isinstance(self.subscriptions, Iterable):
            raise InvalidArgument("subscriptions is a list of dicts, each with a name, and perhaps a user and a where")
        known: dict[str, int] = {}
        for one in self.subscriptions:
            if not isinstance(one, Mapping) or not one.keys() <= _NAMED or "name" not in one:
                raise InvalidArgument(f"a subscription has a name, and perhaps a user and a where, not {one!r:.200}")
            name, user, where = one["name"], one.get("user", ""), one.get("where")
            check_names(user, name)
            if where is not None and not isinstance(where, Expr):
                raise InvalidArgument(f"where is a predicate, such as kivi.col('topic') == 'a', not {where!r:.200}")
            text = "" if where is None else json.dumps(to_plain(where))
            place = known.setdefault(text, len(known))
            if place == len(self.wheres):
                self.wheres.append(where)
            self.users.append(user)
            self.names.append(name)
            self.at.append(place)
        check_subscriptions(len(self.names))

    def bound(self, schema: TableSchema) -> list[Expr | None]:
        """Raises SchemaError, InvalidArgument."""
        return [None if where is None else bind(where, lambda name: type_of(schema, name)) for where in self.wheres]


def check_subscriptions(count: int) -> None:
    """Raises ResourceExhausted for too many at once."""
    if count > SUBSCRIPTIONS_MAX:
        raise ResourceExhausted(
            f"{count:,} subscriptions at once are more than {SUBSCRIPTIONS_MAX:,}: store them in several calls",
            limit="subscriptions",
            maximum=SUBSCRIPTIONS_MAX,
        )


def commit_ts(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(f"{what} is a commit timestamp, not {value!r:.100}")
    return value


@dataclass(slots=True)
class ReachedArguments:
    """Of ``reached``."""

    table: str
    ts: int
    since: int | None = None

    def __post_init__(self) -> None:
        table_name(self.table)
        commit_ts(self.ts, "ts")
        if self.since is not None:
            commit_ts(self.since, "since")


@dataclass(slots=True)
class SubscribersArguments:
    """Of ``subscribers``."""

    table: str
    ts: int
    place: int = 0
    limit: int = 1_000

    def __post_init__(self) -> None:
        table_name(self.table)
        commit_ts(self.ts, "ts")
        for what, value, most in (("place", self.place, 2**31), ("limit", self.limit, _LIMIT_MAX)):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise InvalidArgument(f"{what} is a number from 0 to {most:,}, not {value!r:.100}")


class Topics(ABC):
    """What a database does with durable subscriptions that nobody is connected to."""

    @abstractmethod
    @takes(StoreArguments)
    def store_subscriptions(self, wanted: StoreArguments) -> int:
        """Remembers durable subscriptions to the events of a table, in one commit, whose timestamp it returns.

        ``db.store_subscriptions("news", [{"user": "ada", "name": "senate", "where": kivi.col("topic") == "senate"}])``.
        Each is what ``subscribe`` with this name, user and predicate makes, and ``db.subscribe("news", name="senate",
        user="ada")`` takes it up: with the events that it selects, past ones too, committed after ``since`` if that is
        given. One that is there already is kept as it is, and longer. At most 20,000 at once.

        Raises NotFound, SchemaError, InvalidArgument (one is to another query), ResourceExhausted.
        """

    @abstractmethod
    @takes(ReachedArguments)
    def reached(self, wanted: ReachedArguments) -> list[int]:
        """How many durable subscriptions select each event of the commit at ``ts``, in order.

        They are counted as they were at ``ts``: the event's commit, as ``append`` returns it. With ``since``, of the
        events of all commits after that, up to ``ts``. One that has expired counts until the store has deleted it. What
        it takes does not depend on how many subscriptions there are, nor on how many are reached.

        Raises NotFound, SchemaError, SnapshotTooOld.
        """

    @abstractmethod
    @takes(SubscribersArguments)
    def subscribers(self, wanted: SubscribersArguments) -> list[dict[str, str]]:
        """Whose subscriptions select one event, the one at ``place`` of the commit at ``ts``: dicts of user and name,
        at most ``limit``, in no order. Raises NotFound, SchemaError, SnapshotTooOld."""
