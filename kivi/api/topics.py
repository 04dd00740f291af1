"""Durable subscriptions by what they ask for: public methods and their arguments, the same wherever the store is."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kivi.api.arguments import check_commit_ts, table_name, takes, type_of
from kivi.errors import InvalidArgument, ResourceExhausted
from kivi.model.expressions import HIERARCHY, Expr, bind, to_plain
from kivi.model.given import listed
from kivi.model.names import is_text
from kivi.model.schema import TableSchema
from kivi.model.slots import parse_duration_us
from kivi.model.types import shown

__all__ = [
    "SUBSCRIPTIONS_MAX",
    "ReachedArguments",
    "StoreArguments",
    "SubscribersArguments",
    "Topics",
    "check_subscriptions",
    "names_in_columns",
    "takes_texts",
    "with_texts",
]

SUBSCRIPTIONS_MAX: Final = 20_000
"""Of one ``store_subscriptions``, which is one commit."""
_LIMIT_MAX: Final = 100_000
_NAMED: Final = frozenset({"name", "user", "where"})


@dataclass(slots=True)
class StoreArguments:
    """Of ``store_subscriptions``. ``shapes``: predicates, each with the texts that others like it have in the place of
    its own; ``at``: which of all of these each subscription has, counted in that order (``with_texts``)."""

    table: str
    subscriptions: Iterable[Mapping[str, Any]]
    _: KW_ONLY
    since: int | None = None
    expires_in: str | int | dt.timedelta = "30d"
    ttl_us: int = field(init=False)
    users: list[str] = field(init=False, default_factory=list)
    names: list[str] = field(init=False, default_factory=list)
    columns: tuple[Any, Any] = field(init=False)  # users and names
    shapes: list[tuple[Expr | None, list[str]]] = field(init=False, default_factory=list)
    at: list[int] = field(init=False)

    def __post_init__(self) -> None:
        table_name(self.table)
        self.ttl_us = parse_duration_us(self.expires_in, "expires_in")
        if self.since is not None:
            check_commit_ts(self.since, "since")
        given = None if isinstance(self.subscriptions, Mapping) else listed(self.subscriptions)
        if given is None:
            raise InvalidArgument("subscriptions is a list of dicts, each with a name, and perhaps a user and a where")
        known: dict[Any, tuple[int, dict[str, int]]] = {}
        shape_of, places = list[int](), list[int]()
        for one in given:
            if not isinstance(one, dict | Mapping) or not one.keys() <= _NAMED or "name" not in one:
                raise InvalidArgument(f"a subscription has a name, and perhaps a user and a where, not {shown(one)}")
            name, user, where = one["name"], one.get("user", ""), one.get("where")
            if where is not None and not isinstance(where, Expr):
                raise InvalidArgument(f"where is a predicate, such as kivi.col('topic') == 'a', not {shown(where)}")
            shape, text = _shape(where)
            found = known.get(shape)
            if found is None:
                found = known[shape] = len(known), {text: 0}
                self.shapes.append((where, []))
            elif text not in found[1]:
                found[1][text] = len(found[1])
                self.shapes[found[0]][1].append(text)
            self.users.append(user)
            self.names.append(name)
            shape_of.append(found[0])
            places.append(found[1][text])
        check_subscriptions(len(self.names))
        self.columns = names_in_columns(self.users, self.names)
        behind = itertools.accumulate((1 + len(texts) for _, texts in self.shapes), initial=0)
        self.at = [first + place for first, place in zip(map([*behind].__getitem__, shape_of), places, strict=True)]

    def bound(self, schema: TableSchema) -> Iterator[tuple[Expr | None, list[str]]]:
        """``shapes``, bound. Raises SchemaError, InvalidArgument."""
        for where, texts in self.shapes:
            if where is None:
                yield None, []
                continue
            found = bind(where, lambda name: type_of(schema, name))
            if not texts or (takes_texts(found) and found.value == where.value):
                yield found, texts
            else:  # they stand for something else, as moments do
                for each in with_texts(where, texts):
                    yield bind(each, lambda name: type_of(schema, name)), []


def takes_texts(where: Expr) -> bool:
    """Whether it says one text of one column."""
    return not where.args and bool(where.column) and _text_of(where) is not None


def with_texts(where: Expr, texts: Iterable[str]) -> Iterator[Expr]:
    """It, and the same with each of these texts in the place of its own."""
    yield where
    for text in texts:
        yield replace(where, value=(text, *where.value[1:]) if where.op in HIERARCHY else text)


def _text_of(where: Expr) -> str | None:
    text = where.value[0] if where.op in HIERARCHY else where.value
    return text if type(text) is str and is_text(text) else None


def _shape(where: Expr | None) -> tuple[Any, str]:
    """Equal for predicates that ask for the same, but for a text."""
    if where is None:
        return None, ""
    if not where.args and where.column and (text := _text_of(where)) is not None:
        return (where.op, where.column, where.value[1:] if where.op in HIERARCHY else ""), text
    return json.dumps(to_plain(where)), ""


def names_in_columns(users: Sequence[object], names: Sequence[object]) -> tuple[pa.Array, pa.Array]:
    """``check_names`` of many; users and names as Arrow arrays."""
    return _texts("user", users, 0), _texts("name", names, 1)


def _texts(what: str, values: Sequence[object], least: int) -> pa.Array:
    right = all(map(is_text, values))
    if right:
        array = pa.array(values, pa.string())
        lengths = pc.min_max(pc.binary_length(array)).as_py()
        right = not values or (least <= lengths["min"] and lengths["max"] <= 256)
    if not right:
        raise InvalidArgument(f"the {what} of a durable subscription is a text of {least} to 256 bytes")
    return array


def check_subscriptions(count: int) -> None:
    """Raises ResourceExhausted for too many at once."""
    if count > SUBSCRIPTIONS_MAX:
        raise ResourceExhausted(
            f"{count:,} subscriptions at once are more than {SUBSCRIPTIONS_MAX:,}: store them in several calls",
            limit="subscriptions",
            maximum=SUBSCRIPTIONS_MAX,
        )


@dataclass(slots=True)
class ReachedArguments:
    """Of ``reached``."""

    table: str
    ts: int
    since: int | None = None

    def __post_init__(self) -> None:
        table_name(self.table)
        check_commit_ts(self.ts, "ts")
        if self.since is not None:
            check_commit_ts(self.since, "since")


@dataclass(slots=True)
class SubscribersArguments:
    """Of ``subscribers``."""

    table: str
    ts: int
    place: int = 0
    limit: int = 1_000

    def __post_init__(self) -> None:
        table_name(self.table)
        check_commit_ts(self.ts, "ts")
        for what, value, most in (("place", self.place, 2**31), ("limit", self.limit, _LIMIT_MAX)):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise InvalidArgument(f"{what} is a number from 0 to {most:,}, not {shown(value)}")


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
