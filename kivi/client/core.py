"""One client's state, and its calls that belong to no transaction, as steps: see ``steps``."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from kivi import errors
from kivi.api.arguments import (
    AggregateArguments,
    AlterAggregateArguments,
    AlterTableArguments,
    GetNowArguments,
    LevelsArguments,
    SubscribeArguments,
    TailArguments,
    ViewArguments,
    check_keep,
    check_move,
    check_names,
    check_place,
    check_rebalance,
    check_rows,
    check_token,
    directory,
    move_id,
    node_name,
    plain_text,
    stage_ids,
    table_name,
)
from kivi.api.hierarchies import HierarchyArguments
from kivi.api.retry import backoff_s
from kivi.api.subscription import listed
from kivi.client.messages import (
    append_parts,
    encoding,
    get,
    got,
    new_aggregate,
    new_aggregates,
    new_columns,
    new_measures,
    new_view,
    number,
)
from kivi.client.steps import (
    Ask,
    Closed,
    ConnectionLost,
    Sleep,
    Steps,
    Stream,
    Timeout,
    Transport,
    Unary,
    Upload,
    silent,
    timeout_ms,
)
from kivi.errors import InvalidArgument
from kivi.model.changes import TailPoints
from kivi.model.lateness import LatenessDay
from kivi.model.outcomes import ABORTED, UNKNOWN, Outcome
from kivi.model.schema import TableSchema
from kivi.model.subscriptions import Stored
from kivi.wire.codec import as_dict, from_table, from_values, to_table
from kivi.wire.methods import MESSAGE_BYTES_MAX
from kivi.wire.v1 import service_pb2, session_pb2, types_pb2

__all__ = ["Core"]

T = TypeVar("T")
B = TypeVar("B")
Kind = session_pb2.Operation
_REPEATABLE: Final = frozenset(
    {
        "AcknowledgeSubscription",
        "ClusterStatus",
        "Describe",
        "DiscardStages",
        "ListAlerts",
        "ListBatchScopes",
        "ListRules",
        "ListSubscriptions",
        "ListTables",
        "Reached",
        "SplitTable",
        "Stats",
        "StoreSubscriptions",
        "Subscribers",
        "TailPoints",
        "Watermark",
    }
)
"""The calls whose answer is the same if they are made twice."""
_REFUSALS: Final = (errors.Unavailable, errors.Unauthenticated, errors.PermissionDenied)
"""What a server may answer before it has looked up a request's token."""


Seen = Callable[[TableSchema], Steps[TableSchema]]
"""What a snapshot sees of the newest definition of a table."""


def newest(schema: TableSchema) -> Steps[TableSchema]:
    """Of a snapshot that is yet to begin: the definition itself."""
    yield from ()
    return schema


