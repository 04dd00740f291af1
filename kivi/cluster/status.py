"""What is to be known of a cluster, as one of its nodes sees it, and what somebody has to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from kivi.log.members import ANSWERS_S, State
from kivi.log.shards import parse_shards, refined, shown_shards

__all__ = [
    "IN_DOUBT",
    "ClusterStatus",
    "ContentStatus",
    "FeatureStatus",
    "LogCopy",
    "LogStatus",
    "MoveStatus",
    "NodeStatus",
]

SILENT_S: Final = 30.0
"""A node that has said nothing for so long is not the one that others leave the log to, and may be gone for good."""
_SILENT: Final = "silent"
"""The state that is shown of a live node of which no answer is waited for any more."""
IN_DOUBT: Final = frozenset({"differ", "undecided"})
"""States of content that somebody has to do something about."""
_DISK_FREE_MIN: Final = 512 << 20
_FILLING: Final = 0.6
_BEHIND: Final = 100_000
_UNTIL_THEN: Final = "until then nothing is written, and reads go on, of what each node has"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """``applied``, ``behind``: messages of the log, when the node said so. ``needed``: the first one that it may have
    to read again. ``agrees``: whether it had the same running hash there as this node; None if that is too long ago."""

    node: str
    state: State
    address: str
    version: str
    watermark: int
    applied: int
    behind: int
    behind_s: float
    """Everything that the log had so many seconds before it said so was applied."""
    needed: int
    silent_s: float
    """For how long at least the log has had nothing of it (``ReplicatedLog.silent_s``)."""
    disk_free_bytes: int
    disk_bytes: int
    agrees: bool | None
    shards: str = ""
    """Which it holds of the tables that have them, like 0-15,40."""
    server_problem: str = ""
    """What was wrong with its own server of the log (``--peers``) when it said so."""
    server_restarts: int = 0
    """How often that was started again since the node was."""
    server: str = ""
    """That server, as ``--peers`` names it."""
    needs: str = ""
    """What it needs the log for from ``needed`` on, if it says so."""

    @property
    def is_silent(self) -> bool:
        """A live node that others take for away, until it is heard again: a busy one is not."""
        return self.state is State.LIVE and self.silent_s > ANSWERS_S

    @property
    def shown_state(self) -> str:
        return _SILENT if self.is_silent else self.state


@dataclass(frozen=True, slots=True)
class LogCopy:
    """``behind``: messages that it has not, as its leader sees it."""

    server: str
    leads: bool
    current: bool
    away: bool
    behind: int


@dataclass(frozen=True, slots=True)
class LogStatus:
    """``first``, ``last``: messages. ``leader`` is empty while there is none."""

    stream: str
    leader: str
    first: int
    last: int
    nbytes: int
    limit_bytes: int
    copies: tuple[LogCopy, ...]


@dataclass(frozen=True, slots=True)
class MoveStatus:
    """Shards on their way to a node, from another one, or from none (""), which keeps them then. ``since``: the commit
    timestamp from which the new owner has them; 0: not yet. ``problem``: why not, or why they are not given up yet."""

    id: str
    shards: str
    to: str
    source: str
    since: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class FeatureStatus:
    """What not every version can read (``kivi.log.features``): ``is_on`` for good, or with its first use, unless some
    nodes ``lack`` it, which have to be upgraded first."""

    name: str
    what: str
    is_on: bool
    lack: list[str]


@dataclass(frozen=True, slots=True)
class ContentStatus:
    """What nodes said of what they store, as ``kivi.cluster.verifying.Compared``: of some shards, or of what is not
    sharded, at a commit timestamp."""

    shards: str
    ts: int
    state: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """``node`` is the one that answers; ``floor``: the first message that somebody may need. ``log`` is None while its
    servers do not answer; ``failed`` says what keeps the node from going on."""

    cluster: str
    node: str
    floor: int
    nodes: tuple[NodeStatus, ...]
    log: LogStatus | None
    failed: str = ""
    moves: tuple[MoveStatus, ...] = ()
    features: tuple[FeatureStatus, ...] = ()
    copies_wanted: int = 1
    """How many copies of the log the node that answers is to have it keep."""
    growing: str = ""
    """What keeps it from that."""
    content: tuple[ContentStatus, ...] = ()

    def problems(self) -> list[str]:
        """A sentence for each state that somebody has to do something about, which it says."""
        return [*self._of_log(), *self._of_nodes(), *self._of_shards(), *self._of_content()]

    def _of_content(self) -> Iterator[str]:
        named = {one.node: f"node {one.node}" + (f" ({one.address})" if one.address else "") for one in self.nodes}
        for one in self.content:
            if one.state not in IN_DOUBT:
                continue
            who, where = ", ".join(named.get(node, node) for node in one.nodes), f"{one.shards} at {one.ts}"
            if one.state == "differ":
                yield (
                    f"{who} has other content than most nodes ({where}), and stops: make it anew from a copy of "
                    "another node (kivi checkpoint)"
                )
            else:
                yield (
                    f"{who} have content that differs ({where}), or cannot read it, and no majority says which is "
                    "right: begin a third node from a backup of before, verify again, and make the wrong one anew"
                )

    def _of_log(self) -> Iterator[str]:
        if self.failed:
            yield f"node {self.node} has stopped: {self.failed}"
        if self.log is None:
            yield f"the log's servers do not answer node {self.node}: start most of them; {_UNTIL_THEN}"
            return
        if not self.log.leader:
            yield f"the log has no leader: start most of its servers; {_UNTIL_THEN}"
        for copy in self.log.copies:
            if copy.away:
                yield f"server {copy.server} of the log is away: start it; without a second one nothing is written"
            elif not copy.current:
                yield f"server {copy.server} of the log is {copy.behind:,} messages behind: wait, then look at its disk"
        if (count := len(self.log.copies)) < self.copies_wanted:
            why = self.growing or "they are being made"
            yield f"the log has {count} of the {self.copies_wanted} copies that it is to have: {why}"
        elif count == 1:
            yield "the log has one copy: what is committed is lost with that server; run three"
        used = self.log.nbytes / self.log.limit_bytes
        if used > _FILLING and (kept := self.kept()):
            yield (
                f"the log is {used:.0%} full, {kept}: start that node if it does not run; whoever holds the log "
                "back is evicted when it is nearly full, and what is staged is given up before"
            )

    def _of_nodes(self) -> Iterator[str]:
        versions = {one.version for one in self.nodes if one.state is State.LIVE and one.silent_s < SILENT_S}
        if len(versions) > 1:
            yield f"nodes have the versions {', '.join(sorted(versions))}: go on with the upgrade"
        address = {one.node: one.address or one.node for one in self.nodes}
        off: dict[str, list[str]] = {}
        for feature in self.features:
            for lacks in feature.lack:
                off.setdefault(lacks, []).append(feature.name)
        for node, names in off.items():
            yield f"the features {', '.join(names)} are off because of node {address.get(node, node)}: upgrade it"
        for one in self.nodes:
            named = f"node {one.node}" + (f" ({one.address})" if one.address else "")
            if one.agrees is False:
                yield f"{named} has applied something else: stop it, and make it anew from a copy of another node"
            if one.state is State.EVICTED:
                yield (
                    f"{named} was evicted: make it anew from a copy of another node (kivi checkpoint); if it is gone "
                    "for good, it is forgotten a day after it was heard last"
                )
            elif one.is_silent and one.silent_s > SILENT_S:
                yield (
                    f"{named} has said nothing for {one.silent_s:,.0f} s: start it again, or kivi cluster forget it; "
                    "the log is kept for it until it is nearly full"
                )
            elif one.is_silent:
                yield (
                    f"{named} has said nothing for {one.silent_s:,.0f} s: see whether it runs, and start it again if "
                    "it does not; its clients go on with other nodes"
                )
            elif one.state is State.LIVE and one.behind > _BEHIND:
                yield f"{named} was {one.behind:,} messages behind: look whether its disk or its processor is busy"
            if one.state is State.LIVE and one.server_problem:
                yield (
                    f"the server of the log of {named}: {one.server_problem}; it was started again "
                    f"{one.server_restarts} times: look at nats-server/log.txt in its directory"
                )
            if one.disk_bytes and one.disk_free_bytes < _DISK_FREE_MIN:
                yield f"the disk of {named} is almost full: make room"

    def _of_shards(self) -> Iterator[str]:
        for move in self.moves:
            if move.problem:
                waits = f"given up by node {move.source}" if move.since else f"moved to node {move.to}"
                yield f"the shards {move.shards} are not {waits} yet, which tries again: {move.problem}"
        found = self.shards()
        for held, nodes in found if len(found) > 1 else ():
            if not nodes:
                yield f"nobody holds the shards {held}: start a node that does; the log is kept for it until it is full"
            elif len(nodes) == 1:
                one = nodes[0]
                yield f"only node {one.address or one.node} holds the shards {held}: start a copy of it"

    def shards(self) -> list[tuple[str, list[NodeStatus]]]:
        """Sets of shards, like 0-15, and the live nodes that hold them; together all shards."""
        live = [(one, parse_shards(one.shards)) for one in self.nodes if one.state is State.LIVE]
        return [
            (shown_shards(cut), [one for one, held in live if not cut & ~held])
            for cut in refined(held for _, held in live)
        ]

    def described(self) -> dict[str, Any]:
        """With its problems, as plain values."""
        found = {**asdict(self), "problems": self.problems(), "kept": self.kept()}
        for one, node in zip(found["nodes"], self.nodes, strict=True):
            one["state"] = node.shown_state
        return found

    def kept(self) -> str:
        """From where on the log is kept, because of whom, and what for."""
        found = self.shards()
        if bare := [held for held, nodes in found if not nodes and len(found) > 1]:
            return f"kept from message {self.floor} on, as no node holds the shards {','.join(bare)}"
        if (one := self.holding()) is None:
            return ""
        who = "a copy of a node" if one.state is State.JOINING else f"node {one.address or one.node}"
        away = f", which has said nothing for {one.silent_s:,.0f} s" if one.is_silent else ""
        return f"needed from message {one.needed} on by {who}{away}{one.needs and ': ' + one.needs}"

    def holding(self) -> NodeStatus | None:
        """Because of which one the log is kept as far back as it is."""
        held = [one for one in self.nodes if one.state is not State.EVICTED]
        return min(held, key=lambda one: (one.needed, one.node), default=None)
