"""Moves of shards as the log's prefix knows them: when one is over, whatever comes late."""

from __future__ import annotations

from kivi.log.members import Member, Members, State
from kivi.log.moves import Move, asked_entry, there_entry
from kivi.log.shards import EVERY, parse_shards

_SECOND = 1_000_000
_LOW, _SOME = parse_shards("0-31"), parse_shards("0-15")


def nodes(**held: int) -> Members:
    members = Members()
    for number, shards in held.items():
        members.enter(Member(int(number[1:]), State.LIVE, 1).with_shards(shards).entry(), 0)
    return members


def test_a_move_ends_with_its_new_owner() -> None:
    members = nodes(n1=_LOW, n2=1 << 40, n3=EVERY & ~_LOW)
    members.enter(asked_entry(Move("m", _SOME, 2, 1)), _SECOND)
    members.enter(there_entry("m", 77), 2 * _SECOND)
    members.enter(Member(2, State.EVICTED, 9).entry(), 100 * _SECOND)
    assert members.find(2).state is State.EVICTED  # type: ignore[union-attr]
    assert not members.moves, "nobody gives up what nobody was given"
    assert members.why_not(Move("n", _SOME, 3, 1)) is None


def test_an_older_word_of_the_new_owner_undoes_no_copy() -> None:
    more = parse_shards("32-40")
    members = nodes(n1=EVERY, n2=_LOW)
    before = Member(2, State.LIVE, 1).with_shards(_LOW)
    members.enter(asked_entry(Move("c", more, 2)), _SECOND)
    members.enter(there_entry("c", 77), _SECOND)
    members.enter(before.entry(), _SECOND)
    assert members.find(2).shards == _LOW | more  # type: ignore[union-attr]
    again = Members(members.encode())
    for known in (members, again):
        known.enter(before.with_shards(_LOW | more).entry(), 2 * _SECOND)
        assert not known.moves
        assert known.find(2).shards == _LOW | more  # type: ignore[union-attr]


def test_a_move_is_over_when_both_owners_have_said_so() -> None:
    members = nodes(n1=_LOW, n2=1 << 40, n3=EVERY & ~_LOW)
    members.enter(asked_entry(Move("m", _SOME, 2, 1)), _SECOND)
    members.enter(there_entry("m", 77), 2 * _SECOND)
    members.enter(Member(1, State.LIVE, 1).with_shards(_LOW & ~_SOME).entry(), 3 * _SECOND)
    assert list(members.moves) == ["m"]
    said = Member(2, State.LIVE, 1).with_shards(1 << 40 | _SOME).entry()
    kept = Members(members.encode())
    for known in (members, kept):
        known.enter(said, 4 * _SECOND)
        assert not known.moves
        assert known.find(1).shards == _LOW & ~_SOME  # type: ignore[union-attr]


def test_what_is_known_of_nodes_and_moves_is_looked_through_while_the_log_brings_others() -> None:
    """A thread that reads them does not keep the one that applies the log, so it sees them as they were."""
    members = nodes(n1=EVERY, n2=1 << 40)
    members.enter(asked_entry(Move("m", _SOME, 2)), _SECOND)
    seen = list[int | str]()
    for member in members:
        members.enter(Member(10 + member.node, State.LIVE, 1).with_shards(_LOW).entry(), _SECOND)
        seen.append(member.node)
    for move in members.moves.values():
        members.enter(asked_entry(Move("n", 1 << 50, 2)), _SECOND)
        seen.append(move.id)
    assert seen == [1, 2, "m"]
    assert ([member.node for member in members], [*members.moves]) == ([1, 2, 11, 12], ["m", "n"])
