"""What the replay oracle knows of conflicts: who clashes with whom on a row (R2 to R8), by what each did there.

Two transactions that both committed never clash, and whoever was refused clashed with somebody. What a commit does to
the views of a table follows from the row, so a put of what a view's key is made of may be refused because of any other
write of the row, or that because of it; whether it has to be, the view's rows tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.oracle import Attempt, Op, Oracle

__all__ = ["conflicts", "refusals", "touched"]

Key = tuple[Any, ...]


@dataclass
class Touch:
    """What one transaction did to one row."""

    attempt: Attempt
    restart: bool = False
    write: bool = False
    guard_row: bool = False
    puts: set[str] = field(default_factory=set)
    deltas: set[str] = field(default_factory=set)
    guards: set[str] = field(default_factory=set)

    def note(self, op: Op) -> None:
        self.write |= op.kind != "guard"
        match op.kind:
            case "insert" | "delete":
                self.restart = True
            case "put":
                self.puts |= set(op.values)
            case "retract":
                self.puts.add("retracted")
            case "delta":
                self.deltas |= set(op.values)
            case "guard":
                self.guards |= set(op.values)
                self.guard_row |= not op.values

    def clashes(self, other: Touch) -> bool:
        for a, b in ((self, other), (other, self)):
            guarded = b.guard_row or bool(b.guards)
            if a.restart and (b.write or guarded):
                return True
            if a.guard_row and b.write:
                return True
            if a.puts & (b.puts | b.deltas | b.guards) or a.deltas & b.guards:
                return True
        return False

    def moves_beside(self, other: Touch, moving: frozenset[str]) -> bool:
        """Whether one puts a column of ``moving`` and the other writes the row."""
        return any(a.puts & moving and b.write for a, b in ((self, other), (other, self)))


def touched(attempt: Attempt) -> dict[tuple[str, Key], Touch]:
    """By row: what a transaction did to it."""
    touches: dict[tuple[str, Key], Touch] = {}
    for op in attempt.ops:
        if op.kind != "append":
            touches.setdefault((op.table, op.key), Touch(attempt)).note(op)
    return touches


def conflicts(commits: Sequence[Attempt]) -> str | None:
    """First committer wins: two concurrent transactions that both committed never clash on a row. Says which did."""
    by_row: dict[tuple[str, Key], list[Touch]] = defaultdict(list)
    for attempt in commits:
        touches = touched(attempt)
        for where, touch in touches.items():
            for earlier in reversed(by_row[where]):
                if (earlier.attempt.commit_ts or 0) <= attempt.began:
                    break
                if touch.clashes(earlier):
                    pair = f"{earlier.attempt}\n  {attempt}"
                    return f"R2, R4: both committed, are concurrent and clash on {where}:\n  {pair}"
            by_row[where].append(touch)
    return None


def refusals(oracle: Oracle, commits: Sequence[Attempt]) -> str | None:
    """Whoever was refused names a row where it clashes with a commit above its snapshot (R2 to R5). Says who did not.

    The commit that it met may have been in flight when the server was killed: then it is one that became nothing. While
    a view of its table was being filled, it may be one of those that nobody but the server made.
    """
    known = {attempt.commit_ts for attempt in commits}
    clashing: dict[tuple[str, Key], list[Touch]] = defaultdict(list)
    lost = [attempt for attempt in oracle.attempts if attempt.outcome == "aborted" and attempt.refused is None]
    for attempt in (*commits, *lost):
        for where, touch in touched(attempt).items():
            clashing[where].append(touch)
    for attempt in oracle.attempts:
        refused = attempt.refused
        if refused is None or refused.table not in oracle.row_tables:
            continue
        if refused.table in oracle.filling and refused.commit_ts not in known:
            continue
        where = (refused.table, tuple(refused.key))
        mine = touched(attempt).get(where)
        if mine is None:
            return f"R2: refused because of {where}, which it does not touch: {attempt}"
        moving = oracle.moving(refused.table)
        for theirs in clashing[where]:
            cts = theirs.attempt.commit_ts
            named = refused.commit_ts is None or cts == refused.commit_ts
            if (
                named
                and (cts is None or cts > refused.start_ts)
                and (mine.clashes(theirs) or mine.moves_beside(theirs, moving))
            ):
                break
        else:
            return f"R2 to R5: refused because of {where}, where it clashes with nothing: {attempt}: {refused}"
    return None
