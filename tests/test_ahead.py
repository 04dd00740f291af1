"""Row groups read ahead: in order, a few at a time, and no more of them once their reader has gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi.errors import NotFound
from kivi.events.settled_files import GROUP_ROWS
from kivi.runtime import ahead
from kivi.runtime.ahead import in_order

T = TypeVar("T")


def called(calls: Iterable[Callable[[], T]], waits: Callable[[Callable[[], T]], bool] = lambda _: False) -> Iterator[T]:
    return in_order(iter(calls), lambda call: call(), waits)


def after(seconds: float, value: int) -> Callable[[], int]:
    def call() -> int:
        time.sleep(seconds)
        return value

    return call


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.0005, 0.002]), st.booleans()), max_size=20))
def test_results_come_in_the_order_of_their_calls(parts: list[tuple[float, bool]]) -> None:
    calls = [after(seconds, i) for i, (seconds, _) in enumerate(parts)]
    waiting = {call for call, (_, waits) in zip(calls, parts, strict=True) if waits}
    assert list(called(calls, waiting.__contains__)) == list(range(len(parts)))


def test_what_waits_runs_where_it_is_taken() -> None:
    calls = [threading.get_ident, lambda: threading.get_ident(), threading.get_ident]
    found = list(called(calls, lambda call: call is calls[1]))
    assert found[:2] == [threading.get_ident()] * 2
    assert found[2] != threading.get_ident()


def test_no_more_calls_begin_than_there_are_threads_for() -> None:
    given_ = 0

    def calls() -> Iterator[Callable[[], int]]:
        nonlocal given_
        for i in range(100):
            given_ += 1
            yield after(0, i)

    for taken, _ in enumerate(called(calls()), 1):
        assert given_ <= taken + ahead.AT_ONCE


def test_the_first_call_runs_where_it_is_asked_for() -> None:
    assert next(called([threading.get_ident, threading.get_ident])) == threading.get_ident()


def test_an_error_comes_in_its_turn() -> None:
    def fails() -> int:
        raise NotFound("there is nothing")

    found = called([after(0, 1), after(0.01, 2), fails, after(0, 3)])
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(NotFound):
        next(found)


def test_when_it_ends_early_nothing_more_begins() -> None:
    begun = list[int]()

    def call(i: int) -> int:
        begun.append(i)
        return i

    found = in_order(iter(range(20)), call)
    assert [next(found), next(found)] == [0, 1]
    found.close()  # type: ignore[attr-defined]
    time.sleep(0.05)
    assert len(begun) <= 2 + ahead.AT_ONCE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    assert list(called(after(0, i) for i in range(5))) == list(range(5))
    child = os.fork()
    if not child:
        os._exit(list(called(after(0, i) for i in range(5))) != list(range(5)))
    assert os.waitpid(child, 0)[1] == 0


def test_batches_stay_as_they_are_when_others_are_read(tmp_path: Path) -> None:
    """Several files, and columns of every type, are read with the same memory."""
    types = {"k": "int64", "f": "float64", "s": "string", "b": "bytes", "ok": "bool", "d": "decimal(18, 3)"}
    rows = 2 * GROUP_ROWS + 7
    with kivi.open(tmp_path, background=False, settle=False) as db:
        db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", **types})
        expected = []
        for seed in range(2):
            random = np.random.default_rng(seed)
            k = random.integers(0, 2**40, rows)
            valid = random.random(rows) < 0.9
            columns = {
                "ts": pa.array(seed * 10**9 + np.arange(rows)).cast(pa.timestamp("us", "UTC")),
                "k": pa.array(k),
                "f": pa.array(k / 7, mask=~valid),
                "s": pa.array([f"host {i % 50}" for i in k.tolist()]),
                "b": pa.array([str(i).encode() for i in k.tolist()], mask=~valid),
                "ok": pa.array(k % 3 == 0),
                "d": pa.array(k % 10**12).cast(pa.decimal128(38, 0)).cast(pa.decimal128(18, 3)),
            }
            db.append("calls", pa.table(columns))
            expected.append(pa.table(columns))
            db.consolidate()
            db.store.settle()
        assert db.stats()["settling"] == 0
        with db.snapshot() as snap:
            found = snap.to_arrow("calls")
            again = snap.to_arrow("calls", columns=["s", "k"], where=kivi.col("s") == "host 7")
        every = pa.concat_tables(expected).select(found.schema.names)
        assert found.equals(every.cast(found.schema))
        assert again.num_rows == sum(s == "host 7" for s in every["s"].to_pylist())
