"""An object store: immutable objects below one URL, written whole, read back in ranges. Any that ``pyarrow.fs`` knows.

::

    s3://bucket/prefix?region=eu-west-1                 gs://, abfs://, hdfs:// likewise; options as pyarrow has them
    file:///mnt/archive                                 a directory: a disk of its own, or a network's

A directory may be there while the disk that belongs there is not. So the first folder of each key is made by ``make``
alone, and where it is missing later, whatever is below is Unavailable: nothing is written there, and nothing is lost.

Credentials and endpoints come from where the file system's own library looks for them (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL``, an instance's role), or, but for secrets, from the URL.

Every call ends within ``timeout_s``, or with the caller's time (``kivi.runtime.deadlines``): until then what fails for
a reason that may pass is tried again, after 50 ms, 100 ms, 200 ms and so on; then it is Unavailable, which names the
object. A call that hangs is left to a thread that nobody waits for. An object that is not there is ObjectMissing.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyarrow import fs

from kivi.errors import DiskFull, KiviError, Unavailable
from kivi.runtime.deadlines import left_s
from kivi.runtime.files import is_no_space, sync_directory

__all__ = ["ObjectMissing", "ObjectStore"]

T = TypeVar("T")

_GAP_BYTES: Final = 64 << 10
"""Ranges that lie so near to each other are read as one: a request costs more than these bytes."""
_HANDLES: Final = 256
_CALLS: Final = 16
"""Calls under way at a time, of one object store."""
_WAIT_S: Final = 0.05
_WAIT_S_MAX: Final = 2.0
_REFUSED: Final = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY",
    "SIGNATURE_DOES_NOT_MATCH",
    "NO_SUCH_BUCKET",
    "HTTP status 403",
)


class ObjectMissing(KiviError):
    """There is no such object, or it is not of its length. For callers in this room, who know what was lost."""


class ObjectStore:
    """Thread safe. ``url``: what all keys are below."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._room = threading.BoundedSemaphore(_CALLS)
        self._lock = threading.Lock()
        self._found: tuple[Any, str] | None = None
        self._handle = lru_cache(maxsize=_HANDLES)(self._opened)

    def named(self, key: str) -> str:
        """The object's URL, for people: without options."""
        return f"{self.url.partition('?')[0].rstrip('/')}/{key}"

    def read(self, key: str, nbytes: int, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes at each of ``spans`` (offset, bytes; in order, apart from each other) of an object of ``nbytes``.

        Spans that are neighbours are one request. Raises ObjectMissing, Unavailable.
        """
        found = list[bytes]()
        for first, count in _together(spans):
            start = spans[first][0]
            size = spans[first + count - 1][0] + spans[first + count - 1][1] - start
            read = self._call(key, partial(self._piece, key, nbytes, start, size))
            for at, length in spans[first : first + count]:
                found.append(read[at - start : at - start + length])
        return found

    def read_whole(self, key: str) -> bytes:
        """All of an object, as it is there now. Raises ObjectMissing, Unavailable."""

        def read() -> bytes:
            system, base = self._system()
            with system.open_input_file(f"{base}/{key}") as file:
                found: bytes = file.read()
                return found

        return self._call(key, read)

    def write(self, key: str, data: Any) -> None:
        """Makes an object that was never there. It is durable when this returns. Raises Unavailable, DiskFull."""

        def write() -> None:
            system, base = self._system()
            path = f"{base}/{key}"
            if system.type_name == "local":
                if self._is_away(key):
                    raise FileNotFoundError(os.path.dirname(path))
                _make_directories(os.path.dirname(path))
            with system.open_output_stream(path) as file:
                file.write(data)
            if system.type_name == "local":  # the others say that it is there when it is durable
                sync_directory(path)
                sync_directory(os.path.dirname(path))

        self._call(key, write)

    def make(self, folder: str) -> None:
        """Makes the first folder of keys, durably; but for directories, object stores have none. Raises Unavailable."""

        def make() -> None:
            system, base = self._system()
            if system.type_name == "local":
                _make_directories(f"{base}/{folder}")

        self._call(folder, make)

    def require(self, folder: str) -> None:
        """Raises Unavailable if what ``make`` made is missing."""

        def look() -> None:
            if self._is_away(folder):
                raise FileNotFoundError(folder)

        self._call(folder, look)

    def delete(self, keys: Iterable[str]) -> None:
        """Those that are gone already are passed over. Raises Unavailable."""
        for key in keys:
            self._call(key, partial(self._deleted, key))

    def list(self, under: str) -> list[str]:
        """The keys of all objects below the folder ``under``, in order. Raises Unavailable."""

        def listed() -> list[str]:
            system, base = self._system()
            found = system.get_file_info(
                fs.FileSelector(f"{base}/{under}".rstrip("/"), allow_not_found=True, recursive=True)
            )
            return sorted(one.path[len(base) + 1 :] for one in found if one.type == fs.FileType.File)

        return self._call(under, listed)

    # -- one call -----------------------------------------------------------------------------------

    def _system(self) -> tuple[Any, str]:
        with self._lock:
            if self._found is None:
                system, base = fs.FileSystem.from_uri(self.url)
                self._found = system, base.rstrip("/")
            return self._found

    def _is_away(self, key: str) -> bool:
        """Whether the directory that holds all of these is missing, because another disk belongs there."""
        system, base = self._system()
        return system.type_name == "local" and not os.path.isdir(f"{base}/{key.partition('/')[0]}")

    def _opened(self, key: str) -> Any:
        system, base = self._system()
        return system.open_input_file(f"{base}/{key}")

    def _deleted(self, key: str) -> None:
        system, base = self._system()
        with contextlib.suppress(FileNotFoundError):
            system.delete_file(f"{base}/{key}")

    def _piece(self, key: str, nbytes: int, start: int, size: int) -> bytes:
        handle = self._handle(key)
        if handle.size() != nbytes:
            self._handle.cache_clear()
            raise FileNotFoundError(f"it has {handle.size()} bytes")
        found: bytes = handle.read_at(size, start)
        if len(found) != size:
            raise OSError(f"{len(found)} bytes came instead of {size}")
        return found

    def _call(self, key: str, call: Callable[[], T]) -> T:
        until = time.monotonic() + min(self._timeout_s, left_s())
        wait = _WAIT_S
        while True:
            try:
                return self._within(until, call)
            except FileNotFoundError as error:
                if self._is_away(key):
                    folder = self.named(key.partition("/")[0])
                    raise Unavailable(
                        f"{folder} is missing, and was there: mount the disk or share that it is on; if its "
                        "objects are really lost, make that directory, then restore a backup"
                    ) from None
                raise ObjectMissing(f"{self.named(key)} is missing, or not of its length ({error})") from None
            except (OSError, pa.ArrowException) as error:
                if isinstance(error, OSError) and is_no_space(error):
                    raise DiskFull(f"no disk space for {self.named(key)}: make room", path=self.named(key)) from None
                refused = any(word in str(error) for word in _REFUSED) or isinstance(
                    error, (pa.ArrowInvalid, PermissionError)
                )
                if refused or time.monotonic() + wait >= until:
                    todo = (
                        "look at its credentials and at its URL"
                        if refused
                        else "this is tried again when it is asked for"
                    )
                    raise Unavailable(f"{self.named(key)} cannot be reached ({error}): {todo}") from None
            time.sleep(wait * random.uniform(0.5, 1))
            wait = min(2 * wait, _WAIT_S_MAX)

    def _within(self, until: float, call: Callable[[], T]) -> T:
        """What the call gives, or TimeoutError, which is an OSError, if that takes too long."""
        if not self._room.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError(f"{_CALLS} calls are still under way")
        answer = list[T]()
        failure = list[BaseException]()
        done = threading.Event()

        def run() -> None:
            try:
                answer.append(call())
            except BaseException as error:
                failure.append(error)
            finally:
                self._room.release()
                done.set()

        threading.Thread(target=run, name="kivi-object", daemon=True).start()
        if not done.wait(max(0.0, until - time.monotonic())):
            raise TimeoutError("no answer in time")
        if failure:
            raise failure[0]
        return answer[0]


def _together(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Which spans to read as one: (the first, how many)."""
    out = list[tuple[int, int]]()
    for i, (at, _) in enumerate(spans):
        if i and at - sum(spans[i - 1]) <= _GAP_BYTES:
            out[-1] = out[-1][0], out[-1][1] + 1
        else:
            out.append((i, 1))
    return out


def _make_directories(path: str) -> None:
    """Makes a directory and those above it, and their names durable."""
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        _make_directories(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        sync_directory(parent)
