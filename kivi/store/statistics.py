"""Numbers about a store and its tables that are cheap to have."""

from __future__ import annotations

from typing import Any, Protocol

from kivi.events.views import later_of
from kivi.model.questions import question_of
from kivi.model.scans import Scan
from kivi.model.schema import OperatorCall, TableSchema
from kivi.mvcc.shortage import Shortage
from kivi.mvcc.snapshot import Reader
from kivi.mvcc.watermark import Watermark
from kivi.runtime.histogram import Histogram
from kivi.store.catalog import LATE
from kivi.store.commits import Commits
from kivi.store.cooler import Cooler
from kivi.store.host import Running
from kivi.store.questions import Questions
from kivi.store.reads import Reads
from kivi.store.settler import Settler
from kivi.store.splitting import event_points, row_points

__all__ = ["histograms", "split_points", "stats", "table_statistics"]


class Host(Running, Protocol):
    """The parts of a store that have something to count."""

    moved: Watermark
    shortage: Shortage
    reader: Reader
    reads: Reads
    questions: Questions
    commits: Commits
    settler: Settler
    cooler: Cooler


def table_statistics(store: Host, schema: TableSchema) -> dict[str, int]:
    """Numbers about a table's contents that are cheap to have."""
    if schema.forgets_rows:
        return _of_rows(store, schema)
    if schema.kind != "event":
        return {}
    out: dict[str, int] = {}
    with store.snapshots.opened() as lease:
        if not store.shards.is_partial(schema):  # else nobody here knows how many there are
            count = question_of(schema, measures={"rows": OperatorCall("count")})
            (counted,) = store.reads.scan(lease, schema, Scan(question=count))
            out["rows"] = counted.column(0)[0].as_py()
        late = store.reads.get(lease, LATE, [(schema.origin,)], ("dropped",))[0]
        floor = store.retention.seen_at(schema.id, lease.ts)
    out |= {} if floor is None else {"complete_since_us": floor}
    out |= {"late_dropped": late["dropped"]} if late is not None else {}
    return out | retracted_left(store, schema)


def retracted_left(store: Host, schema: TableSchema) -> dict[str, int]:
    """Of how many retracted events something is left: in the log (at most so many), and in blocks or in memory."""
    begins = store.log.first
    pending = store.pending.retracted(schema.id, store.moved.value)  # first, as they move into blocks
    events = store.event_tables.of(schema.id)
    in_log = sum(one.names.size for one in pending if one.names.stamps[-1] >= begins)
    in_blocks = sum(one.names.size for one in pending)
    if events is not None:
        in_log += events.retracted_from(begins)
        in_blocks += events.erased_left()
    return {"retracted_in_log": in_log, "retracted_in_blocks": in_blocks}


def _of_rows(store: Host, schema: TableSchema) -> dict[str, int]:
    """From which slot on an aggregate with retention is there, and how many events came later than that."""
    with store.snapshots.opened() as lease:
        late = store.reads.get(lease, LATE, [(schema.origin,)], ("dropped",))[0]
        floor = store.retention.seen_at(schema.id, lease.ts)
    out = {"late_dropped": 0 if late is None else late["dropped"]}
    complete = later_of(floor, schema.complete_since_us)
    out |= {} if floor is None else {"floor_us": floor}
    return out | ({} if complete is None else {"complete_since_us": complete})


def split_points(store: Host, schema: TableSchema, rows: int) -> list[tuple[Any, ...]]:
    """See ``kivi.store.splitting``."""
    if schema.kind != "event":
        return list(row_points(store.engine, schema, rows))
    events = store.event_tables.of(schema.id)
    if events is None:
        return []
    upto = store.moved.value
    recent = [item.batch for item in store.pending.events(schema.id, upto)]
    with events.view(upto) as view:
        return list(event_points(schema, view.parts(), recent, rows))


def stats(store: Host) -> dict[str, int | float]:
    """Flat numbers for metrics and ``kivi status``."""
    counters = store.committer.counters
    oldest = store.leases.oldest()
    watermark = store.moved.value  # first: it is never above what was handed out before
    last = store.log.last
    return {
        "watermark": watermark,
        "last_ts": last,
        "watermark_lag": last - watermark,
        "in_flight": store.moved.in_flight,
        "commits": counters.commits,
        "commits_grouped": counters.commits_grouped,
        "aborts_conflict": counters.conflicts,
        "aborts_too_old": counters.too_old,
        "aborts_no_room": counters.no_room,
        "aborts_storage": counters.storage,
        "commits_unknown": counters.unknown,
        "rederived": counters.rederived,
        "token_hits": store.tokens.hits,
        "tokens_unsaved": store.tokens.unsaved,
        "conflict_facts": store.committer.facts_size,
        "conflict_floor": store.committer.facts_floor,
        "leases": len(store.leases),
        "leases_cut": store.leases.cut,
        "oldest_snapshot": oldest if oldest is not None else watermark,
        "oldest_snapshot_age_s": store.leases.oldest_age_s(),
        "pending_bytes": store.pending.nbytes,
        "pending_operations": store.pending.operations,
        "consolidated_upto": store.consolidator.position,
        "consolidated_durable_upto": store.consolidator.durable_position,
        "consolidations": store.consolidator.passes,
        "consolidated_rows": store.consolidator.rows_folded,
        "consolidation_seconds": store.consolidator.busy_s,
        "block_compactions": store.consolidator.compactions,
        "block_compacted_rows": store.consolidator.compacted_rows,
        **store.settler.stats(),
        **store.cooler.stats(),
        "version_bytes": store.consolidator.sweeper.versions_bytes,
        "stages": len(store.stages),
        "stage_bytes": store.stages.live_bytes,
        "late_dropped": store.commits.late_dropped,
        "summary_blocks_known": store.questions.blocks_known,
        "summary_blocks_read": store.questions.blocks_read,
        "tables": len(store.catalog.visible.by_id),
        "rules": len(store.catalog.visible.rules),
        **store.commits.judging.stats(),
        "engine_errors_open": store.consolidator.engine_errors,
        **store.shortage.stats(),
        **{f"log_{name}": value for name, value in store.log.stats().items()},
        **{f"engine_{name}": value for name, value in store.engine.stats().items()},
    }


def histograms(store: Host) -> dict[str, Histogram]:
    """Distributions, for metrics."""
    return {
        "commit_s": store.committer.times,
        "log_sync_s": store.log.sync_times,
        "consolidation_s": store.consolidator.pass_times,
        "read_runs": store.reader.runs_searched,
    }
