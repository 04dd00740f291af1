"""What a replicated log needs of the engine that keeps it: one stream of messages, numbered from 1 without a gap.

The engine may answer from any of its copies, and these may be behind, have holes and have wrong bytes; a message that
is published may be there, not be there, or be there twice, whoever says what. What is true of a stream is only this:
messages that were acknowledged are in every later answer of a sound copy, in one order. All else is checked by
``kivi.log.replicated``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Acknowledged", "Message", "Stream"]

Acknowledged = Callable[[BaseException | None], None]
"""Is called once, with None when a message is durable, or with what leaves that unknown."""


class Message(NamedTuple):
    """``time_us``: when the engine took it, microseconds since 1970 by the engine's clocks, which may go back."""

    sequence: int
    time_us: int
    data: bytes


class Stream(ABC):
    """One stream. Thread safe."""

    max_message_bytes: int
    """The limit of a message."""

    attempts: int
    """How many attempts of ``fetch`` ask every copy, or as good as surely."""

    on_news: Callable[[], None]
    """Called, by any thread, when there may be messages that were not read."""

    @property
    @abstractmethod
    def used(self) -> float:
        """Of the bytes that were meant for it, as was heard a moment ago: from 1 on what a client writes is refused."""

    @abstractmethod
    def publish(self, name: str, data: bytes, done: Acknowledged) -> None:
        """Appends a message; with a name that was used a moment ago the engine may leave it out. Does not wait.

        ``done`` is told DiskFull only of a message that is not there and never will be.
        """

    @abstractmethod
    def fetch(self, first: int, count: int, attempt: int = 0) -> Sequence[Message]:
        """Messages from ``first`` on, ascending, at most ``count``: as some copy has them, so perhaps with holes.

        ``attempt``: 0 for whichever copy is near, which may be behind; 1 to ``attempts`` where that had not what is
        wanted. Raises Unavailable.
        """

    @abstractmethod
    def bounds(self) -> tuple[int, int]:
        """The first and the last sequence that the leader has; (n + 1, n) if it has none. Raises Unavailable.

        They may be those of a moment ago: ``bounds_at``.
        """

    @property
    @abstractmethod
    def bounds_at(self) -> float:
        """When the leader was asked for what `bounds` gave last, in seconds of a clock that only moves forward."""

    @abstractmethod
    def check_copies(self) -> None:
        """Raises Unavailable if a copy cannot be asked now, or is behind: it may have what no other one has."""

    @abstractmethod
    def purge(self, below: int) -> None:
        """Deletes messages below this sequence. Raises Unavailable."""

    @abstractmethod
    def close(self) -> None:
        """Ends it: every ``done`` is called."""
