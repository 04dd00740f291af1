"""The arguments of ``match`` and ``subscribe_matches``, as those of the other methods in ``kivi.api.arguments``."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kivi.api.arguments import (
    QuestionArguments,
    RollupArguments,
    SubscribeArguments,
    check_limit,
    table_name,
    type_of,
)
from kivi.errors import InvalidArgument
from kivi.model.expressions import Expr, bind
from kivi.model.lateness import lateness_us
from kivi.model.patterns import Pattern, match_of
from kivi.model.questions import seen_schema
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.model.types import shown

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["AnswerArguments", "MatchArguments", "matches_arguments"]


@dataclass(slots=True)
class MatchArguments:
    """Of ``match``. ``start`` and ``end`` bound the event time; ``end`` is exclusive."""

    table: str
    pattern: Pattern
    start: Any = None
    end: Any = None
    where: Expr | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        table_name(self.table)
        check_limit(self.limit)

    def bound(self, schema: TableSchema) -> Scan:
        """Checked against the schema, in stored form. Raises SchemaError, InvalidArgument."""
        match = match_of(schema, self.pattern, self.start, self.end)
        seen = seen_schema(schema)
        where = None if self.where is None else bind(self.where, lambda name: type_of(seen, name))
        return Scan(where=where, limit=self.limit, match=match)

    def arrow_schema(self, schema: TableSchema) -> pa.Schema:
        """Of the answer."""
        import pyarrow as pa

        from kivi.arrow.columns import arrow_field

        match = match_of(schema, self.pattern)
        return pa.schema([arrow_field(name, type_) for name, type_ in match.columns])


def matches_arguments(
    table: str,
    pattern: Pattern,
    *,
    where: Expr | None = None,
    lateness: str | int | dt.timedelta = 0,
    interval_ms: float = 100,
    heartbeat_ms: float = 1_000.0,
    since: int | None = None,
    skip: int = 0,
) -> SubscribeArguments:
    """Of ``subscribe_matches``."""
    if not isinstance(pattern, Pattern):
        raise InvalidArgument(f"subscribe_matches takes a pattern, made by kivi.pattern(...), not {shown(pattern)}")
    wanted = SubscribeArguments(table, interval_ms=interval_ms, heartbeat_ms=heartbeat_ms, since=since, skip=skip)
    wanted.matching = MatchArguments(table, pattern, where=where)
    wanted.lateness_us = lateness_us(lateness)
    return wanted


AnswerArguments = RollupArguments | QuestionArguments | MatchArguments
"""Of what is answered with a ``Result``."""
