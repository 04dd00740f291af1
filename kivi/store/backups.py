"""Backups of a store that is open and goes on: complete stores, each of which opens by itself, that share files.

::

    repository/
      KIVI-BACKUPS                       this is one
      20261121T211502.113Z-1234/         a store as of its watermark 1234, and BACKUP: what is in it, with digests
      20261121T221500.907Z-1789/

RocksDB never writes to a finished table or blob file again and never gives its name to another, nor does the store to a
settled file's, so a file that the backup before has under the same name, from the same store, is the same file: it is
linked, not copied. Nothing is shared with the live store, though: damage to one of its files must not reach a backup.

    the store      folds up to its watermark and stands still while RocksDB links its files aside: milliseconds
    copying        from these links, while the store goes on
    the end        everything synced, then one rename: a backup is whole, or it is not there

Settled files in the cold tier are not copied. The backup names their objects, and pins them there, before anything may
delete them; when ``keep`` removes a backup its pins go, too (``kivi.events.cold_tier``).

A repository that was interrupted at any point has whole backups only; what is left of others the next one removes. One
backup at a time.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from typing import Any, Final

from kivi.errors import DataLoss, DiskFull, InvalidArgument, NotAStore, StoreInUse, Unavailable
from kivi.events.cold_tier import ColdObject
from kivi.events.manifest import cold_objects, link_files
from kivi.runtime.files import is_no_space, sync_directory
from kivi.store import checkpoint
from kivi.store.host import Running

__all__ = ["check", "make", "newest", "of_repository"]

_MARKER: Final = "KIVI-BACKUPS"
_MANIFEST: Final = "BACKUP"
_PARTIAL: Final = ".partial-"
_ASIDE: Final = "backup-"
_FINISHED: Final = (".sst", ".blob", ".parquet")
_PIECE: Final = 4 << 20
_ENGINE: Final = f"engine{os.sep}"
"""Its files are listed without it."""


def make(store: Running, repository: str, keep: int | None = None) -> dict[str, Any]:
    """A backup of what is visible now, into the directory ``repository``, which is made if it is missing.

    ``keep``: how many stay, this one included; the oldest go. Gives ``name``, ``path``, ``watermark``, ``files``,
    ``copied_bytes`` and ``shared_bytes``. Raises NotAStore for a directory of something else, StoreInUse while another
    backup runs, InvalidArgument, DiskFull without space: then nothing is left of it.
    """
    if keep is not None and keep < 1:
        raise InvalidArgument(f"keep is a number of backups from 1 on, not {keep}")
    if store.parts.path is None:
        raise InvalidArgument("a store in memory has no files to back up")
    repository = os.path.abspath(repository)
    with _claimed(repository):
        for name in os.listdir(repository):
            if _PARTIAL in name:
                shutil.rmtree(os.path.join(repository, name), ignore_errors=True)
        for name in os.listdir(store.parts.path):
            if name.startswith(_ASIDE):
                shutil.rmtree(os.path.join(store.parts.path, name), ignore_errors=True)
        aside = os.path.join(store.parts.path, _ASIDE + secrets.token_hex(4))
        partial = os.path.join(repository, _PARTIAL + secrets.token_hex(4))
        pins = list[ColdObject]()
        try:
            return _made(store, repository, aside, partial, keep, pins)
        except BaseException as error:
            with contextlib.suppress(Unavailable):
                store.cold.unpin(pins)
            if not isinstance(error, OSError):
                raise
            kind = DiskFull if is_no_space(error) else Unavailable
            raise kind(
                f"the backup in {repository} could not be written ({error.strerror}): nothing is left"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)


def _made(
    store: Running, repository: str, aside: str, partial: str, keep: int | None, pins: list[ColdObject]
) -> dict[str, Any]:
    os.makedirs(aside)
    moment = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    with store.cold.kept():
        with store.consolidator.paused() as watermark:
            store.engine.checkpoint(os.path.join(aside, "engine"))
            link_files(store.engine, str(store.parts.path), aside)
            objects, held = cold_objects(store.engine), checkpoint.said_of_node(store)
        title = f"{moment.replace('-', '').replace(':', '').replace('+0000', 'Z')}-{watermark}"
        whole = os.path.join(repository, title)
        pins += store.cold.pin(objects, whole)
    source = store.parts.store_id.hex()
    before = newest(repository)
    known: dict[str, Any] = {}
    if before is not None:
        manifest = _manifest(before)
        known = manifest["files"] if manifest["source"] == source else {}
    files: dict[str, tuple[int, str]] = {}
    copied = shared = 0
    for path in sorted(os.path.join(folder, name) for folder, _, names in os.walk(aside) for name in names):
        where, size = os.path.relpath(path, aside), os.path.getsize(path)
        name = where.removeprefix(_ENGINE)
        target = os.path.join(partial, where)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if name.endswith(_FINISHED) and name in known and known[name][0] == size and before is not None:
            with contextlib.suppress(OSError):  # a file system without links, or too many of them: copied then
                os.link(os.path.join(before, where), target)
                files[name] = (size, known[name][1])
                shared += size
                continue
        files[name] = (size, _copied(path, target))
        copied += size
    checkpoint.begin_copy(store, partial, watermark, held)
    about = {"source": source, "watermark": watermark, "files": files, "pins": pins}
    with open(os.path.join(partial, _MANIFEST), "w", encoding="utf-8") as file:
        json.dump(about, file)
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(partial):
        sync_directory(folder)
    os.rename(partial, whole)
    pins.clear()  # from here on they are the backup's
    sync_directory(repository)
    for old in of_repository(repository)[: -keep or None] if keep else []:
        old_pins = [ColdObject(*pin) for pin in _manifest(old).get("pins", ())]
        try:
            os.rename(old, removed := os.path.join(repository, _PARTIAL + secrets.token_hex(4)))
        except OSError:
            continue  # it is there, whole, and so are its pins; the next backup tries again
        sync_directory(repository)  # else a crash might bring it back, without its pins
        shutil.rmtree(removed, ignore_errors=True)
        with contextlib.suppress(Unavailable):  # then they stay, and what they name: ``kivi orphans`` tells
            store.cold.unpin(old_pins)
    return {
        "name": title,
        "path": whole,
        "watermark": watermark,
        "files": len(files),
        "copied_bytes": copied,
        "shared_bytes": shared,
    }


def _copied(source: str, target: str) -> str:
    """Copies a file durably; its digest."""
    digest = hashlib.blake2b(digest_size=16)
    with open(source, "rb") as given, open(target, "wb") as made:
        while piece := given.read(_PIECE):
            digest.update(piece)
            made.write(piece)
        made.flush()
        os.fsync(made.fileno())
    return digest.hexdigest()


@contextlib.contextmanager
def _claimed(repository: str) -> Iterator[None]:
    """A repository, made if it is missing, and nobody else's meanwhile."""
    marker = os.path.join(repository, _MARKER)
    try:
        if not os.path.isdir(repository):
            os.mkdir(repository)
        if not os.path.exists(marker):
            if os.listdir(repository):
                raise NotAStore(f"{repository} holds something else than backups of kivi: name a directory of its own")
            with open(marker, "x"):
                sync_directory(repository)
        handle = os.open(marker, os.O_RDWR)
    except OSError as error:
        if is_no_space(error):
            raise DiskFull(f"no disk space in {repository}: make room, then try again", path=repository) from None
        raise InvalidArgument(
            f"backups cannot be made in {repository} ({error.strerror}): its parent must be there, and writable"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(f"another backup is being made in {repository}: wait for it") from None
        yield
    finally:
        os.close(handle)


def of_repository(repository: str) -> list[str]:
    """The paths of its backups, the oldest first. Raises NotAStore if it is none."""
    if not os.path.exists(os.path.join(repository, _MARKER)):
        raise NotAStore(f"{repository} is no directory of backups: there is no file {_MARKER} in it")
    names = sorted(name for name in os.listdir(repository) if _PARTIAL not in name and name != _MARKER)
    return [os.path.join(repository, name) for name in names]


def newest(repository: str) -> str | None:
    """The path of its newest backup, if there is one."""
    return next(reversed(of_repository(repository)), None)


def _manifest(backup: str) -> dict[str, Any]:
    try:
        with open(os.path.join(backup, _MANIFEST), encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
            return found
    except (OSError, ValueError):
        return {"source": "", "files": {}}  # then nothing is shared with it


def check(backup: str) -> None:
    """Raises DataLoss if a file of the backup is not what was written."""
    for name, (size, digest) in _manifest(backup)["files"].items():
        path = os.path.join(backup, name if os.sep in name else _ENGINE + name)
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
                length = file.tell()
        except OSError as error:
            raise DataLoss(f"{path} of the backup cannot be read ({error.strerror}): use another backup") from None
        if length != size or found.hexdigest() != digest:
            raise DataLoss(f"{path} of the backup is damaged: use another backup")
