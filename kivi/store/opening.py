"""Opening a store: its directory, its lock, and what it is made of.

::

    KIVI      names format, store id and operators
    LOCK      keeps a second process out
    log/      segments and the acknowledged mark
    engine/   RocksDB

A node of a cluster may have ``nats-server/`` there, too, which is no part of the store: its copy of the cluster's log.

Refused, with the file and what to do: a directory with something else in it, a newer format, operators we do not know,
a directory in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from kivi.delta import operators
from kivi.encoding.keyspaces import Space, meta_key, space_prefix
from kivi.engine import Engine
from kivi.engine.memory import MemoryEngine
from kivi.errors import DataLoss, DiskFull, FormatTooNew, InvalidArgument, NotAStore, StoreInUse
from kivi.log import CommitLog
from kivi.log.features import check_features
from kivi.log.memory import MemoryLog
from kivi.log.shards import EVERY, parse_shards, shown_shards
from kivi.runtime.files import is_no_space, write_json
from kivi.runtime.settings import Settings
from kivi.states.own import load_entry_points

__all__ = [
    "FORMAT",
    "FORMAT_ALONE",
    "LOG_SERVER",
    "Parts",
    "check_agrees",
    "check_node",
    "claim_node",
    "cluster_of",
    "content_of",
    "features_as_said",
    "has_obeyed",
    "held_as_said",
    "held_shards",
    "hold_shards",
    "is_new",
    "mark",
    "no_space",
    "node_said",
    "note_differs",
    "note_features",
    "note_obeyed",
    "noted_features",
    "open_parts",
    "rows_since",
]

_log = logging.getLogger("kivi")

FORMAT: Final = 11
"""The format on disk. A program refuses a larger one; it opens a smaller one, and makes it its own.

1  the first
2  text in codes and integers of 3, 5, 6 and 7 bytes in event blocks, generations and late counts in the catalog
3  base rows with their keys behind them, in engines that were empty then (``kivi.engine.rocks.Records``)
4  request tokens of the library in blocks (``kivi.encoding.token_blocks``), which are made rows when it is opened now
5  records of several numbers, with events that are each a transaction (``kivi.mvcc.record.EventsRecord``), tokens of
   several members, commits without a start timestamp, and retractions
6  rows, runs and blocks of tables that were altered, which say how many columns they have (``kivi.model.schema``), and
   states of measures in rows, runs and the catalog (``kivi.states``)
7  settled files beside the engine, and headers of blocks whose events lie in them (``kivi.events``); secondary views,
   which every write of their source has to follow (``kivi.store.view_rows``); rules, which judge every event of their
   source (``kivi.store.judging``), and records that say at which snapshot they did; rows of alerts (``kivi.alerts``);
   durable subscriptions by what they ask for, in the commits that make and forget them (``kivi.live.index``)
8  only a node of a cluster, whose log is elsewhere: nothing may be written but what that log brings
9  only a node of a cluster, or a copy of one, that holds some of the shards (``kivi.store.shards``): no whole store
10 likewise, and it has rows of some of them from a commit timestamp on only (``kivi.store.moving``)
11 a node of a cluster, or a copy of one, whose log uses features, which the marker names (``kivi.log.features``): it is
   refused where one of them is not known, so the next ones need no new format
"""
FORMAT_SINCE: Final = 10
"""The format of a node that has some shards by moves, from before features."""
FORMAT_SHARDS: Final = 9
"""The format of a node that holds some of the shards, since ever."""
FORMAT_NODE: Final = 8
"""The format of a node that holds everything."""
FORMAT_ALONE: Final = 7
"""The format of a store that is no node."""
LOG_SERVER: Final = "nats-server"
_MARKER: Final = "KIVI"
_MARKER_NEW: Final = "KIVI.new"  # on its way; a crash may leave it
_OWN: Final = ("format", "store_id", "operators")
"""What ``mark`` says by itself."""
_noting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that a store stands on; ``release`` closes them all, in reverse order."""

    engine: Engine
    log: CommitLog
    store_id: bytes
    release: Callable[[], None]
    path: str | None = None


