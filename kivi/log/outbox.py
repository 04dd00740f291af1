"""What a gateway has published and has not seen come back: it is published again until it does.

A message that the log has no room for was never there, unless an earlier attempt is unknown; then its frame is replaced
by an empty one with the same id, so that its number in the gateway's count comes, and whoever waits is told at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kivi.errors import DiskFull, KiviError, ResourceExhausted
from kivi.log.frames import NO_HASH, Frame, FrameId, messages_of
from kivi.log.stream import Stream

__all__ = ["OUTBOX_BYTES", "Outbox"]

OUTBOX_BYTES: Final = 256 << 20


@dataclass(slots=True)
class _Waiting:
    messages: list[bytes]
    nbytes: int
    flying: set[int] = field(default_factory=set)
    doubtful: bool = False
    """An attempt has ended and nobody knows how."""
    round: int = 0
    """How often what came of it had ceased to count: the log's servers would leave out a name that they know."""


class Outbox:
    """Thread safe. ``refused(n, error)`` is called, by any thread, for a frame that the log had no room for."""

    def __init__(self, stream: Stream, generation: bytes, node: int, boot: int) -> None:
        self._stream, self._generation, self._node, self._boot = stream, generation, node, boot
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._nbytes = 0
        self._n = 0
        self.refused: Callable[[int, KiviError], None] = lambda n, error: None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def add(self, make: Callable[[FrameId], Frame], on_id: Callable[[int], None]) -> None:
        """Publishes what ``make`` gives for the next id; ``on_id`` is told its n before it can come back.

        Raises ResourceExhausted if too much is on its way, and what ``make`` raises; then nothing was published.
        """
        with self._lock:
            if self._nbytes > OUTBOX_BYTES:
                raise ResourceExhausted(
                    f"{self._nbytes} bytes are on their way to the log; nothing was applied: try again"
                )
            id_ = FrameId(self._node, self._boot, self._n + 1)
            self._put(id_.n, make(id_))
            self._n = id_.n
            on_id(id_.n)
        self._publish(id_.n)

    def _put(self, n: int, frame: Frame) -> None:
        messages = messages_of(frame, self._stream.max_message_bytes)
        self._waiting[n] = _Waiting(messages, sum(map(len, messages)))
        self._nbytes += self._waiting[n].nbytes

    def _publish(self, n: int) -> None:
        with self._lock:
            waiting = self._waiting.get(n)
            if waiting is None:
                return
            due = [i for i in range(len(waiting.messages)) if i not in waiting.flying]
            waiting.flying.update(due)
        for i in due:
            name = f"{self._node:x}.{self._boot:x}.{n:x}.{i:x}.{waiting.round:x}"
            self._stream.publish(name, waiting.messages[i], partial(self._acknowledged, n, i, waiting))

    def _acknowledged(self, n: int, i: int, waiting: _Waiting, error: BaseException | None) -> None:
        """One that is durable stays among those that fly until it is seen: it need not be sent again."""
        if error is None:
            return
        with self._lock:
            waiting.flying.discard(i)
            if not isinstance(error, DiskFull):
                waiting.doubtful = True
                return
            if waiting.doubtful or self._waiting.get(n) is not waiting:
                return  # the next attempt may find room
            self._nbytes -= waiting.nbytes
            self._put(n, Frame(self._generation, FrameId(self._node, self._boot, n), 0, 0, 0, NO_HASH))
            self._waiting[n].round = waiting.round + 1  # parts of what it replaces have been taken under their names
        self.refused(n, error)

    def retry(self, *, all_of_them: bool = False) -> int:
        """Publishes again what is not known to be there; ``all_of_them``: also what is on its way. How many frames."""
        with self._lock:
            if all_of_them:
                for waiting in self._waiting.values():
                    waiting.flying.clear()
                    waiting.doubtful = True
            due = [n for n, waiting in self._waiting.items() if len(waiting.flying) < len(waiting.messages)]
        for n in due:
            self._publish(n)
        return len(due)

    def again(self, n: int) -> None:
        """What has come of it does not count any longer: all of it is due again, with ``retry``."""
        with self._lock:
            if (waiting := self._waiting.get(n)) is not None:
                waiting.flying.clear()
                waiting.round += 1

    def arrived(self, n: int) -> None:
        """It has come back."""
        with self._lock:
            if (waiting := self._waiting.pop(n, None)) is not None:
                self._nbytes -= waiting.nbytes
