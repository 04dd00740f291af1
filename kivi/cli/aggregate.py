"""``kivi aggregate NAME SOURCE ...``: creates online aggregates, and shows how far their backfill has come.

::

    kivi aggregate endpoint_5m invocations --by endpoint_id --by slot=ts/5m \\
        sum_resp_time=sum:resp_time_us invocations=count --derived 'avg_resp_time=sum_resp_time / invocations'
    kivi aggregate calls invocations --level customer --level application --slot 5m --slot 1month \\
        --tz Europe/Madrid invocations=count

The events that are there already are summed before the command returns, while writers go on; the server reports them
as it goes. An interruption ends the command, not the work: ``kivi tables`` says *building* until it is done.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, Final, cast

from kivi.cli.append import Progress
from kivi.cli.text import print_value
from kivi.errors import InvalidArgument
from kivi.model.declarations import TimeSlot, time_slot
from kivi.model.schema import OperatorCall

__all__ = ["aggregate"]

OPERATORS: Final = ("sum", "count", "min", "max", "combine")


def aggregate(db: Any, args: argparse.Namespace) -> None:
    """Creates them on ``db`` and prints how many events were summed for them."""
    if bool(args.by) == bool(args.level or args.slot):
        raise InvalidArgument("say what to group by: --by for one aggregate, or --level and --slot for many")
    measures = {name: operator_call(name, text) for name, text in pairs(args.measures, "a measure is name=sum:column")}
    derived = dict(pairs(args.derived, "--derived is name=expression"))
    group_by = [group(text, args.tz) for text in args.by]
    levels = [[column.strip() for column in level.split(",")] for level in args.level]
    names = [args.name]
    summed = 0
    with Progress(f"{args.name} <- {args.source}") as progress:

        def report(done: int, total: int) -> None:
            nonlocal summed
            summed = done
            progress.update(done, done, total)

        contents = (measures or None, derived or None, args.history)
        if levels or args.slot:
            names = db.create_aggregates(
                args.name, args.source, levels, args.slot, *contents, args.tz, report, retention=args.retention
            )
        else:
            db.create_aggregate(args.name, args.source, group_by, *contents, report, retention=args.retention)
    print_value({"aggregate": ", ".join(names), "events": summed}, args.output)


def pairs(words: Iterable[str], usage: str) -> list[tuple[str, str]]:
    found = [word.partition("=") for word in words]
    for (name, _, text), word in zip(found, words, strict=True):
        if not name or not text:
            raise InvalidArgument(f"{word!r}: {usage}")
    return [(name.strip(), text.strip()) for name, _, text in found]


def operator_call(name: str, text: str) -> OperatorCall:
    """``sum:resp_time_us`` or ``count``."""
    operator, _, column = text.partition(":")
    if operator not in OPERATORS or (not column and operator != "count"):
        raise InvalidArgument(
            f"measure {name!r} is {text!r}: write sum:column, min:column, max:column, count or count:column, or, over "
            "an aggregate, combine:measure"
        )
    return OperatorCall(cast(Any, operator), column or None)


def group(text: str, tz: str | None) -> str | TimeSlot:
    """``endpoint_id``, or ``slot=ts/5m``."""
    match = re.fullmatch(r"(\w+)=(\w+)/(\w+)", text)
    return time_slot(match[2], match[3], name=match[1], tz=tz) if match else text
