"""A checker counts only if it goes red: bugs planted in the store, and the checker that must notice each of them.

Each bug is put in place of the real thing while the model's seeded histories (``tests.mvcc.test_model``) run; the first
history that fails is the proof. The bugs are those that the rules list and that can be planted in process. A history's
tables are made without the bug: definitions that contradict each other would not be a mismatch that the model finds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kivi.delta import ops
from kivi.delta.ops import Barrier
from kivi.encoding.base_rows import Version
from kivi.mvcc import folding, verdict
from kivi.mvcc.applied import Applied
from kivi.mvcc.commit import Committer
from kivi.mvcc.leases import Leases
from kivi.mvcc.pending import Pending
from kivi.mvcc.record import Commit
from kivi.mvcc.tokens import Tokens
from kivi.mvcc.watermark import Watermark
from tests.mvcc.test_model import scheduled

Patch = pytest.MonkeyPatch
SEEDS = range(30)


def snapshot_is_the_largest_timestamp(patch: Patch) -> None:
    """R11: readers get the newest number that was entered."""
    patch.setattr(Watermark, "value", property(lambda self: self._entered[-1] if self._entered else self._value))


def consolidation_ignores_open_snapshots(patch: Patch) -> None:
    """R14"""
    real = Leases.boundaries
    patch.setattr(Leases, "boundaries", lambda self: (real(self)[0], []))


def put_against_delta_is_not_checked(patch: Patch) -> None:
    """R4"""
    real = verdict._write_collision

    def collision(facts: Any, op: Any, start: int) -> Any:
        hit = real(facts, op, start)
        if hit is not None and hit[0] is not None and op.puts and (facts.puts or {}).get(hit[0], 0) <= start:
            return None
        return hit

    patch.setattr(verdict, "_write_collision", collision)


def the_watermark_moves_before_the_commit_is_in_pending(patch: Patch) -> None:
    """R18: 11 before 10. A reader between the two misses the commit."""
    late: list[tuple[Pending, int, Applied]] = []
    real = Pending.apply

    def apply(self: Pending, cts: int, applied: Applied) -> None:
        late.append((self, cts, applied))
        while len(late) > 1:
            pending, earlier, what = late.pop(0)
            real(pending, earlier, what)

    patch.setattr(Pending, "apply", apply)


def the_token_is_not_in_the_commits_record(patch: Patch) -> None:
    """R16: it is remembered, but a crash before the next consolidation forgets it."""
    real = Commit.encode

    def encode(self: Any) -> Any:
        kept, self.request = self.request, None
        try:
            return real(self)
        finally:
            self.request = kept

    patch.setattr(Commit, "encode", encode)


def a_timestamp_is_acknowledged_before_its_turn(patch: Patch) -> None:
    """R17: as soon as it is applied, whatever is still in flight below it."""
    real = Watermark.finish

    def finish(self: Watermark, sequence: int, then: Callable[[], None] | None = None) -> None:
        if then is not None:
            then()
        real(self, sequence)

    patch.setattr(Watermark, "finish", finish)


def a_delete_leaves_old_deltas_alive(patch: Patch) -> None:
    """R6: what comes after a delete folds onto what was before it."""
    real = ops.apply_op

    def apply_op(schema: Any, base: Version | None, cts: int, op: Any) -> Version:
        if op.barrier is Barrier.DELETE and base is not None and base.alive:
            return Version(cts, False, base.cells)
        if base is not None and not base.alive and base.cells:
            base = Version(base.cts, True, base.cells)
        return real(schema, base, cts, op)

    patch.setattr(ops, "apply_op", apply_op)
    patch.setattr(folding, "apply_op", apply_op)


def an_aborted_commit_is_replayed(patch: Patch) -> None:
    """R2: after a restart the abort record is not looked at."""
    patch.setattr(Pending, "discard", lambda self, cts: None)


def operations_in_base_are_folded_again(patch: Patch) -> None:
    """R1: an operation at or below the base version's timestamp is not inert."""

    def fold(schema: Any, base: Any, found: Any, upto: int) -> Any:
        for cts, op in found:
            if cts <= upto:
                base = ops.apply_op(schema, base, cts, op)
        return base

    patch.setattr("kivi.mvcc.snapshot.fold", fold)


def a_fence_is_forgotten(patch: Patch) -> None:
    """R16: outcome() says aborted, and the late attempt commits."""
    patch.setattr(Tokens, "forget", lambda self, token: None)


def guards_are_not_noted(patch: Patch) -> None:
    """R8: a guard sees who came before it, and nobody sees the guard."""
    real = verdict.Facts.note
    patch.setattr(
        verdict.Facts,
        "note",
        lambda self, footprint, cts, time_us: real(self, footprint._replace(guards=[]), cts, time_us),
    )


def a_tombstone_is_swept_too_early(patch: Patch) -> None:
    """R14: while an open snapshot below it still needs the row's versions."""
    patch.setattr(Leases, "oldest", lambda self: None)


BUGS: dict[Callable[[Patch], None], int] = {
    snapshot_is_the_largest_timestamp: 2,
    consolidation_ignores_open_snapshots: 2,
    put_against_delta_is_not_checked: 10,
    the_watermark_moves_before_the_commit_is_in_pending: 1,
    the_token_is_not_in_the_commits_record: 5,
    a_timestamp_is_acknowledged_before_its_turn: 2,
    a_delete_leaves_old_deltas_alive: 8,
    an_aborted_commit_is_replayed: 13,
    operations_in_base_are_folded_again: 23,
    a_fence_is_forgotten: 4,
    guards_are_not_noted: 1,
    a_tombstone_is_swept_too_early: 5,
}
"""Each bug, and the history to begin with: one that noticed it early when it was last looked for."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_model_notices(bug: Callable[[Patch], None]) -> None:
    for seed in [*SEEDS[BUGS[bug] :], *SEEDS[: BUGS[bug]]]:
        try:
            with pytest.MonkeyPatch.context() as patch:
                scheduled(seed, begins=partial(bug, patch))
        except Exception:
            return
        except (
            pytest.fail.Exception
        ) as failed:  # of ``pytest.raises``; not the end of the test's time, which is no proof
            if "DID NOT RAISE" not in str(failed):
                raise
            return
    pytest.fail(f"nobody noticed: {bug.__doc__}")


def test_without_a_bug_there_is_nothing_to_notice() -> None:
    assert isinstance(Committer, type)
    for seed in list(SEEDS)[:3]:
        scheduled(seed)
