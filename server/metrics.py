"""Prometheus: what is counted elsewhere, under names that stay.

``METRICS`` says of every number in ``stats()`` what it is called for Prometheus, what kind of metric it is and what it
means; a number that is not there is not served, and a test holds that none was forgotten. Names follow Prometheus'
rules: ``kivi_`` first, base units last, ``_total`` for what only grows. No label has a value that data or users choose:
the calls, their status codes, the reasons of aborts and the versions are all there is.

Buckets of durations double from a quarter of a millisecond (``kivi.runtime.histogram``).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

from kivi_server.calls import Calls
from prometheus_client import PROCESS_COLLECTOR, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from kivi.runtime.histogram import Histogram

__all__ = ["DISTRIBUTIONS", "METRICS", "NO_SPANS", "UNSERVED", "application", "form", "registry", "version_of"]

Stats = Callable[[], dict[str, int | float]]
Histograms = Callable[[], dict[str, Histogram]]


class Metric(NamedTuple):
    """``label`` is ("name", "value") of a metric that several stats share."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    text: str
    label: tuple[str, str] | None = None


def _counter(name: str, text: str, label: tuple[str, str] | None = None) -> Metric:
    return Metric(name, CounterMetricFamily, text, label)


def _gauge(name: str, text: str) -> Metric:
    return Metric(name, GaugeMetricFamily, text)


_SUMMED: Final = "Event blocks that were summed up, by what was read of them."
_RULES: Final = "Events that rules judged, and what became of them."
_COLD: Final = "Ranges of cold files that were read, by what they came from."
_SPANS: Final = "Spans of exports that were answered, by what became of them."
_POINTS: Final = "Points of metrics, likewise."
_KINDS: Final = (
    *("invocations", "outgoing_calls", "llm_calls"),
    *("metric_histograms", "metric_buckets", "metric_sums", "metric_gauges"),
)
_UNFIT: Final = "1 while spans or points of a kind are refused: their table has other columns."
_ANSWERS: Final = "Answers over HTTP that equal ones may share, by whether this one was computed."
_ALERTS: Final = "Instances of alerts that are not inactive, by state."
_NOTIFIED: Final = "Notifications of alerts that were delivered or given up, and times that delivering failed."
_ABORTS: Final = "Commits that were refused and did nothing, by reason."

