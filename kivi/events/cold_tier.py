"""The cold tier of one store: settled files that lie in object stores, and nowhere here but in a bounded cache.

::

    URL/GENERATION/TABLE/NUMBER-RANDOM.parquet      an object: one settled file, never written again
    URL/GENERATION/pins/RANDOM.json                 {"path": of a backup, "objects": what it names}
    cold/OWNER                                      here: the generation, and the URLs where its folder was made
    cold/cache/                                     here: ranges that were read back (``range_cache``)

Two URLs may be one place (``file:///a`` and ``file:///a/.``, a symbolic link, S3 with other options), so objects are
told apart by their keys, whatever the URL: no key is used twice.

A *generation* belongs to one directory. Copies, backups among them, do not have ``OWNER``, and one that was copied with
it is told by its inode, or by its path if it is a hard link: a store that is opened from a copy, or was moved, reads
the objects that its manifest names, writes under a generation of its own, and deletes nothing but there. So it cannot
overwrite or delete an object of the store that it came from. (A copy of a whole volume may have the same inodes and
path: delete ``cold/OWNER`` in it before it is opened.)

An object that no manifest row names, that no view needs, and that no pin names is deleted by a *sweep*, which lists
what there is: so nothing that a crash leaves stays for ever. In this order, and why: the list first, so that whatever
is uploaded meanwhile is not in it; uploads under way and manifest next, after a flush, so that no crash brings back a
row that names what is deleted; the pins last. No sweep runs while a backup takes its manifest and pins what that names.

A pin goes when kivi deletes the backup (``keep``). Whether a backup that somebody moved or deleted is still needed
cannot be known here: then its pin stays, and what it names. ``kivi orphans`` lists objects that nothing names.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kivi.errors import DataLoss, InvalidArgument, KiviError, Unavailable
from kivi.events.object_store import ObjectMissing, ObjectStore
from kivi.events.range_cache import RangeCache
from kivi.runtime.files import sync_directory

__all__ = ["FOLDER", "OBJECT", "ColdObject", "ColdTier"]

FOLDER: Final = "cold"
"""In the store's directory; no copy has it."""
OBJECT: Final = ".parquet"
_OWNER: Final = "OWNER"
_PINS: Final = "pins"


class ColdObject(NamedTuple):
    """Where an object is: the URL that a table was declared with, and the key below it."""

    url: str
    key: str

    @property
    def generation(self) -> str:
        return self.key.partition("/")[0]


@dataclass(slots=True)
class _Owner:
    generation: str
    urls: list[str] = field(default_factory=list)


