"""Large appends are cut out of their frames: nothing else is, nothing is lost, and what is no frame stays one."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from kivi_server.payloads import LARGE_BYTES, cut
from kivi_server.translate import Translator

import kivi
from kivi.arrow.ipc import encode_ipc
from kivi.client.calls import encoded
from kivi.wire.v1 import session_pb2

APPEND = session_pb2.Operation.KIND_APPEND


def append(number: int, size: int, **more: Any) -> session_pb2.Request:
    request = session_pb2.Request(id=number, commit=session_pb2.Commit(token=f"k{number}"), **more)
    request.operations.add(kind=APPEND, table="events", table_id=7, arrow=random.Random(number).randbytes(size))
    return request


def small(number: int) -> session_pb2.Request:
    request = session_pb2.Request(id=number, commit=session_pb2.Commit(token=f"k{number}"))
    operation = request.operations.add(kind=session_pb2.Operation.KIND_DELTA, table="t", columns=["n"])
    operation.key.add(int_value=-number)
    operation.values.add(float_value=1.5)
    return request


def frame(*requests: session_pb2.Request) -> bytes:
    return session_pb2.ClientFrame(requests=requests).SerializeToString()


def whole(rest: bytes, payloads: dict[int, memoryview]) -> session_pb2.ClientFrame:
    """What was cut out, put back."""
    made = session_pb2.ClientFrame.FromString(rest)
    for place, payload in payloads.items():
        (operation,) = made.requests[place].operations
        assert not operation.arrow
        operation.arrow = bytes(payload)
    return made


def test_large_appends_are_cut_out_and_all_else_stays() -> None:
    requests = [small(1), append(2, LARGE_BYTES), small(3), append(4, 3 << 20, txn=9, timeout_ms=77), append(5, 100)]
    data = frame(*requests)
    rest, payloads = cut(data)
    assert payloads.keys() == {1, 3}
    assert len(rest) < 1_000
    assert whole(rest, payloads) == session_pb2.ClientFrame(requests=requests)


def no_number() -> session_pb2.Request:
    return append(0, LARGE_BYTES)


def two_operations() -> session_pb2.Request:
    request = append(1, LARGE_BYTES)
    request.operations.add().CopyFrom(request.operations[0])
    return request


def another_kind() -> session_pb2.Request:
    request = append(1, LARGE_BYTES)
    request.operations[0].kind = session_pb2.Operation.KIND_PUT
    return request


def large_otherwise() -> session_pb2.Request:
    request = append(1, 10)
    request.operations[0].table = "x" * LARGE_BYTES
    return request


def never_answered() -> session_pb2.Request:
    return append(1, LARGE_BYTES, release=session_pb2.Release())


@pytest.mark.parametrize("make", [no_number, two_operations, another_kind, large_otherwise, never_answered])
def test_other_large_requests_are_left_as_they_are(make: Any) -> None:
    data = frame(small(8), make(), small(9))
    assert cut(data) == (data, {})


def test_a_frame_of_very_many_parts_is_left_as_it_is() -> None:
    """A stranger's 64 MiB of empty requests must not keep a worker busy."""
    data = frame(append(1, LARGE_BYTES)) + b"\x0a\x00" * 30_000_000
    assert cut(data)[0] is data
    many = append(1, LARGE_BYTES).SerializeToString() + b"\x20\x01" * 100_000
    data = b"\x0a" + varint(len(many)) + many
    assert cut(data) == (data, {})


def test_two_of_one_number_are_told_apart_by_their_place() -> None:
    requests = [append(1, LARGE_BYTES), small(1), append(1, LARGE_BYTES + 8)]
    rest, payloads = cut(frame(*requests))
    assert payloads.keys() == {0, 2}
    assert whole(rest, payloads) == session_pb2.ClientFrame(requests=requests)


