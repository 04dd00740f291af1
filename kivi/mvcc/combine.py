"""Combining what is pending for aggregates, so that it need not be folded into base every few milliseconds.

A stream of appends touches the same rows over and over: folding each pass would write a base row again for every few
deltas. Instead the runs that have come in become one run (``kivi.delta.combine``), a pass at a time, and base rows
are written when a second has passed or much is pending. Readers search a handful of runs meanwhile.

When two commits' deltas may become one (the same reasoning as for consolidation, R14): F = W and ``keep`` = the open
S < F are taken under the leases' mutex, and whoever opens a snapshot below F later gets a *historical* one, which
tables without history refuse. So every S that may ever read this table is in ``keep`` or is at least F, and commits
in the same gap between two of these are seen by all of them or by none::

    S in keep           20            50                F = 90
    runs at    10  15        30  40      60  70  80            95
    combined  [10..15]      [30..40]     [60 ..  80]           95, which nobody has seen, stays as it is

The run of a group may have commits in several gaps: it stays as it is, too, while such a snapshot is open.

**What base may have already is never combined.** A commit at or below its row's stamp is inert; combined with a later
one it would be above it, and count twice. After a crash the log replays commits that base has for some rows and not
for others, and a fold that was cut short (no space) leaves the same. So only commits *above* the newest fold that was
ever begun, and above what was replayed, are combined; what lies below is gone once a fold has ended.

Rows that begin anew, or are gone, from a commit on (``DeltaRun.barrier``: what a retraction computed again) are a
boundary like a snapshot: what lies before them is not combined with what lies after, nor are they.

Deltas of small commits, which are pending row by row, become a run as well: readers see the rows go and the run come
in one step (``Pending.replace``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from kivi.delta.combine import combine as combined
from kivi.delta.combine import is_combinable, worth_combining
from kivi.delta.derive import run_from_rows
from kivi.delta.ops import Barrier, RowOp
from kivi.delta.runs import DeltaRun
from kivi.model.schema import TableSchema
from kivi.mvcc.pending import Pending

__all__ = ["combine", "is_combined"]

T = TypeVar("T")


def is_combined(schema: TableSchema) -> bool:
    """Whether ``combine`` is for this table: an aggregate without history whose deltas may be combined."""
    return schema.kind == "aggregate" and schema.history_us is None and is_combinable(schema)


def combine(pending: Pending, schema: TableSchema, above: int, upto: int, keep: list[int]) -> None:
    """One pass over a table for which ``is_combined``: F and ``keep`` as consolidation gets them from the leases.

    ``above``: base may have commits up to here, and no later one.
    """
    keys, runs = pending.dirty(schema.id, upto)
    barriers = {run.last_cts for run in runs if run.barrier is not Barrier.PATCH}
    if barriers:
        keep = sorted({*keep, *barriers, *(cts - 1 for cts in barriers)})
    small = [(key, cts, op) for key in keys for cts, op in pending.row_ops(schema.id, key) if above < cts <= upto]
    for rows in _gaps(small, keep, lambda row: row[1]):
        run = run_from_rows(schema, [(key, cts, dict(op.deltas)) for key, cts, op in rows])
        _replace(pending, schema, [run], [], rows)
    _, runs = pending.dirty(schema.id, upto)
    runs = tuple(
        run
        for run in runs
        if above < run.first_cts and run.last_cts <= upto and run.last_cts not in barriers and not _is_cut(run, keep)
    )
    for same in _gaps(runs, keep, attrgetter("last_cts")):
        count = worth_combining([run.weight for run in same])
        if count > 1:
            _replace(pending, schema, same[-count:], same[-count:], [])
            same = same[:-count]
        for run in same:
            if not run.distinct:  # of a group, which may have many rows of one key
                _replace(pending, schema, [run], [run], [])


def _replace(
    pending: Pending,
    schema: TableSchema,
    parts: list[DeltaRun],
    runs: list[DeltaRun],
    rows: list[tuple[bytes, int, RowOp]],
) -> None:
    pending.replace(schema.id, runs, rows, combined(schema, parts))


def _is_cut(run: DeltaRun, keep: list[int]) -> bool:
    """Whether a snapshot sees some of its commits and not the others: ``as_of`` between members of a group (R19)."""
    return bisect_left(keep, run.first_cts) != bisect_left(keep, run.last_cts)


def _gaps(items: Iterable[T], keep: list[int], cts_of: Callable[[T], int]) -> Iterator[list[T]]:
    """The items by the gap between snapshots that they lie in, each in CTS order."""
    ordered = sorted(items, key=cts_of)
    return (list(found) for _, found in groupby(ordered, lambda item: bisect_left(keep, cts_of(item))))
