"""Directories that a command makes: each is there whole, and durable, or not at all.

They are written beside the name that they are to have (``NAME.part-...``), and get it when all of it is synced. What
fails, or is interrupted, leaves nothing; a process that is killed leaves the directory beside it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from kivi.errors import InvalidArgument
from kivi.model.given import shown
from kivi.model.names import is_text

__all__ = ["check_new", "made_whole"]


def check_new(to: str) -> Path:
    """Raises InvalidArgument for something that is there, unless it is an empty directory."""
    if "://" in to or not is_text(to):
        raise InvalidArgument(f"{shown(to)} is no directory of this machine: name one that is new, or empty")
    target = Path(to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidArgument(f"{to} is there already: name a directory that is new, or empty")
    return target


@contextlib.contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """The path to make the directory at. Raises InvalidArgument where the system does not let it be written."""
    from kivi.runtime.files import sync_directory

    made = part = target.with_name(f"{target.name}.part-{secrets.token_hex(4)}")
    try:
        yield part
        for folder, _, names in os.walk(part):
            for name in (*names, ""):
                sync_directory(os.path.join(folder, name))
        if target.exists():
            target.rmdir()
        made = part.rename(target)
        sync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            raise InvalidArgument(f"cannot write {target}: {error.strerror or error}") from None
        raise
