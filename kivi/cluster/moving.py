"""A node's part in moves of shards (``kivi.log.moves``): it takes what it is to have, and gives up what it is to give.

::

    asked    by an entry, written by whatever node somebody asked
    taking   the new owner, in a thread of its own (``kivi.store.moving``); whatever keeps it from that, it tries
             again
    there    its entry: from here on it is asked for these shards
    giving   the old owner, when nobody reads below S: it says that it holds the rest, which counts if the new owner was
             heard lately; then it applies and answers for the rest

What there is to do is read from the log's prefix again and again, so a node that was killed in the middle goes on with
it, or begins the copy anew. What it has by its marker and not by the prefix it does not hold: a move that was cancelled
while the node was away.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import Final, Protocol

from kivi.errors import InvalidArgument, KiviError, Unavailable
from kivi.log.members import Member, State
from kivi.log.moves import Move, asked_entry, cancelled_entry, there_entry
from kivi.log.replicated import ReplicatedLog
from kivi.log.shards import parse_shards, shown_shards
from kivi.mvcc.replicated import ReplicatedCommitter
from kivi.store.facade import Store
from kivi.store.moving import is_needed_below, take

__all__ = ["Moving"]

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
    """``look`` is called again and again. ``problem``: why the shards that this node is to have are not here yet."""

    def __init__(self, node: Holder) -> None:
        self._node = node
        self._ending = False
        self._thread: threading.Thread | None = None
        self._begin_at = 0.0
        self.problem = ""

    # -- what somebody asks of any node -----------------------------------------------------------------

    def move(self, shards: str, to: str, source: str | None, *, copy: bool) -> str:
        """Writes that shards go to a node, from another one; its id. Nodes are named by address or number. ``source``:
        by default the only other node that holds them; ``copy``: nobody does.

        Raises InvalidArgument, and Unavailable if the log does not take it.
        """
        self._node.committer.newest(_SAY_S)  # a node that has just begun is known then
        with self._node.committer.entry_lock:
            members = [one for one in self._node.log.members if one.state is State.LIVE]
        named, there = parse_shards(shards), _named(members, to)
        given = None if copy else self._source(members, named, there, source)
        move = Move(secrets.token_hex(4), named, there.node, given)
        with self._node.committer.entry_lock:
            why = self._node.log.members.why_not(move)
        if why is None:
            self._node.committer.newest(_SAY_S, [asked_entry(move)])
            with self._node.committer.entry_lock:
                why = None if move.id in self._node.log.members.moves else "something else came first: ask again"
        if why is not None:
            raise InvalidArgument(f"the shards {shown_shards(named)} cannot be moved to node {there.node:x}: {why}")
        return move.id

    def _source(self, members: list[Member], shards: int, to: Member, source: str | None) -> int | None:
        if source is not None:
            return _named(members, source).node
        found = [one for one in members if one is not to and one.shards & shards]
        if len(found) != 1:
            named = ", ".join(_shown(one) for one in found) or "no other node"
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
        for move in moves:
            if move.source == node.id and move.since:
                self._give(move, known)
        if not taken:
            self.problem = ""
        elif time.monotonic() >= self._begin_at:
            self._thread = threading.Thread(target=self._take, args=(taken[0],), name="kivi-move", daemon=True)
            self._thread.start()

    def _give(self, move: Move, known: Member) -> None:
        node = self._node
        if is_needed_below(node.store, move.since):
            return
        rest = known.shards & ~move.shards
        node.committer.newest(_SAY_S, [node.live(rest).entry()])
        with node.committer.entry_lock:
            after = node.log.members.find(node.id)
        if after is not None and after.shards == rest:
            node.holds(rest)

    def _take(self, move: Move) -> None:
        node = self._node

        def check() -> None:
            if self._ending or move.id not in node.log.members.moves:
                raise _Stopped("the node is being stopped, or the move was cancelled")

        try:
            since = take(node.store, move.shards, hold=lambda held, since: node.holds(held, since), check=check)
            node.committer.newest(_SAY_S, [there_entry(move.id, since)])
            self.problem = ""
        except _Stopped:
            pass
        except KiviError as error:
            self.problem = error.message
            _log.warning("the shards %s are not here yet (%s): again", shown_shards(move.shards), error.message)
        except Exception:
            _log.exception("taking the shards %s has failed: again", shown_shards(move.shards))
            self.problem = "it has failed, see this node's log"
        self._begin_at = time.monotonic() + _AGAIN_S

    def close(self) -> None:
        """Gives up what is being taken. Harmless twice."""
        self._ending = True
        if self._thread is not None:
            self._thread.join()


def _shown(member: Member) -> str:
    return str(member.about.get("address") or f"{member.node:x}")


def _named(members: list[Member], name: str) -> Member:
    """Raises InvalidArgument."""
    found = [one for one in members if name in (one.about.get("address"), f"{one.node:x}")]
    if len(found) != 1:
        raise InvalidArgument(f"no live node is {name!r}: there are {', '.join(map(_shown, members))}")
    return found[0]
