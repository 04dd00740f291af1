"""Files that another process reads while they are being made: a name appears when its content is complete.

Spark's file stream lists a directory and reads what it has not read before. It passes over names that begin with a
point, so a file is written under such a name and then renamed, which is atomic within a directory. Names sort in the
order of landing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["land", "landed"]


def land(folder: Path, name: str, lines: Iterable[str]) -> Path:
    """A text file ``folder/name``, all of it or nothing. The folder must be there."""
    hidden, final = folder / f".{name}.part", folder / name
    with open(hidden, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
    os.rename(hidden, final)
    return final


def landed(folder: Path) -> list[Path]:
    """The complete files, in the order of landing."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
