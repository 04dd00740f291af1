"""The one stream of a client's subscriptions: room, numbers, and that nobody waits for anybody else."""

from __future__ import annotations

import asyncio
import queue
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kivi_server import live_queries
from kivi_server.auth import Tokens
from kivi_server.sessions import Sessions
from kivi_server.subscriptions import Subscriptions

import kivi
import kivi.aio
from kivi.errors import OutOfRange
from kivi.live.lives import Live
from kivi.model.declarations import row_table_schema
from kivi.model.subscriptions import Change, Shown, Update
from kivi.wire import methods
from kivi.wire.columns import column_writer, rows_of, rows_reader
from kivi.wire.v1 import service_pb2 as pb
from kivi.wire.v1 import topics_pb2, types_pb2
from tests.live.test_states import Judge, change, create, until_quiet
from tests.serverproc import ServerProcess
from tests.waiting import until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("stream") / "store") as server:
        with server.connect() as db:
            create(db)
        yield server


class BegunTogether(Subscriptions):
    """Those that begin have all begun in one turn of the event loop; then something else may come in that turn."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.opened = 0
        self.gate = asyncio.Event()

    async def _opened(self, wanted: pb.BeginSubscription) -> Any:
        live = await super()._opened(wanted)
        self.opened += 1
        await self.gate.wait()
        return live


@pytest.mark.parametrize("first", range(1, 7))
def test_what_begins_just_as_all_others_have_begun_begins_too(tmp_path: Path, first: int) -> None:
    """There are a few tasks that begin subscriptions, as long as one waits for that: they may all be about to end."""

    async def accepted(sessions: Sessions) -> set[int]:
        tokens, found, done = Tokens(), set[int](), asyncio.Event()
        grant = tokens.grant(())
        stream = BegunTogether(sessions, tokens, grant, sessions.clients.of(grant, "test"))

        def begins(*numbers: int) -> pb.SubscribeRequest:
            spec = types_pb2.ScanSpec(table="rows")
            return pb.SubscribeRequest(begin=[pb.BeginSubscription(number=n, room=1, spec=spec) for n in numbers])

        async def said() -> AsyncIterator[Any]:
            yield begins(*range(1, first + 1))
            await until(lambda: stream.opened >= min(first, 4), pause_s=0)
            stream.gate.set()
            await asyncio.sleep(0)  # in the turn in which they end, and after them
            yield begins(first + 1)
            await done.wait()
            yield grpc.aio.EOF

        async def write(data: bytes) -> None:
            found.update(update.number for update in pb.SubscribeResponse.FromString(data).updates if update.accepted)
            if len(found) > first:
                done.set()

        requests = said()
        async with asyncio.timeout(60):
            await stream.serve(requests.__anext__, write)
        return found

    with kivi.open(tmp_path / "store") as db:
        create(db)
        sessions = Sessions(db.store, "test")
        try:
            assert asyncio.run(accepted(sessions)) == set(range(1, first + 2))
        finally:
            sessions.close()


@contextmanager
def subscribed(path: Path) -> Iterator[Live]:
    """A subscription to the rows of a table, which nobody is told of."""
    with kivi.open(path) as db:
        create(db)
        sessions = Sessions(db.store, "test")
        try:
            wanted = pb.BeginSubscription(number=1, spec=types_pb2.ScanSpec(table="rows"))
            yield live_queries.subscribe(sessions.hub, sessions.translator, wanted, Tokens().grant(()))
        finally:
            sessions.close()


def of_many_rows(live: Live, last: int = 1) -> Update:
    """An update of several messages to it; ``last``: what the last row has."""
    rows = [{"part": 0, "name": f"{i}", "n": i, "text": "", "level": 1.0} for i in range(9_000)]
    rows[-1]["n"] = last
    shown = Shown(live.schema, live.query.columns)
    return Update(7, [Change("add", None, i, row) for i, row in enumerate(rows)], reset=True, shown=shown)


def test_of_an_update_that_fails_in_its_midst_nobody_takes_a_part_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it fails with: also whoever comes after the one that it failed for."""
    made = 0

    def failing(columns: Any, values: list[list[Any]]) -> None:
        nonlocal made
        made += 1
        if made == 2:
            raise MemoryError

    monkeypatch.setattr(live_queries, "column_writer", lambda schema, names: failing)
    with subscribed(tmp_path / "store") as live:
        update = of_many_rows(live)
        for number in (1, 2):
            encoding = live_queries.encoded(number, live, update)
            assert pb.SubscribeResponse.FromString(next(encoding)).updates[0].more
            with pytest.raises(MemoryError):
                next(encoding)