def test_what_is_small_in_its_frame_does_not_keep_it() -> None:
    """An open transaction keeps its events, and is accounted for these, not for what came with them."""
    one = append(1, LARGE_BYTES)
    for beside, in_place in ((0, True), (7 * LARGE_BYTES - 200, True), (7 * LARGE_BYTES, False), (16 << 20, False)):
        padded = session_pb2.Request(id=2, padding=b"x" * beside)
        data = aligned(one, padded)
        ((place, payload),) = cut(data)[1].items()
        assert place == 0
        assert bytes(payload) == one.operations[0].arrow
        assert (payload.obj is data) == in_place


def aligned(first: session_pb2.Request, *more: session_pb2.Request) -> bytes:
    """A frame whose first request is as our clients write it."""
    (operation,) = first.operations
    payload = pa.py_buffer(operation.arrow)
    bare = session_pb2.Request()
    bare.CopyFrom(first)
    bare.operations[0].ClearField("arrow")
    return encoded(bare, payload) + frame(*more)


@pytest.mark.parametrize(
    "part",
    [
        b"\xa2\x86\x80\x80\x80\x00\x02hi",  # a tag of six bytes
        b"\xa2\x06\x82\x80\x80\x80\x80\x00hi",  # a size of six bytes
        b"\xa2\x86\x80\x80\x10\x02hi",  # a tag of more than 32 bits
    ],
)
@pytest.mark.parametrize("where", ["frame", "request", "operation"])
def test_what_the_parser_refuses_is_left_to_it(part: bytes, where: str) -> None:
    inner, middle, outer = (part if where == name else b"" for name in ("operation", "request", "frame"))
    operation = append(1, LARGE_BYTES).operations[0].SerializeToString() + inner
    body = session_pb2.Request(id=1).SerializeToString() + b"\x1a" + varint(len(operation)) + operation + middle
    data = b"\x0a" + varint(len(body)) + body + outer
    with pytest.raises(Exception, match=r"(?i)pars"):
        session_pb2.ClientFrame.FromString(data)
    assert cut(data) == (data, {})


def test_the_last_of_a_field_counts_as_it_does_for_the_parser() -> None:
    one = append(1, LARGE_BYTES)
    (operation,) = one.operations
    twice = session_pb2.Request(id=3)  # later fields of a message replace earlier ones
    data = frame(one)
    body = one.SerializeToString() + twice.SerializeToString()
    rest, payloads = cut(session_pb2.ClientFrame().SerializeToString() + b"\x0a" + varint(len(body)) + body)
    assert payloads.keys() == {0}
    assert session_pb2.ClientFrame.FromString(rest).requests[0].id == 3
    doubled = operation.SerializeToString() + session_pb2.Operation(arrow=b"other").SerializeToString()
    body = session_pb2.Request(id=1).SerializeToString() + b"\x1a" + varint(len(doubled)) + doubled
    data = b"\x0a" + varint(len(body)) + body
    assert cut(data) == (data, {})
    assert session_pb2.ClientFrame.FromString(data).requests[0].operations[0].arrow == b"other"


def varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def test_fields_of_newer_versions_stay() -> None:
    unknown = b"\xa5\x06abcd" + b"\xa1\x06abcdefgh" + b"\xaa\x06\x02hi" + b"\xa0\x06\x96\x01"  # field 100, each form
    body = append(1, LARGE_BYTES).SerializeToString() + unknown
    rest, payloads = cut(b"\x0a" + varint(len(body)) + body + unknown)
    assert payloads.keys() == {0}
    assert rest.count(unknown) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_frame_is_what_the_parser_says(seed: int) -> None:
    """Whatever is changed in its beginnings, or cut off: if both halves are still read, they are what it was."""
    rng = random.Random(seed)
    data = frame(small(1), append(2, LARGE_BYTES), append(3, LARGE_BYTES + 1))
    starts = [*range(80), *range(LARGE_BYTES + 60, LARGE_BYTES + 160)]
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.choice(starts)] = rng.randrange(256)
        if rng.random() < 0.2:
            del changed[rng.randrange(len(changed)) :]
        rest, payloads = cut(bytes(changed))
        parsed: session_pb2.ClientFrame | None = None
        try:
            parsed = session_pb2.ClientFrame.FromString(bytes(changed))
        except Exception:
            with pytest.raises(Exception, match=r"(?i)pars"):
                session_pb2.ClientFrame.FromString(rest)
            continue
        assert whole(rest, payloads) == parsed


