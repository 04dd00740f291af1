"""What a crash of the machine leaves of a directory."""

from __future__ import annotations

import os

__all__ = ["sync_directory"]


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Makes durable which names a directory has, or what a file holds. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
