"""Questions on a server: who may ask about which tables, what ends a question, and that nobody else notices."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kivi_server.sql.pipe import Gone, Kind, receive
from kivi_server.sql.worker import _Server
from kivi_server.sql.workers import Question, Workers

import kivi
from kivi.client.messages import read_batches
from kivi.errors import InvalidArgument, KiviError, NotFound, PermissionDenied, ResourceExhausted, Unavailable
from kivi.sql import Limits
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

ROOT, NARROW = "root-4f1d0c", "narrow-c0ffee"
ROWS = 20_000
SETTLED = 12_000
"""Of these so many lie in settled files, and the others do not."""
LONG = "select sum(range % 7) from range(1000000000000)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("sql")
    (folder / "tokens").write_text(f"{ROOT} admin\n{NARROW} reader tables=calls,by_*\n")
    limits = ["sql_timeout_s=120", "sql_rows=100000", "sql_memory_bytes=64MiB", "sql_processes=2"]
    told = [word for limit in limits for word in ("--set", limit)]
    moments = pa.array(range(ROWS), pa.timestamp("us", "UTC"))
    events = pa.table({"ts": moments, "x": range(ROWS)})
    with kivi.open(folder / "data") as db:
        for name in ("calls", "secrets"):
            db.create_event_table(name, event_time="ts", columns={"ts": "timestamp", "x": "int64"})
            db.append(name, events.slice(0, SETTLED))
        db.consolidate()
        db.store.settle()
    with ServerProcess(folder / "data", "--token-file", str(folder / "tokens"), *told) as running:
        with connect(running, ROOT) as db:
            for name in ("calls", "secrets"):
                db.append(name, events.slice(SETTLED))
        yield running


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[ServerProcess]:
    """Who ends a question soon: on a busy machine any may take as long."""
    told = ("--set", "sql_timeout_s=6", "--set", "sql_processes=2")
    with ServerProcess(tmp_path / "hasty", *told) as running, running.connect() as db:
        db.create_event_table("calls", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
        yield running


def connect(server: ServerProcess, access_token: str) -> Any:
    """A client that waits while a process for a question begins, on a busy machine too."""
    return server.connect(access_token=access_token, timeout=150)


@pytest.fixture
def snap(server: ServerProcess) -> Iterator[Any]:
    with connect(server, ROOT) as db, db.snapshot() as snapshot:
        yield snapshot


def processes(server: ServerProcess) -> set[int]:
    """Those that the server has begun for questions."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == server.pid and b"kivi_server.sql.worker" in words:
                found.add(int(name))
    return found


def spent_s(server: ServerProcess) -> float:
    """Processor time of those."""
    ticks = 0
    for number in processes(server):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_token_sees_its_tables_and_none_other(server: ServerProcess) -> None:
    with connect(server, NARROW) as db, db.snapshot() as snap:
        assert snap.sql("select sum(x) as s from calls").to_pylist() == [{"s": sum(range(ROWS))}]
        for name in ("secrets", '"secrets"', "SECRETS", "nowhere"):
            with pytest.raises(PermissionDenied) as refused:
                snap.sql(f"select count(*) from {name}")
            with pytest.raises(PermissionDenied) as other:
                list(snap.scan(name.strip('"')))
            assert str(refused.value) == str(other.value)  # as other calls say it, whether or not it is there
        with pytest.raises(PermissionDenied):
            snap.sql("select x from calls where x in (select x from secrets)")
        for made_up in ("query_table('sec' || 'rets')", "query('from secrets')", "query_table(['calls', 'secrets'])"):
            with pytest.raises(KiviError) as failed:
                snap.sql(f"select count(*) from {made_up}, calls")
            assert isinstance(failed.value, InvalidArgument | PermissionDenied | NotFound)
        for file in (Path(server.data) / "events").rglob("*.parquet"):
            for named in (f"read_parquet('{file}')", f"'{file}'", f"query('from ''{file}'' ')", f"glob('{file}')"):
                with pytest.raises(KiviError) as failed:
                    snap.sql(f"select count(*) from {named}, calls")
                assert isinstance(failed.value, InvalidArgument | PermissionDenied | NotFound)
        assert snap.sql("with secrets as (select 1 as x) select x from secrets").to_pylist() == [{"x": 1}]
        assert snap.sql("show tables").to_pylist() == [{"name": "calls"}]
        assert {row["table_name"] for row in snap.sql("from duckdb_columns() where not internal").to_pylist()} == {
            "calls"
        }


