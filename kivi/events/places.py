"""Places for settled files: a directory beside the engine, or the engine itself where there is no directory.

Files are written whole, once, and never again: a file is there before the batch that names it is written, and is
deleted when no manifest can name it any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kivi.encoding.keyspaces import event_data_key
from kivi.engine import Engine, WriteBatch
from kivi.errors import DiskFull, Unavailable
from kivi.runtime.files import is_no_space, sync_directory

__all__ = ["FOLDER", "Directory", "InEngine", "Place", "file_name"]

FOLDER: Final = "events"
"""In the store's directory."""


def file_name(table: int, number: int) -> str:
    """The path of a settled file below the directory of its store."""
    return f"{FOLDER}/{table}/{number}.parquet"


class Place(Protocol):
    """Where the settled files of one table lie."""

    @property
    def in_engine(self) -> bool:
        """Whether files are engine rows: written by the batch that names them, deleted as a block's data are."""

    def named(self, number: int) -> str:
        """The file's name, for people."""

    def path(self, number: int) -> str | None:
        """Where another reader finds the file in the file system; None: it is not there."""

    def write(self, batch: WriteBatch, number: int, data: Any) -> None:
        """Makes the file durable, or adds it to the batch that will name it. Raises DiskFull, Unavailable."""

    def made(self) -> None:
        """All files of a batch are written: makes their names durable."""

    def fill(self, number: int, nbytes: int, spans: Sequence[tuple[int, int]], into: memoryview) -> bool:
        """Reads these spans (offset, bytes) of the file to where they lie in it; False: it is missing or shorter.

        Raises OSError where it cannot be read.
        """

    def delete(self, numbers: Iterable[int]) -> None:
        """Deletes files; those that are gone already are passed over. Raises Unavailable."""

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Deletes whatever else is there: what a crash left. Raises Unavailable."""


@dataclass(frozen=True, slots=True)
class InEngine:
    """Files of a store in memory: they come and go with the engine's batches."""

    engine: Engine
    table: int
    in_engine: bool = True

    def named(self, number: int) -> str:
        return f"file {number}"

    def path(self, number: int) -> str | None:
        return None

    def write(self, batch: WriteBatch, number: int, data: Any) -> None:
        batch.put(event_data_key(self.table, number), bytes(data))

    def made(self) -> None:
        pass

    def fill(self, number: int, nbytes: int, spans: Sequence[tuple[int, int]], into: memoryview) -> bool:
        raw = self.engine.get(event_data_key(self.table, number))
        if raw is None or len(raw) != nbytes:
            return False
        for at, size in spans:
            into[at : at + size] = raw[at : at + size]
        return True

    def delete(self, numbers: Iterable[int]) -> None:
        pass

    def keep_only(self, numbers: Iterable[int]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Directory:
    """Files of a store on disk: ``root`` is the store's directory."""

    root: str
    table: int
    in_engine: bool = False

    def named(self, number: int) -> str:
        return self._path(number)

    def path(self, number: int) -> str | None:
        return os.path.abspath(self._path(number))

    def _path(self, number: int) -> str:
        return os.path.join(self.root, file_name(self.table, number))

    @property
    def _folder(self) -> str:
        return os.path.dirname(self._path(0))

    def write(self, batch: WriteBatch, number: int, data: Any) -> None:
        path = self._path(number)
        try:
            if not os.path.isdir(self._folder):
                os.makedirs(self._folder, exist_ok=True)
                sync_directory(os.path.dirname(self._folder))
                sync_directory(self.root)
            with open(path, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise _failed(path, error) from None

    def made(self) -> None:
        try:
            sync_directory(self._folder)
        except OSError as error:
            raise _failed(self._folder, error) from None

    def fill(self, number: int, nbytes: int, spans: Sequence[tuple[int, int]], into: memoryview) -> bool:
        try:
            handle = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(handle).st_size != nbytes:
                return False
            for at, size in spans:
                done = 0
                while done < size:
                    got = os.preadv(handle, [into[at + done : at + size]], at + done)
                    if not got:
                        return False
                    done += got
        finally:
            os.close(handle)
        return True

    def delete(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            _delete(self._path(number))

    def keep_only(self, numbers: Iterable[int]) -> None:
        if not os.path.isdir(self._folder):
            return
        kept = {os.path.basename(self._path(number)) for number in numbers}
        for name in os.listdir(self._folder):
            if name not in kept:
                _delete(os.path.join(self._folder, name))


def _delete(path: str) -> None:
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be deleted ({error.strerror}): this is tried again") from None


def _failed(path: str, error: OSError) -> Unavailable | DiskFull:
    if is_no_space(error):
        return DiskFull(f"no disk space for {path}: make room; its events stay where they were meanwhile", path=path)
    return Unavailable(f"{path} cannot be written ({error.strerror}): its events stay where they were meanwhile")