class ColdTier:
    """Thread safe. ``root``: the store's directory; None: a store in memory, which has none."""

    def __init__(self, root: str | None, *, cache_bytes: int, timeout_s: float) -> None:
        self._folder = None if root is None else os.path.join(root, FOLDER)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sweeping = threading.Lock()
        self._stores: dict[str, ObjectStore] = {}
        self._owner: _Owner | None = None
        self._uploading: set[str] = set()
        self._pins: dict[ColdObject, tuple[str, frozenset[str]]] = {}
        self._cache = RangeCache(os.path.join(self._folder, "cache"), cache_bytes) if self._folder else None
        self.uploaded_bytes = self.fetched_bytes = self.deleted = 0
        self.has_garbage = True
        """Whether a sweep may find something: after opening, and when objects went out of use."""
        self._unswept: set[str] = set()
        """The URLs where a sweep did not come to its end."""
        self._copying = 0
        """How many wait for the sweep to end, or keep another from beginning."""

    def store(self, url: str) -> ObjectStore:
        with self._lock:
            return self._stores.setdefault(url, ObjectStore(url, self._timeout_s))

    def named(self, where: ColdObject) -> str:
        return self.store(where.url).named(where.key)

    @property
    def is_used(self) -> bool:
        """Whether this store may have objects anywhere."""
        return self._folder is not None and bool(self._owned().urls)

    def check(self, url: str) -> None:
        """Raises InvalidArgument in memory, and Unavailable where the object store cannot be reached."""
        if self._folder is None:
            raise InvalidArgument("a store in memory has no cold tier: open a directory, or leave cold= out")
        self.store(url).list(self._owned().generation)

    def stats(self) -> dict[str, int]:
        cache = self._cache
        return {
            "cold_cache_bytes": cache.nbytes if cache else 0,
            "cold_cache_hits": cache.hits if cache else 0,
            "cold_cache_misses": cache.misses if cache else 0,
            "cold_fetched_bytes": self.fetched_bytes,
            "cold_uploaded_bytes": self.uploaded_bytes,
            "cold_deleted": self.deleted,
        }

    # -- reading --------------------------------------------------------------------------------

    def fill(
        self, where: ColdObject, nbytes: int, spans: Sequence[tuple[int, int]], into: memoryview, *, once: bool = False
    ) -> None:
        """Reads these spans (offset, bytes) of an object to where they lie in it, from the cache if they are there.

        ``once``: what is read is not asked for again, and takes no room in the cache.
        Raises ObjectMissing, Unavailable.
        """
        named = "/".join(where)
        missing = list[tuple[int, int]]()
        for at, size in sorted(set(spans)):
            if self._cache is not None and (found := self._cache.get(named, at, size)) is not None:
                into[at : at + size] = found
            else:
                missing.append((at, size))
        if missing:
            pieces = self.store(where.url).read(where.key, nbytes, missing)
            for (at, size), piece in zip(missing, pieces, strict=True):
                into[at : at + size] = piece
                self.fetched_bytes += size
                if self._cache is not None and not once:
                    self._cache.put(named, at, piece)

    def forget(self, where: ColdObject, at: int) -> None:
        """What came of the range from ``at`` on is damaged: it is read from the object the next time."""
        if self._cache is not None:
            self._cache.forget("/".join(where), at)

    # -- writing --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def uploaded(self, url: str, table: int, number: int, data: bytes) -> Iterator[ColdObject]:
        """Makes an object of a settled file and reads it back; no sweep deletes it within this block.

        Raises DataLoss if something else came back, Unavailable, DiskFull.
        """
        where = ColdObject(url, f"{self._owned(url).generation}/{table}/{number}-{secrets.token_hex(4)}{OBJECT}")
        with self._lock:
            self._uploading.add(where.key)
        try:
            store = self.store(url)
            store.write(where.key, data)
            if self.read_back(where) != data:
                raise DataLoss(
                    f"{self.named(where)} is not what was written to it: its events stay here: look at that store",
                    path=self.named(where),
                )
            self.uploaded_bytes += len(data)
            yield where
        except BaseException:
            self.has_garbage = True
            raise
        finally:
            with self._lock:
                self._uploading.discard(where.key)

    def read_back(self, where: ColdObject) -> bytes | None:
        """The whole object; None: it is not there."""
        try:
            return self.store(where.url).read_whole(where.key)
        except ObjectMissing:
            return None

    def _owned(self, url: str | None = None) -> _Owner:
        """Who writes here, durably, and that it writes to ``url``, where its folder is made once: see ``make``."""
        assert self._folder is not None, "a store in memory keeps its files"
        with self._lock:
            if self._owner is None:
                self._owner = _read_owner(os.path.join(self._folder, _OWNER)) or _Owner(secrets.token_hex(8))
            owner = self._owner
        if url is not None and url not in owner.urls:
            self.store(url).make(owner.generation)
            with self._lock:
                _write_owner(self._folder, _Owner(owner.generation, [*owner.urls, url]))
                owner.urls.append(url)
        return owner

    # -- deleting -------------------------------------------------------------------------------

    def sweep(
        self,
        in_use: Callable[[], set[ColdObject]],
        *,
        passing: Iterable[str] = (),
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Deletes the objects of this store that nothing names, at all its URLs but those of ``passing``.

        ``in_use``: what manifests and views need, after a flush. It ends early once ``stopped`` says so, or a copy
        waits for it, and where it did not come to its end the next call does it again. Raises Unavailable and DataLoss,
        the first there was, after the other URLs were swept.
        """
        if self._folder is None or not (self.has_garbage or self._unswept):
            return
        owner = self._owned()
        failures = list[KiviError]()
        with self._sweeping:
            if self.has_garbage:
                self.has_garbage = False
                self._unswept.update(owner.urls)
            for url in sorted(self._unswept.difference(passing)):
                try:
                    if self._swept(url, owner.generation, in_use, lambda: stopped() or self._copying > 0):
                        self._unswept.discard(url)
                except (Unavailable, DataLoss) as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _swept(
        self, url: str, generation: str, in_use: Callable[[], set[ColdObject]], stopped: Callable[[], bool]
    ) -> bool:
        """False: it was stopped before its end."""
        store = self.store(url)
        store.require(generation)
        there = [key for key in store.list(generation) if key.endswith(OBJECT)]
        with self._lock:
            kept = set(self._uploading)
        kept |= {one.key for one in in_use()}
        dead = [key for key in there if key not in kept]
        pinned = self.pinned(url, generation) if dead else {}
        store.require(generation)  # else there may be pins that were not listed
        for key in dead:
            if stopped():
                return False
            if key not in pinned:
                store.delete([key])
                self.deleted += 1
        return True

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within this block no sweep deletes anything: for what reads a manifest and then pins what that names."""
        with self._lock:
            self._copying += 1
        try:
            with self._sweeping:
                yield
        finally:
            with self._lock:
                self._copying -= 1

    def pinned(self, url: str, generation: str) -> dict[str, str]:
        """The keys of a generation that copies name, with the path of such a copy."""
        found = dict[str, str]()
        for key in self.store(url).list(f"{generation}/{_PINS}"):
            where = ColdObject(url, key)
            if where not in self._pins:
                raw = self.read_back(where)
                if raw is None:
                    continue
                try:
                    said = json.loads(raw)
                    self._pins[where] = str(said["path"]), frozenset(said["objects"])
                except (ValueError, KeyError, TypeError) as error:
                    name = self.named(where)
                    raise DataLoss(
                        f"{name} is damaged ({error!r}): nothing is deleted until it is gone", path=name
                    ) from None
            path, keys = self._pins[where]
            found |= dict.fromkeys(keys, path)
        return found

    def pin(self, objects: Iterable[ColdObject], path: str) -> list[ColdObject]:
        """Keeps these objects from being deleted, for a copy at ``path``: by whichever store they belong to.

        The pins, for ``unpin``. Raises Unavailable, and then there are none.
        """
        of = defaultdict[tuple[str, str], list[str]](list)
        for one in objects:
            of[one.url, one.generation].append(one.key)
        pins = list[ColdObject]()
        try:
            for (url, generation), keys in of.items():
                pins.append(ColdObject(url, f"{generation}/{_PINS}/{secrets.token_hex(8)}.json"))
                said = json.dumps({"path": os.path.abspath(path), "objects": sorted(keys)}, separators=(",", ":"))
                self.store(url).write(pins[-1].key, said.encode())
        except BaseException:
            for pin in pins:  # the last one may be there, too
                with contextlib.suppress(KiviError):
                    self.unpin([pin])
            raise
        return pins

    def unpin(self, pins: Iterable[ColdObject]) -> None:
        """The copy is gone. Raises Unavailable."""
        for pin in pins:
            self.store(pin.url).delete([pin.key])
            self.has_garbage = True


def _read_owner(path: str) -> _Owner | None:
    """None: nobody, or the directory is a copy of what it was."""
    try:
        with open(path, encoding="utf-8") as file:
            here = [os.fstat(file.fileno()).st_ino, os.path.realpath(path)]
            found: dict[str, Any] = json.load(file)
        # No st_dev: on some file systems it is another after each start of the machine.
        return _Owner(str(found["generation"]), list(found["urls"])) if found.get("file") == here else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(
            f"{path} is damaged ({error!r}): delete it; what this store has in object stores stays readable, and is "
            "not deleted any more by itself",
            path=path,
        ) from None


def _write_owner(folder: str, owner: _Owner) -> None:
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        sync_directory(os.path.dirname(folder))
    path = os.path.join(folder, _OWNER)
    with open(path + ".new", "w", encoding="utf-8") as file:
        here = os.fstat(file.fileno()).st_ino, os.path.realpath(path)
        json.dump({"generation": owner.generation, "file": here, "urls": owner.urls}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)
    sync_directory(folder)
