"""A bounded cache of ranges of objects, on disk: a file for each, and the least recently used go first.

Nothing of it has to be there, and whoever reads a range knows its checksum: so nothing is synced, a write that fails is
left out, and what a power loss spoils is read from the object again. It outlives the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict

__all__ = ["RangeCache"]

_PARTIAL = ".partial"


class RangeCache:
    """Thread safe. ``folder`` is made when it is first needed; at most ``max_bytes`` are kept."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._nbytes = 0
        self._written = 0
        self.hits = self.misses = 0
        found = list[tuple[float, str, int]]()
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_PARTIAL):
                    self._unlink([entry.name])
                else:
                    facts = entry.stat()
                    found.append((facts.st_mtime, entry.name, facts.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._nbytes += size
        self._unlink(self._beyond())

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def get(self, of: str, at: int, size: int) -> bytes | None:
        """The range of the object ``of``, if it is here; its bytes may have been damaged."""
        name = _name(of, at)
        with self._lock:
            known = self._sizes.get(name) == size
            if known:
                self._sizes.move_to_end(name)
        if known:
            with contextlib.suppress(OSError), open(os.path.join(self._folder, name), "rb") as file:
                found = file.read()
                if len(found) == size:
                    self.hits += 1
                    return found
            self.forget(of, at)
        self.misses += 1
        return None

    def put(self, of: str, at: int, data: bytes) -> None:
        """Keeps a range, if there is room for it at all."""
        if len(data) > self._max_bytes:
            return
        name = _name(of, at)
        with self._lock:
            self._written += 1
            partial = os.path.join(self._folder, f"{name}-{self._written}{_PARTIAL}")
        try:
            os.makedirs(self._folder, exist_ok=True)
            with open(partial, "wb") as file:
                file.write(data)
            os.rename(partial, os.path.join(self._folder, name))
        except OSError:  # no space, most of all: the object is read again then
            with contextlib.suppress(OSError):
                os.unlink(partial)
            return
        with self._lock:
            self._nbytes += len(data) - self._sizes.pop(name, 0)
            self._sizes[name] = len(data)
            gone = self._beyond()
        self._unlink(gone)

    def forget(self, of: str, at: int) -> None:
        """What is kept of this range is not what it should be."""
        name = _name(of, at)
        with self._lock:
            self._nbytes -= self._sizes.pop(name, 0)
        self._unlink([name])

    def _beyond(self) -> list[str]:
        """The names that have to go, which it forgets."""
        gone = list[str]()
        while self._nbytes > self._max_bytes:
            name, size = self._sizes.popitem(last=False)
            self._nbytes -= size
            gone.append(name)
        return gone

    def _unlink(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, name))


def _name(of: str, at: int) -> str:
    return f"{hashlib.blake2b(of.encode(), digest_size=16).hexdigest()}-{at:x}"
