"""Committing where another process commits: not at all. What a follower has instead is what its owner has committed.

Verdicts, numbers and times are in the records (``kivi.store.following`` enters them), so nothing is judged here.
Whoever asks for a commit is told where to commit. How old an answer may be is known exactly: what the owner had
acknowledged when its mark was read is applied once W has come to that mark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from kivi.errors import InvalidArgument
from kivi.log.followed import FollowedLog
from kivi.mvcc.commit import Committer
from kivi.mvcc.groups import Outcome, Part
from kivi.mvcc.record import Other

__all__ = ["FollowingCommitter"]

_READS_ONLY: Final = "this process follows a store and only reads: commit at the server that owns it"


class FollowingCommitter(Committer):
    """Thread safe."""

    log: FollowedLog

    def submit(self, parts: Sequence[Part], *, may_wait: bool = True) -> Sequence[Part]:
        for part in parts:
            for tag in part.tags:
                part.answer.apart(tag, Outcome(None, InvalidArgument(_READS_ONLY)))
        return ()

    def log_other(self, other: Other, done: Callable[[BaseException | None, int], None]) -> None:
        raise InvalidArgument(_READS_ONLY)

    def fence(self, token: str) -> bool:
        raise InvalidArgument(_READS_ONLY)

    def staleness(self) -> tuple[float, int]:
        return time.monotonic() - self.log.checked_at, self.watermark.value

    def newest(self, timeout_s: float) -> int:
        return self.log.mark().sequence  # whoever asks waits until the watermark is there

    def newest_until(self, time_us: int, timeout_s: float) -> int:
        return self.newest(timeout_s)  # what its owner has not acknowledged yet, only the owner knows of