@pytest.mark.parametrize("outgrown", [False, True])
def test_an_update_of_many_rows_is_encoded_as_it_leaves_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outgrown: bool
) -> None:
    """So others have their turn before the next part of it is made; whoever gets the same update makes none again."""
    made: list[int] = []

    def counting(schema: Any, names: Any) -> Any:
        write = column_writer(schema, names)

        def counted(columns: Any, values: list[list[Any]]) -> None:
            made.append(len(values[0]))
            write(columns, values)

        return counted

    monkeypatch.setattr(live_queries, "column_writer", counting)
    with subscribed(tmp_path / "store") as live:
        update = of_many_rows(live, 2**63 if outgrown else 1)
        one, other = (live_queries.encoded(number, live, update) for number in (1, 2))
        parts = [next(one)]
        assert made == [2_000]
        others: list[bytes] = []
        for found, rest in ((others, other), (parts, one)):
            with pytest.raises(OutOfRange, match="n") if outgrown else nullcontext():
                found.extend(rest)
        assert sum(made) == 9_000 and len(parts) == len(made) - outgrown
        told = [pb.SubscribeResponse.FromString(part).updates[0] for part in parts]
        assert {each.number for each in told} == {1} and [each.more for each in told] == [True] * 4 + [False] * (
            not outgrown
        )
        assert [each.reset for each in told] == [True] + [False] * (len(told) - 1)
        for each in told:
            each.number = 2
        assert told == [pb.SubscribeResponse.FromString(part).updates[0] for part in others]


class Raw:
    """The stream as it is on the wire."""

    def __init__(self, server: ServerProcess) -> None:
        self._out: queue.SimpleQueue[pb.SubscribeRequest | None] = queue.SimpleQueue()
        self.channel = grpc.insecure_channel(server.endpoint)
        call: Any = self.channel.stream_stream(
            methods.path("Subscribe"),
            request_serializer=pb.SubscribeRequest.SerializeToString,
            response_deserializer=pb.SubscribeResponse.FromString,
        )
        self.call = call(iter(self._out.get, None), timeout=60.0)

    def begin(self, number: int, room: int, table: str = "rows", **more: Any) -> None:
        asked: dict[str, Any] = {"spec": types_pb2.ScanSpec(table=table), "heartbeat_ms": 20} | more
        wanted = pb.BeginSubscription(number=number, room=room, **asked)
        self._out.put(pb.SubscribeRequest(begin=[wanted]))

    def say(self, **what: Any) -> None:
        self._out.put(pb.SubscribeRequest(**what))

    def updates(self) -> Iterator[pb.SubscriptionUpdate]:
        for message in self.call:
            yield from message.updates

    def close(self) -> None:
        self._out.put(None)
        self.channel.close()


@pytest.fixture
def raw(server: ServerProcess) -> Iterator[Raw]:
    raw = Raw(server)
    yield raw
    raw.close()


def test_no_more_is_sent_than_there_is_room_for(server: ServerProcess, raw: Raw) -> None:
    """One has no room at all, one for two, one for many: heartbeats would come fifty times a second."""
    for number, room in ((1, 0), (2, 2), (3, 1_000)):
        raw.begin(number, room)
    seen = {1: 0, 2: 0, 3: 0}
    accepted = set()
    updates = raw.updates()

    def room_was_for(first: int, second: int) -> bool:
        """So many come, whenever the server hears of that room, and no more while the third one gets another twenty."""
        last = 0
        while not last or seen[3] < last:
            update = next(updates)
            if update.accepted:
                accepted.add(update.number)
            else:
                seen[update.number] += 1
            if not last and seen[1] >= first and seen[2] >= second:
                last = seen[3] + 20
        return (seen[1], seen[2]) == (first, second)

    assert room_was_for(0, 2)
    assert accepted == {1, 2, 3}
    raw.say(taken=[1, 1, 2, 99])  # 99 is nobody's
    assert room_was_for(2, 3)
    raw.say(end=[3, 99], taken=[3])
    time.sleep(0.2)
    raw.say(taken=[1])
    for update in updates:  # those of 3 that were on their way, and then none
        if update.number == 1:
            break
    raw.say(taken=[1])
    assert next(updates).number == 1


