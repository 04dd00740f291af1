"""A stranger's first minutes: kivi is installed, a service is instrumented, its p99 is in a browser.

From an empty home and the wheel, by the commands of ``docs/howto/otlp.md`` and what ``kivi up`` prints: the service
(FastAPI under ``opentelemetry-instrument``) knows nothing of kivi. What it takes is printed (``pytest -s``): from the
first command to the first percentile on the page, the packages that kivi needs being there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import kivi
from tests.browsers import until
from tests.console.test_console import table_of
from tests.ports import Port
from tests.waiting import wait_until
from tests.wheels import installed

SERVICE = """
import time
from fastapi import FastAPI

app = FastAPI()


@app.get("/orders/{number}")
def order(number: int) -> int:
    time.sleep(0.05 if number == 7 else 0.001)
    return number
"""
ROUTE = "/orders/{number}"
CALLS = 200


@contextmanager
def running(*command: str, cwd: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with open(cwd / f"{Path(command[0]).name}.log", "w") as output:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def said(folder: Path, name: str, pattern: str) -> Any:
    """What a process said that the pattern describes, once it has."""
    log = folder / f"{name}.log"
    wait_until(lambda: log.exists() and re.search(pattern, log.read_text()) is not None, timeout_s=90)
    return re.search(pattern, log.read_text())


def percentiles(browser: Any, page: str) -> list[str]:
    """What the page shows of the service's endpoint, once all calls are in it."""
    browser.get("about:blank")
    browser.get(f"{page}#/endpoints")
    until(browser, lambda: table_of(browser).get(ROUTE, [""] * 3)[2] == f"{CALLS}")
    return table_of(browser)[ROUTE]


@pytest.mark.story
@pytest.mark.browser
def test_from_an_empty_home_to_a_percentile_in_a_browser(wheel: Path, tmp_path: Path, browser: Any) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "service.py").write_text(SERVICE)
    env = {"HOME": str(home), "PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
    held = [Port() for _ in range(5)]
    listen, http, grpc, otlp, port = (each.number for each in held)
    ports = f"--listen localhost:{listen} --http localhost:{http},localhost:{otlp} --otlp localhost:{grpc}".split()

    began = time.monotonic()
    kivi_up = [str(installed(wheel, tmp_path / "venv") / "kivi"), "up", *ports]
    with running(*kivi_up, cwd=home, env=env) as server:
        exports = said(home, "kivi", r"export (OTEL_\S+)=(\S+) (OTEL_\S+)=(\S+)").groups()
        page = said(home, "kivi", r"(http://\S+/) in a browser")[1]
        told = {exports[0]: exports[1], exports[2]: exports[3]}
        with running(
            str(Path(sys.executable).parent / "opentelemetry-instrument"),
            *f"--service_name shop uvicorn service:app --port {port}".split(),
            cwd=home,
            env=env | told | {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "OTEL_METRICS_EXPORTER": "none"},
        ) as service:
            said(home, "opentelemetry-instrument", "Uvicorn running")
            with httpx.Client(base_url=f"http://localhost:{port}", timeout=60) as client:
                for number in range(CALLS):
                    assert client.get(f"/orders/{number % 10}").json() == number % 10
            row = percentiles(browser, page)
            print(f"\nfrom the wheel to p99 = {row[6]} in the browser: {time.monotonic() - began:.1f} s")
            service.send_signal(signal.SIGTERM)
            service.wait(60)
        server.kill()
        server.wait()

    with running(*kivi_up, cwd=home, env=env):
        said(home, "kivi", "in a browser")
        assert percentiles(browser, page) == row
        with kivi.connect(f"localhost:{listen}") as db, db.snapshot() as snapshot:
            (sums,) = snapshot.rollup("invocations_endpoint_5m", by=["route"])
            took = sorted(event["duration_us"] for event in snapshot.scan("invocations"))
    assert len(took) == CALLS
    for name, rank in (("p50_us", CALLS // 2), ("p99_us", CALLS * 99 // 100)):  # nearest rank
        assert sums[name] == pytest.approx(took[rank - 1], rel=0.011)
    assert sums["p99_us"] > 50_000 > sums["p50_us"]