def test_limits_end_a_question_and_say_which_they_are(snap: Any) -> None:
    for text, limit in (
        ("from range(100001)", "sql_rows"),
        ("select list(range) from range(100000000)", "sql_memory_bytes"),
    ):
        with pytest.raises(ResourceExhausted) as refused:
            snap.sql(text)
        assert refused.value.details["limit"] == limit
    assert snap.sql("from range(100000)").num_rows == 100_000
    with pytest.raises(ResourceExhausted, match="a row of the answer"):
        snap.sql("select repeat('x', 51_000_000) as long")


def test_the_time_that_a_question_may_take_ends_it(hasty: ServerProcess) -> None:
    with hasty.connect() as db, db.snapshot() as snap, pytest.raises(ResourceExhausted) as refused:
        snap.sql(LONG)
    assert refused.value.details["limit"] == "sql_timeout_s"


@pytest.mark.timeout(300)
def test_a_question_ends_when_its_client_has_given_up(tmp_path: Path) -> None:
    """Whether it was the first request of its snapshot or not. Else it would keep the only process from others."""
    with (
        ServerProcess(tmp_path / "data", "--set", "sql_processes=1", "--set", "sql_timeout_s=1000") as running,
        running.connect(timeout=100) as patient,
        running.connect(timeout=100) as hasty,
    ):
        patient.create_table("t", key={"id": "int64"}, columns={"x": "int64"})
        for first in (True, False):
            with patient.snapshot() as snap:
                assert snap.sql("select 1 as x").num_rows == 1  # the process is there
            with hasty.snapshot() as snap:
                assert first or not list(snap.scan("t"))
                hasty._core.timeout_s = 1.0
                with pytest.raises(KiviError):
                    snap.sql(LONG)
            hasty._core.timeout_s = 100.0
            with patient.snapshot() as snap:
                assert snap.sql("select 1 as x").num_rows == 1  # before sql_timeout_s


def test_a_value_that_no_machine_holds_costs_its_question_only(snap: Any) -> None:
    with pytest.raises(ResourceExhausted):
        snap.sql("select repeat('x', 4_000_000_000) as huge")
    assert snap.sql("select count(*) as n from calls").to_pylist() == [{"n": ROWS}]


def test_a_process_that_dies_costs_its_question_and_nothing_else(server: ServerProcess, snap: Any) -> None:
    snap.sql("select 1")
    before = spent_s(server)
    met: list[KiviError] = []

    def ask() -> None:
        with connect(server, ROOT) as db, db.snapshot() as other:
            try:
                other.sql(LONG)
            except KiviError as error:
                met.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: spent_s(server) > before + 0.1, reason="no process is at work")
    for process in processes(server):
        os.kill(process, 9)
    thread.join(60)
    assert isinstance(met[0], ResourceExhausted)
    assert "has ended" in str(met[0])
    assert snap.sql("select count(*) as n from calls").to_pylist() == [{"n": ROWS}]  # an idle one that died is replaced


def test_questions_wait_for_a_process_and_give_up_in_time(hasty: ServerProcess) -> None:
    met: list[KiviError | None] = []

    def ask() -> None:
        with hasty.connect() as db, db.snapshot() as snap:
            try:
                snap.sql(LONG)
            except KiviError as error:
                met.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    with hasty.connect() as db:
        assert db.append("calls", [{"ts": 10**9, "x": 0}]) > 0  # commits and reads do not wait for them
        with db.snapshot() as snap:
            assert snap.summary("calls", {"n": kivi.count()}, start=(10**9,))["n"] >= 1
        assert not met
    for thread in threads:
        thread.join(60)
    assert len(met) == 4
    assert all(isinstance(error, ResourceExhausted) for error in met)
    assert len(processes(hasty)) <= 2


