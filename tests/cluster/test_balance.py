"""Which shards go where: even, with the fewest copies, by moves that leave no shard with fewer owners than it had."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.log.balance import balanced, moves
from kivi.log.members import Member, Members, State
from kivi.log.moves import asked_entry, there_entry
from kivi.log.shards import EVERY, SHARDS, parse_shards, shown_shards


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[int, int], list[int], list[int], int]:
    """What nodes hold, together all; who is to hold something, who nothing any more, and how many copies."""
    count = draw(st.integers(2, 7))
    kinds = [draw(st.sampled_from(["random", "run", "none", "whole"])) for _ in range(count)]
    held = {}
    for node, kind in enumerate(kinds):
        low = draw(st.integers(0, SHARDS - 1))
        some = {"random": draw(st.integers(0, EVERY)), "run": EVERY >> low << low, "none": 0, "whole": EVERY}
        held[node] = some[kind]
    for shard in range(SHARDS):
        if not any(one >> shard & 1 for one in held.values()):
            held[draw(st.integers(0, count - 1)) if shard % 7 == 0 else shard % count] |= 1 << shard
    away = draw(st.lists(st.sampled_from(range(count)), max_size=count - 2, unique=True))
    nodes = [node for node in range(count) if node not in away]
    most = len(nodes) if all(held[node] == EVERY for node in nodes) else len(nodes) - 1
    return held, nodes, away, draw(st.integers(1, most))


def owners(held: dict[int, int], shard: int) -> int:
    return sum(one >> shard & 1 for one in held.values())


@given(clusters())
def test_a_layout_is_even_and_nothing_can_be_copied_less(
    cluster: tuple[dict[int, int], list[int], list[int], int],
) -> None:
    held, nodes, _, copies = cluster
    wanted = balanced(held, nodes, copies)
    assert {owners(wanted, shard) for shard in range(SHARDS)} == {copies}
    loads = [one.bit_count() for one in wanted.values()]
    assert max(loads) - min(loads) <= 1
    assert wanted == balanced(held, nodes, copies)
    # What cannot be avoided, whatever the layout: what nodes lack to the least load, and what shards lack of copies.
    copied = sum((wanted[node] & ~held[node]).bit_count() for node in nodes)
    of_nodes = sum(max(0, min(loads) - held[node].bit_count()) for node in nodes)
    of_shards = sum(max(0, copies - owners({n: held[n] for n in nodes}, shard)) for shard in range(SHARDS))
    assert copied >= max(of_nodes, of_shards)
    assert _cannot_be_improved(held, wanted)


def _cannot_be_improved(held: dict[int, int], wanted: dict[int, int]) -> bool:
    """No cycle of exchanges copies less: what makes a flow one of least cost (Klein 1967). Vertices are nodes; an edge
    hands a shard from one to another, and costs 1 if the taker lacks it, less 1 if the giver did. Loads may change by
    one where that leaves them even, over a vertex of its own."""
    spare, far = -1, dict.fromkeys((-1, *wanted), 0)
    low = min(one.bit_count() for one in wanted.values())
    edges = []
    for giver, taker in itertools.permutations(wanted, 2):
        found = [
            (not held[taker] >> shard & 1) - (not held[giver] >> shard & 1)
            for shard in range(SHARDS)
            if wanted[giver] >> shard & 1 and not wanted[taker] >> shard & 1
        ]
        if found:
            edges.append((giver, taker, min(found)))
    uneven = any(one.bit_count() > low for one in wanted.values())
    for node, one in wanted.items():
        if uneven:
            edges.append((spare, node, 0) if one.bit_count() > low else (node, spare, 0))
    for _ in range(len(far) + 1):
        shorter = [(head, far[tail] + cost) for tail, head, cost in edges if far[tail] + cost < far[head]]
        for head, length in shorter:
            far[head] = min(far[head], length)
        if not shorter:
            return True
    return False


@given(clusters())
def test_moves_lead_there_and_no_shard_has_fewer_owners_on_the_way(
    cluster: tuple[dict[int, int], list[int], list[int], int],
) -> None:
    """By the entries of the log: each move is one that it takes."""
    held, nodes, away, copies = cluster
    wanted = balanced(held, nodes, copies) | dict.fromkeys(away, 0)
    members = Members()
    for node in held:
        members.enter(Member(node, State.LIVE, 1, {"moves": True}).with_shards(held[node]).entry(), 0)
    before = [owners(held, shard) for shard in range(SHARDS)]
    for i, move in enumerate(moves(held, wanted)):
        assert members.why_not(move) is None
        members.enter(asked_entry(named := type(move)(f"{i}", move.shards, move.to, move.source)), 0)
        members.enter(there_entry(named.id, i + 1), 0)
        taken = members.find(move.to).shards  # type: ignore[union-attr]
        members.enter(Member(move.to, State.LIVE, 1, {"moves": True}).with_shards(taken).entry(), 0)
        _check(members, before, copies)
        if (source := move.source) is not None:
            rest = members.find(source).shards & ~move.shards  # type: ignore[union-attr]
            members.enter(Member(source, State.LIVE, 1, {"moves": True}).with_shards(rest).entry(), 0)
        _check(members, before, copies)
        assert not members.moves
    assert {member.node: member.shards for member in members} == wanted


def _check(members: Members, before: list[int], copies: int) -> None:
    held = {member.node: member.shards for member in members}
    for shard in range(SHARDS):
        assert owners(held, shard) >= min(before[shard], copies)


def test_a_fourth_node_takes_a_quarter_from_three() -> None:
    held = {i: parse_shards(text) for i, text in enumerate(["0-20", "21-41", "42-63", "none"])}
    wanted = balanced(held, [0, 1, 2, 3], 1)
    assert [shown_shards(one) for one in wanted.values()] == ["0-15", "21-36", "42-57", "16-20,37-41,58-63"]
    assert [move.saved()[1:4] for move in moves(held, wanted)] == [
        ["16-20", 3, 0],
        ["37-41", 3, 1],
        ["58-63", 3, 2],
    ]


def test_more_copies_than_nodes_are_refused() -> None:
    with pytest.raises(kivi.InvalidArgument, match="3 copies of each shard need as many nodes, and there are 2"):
        balanced({0: EVERY}, [0, 1], 3)
