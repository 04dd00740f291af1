"""A cluster that begins with the content of a store: one that was alone, or the best node of a log that lost something.

::

    a node's directory   becomes a store of its own: what the node had applied when it was stopped
    the store            is folded whole, and what it kept of an older log is deleted
    its marker           says of which log it is the beginning, before there is one, and which features
                         (``kivi.log.features``) the new log has from its first node on: those of the older one, and
                         those that its definitions have
    the stream           is made by the first node that is started with it; another one of that name goes first

Every other node begins with a copy of it, taken before or after: the log has nothing of what was before.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kivi.cluster.streams import generation_there, stream_of
from kivi.encoding.keyspaces import Space, fact_key, gathered_key, meta_key, space_prefix, taken_key
from kivi.engine import WriteBatch
from kivi.engine.rocks import Records, RocksEngine
from kivi.errors import AlreadyExists, InvalidArgument
from kivi.log.jetstream import delete_stream
from kivi.log.natslink import Nats
from kivi.log.segmented import SegmentedLog
from kivi.mvcc.consolidate import AHEAD, POSITION
from kivi.mvcc.replicated import PLACE
from kivi.runtime.settings import Settings
from kivi.store.catalog import features_in
from kivi.store.facade import Store
from kivi.store.opening import (
    check_agrees,
    claim,
    content_of,
    features_as_said,
    is_new,
    mark,
    noted_features,
)

__all__ = ["Founded", "adopt", "first_log_of"]


@dataclass(frozen=True, slots=True)
class Founded:
    """``last``: the last commit timestamp of the store; the log's first one comes after it. ``lost``: messages that
    the log which ended had and the store has not, if that can be seen."""

    cluster: str
    last: int
    lost: int | None = None


def adopt(
    path: str,
    name: str,
    servers: Sequence[str] = (),
    *,
    replace: bool = False,
    timeout_s: float = 60.0,
) -> Founded:
    """Makes the store in a directory that nobody has open the beginning of a cluster. ``servers``: of the log, if they
    run by themselves. ``replace``: although there is a cluster of that name there, whose log ends with this; then the
    directory may be that of one of its nodes.

    Raises AlreadyExists if there is such a log, InvalidArgument for a name that clusters cannot have, and for the
    directory of a node that cannot leave it, DataLoss for one that is known to differ from the others (C5); and what
    opening the store, or reaching the servers, raises. It may be called again then.
    """
    stream = stream_of(name)
    content = content_of(path)
    check_agrees(path, content)
    begun = first_log_of(path) if "genesis" in content else None
    if "shards" in content:
        raise InvalidArgument(f"{path} holds the shards {content['shards']} alone: take a node that holds all of them")
    with contextlib.ExitStack() as opened:
        nats, there, last_message = None, None, 0
        if servers:
            nats = Nats(servers, timeout_s=timeout_s)
            opened.callback(nats.close)
            there, last_message = generation_there(nats, name, timeout_s)
        is_another = there is not None and (begun is None or there != begun[0])
        if is_another and not replace:
            raise AlreadyExists(
                f"there is a cluster {name} already: name another one, or kivi cluster reseed ends its log and begins "
                "anew with this store"
            )
        lost = None
        if there is not None and content.get("store_id") == there.hex():
            lost = max(0, last_message - _applied(path))
        if (known := content.get("cluster")) is not None:
            if not replace or known != name:
                raise InvalidArgument(
                    f"{path} is a node of the cluster {known}: kivi cluster reseed begins anew with it"
                )
            _leave(path)
        if begun is None or content["copy_of"][0] != name:
            last, features = _prepared(path)
            begun = secrets.token_bytes(16), last
            store_id = bytes.fromhex(content_of(path)["store_id"])
            features |= {*noted_features(path)}
            mark(path, store_id, copy_of=[name, begun[0].hex()], genesis=last, **features_as_said(features))
        if nats is not None and is_another:
            delete_stream(nats, stream, timeout_s)
    return Founded(name, begun[1], lost)


def first_log_of(path: str) -> tuple[bytes | None, int] | None:
    """The generation and the genesis of the log that a node in this directory begins with, if there is none; None for a
    node that had one, which is not made again."""
    if is_new(path):
        return None, 0
    content = content_of(path)
    if "genesis" in content:
        return bytes.fromhex(content["copy_of"][1]), int(content["genesis"])
    return None


def _prepared(path: str) -> tuple[int, set[str]]:
    """Everything in base, and nothing of a log that it may have had before. The last commit timestamp, and the features
    that its definitions have."""
    store = Store.open(path, settings=Settings(background=False))
    try:
        last = store.consolidate()
        batch = WriteBatch()
        for name in ("facts", "definitions", "gathering", "pins", "watches"):
            batch.delete(meta_key(name))
        batch.delete(PLACE)
        batch.delete(AHEAD)
        batch.delete_range(meta_key("touches/"), meta_key("touches0"))  # one for each table
        batch.delete_range(fact_key(0), fact_key(last + 1))
        batch.delete_range(gathered_key(0), gathered_key(last + 1))
        batch.delete_range(taken_key(0), taken_key(last + 1))
        store.engine.write(batch)
        store.engine.flush()
        features = features_in(store.catalog.visible)
    finally:
        store.close()
    return last, {*features}


def _engine(path: str) -> RocksEngine:
    return RocksEngine(os.path.join(path, "engine"), records=Records(meta_key("records"), space_prefix(Space.ROW)))


def _applied(path: str) -> int:
    """The message of the log that belongs to what a stopped node has."""
    engine = _engine(path)
    try:
        return int(json.loads(engine.get(PLACE) or b'{"sequence": 0}')["sequence"])
    finally:
        engine.close()


def _leave(path: str) -> None:
    """Makes the directory of a stopped node a store of its own. Raises InvalidArgument, StoreInUse."""
    release, _ = claim(path)
    try:
        engine = _engine(path)
        try:
            position, ahead = (int.from_bytes(engine.get(key) or b"", "little") for key in (POSITION, AHEAD))
            place = json.loads(engine.get(PLACE) or b'{"time_us": 0}')
        finally:
            engine.close()
        if ahead > position:
            raise InvalidArgument(
                f"{path} is of a node that was killed, and has parts of commits that are in the log only: take another "
                "node, or start this one until it has caught up, and stop it"
            )
        store_id = secrets.token_bytes(16)
        log = os.path.join(path, "log")
        SegmentedLog.start_after(log, store_id=store_id, last=position, time_us=place["time_us"])
        mark(path, store_id, **features_as_said(noted_features(path)))
    finally:
        release()
