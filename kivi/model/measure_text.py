"""Measures and groups as people type them: ``sum(tokens * price)``, ``slot=ts/5m``."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

from kivi.errors import InvalidArgument
from kivi.model import surface
from kivi.model.declarations import TimeSlot, time_slot
from kivi.model.expressions import Expr
from kivi.model.given import shown
from kivi.model.predicate_text import expression, where
from kivi.model.schema import OperatorCall

__all__ = ["any_group", "group", "operator_call", "parts_of"]


def operator_call(name: str, text: str, types: Mapping[str, str]) -> OperatorCall:
    """``sum(tokens * price)``, ``argmax(trace_id, by=resp_time_us)``; or ``count``, ``sum:tokens * price``,
    ``argmax:trace_id:by=resp_time_us``; behind each ``where status >= 500``, or inside ``where=status >= 500``.

    ``types``: of the source's columns. Raises InvalidArgument, SchemaError.
    """
    what = f"measure {shown(name)}"
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
            free = [option for option in _places(operator) if option not in given]
            if not free:
                raise InvalidArgument(
                    f"{what} is {shown(text)}: write {operator}(COLUMN), and name options: option=value"
                )
            given[free[0]] = _option(word)
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
        reason = "it names no column" if isinstance(error, KeyError) else error
        raise InvalidArgument(
            f"{what} is {shown(text)}: write sum(COLUMN), count(), argmax(COLUMN, by=COLUMN) and the like ({reason})"
        ) from None


def _places(operator: str) -> list[str]:
    """The options of a measure that its function takes by their place, behind its source: ``n`` of ``largest``."""
    if operator not in surface.__all__:
        return []
    parameters = inspect.signature(getattr(surface, operator)).parameters.values()
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD][1:]


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
        raise InvalidArgument(f"{shown(text)} is no measure: write sum(COLUMN), or sum(COLUMN) where PREDICATE")
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


def any_group(text: str, types: Mapping[str, str], tz: str | None) -> str | TimeSlot | tuple[str, Expr]:
    """``group``, or a named expression: ``slow=resp_us > 1000``."""
    name, equals, rest = text.partition("=")
    if not equals or re.fullmatch(r"\w+/\w+", rest.strip()):
        return group(text, tz)
    what = f"group {shown(name.strip())}"
    try:
        return name.strip(), expression(rest, types, what)
    except InvalidArgument:
        return name.strip(), where(rest, types, what)
