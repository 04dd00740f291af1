"""Which events were taken lately, by any node of a cluster: what one that takes them asks before it commits.

It answers as ``kivi.arrow.id_window.Window`` does, which is one process's own, and is never told: a commit that says
``once`` is judged by it, and what it brings is known from there on (``kivi.mvcc.deduplication``).
"""

from __future__ import annotations

from dataclasses import dataclass

from kivi.arrow.id_window import Ids, Window
from kivi.delta.runs import Array
from kivi.mvcc.record import Once
from kivi.mvcc.replicated import ReplicatedCommitter

__all__ = ["SharedWindow"]


@dataclass(frozen=True, slots=True)
class SharedWindow:
    """Thread safe. ``ids_max``: so many may be known before this node takes no more."""

    committer: ReplicatedCommitter
    once: Once
    ids_max: int

    def __len__(self) -> int:
        with self.committer.entry_lock:
            return len(self.committer.deduplication.window(self.once) or ())

    def known(self, ids: Ids) -> Array:
        """Which of these were taken within the window."""
        with self.committer.entry_lock:
            return self.committer.deduplication.known(self.once, ids, self.committer.now_us())

    def check_room(self, more: int) -> None:
        """Raises ResourceExhausted or InvalidArgument as ``Window`` does."""
        with self.committer.entry_lock:
            window = self.committer.deduplication.window(self.once)
            if window is None:
                window = Window(self.once.window_us / 1_000_000, self.ids_max)
            window.check_room(more, self.ids_max)
