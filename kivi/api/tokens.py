"""Request tokens that the library makes (R16)."""

from __future__ import annotations

import os
import secrets
import time
from typing import Final

__all__ = ["new_token"]

_RANDOM: Final[list[str]] = []
"""Drawn ahead, since most commits need one and a call of the system costs as much as the rest of a token."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_RANDOM.clear)  # a fork must not hand out what its parent will


def new_token() -> str:
    """A request token. It says when it was issued, so that "too old to be remembered" can be told (R16)."""
    try:
        random = _RANDOM.pop()
    except IndexError:
        drawn = secrets.token_hex(12 * 256)
        _RANDOM.extend([drawn[i : i + 24] for i in range(0, len(drawn), 24)])
        random = _RANDOM.pop()
    return f"k1-{time.time_ns() // 1000}-{random}"
