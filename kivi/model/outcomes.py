"""The answers of ``outcome(token)`` when there is no commit timestamp to give."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

__all__ = ["ABORTED", "UNKNOWN", "NoCommit", "Outcome"]


class NoCommit(Enum):
    """The two answers that are not a timestamp."""

    ABORTED = "aborted"
    """It did not happen, and an attempt that is still on its way never will."""
    UNKNOWN = "unknown"
    """Not decided yet, or issued too long ago to be remembered: ask again, or look at the data."""

    def __repr__(self) -> str:
        return f"kivi.{self.name}"


ABORTED: Final = NoCommit.ABORTED
UNKNOWN: Final = NoCommit.UNKNOWN
Outcome = int | Literal[NoCommit.ABORTED, NoCommit.UNKNOWN]
