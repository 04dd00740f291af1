"""Power loss, which ``kill -9`` is not: what was written and never synced may be gone, in part, in any order.

A server runs with ``journal.c`` preloaded and is killed. From the journal the directory is made again as it may be
found after the power came back, as often as wanted:

::

    a file       what it held at its last completed sync; of the later writes any 4 KiB pages, of the last one a part of
                 a page too (a torn write); of later changes of its size any beginning
    a directory  the names at its last completed sync; of later changes (create, rename, unlink, link) any beginning

Directories are independent of each other, and a file's sync does not keep its name: harsher than most file systems.
What is there before the process starts is taken as synced.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

__all__ = ["Disk", "environment", "library"]

PAGE: Final = 4_096
_HEADER: Final = struct.Struct("<IIQQQQQ")


class Kind(IntEnum):
    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    ALLOCATE = 4
    SYNC_BEGIN = 5
    SYNC_END = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10
    LINK = 11


def library(directory: Path) -> Path | None:
    """The preloaded library, compiled into ``directory``; None where there is no C compiler."""
    out = directory / "journal.so"
    source = Path(__file__).with_name("journal.c")
    try:
        subprocess.run(
            ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(out), str(source), "-lpthread"],
            check=True,
        )
    except FileNotFoundError:
        return None
    return out


def environment(library: Path, root: Path, journal: Path, fail: tuple[int, int, bool] | None = None) -> dict[str, str]:
    """What a process needs to be journaled. ``fail``: (number, errno, whether it lasts) of a call that fails."""
    out = {"LD_PRELOAD": str(library), "KIVI_JOURNAL_ROOT": str(root), "KIVI_JOURNAL": str(journal)}
    return out if fail is None else {**out, "KIVI_FAIL": f"{fail[0]} {fail[1]} {int(fail[2])}"}


@dataclass
class Change:
    """To a file: bytes at an offset, or (``data`` None) a new size, which ALLOCATE never makes smaller."""

    kind: Kind
    offset: int
    data: bytes


@dataclass
class File:
    synced: bytearray = field(default_factory=bytearray)
    since: list[Change] = field(default_factory=list)


@dataclass
class Rename:
    """To the names of one directory or two; ``file`` is what the name stands for, None for a directory."""

    kind: Kind
    path: str
    target: str
    file: File | None
    directories: tuple[str, ...]
    synced: bool = False


class Disk:
    """What is known to be on the disk, and what may be."""

    def __init__(self, root: Path) -> None:
        """Takes what is there as synced. Call it before the process starts."""
        self.root = os.path.realpath(root)
        self._inodes: dict[int, File] = {}
        self._directories: dict[int, str] = {}
        self._names: dict[str, File | None] = {}
        self._changes: list[Rename] = []
        self._syncs: dict[int, tuple[int, int]] = {}
        self.counted: dict[Kind, int] = defaultdict(int)
        for directory, _, files in os.walk(self.root):
            self._directories[os.stat(directory).st_ino] = directory
            self._names[directory] = None
            for name in files:
                path = os.path.join(directory, name)
                file = File(bytearray(Path(path).read_bytes()))
                self._inodes[os.stat(path).st_ino] = file
                self._names[path] = file

    # -- the journal ----------------------------------------------------------------------------

    def read(self, journal: Path) -> None:
        """Everything that the process did. A record that was cut off is one that did not happen."""
        for kind, inode, offset, number, first, second in _records(journal.read_bytes()):
            self.counted[kind] += 1
            match kind:
                case Kind.WRITE | Kind.TRUNCATE | Kind.ALLOCATE:
                    if (file := self._inodes.get(inode)) is not None:
                        file.since.append(Change(kind, offset, first))
                case Kind.SYNC_BEGIN:
                    file = self._inodes.get(inode)
                    self._syncs[number] = (inode, len(file.since) if file is not None else len(self._changes))
                case Kind.SYNC_END:
                    self._sync(*self._syncs.pop(number))
                case _:
                    self._name(kind, inode, os.fsdecode(first), os.fsdecode(second))

    def _name(self, kind: Kind, inode: int, path: str, target: str) -> None:
        if kind is Kind.CREATE:
            self._directories.pop(inode, None)
            self._inodes[inode] = File()
        elif kind is Kind.MKDIR:
            self._inodes.pop(inode, None)
            self._directories[inode] = path
        elif kind is Kind.RENAME and inode in self._directories:
            for known, name in list(self._directories.items()):
                if name == path or name.startswith(path + "/"):
                    self._directories[known] = target + name[len(path) :]
        directories = tuple({os.path.dirname(name) for name in (path, target) if name})
        self._changes.append(Rename(kind, path, target, self._inodes.get(inode), directories))

    def _sync(self, inode: int, position: int) -> None:
        if (file := self._inodes.get(inode)) is not None:
            for change in file.since[:position]:
                _apply(file.synced, change)
            del file.since[:position]
            for number, (other, at) in self._syncs.items():  # others that began meanwhile cover less now
                if other == inode:
                    self._syncs[number] = (other, max(0, at - position))
        elif (directory := self._directories.get(inode)) is not None:
            for renamed in self._changes[:position]:
                renamed.synced = renamed.synced or directory in renamed.directories

    @property
    def unsynced(self) -> int:
        """Changes that a power loss may take: 0 would make it nothing but a kill."""
        return sum(len(file.since) for file in self._inodes.values()) + sum(not c.synced for c in self._changes)

    # -- after the power came back --------------------------------------------------------------

    def restore(self, out: Path, rng: random.Random | None) -> None:
        """Makes the directory ``out`` as it may be found; without ``rng`` as it was when the process ended."""
        kept: dict[str, int] = {}
        for directory in {d for change in self._changes for d in change.directories}:
            theirs = [i for i, change in enumerate(self._changes) if directory in change.directories]
            loose = [i for i in theirs if not self._changes[i].synced]
            count = rng.choice((0, len(loose), rng.randint(0, len(loose)))) if rng is not None else len(loose)
            kept[directory] = loose[count - 1] if count else -1
        names = dict(self._names)
        for i, change in enumerate(self._changes):
            if change.synced or all(i <= kept[directory] for directory in change.directories):
                _rename(names, change)
        survival = rng.choice((0.0, 0.5, 0.9, 1.0)) if rng is not None else 1.0
        contents: dict[int, bytes] = {}
        for path, file in sorted(names.items()):
            place = out / os.path.relpath(path, self.root)
            if os.path.dirname(path) not in names and path != self.root:
                continue  # its directory was lost
            if file is None:
                place.mkdir(parents=True, exist_ok=True)
            else:
                if id(file) not in contents:
                    contents[id(file)] = _surviving(file, survival, rng) if rng is not None else _all(file)
                place.write_bytes(contents[id(file)])


def _records(data: bytes) -> Iterator[tuple[Kind, int, int, int, bytes, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        kind, _, inode, offset, number, first, second = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if at + first + second > len(data):
            return
        yield Kind(kind), inode, offset, number, data[at : at + first], data[at + first : at + first + second]
        at += first + second


def _apply(content: bytearray, change: Change) -> None:
    match change.kind:
        case Kind.WRITE:
            end = change.offset + len(change.data)
            if len(content) < end:
                content.extend(bytes(end - len(content)))
            content[change.offset : end] = change.data
        case Kind.TRUNCATE if len(content) > change.offset:
            del content[change.offset :]
        case _:
            content.extend(bytes(max(0, change.offset - len(content))))


def _all(file: File) -> bytes:
    content = bytearray(file.synced)
    for change in file.since:
        _apply(content, change)
    return bytes(content)


def _surviving(file: File, survival: float, rng: random.Random) -> bytes:
    content = bytearray(file.synced)
    sizes = [change for change in file.since if change.kind is not Kind.WRITE]
    whole = set(map(id, sizes[: rng.randint(0, len(sizes))]))
    for i, change in enumerate(file.since):
        if change.kind is not Kind.WRITE:
            if id(change) in whole:
                _apply(content, change)
            continue
        at = change.offset
        while at < change.offset + len(change.data):
            end = min((at // PAGE + 1) * PAGE, change.offset + len(change.data))
            if rng.random() < survival:
                part = change.data[at - change.offset : end - change.offset]
                if i == len(file.since) - 1 and rng.random() < 0.3:
                    part = part[: rng.randint(0, len(part))]
                _apply(content, Change(Kind.WRITE, at, part))
            at = end
    return bytes(content)


def _rename(names: dict[str, File | None], change: Rename) -> None:
    """One change of names; nothing happens if what it starts from was lost."""
    path, target = change.path, change.target
    match change.kind:
        case Kind.CREATE | Kind.MKDIR:
            names[path] = change.file
        case Kind.UNLINK | Kind.RMDIR:
            names.pop(path, None)
        case Kind.LINK:
            if path in names:
                names[target] = names[path]
        case Kind.RENAME if path in names:
            if names[path] is not None:
                names[target] = names.pop(path)
                return
            for name in [name for name in names if name == path or name.startswith(path + "/")]:
                names[target + name[len(path) :]] = names.pop(name)
