"""``kivi aggregate NAME SOURCE ...``: creates online aggregates, and shows how far their backfill has come.

::

    kivi aggregate endpoint_5m invocations sum_resp_time=sum:resp_time_us invocations=count \\
        latency=quantiles:resp_time_us:accuracy=0.01 'errors=count where status >= 500' \\
        slowest=argmax:trace_id:by=resp_time_us 'cost=sum:tokens * price' \\
        --by endpoint_id --by slot=ts/5m --derived 'p99_us=quantile(latency, 0.99)'
    kivi aggregate calls invocations invocations=count --level customer --level application \\
        --slot 5m --slot 1month --tz Europe/Madrid

A measure is written as in Python, ``sum(tokens * price)``, ``quantiles(resp_time_us, accuracy=0.01)``,
``count(where=status >= 500)``; or for shells without quotes: the name of its function, its source and its options with
colons, and behind them ``where`` and a predicate.

The events that are there already are summed before the command returns, while writers go on; the server reports them
as it goes. An interruption ends the command, not the work: ``kivi tables`` says *building* until it is done.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from kivi.cli.append import Progress
from kivi.cli.text import print_value
from kivi.errors import InvalidArgument
from kivi.model.measure_text import group, operator_call, parts_of
from kivi.model.predicate_text import type_names

__all__ = ["aggregate", "group", "operator_call", "pairs", "parts_of"]


def aggregate(db: Any, args: argparse.Namespace) -> None:
    """Creates them on ``db`` and prints how many events were summed for them."""
    if bool(args.by) == bool(args.level or args.slot):
        raise InvalidArgument("say what to group by: --by for one aggregate, or --level and --slot for many")
    types = type_names(db.describe(args.source))
    usage = "a measure is name=sum(column)"
    measures = {name: operator_call(name, text, types) for name, text in pairs(args.measures, usage)}
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
