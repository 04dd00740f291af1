"""Who needs the log, and from where it has to be kept: a function of its prefix, so every node knows the same.

::

    joining   a node is being given a copy of another one's store; whoever gives it says so, before the copy is made
    live      a node says by itself, every so often, from where it may have to read again
    evicted   it is not waited for any longer; one that can still read on is live again by saying so

A copy is forgotten when its hour is over, by then it is a node of its own; who was evicted, a day after it was heard.

The *floor* is the first message that has to be there. An entry moves it up, and never past what a joining or a live
node needs: so an entry that came before a node said so wins, and that node learns from the log that it is too late.
Deleting what lies below the floor may then be done by anybody, at any time, twice.

A live node holds a set of the *shards* (``kivi.log.shards``), by default all of them. It may give some up, and takes
others by a move alone (``kivi.log.moves``): what it says by itself never adds any, since it may be an old word that
comes late. No shard that a node holds is ever left without one: to give up or to evict the last holder of a shard is
void, and the floor does not move while a shard has none.

Which *features* (``kivi.log.features``) are on is a function of the prefix, too: one is switched on by an entry, which
is void unless every live node that has spoken within a day can. What a node says that lacks one which is on is void: it
stops at that entry.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from kivi.errors import DataLoss, FormatTooNew, InvalidArgument, Unavailable
from kivi.log import Entry, Kind
from kivi.log.features import NO_SHARDS
from kivi.log.moves import Move
from kivi.log.shards import EVERY, parse_shards, refined, shown_shards

__all__ = ["ANSWERS_S", "HEARD_S", "JOINING_US", "NEEDS", "Member", "Members", "State", "switched_on", "truncation"]

JOINING_US: Final = 3_600_000_000
"""For so long, by the log's time, the log is kept for a node that is being given a copy."""
_FORGOTTEN_US: Final = 86_400_000_000
HEARD_S: Final = 10.0
_HEARD_US: Final = int(HEARD_S * 1_000_000)
"""Shards are not given up to a node that has been silent for so long, by the log's time: it may be gone for good."""


_TOLD_US: Final = 3_000_000
"""For so long nobody folds past what a silent node has told of its snapshots."""
_BEHIND_S: Final = 2.0
_NOW: Final = 2**64
"""Later than every commit timestamp."""
ANSWERS_S: Final = 4.0
"""Nodes say something each second, at least. Of one that is silent for so long no answer is waited for."""


NEEDS: Final = {
    "fold": "to fold what it has not on its disk yet",
    "stage": "for what a client has staged, and has not committed or given up",
    "part": "for a commit of which only parts have come",
}
"""What a live node may have to read messages again for, for people."""


class State(StrEnum):
    JOINING = "joining"
    LIVE = "live"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of a node. ``needed``: the first message that it may have to read. ``about``: what it says of
    itself, for people and clients (its address, its version). ``said_us``: when, by the log's time."""

    node: int
    state: State
    needed: int
    about: dict[str, Any] = field(default_factory=dict)
    said_us: int = 0

    @property
    def shards(self) -> int:
        """Those that it holds. Raises InvalidArgument."""
        said = self.about.get("shards")
        return EVERY if said is None else parse_shards(said)

    @property
    def features(self) -> frozenset[str]:
        """Those that it can read; none of a version from before features."""
        return frozenset(self.about.get("features", ()))

    def with_snapshots(self, watermark: int, opened: Sequence[int]) -> Member:
        """For nodes that are asked for shards which this one lacks: the snapshots that it may ask for."""
        return dataclasses.replace(self, about={**self.about, "reads": [watermark, *opened]})

    def with_shards(self, held: int) -> Member:
        return dataclasses.replace(self, about={**self.about, "shards": shown_shards(held)})

    def entry(self) -> Entry:
        """That says so. Of a node that holds no shards it needs the feature: so such a node says nothing before every
        other one can read it."""
        content = [self.node, self.state, self.needed, self.about]
        return Entry(Kind.MEMBER, (json.dumps(content).encode(),), 0, () if self.shards else (NO_SHARDS,))