@pytest.mark.parametrize("ttl_us", [2**63 - 1, 2**62 + 1, 0, -1])
def test_a_durable_subscription_lasts_no_longer_than_there_is_time(
    server: ServerProcess, raw: Raw, ttl_us: int
) -> None:
    """When it expires is a number of 64 bits, without which its row could neither be read nor consolidated."""
    with server.connect() as db:
        db.create_event_table("lasting", event_time="ts", columns={"ts": "timestamp"})
        wanted = pb.DurableSubscription(name="one", ttl_us=ttl_us)
        raw.begin(1, 1, "lasting", durable=wanted)
        update = next(raw.updates())
        assert update.error.reason == "InvalidArgument" and "ttl_us" in update.error.message
        stored = topics_pb2.StoreSubscriptionsRequest(table="lasting", users=[""], names=["one"], at=[0], ttl_us=ttl_us)
        stored.wheres.add()
        call: Any = raw.channel.unary_unary(
            methods.path("StoreSubscriptions"),
            request_serializer=topics_pb2.StoreSubscriptionsRequest.SerializeToString,
            response_deserializer=topics_pb2.StoreSubscriptionsResponse.FromString,
        )
        with pytest.raises(grpc.RpcError, match="ttl_us"):
            call(stored, timeout=60.0)
        assert db.subscriptions() == []
        db.consolidate()
        db.drop("lasting")


def test_the_definition_comes_once_before_what_is_of_it_and_only_to_who_knows_another(
    server: ServerProcess, raw: Raw
) -> None:
    with server.connect() as db:
        db.create_table("altered", key={"id": "int64"}, columns={"n": "int64"})
        raw.begin(1, 1_000, "altered", all_columns_of=2)
        raw.begin(2, 1_000, "altered", spec=types_pb2.ScanSpec(table="altered", known_columns=2))
        said: dict[int, list[tuple[list[str], int]]] = {1: [], 2: []}
        updates = raw.updates()

        def follow(ts: int) -> None:
            seen = dict.fromkeys(said, 0)
            while min(seen.values()) < ts:
                update = next(updates)
                assert not update.HasField("error")
                if not update.accepted:
                    seen[update.number] = max(seen[update.number], update.ts)
                if update.HasField("altered"):
                    assert update.more and not update.kinds
                    said[update.number].append(([column.name for column in update.altered.columns], 0))
                elif update.kinds:
                    said[update.number].append(([], len(update.columns)))

        def put(**values: int) -> None:
            with db.transaction() as tx:
                tx.put("altered", (1,), **values)
            assert tx.commit_ts is not None
            follow(tx.commit_ts)

        put(n=1)
        db.alter_table("altered", add_columns={"price": "int64"})
        put(n=2, price=3)
        put(n=4)
    told, kept = said[1], said[2]
    assert [names for names, _ in told if names] == [["n", "price"]]
    at = told.index((["n", "price"], 0))
    assert {count for _, count in told[:at]} == {2} and {count for _, count in told[at + 1 :]} == {3}
    assert len(told) - at > 2
    assert {(*names, count) for names, count in kept} == {(2,)}
    raw.begin(3, 1, "altered", all_columns_of=4)
    assert "ask again" in next(update.error.message for update in updates if update.number == 3)


def test_a_number_that_is_there_already_ends_the_stream(raw: Raw) -> None:
    raw.begin(7, 1)
    assert next(raw.updates()).accepted
    raw.begin(7, 1)
    with pytest.raises(grpc.RpcError) as error:
        list(raw.updates())
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "choose another number" in str(error.value.details())


def test_what_is_wrong_with_one_is_told_to_that_one(server: ServerProcess, raw: Raw) -> None:
    raw.begin(1, 1_000)
    raw.begin(2, 1, table="nowhere")
    raw.begin(3, 1, order_by=["nothing"])
    raw.begin(4, 1, until_us=1)
    errors, others = {}, 0
    for update in raw.updates():
        if update.HasField("error"):
            errors[update.number] = update.error.reason
        others += update.number == 1
        if len(errors) == 3 and others > 10:
            break
    assert errors == {2: "NotFound", 3: "SchemaError", 4: "InvalidArgument"}
    raw.begin(2, 1)  # its number is free again
    assert any(update.number == 2 and update.accepted for update in raw.updates())


