"""A cluster that begins with the content of a store: one that was alone, or the best node of a log that lost something.

::

    a node's directory   becomes a store of its own: what the node had applied when it was stopped
    the store            is folded whole, and what it kept of an older log is deleted
    its marker           says of which cluster it is the copy, before there is one: this can be done again
    the stream           is made, with the number that the store ends with; another one of that name goes first

The directory is opened as a node then. Every other node begins with a copy of it: the log has nothing of before.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kivi.cluster.streams import LOG_BYTES, generation_of, open_stream
from kivi.encoding.keyspaces import Space, fact_key, meta_key, space_prefix
from kivi.engine import WriteBatch
from kivi.engine.rocks import Records, RocksEngine
from kivi.errors import AlreadyExists, InvalidArgument, NotFound
from kivi.log.natslink import Nats
from kivi.log.segmented import SegmentedLog
from kivi.mvcc.consolidate import AHEAD, POSITION
from kivi.mvcc.replicated import PLACE
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from kivi.store.opening import claim, content_of, mark

__all__ = ["Founded", "adopt"]


@dataclass(frozen=True, slots=True)
class Founded:
    """``last``: the last commit timestamp of the store; the log's first one comes after it. ``lost``: messages that
    the log had and the store has not, as far as can be seen; None if there was no log."""

    cluster: str
    last: int
    lost: int | None = None


def adopt(
    path: str,
    name: str,
    servers: Sequence[str],
    *,
    replace: bool = False,
    settings: Settings | None = None,
    log_bytes: int = LOG_BYTES,
    timeout_s: float = 60.0,
) -> Founded:
    """Makes a cluster of the store in a directory that nobody has open. ``replace``: although there is one of that
    name, which ends with this; then the directory may be that of one of its nodes.

    Raises AlreadyExists if there is such a cluster, InvalidArgument for the directory of a node that cannot leave it;
    and what opening the store, or reaching the log's servers, raises. It may be called again then.
    """
    chosen = settings or Settings()
    with contextlib.closing(Nats(servers, timeout_s=timeout_s)) as nats:
        content = content_of(path)
        begun = _begun(content, name)
        lost = None
        try:
            with contextlib.closing(open_stream(nats, name, chosen, log_bytes=log_bytes, timeout_s=timeout_s)) as old:
                there, last_message = generation_of(old), old.bounds()[1]
        except NotFound:
            there = b""
        if there and (begun is None or there != begun[0]):
            if not replace:
                raise AlreadyExists(
                    f"there is a cluster {name} already: name another one, or kivi cluster reseed ends it and begins "
                    "anew with this store"
                )
            if content.get("store_id") == there.hex():
                lost = last_message - _applied(path)
        if content.get("cluster") is not None:
            if not replace or content["cluster"] != name:
                raise InvalidArgument(
                    f"{path} is a node of the cluster {content['cluster']}: kivi cluster reseed takes it"
                )
            _leave(path)
        if begun is None:
            begun = secrets.token_bytes(16), _prepared(path)
            mark(path, bytes.fromhex(content_of(path)["store_id"]), copy_of=[name, begun[0].hex()], genesis=begun[1])
        generation, last = begun
        if there and there != generation:
            with contextlib.closing(open_stream(nats, name, chosen, log_bytes=log_bytes, timeout_s=timeout_s)) as old:
                old.delete()
        open_stream(nats, name, chosen, log_bytes=log_bytes, made=begun, timeout_s=timeout_s).close()
    return Founded(name, last, lost)


def _begun(content: dict[str, object], name: str) -> tuple[bytes, int] | None:
    """What an earlier attempt has begun: the generation, and the last commit timestamp."""
    copy_of, genesis = content.get("copy_of"), content.get("genesis")
    if not isinstance(copy_of, list) or not isinstance(genesis, int) or copy_of[0] != name:
        return None
    return bytes.fromhex(copy_of[1]), genesis


def _prepared(path: str) -> int:
    """Everything in base, and nothing of a log that it may have had before. The last commit timestamp."""
    store = Store.open(path, settings=Settings(background=False))
    try:
        last = store.consolidate()
        batch = WriteBatch()
        for name in ("facts", "definitions"):
            batch.delete(meta_key(name))
        batch.delete(PLACE)
        batch.delete(AHEAD)
        batch.delete_range(fact_key(0), fact_key(last + 1))
        store.engine.write(batch)
        store.engine.flush()
    finally:
        store.close()
    return last


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
        mark(path, store_id)
    finally:
        release()