class Members:
    """Entered by one thread, and read by any: what is known of nodes and moves is replaced, and never changed, so who
    looks through it meanwhile sees what it was. ``saved`` is what ``encode`` gave."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.floor: int = saved["floor"] if saved else 1
        rows = saved["nodes"] if saved else []
        self._of: Mapping[int, Member] = {row[0]: Member(row[0], State(row[1]), *row[2:]) for row in rows}
        moves = map(Move.of, saved.get("moves", ()) if saved else ())
        self.moves: Mapping[str, Move] = {move.id: move for move in moves}
        """Those that are not over, by their id."""
        self.on: set[str] = set(saved.get("features", ())) if saved else set()
        """Features that are on, for good."""
        self.cuts: tuple[int, ...] = self._cuts()
        """Sets of shards, of which every node holds each wholly or not at all: together all shards."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self._of.values())

    def find(self, node: int) -> Member | None:
        return self._of.get(node)

    def count(self, state: State) -> int:
        return sum(member.state is state for member in self._of.values())

    def lacking(self, feature: str, time_us: int) -> list[Member]:
        """The live nodes that cannot read it, by the log's time: none that has been silent for a day."""
        live = (one for one in self._of.values() if one.state is State.LIVE)
        return [one for one in live if time_us - one.said_us < _FORGOTTEN_US and feature not in one.features]

    def is_evicted(self, node: int) -> bool:
        """What it published in part will not be waited for."""
        member = self._of.get(node)
        return member is not None and member.state is State.EVICTED

    def enter(self, entry: Entry, time_us: int) -> None:
        """An entry of the log, at this time of it. Raises DataLoss for one that cannot be read."""
        try:
            content = json.loads(bytes(entry.body[0]))
            if entry.kind is Kind.TRUNCATE:
                self._truncate(int(content), time_us)
                return
            if isinstance(content, dict):
                self._moves(content)
            elif on := _switched_on(content):
                if not self.lacking(on, time_us):
                    self.on.add(on)
            else:
                node, state, needed, about = content
                self._said(Member(node, State(state), needed, about, time_us))
            self._end_moves()
            self.cuts = self._cuts()
        except (ValueError, TypeError, InvalidArgument) as error:
            raise DataLoss(f"an entry about the nodes of a cluster cannot be read: {error}") from error

    def _said(self, new: Member) -> None:
        old = self._of.get(new.node)
        if new.state is State.EVICTED:
            if old is None or old.needed > new.needed:  # it has moved since somebody looked
                return
            if not self.alone(old):
                self._put(dataclasses.replace(old, state=State.EVICTED))
            return
        if new.state is State.LIVE and not self.on <= new.features:
            return
        if new.state is State.LIVE and old is not None and old.state is not State.JOINING:
            for move in self.moves.values():  # it does not give up yet what it has just been given
                if move.to == new.node and move.since:
                    if not move.shards & ~new.shards:
                        self._put_move(dataclasses.replace(move, told=True))
                    new = new.with_shards(new.shards | move.shards)
            given_to = self.held(besides=new.node, heard_us=new.said_us - _HEARD_US)
            if (kept := old.shards & (new.shards | ~given_to)) != new.shards:
                new = new.with_shards(kept)
        self._put(new if new.needed >= self.floor else dataclasses.replace(new, state=State.EVICTED))

    def _put(self, member: Member) -> None:
        self._of = {**self._of, member.node: member}

    # -- moves --------------------------------------------------------------------------------------------

    def _moves(self, content: dict[str, Any]) -> None:
        """An entry about a move; void if it does not fit what there is."""
        if "move" in content:
            move = Move.of(content["move"])
            if not move.since and move.id not in self.moves and self.why_not(move) is None:
                self._put_move(move)
        elif "there" in content:
            id_, since = content["there"]
            if (there := self.moves.get(id_)) is not None and not there.since and since > 0:
                to = self._of[there.to]  # a move to a node that is not live any more has ended
                self._put_move(dataclasses.replace(there, since=since))
                self._put(to.with_shards(to.shards | there.shards))
        elif "cancel" in content:
            if (asked := self.moves.get(content["cancel"])) is not None and not asked.since:
                self._end(asked)
        else:
            raise FormatTooNew(f"the log says of its nodes what this version does not know: {', '.join(content)}")

    def _put_move(self, move: Move) -> None:
        self.moves = {**self.moves, move.id: move}

    def _end(self, over: Move) -> None:
        self.moves = {id_: move for id_, move in self.moves.items() if id_ != over.id}

    def why_not(self, move: Move) -> str | None:
        """What keeps shards from being moved so, for whoever asks; None: nothing does."""
        to, source = self._of.get(move.to), None if move.source is None else self._of.get(move.source)
        if to is None or to.state is not State.LIVE:
            return f"no live node {move.to:x} is known"
        if not move.shards:
            return "no shards are named"
        if any(other.shards & move.shards for other in self.moves.values()):
            return "some of these shards are being moved: wait until that is over, or cancel it"
        if move.source is None and not move.shards & ~to.shards:
            return "that node holds them already"
        if to.shards != EVERY and to.shards | move.shards == EVERY:
            return (
                "it would hold all shards then, and would not know in which order commits brought events of several of "
                "them: begin a node that is to hold all with a copy of one that does"
            )
        if move.source is not None and (source is None or source.state is not State.LIVE or source is to):
            return f"the node {move.source:x} that is to give them up is not another live one"
        if source is not None and move.shards & ~source.shards:
            return f"node {source.node:x} holds {shown_shards(source.shards)} alone, and cannot give up the others"
        if missing := move.shards & ~to.shards & ~self.held(besides=to.node):
            return f"no other live node holds {shown_shards(missing)}"
        return None

    def _end_moves(self) -> None:
        """Those that are over, and those that nobody can carry out any more."""
        for move in self.moves.values():
            to, source = self._of.get(move.to), None if move.source is None else self._of.get(move.source)
            gone = to is None or to.state is not State.LIVE
            done = move.told and (source is None or source.state is not State.LIVE or not source.shards & move.shards)
            if gone or done:
                self._end(move)

    def held_at(self, member: Member, ts: int) -> int:
        """The shards that a node holds, without those whose rows it does not have as of a commit timestamp."""
        shards = member.shards
        for move in self.moves.values():
            if move.to == member.node and move.since > ts:
                shards &= ~move.shards
        return shards

    # -- who holds what -----------------------------------------------------------------------------------

    def alone(self, member: Member) -> int:
        """The shards of which it is the last live node: it is not evicted while there are any."""
        return member.shards & ~self.held(besides=member.node) if member.state is State.LIVE else 0

    def held(self, *, besides: int | None = None, heard_us: int = 0) -> int:
        """The shards that live nodes hold, but for one of them, and for those that were not heard since then."""
        shards = 0
        for member in self._of.values():
            if member.state is State.LIVE and member.node != besides and member.said_us >= heard_us:
                shards |= member.shards
        return shards

    def snapshots(self, *, besides: int, time_us: int) -> tuple[int | None, set[int]]:
        """Of the other nodes that lack shards: the least watermark, and what was opened below. None: there are none.

        Who is silent, or far behind by its own account, is not waited for.
        """
        told = [
            member.about["reads"]
            for member in self._of.values()
            if member.state is State.LIVE
            and member.node != besides
            and member.about.get("reads")
            and member.about.get("age_s", 0.0) < _BEHIND_S
            and time_us - member.said_us < _TOLD_US
        ]
        return min((watermark for watermark, *_ in told), default=None), {ts for _, *opened in told for ts in opened}

    def is_heard(self, node: int, time_us: int, within_us: int = _HEARD_US) -> bool:
        """Whether it is live, and was heard within 10 s."""
        member = self._of.get(node)
        return member is not None and member.state is State.LIVE and time_us - member.said_us < within_us

    def answers(self, node: int, time_us: int) -> bool:
        """Whether an answer of it is waited for: it was heard within 4 s."""
        return self.is_heard(node, time_us, int(ANSWERS_S * 1_000_000))

    def owners(
        self, shards: int, *, besides: int, time_us: int, without: frozenset[int] = frozenset(), ts: int = _NOW
    ) -> list[tuple[int, int]]:
        """Other nodes, heard within 10 s, that together hold these shards, as few as can be told, each with its part.
        ``ts``: the commit timestamp as of which their rows are read.

        Raises Unavailable if some have no other node.
        """
        heard = [
            (member, self.held_at(member, ts))
            for member in self._of.values()
            if member.node not in {besides, *without} and self.is_heard(member.node, time_us)
        ]
        heard.sort(key=lambda one: (one[0].node - besides) % 2**64)  # so that nodes ask different ones
        found, left = list[tuple[int, int]](), shards
        while left:
            some = [(member.node, held & left) for member, held in heard if held & left]
            best = max(some, key=lambda one: (self.answers(one[0], time_us), one[1].bit_count()), default=None)
            if best is None:
                raise Unavailable(
                    f"no other node that was heard lately holds {shown_shards(left)}, and answers: try again in a "
                    "moment, or start one that holds them",
                    shards=shown_shards(left),
                    addresses=[],
                )
            found.append(best)
            left &= ~best[1]
        return found

    def holders(self, shards: int) -> list[Member]:
        """The live nodes that hold all of these."""
        return [member for member in self._of.values() if member.state is State.LIVE and not shards & ~member.shards]

    def _cuts(self) -> tuple[int, ...]:
        return refined(member.shards for member in self._of.values() if member.state is State.LIVE)

    def _truncate(self, below: int, time_us: int) -> None:
        if forgotten := self.forgotten(time_us):
            self._of = {node: member for node, member in self._of.items() if node not in forgotten}
        if len(self.cuts) > 1 and self.held() != EVERY:
            return
        self.floor = max(self.floor, min([below, *(member.needed for member in self.holding())]))

    def forgotten(self, time_us: int) -> list[int]:
        """Whom the next truncation forgets."""
        patience_us = {State.LIVE: math.inf, State.JOINING: JOINING_US, State.EVICTED: _FORGOTTEN_US}
        return [m.node for m in self._of.values() if time_us - m.said_us > patience_us[m.state]]

    def holding(self) -> list[Member]:
        """The nodes for which the log is kept, the one that needs most of it first."""
        return sorted(
            (member for member in self._of.values() if member.state is not State.EVICTED),
            key=lambda member: (member.needed, member.node),
        )

    def encode(self) -> dict[str, Any]:
        """For ``saved``."""
        return {
            "floor": self.floor,
            "nodes": [dataclasses.astuple(member) for member in self._of.values()],
            **({"moves": [move.saved() for move in self.moves.values()]} if self.moves else {}),
            **({"features": sorted(self.on)} if self.on else {}),
        }


def switched_on(entry: Entry) -> tuple[str, ...]:
    """The feature that an entry switches on; none for any other entry."""
    if entry.kind is not Kind.MEMBER:
        return ()
    try:
        on = _switched_on(json.loads(bytes(entry.body[0])))
    except (ValueError, TypeError):  # ``enter`` says so
        return ()
    return () if on is None else (on,)


def _switched_on(content: Any) -> str | None:
    about = content[3] if isinstance(content, list) and len(content) == 4 else None
    return about.get("on") if isinstance(about, dict) else None


def truncation(below: int) -> Entry:
    """That moves the floor up to ``below``, or as far as it may be."""
    return Entry(Kind.TRUNCATE, (json.dumps(below).encode(),), 0)
