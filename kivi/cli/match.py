"""``kivi match TABLE PATTERN ...``: the matches of a pattern over a table's events, one row each.

::

    kivi match invocations 'A B+ C' --by endpoint_id --within 15m --define 'B=resp_time_us > prev(resp_time_us)' \\
        --define 'C=resp_time_us < prev(resp_time_us, 1)' --measure began=first:A.ts --measure rises=count:B
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from kivi.cli.aggregate import pairs, parts_of
from kivi.cli.text import times_of
from kivi.errors import InvalidArgument
from kivi.model import surface
from kivi.model.patterns import pattern
from kivi.model.predicate_text import type_names, where

__all__ = ["asked"]

_MEASURES: Final = ("first", "last", "count", "sum", "min", "max", "avg")


def asked(snap: Any, args: argparse.Namespace) -> Any:
    """The matches at a snapshot. Raises InvalidArgument, SchemaError."""
    types = {**type_names(snap._table_schema(args.table).description()), "_commit_ts": "int64"}
    types["_commit_time"] = "timestamp"
    define = dict(pairs(args.define, "--define is SYMBOL=PREDICATE"))
    measures = {}
    for name, text in pairs(args.measure, "--measure is name=first:A.ts"):
        operator, sources, predicate = parts_of(text)
        if operator not in _MEASURES or len(sources) > 1 or predicate or (not sources and operator != "count"):
            raise InvalidArgument(f"measure {name!r} is {text!r}: write first(A.ts), count(B), count, sum(COLUMN) ...")
        measures[name] = getattr(surface, operator)(sources[0].strip("'\"") if sources else None)
    wanted = pattern(
        args.pattern,
        partition_by=args.by,
        within=args.within,
        define={symbol: where(text, types, f"symbol {symbol!r}") for symbol, text in define.items()},
        measures=measures,
        skip=args.skip,
    )
    chosen = where(args.where, types) if args.where else None
    return snap.match(args.table, wanted, **times_of(args), where=chosen, limit=args.limit)
