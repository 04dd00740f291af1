"""The dashboard over a real server: what it answers, and what a browser shows, against the store.

The events are given, not measured: here it is about whether the page shows what the store says.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kivi
from apm_demo import service, trace
from apm_demo.children import Child
from apm_demo.tables import WIDTHS, create
from tests.conftest import require
from tests.serverproc import ServerProcess

START_US = 1_709_315_700_000_000  # 2024-03-01 17:55:00
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def place(e: service.Endpoint) -> dict[str, Any]:
    return {"customer": e.customer, "application": e.application, "server": e.server, "endpoint_id": e.endpoint_id}


def events() -> list[dict[str, Any]]:
    """Every endpoint, 30 slots of 5 s, one call more for each slot that has passed."""
    return [
        {**place(e), "ts": START_US + slot * WIDTHS["5s"] + call, "resp_time_us": 1_000 * e.endpoint_id + slot}
        for e in service.ENDPOINTS
        for slot in range(30)
        for call in range(slot + 1)
    ]


class Stand:
    """A server with tables, its client, and a dashboard."""

    def __init__(self, server: ServerProcess, db: Any, dashboard: Child, address: str) -> None:
        self.server, self.db, self.dashboard, self.address = server, db, dashboard, address

    def fill(self) -> None:
        with self.db.transaction() as tx:
            for e in service.ENDPOINTS:
                where = {name: value for name, value in place(e).items() if name != "endpoint_id"}
                tx.insert("endpoints", (e.endpoint_id,), **where, name=e.name)
            tx.append("invocations", events())
            slow = {**place(service.ENDPOINTS[4]), "ts": START_US + 7, "resp_time_us": 121_000}
            tx.append("anomalies", [{**slow, "previous_sum_us": 30_000, "previous_count": 2, "batch_id": 3}])
            tx.put("batches", (3,), files="part-3.jsonl", events=12_345, anomalies=1)
        columns = ("service", "ts", "context_tokens", "generated_tokens")
        requests = [{**r._asdict(), "ts": r.ts_us} for r in trace.requests()]
        self.db.append("llm_requests", [{name: r[name] for name in columns} for r in requests])

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.address.rstrip("/") + path, timeout=20) as answer:
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


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    """An empty one of the test's own, to fill or to kill."""
    with standing(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """One for all tests that only read."""
    with standing(tmp_path_factory.mktemp("filled")) as made:
        made.fill()
        yield made


def sums(view: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {c["key"]: (sum(s[1] for s in c["slots"]), sum(s[2] for s in c["slots"])) for c in view["children"]}


def recount(column: str, where: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for event in filter(where, events()):
        total, count = found.get(str(event[column]), (0, 0))
        found[str(event[column])] = (total + event["resp_time_us"], count + 1)
    return found


def test_every_level_and_width_agrees_with_the_events(filled: Stand) -> None:
    for width in WIDTHS:
        assert sums(filled.get(f"/api/view?width={width}")) == recount("customer")
        view = filled.get(f"/api/view?width={width}&customer=acme")
        assert sums(view) == recount("application", lambda e: e["customer"] == "acme")
        view = filled.get(f"/api/view?width={width}&customer=acme&application=shop")
        assert sums(view) == recount("server", lambda e: e["application"] == "shop")
        path = f"/api/view?width={width}&customer=acme&application=search&server=search-1"
        assert sums(filled.get(path)) == recount("endpoint_id", lambda e: e["server"] == "search-1")
        assert sums(filled.get(f"{path}&endpoint_id=255")) == recount("endpoint_id", lambda e: e["endpoint_id"] == 255)


def test_a_view_is_of_one_snapshot_and_names_it(filled: Stand) -> None:
    view = filled.get("/api/view")
    assert view["snapshot_ts"] == filled.db.watermark()
    assert view["anomalies_total"] == 1
    (anomaly,) = view["anomalies"]
    assert (anomaly["endpoint_id"], anomaly["resp_time_us"], anomaly["previous_sum_us"]) == (255, 121_000, 30_000)


def test_the_traces_panel(filled: Stand) -> None:
    for width, width_us in {"5m": 300_000_000, "1h": 3_600_000_000}.items():
        found = filled.get(f"/api/llm?width={width}")["services"]
        expected = trace.recount(trace.requests(), width_us)
        assert {(name, r[0]): trace.Row(*r[1:]) for name, rows in found.items() for r in rows} == expected


def test_an_empty_store_is_not_an_error(stand: Stand) -> None:
    view = stand.get("/api/view")
    assert (view["children"], view["anomalies"], view["llm"]["services"], view["batches"]) == ([], [], {}, None)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/view?width=7s", "width is one of"),
        ("/api/view?application=shop", "leaves none out"),
        ("/api/view?customer=acme&endpoint_id=251", "endpoint_id is one of"),
        ("/api/view?customer=acme&application=shop&server=shop-1&endpoint_id=255", "endpoint_id is one of"),
        ("/api/view?customer=acme&application=shop&server=shop-1&endpoint_id=x", "endpoint_id is one of"),
    ],
)
def test_a_bad_question_is_refused_with_its_reason(filled: Stand, path: str, says: str) -> None:
    code, text = filled.refusal(path)
    assert code == 400
    assert says in text


def test_a_server_that_is_away_is_said_and_come_back_from(stand: Stand) -> None:
    stand.fill()
    stand.server.kill()
    code, text = stand.refusal("/api/view")
    assert code == 503
    assert "kivi does not answer" in text
    stand.server.start()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.HTTPError):
            assert sums(stand.get("/api/view")) == recount("customer")
            return
        time.sleep(0.2)
    raise AssertionError("the dashboard did not come back")


