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
import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kivi.cli.append import Progress
from kivi.cli.text import print_value
from kivi.errors import InvalidArgument
from kivi.model import surface
from kivi.model.declarations import TimeSlot, time_slot
from kivi.model.predicate_text import expression, type_names, where
from kivi.model.schema import OperatorCall

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


def operator_call(name: str, text: str, types: Mapping[str, str]) -> OperatorCall:
    """``sum(tokens * price)``, ``argmax(trace_id, by=resp_time_us)``; or ``count``, ``sum:tokens * price``,
    ``argmax:trace_id:by=resp_time_us``; behind each ``where status >= 500``, or inside ``where=status >= 500``.

    ``types``: of the source's columns. Raises InvalidArgument, SchemaError.
    """
    what = f"measure {name!r}"
    operator, words, predicate = parts_of(text)
    given: dict[str, Any] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if equals and option.isidentifier() and not value.startswith("="):
            if option == "where":
                predicate = value
            else:
                given[option] = _option(value)
        elif "source" in given:
            raise InvalidArgument(f"{what} is {text!r}: write {operator}(COLUMN, option=value)")
        else:
            word = word[1:-1] if _QUOTED.fullmatch(word) else word
            given["source"] = word if word.isidentifier() else expression(word, types, what)
    if predicate:
        given["where"] = where(predicate, types, what)
    try:
        if operator == "combine":
            return surface.combine(given.pop("source"), **given)
        if operator in surface.__all__ and operator not in ("measure", "transactional"):
            made: OperatorCall = getattr(surface, operator)(given.pop("source", None), **given)
            return made
        return surface.measure(operator, given.pop("source"), **given)
    except (TypeError, KeyError) as error:
        raise InvalidArgument(
            f"{what} is {text!r}: write sum(COLUMN), count(), argmax(COLUMN, by=COLUMN) and the like ({error})"
        ) from None


_CALL: Final = re.compile(r"(?:kivi\.)?(\w+)\s*(?=\()")
_WORD: Final = re.compile(r":(?=\w)")
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


def parts_of(text: str) -> tuple[str, list[str], str]:
    """Of a measure: its function, its arguments, and the predicate behind ``where``, or an empty text."""
    called = _CALL.match(text)
    if called is None:
        call, _, predicate = text.partition(" where ")
        operator, *words = _WORD.split(call.strip())
        return operator, words, predicate
    words, depth, begin = [], 0, called.end() + 1
    plain = _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), text)
    for at in range(called.end(), len(text)):
        depth += (plain[at] in "([") - (plain[at] in ")]")
        if (depth == 1 and plain[at] == ",") or depth == 0:
            words.append(text[begin:at].strip())
            begin = at + 1
        if depth == 0:
            break
    rest, _, predicate = text[begin:].partition("where ")
    if depth or rest.strip():
        raise InvalidArgument(f"{text!r} is no measure: write sum(COLUMN), or sum(COLUMN) where PREDICATE")
    return called[1], [word for word in words if word], predicate


def _option(text: str) -> Any:
    """0.01, 10, true, or a name, which may be in quotes."""
    if _QUOTED.fullmatch(text):
        return text[1:-1]
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return {"true": True, "false": False}.get(text, text)


def group(text: str, tz: str | None) -> str | TimeSlot:
    """``endpoint_id``, or ``slot=ts/5m``."""
    match = re.fullmatch(r"(\w+)=(\w+)/(\w+)", text)
    return time_slot(match[2], match[3], name=match[1], tz=tz) if match else text
