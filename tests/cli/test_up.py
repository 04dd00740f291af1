"""``kivi up`` as somebody tries it: a server, spans over HTTP, percentiles, exact after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

import kivi
from kivi.cli.commands import main
from tests.otlp import Recorder
from tests.serverproc import ROOT

PORTS = ("--listen", "localhost:0", "--otlp", "localhost:0", "--http", "localhost:0,localhost:0")


@contextlib.contextmanager
def running(path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, list[str]], str]]:
    """The process, its addresses by what they are, and what it said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "kivi.cli", "up", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=path, env=environment) as process:
        try:
            assert process.stdout is not None
            found, said = dict[str, list[str]](), ""
            for line in process.stdout:
                said += line
                what, is_one, address = line.strip().partition(" on ")
                if is_one:
                    found.setdefault(what, []).append(address)
                if what == "listening":
                    break
            yield process, found, said
        finally:
            process.kill()


def test_from_nothing_to_percentiles_and_through_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = list(Recorder().spans(200))
    with running(tmp_path, *PORTS) as (process, found, said):
        assert "kivi is up" in said and "OTEL_EXPORTER_OTLP_ENDPOINT=" in said and str(tmp_path / "kivi-data") in said
        assert "TEMPORALITY_PREFERENCE=delta" in said  # what its metrics are refused without
        assert "OTEL_LOGS_EXPORTER=none" in said  # agents that send logs unasked are answered 404
        assert len(found["http"]) == 2
        for address in found["http"]:
            with urllib.request.urlopen(f"{address}/healthz") as answer:
                assert answer.status == 200
        send(found["http"][0], spans[:120])
        process.send_signal(signal.SIGKILL)
        process.wait()
    with running(tmp_path, *PORTS) as (process, found, _):
        send(found["http"][1], spans)  # of which most come again
        (endpoint,) = found["listening"]
        with kivi.connect(endpoint) as db, db.snapshot() as snap:
            kept = [*snap.scan("invocations")]
            rolled = [*snap.rollup("invocations_endpoint_5m", by=["route"])]
        assert sum(row["calls"] for row in rolled) == len(kept) > 0
        assert len({row["span_id"] for row in kept}) == len(kept)
        wanted = ("--by", "service,route", "--columns", "calls,p50_us,p99_us", "-o", "json")
        assert main(["--endpoint", endpoint, "rollup", "invocations_endpoint_5m", *wanted]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert sum(row["calls"] for row in shown) == len(kept) and all(row["p99_us"] >= row["p50_us"] for row in shown)
        asked = quote("sum(invocations_endpoint_5m_calls)")
        with urllib.request.urlopen(f"{found['http'][0]}/api/v1/query?query={asked}") as answer:
            assert json.load(answer)["status"] == "success"
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0


def send(address: str, spans: Sequence[Any]) -> None:
    request = urllib.request.Request(
        f"{address}/v1/traces",
        encode_spans(spans).SerializeToString(),
        {"Content-Type": "application/x-protobuf"},
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200


def test_what_is_given_stands_in_for_what_it_would_choose(tmp_path: Path) -> None:
    given = (*PORTS[:4], "--data", "mine", "--http", "localhost:0")
    with running(tmp_path, *given) as (_, found, said):
        assert len(found["http"]) == 1 and str(tmp_path / "mine") in said
        for address in (*found["http"], *found["otlp"]):  # what is to be set names the ports that are real
            assert f"OTEL_EXPORTER_OTLP_ENDPOINT=http://{address.removeprefix('http://')} " in said
    assert not (tmp_path / "kivi-data").exists()


def test_a_file_does_too_and_what_is_in_force_can_be_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "kivi.toml"
    config.write_text('data = "theirs"\notlp = "localhost:5317"\n')
    assert main(["up", "--config", str(config), "--http", "localhost:8421", "--print-settings"]) == 0
    found = capsys.readouterr().out.splitlines()
    for name, value, source in (
        ("data", "theirs", config),
        ("otlp", "localhost:5317", config),
        ("http", "localhost:8421", "its flag"),
    ):
        (line,) = (line for line in found if line.startswith(f"{name} = "))
        assert line.split("# ") == [f'{name} = "{value}"'.ljust(44), f"from {source}"]
    assert main(["up", "--print-settings"]) == 0
    assert 'data = "kivi-data"'.ljust(44) + "# from kivi up" in capsys.readouterr().out
