"""What tests of the dashboard share: a server with tables, its client and a dashboard; given events; a page's texts."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kivi
from apm_demo import endpoints, trace
from apm_demo.children import Child
from apm_demo.tables import WIDTHS, create
from tests.serverproc import ServerProcess

START_US = 1_709_315_700_000_000  # 2024-03-01 17:55:00


def place(e: endpoints.Endpoint) -> dict[str, Any]:
    return {"customer": e.customer, "application": e.application, "server": e.server, "endpoint_id": e.endpoint_id}


def events() -> list[dict[str, Any]]:
    """Every endpoint, 30 slots of 5 s, one call more for each slot that has passed; every ninth of them fails."""
    return [
        {
            **place(e),
            "ts": START_US + slot * WIDTHS["5s"] + call,
            "resp_time_us": 1_000 * e.endpoint_id + slot * 17 % 30,
            "status": 503 if call % 9 == 8 else 200,
            "trace_id": f"{e.endpoint_id:08x}{slot:08x}{call:016x}",
        }
        for e in endpoints.ENDPOINTS
        for slot in range(30)
        for call in range(slot + 1)
    ]


class Stand:
    """A server with tables, its client, and a dashboard."""

    def __init__(self, server: ServerProcess, db: Any, dashboard: Child, address: str) -> None:
        self.server, self.db, self.dashboard, self.address = server, db, dashboard, address

    def fill(self, *, with_trace: bool = False) -> None:
        with self.db.transaction() as tx:
            for e in endpoints.ENDPOINTS:
                where = {name: value for name, value in place(e).items() if name != "endpoint_id"}
                tx.insert("endpoints", (e.endpoint_id,), **where, name=e.name)
            tx.append("invocations", events())
            slow = {**place(endpoints.ENDPOINTS[4]), "ts": START_US + 7, "resp_time_us": 121_000}
            tx.append("anomalies", [{**slow, "previous_sum_us": 30_000, "previous_count": 2}])
            tx.put("batches", (3,), files="part-3.jsonl", events=12_345)
        if with_trace:
            self.fill_trace()

    def fill_trace(self) -> None:
        requests = [r._asdict() for r in trace.requests()]
        self.db.append("llm_requests", [{"ts": r.pop("ts_us"), **r} for r in requests])

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.address.rstrip("/") + path, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def refusal(self, path: str) -> tuple[int, str]:
        try:
            self.get(path)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)["error"]
        raise AssertionError(f"{path} was answered")


@contextlib.contextmanager
def standing(folder: Path) -> Iterator[Stand]:
    with ServerProcess(folder / "store") as server, kivi.connect(server.endpoint) as db:
        create(db)
        dashboard = Child("dashboard", folder / "log", "apm_demo.dashboard", "--endpoint", server.endpoint)
        try:
            yield Stand(server, db, dashboard, dashboard.wait_for("ready", 60))
        finally:
            dashboard.stop(5)


def sums(view: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Child -> (sum of response times, invocations)."""
    return {key: (c[2], c[1]) for key, c in view["children"].items()}


def recount(column: str, where: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for event in filter(where, events()):
        total, count = found.get(str(event[column]), (0, 0))
        found[str(event[column])] = (total + event["resp_time_us"], count + 1)
    return found