def test_those_who_wait_for_a_process_do_not_keep_away_who_has_one(tmp_path: Path) -> None:
    """Beside a server that has time for it: what takes a busy machine long is no part of this."""
    told = ("--set", "sql_processes=2", "--set", "sql_timeout_s=200")
    with ServerProcess(tmp_path / "data", *told) as server:
        those_who_wait(server)


def those_who_wait(server: ServerProcess) -> None:
    text = "select range, repeat('x', 500) as text from range(30000)"

    def ask() -> None:
        with server.connect(timeout=200) as db, db.snapshot() as snap, contextlib.suppress(KiviError):
            snap.sql(text)

    with server.connect(timeout=200) as db, db.snapshot() as snap:
        begun = []
        for _ in range(2):  # as many as there are processes
            request = snap._core._take()[0]
            request.sql.text = text
            begun.append(db._run(snap._core._ask(request)))
        waiting = [threading.Thread(target=ask) for _ in range(12)]
        for thread in waiting:
            thread.start()
        time.sleep(0.3)
        for page in begun:
            rows = 0
            assert page.scan
            while True:
                rows += sum(batch.num_rows for batch in read_batches(page.arrow))
                if not page.scan:
                    break
                page = db._run(snap._core.scan_next(page))
            assert rows == 30_000
        for thread in waiting:
            thread.join(60)


def test_what_reads_ahead_asks_nothing_once_the_question_is_over() -> None:
    """Its answer would be taken for a part of the next question's, whose process is the same."""
    for last in (Kind.END, Kind.ERROR):
        channel, theirs = socket.socketpair()
        with channel, theirs:
            theirs.settimeout(0.2)  # nobody answers
            asks = _Server(theirs, "select 1")
            asks.tell(Kind.RESULT, b"rows")
            asks.tell(last)
            with pytest.raises(Gone):
                asks.ask(Kind.NEXT, b"\0\0\0\0")
            assert [receive(channel)[0] for _ in range(2)] == [Kind.RESULT, last]
            theirs.close()
            with pytest.raises(Gone):
                receive(channel)


def test_an_answer_that_nobody_reads_ends_with_its_snapshot_and_its_process_is_there_again(
    server: ServerProcess,
) -> None:
    with connect(server, ROOT) as db:
        before = db.stats()["server_sql_killed"]
        for _ in range(3):  # more than there are processes
            with db.snapshot() as snap:
                request = snap._core._take()[0]
                request.sql.text = "select range, repeat('x', 500) as text from range(100000)"
                page = db._run(snap._core._ask(request))
                assert page.scan
        wait_until(lambda: db.stats()["server_sql_killed"] >= before + 3)
        with db.snapshot() as snap:
            assert snap.sql("select 1 as one").to_pylist() == [{"one": 1}]


def test_processes_end_with_their_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with server.connect() as db, db.snapshot() as snap:
            snap.sql("select 1")
        begun = processes(server)
        assert begun
        server.kill()
        wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in begun))


def test_a_process_that_the_system_does_not_start_costs_its_question_only(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(Limits(64 << 20, 1, 10.0, 1_000), 1)

    def one() -> list[Any]:
        question = Question("select 1 as one", b"", lambda name: None, list, lambda name: b"[]", lambda spec: iter(()))
        return [
            row for page in workers.answer(question, 30) for batch in read_batches(page) for row in batch.to_pylist()
        ]

    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, most[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for room in (0, 2):  # there are no files for the pipe; or for the process
            for _ in range(room):
                os.close(taken.pop())
            with pytest.raises(Unavailable, match="Too many open files; ask again later"):
                one()
            taken += [os.dup(0) for _ in range(room)]  # what it had taken is there again
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        with monkeypatch.context() as patched, pytest.raises(Unavailable, match="No such file"):
            patched.setattr(sys, "executable", "/nowhere/python")
            one()
        assert one() == [{"one": 1}]  # it is not one of those that may be there
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        for file in taken:
            os.close(file)
        workers.close()


def test_a_transaction_is_no_snapshot(server: ServerProcess) -> None:
    with connect(server, ROOT) as db, db.transaction() as tx:
        request = tx._core._take()[0]
        request.operations.add(kind=5, table="calls")
        request.sql.text = "select 1"
        with pytest.raises(KiviError):
            db._run(tx._core._ask(request))
        tx.rollback()
