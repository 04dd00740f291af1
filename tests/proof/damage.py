"""Damage on disk: a flipped byte anywhere, a file cut or removed. Never a wrong number.

A store that was damaged while nobody had it open either refuses to open and names the file, or a read of what is
damaged is DataLoss, or every answer is what it was (the byte was in room that nothing uses, or in a copy). And
``kivi verify``, which reads everything, must find whatever an opening or a read finds.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, Literal

import kivi
from kivi.cli.commands import main
from kivi.errors import DataLoss, FormatTooNew, NotAStore
from tests.oracle import Mismatch
from tests.proof.workloads import TABLES

__all__ = ["contents", "cut", "damaged", "files_of", "flip"]

Found = Literal["refused", "unreadable", "same"]


def contents(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Every table of a store, as a reader sees it; nothing is folded or closed in good order."""
    db = kivi.open(path, background=False)
    try:
        with db.snapshot() as snap:
            return {table: list(snap.scan(table)) for table in TABLES}
    finally:
        db.store.crash()


def files_of(path: Path) -> list[Path]:
    """What a store consists of, without RocksDB's text logs and locks."""
    return sorted(
        file.relative_to(path)
        for file in path.rglob("*")
        if file.is_file() and file.stat().st_size and not file.name.startswith("LOG") and file.name != "LOCK"
    )


def flip(file: Path, rng: random.Random) -> str:
    """Changes one bit among the bytes that are not zero, most of which are in use."""
    data = bytearray(file.read_bytes())
    used = [i for i, byte in enumerate(data) if byte]
    at = rng.choice(used)
    data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return f"byte {at}"


def cut(file: Path, rng: random.Random) -> str:
    """Ends the file early; now and then removes it."""
    if rng.random() < 0.3:
        file.unlink()
        return "removed"
    size = rng.randrange(file.stat().st_size)
    with file.open("r+b") as open_file:
        open_file.truncate(size)
    return f"cut at {size}"


def damaged(whole: Path, expected: dict[str, Any], name: Path, how: Any, place: Path, rng: random.Random) -> Found:
    """What became of one piece of damage. Raises Mismatch for a wrong number, or damage that verify misses."""
    shutil.copytree(whole, place)
    what = f"{name}: {how(place / name, rng)}"
    beside = place.with_name(place.name + " verify")
    shutil.copytree(place, beside)
    found: Found
    try:
        if (got := contents(place)) != expected:
            raise Mismatch(f"a wrong answer after {what}: {got}")
        found = "same"
    except (NotAStore, FormatTooNew):
        found = "refused"
    except DataLoss as error:
        found = "refused" if error.path else "unreadable"
    before = {file: (beside / file).read_bytes() for file in files_of(beside)}
    code = main(["verify", str(beside)])
    if {file: (beside / file).read_bytes() for file in files_of(beside)} != before:
        raise Mismatch(f"verify wrote something: {what}")
    if not code and found != "same":
        raise Mismatch(f"verify does not see what makes it {found}: {what}")
    shutil.rmtree(place)
    shutil.rmtree(beside)
    return found
