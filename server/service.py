"""The calls of kivi.v1.Kivi: decode, ask the store, encode. Nothing is decided here.

Handlers are registered by name instead of through generated stubs: a session's frames pass through gRPC as bytes, and
all but small ones are parsed by a worker thread, off the event loop. Store calls of unary methods run in a thread. A
deadline or a cancel ends a call's handler; what the store has begun it finishes.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from kivi_server.translate import pieces

from kivi.api.arguments import TailArguments
from kivi.arrow.dictionaries import compact, together
from kivi.arrow.ipc import encode_ipc
from kivi.errors import CommitUnknown, InvalidArgument, KiviError, SnapshotTooOld, Unavailable
from kivi.model.schema import TableSchema
from kivi.store.facade import Lease, Outcome
from kivi.wire import methods
from kivi.wire.codec import fill_values, to_table
from kivi.wire.v1 import service_pb2 as pb

__all__ = ["handlers"]

# What each call needs. Exchange asks of each request by itself.
_NEEDS: Final = {
    "Exchange": Access.READ,
    "Scan": Access.READ,
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
    "Append": Access.WRITE,
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
_STREAM_BYTES: Final = 1 << 20  # scan messages are about this large
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Service:
    def __init__(self, sessions: Sessions, tokens: Tokens, stats: Callable[[], dict[str, int | float]]) -> None:
        self.sessions = sessions
        self.store = sessions.store
        self.translator = sessions.translator
        self.tokens = tokens
        self._stats = stats
        self._scans = asyncio.Semaphore(limits.SCAN_STREAMS_MAX)

    async def reading(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.sessions.reads, fn, *args)

    async def streaming(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.sessions.streams, fn, *args)

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

    async def Scan(self, request: pb.ScanRequest, context: Context) -> None:
        """Written with ``context.write``, which knows for how long the client takes no byte.

        A scan holds a block in memory while it waits for its reader, so only so many may run at a time.
        """
        taken = False
        lease: Lease | None = None
        try:
            self.access("Scan", context, request.spec.table)
            try:
                taken = await asyncio.wait_for(self._scans.acquire(), limits.SCAN_WAIT_S_MAX)
            except TimeoutError:
                raise limits.exceeded(
                    "scan_streams_max", limits.SCAN_STREAMS_MAX, limits.SCAN_STREAMS_MAX + 1, "scans at a time"
                ) from None
            lease, schema, batches = await self.reading(self._scan, request, context.time_remaining())
            start_ts, sent = lease.ts, False
            ahead = asyncio.ensure_future(self.streaming(self._next, batches))
            try:
                while (data := await ahead) is not None:
                    ahead = asyncio.ensure_future(self.streaming(self._next, batches))
                    await _write(context, pb.ScanResponse(start_ts=0 if sent else start_ts, arrow=data))
                    sent = True
            finally:
                if not ahead.done():  # a batch is still being read: the snapshot must outlive that
                    with contextlib.suppress(Exception):
                        await asyncio.shield(ahead)
            if not sent:
                empty = bytes(encode_ipc(self.translator.empty(schema, request.spec)))
                await _write(context, pb.ScanResponse(start_ts=start_ts, arrow=empty))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await status.abort(context, error)
        finally:
            if taken:
                self._scans.release()
            if lease is not None and not (request.lease or request.session):
                self.store.release(lease)

    def _scan(self, request: pb.ScanRequest, timeout_s: float | None) -> tuple[Lease, TableSchema, Any]:
        if request.lease:
            lease = self.sessions.find_shared(request.lease)
        elif request.session:
            session = self.sessions.live.get(request.session)
            if session is None:
                raise SnapshotTooOld("the session of this snapshot has ended")
            lease = session.lease_of(request.txn)
        else:
            lease = self.store.begin(
                as_of_ts=request.as_of_ts if request.HasField("as_of_ts") else None,
                as_of_us=request.as_of_us if request.HasField("as_of_us") else None,
                min_snapshot=request.min_snapshot or None,
                timeout_s=timeout_s,
            )
        try:
            schema = self.translator.schema(request.spec.table, request.spec.table_id, lease)
            batches = self.store.scan(lease, schema, self.translator.scan(schema, request.spec))
            return lease, schema, pieces(batches, limits.PAGE_ROWS_MAX)
        except BaseException:
            if not (request.lease or request.session):
                self.store.release(lease)
            raise

    def _next(self, batches: Any) -> bytes | None:
        """About a megabyte of rows, encoded; None at the end."""
        gathered, size = [], 0
        while size < _STREAM_BYTES:
            batch = next(batches, None)
            if batch is None:
                break
            gathered.append(batch)
            size += batch.nbytes
        if not gathered:
            return None
        if len(gathered) > 1:
            gathered = pa.Table.from_batches(gathered).combine_chunks().to_batches()
        return bytes(encode_ipc(gathered[0])) if len(gathered) == 1 else _stream(gathered)

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

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        """No thread waits for the disk: fifty appends at once would be fifty that compete for the interpreter."""
        try:
            self.access("Append", context, request.table)
            if self.sessions.stopping:
                raise stopping()
            loop = asyncio.get_running_loop()
            settled: asyncio.Future[Outcome] = loop.create_future()

            def settle(outcome: Outcome) -> None:
                if not settled.done():  # nobody waits any more
                    settled.set_result(outcome)

            def done(outcome: Outcome) -> None:
                self.sessions.commit_ended()
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(settle, outcome)

            pool = self.sessions.full if self.store.is_full else self.sessions.writes
            await loop.run_in_executor(pool, self._append, request, done)
            try:
                outcome = await asyncio.wait_for(settled, self.store.settings.commit_timeout_s)
            except TimeoutError:
                raise CommitUnknown(token=request.token or None) from None
            if outcome.error is not None:
                raise outcome.error
            return pb.AppendResponse(commit_ts=outcome.commit_ts or 0)
        except Exception as error:
            await status.abort(context, error)

    def _append(self, request: pb.AppendRequest, done: Callable[[Outcome], None]) -> None:
        schema = self.translator.schema(request.table, request.table_id)
        batch = self.translator.batch(schema, request.arrow)
        token = (request.batch.scope, request.batch.sequence) if request.HasField("batch") else None
        txn = self.store.blind_transaction()
        txn.append(schema, batch, drop_late=request.drop_late)
        self.sessions.commit_started()
        try:
            self.store.commit(txn, token=request.token or None, batch=token, done=done)
        except BaseException:  # a fault of ours, before the log: ``done`` was not called and never will be
            self.sessions.commit_ended()
            raise

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


async def _write(context: Context, message: pb.ScanResponse | bytes) -> None:
    try:
        async with asyncio.timeout(limits.STALL_S_MAX):  # wait_for would make a task of each message
            await context.write(message)
    except TimeoutError:
        raise Unavailable(f"the client took no byte of this stream for {limits.STALL_S_MAX:.0f} s") from None


def _stream(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


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
