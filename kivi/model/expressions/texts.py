"""``startswith``, ``contains`` and ``matches``: of one text, and which patterns there are.

Patterns are RE2's, and the engine is the one that Arrow brings, for a column as for one text: there is no second one
that could disagree. RE2 never goes back in the text, so a match takes time in proportion to it, whatever the pattern.
A pattern matches if some part of the text does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kivi.errors import InvalidArgument
from kivi.model.types import shown

__all__ = ["HAS", "check_pattern", "literal_prefix", "prefix_end"]

_PATTERN_MAX: Final = 1_000
_SPECIAL: Final = frozenset("\\.+*?()|[]{}^$")
_SURROGATES: Final = (0xD800, 0xE000)


def check_pattern(pattern: str) -> None:
    """Raises InvalidArgument for one that RE2 does not take."""
    if len(pattern) > _PATTERN_MAX:
        raise InvalidArgument(f"a pattern has at most {_PATTERN_MAX:,} characters, not {len(pattern):,}")
    try:
        _matches("", pattern)
    except ValueError as error:  # of Arrow, or text that is no UTF-8
        reason = str(error).removeprefix("Invalid regular expression: ")
        raise InvalidArgument(
            f"{shown(pattern)} is not a pattern of RE2 ({reason}): see https://github.com/google/re2/wiki/Syntax"
        ) from None


def _matches(text: str, pattern: str) -> bool:
    import pyarrow as pa  # not before there is a pattern: this is the one use of Arrow in the room
    import pyarrow.compute as pc

    found: bool = pc.match_substring_regex(pa.array([text], pa.string()), pattern)[0].as_py()
    return found


HAS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "startswith": lambda text, prefix: bool(text.startswith(prefix)),
    "contains": lambda text, part: part in text,
    "matches": _matches,
}


def prefix_end(prefix: Any) -> Any:
    """The least text, or bytes, that is greater than all that begin with ``prefix``; None: there is none."""
    if isinstance(prefix, bytes):
        kept = prefix.rstrip(b"\xff")
        return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    return kept[:-1] + chr(_SURROGATES[1] if following == _SURROGATES[0] else following)


def literal_prefix(pattern: str) -> str:
    """What every text that matches begins with, as far as the pattern says so plainly: ``^/v1/(a|b)`` says "/v1/"."""
    if not pattern.startswith("^") or _has_branches(pattern):
        return ""
    length = next((i for i, c in enumerate(pattern[1:]) if c in _SPECIAL), len(pattern) - 1)
    found, behind = pattern[1 : 1 + length], pattern[1 + length : 2 + length]
    return found[:-1] if behind and behind in "*?{" else found


def _has_branches(pattern: str) -> bool:
    """Whether a "|" may stand outside of parentheses: there the text may begin otherwise."""
    if "|" not in pattern:
        return False
    if "\\" in pattern or "[" in pattern:  # parentheses may be quoted
        return True
    depth = 0
    for c in pattern:
        depth += (c == "(") - (c == ")")
        if c == "|" and depth == 0:
            return True
    return False