METRICS: Final[dict[str, Metric]] = {
    # transactions
    "commits": _counter("commits", "Transactions that became durable and visible."),
    "commits_grouped": _counter("commits_grouped", "Of these, the ones that entered in groups of two or more."),
    "aborts_conflict": _counter("aborts", _ABORTS, ("reason", "conflict")),
    "aborts_too_old": _counter("aborts", _ABORTS, ("reason", "snapshot_too_old")),
    "aborts_no_room": _counter("aborts", _ABORTS, ("reason", "no_room")),
    "aborts_storage": _counter("aborts", _ABORTS, ("reason", "storage")),
    "commits_unknown": _counter("commits_unknown", "Commits that may or may not have happened: the log failed."),
    "rederived": _counter("rederivations", "Commits derived again, as the catalog changed beneath them."),
    "token_hits": _counter("token_hits", "Commits that repeated a token, and got the answer of the first."),
    "in_flight": _gauge("commits_in_flight", "Commits between their timestamp and their end."),
    # what readers see
    "watermark": _gauge("watermark", "The snapshot that a new reader gets, as a commit timestamp."),
    "last_ts": _gauge("newest_commit_timestamp", "The newest commit timestamp handed out."),
    "watermark_lag": _gauge("watermark_lag", "Commit timestamps handed out that no reader sees yet."),
    "leases": _gauge("snapshots", "Open snapshots."),
    "leases_cut": _counter("snapshots_cut", "Snapshots ended because what they kept outgrew its budget."),
    "oldest_snapshot": _gauge("oldest_snapshot", "The oldest open snapshot, as a commit timestamp."),
    "oldest_snapshot_age_s": _gauge("oldest_snapshot_age_seconds", "How long the first of the open snapshots is open."),
    "version_bytes": _gauge("version_bytes", "Older versions of rows that open snapshots or a history need."),
    # pending and consolidation
    "pending_bytes": _gauge("pending_bytes", "Operations in memory that are not in base yet."),
    "pending_operations": _gauge("pending_operations", "Operations in memory that are not in base yet."),
    "consolidated_upto": _gauge("consolidated_timestamp", "Base includes every commit up to here."),
    "consolidated_durable_upto": _gauge("consolidated_durable_timestamp", "The same, as a crash would find it."),
    "consolidated_rows": _counter("consolidated_rows", "Rows and events written to base."),
    "block_compactions": _counter("block_compactions", "Times that small blocks of events were merged."),
    "block_compacted_rows": _counter("block_compacted_rows", "Events in the blocks that were merged."),
    "settling": _gauge("events_unsettled", "Events in blocks, which are yet to move to settled files."),
    "settling_seconds": _counter("settling_seconds", "Time that steps of settling took, with rests."),
    "settling_rested_seconds": _counter("settling_rested_seconds", "Time that settling rested while events came in."),
    "settled_files": _gauge("settled_files", "Settled files that are there."),
    "settled_depth": _gauge("settled_depth", "Settled files of a table that have one moment, at most."),
    "settled_write_amplification": _gauge(
        "settled_write_amplification", "Bytes of settled files that were written, for each byte that events moved to."
    ),
    "settled_rows": _counter("settled_events", "Events that moved from blocks to settled files."),
    "settled_bytes": _counter("settled_bytes", "Bytes of the files that they moved to."),
    "settled_written_bytes": _counter("settled_written_bytes", "The same, and of the files that were made of files."),
    "settled_combined_rows": _counter("settled_combined_events", "Events of the files that others were made of."),
    # the cold tier
    "local_bytes": _gauge("settled_local_bytes", "Bytes of settled files that lie in the store's directory."),
    "cold_bytes": _gauge("cold_bytes", "Bytes of settled files that lie in object stores."),
    "cold_files": _gauge("cold_files", "Settled files that lie in object stores."),
    "cold_uploads_waiting": _gauge("cold_uploads_waiting", "Files that are old enough to move to an object store."),
    "cold_errors": _counter(
        "cold_errors", "Rounds in which files could not move to an object store, or be deleted there."
    ),
    "cold_cache_bytes": _gauge("cold_cache_bytes", "What is kept on disk of what was read back."),
    "cold_cache_hits": _counter("cold_ranges_read", _COLD, ("by", "cache")),
    "cold_cache_misses": _counter("cold_ranges_read", _COLD, ("by", "request")),
    "cold_fetched_bytes": _counter("cold_fetched_bytes", "Bytes that were read from object stores."),
    "cold_uploaded_bytes": _counter("cold_uploaded_bytes", "Bytes that moved to object stores."),
    "cold_deleted": _counter("cold_objects_deleted", "Objects that nothing needed any more, and that were deleted."),
    "conflict_facts": _gauge("conflict_facts", "Cells whose newest write is remembered to find conflicts."),
    # stages and the catalog
    "stages": _gauge("stages", "Stages that wait for their commit."),
    "stage_bytes": _gauge("stage_bytes", "Log bytes that live stages keep."),
    "late_dropped": _counter("late_events_dropped", "Events below a retention floor that writers had asked to drop."),
    "rules": _gauge("rules", "Rules that judge events as they are committed."),
    **{
        f"rules_{what}": _counter("rule_events", _RULES, ("outcome", what))
        for what in ("judged", "raised", "missing", "failed", "late")
    },
    "summary_blocks_known": _counter("blocks_summed", _SUMMED, ("by", "header")),
    "summary_blocks_read": _counter("blocks_summed", _SUMMED, ("by", "data")),
    "tables": _gauge("tables", "Tables, aggregates included."),
    "disk_free_bytes": _gauge("disk_free_bytes", "What the file system of the store's directory has left for it."),
    "disk_size_bytes": _gauge("disk_size_bytes", "The size of that file system."),
    "disk_full": _gauge("disk_full", "1 while log or base cannot be written for want of space; it ends by itself."),
    "disk_full_times": _counter("disk_full_times", "Times that there was no space."),
    "disk_full_s": _counter("disk_full_seconds", "How long there was no space."),
    "disk_full_began_at_s": _gauge("disk_full_began_timestamp_seconds", "When the newest of these times began."),
    "disk_full_ended_at_s": _gauge("disk_full_ended_timestamp_seconds", "When it ended, and service had resumed."),
    "disk_full_refused": _gauge("disk_full_refused", "Commits and stages that were refused in the newest of them."),
    "storage_failing": _gauge("storage_failing", "1 while log or base cannot be written otherwise: restart."),
    # the commit log
    "log_records": _gauge("log_records", "Records in the segments that are kept."),
    "log_segments": _gauge("log_segments", "Segments that are kept."),
    "log_log_bytes": _gauge("log_bytes", "Log that is kept."),
    "log_written_bytes": _counter("log_written_bytes", "Bytes of records written to the log."),
    "log_groups": _counter("log_groups", "Groups of records that entered the log together."),
    "log_rolls": _counter("log_rolls", "Segments begun."),
    "log_inflight_records": _gauge("log_inflight_records", "Records that wait for their sync."),
    "log_inflight_bytes": _gauge("log_inflight_bytes", "Bytes that wait for their sync."),
    "log_failed": _gauge("log_failed", "1 once a write or sync has failed: the server stops, and has to be restarted."),
    # RocksDB
    "engine_keys_estimate": _gauge("engine_keys", "Keys, as RocksDB estimates them."),
    "engine_live_bytes": _gauge("engine_live_bytes", "Data that is not superseded, as RocksDB estimates it."),
    "engine_memtable_bytes": _gauge("engine_memtable_bytes", "Memtables."),
    "engine_immutable_memtables": _gauge("engine_immutable_memtables", "Memtables that wait for their flush."),
    "engine_block_cache_bytes": _gauge("engine_block_cache_bytes", "Block cache in use."),
    "engine_block_cache_capacity_bytes": _gauge("engine_block_cache_capacity_bytes", "Block cache, at most."),
    "engine_table_readers_bytes": _gauge("engine_table_readers_bytes", "Indexes and filters of open tables."),
    "engine_sst_bytes": _gauge("engine_sst_bytes", "Table files."),
    "engine_blob_bytes": _gauge("engine_blob_bytes", "Blob files: event blocks."),
    "engine_blob_live_bytes": _gauge("engine_blob_live_bytes", "Blob files that are in use."),
    "engine_blob_garbage_bytes": _gauge("engine_blob_garbage_bytes", "What is not in use any more of these."),
    "engine_pending_compaction_bytes": _gauge("engine_pending_compaction_bytes", "What compaction is behind by."),
    "engine_running_compactions": _gauge("engine_running_compactions", "Compactions now."),
    "engine_running_flushes": _gauge("engine_running_flushes", "Flushes now."),
    "engine_background_errors": _counter("engine_background_errors", "Errors of RocksDB's background work."),
    "engine_errors_open": _gauge("engine_errors_open", "Those of them since base was last flushed."),
    "engine_write_stopped": _gauge("engine_write_stopped", "1 while RocksDB stalls all writes."),
    "engine_delayed_write_rate": _gauge("engine_delayed_write_bytes_per_second", "What a stall lets through; 0: none."),
    # the server
    "server_sessions": _gauge("sessions", "Connected clients."),
    "server_sessions_dropped": _counter("sessions_dropped", "Clients dropped because they read nothing any more."),
    "server_open_transactions": _gauge("transactions", "Open transactions and snapshots of all sessions."),
    "server_shared_snapshots": _gauge("shared_snapshots", "Snapshots that several processes may use."),
    "server_commits_in_flight": _gauge("unanswered_commits", "Commits that were asked for and not answered yet."),
    "server_requests": _counter("session_requests", "Requests in sessions."),
    "server_frames_in": _counter("session_frames_received", "Messages of sessions received."),
    "server_frames_out": _counter("session_frames_sent", "Messages of sessions sent."),
    "server_http_computed": _counter("http_answers", _ANSWERS, ("by", "computing")),
    "server_http_shared": _counter("http_answers", _ANSWERS, ("by", "sharing")),
    # subscriptions
    "subscriptions": _gauge("subscriptions", "Subscriptions of connected clients."),
    "subscription_windows": _gauge("subscription_windows", "States that are kept up for them: equal queries have one."),
    "subscription_renewals": _counter("subscription_renewals", "States that had to be read again."),
    "subscription_updates": _counter("subscription_updates", "What subscribers were told, heartbeats included."),
    "subscription_ticks": _counter("subscription_ticks", "Times that queries were brought to a newer snapshot."),
    "subscription_lag": _gauge("subscription_lag", "Commit timestamps that queries are behind the watermark."),
    "subscription_tick_s": _counter("subscription_tick_seconds", "Time spent on bringing queries up to date."),
    # alerts
    "alerts_pending": Metric("alert_instances", GaugeMetricFamily, _ALERTS, ("state", "pending")),
    "alerts_firing": Metric("alert_instances", GaugeMetricFamily, _ALERTS, ("state", "firing")),
    "alerts_resolved": Metric("alert_instances", GaugeMetricFamily, _ALERTS, ("state", "resolved")),
    "alerts_failing": _gauge("alerts_failing", "Alerts that cannot be evaluated: kivi alerts says why."),
    "alert_notifications_waiting": _gauge("alert_notifications_waiting", "Notifications that are yet to be delivered."),
    "alert_notifications_sent": _counter("alert_notifications", _NOTIFIED, ("outcome", "delivered")),
    "alert_notifications_failed": _counter("alert_notifications", _NOTIFIED, ("outcome", "failed")),
    "alert_notifications_given_up": _counter("alert_notifications", _NOTIFIED, ("outcome", "given_up")),
    # OpenTelemetry
    "otlp_spans_stored": _counter("otlp_spans", _SPANS, ("outcome", "stored")),
    "otlp_spans_dropped": _counter("otlp_spans", _SPANS, ("outcome", "dropped")),
    "otlp_spans_repeated": _counter("otlp_spans", _SPANS, ("outcome", "repeated")),
    "otlp_spans_rejected": _counter("otlp_spans", _SPANS, ("outcome", "rejected")),
    "otlp_spans_passed_over": _counter("otlp_spans", _SPANS, ("outcome", "passed_over")),
    "otlp_points_stored": _counter("otlp_points", _POINTS, ("outcome", "stored")),
    "otlp_points_dropped": _counter("otlp_points", _POINTS, ("outcome", "dropped")),
    "otlp_points_repeated": _counter("otlp_points", _POINTS, ("outcome", "repeated")),
    "otlp_points_rejected": _counter("otlp_points", _POINTS, ("outcome", "rejected")),
    "otlp_points_passed_over": _counter("otlp_points", _POINTS, ("outcome", "passed_over")),
    "otlp_commits": _counter("otlp_commits", "Transactions that spans and points were stored in."),
    "otlp_window_spans": _gauge("otlp_window_spans", "Span ids that are remembered, to find those sent again."),
    "otlp_window_points": _gauge("otlp_window_points", "Ids of parts of points of metrics, likewise."),
    **{f"otlp_unfit_{name}": Metric("otlp_tables_unfit", GaugeMetricFamily, _UNFIT, ("kind", name)) for name in _KINDS},
    "otlp_waiting_bytes": _gauge("otlp_waiting_bytes", "Exports that wait for their commit."),
}