def test_nobody_waits_for_one_who_takes_nothing(server: ServerProcess) -> None:
    """Of one client: the others have every state, and the one who was away has the newest."""
    rng = random.Random(5)
    with server.connect() as db:
        judge = Judge(db, "rows", lambda row: True)
        with (
            db.subscribe("rows", interval_ms=0, heartbeat_ms=20) as away,
            db.subscribe("rows", interval_ms=0, heartbeat_ms=20) as there,
        ):
            for _ in range(60):
                change(db, rng)
                until_quiet(there, db.watermark(), judge)
            seen = until_quiet(away, db.watermark(), judge)
            assert seen < 20


def test_subscriptions_come_and_go_while_others_stay(server: ServerProcess) -> None:
    async def run() -> None:
        rng = random.Random(6)
        async with await kivi.aio.connect(server.endpoint) as client:
            with server.connect() as db:
                judge = Judge(db, "rows", lambda row: True)
                async with client.subscribe("rows", interval_ms=0, heartbeat_ms=20) as stays:
                    for _ in range(40):
                        others = [client.subscribe("rows", limit=3, interval_ms=0) for _ in range(rng.randrange(1, 6))]
                        opened = [asyncio.create_task(other.__aenter__()) for other in others]
                        await asyncio.sleep(rng.random() / 200)
                        for other in others[::2]:  # some before they have begun
                            await other.close()
                        await asyncio.to_thread(change, db, rng)
                        await asyncio.gather(*opened)
                        for other in others:
                            await other.close()
                    upto = db.watermark()
                    while stays.ts < upto:
                        await stays.next(0.05)
                    assert stays.rows == await asyncio.to_thread(judge, stays.ts)
                await until(lambda: not db.stats()["subscriptions"], pause_s=0.05)

    asyncio.run(run())


def test_closing_while_the_server_is_away(tmp_path: Path) -> None:
    async def run(server: ServerProcess) -> None:
        async with await kivi.aio.connect(server.endpoint, timeout=60.0) as client:
            live = client.subscribe("rows", interval_ms=0, heartbeat_ms=20)
            assert await live.next(60.0) is not None
            server.kill()
            assert await live.next(0.2) is None
            waiting = asyncio.create_task(live.next())
            await asyncio.sleep(0.3)
            await live.close()
            assert await asyncio.wait_for(waiting, 60.0) is None

    with ServerProcess(tmp_path / "store") as server:
        with server.connect() as db:
            create(db)
        asyncio.run(run(server))


# -- rows by columns --------------------------------------------------------------------------------------------

SCHEMA = row_table_schema(
    "t",
    key={"k": "int64"},
    columns={
        "i": kivi.sum("int64"),
        "d": kivi.sum("decimal(18,2)"),
        "f": kivi.sum("float64"),
        "b": "bool",
        "s": "string",
        "y": "bytes",
        "t": "timestamp",
    },
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.integers(-(2**63), 2**63 - 1),
            "i": st.none() | st.integers(-(2**63), 2**63 - 1),
            "d": st.none() | st.integers(-(10**18) + 1, 10**18 - 1),
            "f": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "b": st.none() | st.booleans(),
            "s": st.none() | st.text(max_size=3),
            "y": st.none() | st.binary(max_size=3),
            "t": st.none() | st.integers(-(10**15), 10**15),
        }
    ),
    max_size=6,
)


@given(rows=ROWS)
def test_rows_by_columns_are_the_rows(rows: list[dict[str, Any]]) -> None:
    names = SCHEMA.output_columns(None)
    update = pb.SubscriptionUpdate()
    if rows:
        column_writer(SCHEMA, names)(update.columns, [[row[name] for row in rows] for name in names])
    sent = pb.SubscriptionUpdate.FromString(update.SerializeToString())
    found = rows_reader(SCHEMA, names)(rows_of(sent.columns))
    assert found == [SCHEMA.row_from_stored(row) for row in rows]


@pytest.mark.parametrize(("name", "value"), [("i", 2**63), ("i", -(2**63) - 1), ("d", 10**18), ("f", float("inf"))])
def test_a_sum_that_has_outgrown_its_column(name: str, value: Any) -> None:
    with pytest.raises(OutOfRange, match=name):
        column_writer(SCHEMA, (name,))(pb.SubscriptionUpdate().columns, [[None, value]])
