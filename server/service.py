"""The calls of kivi.v1.Kivi: decode, ask the store, encode. Nothing is decided here.

Handlers are registered by name instead of through generated stubs: a session's frames pass through gRPC as bytes, and
are parsed there. Store calls of unary methods run in a thread. A deadline or a cancel ends a call's handler; what the
store has begun it finishes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import pyarrow as pa
from kivi_server import alerting, limits, status, topics
from kivi_server.auth import FOR_TENANTS, Access, Grant, Tokens
from kivi_server.calls import WHOLE, Context
from kivi_server.clients import Client
from kivi_server.requests import stopping
from kivi_server.rules import RuleCalls
from kivi_server.session import Session
from kivi_server.sessions import Sessions
from kivi_server.subscriptions import Subscriptions

from kivi.api.arguments import TailArguments, directory
from kivi.arrow.dictionaries import compact, together
from kivi.errors import InvalidArgument, Unavailable
from kivi.model.levels import level_names
from kivi.model.schema import TableSchema
from kivi.store.checks import check_tenant
from kivi.wire import methods
from kivi.wire.codec import fill_values, to_table
from kivi.wire.v1 import alerts_pb2, topics_pb2
from kivi.wire.v1 import service_pb2 as pb

__all__ = ["handlers"]

# What each call needs. Exchange asks of each request by itself.
_NEEDS: Final = {
    "Exchange": Access.READ,
    "Subscribe": Access.READ,
    "AcknowledgeSubscription": Access.READ,
    "ListSubscriptions": Access.READ,
    "DropSubscription": Access.READ,
    "ListTables": Access.READ,
    "SplitTable": Access.READ,
    "TailPoints": Access.READ,
    "Describe": Access.READ,
    "Watermark": Access.READ,
    "Stats": Access.READ,
    "ClusterStatus": Access.READ,
    "MoveShards": Access.ADMIN,
    "CancelMove": Access.ADMIN,
    "RebalanceShards": Access.ADMIN,
    "ForgetNode": Access.ADMIN,
    "VerifyCluster": Access.ADMIN,
    "ListBatchScopes": Access.READ,
    **alerting.NEEDS,
    **topics.NEEDS,
    "Stage": Access.WRITE,
    "DiscardStages": Access.WRITE,
    "CreateTable": Access.ADMIN,
    "CreateAggregate": Access.ADMIN,
    "CreateAggregates": Access.ADMIN,
    "CreateView": Access.ADMIN,
    "CreateRule": Access.ADMIN,
    "ListRules": Access.READ,
    "DropRule": Access.ADMIN,
    "AlterTable": Access.ADMIN,
    "AlterAggregate": Access.ADMIN,
    "DropTable": Access.ADMIN,
    "Consolidate": Access.ADMIN,
    "Checkpoint": Access.ADMIN,
    "Backup": Access.ADMIN,
}
Progress = Callable[[int, int], None]
_MANY: Final = frozenset({"Exchange", "Subscribe"})  # streams of requests, which are counted one by one
_PROGRESS_S: Final = 0.1
"""How often a client that creates an aggregate hears how far that is."""


class Service(RuleCalls, alerting.AlertCalls, topics.TopicCalls):
    def __init__(self, sessions: Sessions, tokens: Tokens, stats: Callable[[], dict[str, int | float]]) -> None:
        self.sessions = sessions
        self.store = sessions.store
        self.translator = sessions.translator
        self.tokens = tokens
        self._stats = stats

    def access(self, method: str, context: Context, *tables: str) -> tuple[Grant, Client]:
        """Whoever calls may do that. Raises Unauthenticated, PermissionDenied, ResourceExhausted."""
        grant = self.tokens.grant(context.invocation_metadata() or ())
        client = self.sessions.clients.of(grant, context.peer())
        grant.require(_NEEDS[method], method, *tables)
        if method in WHOLE:
            grant.require_everything(method)
        if method not in FOR_TENANTS:
            grant.require_all_rows(method)
        if method not in _MANY:
            client.take(1)
        return grant, client

    # -- streams --------------------------------------------------------------------------------

    async def Session(self, _: object, context: Context) -> None:
        """What clients before 0.2 call, in frames of another form. They show their callers what this says."""
        older = "this client is older than 0.2, which this server needs: upgrade it (the package kivi)"
        await status.abort(context, InvalidArgument(older))

    async def Exchange(self, _: object, context: Context) -> None:
        grant, client = self.access("Exchange", context)
        if self.sessions.stopping:
            raise stopping()
        session = Session(self.sessions, grant, client, asyncio.get_running_loop())
        try:
            await session.serve(context)
        except asyncio.CancelledError:
            if session.dropped is None:
                raise
            raise session.dropped from None

    async def Subscribe(self, _: object, context: Context) -> None:
        grant, client = self.access("Subscribe", context)
        subscriptions = Subscriptions(self.sessions, self.tokens, grant, client)
        await subscriptions.serve(context.read, functools.partial(_write, context))

    async def CreateAggregate(self, request: pb.CreateAggregateRequest, context: Context) -> None:
        self.access("CreateAggregate", context, request.name, request.source)
        await self._with_progress(
            lambda progress: self.store.create_all([self.translator.new_aggregate(request)], progress=progress),
            context,
            pb.CreateAggregateResponse,
        )

    async def AlterAggregate(self, request: pb.AlterAggregateRequest, context: Context) -> None:
        self.access("AlterAggregate", context, request.name)

        def alter(progress: Progress) -> list[TableSchema]:
            measures, derived = self.translator.new_measures(request)
            later = request.only_later
            return [
                self.store.alter_aggregate(
                    request.name, measures, backfill=not later, derived=derived, progress=progress
                )
            ]

        await self._with_progress(alter, context, pb.AlterAggregateResponse)

    async def CreateAggregates(self, request: pb.CreateAggregatesRequest, context: Context) -> None:
        names = level_names(request.name, [level.columns for level in request.levels], request.slots)
        self.access("CreateAggregates", context, *names, request.source)
        await self._with_progress(
            lambda progress: self.store.create_all(self.translator.new_aggregates(request), progress=progress),
            context,
            pb.CreateAggregatesResponse,
        )

    async def CreateView(self, request: pb.CreateViewRequest, context: Context) -> None:
        self.access("CreateView", context, request.name, request.source)
        await self._with_progress(
            lambda progress: self.store.create_all([self.translator.new_view(request)], progress=progress),
            context,
            pb.CreateViewResponse,
        )

    async def _with_progress(
        self, work: Callable[[Progress], list[TableSchema]], context: Context, answer: Any
    ) -> None:
        """Tells the client how far ``work`` is, and then the definitions that it gave, in messages of the class
        ``answer``: each as far as these have a field for it."""
        rows = {"done_rows": 0, "total_rows": 0}

        def message(**more: Any) -> Any:
            known = answer.DESCRIPTOR.fields_by_name
            return answer(**{name: value for name, value in {**rows, **more}.items() if name in known})

        def progress(done: int, total: int) -> None:
            nonlocal rows
            rows = {"done_rows": done, "total_rows": total}

        working = asyncio.get_running_loop().run_in_executor(self.sessions.long, work, progress)
        while not (await asyncio.wait({working}, timeout=_PROGRESS_S))[0]:
            await context.write(message())
        tables = [to_table(schema) for schema in working.result()]
        await context.write(message(tables=tables, table=tables[0]))

    async def Stage(self, requests: AsyncIterator[pb.StageRequest], context: Context) -> pb.StageResponse:
        grant, client = self.access("Stage", context)
        writing = functools.partial(asyncio.get_running_loop().run_in_executor, self.sessions.writes)
        client.check_writes()
        first: pb.StageRequest | None = None
        schema: TableSchema | None = None
        batches: list[pa.RecordBatch] = []
        size = 0
        async for request in requests:
            if schema is None:
                grant.require(_NEEDS["Stage"], "Stage", request.table)
                first = request
                schema = self.translator.schema(request.table, request.table_id, tenant=grant.tenant)
            if request.arrow:
                batch = await writing(functools.partial(self.translator.batch, schema, request.arrow, rows=True))
                check_tenant(grant.tenant, schema, batch)
                batches.append(batch)
                compact(batches)
                size += batch.nbytes
                if size > limits.STAGE_BYTES_MAX:
                    raise limits.exceeded("stage_bytes_max", limits.STAGE_BYTES_MAX, size, "one stage")
        if schema is None or first is None or not batches:
            raise InvalidArgument("a stage needs a table, and events or rows")
        return pb.StageResponse(stage=await writing(self._stage, schema, batches, first.owner, client))

    def _stage(self, schema: TableSchema, batches: list[pa.RecordBatch], owner: str, client: Client) -> bytes:
        whose = f"{client.name}/"
        batch = together(batches)
        client.take_writes(0, batch.nbytes)  # its events count where they are committed
        if client.allowance.staged is not None:
            client.check_staged(self.store.staged_bytes(whose), batch.nbytes)
        return bytes(self.store.stage_wait(schema, batch, owner=whose + owner))

    # -- unary calls, which run in a thread ---------------------------------------------------------

    async def unary(self, method: str, request: Any, context: Context) -> Any:
        grant, _ = self.access(method, context, *_tables(request))
        pool = self.sessions.long if method in WHOLE else None  # these take as long as the disk does
        answer = await asyncio.get_running_loop().run_in_executor(pool, getattr(self, method), request, grant)
        return methods.messages(method)[1]() if answer is None else answer

    def AcknowledgeSubscription(self, request: pb.AcknowledgeSubscriptionRequest, _: Grant) -> None:
        durable = self.sessions.hub.durable
        durable.acknowledge(request.user, request.name, request.ts, request.skip, table=request.table)

    def ListSubscriptions(self, request: pb.ListSubscriptionsRequest, grant: Grant) -> pb.ListSubscriptionsResponse:
        found = self.sessions.hub.durable.listed(request.user)
        return pb.ListSubscriptionsResponse(
            subscriptions=[
                pb.StoredSubscription(
                    name=one.name, table=one.table, ts=one.ts, skip=one.skip, expires_us=one.expires_us
                )
                for one in found
                if grant.allows(one.table)
            ]
        )

    def DropSubscription(self, request: pb.DropSubscriptionRequest, grant: Grant) -> None:
        """Which table it is to, and so whether the caller may, is known once it is found."""
        durable = self.sessions.hub.durable
        table = None
        if grant.tables:
            table = {one.name: one.table for one in durable.listed(request.user)}.get(request.name)
            if table is not None:
                grant.require(_NEEDS["DropSubscription"], "DropSubscription", table)
        durable.drop(request.user, request.name, table=table)

    def DiscardStages(self, request: pb.DiscardStagesRequest, _: Grant) -> None:
        self.store.discard_stages(list(request.stages))

    def ListBatchScopes(self, request: pb.ListBatchScopesRequest, grant: Grant) -> pb.ListBatchScopesResponse:
        """A scope of Spark's is ``spark/<table>/...``; others name no table, and are for tokens of all of them."""
        scopes = self.store.batch_scopes(request.prefix)
        if grant.tables:
            named = [(scope, scope.split("/")) for scope in scopes]
            scopes = [scope for scope, (kind, *of) in named if kind == "spark" and of and grant.allows(of[0])]
        return pb.ListBatchScopesResponse(scopes=scopes)

    def CreateTable(self, request: pb.CreateTableRequest, grant: Grant) -> pb.CreateTableResponse:
        if request.table.HasField("cold"):  # this machine writes there, wherever it is, as a checkpoint does
            grant.require_everything("a cold tier")
        return pb.CreateTableResponse(table=to_table(self.store.create(self.translator.new_table(request.table))))

    def AlterTable(self, request: pb.AlterTableRequest, _: Grant) -> pb.AlterTableResponse:
        role = request.role if request.HasField("role") else None
        columns = None if role is not None and not request.columns else request.columns
        wanted = None if columns is None else self.translator.new_columns(request.name, columns)
        return pb.AlterTableResponse(table=to_table(self.store.alter_table(request.name, wanted, role)))

    def DropTable(self, request: pb.DropTableRequest, _: Grant) -> None:
        self.store.drop(request.name)

    def _reach(self, request: pb.ListTablesRequest | pb.DescribeRequest | pb.WatermarkRequest) -> None:
        """Waits until this node is as new as is asked for: a table may have been made at another one."""
        if request.fresh or request.min_snapshot:
            with self.store.snapshots.opened(min_snapshot=request.min_snapshot or None, fresh=request.fresh):
                pass

    def ListTables(self, request: pb.ListTablesRequest, grant: Grant) -> pb.ListTablesResponse:
        self._reach(request)
        tables = sorted(self.store.tables(), key=lambda schema: schema.name)
        return pb.ListTablesResponse(tables=[to_table(schema) for schema in tables if grant.sees(schema)])

    def Describe(self, request: pb.DescribeRequest, grant: Grant) -> pb.DescribeResponse:
        self._reach(request)
        schema = self.store.table(request.name, tenant=grant.tenant)
        if grant.tenant is not None:  # all else is about the rows of all
            return pb.DescribeResponse(table=to_table(schema))
        statistics = {name: float(value) for name, value in self.store.statistics(schema).items()}
        backups = self.store.retracted_in_backups(schema)
        return pb.DescribeResponse(
            table=to_table(schema),
            statistics=statistics,
            retracted_in_backups=backups,
            lateness=[
                pb.LatenessDay(**day._asdict()) for day in (self.store.lateness_of(schema) if request.lateness else ())
            ],
        )

    def SplitTable(self, request: pb.SplitTableRequest, _: Grant) -> pb.SplitTableResponse:
        schema = self.store.table(request.name)
        if not request.rows:
            raise InvalidArgument("rows is a number of rows from 1 on")
        reply = pb.SplitTableResponse()
        for point in self.store.split_points(schema, request.rows):
            fill_values(reply.points.add().values, point)
        return reply

    def TailPoints(self, request: pb.TailPointsRequest, _: Grant) -> pb.TailPointsResponse:
        self.store.snapshots.hear_of(max(request.since, request.upto))
        schema = self.store.table(request.table)
        wanted = TailArguments(
            request.table,
            request.since,
            request.rows,
            upto=request.upto if request.HasField("upto") else None,
            most=request.most,
            shards=request.shards or None,
        )
        found = self.store.tail_points(schema, wanted.since, wanted.rows, wanted.upto, wanted.most, wanted.shards)
        return pb.TailPointsResponse(
            points=[pb.TailPoint(commit_ts=commit_ts, rows=rows) for commit_ts, rows in found.points],
            last=found.last,
            watermark=found.watermark,
            kept_since=found.kept_since,
            table_id=found.table_id,
            created_ts=found.created_ts,
            store=found.store,
        )

    def Watermark(self, request: pb.WatermarkRequest, _: Grant) -> pb.WatermarkResponse:
        self._reach(request)
        return pb.WatermarkResponse(watermark=self.store.watermark())

    def Consolidate(self, request: pb.ConsolidateRequest, _: Grant) -> None:
        self.store.consolidate()

    def Stats(self, request: pb.StatsRequest, _: Grant) -> pb.StatsResponse:
        return pb.StatsResponse(values={name: float(value) for name, value in self._stats().items()})

    def ClusterStatus(self, request: pb.ClusterStatusRequest, _: Grant) -> pb.ClusterStatusResponse:
        return pb.ClusterStatusResponse(**self.store.cluster_status().described())

    def MoveShards(self, request: pb.MoveShardsRequest, _: Grant) -> pb.MoveShardsResponse:
        move = self.store.move_shards(request.shards, request.to, request.source or None, copy=request.copy)
        return pb.MoveShardsResponse(move=move)

    def RebalanceShards(self, request: pb.RebalanceShardsRequest, _: Grant) -> pb.RebalanceShardsResponse:
        keep = list(request.keep) if request.keeps else None
        moves = self.store.rebalance_shards(
            request.copies or None, list(request.away_from), keep, dry_run=request.dry_run
        )
        return pb.RebalanceShardsResponse(moves=[pb.PlannedMove(**move) for move in moves])

    def CancelMove(self, request: pb.CancelMoveRequest, _: Grant) -> None:
        self.store.cancel_move(request.move)

    def ForgetNode(self, request: pb.ForgetNodeRequest, _: Grant) -> None:
        self.store.forget_node(request.node)

    def VerifyCluster(self, request: pb.VerifyClusterRequest, _: Grant) -> pb.VerifyClusterResponse:
        return pb.VerifyClusterResponse(ts=self.store.verify_cluster())

    def Checkpoint(self, request: pb.CheckpointRequest, _: Grant) -> None:
        self.store.checkpoint(directory(request.path))

    def Backup(self, request: pb.BackupRequest, _: Grant) -> pb.BackupResponse:
        return pb.BackupResponse(**self.store.backup(directory(request.repository), request.keep or None))


