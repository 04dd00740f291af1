"""What the server logs: by whom and about which request, as text or as JSON."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from kivi_server import logs

from kivi.wire.methods import path
from kivi.wire.v1 import service_pb2
from tests.serverproc import ServerProcess
from tests.waiting import wait_until


@pytest.fixture
def record() -> logging.LogRecord:
    made = logging.LogRecord("kivi.server", logging.WARNING, __file__, 1, "it took %d", (7,), None)
    made.request, made.call, made.ms = "abc/1", "Append", 1234
    return made


def test_text_and_json_have_the_same_facts(record: logging.LogRecord) -> None:
    line = logs._Text().format(record)
    assert line.endswith("WARNING kivi.server: it took 7 [call=Append request=abc/1 ms=1234]")
    found = json.loads(logs._Json().format(record))
    assert found.pop("at").endswith("Z")
    assert found == {
        "level": "warning", "logger": "kivi.server", "message": "it took 7", "call": "Append", "request": "abc/1",
        "ms": 1234,
    }  # fmt: skip


@pytest.mark.parametrize("given", ["", "x" * 101, "two\nlines", b"bytes"])
def test_a_request_id_that_would_spoil_the_log_is_not_taken(given: Any) -> None:
    assert logs.request_id([("x-request-id", given)]) not in (given, "")
    assert logs.request_id([("x-request-id", "mine-1")]) == "mine-1"
    assert logs.request_id([]) != logs.request_id([])


def test_slow_calls_are_logged_with_the_callers_id(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--log-format", "json", "--slow-call", "0") as server:
        with server.connect() as db:
            db.create_table("t", key={"id": "int64"}, columns={"v": "string"})
            with db.transaction() as tx:
                tx.put("t", (1,), v="secret")
                tx.get("t", (1,))
        with grpc.insecure_channel(server.endpoint) as channel:
            describe = channel.unary_unary(path("Describe"), lambda data: data, lambda data: data)
            request = service_pb2.DescribeRequest(name="t").SerializeToString()
            describe(request, metadata=(("x-request-id", "mine-42"),), timeout=60)
        said = wait_until(lambda: [line for line in server.output if "mine-42" in line])
        lines = [json.loads(line) for line in server.output if line.startswith("{")]
        assert server.stop() == 0
    (mine,) = [json.loads(line) for line in said]
    assert (mine["level"], mine["call"], mine["code"], mine["message"]) == (
        "warning", "Describe", "OK", "a call took long",
    )  # fmt: skip
    session = [line for line in lines if line.get("call") == "Session/get"]
    assert session and all(len(line["request"].split("/")) == 2 and line["client"] for line in session)
    assert not [line for line in server.output if "secret" in line]


def test_a_log_format_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="text or json"):
        ServerProcess(tmp_path / "data", "--log-format", "xml").start()


def test_quick_calls_are_not_logged(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--slow-call", "60") as server:
        with server.connect() as db:
            db.create_table("t", key={"id": "int64"}, columns={"v": "string"})
        assert server.stop() == 0
        assert not [line for line in server.output if "took long" in line]
