"""Whether nodes have the same content: all of them read what they store at one S, and say its hashes (C1, C5).

::

    begun      a pin (``kivi.mvcc.pins``) whose name begins with VERIFY: its number is the S, on every node
    read       each node, in a thread of its own and no faster than so many bytes a second (``kivi.store.content``)
    told       with its heartbeats: S, which shards, a hash of each
    compared   of what the log's prefix has of these heartbeats, so all nodes come to the same (`compare`)
    over       the pin has ended, and nobody is in doubt: from then on heartbeats carry what came of it, and no hashes

A node whose hash of a shard is another one than that of more than half of the live nodes that hold the shard knows
that it diverges, or is damaged: it stops, as it does where it has applied something else, and its marker says so, so
that it is not started again with that directory. What cannot be read is no hash that others have. If no hash has such
a majority, nobody knows who is right: then all go on, and all say so; a third copy decides.

A pin is prolonged by whoever still reads, and ended when all that are heard have told. A node that lacks shards
compares those that it has; a table that is dropped meanwhile ends the comparison for that S, without a finding.

**Invariant.** Hashes are told until all nodes that are heard have told theirs, since the pin is held for so long; and
where nodes differ, until the next comparison, so that whoever was stopped meanwhile hears that it differs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kivi.cluster.status import IN_DOUBT
from kivi.errors import DataLoss, KiviError, SnapshotTooOld, Unavailable
from kivi.log.members import Member, State
from kivi.log.replicated import ReplicatedLog
from kivi.log.shards import EVERY, SHARDS, parse_shards, shown_shards
from kivi.mvcc.replicated import ReplicatedCommitter
from kivi.store.content import REST, Content, content_at
from kivi.store.facade import Store

__all__ = ["RATE_BYTES", "VERIFY", "Compared", "Verifying", "compare", "told", "why_stop"]

_log = logging.getLogger("kivi.cluster")
VERIFY: Final = b"verify"
RATE_BYTES: Final = 32 << 20
_PIN_S: Final = 60.0
_SAY_S: Final = 30.0
_UNSHARDED: Final = "not sharded"


@dataclass(frozen=True, slots=True)
class Compared:
    """Of some shards, like 0-15, or of what is not sharded: what nodes said of them at ``ts``.

    ``state``: *agree*; *differ*: ``nodes`` from more than half of those that hold it; *undecided*: ``nodes`` from one
    another, and no hash has a majority; *waiting* for some node; *alone*: only one node holds it.
    """

    shards: str
    ts: int
    state: str
    nodes: tuple[int, ...] = ()


def told(content: Content) -> dict[str, Any]:
    """As it is said with a heartbeat. What is 0 is left out: of stores without sharded tables that is nearly all."""
    said = [(i, content.hashes[i]) for i in range(SHARDS + 1) if i == REST or content.shards >> i & 1]
    hashes = {str(i): f"{hash_:x}" for i, hash_ in said if hash_}
    return {
        "ts": content.ts,
        "tables": f"{content.tables:x}",
        "shards": shown_shards(content.shards),
        "hashes": hashes,
    }


def compare(members: Iterable[Member]) -> list[Compared]:
    """What live nodes have told of the newest S that anybody has told of."""
    live = [member for member in members if member.state is State.LIVE]
    ts = max((_said(member).get("ts", 0) for member in live), default=0)
    known: list[dict[str, Any]] = [said["over"] for member in live if "over" in (said := _said(member))]
    over = max(known, key=lambda one: int(one["ts"]), default=None)
    if over is not None and over["ts"] >= ts:
        return [Compared(shards, over["ts"], state, tuple(nodes)) for shards, state, nodes in over["found"]]
    if not ts:
        return []
    saying = {member.node: said for member in live if (said := _said(member)).get("ts") == ts}
    tells = {node: _parts_of(said) for node, said in saying.items()}
    tables = Counter(said["tables"] for said in saying.values() if "tables" in said)
    of_most = tables.most_common(1)[0][0] if tables else ""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for part in range(SHARDS + 1):
        holders = [member.node for member in live if part == REST or member.shards >> part & 1]
        hashes = {
            node: said["hashes"].get(str(part), "0") if "hashes" in said else ""  # which is no hash: it cannot be read
            for node, said in saying.items()
            if node in holders and said.get("tables", of_most) == of_most and tells[node] >> part & 1
        }
        verdict = _judged(hashes, len(holders))
        found[verdict] = found.get(verdict, 0) | 1 << part
    return list(_shown(found, ts))


def _said(member: Member) -> dict[str, Any]:
    said: dict[str, Any] = member.about.get("content") or {}
    return said


def _parts_of(said: dict[str, Any]) -> int:
    """Of which shards, and of what is not sharded, a node has told: of all if it cannot read them."""
    return 1 << REST | (parse_shards(said["shards"]) if "shards" in said else EVERY)


def _judged(hashes: dict[int, str], holders: int) -> tuple[str, tuple[int, ...]]:
    counts = Counter(hash_ for hash_ in hashes.values() if hash_)
    best, count = counts.most_common(1)[0] if counts else ("", 0)
    if 2 * count > holders:
        others = tuple(sorted(node for node, hash_ in hashes.items() if hash_ != best))
        if others:
            return "differ", others
        if holders < 2:
            return "alone", ()
        return ("agree" if count == holders else "waiting"), ()
    if len(set(hashes.values())) > 1 or "" in hashes.values():
        return "undecided", tuple(sorted(hashes))
    return "waiting", ()


def _shown(found: dict[tuple[str, tuple[int, ...]], int], ts: int) -> Iterator[Compared]:
    for (state, nodes), parts in found.items():
        if shards := parts & EVERY:
            yield Compared(shown_shards(shards), ts, state, nodes)
        if parts >> REST:
            yield Compared(_UNSHARDED, ts, state, nodes)


def why_stop(found: Iterable[Compared], node: int) -> DataLoss | None:
    """What keeps a node from answering any more; None: nothing does."""
    differing = [one for one in found if one.state == "differ" and node in one.nodes]
    if not differing:
        return None
    shards = ", ".join(one.shards for one in differing)
    ts = differing[0].ts
    return DataLoss(
        f"the content of node {node:x} at commit timestamp {ts} is other than that of most nodes, or cannot be read "
        f"(shards: {shards}): make it anew, in an empty directory, from a copy of another node (kivi checkpoint)"
    )


def _over(said: dict[str, Any], found: Sequence[Compared]) -> dict[str, Any]:
    """What a node says that has told its hashes, and hears that they were compared. Without ``ts`` at its place, which
    nodes of earlier versions would take for hashes that cannot be read."""
    if "ts" not in said or not found or any(one.state in IN_DOUBT for one in found):
        return said
    rows = [[one.shards, one.state, list(one.nodes)] for one in found]
    return {"at_us": said["at_us"], "over": {"ts": found[0].ts, "found": rows}}


class Holder(Protocol):
    """The node."""

    store: Store
    log: ReplicatedLog

    @property
    def id(self) -> int: ...

    @property
    def committer(self) -> ReplicatedCommitter: ...

    def heard(self) -> list[Member]: ...

    def diverges(self, error: DataLoss) -> None: ...


class _Stopped(Unavailable):
    pass


class Verifying:
    """``look`` is called again and again. ``content`` is what this node says with its heartbeats; None: nothing.

    ``every_s``: so often the first of the nodes begins, None: only if somebody asks.
    """

    def __init__(self, node: Holder, *, every_s: float | None = None, rate_bytes: int = RATE_BYTES) -> None:
        self._node, self._every_s, self._rate_bytes = node, every_s, rate_bytes
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._looked = 0
        self.content: dict[str, Any] | None = None

    def begin(self) -> int:
        """All nodes read what they store, at the S that this returns. Raises Unavailable if the log takes nothing."""
        return self._node.committer.pin(_PIN_S, _SAY_S, VERIFY)[1]

    def found(self) -> list[Compared]:
        with self._node.committer.entry_lock:
            members = list(self._node.log.members)
        return compare(members)

    def look(self) -> None:
        """Does what is to be done now, or begins it."""
        node = self._node
        with node.committer.entry_lock:
            members, own = list(node.log.members), node.log.members.find(node.id)
            pin, heard, time_us = node.committer.pins.newest(VERIFY), node.heard(), node.log.place.time_us
        found = compare(members)
        if (why := why_stop(found, node.id)) is not None:
            node.diverges(why)
            return
        is_first = min((member.node for member in heard), default=None) == node.id
        if pin is None:
            if self.content is not None and own is not None and _said(own) == self.content:
                self.content = _over(self.content, found)
            last_us = max((_said(member).get("at_us", 0) for member in heard), default=0)
            if is_first and self._every_s is not None and time_us - last_us > self._every_s * 1_000_000:
                self.begin()
            return
        if is_first and all(_said(member).get("ts") == pin.number for member in heard):
            node.committer.prolong(pin.name, 0)
        is_busy = self._thread is not None and self._thread.is_alive()
        is_reached = not node.store.is_catching_up and node.store.watermark() >= pin.number
        if pin.number > self._looked and is_reached and not is_busy:
            self._looked = pin.number
            self._thread = threading.Thread(
                target=self._read, args=(pin.name, time_us), name="kivi-verify", daemon=True
            )
            self._thread.start()

    def _read(self, name: bytes, time_us: int) -> None:
        node = self._node
        try:
            lease = node.committer.pins.find(name)
            try:
                said = told(content_at(node.store.reads, lease, self._paced(name)))
            except DataLoss as error:
                _log.error("what this node stores cannot be read: %s", error.message)
                said = {"ts": lease.ts, "error": error.message}
            self.content = {**said, "at_us": time_us}
        except (_Stopped, SnapshotTooOld) as error:
            _log.warning("what this node stores was not read to the end: %s", error.message)
        except KiviError as error:
            _log.warning("what this node stores cannot be read now (%s): again", error.message)
            self._looked = 0
        except Exception:
            _log.exception("reading what this node stores has failed")

    def _paced(self, name: bytes) -> Callable[[int], None]:
        began = renewed = time.monotonic()
        total = 0

        def read(nbytes: int) -> None:
            nonlocal total, renewed
            total += nbytes
            now = time.monotonic()
            if now - renewed > _PIN_S / 4:
                renewed = now
                self._node.committer.prolong(name, _PIN_S)
            while (left := began + total / self._rate_bytes - time.monotonic()) > 0 and not self._ended.is_set():
                self._ended.wait(min(left, _PIN_S / 8))
            if self._ended.is_set():
                raise _Stopped("the node is being stopped")

        return read

    def close(self) -> None:
        """Reads no further. Harmless twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
