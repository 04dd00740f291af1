"""What was opened before ``os.fork()`` is the parent's: in the child it says so, instead of waiting for ever.

A child has the parent's handles and none of its threads. Whoever asks through one of them would wait for an answer
that nobody reads, or for a lock that a thread held which is not there.
"""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

__all__ = ["register_fork_handler"]


class _Forked(Protocol):
    def forked(self) -> None:
        """Called in the child, before anything else runs there."""


_known: Final[weakref.WeakSet[_Forked]] = weakref.WeakSet()


def register_fork_handler(owner: _Forked) -> None:
    """Calls ``owner.forked()`` in every child from now on, for as long as somebody else holds the owner."""
    _known.add(owner)


def _tell() -> None:
    for owner in list(_known):
        owner.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
