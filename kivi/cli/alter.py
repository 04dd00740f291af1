"""``kivi alter TABLE --add NAME=... ...``: adds columns to a table, or measures to an aggregate, while it is used.

::

    kivi alter accounts --add nickname=string --add visits=sum:int64
    kivi alter endpoint_5m --add slowest=max:resp_time_us --derived 'worst_ms=slowest / 1000'
    kivi alter endpoint_5m --role endpoints                      what it is of, for the console

The events that are there already are summed for new measures before the command returns, as for ``kivi aggregate``;
with ``--later-only`` they have the events from now on.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from kivi.cli.aggregate import pairs
from kivi.cli.append import Progress
from kivi.cli.text import print_value
from kivi.errors import InvalidArgument
from kivi.model.measure_text import operator_call
from kivi.model.measuring import PLAIN
from kivi.model.predicate_text import type_names
from kivi.model.schema import OperatorCall

__all__ = ["alter", "declared"]


def alter(db: Any, args: argparse.Namespace) -> None:
    """Adds them on ``db`` and prints what was added."""
    added = pairs(args.add, "--add is name=type, or name=sum(column) for a measure")
    if args.role is not None:
        db.alter_table(args.table, role=args.role)
        if not added:
            print_value({"table": args.table, "role": args.role}, args.output)
            return
    if not added:
        raise InvalidArgument("nothing to add: name columns or measures, like --add nickname=string, or a --role")
    found = db.describe(args.table)
    if found["kind"] == "aggregate":
        types = type_names(db.describe(found.get("declared_source") or found["source"]))
        measures = {name: operator_call(name, text, types) for name, text in added}
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
        db.alter_table(args.table, {name: declared(text) for name, text in added})
    print_value({"table": args.table, "added": ", ".join(name for name, _ in added)}, args.output)


def declared(text: str) -> Any:
    """``int64``, or ``sum(int64)`` or ``sum:int64`` for a column of deltas."""
    match = re.fullmatch(r"(\w+)(?::(.*)|\((.*)\))", text)
    if match is None or match[1] not in PLAIN:
        return text
    return OperatorCall(match[1], match[2] or match[3] or None)
