"""A database made ahead of its question: each is asked once, and is as closed as one that is made for it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

import kivi
from kivi.errors import InvalidArgument, ResourceExhausted
from kivi.sql import engine
from kivi.sql.spare import Spare

duckdb = pytest.importorskip("duckdb")


def prepared() -> Spare:
    spare = Spare({"threads": "1"})
    spare.prepare(duckdb)
    return spare


def test_the_one_that_is_being_made_is_waited_for_and_taken_once() -> None:
    spare = prepared()
    first, second = spare.take(duckdb), spare.take(duckdb)
    first.execute("create table t as select 1")
    assert second.sql("show tables").fetchall() == []
    for connection in (first, second):
        connection.close()


def test_many_who_take_at_once_have_databases_of_their_own() -> None:
    spare, taken = Spare({}), list[Any]()

    def ask() -> None:
        for _ in range(5):
            taken.append(spare.take(duckdb))
            spare.prepare(duckdb)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in taken}) == 20
    for number, each in enumerate(taken):
        each.execute(f"create table t as select {number} as n")
    assert [each.sql("select n from t").fetchall() for each in taken] == [[(n,)] for n in range(20)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_makes_its_own() -> None:
    spare = prepared()
    while spare._made is None:
        time.sleep(0.001)
    child = os.fork()
    if not child:
        os._exit(spare.take(duckdb).sql("select 42").fetchall() != [(42,)])
    assert os.waitpid(child, 0)[1] == 0
    spare.take(duckdb).close()


def test_limits_are_those_of_the_question() -> None:
    """A spare one was made before its limits were known."""
    large = "select count(*) from (select distinct a.range, b.range from range(3000) a, range(3000) b)"
    with kivi.open() as wide, kivi.open(sql_memory_bytes=16 << 20, sql_threads=1) as narrow:
        for _ in range(2):
            with wide.snapshot() as snap:
                found = snap.sql("select current_setting('threads') as n").to_pylist()
                assert found == [{"n": wide.store.settings.sql_threads}]
            with narrow.snapshot() as snap:
                assert snap.sql("select current_setting('threads') as n").to_pylist() == [{"n": 1}]
                with pytest.raises(ResourceExhausted):
                    snap.sql(large)
            assert engine._spare._making or engine._spare._made is not None


@pytest.mark.parametrize("text", ["select * from read_csv('/etc/passwd')", "set threads = 9", "attach 'x' as y"])
def test_a_spare_one_is_closed_to_the_outside(text: str) -> None:
    with kivi.open() as db, db.snapshot() as snap:
        for _ in range(2):
            assert snap.sql("select 1 as n").to_pylist() == [{"n": 1}]
            with pytest.raises(InvalidArgument):
                snap.sql(text)
