"""Writes as the bytes of their messages: the same whether or not they are remembered, and the same errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kivi_server.asked import parsed

import kivi
from kivi.api.arguments import TransactionArguments
from kivi.api.writes import Write
from kivi.client.calls import _GATHERED_MAX, Commits, encoded
from kivi.client.core import Core
from kivi.client.steps import Ask, CommitPlain, ConnectionLost
from kivi.client.transaction import TransactionCore
from kivi.client.writes import KINDS, encoded_delta, encoded_write
from kivi.model.declarations import row_table_schema
from kivi.model.schema import TableSchema
from kivi.model.types import MOMENT_MAX_US, MOMENT_MIN_US
from kivi.wire.codec import fill_values, from_values
from kivi.wire.frames import joined
from kivi.wire.v1 import session_pb2

INT64 = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**63 - 1))
COUNTERS = row_table_schema(
    "counters",
    key={"id": "int64", "slot": "timestamp"},
    columns={"hits": kivi.sum("int64"), "slowest": kivi.max("int64"), "load": kivi.sum("float64"), "v": "int64"},
)
MOMENTS = st.one_of(st.integers(-3, 300), st.integers(MOMENT_MIN_US, MOMENT_MAX_US))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "hits": INT64,
    "slowest": st.one_of(INT64, st.none()),
    "load": st.floats(allow_nan=False, allow_infinity=False),
    "name": st.one_of(st.text(max_size=300), st.none()),
    "raw": st.binary(max_size=20),
    "flag": st.booleans(),
}


def filled(schema: TableSchema, write: Write) -> session_pb2.Request:
    """As protobuf does it."""
    request = session_pb2.Request()
    operation = request.operations.add(kind=KINDS[write.kind], table=schema.name, table_id=schema.id)
    fill_values(operation.key, write.key)
    operation.columns.extend(write.values)
    fill_values(operation.values, write.values.values())
    if write.column is not None:
        operation.columns.append(write.column)
    return request


@given(
    kind=st.sampled_from(["put", "delta", "insert"]),
    key=st.tuples(INT64, st.text(max_size=200)),
    values=st.dictionaries(st.sampled_from(sorted(VALUES)), st.nothing() | st.just(0), max_size=6).flatmap(
        lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
    ),
)
def test_a_write_is_encoded_as_protobuf_does_it(kind: Any, key: tuple[Any, ...], values: dict[str, Any]) -> None:
    write = Write(kind, key, values)
    wanted = filled(COUNTERS, write)
    for _ in range(2):  # the second time much of it is remembered
        data = encoded_write(COUNTERS, kind, key, values, None, None)
        assert session_pb2.Request.FromString(data) == wanted
        assert data == wanted.SerializeToString()


def test_long_values_are_bodies() -> None:
    """And come back as they were; keys, and values of a few hundred bytes, stay in the message."""
    names, bodies = ("a", "b", "c", "d"), list[Any]()
    values = ["\xe9" * 300, b"\x00" * 5_000, "x" * 256, None]
    data = encoded_write(COUNTERS, "put", (1, "k" * 9_000), dict(zip(names, values, strict=True)), None, bodies)
    assert [len(body) for body in bodies] == [600, 5_000]
    request = session_pb2.Request.FromString(data)
    packet = encoded(request, bodies)
    assert len(packet.header) < 9_600
    (asked,) = parsed(joined([packet]))
    (operation,) = asked.request.operations
    assert from_values(operation.key) == [1, "k" * 9_000]
    assert from_values(operation.values, asked.bodies) == values and len(asked.bodies) == 0


@pytest.mark.parametrize("column", [None, "hits"])
def test_guards_and_deletes_have_a_column_or_none(column: str | None) -> None:
    for kind in ("guard", "delete"):
        write = Write(kind, (1, 2), column=column)
        data = encoded_write(COUNTERS, kind, write.key, write.values, column, None)
        assert data == filled(COUNTERS, write).SerializeToString()


@given(key=st.tuples(INT64, MOMENTS), values=st.dictionaries(st.sampled_from(["hits", "slowest"]), INT64, min_size=1))
def test_a_delta_of_integers_is_encoded_as_any(key: tuple[int, int], values: dict[str, int]) -> None:
    stored = Write("delta", *Write("delta", key, values).bound(COUNTERS))
    assert encoded_delta(COUNTERS, key, values) == filled(COUNTERS, stored).SerializeToString()


OTHERS: list[tuple[Any, dict[str, Any]]] = [
    ((1, 2), {}),
    ((1, 2), {"hits": True}),
    ((1, 2), {"hits": 1.0}),
    ((1, 2), {"hits": None}),
    ((1, 2), {"hits": 2**63}),
    ((1, 2), {"hits": "1"}),
    ((1, 2), {"load": 1}),
    ((1, 2), {"v": 1}),
    ((1, 2), {"none": 1}),
    ((1, 2), {"id": 1}),
    ((1, True), {"hits": 1}),
    ((1, None), {"hits": 1}),
    ((1, 2**63), {"hits": 1}),
    ((1, MOMENT_MIN_US - 1), {"hits": 1}),
    ((1, MOMENT_MAX_US + 1), {"hits": 1}),
    ((1,), {"hits": 1}),
    ((1, 2, 3), {"hits": 1}),
    ([1, 2], {"hits": 1}),
    (1, {"hits": 1}),
    (None, {"hits": 1}),
    (("1", 2), {"hits": 1}),
]


@pytest.mark.parametrize(("key", "values"), OTHERS, ids=str)
def test_any_other_delta_is_held_to_the_schema(key: Any, values: dict[str, Any]) -> None:
    """It is taken as ever, or refused with the same words; also right behind one that is equal to it."""
    encoded_delta(COUNTERS, (1, 2), {"hits": 1})
    core = Core("nowhere", 1.0)
    core.schemas["counters"] = COUNTERS
    transaction = TransactionCore(core, TransactionArguments())
    try:
        stored = Write("delta", *Write("delta", key, values).bound(COUNTERS))
        wanted: Any = filled(COUNTERS, stored).SerializeToString()
    except kivi.KiviError as error:
        wanted = error
    left = transaction.write("counters", Write("delta", key, values))
    if isinstance(wanted, kivi.KiviError):
        assert left is not None and not transaction.wrote and not transaction._writes
        with pytest.raises(type(wanted)) as caught:
            transaction._buffer(COUNTERS, Write("delta", key, values))
        assert caught.value.message == wanted.message
    else:
        assert left is None and [*transaction._writes] == [wanted]


def test_a_column_that_is_no_text_is_refused_as_any_that_is_not_there() -> None:
    transaction = TransactionCore(Core("nowhere", 1.0), TransactionArguments())
    with pytest.raises(kivi.SchemaError, match="has no column"):
        transaction._buffer(COUNTERS, Write("delta", (1, 2), {"\ud800": 1}))


def test_what_is_remembered_of_a_table_is_bounded_however_many_choices_of_columns_there_are() -> None:
    schema = row_table_schema("many", key={"id": "int64"}, columns={f"c{i}": kivi.sum("int64") for i in range(300)})
    for i in range(300):
        for n in range(50):
            encoded_delta(schema, (n,), {f"c{i}": n})
    encode: Any = schema.memo[encoded_delta]
    assert encode.cache_info().currsize <= 1_024 and len(schema.memo) < 10


@pytest.mark.parametrize(("length", "plainly"), [(256, True), (257, False)])
def test_a_commit_under_a_long_token_goes_by_itself(length: int, plainly: bool) -> None:
    """Alone it is held to what a message may have; with others it would have ended their session."""
    core = Core("nowhere", 1.0)
    transaction = TransactionCore(core, TransactionArguments())
    transaction._unsent = [lambda: transaction._request_to_begin(1)]
    transaction._buffer(COUNTERS, Write("delta", (1, 2), {"hits": 1}))
    assert transaction._commits_plainly("t" * length) is plainly


def test_writes_that_something_else_joins_are_still_counted() -> None:
    transaction = TransactionCore(Core("nowhere", 1.0), TransactionArguments())
    for i in range(5):
        transaction._buffer(COUNTERS, Write("put", (i, 0), {"v": i}))
    size = transaction._buffered_bytes
    transaction._operation(session_pb2.Operation.KIND_OVERWRITE, COUNTERS)
    assert len(transaction._writes) == 6 and transaction._buffered_bytes > size


@pytest.mark.parametrize("table", ["none", None, 7, ["counters"]])
def test_a_delta_of_a_table_that_is_not_known_is_looked_at(table: Any) -> None:
    core = Core("nowhere", 1.0)
    transaction = TransactionCore(core, TransactionArguments())
    assert transaction.write(table, Write("delta", (1, 2), {"hits": 1})) is not None
    assert not transaction.wrote


def test_a_value_that_cannot_be_hashed_is_refused_as_ever() -> None:
    core = Core("nowhere", 1.0)
    core.schemas["counters"] = COUNTERS
    transaction = TransactionCore(core, TransactionArguments())
    assert transaction.write("counters", Write("delta", (1, 2), {"hits": [1]})) is not None
    with pytest.raises(kivi.SchemaError):
        transaction._buffer(COUNTERS, Write("delta", (1, 2), {"hits": [1]}))


def test_writes_and_what_is_no_write_keep_their_order() -> None:
    """Encoded writes, then an operation of another kind, then writes again: one request, in program order."""
    core = Core("nowhere", 1.0)
    transaction = TransactionCore(core, TransactionArguments())
    made = [Write("put", (i, 0), {"v": i}) for i in range(6)]
    for write in made[:3]:
        transaction._buffer(COUNTERS, write)
    transaction._operation(session_pb2.Operation.KIND_OVERWRITE, COUNTERS)
    for write in made[3:]:
        transaction._buffer(COUNTERS, write)
    request, _ = transaction._take()
    assert [operation.kind for operation in request.operations] == [1, 1, 1, 8, 1, 1, 1]
    wanted = [filled(COUNTERS, write).operations[0] for write in made]
    assert [operation for operation in request.operations if operation.kind == 1] == wanted
    assert not transaction._writes and len(transaction._take()[0].operations) == 0


class Unconnected:
    """A transport of one session, from whose queue nothing leaves."""

    session = b""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.epochs = 1

    def run(self, steps: Any) -> Any:
        raise AssertionError("the test carries them out")

    def epoch(self) -> int:
        return self.epochs

    def tell(self, request: Any, epoch: int | None = None) -> int:
        self.queued.append(request)
        return self.epochs

    def lines_at(self, address: str) -> Any:
        raise AssertionError("nobody subscribes")

    def leave(self, epoch: int | None) -> None:
        raise AssertionError("no server is stopping")

    def release(self, number: int, epoch: int) -> None:
        raise AssertionError("it has ended")


def begun(**arguments: Any) -> tuple[Unconnected, TransactionCore]:
    core, transport = Core("nowhere", 1.0), Unconnected()
    core.transport = transport
    core.schemas["counters"] = COUNTERS
    transaction = TransactionCore(core, TransactionArguments(**arguments))
    transaction.begin()
    return transport, transaction


def test_a_plain_commit_takes_its_begin_back() -> None:
    transport, transaction = begun()
    transaction._buffer(COUNTERS, Write("delta", (1, 2), {"hits": 3}))
    asked = next(transaction.commit())
    assert isinstance(asked, CommitPlain) and transport.queued == [[]]
    assert session_pb2.Writes.FromString(asked.writes).operations[0].table == "counters"


def test_one_whose_session_broke_before_it_left_begins_and_commits_on_the_next() -> None:
    """Its writes are not lost on the way, nor is its token, by which it would be recognised if it had left."""
    transport, transaction = begun(token="mine")
    transaction._buffer(COUNTERS, Write("delta", (1, 2), {"hits": 3}))
    transaction._buffer(COUNTERS, Write("put", (1, 2), {"v": 4}))
    steps = transaction.commit()
    first = next(steps)
    assert isinstance(first, CommitPlain)
    transport.epochs = 2
    again: Any = steps.throw(ConnectionLost(sent=False))
    assert isinstance(again, Ask) and again.epoch == 2
    begin = transport.queued[-1]
    assert begin.HasField("begin") and begin.txn == again.request.txn
    assert again.request.commit.token == "mine"
    assert [*again.request.operations] == [*session_pb2.Writes.FromString(first.writes).operations]
    with pytest.raises(StopIteration) as stop:
        steps.send(session_pb2.Response(start_ts=7, commit=session_pb2.CommitReply(commit_ts=9)))
    assert stop.value.value == transaction.commit_ts == 9 and transaction.start_ts == 7


def test_one_that_may_have_left_asks_what_became_of_it() -> None:
    _, transaction = begun(token="mine")
    transaction._buffer(COUNTERS, Write("delta", (1, 2), {"hits": 3}))
    steps = transaction.commit()
    next(steps)
    asked: Any = steps.throw(ConnectionLost(sent=True))
    assert isinstance(asked, Ask) and asked.request.outcome.token == "mine"


@pytest.mark.parametrize(
    "write",
    [
        Write("insert", (1, 2), {"v": 1}),
        Write("delete", (1, 2)),
        Write("guard", (1, 2), column="v"),
        Write("put", (1, 2), {"v": 1}),
    ],
    ids=lambda write: write.kind,
)
def test_only_deltas_and_puts_are_plain(write: Write) -> None:
    _, transaction = begun()
    transaction._buffer(COUNTERS, Write("delta", (5, 2), {"hits": 3}))
    transaction._buffer(COUNTERS, write)
    asked = next(transaction.commit())
    assert isinstance(asked, CommitPlain) is (write.kind == "put")
    if isinstance(asked, Ask):
        assert len(asked.request.operations) == 2 and asked.request.txn == 0


def test_what_is_large_has_begun_or_comes_in_numbered_batches_commits_by_itself() -> None:
    cases: list[Any] = []
    _, large = begun()
    large._write(encoded_write(COUNTERS, "put", (1, 2), {"v": 1, "x" * 2_000: 1}, None, None))
    _, many = begun()
    for i in range(17):
        many._buffer(COUNTERS, Write("delta", (i, 2), {"hits": 3}))
    _, batch = begun(batch=("scope", 1))
    batch._buffer(COUNTERS, Write("delta", (1, 2), {"hits": 3}))
    transport, left = begun()
    left._buffer(COUNTERS, Write("delta", (1, 2), {"hits": 3}))
    transport.queued[0].pop()
    _, later = begun(min_snapshot=99)
    later._buffer(COUNTERS, Write("delta", (1, 2), {"hits": 3}))
    cases += [large, many, batch, left, later]
    asked: list[Any] = [next(case.commit()) for case in cases]
    assert all(isinstance(each, Ask) for each in asked)
    assert [each.request.txn for each in asked] == [0, 0, 0, left._at.number, later._at.number]


def test_very_many_at_once_leave_in_messages_of_some_thousand() -> None:
    gathered = Commits(lambda _: None)
    for number in range(1, _GATHERED_MAX + 1):
        assert not gathered.is_full
        gathered.add((number, b"x", "t"))
    assert gathered.is_full
    request = CommitPlain(encoded_delta(COUNTERS, (1, 2), {"hits": 3}) or b"", "t", None, 1).request
    assert request.commit.token == "t" and request.operations[0].table == "counters"
