"""What every room that writes files has to know of a disk: when it is full, and how names on it become durable."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["is_no_space", "sync_directory"]


def is_no_space(error: OSError) -> bool:
    """The disk, the quota or the file size limit is exhausted; the same call may succeed later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_directory(path: str | Path) -> None:
    """Makes the names in a directory durable; or the bytes of a file, which is the same to the system.

    Raises OSError.
    """
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
