"""A node's part in moves of shards (``kivi.log.moves``): it takes what it is to have, and gives up what it is to give.

::

    asked    by an entry, written by whatever node somebody asked
    taking   the new owner, in a thread of its own (``kivi.store.moving``); whatever keeps it from that, it tries
             again
    there    its entry: from here on it is asked for these shards
    giving   the old owner, when nobody reads below S: it says that it holds the rest, which counts if the new owner was
             heard lately; then it applies and answers for the rest. Whatever keeps it from that, it tries again

What there is to do is read from the log's prefix again and again, so a node that was killed in the middle goes on with
it, or begins the copy anew. What it has by its marker and not by the prefix it does not hold: a move that was cancelled
while the node was away.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from kivi.errors import InvalidArgument, KiviError, Unavailable
from kivi.log import balance
from kivi.log.features import NO_SHARDS
from kivi.log.members import Member, State
from kivi.log.moves import Move, asked_entry, cancelled_entry, there_entry
from kivi.log.replicated import ReplicatedLog
from kivi.log.shards import EVERY, SHARDS, parse_shards, shown_shards
from kivi.mvcc.replicated import ReplicatedCommitter
from kivi.store.facade import Store
from kivi.store.moving import Remains, erase, is_needed_below, take

__all__ = ["Moving", "node_named"]

_log = logging.getLogger("kivi.cluster")
_SAY_S: Final = 30.0
_AGAIN_S: Final = 2.0


class Holder(Protocol):
    """The node."""

    store: Store
    log: ReplicatedLog

    @property
    def id(self) -> int: ...

    @property
    def committer(self) -> ReplicatedCommitter: ...

    def live(self, held: int | None = None) -> Member: ...

    def holds(self, held: int, since: int | None = None) -> None: ...


class _Stopped(Unavailable):
    pass


class Moving:
    """``look`` is called again and again, and what a move fails with stays with that move: others, and what comes
    behind ``look``, go on. ``problems``: by the id of a move, why this node's part of it is not done yet."""

    def __init__(self, node: Holder) -> None:
        self._node = node
        self._thread: threading.Thread | None = None
        self._begin_at = 0.0
        self._remains = Remains()
        self._ended, self._begins = threading.Event(), threading.Lock()
        self.problems = dict[str, str]()

    # -- what somebody asks of any node -----------------------------------------------------------------

    def move(self, shards: str, to: str, source: str | None, *, copy: bool) -> str:
        """Writes that shards go to a node, from another one; its id. Nodes are named by address or number. ``source``:
        by default the only other node that holds them; ``copy``: nobody does.

        Raises InvalidArgument, and Unavailable if the log does not take it.
        """
        self._node.committer.newest(_SAY_S)  # a node that has just begun is known then
        with self._node.committer.entry_lock:
            members = [one for one in self._node.log.members if one.state is State.LIVE]
        named, there = parse_shards(shards), node_named(members, to)
        given = None if copy else self._source(members, named, there, source)
        move = Move(secrets.token_hex(4), named, there.node, given)
        with self._node.committer.entry_lock:
            known = self._node.log.members
            why, giver = known.why_not(move), None if given is None else known.find(given)
            going = [other.shards for other in known.moves.values() if other.source == given]
        gives_all = giver is not None and not giver.shards & ~functools.reduce(operator.or_, going, named)
        if why is None and not self._order([move], gives_all=gives_all):
            why = "something else came first: ask again"
        if why is not None:
            raise InvalidArgument(f"the shards {shown_shards(named)} cannot be moved to node {there.node:x}: {why}")
        return move.id

    def _order(self, moves: list[Move], *, gives_all: bool) -> set[str]:
        """Writes them; which of them stand. ``gives_all``: some node will hold nothing in the end, which every node has
        to be able to read: raises FeatureOff now, and not when all is copied."""
        if gives_all:
            self._node.committer.need([NO_SHARDS])
        self._node.committer.newest(_SAY_S, list(map(asked_entry, moves)))
        with self._node.committer.entry_lock:
            return {move.id for move in moves} & self._node.log.members.moves.keys()

    def rebalance(
        self, copies: int | None, away_from: Sequence[str], keep: Sequence[str] | None, *, dry_run: bool
    ) -> list[dict[str, str]]:
        """Orders the moves after which the nodes hold equally many shards (``kivi.log.balance``), those of them that
        need not wait for others; all of them, each with the id of what was ordered.

        The arguments are those of ``kivi.api.interface``. What is on its way already is taken for done. So whoever asks
        again when all of it is over orders the rest, and it is no matter who asks, or how often.

        Raises InvalidArgument, and Unavailable if the log does not take it.
        """
        self._node.committer.newest(_SAY_S)
        with self._node.committer.entry_lock:
            log, known = self._node.log, self._node.log.members
            live = sorted((one for one in known if one.state is State.LIVE), key=ReplicatedLog.named)
            silent = {one.node for one in live if not log.is_heard(one)}
            ordered = list(known.moves.values())
        named = {one.node: ReplicatedLog.named(one) for one in live}
        now = {one.node: one.shards for one in live}
        held, coming, busy = dict(now), dict.fromkeys(now, 0), 0
        for move in ordered:
            busy |= move.shards
            coming[move.to] |= move.shards
            held[move.to] |= move.shards
            if move.source is not None:
                held[move.source] &= ~move.shards
        away = [node_named(live, name).node for name in away_from]
        kept = _kept(live, keep) - set(away)
        spread = [node for node in named if node not in kept and node not in away]
        if there := [named[node] for node in spread if node in silent]:
            raise InvalidArgument(
                f"{', '.join(there)} was not heard lately: start it, or leave it out (away_from, keep)"
            )
        if copies is None:
            copies = min(sum(held[node] >> shard & 1 for node in (*spread, *away)) for shard in range(SHARDS)) or 1
        if copies == len(spread) and (few := [named[node] for node in spread if held[node] != EVERY]):
            raise InvalidArgument(
                f"with {copies} copies on as many nodes each holds all shards, and {', '.join(few)} would not know in "
                "which order commits brought events of several: begin nodes that are to hold all with a copy of one "
                "that does"
            )
        wanted = balance.balanced(held, spread, copies) | dict.fromkeys(away, 0)
        planned = list(balance.moves(held, wanted))
        asked = list[Move]()
        for move in () if dry_run else planned:
            after = now[move.to] | coming[move.to] | move.shards
            if not move.shards & busy and (after != EVERY or now[move.to] == EVERY):
                coming[move.to] |= move.shards
                asked.append(dataclasses.replace(move, id=secrets.token_hex(4)))
            busy |= move.shards
        gives_all = any(now[node] and not wanted.get(node, EVERY) for node in now)
        stand = self._order(asked, gives_all=gives_all) if asked else set()
        ids = {(move.to, move.source, move.shards): move.id for move in asked if move.id in stand}
        return [
            {
                "move": ids.get((move.to, move.source, move.shards), ""),
                "shards": shown_shards(move.shards),
                "to": named[move.to],
                "source": "" if move.source is None else named[move.source],
            }
            for move in planned
        ]

    def _source(self, members: list[Member], shards: int, to: Member, source: str | None) -> int | None:
        if source is not None:
            return node_named(members, source).node
        found = [one for one in members if one is not to and one.shards & shards]
        if len(found) != 1:
            named = ", ".join(ReplicatedLog.named(one) for one in found) or "no other node"
            raise InvalidArgument(
                f"{named} {'hold' if len(found) > 1 else 'holds'} some of the shards {shown_shards(shards)}: say which "
                "one gives them up, or that nobody does"
            )
        return found[0].node

    def cancel(self, id_: str) -> None:
        """Ends a move whose new owner has not got the shards yet. Raises InvalidArgument if it is too late, or over."""
        self._node.committer.newest(_SAY_S, [cancelled_entry(id_)])
        with self._node.committer.entry_lock:
            known = self._node.log.members.moves.get(id_)
        if known is not None:
            raise InvalidArgument(
                f"the move {id_} cannot be cancelled any more: the new owner has the shards; move them back"
            )

    # -- what this node does by itself ---------------------------------------------------------------------

    def look(self) -> None:
        """Does what is to be done now, or begins it."""
        node = self._node
        if self._thread is not None and self._thread.is_alive():
            return
        with node.committer.entry_lock:
            moves, known = list(node.log.members.moves.values()), node.log.members.find(node.id)
        if known is None or known.state is not State.LIVE:
            return
        given = 0
        for move in moves:
            given |= move.shards if move.to == node.id else 0
        if extra := node.store.shards.held & ~known.shards & ~given:
            node.holds(node.store.shards.held & ~extra)
        taken = [move for move in moves if move.to == node.id and not move.since]
        self.problems = {move.id: self.problems[move.id] for move in moves if move.id in self.problems}
        for move in moves:
            if move.source == node.id and move.since:
                self._give(move, known)
        if time.monotonic() < self._begin_at:
            return
        if taken:
            self._begin(self._take, taken)
        elif known.shards == node.store.shards.held and (gone := self._remains.due(node.store)):
            self._begin(self._erase, gone)

    def _begin(self, work: Callable[[Any], None], what: Any) -> None:
        with self._begins:
            if not self._ended.is_set():
                self._thread = threading.Thread(target=work, args=(what,), name="kivi-move", daemon=True)
                self._thread.start()

    def _give(self, move: Move, known: Member) -> None:
        node = self._node
        if is_needed_below(node.store, move.since):
            return
        try:
            node.committer.newest(_SAY_S, [node.live(known.shards & ~move.shards).entry()])
            self.problems[move.id] = ""
        except KiviError as error:
            self.problems[move.id] = error.message
            _log.warning("the shards %s are not given up yet (%s): again", shown_shards(move.shards), error.message)
            return
        with node.committer.entry_lock:
            after = node.log.members.find(node.id)
        if after is not None and not after.shards & move.shards:
            # no more than that: what it has just taken may be on its way into the log, and was not said
            node.holds(node.store.shards.held & ~move.shards)

    def _take(self, asked: list[Move]) -> None:
        """All of them at once, since the events that are here are made anew for each copy; but never all shards."""
        node, moves, shards = self._node, list[Move](), 0
        for move in asked:
            if not moves or node.store.shards.held | shards | move.shards != EVERY:
                moves.append(move)
                shards |= move.shards

        def check() -> None:
            if self._ended.is_set() or any(move.id not in node.log.members.moves for move in moves):
                raise _Stopped("the node is being stopped, or a move was cancelled")

        try:
            since = take(node.store, shards, hold=lambda held, since: node.holds(held, since), check=check)
            node.committer.newest(_SAY_S, [there_entry(move.id, since) for move in moves])
            problem = ""
        except _Stopped:
            problem = ""
        except KiviError as error:
            problem = error.message
            _log.warning("the shards %s are not here yet (%s): again", shown_shards(shards), error.message)
        except Exception:
            _log.exception("taking the shards %s has failed: again", shown_shards(shards))
            problem = "it has failed, see this node's log"
        self.problems = {**self.problems, **dict.fromkeys([move.id for move in moves], problem)}
        self._begin_at = time.monotonic() + _AGAIN_S

    def _erase(self, shards: int) -> None:
        """What is not held any more leaves the disk, in the half of the time at most; moves to this node go first."""
        node, worked = self._node, time.monotonic()

        def check() -> None:
            nonlocal worked
            self._ended.wait(time.monotonic() - worked)
            worked = time.monotonic()
            if self._ended.is_set() or any(move.to == node.id for move in node.log.members.moves.values()):
                raise _Stopped("the node is being stopped, or is given shards")

        try:
            erase(node.store, shards, check=check)
            _log.info("the shards %s, which are held elsewhere, have left the disk", shown_shards(shards))
        except _Stopped:
            pass
        except Exception:
            _log.exception("erasing the shards %s has failed: again", shown_shards(shards))
        self._begin_at = time.monotonic() + _AGAIN_S

    def close(self) -> None:
        """Gives up what is being taken, or erased. Harmless twice."""
        with self._begins:  # no other thread begins afterwards, and the last one has begun
            self._ended.set()
        if self._thread is not None:
            self._thread.join()


def _kept(live: list[Member], keep: Sequence[str] | None) -> set[int]:
    """The nodes that are left as they are: by default those that hold all shards, if others do not."""
    if keep is not None:
        return {node_named(live, name).node for name in keep}
    whole = {one.node for one in live if one.shards == EVERY}
    if len(whole) == len(live) > 1:
        raise InvalidArgument(
            "all nodes hold all shards: say which of them go on with that (keep), since definitions, alerts and what "
            "is built of events need one; or that none does"
        )
    return whole


def node_named(members: list[Member], name: str) -> Member:
    """Raises InvalidArgument."""
    found = [one for one in members if name in (one.about.get("address"), f"{one.node:x}")]
    if len(found) > 1:
        numbers = ", ".join(f"{one.node:x}" for one in found)
        raise InvalidArgument(f"several nodes have the address {name!r}: name one of them by its number, {numbers}")
    if not found:
        raise InvalidArgument(f"no node is {name!r}: there are {', '.join(map(ReplicatedLog.named, members))}")
    return found[0]