# -- in a browser -------------------------------------------------------------------------------------


@pytest.fixture
def browser() -> Iterator[Any]:
    chromium, driver_path = require("chromium"), require("chromedriver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,1400"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        try:
            yield driver
        finally:
            driver.quit()


def shown(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)).strip()


def until(browser: Any, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"the page does not show it: {shown(browser, 'body')}")


def cells(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0] + ' td')].map(cell => cell.innerText.trim())"
    return list(browser.execute_script(script, selector))


@pytest.mark.browser
def test_the_page_shows_what_the_store_says(stand: Stand, browser: Any) -> None:
    browser.get(stand.address)
    until(browser, lambda: shown(browser, "#status-text") == "live")
    assert "nothing to show yet" in shown(browser, "#chart-avg")
    assert browser.find_element("id", "children-empty").is_displayed()
    assert browser.find_element("id", "anomalies-empty").is_displayed()

    stand.fill()  # the page sees it without being loaded again
    until(browser, lambda: shown(browser, "#snapshot") == f"{stand.db.watermark():,}")
    assert shown(browser, "#total-count") == f"{len(events()):,}"
    with stand.db.snapshot() as snapshot:
        rows = list(snapshot.scan("customer_1h"))
    for row in rows:
        found = cells(browser, f"#children tr[data-child={row['customer']}]")
        assert found[:2] == [row["customer"], f"{row['invocations']:,}"]
        assert float(found[2]) == pytest.approx(row["avg_resp_time"] / 1_000, abs=0.51)
    whole = [r for r in trace.requests() if r.service == "code"]
    assert cells(browser, "#services tr[data-service=code]")[:4] == [
        "code", f"{len(whole):,}", f"{sum(r.context_tokens for r in whole):,}",
        f"{sum(r.generated_tokens for r in whole):,}",
    ]  # fmt: skip
    assert shown(browser, "#status-text") == "live"
    found = cells(browser, "#anomalies tbody")
    assert found[0] == "17:55:00"
    assert found[2:] == ["121", "15.0", "8.1\N{MULTIPLICATION SIGN}"]
    assert browser.execute_script("return document.querySelectorAll('#chart-avg svg path').length") == 2
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.browser
def test_down_to_an_endpoint_by_keyboard_and_back_by_the_path(filled: Stand, browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.get(filled.address)
    for key in ("acme", "search", "search-1", "255"):
        selector = f"#children button[data-key='{key}']"
        until(browser, functools.partial(shown, browser, selector))
        browser.execute_script("document.querySelector(arguments[0]).focus()", selector)
        time.sleep(1.2)  # a refresh of the page does not take the focus away
        assert browser.execute_script("return document.activeElement.dataset.key") == key
        ActionChains(browser).send_keys(Keys.ENTER).perform()  # to whatever has the focus, as a person would
    expected = recount("endpoint_id", lambda e: e["endpoint_id"] == 255)["255"]
    until(browser, lambda: shown(browser, "[aria-current]") == "GET /find")
    assert shown(browser, "#total-count") == f"{expected[1]:,}"
    assert "endpoint_id=255" in browser.current_url
    browser.execute_script("""document.querySelector("#path button[data-key='step-0']").click()""")
    until(browser, lambda: shown(browser, "#total-count") == f"{len(events()):,}")


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_sticks_out(filled: Stand, browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(filled.address)
    until(browser, lambda: shown(browser, "#services tbody"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.browser
def test_the_page_says_that_its_numbers_are_old(stand: Stand, browser: Any) -> None:
    stand.fill()
    browser.get(stand.address)
    until(browser, lambda: shown(browser, "#total-count") == f"{len(events()):,}")
    stand.server.kill()
    until(browser, lambda: "kivi does not answer" in shown(browser, "#error"))
    assert shown(browser, "#status-text") == "no new numbers"
    assert shown(browser, "#total-count") == f"{len(events()):,}"
    stand.dashboard.kill()
    until(browser, lambda: "cannot be reached" in shown(browser, "#error"))
