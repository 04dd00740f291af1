"""``kivi alter TABLE --add NAME=... ...``: adds columns to a table, or measures to an aggregate, while it is used.

::

    kivi alter accounts --add nickname=string --add visits=sum:int64
    kivi alter endpoint_5m --add slowest=max:resp_time_us --derived 'worst_ms=slowest / 1000'

The events that are there already are summed for new measures before the command returns, as for ``kivi aggregate``;
with ``--later-only`` they have the events from now on.
"""

from __future__ import annotations

import argparse
from typing import Any

from kivi.cli.aggregate import OPERATORS, operator_call, pairs
from kivi.cli.append import Progress
from kivi.cli.text import print_value
from kivi.errors import InvalidArgument

__all__ = ["alter"]


def alter(db: Any, args: argparse.Namespace) -> None:
    """Adds them on ``db`` and prints what was added."""
    added = pairs(args.add, "--add is name=type, or name=sum:column for a measure")
    if not added:
        raise InvalidArgument("nothing to add: name columns or measures, like --add nickname=string")
    if db.describe(args.table)["kind"] == "aggregate":
        measures = {name: operator_call(name, text) for name, text in added}
        derived = dict(pairs(args.derived, "--derived is name=expression"))
        with Progress(f"{args.table} <- {', '.join(measures)}") as progress:
            db.alter_aggregate(
                args.table,
                measures,
                backfill=not args.later_only,
                derived=derived or None,
                progress=lambda done, total: progress.update(done, done, total),
            )
    else:
        if args.derived or args.later_only:
            raise InvalidArgument(f"{args.table!r} is no aggregate: --derived and --later-only are for measures")
        db.alter_table(args.table, {name: declared(name, text) for name, text in added})
    print_value({"table": args.table, "added": ", ".join(name for name, _ in added)}, args.output)


def declared(name: str, text: str) -> Any:
    """``int64``, or ``sum:int64`` for a column of deltas."""
    return operator_call(name, text) if text.partition(":")[0] in OPERATORS else text
