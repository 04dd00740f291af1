"""Between a pattern asked of a table and its message, as ``kivi.wire.codec`` does it for other questions."""

from __future__ import annotations

from kivi.errors import InvalidArgument
from kivi.model.patterns import Match, Stored, match_of, pattern
from kivi.model.schema import TableSchema
from kivi.wire.codec import from_expr, from_measures, to_expr, to_measures
from kivi.wire.v1 import types_pb2 as pb

__all__ = ["from_match", "to_match"]


def to_match(match: Match) -> pb.Match:
    asked = match.pattern
    return pb.Match(
        pattern=asked.text,
        partition_by=asked.partition_by,
        within_us=asked.within_us,
        definitions=[pb.Match.Definition(symbol=name, condition=to_expr(expr)) for name, expr in match.define],
        measures=to_measures([call.as_measure(name) for name, call in asked.measures]),
        skip=str(asked.skip),
        start_us=match.start_us,
        end_us=match.end_us,
    )


def from_match(schema: TableSchema, match: pb.Match, stored: Stored) -> Match:
    """Checked against the table; ``stored`` checks literals. Raises SchemaError, InvalidArgument."""
    define = {d.symbol: from_expr(d.condition) for d in match.definitions}
    measures = {m.name: m.call for m in from_measures(match.measures)}
    if len(define) < len(match.definitions) or len(measures) < len(match.measures):
        raise InvalidArgument("a pattern defines a symbol or names a measure twice")
    asked = pattern(
        match.pattern,
        partition_by=list(match.partition_by),
        within=match.within_us if match.HasField("within_us") else None,
        define=define,
        measures=measures,
        skip=match.skip or "past_last_row",
    )
    start = match.start_us if match.HasField("start_us") else None
    return match_of(schema, asked, start, match.end_us if match.HasField("end_us") else None, stored)
