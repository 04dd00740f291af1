"""A checkpoint: a copy of a store that opens by itself."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import Any

from kivi.errors import DiskFull, InvalidArgument, NotAStore, Unavailable
from kivi.events.cold_tier import ColdObject
from kivi.events.manifest import cold_objects, link_files
from kivi.runtime.files import is_no_space, sync_directory
from kivi.store.host import Running
from kivi.store.opening import cluster_of, mark, no_space, node_said

__all__ = ["begin_copy", "checkpoint", "followers_copy", "said_of_node"]


def checkpoint(store: Running, path: str) -> int:
    """A copy that opens by itself: fold and flush, copy the engine at that position, begin an empty log after it.

    The copy has its own identity. Commits that arrive meanwhile are not in it. It appears under ``path`` when it is
    complete: an empty directory left by a crash would open as a new store, and be taken for a backup. A checkpoint
    that fails leaves nothing.

    Returns its watermark. Raises NotAStore if ``path`` is something already, InvalidArgument if it cannot be made where
    it should be, DiskFull without space.
    """
    path = os.path.abspath(path)
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise NotAStore(f"{path} is not an empty directory: a checkpoint makes a new one")
    parent = os.path.dirname(path)
    made = partial = f"{path}.partial-{secrets.token_hex(4)}"
    try:
        os.mkdir(partial)
    except OSError as error:
        if is_no_space(error):
            raise no_space(parent, error) from None
        raise InvalidArgument(
            f"a checkpoint cannot be made in {parent} ({error.strerror}): name a directory that is there and can be "
            "written to"
        ) from None
    pins: list[ColdObject] = []
    try:
        with store.cold.kept():
            with store.consolidator.paused() as position:
                _copy_base(store, partial)
                objects, held = cold_objects(store.engine), said_of_node(store)
            pins = store.cold.pin(objects, path)
        begin_copy(store, partial, position, held)
        os.rename(partial, path)
        made = path
        sync_directory(parent)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        with contextlib.suppress(Unavailable):
            store.cold.unpin(pins)
        if isinstance(error, OSError):
            kind = DiskFull if is_no_space(error) else Unavailable
            raise kind(
                f"the checkpoint {path} could not be written ({error.strerror}): nothing is left of it"
            ) from error
        raise
    return position


def _copy_base(store: Running, path: str) -> None:
    """Engine and settled files, by hard links where the file system can. The consolidator is paused."""
    store.engine.checkpoint(os.path.join(path, "engine"))
    if store.parts.path is not None:
        link_files(store.engine, store.parts.path, path)


def followers_copy(store: Running, path: str) -> int:
    """What a process begins with that follows this store's log (``kivi.store.following``): its watermark.

    It has the identity of the store and no log. Whoever made a directory for it removes what a crash leaves there.
    Objects of cold tiers are not kept for it. Raises Unavailable, DiskFull.
    """
    try:
        os.makedirs(path)
        with store.consolidator.paused() as position:
            _copy_base(store, path)
        mark(path, store.parts.store_id)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        kind = DiskFull if is_no_space(error) else Unavailable
        raise kind(f"a copy could not be made in {path} ({error.strerror}): nothing is left of it") from error
    return position


def said_of_node(store: Running) -> dict[str, Any]:
    """What the marker says of shards and features. While the consolidator is paused that is true of a copy of base,
    too: shards that are taken are named when base has them, what is given up is applied until it is no longer named,
    and features are named before a place behind them is saved."""
    return {} if store.parts.path is None else node_said(store.parts.path)


def begin_copy(store: Running, path: str, position: int, held: dict[str, Any]) -> None:
    """Beside a copy of the engine: an empty log after ``position``, and an identity of its own. ``held``: what
    ``said_of_node`` gave when it was copied."""
    from kivi.log.segmented import SegmentedLog

    store_id = secrets.token_bytes(16)
    SegmentedLog.start_after(
        os.path.join(path, "log"), store_id=store_id, last=position, time_us=store.log.last_time_us
    )
    source = None if store.parts.path is None else cluster_of(store.parts.path)
    more = {} if source is None else {"copy_of": [source, store.parts.store_id.hex()]}
    mark(path, store_id, **more, **held)
