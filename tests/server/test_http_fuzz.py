"""Questions that are made from the application's own description: each gets an answer that the description names.

Schemathesis (a process of its own) makes valid and invalid requests of every route, and judges each answer: a status, a
content type and a body as described. A 500 is not described anywhere.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kivi_server.http.description import described

import kivi
from tests.server.test_http import base
from tests.serverproc import ServerProcess

# A snapshot that has not come is waited for: a reader's guesses would only sleep. (A hook of bodies does not see those
# that are enumerated from the description; one of calls sees them all.)
SETTINGS = """
hooks = "guesses.py"
request-timeout = 60

[parameters]
"path.table" = ["accounts", "calls"]
"query.table" = ["accounts", "calls"]
"query.min_snapshot" = 1
"""
GUESSES = """
import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    if isinstance(case.body, dict) and isinstance(case.body.get("min_snapshot"), int):
        case.body["min_snapshot"] = min(case.body["min_snapshot"], 1)
"""
# Follows for ever. Its answers are read by tests of their own.
STREAM = "/v1/live"


@pytest.mark.story
@pytest.mark.timeout(500)
def test_no_request_gets_an_answer_that_is_not_described(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    (tmp_path / "guesses.py").write_text(GUESSES)
    with ServerProcess(tmp_path / "data", "--http", "localhost:0") as server:
        with server.connect() as db:
            db.create_table("accounts", key={"id": "int64"}, columns={"name": "string", "n": kivi.sum("decimal(12,2)")})
            db.create_event_table("calls", event_time="ts", columns={"id": "int64", "ts": "timestamp", "us": "int64"})
        description = f"{base(server)}/openapi.json"
        command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "run", description, "--exclude-path", STREAM]
        checks = "status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
        options = ["--phases", "coverage,fuzzing", "--max-examples", "10", "--continue-on-failure", "--checks", checks]
        ran = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
        routes = sum(map(len, described(kivi.__version__)["paths"].values()))
        assert f"Tested: {routes - 1}" in ran.stdout  # every route but the stream
        with server.connect() as db:
            assert db.tables() == ["accounts", "calls"]
