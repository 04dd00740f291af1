"""What every room that writes files has to know of a disk: when it is full, and what a crash leaves of a directory."""

from __future__ import annotations

import errno
import os

__all__ = ["is_no_space", "sync_directory"]


def is_no_space(error: OSError) -> bool:
    """The disk, the quota or the file size limit is exhausted; the same call may succeed later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Makes durable which names a directory has, or what a file holds. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
