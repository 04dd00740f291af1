"""The calls of kivi.v1.Kivi: decode, ask the store, encode. Nothing is decided here.

Handlers are registered by name instead of through generated stubs: a session's frames pass through gRPC as bytes, and
are parsed there. Store calls of unary methods run in a thread. A deadline or a cancel ends a call's handler; what the
store has begun it finishes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeAlias

import grpc
import pyarrow as pa
from kivi_server import limits, status
from kivi_server.auth import Access, Grant, Tokens
from kivi_server.clients import Client
from kivi_server.requests import stopping
from kivi_server.session import Session
from kivi_server.sessions import Sessions
from kivi_server.subscriptions import Subscriptions

from kivi.api.arguments import TailArguments
from kivi.arrow.dictionaries import compact, together
from kivi.errors import InvalidArgument, KiviError, Unavailable
from kivi.model.schema import TableSchema
from kivi.wire import methods
from kivi.wire.codec import fill_values, to_table
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
    "ListBatchScopes": Access.READ,
    "Stage": Access.WRITE,
    "DiscardStages": Access.WRITE,
    "CreateTable": Access.ADMIN,
    "CreateAggregate": Access.ADMIN,
    "DropTable": Access.ADMIN,
    "Consolidate": Access.ADMIN,
    "Checkpoint": Access.ADMIN,
    "Backup": Access.ADMIN,
}
_MANY: Final = frozenset({"Exchange", "Subscribe"})  # streams of requests, which are counted one by one
_WHOLE: Final = frozenset({"Consolidate", "Checkpoint", "Backup"})  # not for tokens of some tables
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Service:
    def __init__(self, sessions: Sessions, tokens: Tokens, stats: Callable[[], dict[str, int | float]]) -> None:
        self.sessions = sessions
        self.store = sessions.store
        self.translator = sessions.translator
        self.tokens = tokens
        self._stats = stats

    async def reading(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.sessions.reads, fn, *args)

    async def writing(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.sessions.writes, fn, *args)

    def access(self, method: str, context: Context, *tables: str) -> tuple[Grant, Client]:
        """Whoever calls may do that. Raises Unauthenticated, PermissionDenied, ResourceExhausted."""
        grant = self.tokens.grant(context.invocation_metadata() or ())
        client = self.sessions.clients.of(grant, context.peer())
        grant.require(_NEEDS[method], method, *tables)
        if method in _WHOLE:
            grant.require_everything(method)
        if method not in _MANY:
            client.take(1)
        return grant, client

    # -- streams --------------------------------------------------------------------------------

    async def Session(self, _: object, context: Context) -> None:
        """What clients before 0.2 call, in frames of another form. They show their callers what this says."""
        older = "this client is older than 0.2, which this server needs: upgrade it (the package kivi)"
        await status.abort(context, InvalidArgument(older))

    async def Exchange(self, _: object, context: Context) -> None:
        try:
            grant, client = self.access("Exchange", context)
            if self.sessions.stopping:
                raise stopping()
        except KiviError as error:
            await status.abort(context, error)
        session = Session(self.sessions, grant, client, asyncio.get_running_loop())
        try:
            await session.serve(context)
        except asyncio.CancelledError:
            if session.dropped is None:
                raise
            await status.abort(context, session.dropped)

    async def Subscribe(self, _: object, context: Context) -> None:
        try:
            grant, client = self.access("Subscribe", context)
            subscriptions = Subscriptions(self.sessions, self.tokens, grant, client)
            await subscriptions.serve(context.read, functools.partial(_write, context))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await status.abort(context, error)

    async def CreateAggregate(
        self, request: pb.CreateAggregateRequest, context: Context
    ) -> AsyncIterator[pb.CreateAggregateResponse]:
        try:
            self.access("CreateAggregate", context, request.name, request.source)
            loop = asyncio.get_running_loop()
            news: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

            def progress(done: int, total: int) -> None:
                loop.call_soon_threadsafe(news.put_nowait, (done, total))

            def create() -> TableSchema:
                return self.store.create(self.translator.new_aggregate(request), progress=progress)

            creating = asyncio.ensure_future(asyncio.to_thread(create))
            done = total = 0
            while not creating.done():
                waiting = asyncio.ensure_future(news.get())
                await asyncio.wait({creating, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    done, total = waiting.result()
                    while not news.empty():
                        done, total = news.get_nowait()
                    yield pb.CreateAggregateResponse(done_rows=done, total_rows=total)
                else:
                    waiting.cancel()
            schema = await creating
            while not news.empty():
                done, total = news.get_nowait()
            yield pb.CreateAggregateResponse(done_rows=done, total_rows=total, table=to_table(schema))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await status.abort(context, error)

    async def Stage(self, requests: AsyncIterator[pb.StageRequest], context: Context) -> pb.StageResponse:
        try:
            grant, client = self.access("Stage", context)
            first: pb.StageRequest | None = None
            schema: TableSchema | None = None
            batches: list[pa.RecordBatch] = []
            size = 0
            async for request in requests:
                if schema is None:
                    grant.require(_NEEDS["Stage"], "Stage", request.table)
                    first, schema = request, self.translator.schema(request.table, request.table_id)
                if request.arrow:
                    batch = await self.writing(
                        functools.partial(self.translator.batch, schema, request.arrow, rows=True)
                    )
                    batches.append(batch)
                    compact(batches)
                    size += batch.nbytes
                    if size > limits.STAGE_BYTES_MAX:
                        raise limits.exceeded("stage_bytes_max", limits.STAGE_BYTES_MAX, size, "one stage")
            if schema is None or first is None or not batches:
                raise InvalidArgument("a stage needs a table, and events or rows")
            return pb.StageResponse(stage=await self.writing(self._stage, schema, batches, first.owner, client))
        except Exception as error:
            await status.abort(context, error)

    def _stage(self, schema: TableSchema, batches: list[pa.RecordBatch], owner: str, client: Client) -> bytes:
        whose = f"{client.name}/"
        batch = together(batches)
        if client.allowance.staged is not None:
            client.check_staged(self.store.staged_bytes(whose), batch.nbytes)
        return bytes(self.store.stage_wait(schema, batch, owner=whose + owner))

    # -- unary calls ------------------------------------------------------------------------------

    def acknowledge_subscription(
        self, request: pb.AcknowledgeSubscriptionRequest
    ) -> pb.AcknowledgeSubscriptionResponse:
        durable = self.sessions.hub.durable
        durable.acknowledge(request.user, request.name, request.ts, request.skip, table=request.table)
        return pb.AcknowledgeSubscriptionResponse()

    def list_subscriptions(self, request: pb.ListSubscriptionsRequest) -> pb.ListSubscriptionsResponse:
        found = self.sessions.hub.durable.listed(request.user)
        return pb.ListSubscriptionsResponse(
            subscriptions=[
                pb.StoredSubscription(
                    name=one.name, table=one.table, ts=one.ts, skip=one.skip, expires_us=one.expires_us
                )
                for one in found
            ]
        )

    async def DropSubscription(
        self, request: pb.DropSubscriptionRequest, context: Context
    ) -> pb.DropSubscriptionResponse:
        """Which table it is to, and so whether the caller may, is known once it is found."""
        try:
            grant, _ = self.access("DropSubscription", context)
            durable = self.sessions.hub.durable
            table = None
            if grant.tables:
                for one in await self.reading(durable.listed, request.user):
                    if one.name == request.name:
                        table = one.table
                        grant.require(_NEEDS["DropSubscription"], "DropSubscription", table)
            await self.reading(functools.partial(durable.drop, request.user, request.name, table=table))
            return pb.DropSubscriptionResponse()
        except Exception as error:
            await status.abort(context, error)

    def discard_stages(self, request: pb.DiscardStagesRequest) -> pb.DiscardStagesResponse:
        self.store.discard_stages(list(request.stages))
        return pb.DiscardStagesResponse()

    def list_batch_scopes(self, request: pb.ListBatchScopesRequest) -> pb.ListBatchScopesResponse:
        return pb.ListBatchScopesResponse(scopes=self.store.batch_scopes(request.prefix))

    def create_table(self, request: pb.CreateTableRequest) -> pb.CreateTableResponse:
        return pb.CreateTableResponse(table=to_table(self.store.create(self.translator.new_table(request.table))))

    def drop_table(self, request: pb.DropTableRequest) -> pb.DropTableResponse:
        self.store.drop(request.name)
        return pb.DropTableResponse()

    def list_tables(self, _: pb.ListTablesRequest) -> pb.ListTablesResponse:
        tables = sorted(self.store.tables(), key=lambda schema: schema.name)
        return pb.ListTablesResponse(tables=[to_table(schema) for schema in tables])

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        schema = self.store.table(request.name)
        statistics = {name: float(value) for name, value in self.store.statistics(schema).items()}
        return pb.DescribeResponse(table=to_table(schema), statistics=statistics)

    def split_table(self, request: pb.SplitTableRequest) -> pb.SplitTableResponse:
        schema = self.store.table(request.name)
        if not request.rows:
            raise InvalidArgument("rows is a number of rows from 1 on")
        reply = pb.SplitTableResponse()
        for point in self.store.split_points(schema, request.rows):
            fill_values(reply.points.add().values, point)
        return reply

    def tail_points(self, request: pb.TailPointsRequest) -> pb.TailPointsResponse:
        schema = self.store.table(request.table)
        wanted = TailArguments(
            request.table,
            request.since,
            request.rows,
            upto=request.upto if request.HasField("upto") else None,
            most=request.most,
        )
        found = self.store.tail_points(schema, wanted.since, wanted.rows, wanted.upto, wanted.most)
        return pb.TailPointsResponse(
            points=[pb.TailPoint(commit_ts=commit_ts, rows=rows) for commit_ts, rows in found.points],
            last=found.last,
            watermark=found.watermark,
            kept_since=found.kept_since,
            table_id=found.table_id,
            created_ts=found.created_ts,
            store=found.store,
        )

    def watermark(self, _: pb.WatermarkRequest) -> pb.WatermarkResponse:
        return pb.WatermarkResponse(watermark=self.store.watermark())

    def consolidate(self, _: pb.ConsolidateRequest) -> pb.ConsolidateResponse:
        self.store.consolidate()
        return pb.ConsolidateResponse()

    def stats(self, _: pb.StatsRequest) -> pb.StatsResponse:
        return pb.StatsResponse(values={name: float(value) for name, value in self._stats().items()})

    def checkpoint(self, request: pb.CheckpointRequest) -> pb.CheckpointResponse:
        if not request.path:
            raise InvalidArgument("a checkpoint needs the path of a directory that does not exist yet")
        self.store.checkpoint(request.path)
        return pb.CheckpointResponse()

    def backup(self, request: pb.BackupRequest) -> pb.BackupResponse:
        if not request.repository:
            raise InvalidArgument("a backup needs the path of a directory for backups")
        return pb.BackupResponse(**self.store.backup(request.repository, request.keep or None))


async def _write(context: Context, message: bytes) -> None:
    try:
        async with asyncio.timeout(limits.STALL_S_MAX):  # wait_for would make a task of each message
            await context.write(message)
    except TimeoutError:
        raise Unavailable(f"the client took no byte of this stream for {limits.STALL_S_MAX:.0f} s") from None


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _tables(request: Any) -> list[str]:
    """The tables that a unary request names."""
    match request:
        case pb.CreateTableRequest():
            return [request.table.name]
        case pb.DropTableRequest() | pb.DescribeRequest() | pb.SplitTableRequest():
            return [request.name]
        case pb.TailPointsRequest() | pb.AcknowledgeSubscriptionRequest():
            return [request.table]
    return []


def _for(grant: Grant, reply: Any) -> Any:
    """What of a list a token for some tables may see. A scope of Spark's is ``spark/<table>/...``, others name none."""
    match reply:
        case pb.ListTablesResponse():
            return pb.ListTablesResponse(tables=[table for table in reply.tables if grant.allows(table.name)])
        case pb.ListBatchScopesResponse():
            named = [(scope, scope.split("/")) for scope in reply.scopes]
            return pb.ListBatchScopesResponse(
                scopes=[scope for scope, (kind, *of) in named if kind == "spark" and of and grant.allows(of[0])]
            )
        case pb.ListSubscriptionsResponse():
            return pb.ListSubscriptionsResponse(
                subscriptions=[one for one in reply.subscriptions if grant.allows(one.table)]
            )
    return reply


def _unary(service: Service, method: str) -> Callable[[Any, Context], Coroutine[Any, Any, Any]]:
    work = getattr(service, _snake(method))

    @functools.wraps(work)
    async def call(request: Any, context: Context) -> Any:
        try:
            grant, _ = service.access(method, context, *_tables(request))
            reply = await asyncio.to_thread(work, request)
            return _for(grant, reply) if grant.tables else reply
        except Exception as error:
            await status.abort(context, error)

    return call


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
        work = getattr(service, name, None) or _unary(service, name)
        counted = calls.counted_stream if inspect.isasyncgenfunction(work) else calls.counted
        kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        received, returned = methods.messages(name)
        table[name] = kind(
            counted(name, work),
            request_deserializer=received.FromString,
            response_serializer=returned.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(methods.SERVICE, table)