@dataclass
class Core:
    """One client's state: its schema cache, what it has seen, its timeout."""

    endpoint: str
    timeout_s: float | None
    fresh: bool = False
    """Every snapshot has all that was acknowledged before it was asked for, by whatever node of a cluster."""
    transport: Transport = field(init=False)
    schemas: dict[str, TableSchema] = field(default_factory=dict)
    seen_ts: int = 0
    subscriptions_at: str = ""
    """Where the server's subscriptions have a process of their own; "": at the server, as far as is known."""
    lost_at: dict[str, float] = field(default_factory=dict)
    """When a stream of subscriptions to a node broke, by its address."""
    value_bytes_max: int = MESSAGE_BYTES_MAX  # until the server has said what it is
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    begins: threading.Lock = field(default_factory=threading.Lock)
    """Of who begins a transaction again."""

    def learn(self, table: types_pb2.Table) -> TableSchema:
        """The newest definition of a table that this client knows; the snapshots that it begins from now on see it."""
        schema = self.schemas[table.name] = from_table(table)
        self.saw(schema.altered_ts)
        return schema

    def heard(self, table: types_pb2.Table) -> TableSchema:
        """A definition that a subscription came to: what this client reads and writes then goes by it, too, unless it
        knows a newer one or another table of that name."""
        schema, known = from_table(table), self.schemas.get(table.name)
        if known is None or (known.origin == schema.origin and known.altered_ts < schema.altered_ts):
            self.learn(table)
        return schema

    def saw(self, ts: int) -> None:
        if ts > self.seen_ts:
            self.seen_ts = ts

    def deadline(self) -> float:
        return time.monotonic() + (self.timeout_s if self.timeout_s is not None else 1e9)

    def left(self, deadline: float) -> float | None:
        """The seconds until then, for an attempt; None: it waits for ever. Raises Timeout if there are none."""
        if self.timeout_s is None:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            raise silent(self.endpoint, self.timeout_s)
        return left

    # -- schemas --------------------------------------------------------------------------------

    def fetch(self, table: str, least: int = 0) -> Steps[TableSchema]:
        """The schema from the server, into the cache: one that has heard of the commit ``least``."""
        try:
            reply = yield from self.call("Describe", self._described(table_name(table), least))
        except errors.NotFound:
            self.schemas.pop(table, None)
            raise
        return self.learn(reply.table)

    def _described(self, name: str, least: int = 0, *, lateness: bool = False) -> service_pb2.DescribeRequest:
        least = max(least, self.seen_ts)
        return service_pb2.DescribeRequest(name=name, lateness=lateness, min_snapshot=least, fresh=self.fresh)

    def stale(self, error: errors.KiviError, table: str) -> bool:
        """True, and the cached schema forgotten, if ``error`` says it is of another generation."""
        if not isinstance(error, errors.NotFound):
            return False
        self.schemas.pop(table, None)
        return bool(error.details.get("stale"))

    def cached(self, table: str) -> TableSchema | None:
        try:
            return self.schemas.get(table)
        except TypeError:  # no name at all, as ``fetch`` will say
            return None

    def use(self, table: str, fn: Callable[[TableSchema], T], seen: Seen = newest, least: int = 0) -> Steps[T]:
        """``fn(schema)``, which validates before it does anything; ``seen`` says what a snapshot sees of a schema, and
        ``least`` which commit a server has to have heard of that knows it.

        If it refuses what was written against the cached schema, the table may have been made anew since: the
        schema is fetched, and ``fn`` has the last word on that one.
        """
        schema = self.cached(table)
        if schema is not None:
            try:
                return fn((yield from seen(schema)))
            except InvalidArgument:
                pass
        schema = yield from self.fetch(table, least)
        return fn((yield from seen(schema)))

    def schema(self, table: str) -> Steps[TableSchema]:
        """The cached one, or else the server's."""
        return self.cached(table) or (yield from self.fetch(table))

    def asked(
        self,
        table: str,
        bind: Callable[[TableSchema], B],
        ask: Callable[[B], Steps[T]],
        seen: Seen = newest,
        least: int = 0,
        *,
        again: bool = True,
    ) -> Steps[T]:
        """``ask(bind(schema))``, and with ``again`` once more if the table turns out to be another."""
        try:
            return (yield from ask((yield from self.use(table, bind, seen, least))))
        except errors.NotFound as error:
            if not self.stale(error, table) or not again:
                raise
        return (yield from ask((yield from self.use(table, bind, seen, least))))

    def call(self, method: str, message: Any) -> Steps[Any]:
        """A unary call; one of ``_REPEATABLE`` is made again while the server is away, but not at a node of a cluster
        that says which shards it does not hold."""
        deadline, attempt = self.deadline(), 0
        while True:
            try:
                return (yield Unary(method, message, self.left(deadline)))
            except errors.Unavailable as error:
                is_final = isinstance(error, (Timeout, Closed, errors.ResourceExhausted)) or "shards" in error.details
                if is_final or method not in _REPEATABLE:
                    raise
            attempt += 1
            yield Sleep(backoff_s(attempt + 4))

    # -- requests without a transaction ---------------------------------------------------------

    def repeat(
        self,
        request: session_pb2.Request,
        lost: Callable[[], errors.KiviError],
        bodies: Sequence[Any] = (),
        deadline: float | None = None,
    ) -> Steps[Any]:
        """Asks, and asks the same again on new sessions until the deadline, or the timeout; then raises ``lost()``.

        A commit of which an attempt may have been sent is lost, too, where another attempt is refused, which says
        nothing of the first (R16).
        """
        deadline, attempt, sent = deadline or self.deadline(), 0, False
        while True:
            try:
                left = self.left(deadline)
            except Timeout:
                raise lost() from None
            try:
                return (yield Ask(request, left, bodies=bodies))
            except (ConnectionLost, Timeout) as error:
                sent = sent or isinstance(error, Timeout) or error.sent
            except _REFUSALS as error:
                if not error.details.get("stopping"):
                    if sent and request.HasField("commit"):
                        raise lost() from None
                    raise
                self.transport.leave(None)
            attempt += 1
            yield Sleep(min(backoff_s(attempt + 4), max(0.0, deadline - time.monotonic())))

    def get_many(self, wanted: GetNowArguments) -> Steps[list[dict[str, Any] | None]]:
        """Rows at a snapshot of this read's own: one message there, one back, and again after a lost connection."""

        def ask(bound: tuple[TableSchema, session_pb2.Request]) -> Steps[list[dict[str, Any] | None]]:
            schema, request = bound
            request.first.min_snapshot = self.seen_ts
            if self.fresh:
                request.first.fresh = True
            if (staleness_us := wanted.max_staleness_us) is not None:
                request.first.max_staleness_us = staleness_us
            request.timeout_ms = timeout_ms(self.timeout_s)
            reply = yield from self.repeat(request, lambda: silent(self.endpoint, self.timeout_s))
            self.saw(reply.start_ts)
            return got(schema, wanted, reply)

        return self.asked(wanted.table, lambda schema: (schema, get(schema, wanted)), ask)

    def outcome(self, token: str, place: int | None = None) -> Steps[Outcome]:
        return self._outcome(token, place, self.deadline())

    def _outcome(self, token: str, place: int | None, deadline: float) -> Steps[Outcome]:
        asked = session_pb2.Outcome(token=check_token(token), place=check_place(place))
        request = session_pb2.Request(outcome=asked, timeout_ms=timeout_ms(self.timeout_s))
        lost = lambda: Timeout(f"the server did not say what became of {token!r}")  # noqa: E731
        reply = yield from self.repeat(request, lost, deadline=deadline)
        match reply.outcome.state:
            case session_pb2.OutcomeReply.STATE_COMMITTED:
                self.saw(reply.outcome.commit_ts)
                return int(reply.outcome.commit_ts)
            case session_pb2.OutcomeReply.STATE_ABORTED:
                return ABORTED
        return UNKNOWN

    def resolve(self, token: str, deadline: float) -> Steps[int]:
        """The commit timestamp of a commit whose reply was lost. Raises Disconnected if it did not happen, and
        CommitUnknown if nobody has said so by the deadline."""
        attempt = 0
        while time.monotonic() < deadline:
            try:
                outcome = yield from self._outcome(token, None, deadline)
            except _REFUSALS:
                break
            if outcome is ABORTED:
                raise errors.Disconnected(
                    "the connection was lost before the commit was logged; "
                    "nothing was applied: run the transaction again"
                )
            if isinstance(outcome, int):
                return outcome
            attempt += 1
            yield Sleep(backoff_s(attempt + 4))
        raise errors.CommitUnknown(token=token)

    # -- stages ---------------------------------------------------------------------------------

    def stage(self, table: str, records: Any, owner: str = "", deletes: str | None = None) -> Steps[bytes]:
        plain_text(owner, "owner")

        def ask(bound: tuple[TableSchema, list[Any]]) -> Steps[bytes]:
            schema, parts = bound
            message = partial(service_pb2.StageRequest, table=schema.name, table_id=schema.id, owner=owner)
            reply = yield Upload("Stage", lambda: (message(arrow=bytes(part)) for part in parts), self.timeout_s)
            return bytes(reply.stage)

        return self.asked(table, encoding(records, partial(append_parts, rows=True, deletes=deletes)), ask)

    def discard_stages(self, ids: Iterable[bytes]) -> Steps[None]:
        yield from self.call("DiscardStages", service_pb2.DiscardStagesRequest(stages=stage_ids(ids)))

    def batch_scopes(self, prefix: str = "") -> Steps[list[str]]:
        reply = yield from self.call(
            "ListBatchScopes", service_pb2.ListBatchScopesRequest(prefix=plain_text(prefix, "prefix"))
        )
        return list(reply.scopes)

    # -- administration -------------------------------------------------------------------------

    def create(self, schema: TableSchema) -> Steps[None]:
        reply = yield from self.call("CreateTable", service_pb2.CreateTableRequest(table=to_table(schema)))
        self.learn(reply.table)

    def create_aggregate(self, wanted: AggregateArguments) -> Steps[None]:
        """The server checks names and types against the source."""

        yield Stream("CreateAggregate", new_aggregate(wanted), None, self._progress(wanted.progress))

    def _progress(self, progress: Callable[[int, int], None] | None) -> Callable[[Any], None]:
        def on_message(reply: Any) -> None:
            if isinstance(reply, service_pb2.CreateAggregatesResponse):
                made = [*reply.tables]
            else:
                made = [reply.table] if reply.HasField("table") else []
            for table in made:
                self.learn(table)
            if progress is not None:
                progress(reply.done_rows, reply.total_rows)

        return on_message

    def alter_table(self, wanted: AlterTableArguments) -> Steps[None]:
        reply = yield from self.call("AlterTable", new_columns(wanted))
        self.learn(reply.table)

    def alter_aggregate(self, wanted: AlterAggregateArguments) -> Steps[None]:
        """The server checks names and types against the source."""
        yield Stream("AlterAggregate", new_measures(wanted), None, self._progress(wanted.progress))

    def create_view(self, wanted: ViewArguments) -> Steps[None]:
        """The server checks names and types against the source."""
        yield Stream("CreateView", new_view(wanted), None, self._progress(None))

    def create_hierarchy(self, wanted: HierarchyArguments) -> Steps[None]:
        try:
            table = yield from self.fetch(wanted.name)
        except errors.NotFound:
            yield from self.create(wanted.table)
            table = yield from self.schema(wanted.name)
        yield from self.create_view(wanted.view(table))

    def create_aggregates(self, wanted: LevelsArguments) -> Steps[list[str]]:
        names = wanted.names
        yield Stream("CreateAggregates", new_aggregates(wanted), None, self._progress(wanted.progress))
        return names

    def tables(self) -> Steps[list[str]]:
        request = service_pb2.ListTablesRequest(min_snapshot=self.seen_ts, fresh=self.fresh)
        reply = yield from self.call("ListTables", request)
        return [table.name for table in reply.tables]

    def describe(self, name: str) -> Steps[dict[str, Any]]:
        reply = yield from self.call("Describe", self._described(table_name(name), lateness=True))
        schema = self.learn(reply.table)
        statistics = {key: number(value) for key, value in reply.statistics.items()}
        days = [LatenessDay(**{name: getattr(day, name) for name in LatenessDay._fields}) for day in reply.lateness]
        return schema.described(statistics, reply.retracted_in_backups, days)

    def split_points(self, table: str, rows: int = 500_000) -> Steps[list[tuple[Any, ...]]]:
        check_rows(rows)
        schema = yield from self.schema(table_name(table))
        reply = yield from self.call("SplitTable", service_pb2.SplitTableRequest(name=table, rows=rows))
        return schema.caller_bounds(tuple(from_values(point.values)) for point in reply.points)

    def tail_points(self, wanted: TailArguments) -> Steps[TailPoints]:
        request = service_pb2.TailPointsRequest(
            table=wanted.table,
            since=wanted.since,
            rows=wanted.rows,
            upto=wanted.upto,
            most=wanted.most,
            shards=wanted.shards or 0,
        )
        reply = yield from self.call("TailPoints", request)
        return TailPoints(
            tuple((point.commit_ts, point.rows) for point in reply.points),
            reply.last,
            reply.watermark,
            reply.kept_since,
            reply.table_id,
            reply.created_ts,
            reply.store,
        )

    def acknowledge(self, wanted: SubscribeArguments, ts: int, skip: int) -> Steps[None]:
        request = service_pb2.AcknowledgeSubscriptionRequest(
            user=wanted.user, name=wanted.name, table=wanted.table, ts=ts, skip=skip
        )
        yield from self.call("AcknowledgeSubscription", request)

    def subscriptions(self, user: str = "") -> Steps[list[dict[str, Any]]]:
        check_names(user, "-")
        reply = yield from self.call("ListSubscriptions", service_pb2.ListSubscriptionsRequest(user=user))
        return [
            listed(Stored(user, one.name, one.table, 0, "", 0, one.ts, one.skip, one.expires_us))
            for one in reply.subscriptions
        ]

    def unsubscribe(self, name: str, user: str = "") -> Steps[None]:
        check_names(user, name)
        yield from self.call("DropSubscription", service_pb2.DropSubscriptionRequest(user=user, name=name))

    def drop(self, name: str) -> Steps[None]:
        self.schemas.pop(table_name(name), None)
        yield from self.call("DropTable", service_pb2.DropTableRequest(name=name))

    def watermark(self) -> Steps[int]:
        request = service_pb2.WatermarkRequest(min_snapshot=self.seen_ts, fresh=self.fresh)
        reply = yield from self.call("Watermark", request)
        self.saw(reply.watermark)
        return int(reply.watermark)

    def consolidate(self) -> Steps[None]:
        yield Unary("Consolidate", service_pb2.ConsolidateRequest(), None)

    def stats(self) -> Steps[dict[str, int | float]]:
        reply = yield from self.call("Stats", service_pb2.StatsRequest())
        return {name: number(value) for name, value in reply.values.items()}

    def cluster_status(self) -> Steps[dict[str, Any]]:
        reply = yield from self.call("ClusterStatus", service_pb2.ClusterStatusRequest())
        return as_dict(reply)

    def move_shards(self, shards: str, to: str, *, source: str | None = None, copy: bool = False) -> Steps[str]:
        check_move(shards, to, source, copy)
        request = service_pb2.MoveShardsRequest(shards=shards, to=to, source=source or "", copy=copy)
        reply = yield Unary("MoveShards", request, None)
        return str(reply.move)

    def rebalance_shards(
        self,
        *,
        copies: int | None = None,
        away_from: Sequence[str] = (),
        keep: Sequence[str] | None = None,
        dry_run: bool = False,
    ) -> Steps[list[dict[str, str]]]:
        check_rebalance(copies, away_from, keep, dry_run)
        request = service_pb2.RebalanceShardsRequest(
            copies=copies or 0, away_from=away_from, keep=keep or (), keeps=keep is not None, dry_run=dry_run
        )
        reply = yield Unary("RebalanceShards", request, None)
        return [as_dict(move) for move in reply.moves]

    def cancel_move(self, move: str) -> Steps[None]:
        yield Unary("CancelMove", service_pb2.CancelMoveRequest(move=move_id(move)), None)

    def forget_node(self, node: str) -> Steps[None]:
        yield Unary("ForgetNode", service_pb2.ForgetNodeRequest(node=node_name(node)), None)

    def verify_cluster(self) -> Steps[int]:
        reply = yield Unary("VerifyCluster", service_pb2.VerifyClusterRequest(), None)
        return int(reply.ts)

    def checkpoint(self, path: Any) -> Steps[None]:
        yield Unary("Checkpoint", service_pb2.CheckpointRequest(path=directory(path)), None)

    def backup(self, repository: Any, *, keep: int | None = None) -> Steps[dict[str, Any]]:
        request = service_pb2.BackupRequest(repository=directory(repository), keep=check_keep(keep) or 0)
        reply = yield Unary("Backup", request, None)
        return {field.name: getattr(reply, field.name) for field in reply.DESCRIPTOR.fields}
