"""What every room that writes files has to know of a disk: when it is full, and what a crash leaves of a directory."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

__all__ = ["is_no_space", "sync_directory", "write_json"]


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


def write_json(path: str, content: Any, *, partial: str) -> None:
    """Makes the file durable, in the place of what stood there, whole or not at all; until then it is ``partial``, a
    path in the same directory. Raises OSError."""
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    sync_directory(os.path.dirname(path))
