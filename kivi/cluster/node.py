"""One node of a cluster: its store, its connection to the log, and the thread that applies what the log brings.

::

    directory   KIVI names the cluster, its generation and the node; engine/ as ever, and no log/: it is elsewhere
    reached     how far the node had come at least (``kivi.cluster.reached``)
    stream      kivi-NAME: its metadata has the generation, given by whoever made it
    engine      the node's boot (one more with every start), and its place in the log

A new node begins with the first message of the log, or with a checkpoint or a backup of another node, which becomes a
node of its own when it is opened as one. While a copy is on its way the log is kept for it, for an hour.

Every so often a node *says* from where it may have to read again; that is a heartbeat, too, and carries the running
hash of all that it has applied (``kivi.log.members``, ``kivi.log.frames``). One of the nodes, the live one with the
least number, moves the floor of the log up and deletes what lies below it. If the log is nearly full all the same,
whoever holds it back is evicted by an entry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kivi.cluster.asking import Asking
from kivi.cluster.founding import first_log_of
from kivi.cluster.moving import Moving, node_named
from kivi.cluster.reached import Reached
from kivi.cluster.status import (
    IN_DOUBT,
    SILENT_S,
    ClusterStatus,
    ContentStatus,
    FeatureStatus,
    LogCopy,
    LogStatus,
    MoveStatus,
    NodeStatus,
)
from kivi.cluster.streams import LOG_BYTES, generation_of, genesis_of, open_stream
from kivi.cluster.verifying import RATE_BYTES, Verifying, compare
from kivi.encoding.keyspaces import meta_key
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss, InvalidArgument, KiviError, NotFound, Unavailable
from kivi.log import CommitLog
from kivi.log.features import FEATURES
from kivi.log.members import JOINING_US, NEEDS, Member, State, truncation
from kivi.log.moves import Move
from kivi.log.natsgroup import find_group, remove_server, server_named
from kivi.log.natslink import Nats
from kivi.log.natsserver import NatsServer
from kivi.log.replicated import Place, ReplicatedLog
from kivi.log.shards import EVERY, parse_shards, shown_shards
from kivi.mvcc.replicated import PLACE, ReplicatedCommitter
from kivi.runtime.settings import Settings
from kivi.store.facade import Store
from kivi.store.opening import (
    claim_node,
    has_obeyed,
    held_shards,
    hold_shards,
    note_differs,
    note_features,
    note_obeyed,
    noted_features,
    rows_since,
)

__all__ = ["ClusterNode"]

_log = logging.getLogger("kivi.cluster")
_BOOT: Final = meta_key("boot")
_CHANCE_BITS: Final = 24
_FULL: Final = 0.8
"""Of the log's bytes: from here on, whoever holds it back is evicted."""
_WAIT_S: Final = 0.2
_RETRY_S: Final = 0.5
_SAY_S: Final = 1.0
_TELL_S: Final = 0.25
"""How often a node that lacks shards tells the others of its snapshots: for so long they fold nothing more."""
_FULL_WAIT_S: Final = 0.005
_SLACK: Final = 4_096
"""So many messages are worth an entry that truncates, or a flush of a node that has nothing else to write."""
_KEPT: Final = 0.25
"""Of the log's bytes: below it nothing is truncated, so that a new node can begin with the first message."""
_HOLD_S: Final = 30.0
_UNCLAIMED_S: Final = 10.0
"""For so long nobody may say that it builds what is building, until another node does."""
_ASKED_S: Final = 5.0
"""For so long others wait for a node that is still starting, before they are told so."""
_LOOK_S: Final = 0.02