@pytest.mark.parametrize("size", [LARGE_BYTES, 2**17 - 16, 2**21 - 64, 2**21 - 56, 2**21 - 48, 2**21 - 8, 2**21])
@pytest.mark.parametrize("name", ["e", "ev", "eve", "even", "event", "events", "events_", "events_1"])
def test_what_our_clients_send_is_read_where_it_lies(size: int, name: str) -> None:
    parts, sent = [], []
    for number in (1, 300):
        payload = pa.py_buffer(random.Random(number).randbytes(size))
        request = session_pb2.Request(id=number, commit=session_pb2.Commit(token="token"))
        request.operations.add(kind=APPEND, table=name, table_id=7)
        parts.append(encoded(request, payload))
        assert len(request.operations) == 1 and not request.padding  # it may have to be sent again
        request.operations[0].arrow = payload.to_pybytes()
        sent.append(request)
    data = b"".join(parts)
    rest, payloads = cut(data)
    assert all(payload.obj is data for payload in payloads.values())
    made = whole(rest, payloads)
    for request in made.requests:
        request.ClearField("padding")
    assert list(made.requests) == sent


def test_what_others_send_is_copied_if_it_lies_elsewhere() -> None:
    for number in range(1, 40):
        data = frame(append(10**number, LARGE_BYTES) if number < 19 else append(number, LARGE_BYTES + number))
        ((_, payload),) = cut(data)[1].items()
        assert pa.py_buffer(payload).address % 8 == 0


# -- what they keep ----------------------------------------------------------------------------------


def text(values: list[str], rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int16()), pa.array(values))


@pytest.mark.parametrize(
    ("s", "around", "kept"),
    [
        (text(["a"], 2_000), 1 << 10, True),
        (text(["a"], 2_000), 1 << 20, False),  # in a frame with much else
        (text(["a", "x" * (1 << 20)], 2_000), 0, False),  # with a value that no event has
        (text(["a", "x" * (1 << 20)], 3), 0, False),
        (text(["a", "x" * (1 << 20)], 0), 0, False),
        (pa.array(["a"]), 0, True),  # a stream of 1 kB, for an event
    ],
)
def test_events_keep_no_more_than_they_are_accounted_for(s: pa.Array, around: int, kept: bool) -> None:
    """Or 8 times that: whoever keeps them counts their own bytes."""
    count = len(s)
    at = pa.array([1_700_000_000_000_000] * count, pa.timestamp("us", "UTC"))
    sent = pa.RecordBatch.from_arrays([at, pa.array(range(count), pa.int64()), s], ["at", "n", "s"])
    stream = bytes(encode_ipc(sent))
    frame = bytearray(stream + bytes(around))
    with kivi.open(None) as db:
        db.create_event_table("e", event_time="at", columns={"at": "timestamp", "n": "int64", "s": "string"})
        batch = Translator(db.store).batch(db.store.table("e"), memoryview(frame)[: len(stream)])
    assert batch.column("n").to_pylist() == list(range(count))
    assert set(batch.column("s").to_pylist()) <= {"a"}
    assert (len(frame) <= max(4 << 10, 8 * batch.nbytes)) is kept
    if kept:
        with pytest.raises(BufferError):
            frame.clear()
    else:
        frame.clear()  # which nobody refers to any more
    assert batch.column("at").null_count == 0
    batch.validate(full=True)