OF_HUBS: Final[dict[str, Metric]] = {
    "hub_listens": _gauge("hub_up", "1 while the process of subscriptions takes some."),
    "hub_starts": _counter("hub_starts", "Times that the process of subscriptions was started."),
    "hub_watermark": _gauge("hub_watermark", "The snapshot that the process of subscriptions has come to."),
}
"""Only of a server with ``--hub``."""

OF_NODES: Final[dict[str, Metric]] = {
    "log_sequence": _gauge("cluster_log_applied", "The last message of the cluster's log that this node has applied."),
    "log_age_s": _gauge("cluster_log_age_seconds", "All that the log had so long ago is applied here."),
    "log_used": _gauge("cluster_log_used_ratio", "Of the bytes that the log may have; at 1 commits are refused."),
    "log_proposed": _gauge("cluster_log_frames_proposed", "Frames of this node that have not come back."),
    "log_proposed_bytes": _gauge("cluster_log_proposed_bytes", "Their bytes."),
    "log_lost_suffix": _gauge(
        "cluster_log_lost", "1 once the log has lost what it had acknowledged: kivi cluster reseed."
    ),
    "log_nodes_live": _gauge("cluster_nodes_live", "Nodes that the log is kept for."),
    "log_server_restarts": _gauge(
        "cluster_log_server_restarts", "How often this node's own server of the log (--peers) was started again."
    ),
    "log_disagreements": _gauge(
        "cluster_disagreements", "Sets of shards whose content nodes do not agree about: kivi cluster status."
    ),
    "log_nodes_evicted": _gauge("cluster_nodes_evicted", "Nodes that the log was truncated without, of the last day."),
}
"""Of the nodes of clusters, besides."""

