"""Bodies lie in their frames as they were sent, where they can be read without a copy; what is small keeps no frame."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from google.protobuf.message import DecodeError
from kivi_server.asked import parsed
from kivi_server.translate import Translator

import kivi
from kivi.arrow.ipc import encode_ipc
from kivi.client.calls import encoded
from kivi.errors import InvalidArgument
from kivi.wire.frames import KEPT_MAX, Bodies, Packet, joined, padded, split
from kivi.wire.v1 import session_pb2


def append(number: int, *bodies: bytes) -> Packet:
    request = session_pb2.Request(id=number, commit=session_pb2.Commit(token=f"k{number}"))
    for body in bodies:
        request.operations.add(kind=session_pb2.Operation.KIND_APPEND, table="events", arrow_bytes=len(body))
    return encoded(request, bodies)


@pytest.mark.parametrize("seed", range(20))
def test_each_request_gets_its_bodies_where_they_lie(seed: int) -> None:
    rng = random.Random(seed)
    sent = [[rng.randbytes(rng.choice([0, 1, 7, 8, 9, 5_000])) for _ in range(rng.randrange(4))] for _ in range(9)]
    frame = joined([append(number, *bodies) for number, bodies in enumerate(sent, 1)])
    for asked, bodies in zip(parsed(frame), sent, strict=True):
        assert len(asked.bodies) == asked.request.body_bytes == sum(padded(len(body)) for body in bodies)
        for body in bodies:
            taken = asked.bodies.take(len(body))
            assert bytes(taken) == body
            assert not body or pa.py_buffer(taken).address % 8 == 0


def test_two_of_one_number_have_each_its_own() -> None:
    one, two = parsed(joined([append(1, b"a" * 9), append(1, b"b" * 17)]))
    assert bytes(one.bodies.take(9)) == b"a" * 9 and bytes(two.bodies.take(17)) == b"b" * 17


def test_what_is_small_in_its_frame_does_not_keep_it() -> None:
    """What waits for its turn is accounted for its own bytes, not for what came with it."""
    small = 64 << 10
    for beside, in_place in ((0, True), ((KEPT_MAX - 1) * small - 200, True), (KEPT_MAX * small, False)):
        frame = joined([append(1, bytes(small)), append(2, bytes(beside))])
        assert (parsed(frame)[0].bodies.take(small).obj is frame) == in_place
    frame = joined([append(i, bytes(1_000)) for i in range(6)])  # as of events that are each a commit
    assert all(asked.bodies.take(1_000).obj is not frame for asked in parsed(frame))


def test_a_body_that_is_not_there_is_refused() -> None:
    bodies = Bodies(memoryview(bytes(16)))
    assert len(bodies.take(9)) == 9 and len(bodies) == 0
    with pytest.raises(InvalidArgument, match="announced"):
        bodies.take(1)
    assert len(bodies.take(0)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_frame_is_refused_or_is_one(seed: int) -> None:
    """Whatever is changed or cut off: nothing but what strangers are told is raised."""
    rng = random.Random(seed)
    data = joined([append(1, b"x" * 30), append(2, b"y" * 8), append(3)])
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        if rng.random() < 0.3:
            del changed[rng.randrange(len(changed)) :]
        try:
            split(bytes(changed), 1_000)
            found = parsed(bytes(changed))
        except (kivi.KiviError, DecodeError):
            continue
        assert sum(len(asked.bodies) for asked in found) <= len(changed)


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