def open_parts(
    path: str | None,
    settings: Settings,
    engine: Engine | None,
    log: CommitLog | None,
    make_log: Callable[[Engine], CommitLog] | None = None,
    clock: Callable[[], float] = time.time,
) -> Parts:
    """Engine, log and identity for ``path``; in memory if it is None. Registers the measures of installed packages,
    which the definitions in the store may use. ``make_log``: of a node of a cluster, whose log is elsewhere; another
    log goes by the store's ``clock``."""
    load_entry_points()
    clock_ns = time.time_ns if clock is time.time else lambda: int(clock() * 1_000_000) * 1_000
    if path is None:
        memory_engine, memory_log = engine or MemoryEngine(), log or MemoryLog(clock=clock_ns)
        return Parts(memory_engine, memory_log, b"memory", lambda: None)
    from kivi.engine.rocks import Records, RocksEngine
    from kivi.log.segmented import SegmentedLog

    with contextlib.ExitStack() as opened:  # which lets go of each, whatever the one before has to say
        release_lock, store_id = claim(path)
        opened.callback(release_lock)
        if make_log is None and log is None and (name := cluster_of(path)) is not None:
            raise NotAStore(f"{path} is a node of the cluster {name}: kivi serve --cluster {name} opens it")
        if make_log is None and log is None and (held := held_shards(path)) != EVERY:
            raise NotAStore(
                f"{path} is a copy of a node that holds the shards {shown_shards(held)} alone, and no store by itself: "
                "kivi serve --cluster makes it a node"
            )
        if make_log is None and "copy_of" in content_of(path):
            with _noting:  # what is written from here on no cluster has heard of
                _renote(path, without=("copy_of", "genesis"))
        rocks = engine or RocksEngine(
            os.path.join(path, "engine"),
            cache_bytes=settings.cache_bytes,
            memtable_bytes=settings.memtable_bytes,
            records=Records(meta_key("records"), space_prefix(Space.ROW)),
            owed=meta_key("owed/"),
        )
        opened.callback(rocks.close)
        if make_log is not None:
            log = make_log(rocks)
        elif log is None:
            log = SegmentedLog(
                os.path.join(path, "log"), store_id=store_id, segment_bytes=settings.segment_bytes, clock=clock_ns
            )
        opened.callback(log.close)
        return Parts(rocks, log, store_id, opened.pop_all().close, path)