class ClusterNode:
    """A node that has applied all that the log had when it was opened. ``about`` is what it says of itself.
    ``copies`` of the log, by default as many as there are ``servers``, up to three; ``login`` as ``Nats`` takes it.
    ``own_server``: the server of the log that it runs, if it does.
    ``verify_every_s``: how often what nodes store is compared, at most ``verify_bytes`` of it a second.
    ``shards``: which it is to hold, like "0-15,40" (``kivi.log.shards``); by default, and if it was told the same the
    last time, those that it has.

    Raises InvalidArgument for a directory that belongs to no cluster, or to another one, and for shards that it has
    not, or that no other node holds if this one gives them up; DataLoss if the log does not reach back to what the node
    has; Unavailable if the log's servers cannot be reached.
    """

    def __init__(
        self,
        path: str,
        name: str,
        servers: Sequence[str],
        *,
        about: dict[str, Any] | None = None,
        settings: Settings | None = None,
        log_bytes: int = LOG_BYTES,
        copies: int | None = None,
        shards: str | None = None,
        login: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        own_server: NatsServer | None = None,
        verify_every_s: float | None = None,
        verify_bytes: int = RATE_BYTES,
    ) -> None:
        self.name, self.about, self._path = name, about or {}, path
        self._own_server = own_server
        self.log_bytes = log_bytes
        wanted = None if shards is None else parse_shards(shards)
        if wanted is not None and has_obeyed(path, wanted):
            _log.info("the node is to hold %s, as it was told before: it holds what was made of that", shards)
            wanted = None
        self._news = threading.Event()
        self._ending, self._ended = False, threading.Event()
        self._growing = ""
        """What keeps the log from having the copies that it is to have."""
        self._servers: set[str] = set()
        """Names of servers of the log, which these may lose."""
        self._is_open, self._unclaimed = threading.Event(), dict[int, float]()
        with contextlib.ExitStack() as opened:
            self._nats = Nats(servers, timeout_s=timeout_s, **login or {})
            opened.callback(self._nats.close)
            try:
                self.stream = open_stream(
                    self._nats,
                    name,
                    settings or Settings(),
                    log_bytes=log_bytes,
                    copies=copies,
                    made=first_log_of(path),
                    timeout_s=timeout_s,
                )
            except NotFound:
                raise NotFound(
                    f"these servers have no log of the cluster {name}, and {path} was in one: start those that have "
                    "it, or begin it anew with kivi cluster reseed"
                ) from None
            self.generation, self._genesis = generation_of(self.stream), genesis_of(self.stream)
            self._reached = Reached(path, self.generation)
            self._number = claim_node(path, name, self.generation, empty=not self._genesis, shards=wanted)
            self.store = Store.open(path, settings=settings, make_log=self._log_of)
            opened.callback(self.store.crash)
            self.store.shards.held, self.store.shards.since = held_shards(path), rows_since(path)
            self._wanted = self.store.shards.held if wanted is None else wanted
            reads = Nats(servers, timeout_s=timeout_s, **login or {})
            opened.callback(reads.close)
            name_of_reads = f"kivi.reads.{self.stream.name}.{self.generation.hex()}"
            self.asking = Asking(reads, name_of_reads, self.log, self._serve)
            opened.callback(self.asking.close)
            self.store.spanning.owners = self.asking
            self.store.before_copy, self.store.cluster_status = self._hold, self.status
            self.moving = Moving(self)
            self.store.move_shards, self.store.cancel_move = self.moving.move, self.moving.cancel
            self.store.rebalance_shards = self.moving.rebalance
            self.store.forget_node = self.forget
            self.verifying = Verifying(self, every_s=verify_every_s, rate_bytes=verify_bytes)
            self.store.verify_cluster = self.verifying.begin
            self.log.disagreements = lambda: sum(one.state in IN_DOUBT for one in self.verifying.found())
            self.stream.on_news = self._news.set
            self._threads = [
                threading.Thread(target=run, name=f"kivi-cluster-{run.__name__}", daemon=True)
                for run in (self._run, self._keep, self._remember)
            ]
            for thread in self._threads:
                thread.start()
            opened.callback(self._end)
            self._catch_up(timeout_s)
            self.committer.need(noted_features(path))  # a log that began anew has none on
            self.committer.newest(timeout_s, [self.live().entry()])  # it has all that there is, and is known
            self._give_up_shards()
            if wanted is not None:
                note_obeyed(path, wanted)
            self._is_open.set()
            opened.pop_all()

    def _serve(self, data: bytes) -> Iterator[bytes]:
        """What others ask for, once all is applied that there was at the start: before that the log's time is an
        earlier one, in which a pin seems to hold whose versions were swept after it had ended."""
        if not self._is_open.wait(_ASKED_S):
            raise Unavailable("this node has not applied yet what the log had when it started")
        yield from self.store.spanning.serve(data)

    def _catch_up(self, timeout_s: float) -> None:
        """Until what the log has now is applied, however long that takes. Raises Unavailable if it gets no further for
        ``timeout_s``, what has ended the log, and that it has lost something: what it still has is in base then, for a
        log that begins anew with this node."""
        last, at, moved = None, -1, time.monotonic()
        while last is None or at < max(last, self.log.reached[0]) or self.log.lost_suffix is not None:
            if self.log.failed is not None:
                raise self.log.failed
            if self.log.lost_suffix is not None:
                self._fold_all()
                raise self.log.lost_suffix
            if last is None:
                with contextlib.suppress(Unavailable):
                    last = self.stream.bounds()[1]
            if self.log.place.sequence > at:
                at, moved = self.log.place.sequence, time.monotonic()
            elif time.monotonic() - moved > timeout_s:
                raise Unavailable(f"the log's servers give nothing behind message {at}, which this node has applied")
            else:
                time.sleep(_LOOK_S)

    def _give_up_shards(self) -> None:
        """Once that counts for all nodes. What it gives up stays where it is, and is never read."""
        known = self.log.members.find(self.id)
        if known is not None and (kept := known.shards & ~self._wanted):
            raise InvalidArgument(
                f"no other node that was heard lately holds the shards {shown_shards(kept)}: start one that does, a "
                "copy of this one for example, before this one gives them up"
            )
        if self._wanted != self.store.shards.held:
            self.holds(self._wanted)

    def holds(self, held: int, since: int | None = None) -> None:
        """Notes that it holds these shards: fewer, or ``since`` a commit timestamp more, which base has now."""
        shards = self.store.shards
        rows = [(cts, some & held) for cts, some in shards.since if some & held]
        if since is not None and (new := held & ~shards.held):
            rows.append((since, new))
        hold_shards(self._path, held, rows)
        self._wanted = held
        if since is not None:  # at no moment there is more to be read than there is
            shards.since = tuple(rows)
        shards.held = held
        shards.since = tuple(rows)

    def _log_of(self, engine: Engine) -> CommitLog:
        starts = (int.from_bytes(engine.get(_BOOT) or b"", "little") >> _CHANCE_BITS) + 1
        boot = starts << _CHANCE_BITS | secrets.randbits(_CHANCE_BITS)  # a copy of the directory has another one
        batch = WriteBatch()
        batch.put(_BOOT, boot.to_bytes(8, "little"))
        engine.write(batch)
        engine.flush()  # a boot that comes twice would be two processes in one
        self.log = ReplicatedLog(
            self.stream,
            generation=self.generation,
            node=self._number,
            boot=boot,
            saved=engine.get(PLACE),
            genesis=self._genesis,
            reached=self._reached.read(),
        )
        self.log.on_features = functools.partial(note_features, self._path)
        if self._own_server is not None:
            own_server = self._own_server
            self.log.server_restarts = lambda: own_server.restarts
        return self.log

    @property
    def id(self) -> int:
        return self.log.node

    @property
    def committer(self) -> ReplicatedCommitter:
        committer = self.store.committer
        assert isinstance(committer, ReplicatedCommitter)
        return committer

    # -- the log's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Applies what the log brings, as fast as it is folded. Whatever keeps it from that for good ends the node's
        answers (C5)."""
        retried = time.monotonic()
        while not self._ending and self.log.failed is None:
            self._news.wait(_WAIT_S)
            self._news.clear()
            try:
                while not self._ending and self._has_room() and self.log.pump():
                    pass
                if time.monotonic() - retried > _RETRY_S:
                    retried = time.monotonic()
                    self.log.outbox.retry()
            except Unavailable as error:  # until some server of the log answers
                _log.debug("the log cannot be read now: %s", error.message)
            except Exception as error:
                _log.exception("applying the log has failed")
                self.log.fail(DataLoss(f"applying the log has failed: {error!r}"))

    def _has_room(self) -> bool:
        """Whether memory takes more. What other nodes have committed is in the log, and can wait there."""
        if not self.committer.is_full:
            return True
        self.committer.on_pressure()
        time.sleep(_FULL_WAIT_S)
        self._news.set()
        return False

    def _keep(self) -> None:
        """Says what others need to know of this node, and does what falls to it, in a thread that may wait."""
        while not self._ended.wait(_SAY_S if self._wanted == EVERY else _TELL_S) and self.log.failed is None:
            try:
                self._say()
                self._grow()
                self.asking.sweep()
                self.moving.look()
                self.verifying.look()
                self._take_up()
            except KiviError as error:
                _log.debug("nothing is said now: %s", error.message)
            except Exception:
                _log.exception("saying what this node needs has failed")

    def _remember(self) -> None:
        """In a thread that may wait for the disk."""
        while not self._ended.wait(_SAY_S) and self.log.lost_suffix is None:
            if self.log.place.sequence > self.log.reached[0]:
                try:
                    self._reached.note(self.log.place)
                except OSError as error:  # the disk is full: it knows of less, and of nothing wrong
                    _log.debug("how far this node is cannot be noted now: %s", error)

    def _say(self) -> None:
        if self.log.proposed < 2:  # while nothing comes back it need not be said again
            self.committer.say([self.live().entry()], lambda error, number: None)
        if self.log.place.sequence - self.log.needed > _SLACK:
            self.store.consolidator.save_place()
        with self.committer.entry_lock:
            floor, time_us = self.log.members.floor, self.log.place.time_us
            heard, holding = [member.node for member in self.heard()], self.log.members.holding()
            forgotten = self.log.members.forgotten(time_us)
        if not heard or not holding:
            return
        used = self.stream.used
        if min(heard) == self.id:
            if forgotten or (used > _KEPT and holding[0].needed - floor > _SLACK):
                self.committer.say([truncation(holding[0].needed)], lambda error, number: None)
            self.stream.purge(floor)
        if used > _FULL and min(heard) == self.id and self._gives_up_stages(holding[0].needed):
            return
        if used > _FULL and min(set(heard) - {holding[0].node}, default=None) == self.id:
            _log.warning("node %x holds the log back, which is nearly full: it is evicted", holding[0].node)
            evicted = dataclasses.replace(holding[0], state=State.EVICTED)
            self.committer.say([evicted.entry()], lambda error, number: None)

    def _grow(self) -> None:
        """Whichever node knows of enough servers; the log is written and read meanwhile."""
        try:
            self.stream.grow()
            self._growing = ""
        except Unavailable as error:
            self._growing = error.message

    def heard(self) -> list[Member]:
        """The live nodes that have spoken of late. Under the entry lock."""
        return [member for member in self.log.members if self.log.is_heard(member, SILENT_S)]

    def _take_up(self) -> None:
        """Builds again what nobody says that it builds, its node having died: the first node, of those that hold all
        events if there are any, else of those that say what they build, if only that it is nothing: versions that do
        not cannot build of what others hold.

        Two may build the same thing, if one stood still for long: see ``kivi.store.backfill``.
        """
        if not self._is_open.is_set() or self.store.is_catching_up:
            return
        backfill = self.store.backfill
        with self.committer.entry_lock:
            heard = self.heard()
        claimed = backfill.building.union(*(member.about.get("building", ()) for member in heard))
        left = [group for group in backfill.unfinished() if claimed.isdisjoint(schema.id for schema in group)]
        now = time.monotonic()
        self._unclaimed = {group[0].id: self._unclaimed.get(group[0].id, now) for group in left}
        able = [member for member in heard if member.shards == EVERY or "building" in member.about]
        first = min(able, key=lambda member: (member.shards != EVERY, member.node), default=None)
        if first is not None and first.node == self.id:
            backfill.resume([group for group in left if now - self._unclaimed[group[0].id] > _UNCLAIMED_S])

    def _gives_up_stages(self, needed: int) -> bool:
        """Of what clients have staged and never committed, the oldest, if the log is kept for that: as its time limit
        would. No node could do without it, so none is to blame."""
        with self.committer.entry_lock:
            live = [stage for stage in self.store.stages.live() if self.log.message_of(stage) <= needed]
        if live:
            _log.warning("the log is nearly full, and kept for what is staged: %d stages are given up", len(live))
            self.store.staging.drop(live)
        return bool(live)

    def _hold(self) -> None:
        """Before a copy is made: the log is kept for whoever will begin with it. Raises Unavailable if it is not.

        Of a log that has lost something there is nothing to be kept: the copy is what another one begins with.
        """
        if self.log.lost_suffix is not None:
            return
        self._fold_all()
        copy = Member(int.from_bytes(secrets.token_bytes(7), "little"), State.JOINING, self.log.needed)
        self.committer.newest(_HOLD_S, [copy.entry()])
        held = self.log.members.find(copy.node)
        if held is None or held.state is not State.JOINING:
            raise Unavailable("the log was truncated before it could be kept for a copy: try again")

    def _fold_all(self) -> None:
        self.store.consolidate()
        with self.store.consolidator.mutex:
            self.store.consolidator.flush()

    def forget(self, named: str) -> None:
        """Evicts a node that is gone for good, and removes its server of the log. Raises InvalidArgument for one that
        may come back, Unavailable if the log does not take it, or its servers do not."""
        self.committer.newest(_HOLD_S)
        with self.committer.entry_lock:
            members = [member for member in self.log.members if member.state is not State.JOINING]
            gone = node_named(members, named)
            is_heard, alone = self.log.is_heard(gone), self.log.members.alone(gone)
            serving = {one.about.get("server") for one in members if self.log.is_heard(one)}
        if is_heard:
            raise InvalidArgument(f"node {named} was heard in the last ten seconds: stop it for good before")
        if alone:  # its eviction would be void, so nothing is done before it
            raise InvalidArgument(
                f"node {named} alone holds the shards {shown_shards(alone)}: start it, or a node that begins with a "
                "backup of it"
            )
        server = gone.about.get("server")
        if self._own_server is not None and server and server not in serving:
            self._remove_server(self._own_server, server)
        evicted = dataclasses.replace(gone, state=State.EVICTED)
        self.committer.newest(_HOLD_S, [evicted.entry()])
        with self.committer.entry_lock:
            known = self.log.members.find(gone.node)
        if known is not None and known.state is not State.EVICTED:
            raise InvalidArgument(
                f"node {named} holds some shards alone now, or has come back: see kivi cluster shards"
            )

    def _remove_server(self, own: NatsServer, name: str) -> None:
        """Once as many others are there as there are copies, so that its copy has a place."""
        with contextlib.closing(Nats([own.url], timeout_s=_HOLD_S, **own.admin)) as nats:
            group = find_group(nats, [name])
            if group is None:
                raise Unavailable("the servers of the log have no leader now: try again in a moment")
            if name not in group.members:
                return
            there = group.members & {own.name, *own.heard()}
            if name in there:
                raise InvalidArgument(f"the server {name} of the log is there: end it, too")
            if len(there) < self.stream.copies:
                raise InvalidArgument(
                    f"the log has {self.stream.copies} copies, and {len(there)} servers without {name}: start the node "
                    "that takes its place first, with a list of --peers that names it"
                )
            remove_server(nats, name, _HOLD_S)

    def live(self, held: int | None = None) -> Member:
        """What it says of itself. ``held``: the shards that it is to hold."""
        at, disk = self.log.place, os.statvfs(self._path)
        held = self._wanted if held is None else held
        about = {
            **self.about,
            "watermark": self.committer.watermark.value,
            "applied": at.sequence,
            "hash": at.hash.hex(),
            "age_s": round(self.log.age_s, 3),
            "disk_free": disk.f_bavail * disk.f_frsize,
            "disk": disk.f_blocks * disk.f_frsize,
            "features": sorted(self.log.features),
            "building": sorted(self.store.backfill.building),
        }
        if problems := {move: problem for move, problem in list(self.moving.problems.items()) if problem}:
            about["moves"] = problems
        if self.verifying.content is not None:
            about["content"] = self.verifying.content
        if self._own_server is not None:
            about["server"] = self._own_server.name
            about["server_problem"], about["server_restarts"] = self._own_server.problem, self._own_server.restarts
        needed, about["needs"] = self.log.needs()
        member = Member(self.id, State.LIVE, needed, about)
        if held == EVERY:
            return member
        return member.with_shards(held).with_snapshots(*self.store.leases.told())

    def diverges(self, error: DataLoss) -> None:
        """It answers nothing any more, nor if it is started again (C5)."""
        note_differs(self._path, error.message)
        self.log.fail(error)

    # -- what is to be known ----------------------------------------------------------------------

    def status(self) -> ClusterStatus:
        """As of this node's place in the log. Does not wait for more than the log's servers, and not long for them."""
        try:
            info = self.stream.info()
        except Unavailable:
            info = None
        with self.committer.entry_lock:
            members, floor, at = list(self.log.members), self.log.members.floor, self.log.place
            moves = list(self.log.members.moves.values())
            features = [
                FeatureStatus(
                    name, what, name in self.log.members.on, [f"{one.node:x}" for one in self.log.lacking(name)]
                )
                for name, what in FEATURES.items()
            ]
        log = None if info is None else self._log_status(info, members)
        failed = self.log.failed or self.log.lost_suffix
        return ClusterStatus(
            cluster=self.name,
            node=f"{self.id:x}",
            floor=floor,
            nodes=tuple(self._node_status(member, at, log) for member in members),
            log=log,
            failed="" if failed is None else failed.message,
            copies_wanted=self.stream.copies_wanted,
            growing=self._growing,
            moves=tuple(self._move_status(move, members) for move in moves),
            features=tuple(features),
            content=tuple(
                ContentStatus(one.shards, one.ts, one.state, tuple(f"{node:x}" for node in one.nodes))
                for one in compare(members)
            ),
        )

    @staticmethod
    def _move_status(move: Move, members: list[Member]) -> MoveStatus:
        waited_for = move.source if move.since else move.to
        said = next((member.about.get("moves") for member in members if member.node == waited_for), None)
        return MoveStatus(
            id=move.id,
            shards=shown_shards(move.shards),
            to=f"{move.to:x}",
            source="" if move.source is None else f"{move.source:x}",
            since=move.since,
            problem=said.get(move.id, "") if isinstance(said, dict) else "",
        )

    def _node_status(self, member: Member, at: Place, log: LogStatus | None) -> NodeStatus:
        about = member.about
        applied = about.get("applied", 0)
        return NodeStatus(
            node=f"{member.node:x}",
            state=member.state,
            address=about.get("address", ""),
            version=about.get("version", ""),
            watermark=about.get("watermark", 0),
            applied=applied,
            behind=max(0, (at.sequence if log is None else log.last) - applied) if applied else 0,
            behind_s=about.get("age_s", 0.0),
            needed=member.needed,
            needs=self._needs(member),
            silent_s=self.log.silent_s(member),
            disk_free_bytes=about.get("disk_free", 0),
            disk_bytes=about.get("disk", 0),
            agrees=self.log.has_applied(applied, about.get("hash", "")) if applied else None,
            server_problem=about.get("server_problem", ""),
            server_restarts=about.get("server_restarts", 0),
            server=about.get("server", ""),
            shards=shown_shards(member.shards),
        )

    def _needs(self, member: Member) -> str:
        """What a node needs the log for, if that is said."""
        if member.state is State.JOINING:
            left_s = max(0.0, JOINING_US / 1e6 - self.log.silent_s(member))
            return f"to begin with (a checkpoint or a backup, for {left_s / 60:,.0f} more minutes at most)"
        return NEEDS.get(member.about.get("needs", ""), "")

    def _log_status(self, info: dict[str, Any], members: list[Member]) -> LogStatus:
        self._servers.update(one.about["server"] for one in members if one.about.get("server"))
        state, cluster = info["state"], info.get("cluster") or {}
        leader = cluster.get("leader", "")
        copies = [LogCopy(leader, True, True, False, 0)] if leader else []
        for copy in cluster.get("replicas") or ():
            current, server = bool(copy.get("current")), server_named(copy["name"], self._servers)
            copies.append(LogCopy(server, False, current, bool(copy.get("offline")), copy.get("lag", 0)))
        self._servers.update(copy.server for copy in copies)
        return LogStatus(
            stream=self.stream.name,
            leader=leader,
            first=state["first_seq"],
            last=state["last_seq"],
            nbytes=state["bytes"],
            limit_bytes=self.log_bytes,
            copies=tuple(sorted(copies, key=lambda copy: copy.server)),
        )

    def close(self) -> None:
        """Stops reading the log, folds and flushes. Harmless twice."""
        self.asking.close()
        self._end()
        self.store.close()
        self._nats.close()

    def _end(self) -> None:
        self.moving.close()
        self.verifying.close()
        self._ending = True
        self._ended.set()
        self._news.set()
        for thread in self._threads:
            thread.join()
        self.log.stop()  # consolidation, too, may wait for what does not come back any more