async def _write(context: Context, message: bytes) -> None:
    try:
        async with asyncio.timeout(limits.STALL_S_MAX):  # wait_for would make a task of each message
            await context.write(message)
    except TimeoutError:
        raise Unavailable(f"the client took no byte of this stream for {limits.STALL_S_MAX:.0f} s") from None


def _tables(request: Any) -> list[str]:
    """The tables that a unary request names."""
    match request:
        case pb.CreateTableRequest():
            return [request.table.name]
        case pb.AlterTableRequest() | pb.DropTableRequest() | pb.DescribeRequest() | pb.SplitTableRequest():
            return [request.name]
        case alerts_pb2.CreateAlertRequest():
            return [request.on]
        case topics_pb2.StoreSubscriptionsRequest() | topics_pb2.ReachedRequest() | topics_pb2.SubscribersRequest():
            return [request.table]
        case pb.TailPointsRequest() | pb.AcknowledgeSubscriptionRequest():
            return [request.table]
    return []


def handlers(service: Service) -> grpc.GenericRpcHandler:
    """All methods of the service."""
    calls = service.sessions.calls
    table: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Exchange": grpc.stream_stream_rpc_method_handler(calls.counted("Session", service.Exchange)),
        "Session": grpc.stream_stream_rpc_method_handler(service.Session),
        "Stage": grpc.stream_unary_rpc_method_handler(
            calls.counted("Stage", service.Stage),
            request_deserializer=pb.StageRequest.FromString,
            response_serializer=pb.StageResponse.SerializeToString,
        ),
        "Subscribe": grpc.stream_stream_rpc_method_handler(
            calls.counted("Subscribe", service.Subscribe), request_deserializer=pb.SubscribeRequest.FromString
        ),
    }
    for name, method in methods.METHODS.items():
        if method.client_streaming:  # they are above
            continue
        received, returned = methods.messages(name)
        if method.server_streaming:
            kind, work = grpc.unary_stream_rpc_method_handler, getattr(service, name)
        else:
            kind, work = grpc.unary_unary_rpc_method_handler, functools.partial(service.unary, name)
        table[name] = kind(
            calls.counted(name, work, received=received.FromString),
            response_serializer=returned.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(methods.SERVICE, table)
