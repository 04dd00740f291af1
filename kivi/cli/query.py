"""``kivi query TABLE ...``: a question of a table's events, or of an aggregate's rows, and its answer.

::

    kivi query invocations --measure calls=count --measure 'latency=quantiles:resp_time_us' --by endpoint_id \\
        --by hour=ts/1h --derived 'p99=quantile(latency, 0.99)' --where "application == 'shop'" \\
        --having 'calls > 100' --order-by=-p99 --limit 10 --columns endpoint_id,hour,p99
    kivi query invocations --measure calls=count --size 5m --slide 1m --start 2026-03-20T10:00:00Z --explain

Measures are written as those of ``kivi aggregate``; of an aggregate they are combine:MEASURE, or none for all.
"""

from __future__ import annotations

import argparse
from typing import Any

from kivi.cli.aggregate import pairs
from kivi.cli.text import times_of
from kivi.errors import InvalidArgument
from kivi.model.measure_text import any_group, operator_call
from kivi.model.predicate_text import split_names, type_names, where
from kivi.model.questions import question_of, windows_of

__all__ = ["asked"]


def asked(snap: Any, args: argparse.Namespace) -> Any:
    """The answer at a snapshot. Raises InvalidArgument, SchemaError."""
    schema = snap._table_schema(args.table)
    types = type_names(schema.description())
    hidden = {"_commit_ts": "int64", "_commit_time": "timestamp"}
    types = {**(hidden if types else {}), **types}
    measures = {n: operator_call(n, text, types) for n, text in pairs(args.measure, "--measure is name=sum(column)")}
    derived = dict(pairs(args.derived, "--derived is name=expression"))
    wanted: dict[str, Any] = {
        "group_by": [any_group(text, types, args.tz) for text in args.by],
        "measures": measures or None,
        "derived": derived or None,
    }
    windows = None
    if args.size is not None or args.session is not None:
        tz = args.tz if args.session is None else None
        windows = windows_of(args.size, args.slide, args.session, tz)
    elif args.slide is not None:
        raise InvalidArgument("--slide is of windows that have a --size")
    having = None
    if args.having:
        question = question_of(schema, **wanted, windows=windows)
        having = where(args.having, {name: str(question.type_of(name)) for name in question.columns}, "--having")
    return snap.query(
        args.table,
        **times_of(args),
        **wanted,
        where=where(args.where, types) if args.where else None,
        having=having,
        order_by=split_names(args.order_by) if args.order_by else (),
        limit=args.limit,
        offset=args.offset,
        columns=split_names(args.columns) if args.columns else None,
        windows=windows,
    )