NO_SPANS: Final = {stat: 0 for stat in METRICS if stat.startswith("otlp_")}
"""The stats of a server that takes none."""

UNSERVED: Final = frozenset(
    {
        "conflict_floor",
        "consolidation_seconds",  # the sum of kivi_consolidation_duration_seconds
        "consolidations",
        "log_sync_s",  # the sum and count of kivi_log_sync_duration_seconds
        "log_syncs",
        "tokens_unsaved",
    }
)
"""Stats that say nothing by themselves, or that another metric has."""

DISTRIBUTIONS: Final[dict[str, tuple[str, str]]] = {
    "commit_s": ("commit_duration_seconds", "From when a commit was asked for until it was durable and visible."),
    "log_sync_s": ("log_sync_duration_seconds", "One sync of the log."),
    "consolidation_s": ("consolidation_duration_seconds", "One pass of consolidation."),
    "read_runs": ("read_runs_searched", "Delta runs searched for each row that was read by its key."),
}


class _Collector(Collector):
    def __init__(self, stats: Stats, histograms: Histograms, calls: Calls) -> None:
        self._stats, self._histograms, self._calls = stats, histograms, calls

    def collect(self) -> Iterator[Any]:
        families: dict[str, Any] = {}
        for stat, value in self._stats().items():
            metric = METRICS.get(stat) or OF_NODES.get(stat) or OF_HUBS.get(stat)
            if metric is None:
                continue
            family = families.get(metric.name)
            if family is None:
                labels = [metric.label[0]] if metric.label else []
                family = families[metric.name] = metric.kind(f"kivi_{metric.name}", metric.text, labels=labels)
            family.add_metric([metric.label[1]] if metric.label else [], value)
        yield from families.values()
        for name, histogram in self._histograms().items():
            title, text = DISTRIBUTIONS[name]
            distribution = HistogramMetricFamily(f"kivi_{title}", text)
            distribution.add_metric([], *_buckets(histogram))
            yield distribution
        yield from self._of_calls()
        yield InfoMetricFamily("kivi_build", "What this is made of.", value=_build())

    def _of_calls(self) -> Iterator[Any]:
        codes = CounterMetricFamily("kivi_rpc_requests", "Calls that have ended, by status.", labels=["rpc", "code"])
        for (call, code), count in sorted(self._calls.codes().items()):
            codes.add_metric([call, code], count)
        yield codes
        times = HistogramMetricFamily("kivi_rpc_duration_seconds", "How long calls took.", labels=["rpc"])
        for call, histogram in sorted(self._calls.times().items()):
            times.add_metric([call], *_buckets(histogram))
        yield times


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    counts, total = histogram.read()
    bounds = [f"{bound:.6g}" for bound in histogram.bounds]
    return list(zip([*bounds, "+Inf"], map(float, counts), strict=True)), total


def version_of(package: str) -> str:
    """Of an installed package; "unknown" where it runs from its sources."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _build() -> dict[str, str]:
    packages = {package: version_of(package) for package in ("grpcio", "pyarrow", "rocksdict")}
    return {"python": platform.python_version(), "version": version_of("kivi"), **packages}


def registry(stats: Stats, histograms: Histograms, calls: Calls) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(_Collector(stats, histograms, calls))
    found.register(PROCESS_COLLECTOR)
    return found


def application(metrics: CollectorRegistry) -> Any:
    """WSGI, of /metrics."""
    return make_wsgi_app(metrics)


def form(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """What makes the same, and its media type, for whoever serves it otherwise."""
    return choose_encoder(accept)