def claim(path: str, besides: Set[str] = frozenset()) -> tuple[Callable[[], None], bytes]:
    """Locks the directory, creating the store's marker in an empty one, or one that has nothing else than what is
    ``besides`` stores. (how to let go, the store id)"""
    marker = os.path.join(path, _MARKER)
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotAStore(f"{path} is a file, not a directory: name a directory for the store") from None
    except OSError as error:
        raise NotAStore(f"{path} cannot be made ({error.strerror}): name a directory that can") from None
    _check_entries(path, besides)
    try:
        with contextlib.ExitStack() as held:
            lock = os.open(os.path.join(path, "LOCK"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(marker):
                mark(path, secrets.token_bytes(16))
            store_id, version = read_marker(path)
            if version < FORMAT_ALONE:  # before anything is written that an older program would take for damage
                mark(path, store_id)
                _log.info(
                    "%s had format %d, and has %d now: older versions of kivi refuse it", path, version, FORMAT_ALONE
                )
            return held.pop_all().close, store_id
    except BlockingIOError:
        raise StoreInUse(f"{path} is open in another process: stop that one, or connect to its server") from None
    except OSError as error:
        if is_no_space(error):
            raise no_space(path, error) from None
        raise


def _check_entries(path: str, besides: Set[str]) -> None:
    entries = set(os.listdir(path)) - {"LOCK", _MARKER_NEW} - besides
    if entries and _MARKER not in entries:
        raise NotAStore(
            f"{path} holds {sorted(entries)[0]!r} and no {_MARKER} file: not a kivi store; name an empty directory"
        )


def no_space(path: str, error: OSError) -> DiskFull:
    return DiskFull(f"no disk space in {path} ({error.strerror}): make room, then try again", path=path)


def check_node(path: str, cluster: str) -> None:
    """Raises InvalidArgument or NotAStore if the directory cannot be a node's of this cluster: it has something else in
    it, is a store of its own, or is of another cluster."""
    if not os.path.isdir(path):
        return
    _check_entries(path, {LOG_SERVER})
    if is_new(path):
        return
    read_marker(path)
    content = content_of(path)
    known, *_ = content.get("copy_of") or [content.get("cluster")]
    if known is None:
        raise InvalidArgument(
            f"{path} is a store of its own, and no node of a cluster: name an empty directory, or make a cluster of it "
            "with kivi cluster adopt"
        )
    if known != cluster:
        raise InvalidArgument(f"{path} is a node of another cluster ({known}): name an empty directory")


def is_new(path: str) -> bool:
    """Whether there is nothing of a store yet, but perhaps a marker."""
    return not os.path.exists(os.path.join(path, "engine"))


def claim_node(path: str, cluster: str, generation: bytes, *, empty: bool = True, shards: int | None = None) -> int:
    """Makes an empty directory a node's, or the copy of a node: the number that the node has. ``empty``: it may be.

    ``shards``: which it is to hold, by default all that are there. One that is a node already still holds what it held.

    Raises InvalidArgument or NotAStore as ``check_node``, for an earlier generation of the cluster, and for shards that
    are not in the copy.
    """
    check_node(path, cluster)
    held = EVERY if is_new(path) else held_shards(path)
    if shards is not None and (missing := shards & ~held):
        raise InvalidArgument(
            f"{path} has the shards {shown_shards(held)} alone, and not {shown_shards(missing)}: begin with a copy of "
            "a node that holds them"
        )
    held = held if shards is None else shards
    if not is_new(path):
        content = content_of(path)
        check_agrees(path, content)
        _, known = content.get("copy_of") or [cluster, content["store_id"]]
        if known != generation.hex():
            if "genesis" in content:
                raise InvalidArgument(
                    f"{path} is to begin the log of {cluster}, and there is one that begins without it: a node with an "
                    "empty directory was started first. End all of them and that log (kivi cluster reseed), and start "
                    "each node with this directory or a copy of it"
                )
            raise InvalidArgument(
                f"{path} is a node of an earlier generation of the cluster ({cluster}): name an empty directory"
            )
        if "node" in content:
            return int(content["node"])
    elif not empty:
        raise InvalidArgument(
            f"the log of {cluster} does not begin with nothing, as {path} does: begin with a copy of a node (kivi "
            "checkpoint)"
        )
    node = int.from_bytes(secrets.token_bytes(7), "little")
    release, _ = claim(path, {LOG_SERVER})
    try:
        since = () if is_new(path) else rows_since(path)
        features = {} if is_new(path) else features_as_said(noted_features(path))
        mark(path, generation, cluster=cluster, node=node, **held_as_said(held, since), **features)
        shutil.rmtree(os.path.join(path, "log"), ignore_errors=True)
    finally:
        release()
    return node


def held_as_said(held: int, since: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What a marker says of shards: which are whole, and of which there are rows since when only (``rows_since``)."""
    kept = [[cts, shown_shards(some & held)] for cts, some in since if some & held]
    return {**({} if held == EVERY else {"shards": shown_shards(held)}), **({"since": kept} if kept else {})}


def held_shards(path: str) -> int:
    """The shards that are whole in a directory, with all that was committed up to its position."""
    said = content_of(path).get("shards")
    return EVERY if said is None else parse_shards(said)


def rows_since(path: str) -> tuple[tuple[int, int], ...]:
    """Commit timestamps, and shards whose rows are there from then on only."""
    return tuple((int(cts), parse_shards(shards)) for cts, shards in content_of(path).get("since", ()))


def hold_shards(path: str, held: int, since: Sequence[tuple[int, int]]) -> None:
    """From here on the node holds these, whatever it held; ``since`` as of ``rows_since``."""
    with _noting:
        _renote(path, without=("shards", "since"), **held_as_said(held, since))


def has_obeyed(path: str, shards: int) -> bool:
    """Whether the node was told the last time, too, that it is to hold these: a service says it at each start, and what
    the node holds is what moves have made of it since."""
    return not is_new(path) and content_of(path).get("obeyed") == shown_shards(shards)


def note_obeyed(path: str, shards: int) -> None:
    """It holds these, as it was told."""
    with _noting:
        _renote(path, obeyed=shown_shards(shards))


def note_features(path: str, features: Collection[str]) -> None:
    """From here on the node, and every copy of it, has these: versions that do not know one of them refuse it."""
    with _noting:
        if not {*features} <= {*(known := noted_features(path))}:  # a place that was lost in a crash may have had more
            _renote(path, features=sorted({*features, *known}))


def note_differs(path: str, why: str) -> None:
    """From here on the node is not opened again: its content is known to be other than that of the cluster."""
    with _noting:
        _renote(path, differs=why)


def _renote(path: str, without: Collection[str] = (), **more: Any) -> None:
    """A marker keeps all that it says, but for what is noted now: so nothing that is noted at the same time is lost,
    and what was found to differ stays so (C5). Under ``_noting``."""
    content = content_of(path)
    kept = {name: value for name, value in content.items() if name not in (*_OWN, *without)}
    mark(path, bytes.fromhex(content["store_id"]), **{**kept, **more})


def check_agrees(path: str, content: dict[str, Any]) -> None:
    """Raises DataLoss for the directory of a node that is known to differ from its cluster."""
    if "differs" in content:
        raise DataLoss(f"{path}: {content['differs']}", path=path)


def node_said(path: str) -> dict[str, Any]:
    """What a marker says of shards and features, for a copy's."""
    content = content_of(path)
    return {name: content[name] for name in ("shards", "since", "features") if name in content}


def noted_features(path: str) -> Sequence[str]:
    """Those that the log of the directory's cluster used."""
    found: Sequence[str] = content_of(path).get("features", ())
    return found


def features_as_said(features: Collection[str]) -> dict[str, Any]:
    """What a marker says of features."""
    return {"features": sorted(features)} if features else {}


def cluster_of(path: str) -> str | None:
    """The name of the cluster that the directory is a node of."""
    found: str | None = content_of(path).get("cluster")
    return found


def content_of(path: str) -> dict[str, Any]:
    """The marker's. Raises NotAStore without one, DataLoss for one that is damaged."""
    try:
        with open(os.path.join(path, _MARKER), encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
            return found
    except (FileNotFoundError, NotADirectoryError):
        raise NotAStore(f"{path} is not a kivi store: there is no file {_MARKER} in it") from None
    except ValueError as error:
        raise _damaged(os.path.join(path, _MARKER), error) from None


def mark(path: str, store_id: bytes, **more: Any) -> None:
    """Makes the directory a store of today's format: from here on, or not at all.

    ``cluster`` and ``node`` make it a node; ``copy_of``, with name and generation, says of which cluster it is a copy
    and may become a node as long as it has not been opened otherwise.
    """
    content = {"format": FORMAT_ALONE, "store_id": store_id.hex(), "operators": operators.ids(), **more}
    formats = {"features": FORMAT, "since": FORMAT_SINCE, "shards": FORMAT_SHARDS, "cluster": FORMAT_NODE}
    content["format"] = next((number for name, number in formats.items() if name in more), FORMAT_ALONE)
    write_json(os.path.join(path, _MARKER), content, partial=os.path.join(path, _MARKER_NEW))


def _damaged(marker: str, error: Exception) -> DataLoss:
    return DataLoss(f"{marker} is damaged ({error}): restore it from a backup", path=marker, offset=0)


def read_marker(path: str) -> tuple[bytes, int]:
    """The store id and the format. Raises FormatTooNew, DataLoss."""
    marker = os.path.join(path, _MARKER)
    try:
        with open(marker, encoding="utf-8") as file:
            content = json.load(file)
        version, store_id, known = content["format"], bytes.fromhex(content["store_id"]), content["operators"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(marker, error) from None
    if not isinstance(version, int) or not 0 < version <= FORMAT:
        raise FormatTooNew(f"{path} has format {version}; this version of kivi reads up to {FORMAT}: use a newer one")
    check_features(path, content.get("features", ()))
    operators.check_ids(known)
    return bytes(store_id), version
