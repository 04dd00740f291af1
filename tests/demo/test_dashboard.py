"""The dashboard over a real server: what it answers, and what a browser shows, against the store.

The events are given, not measured: here it is about whether the page shows what the store says.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import http.client
import json
import socket
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apm_demo import endpoints, trace
from apm_demo.tables import WIDTHS, micros
from apm_demo.views import RANGES
from kivi.model.types import MOMENT_MAX_US
from tests.browsers import cells, press, shown, until
from tests.demo.dashboards import START_US, Stand, events, place, recount, standing, sums
from tests.waiting import wait_until


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    """An empty one of the test's own, to fill or to kill."""
    with standing(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """One for all tests that add events, and leave its processes alone."""
    with standing(tmp_path_factory.mktemp("busy")) as made:
        made.fill()
        yield made


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """One for all tests that only read."""
    with standing(tmp_path_factory.mktemp("filled")) as made:
        made.fill(with_trace=True)
        yield made


@pytest.mark.parametrize("name", RANGES)
def test_every_level_and_range_agrees_with_the_events(filled: Stand, name: str) -> None:
    first = first_shown(name)

    def expected(column: str, where: Callable[[dict[str, Any]], bool] = lambda e: True) -> dict[str, tuple[int, int]]:
        return recount(column, lambda e: e["ts"] >= first and where(e))

    assert sums(filled.get(f"/api/view?range={name}")) == expected("customer")
    view = filled.get(f"/api/view?range={name}&customer=acme")
    assert sums(view) == expected("application", lambda e: e["customer"] == "acme")
    view = filled.get(f"/api/view?range={name}&customer=acme&application=shop")
    assert sums(view) == expected("server", lambda e: e["application"] == "shop")
    path = f"/api/view?range={name}&customer=acme&application=search&server=search-1"
    assert sums(filled.get(path)) == expected("endpoint_id", lambda e: e["server"] == "search-1")
    assert sums(filled.get(f"{path}&endpoint_id=255")) == expected("endpoint_id", lambda e: e["endpoint_id"] == 255)


def test_a_view_is_of_one_snapshot_and_names_it(filled: Stand) -> None:
    view = filled.get("/api/view")
    assert view["snapshot_ts"] == filled.db.watermark()
    assert view["totals"]["anomalies"] == 1
    (anomaly,) = view["anomalies"]["latest"]
    assert (anomaly["endpoint_id"], anomaly["resp_time_us"], anomaly["previous_sum_us"]) == (255, 121_000, 30_000)


def test_errors_and_the_slowest_trace_are_those_of_the_events_shown(filled: Stand) -> None:
    """Of endpoints and of all: 1 min leaves out the slots where other traces are the slowest."""
    path = "&customer=acme&application=search&server=search-1"
    for name in RANGES:
        shown = [e for e in events() if e["ts"] >= first_shown(name)]
        view = filled.get(f"/api/view?range={name}{path}")
        mine = {str(n): [e for e in shown if e["endpoint_id"] == n] for n in (255, 256)}
        assert {key: (c[9], c[10]) for key, c in view["children"].items()} == {
            key: (failed(of), slowest(of)) for key, of in mine.items()
        }
        totals = filled.get(f"/api/view?range={name}")["totals"]
        assert (totals["errors"], totals["slowest_trace_id"]) == (failed(shown), slowest(shown))


def failed(found: list[dict[str, Any]]) -> int:
    return sum(e["status"] >= 500 for e in found)


def slowest(found: list[dict[str, Any]]) -> str:
    return str(max(found, key=lambda e: (e["resp_time_us"], -e["ts"]))["trace_id"])


def first_shown(name: str) -> int:
    chosen = RANGES[name]
    last = START_US + 29 * WIDTHS["5s"]
    return last - last % chosen.width_us - (chosen.slots - 1) * chosen.width_us


def test_the_traces_panel(filled: Stand) -> None:
    for name, width_us in {"5m": 300_000_000, "24h": 3_600_000_000}.items():
        found = filled.get(f"/api/view?range={name}")["llm"]["services"]
        expected = trace.recount(trace.requests(), width_us)
        assert {(name, r[0]): trace.Row(*r[1:-1]) for name, rows in found.items() for r in rows} == expected
        requests = {r.trace_id: r.generated_tokens for r in trace.requests()}
        assert all(requests[r[-1]] == r[5] for rows in found.values() for r in rows)


def test_an_empty_store_is_not_an_error(stand: Stand) -> None:
    view = stand.get("/api/view")
    assert (view["children"], view["anomalies"], view["series"], view["batch"]) == ({}, {"latest": []}, {}, {})
    assert view["llm"]["services"] == {}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/view?range=7s", "a range is one of"),
        ("/api/view?application=shop", "leaves none out"),
        ("/api/live?range=7s", "a range is one of"),
        ("/api/live?server=shop-1", "leaves none out"),
        ("/api/view?as_of=yesterday", "as_of is a moment"),
        ("/api/view?as_of=2709315700000000", "yet to come"),
        ("/api/live?customer=acme&application=shop&server=shop-1&endpoint_id=255", "endpoint_id is one of"),
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

    def shows() -> Any:
        with contextlib.suppress(urllib.error.HTTPError):
            return stand.get("/api/view")

    view = wait_until(shows, reason="the dashboard did not come back", pause_s=0.2)
    assert sums(view) == recount("customer")


def calls(stand: Stand, level: str = "customer", **place: Any) -> int:
    """How many the store has."""
    with stand.db.snapshot() as snapshot:
        rows = snapshot.scan(f"{level}_1h")
        return sum(row["invocations"] for row in rows if all(row[name] == value for name, value in place.items()))


# -- streams ------------------------------------------------------------------------------------------


class Stream:
    """A browser's stream: what it is told, and the state that it would show."""

    def __init__(self, stand: Stand, path: str) -> None:
        self._connection = http.client.HTTPConnection(stand.address.split("/")[2], timeout=60)
        self._connection.request("GET", path)
        self._answer = self._connection.getresponse()
        self.state: dict[str, dict[str, Any]] = {}
        self.ts = 0

    def next(self) -> str:
        """The kind of the next message; the state is what it says."""
        lines = []
        while line := self._answer.readline().decode().rstrip("\n"):
            lines.append(line)
        if not lines[0].startswith("event: "):
            return self.next()
        kind = lines[0].removeprefix("event: ")
        about, data = (json.loads(line.removeprefix("data: ")) for line in lines[1:])
        if kind == "state":
            self.state = data
        elif kind == "change":
            for section, values in data["set"].items():
                self.state[section].update(values)
            for section, names in data["gone"].items():
                for name in names:
                    del self.state[section][name]
        self.ts = about["ts"]
        return kind

    def until(self, ts: int) -> None:
        while self.ts < ts:
            self.next()

    def close(self) -> None:
        self._connection.close()
        self._answer.close()


def counts(stand: Stand) -> tuple[int, ...]:
    found = stand.get("/api/status")
    return found["browsers"], found["views"], found["subscriptions"]


def test_changes_lead_to_the_states_that_are_read(stand: Stand) -> None:
    """Through an empty store, its events, and a window that slides on: each state is what a snapshot says."""
    ways = ["customer=acme", "customer=acme&application=shop&server=shop-1&endpoint_id=251"]
    with stand.db.transaction() as tx:
        for e in endpoints.ENDPOINTS:
            where = {name: value for name, value in place(e).items() if name != "endpoint_id"}
            tx.insert("endpoints", (e.endpoint_id,), **where, name=e.name)
    streams = {f"range=1m&{way}": Stream(stand, f"/api/live?range=1m&{way}") for way in ways}
    for slots in ([], [0], [1, 2], [30], [29, 31], [60, 61]):
        made = [
            {**place(e), "ts": START_US + slot * WIDTHS["5s"], "resp_time_us": 100 + e.endpoint_id + slot}
            for e in endpoints.ENDPOINTS
            for slot in slots
        ]
        if made:
            stand.db.append("invocations", made)
        for question, stream in streams.items():
            stream.until(stand.db.watermark())
            read = stand.get(f"/api/view?{question}")
            assert read.pop("snapshot_ts") == stream.ts
            assert stream.state == read
    for stream in streams.values():
        stream.close()


def test_browsers_share_what_they_look_at(filled: Stand) -> None:
    until_left(filled)
    first, second = (Stream(filled, "/api/live?range=5m&customer=acme") for _ in range(2))
    other = Stream(filled, "/api/live?range=5m&customer=globex")
    for stream in (first, second, other):
        stream.until(filled.db.watermark())
    assert first.state == second.state
    browsers, views, subscriptions = counts(filled)
    assert (browsers, views) == (3, 2)
    assert subscriptions == 7 + 2  # its own rows and anomalies; names, slots, counts, trace and batches are the same
    for stream in (first, second, other):
        stream.close()
    until_left(filled)


def until_left(stand: Stand) -> None:
    wait_until(lambda: counts(stand) == (0, 0, 0), reason="subscriptions are held for nobody", pause_s=0.05)


def test_a_browser_that_does_not_read_holds_nobody_up(busy: Stand) -> None:
    stand, before = busy, calls(busy)
    host, _, port = stand.address.split("/")[2].partition(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        slow.connect((host, int(port)))
        slow.sendall(b"GET /api/live?range=5m HTTP/1.1\r\nHost: x\r\n\r\n")
        reading = Stream(stand, "/api/live?range=5m")
        for _ in range(5):
            stand.db.append("invocations", [{**place(endpoints.ENDPOINTS[0]), "ts": START_US, "resp_time_us": 9}])
            reading.until(stand.db.watermark())
        assert reading.state["totals"]["count"] == before + 5
        reading.close()


# -- in a browser -------------------------------------------------------------------------------------


@pytest.mark.browser
def test_the_page_shows_what_the_store_says(stand: Stand, browser: Any) -> None:
    browser.get(stand.address)
    until(browser, lambda: shown(browser, "#status-text") == "live")
    assert "nothing to show yet" in shown(browser, "#chart-avg")
    assert browser.find_element("id", "children-empty").is_displayed()
    assert browser.find_element("id", "anomalies-empty").is_displayed()

    stand.fill(with_trace=True)  # the page sees it without being loaded again
    until(browser, lambda: shown(browser, "#snapshot") == f"{stand.db.watermark():,}")
    assert shown(browser, "#total-count") == f"{len(events()):,}"
    with stand.db.snapshot() as snapshot:
        rows = list(snapshot.scan("customer_1h"))
    for row in rows:
        found = cells(browser, f"#children tr[data-child={row['customer']}]")
        assert found[:2] == [row["customer"], f"{row['invocations']:,}"]
        assert float(found[2]) == pytest.approx(row["avg_resp_time"] / 1_000, abs=0.51)
        mine = [e for e in events() if e["customer"] == row["customer"]]
        assert found[4] == slowest(mine)
        assert [float(text) for text in found[5:8]] == pytest.approx(
            [row[name] / 1_000 for name in ("p50", "p95", "p99")], abs=0.51
        )
        assert found[8] == f"{100 * failed(mine) / len(mine):.1f} %"
        assert float(found[9]) == pytest.approx(row["apdex"], abs=0.005)
    assert shown(browser, "#total-trace") == slowest(events())
    assert shown(browser, "#total-errors").split() == [
        f"{100 * failed(events()) / len(events()):.1f}", "%", f"({failed(events())})",
    ]  # fmt: skip
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


def focused(browser: Any) -> str:
    return str(browser.execute_script("return document.activeElement.dataset.key ?? document.activeElement.id"))


@pytest.mark.browser
def test_down_to_an_endpoint_by_keyboard_and_back_by_the_path(busy: Stand, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    stand, at_first, of_endpoint = busy, calls(busy), calls(busy, "endpoint", endpoint_id=255)
    browser.get(stand.address)
    until(browser, lambda: shown(browser, "#total-count") == f"{at_first:,}")
    browser.execute_script("window.loaded = performance.getEntriesByType('resource').length")
    more = 0
    for key in ("acme", "search", "search-1", "255"):
        selector = f"#children button[data-key='{key}']"
        until(browser, functools.partial(shown, browser, selector))
        browser.execute_script("document.querySelector(arguments[0]).focus()", selector)
        before = shown(browser, "#total-count")
        stand.db.append("invocations", [{**place(endpoints.ENDPOINTS[4]), "ts": START_US, "resp_time_us": 1}])
        more += 1
        until(browser, functools.partial(lambda before: shown(browser, "#total-count") != before, before))
        assert focused(browser) == key  # an update does not take the focus away
        press(browser, Keys.ENTER)
    until(browser, lambda: shown(browser, "[aria-current]") == "GET /find")
    until(browser, lambda: shown(browser, "#total-count") == f"{of_endpoint + more:,}")
    assert "endpoint_id=255" in browser.current_url
    # Four views were asked for, as streams; nothing else was.
    assert browser.execute_script("return performance.getEntriesByType('resource').length - loaded") <= more
    assert focused(browser) == "here"
    press(browser, Keys.TAB, Keys.SHIFT)
    assert focused(browser) == "step-3"
    press(browser, Keys.ENTER)
    until(browser, lambda: shown(browser, "[aria-current]") == "search-1" and cells(browser, "#children tr")[1:])
    browser.execute_script("""document.querySelector("#path button[data-key='step-0']").click()""")
    until(browser, lambda: shown(browser, "#total-count") == f"{at_first + more:,}")
    browser.back()
    until(browser, lambda: shown(browser, "[aria-current]") == "search-1")


@pytest.mark.browser
def test_columns_are_sorted_by_their_headers(filled: Stand, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(f"{filled.address}#range=5m&customer=acme&application=search&server=search-1")
    until(browser, lambda: cells(browser, "#children tbody tr"))
    listed = "return [...document.querySelectorAll('#children tbody tr')].map((row) => row.dataset.child)"
    assert browser.execute_script(listed) == ["255", "256"]
    browser.execute_script("document.querySelectorAll('#children th button')[3].focus()")
    for sort, expected in (("descending", ["256", "255"]), ("ascending", ["255", "256"])):
        press(browser, Keys.ENTER)
        assert browser.execute_script(listed) == expected
        assert browser.find_elements("css selector", "#children th")[3].get_attribute("aria-sort") == sort
        assert len(browser.find_elements("css selector", "#children th[aria-sort]")) == 1


@pytest.mark.browser
def test_the_past_is_marked_and_stays_as_it_was(busy: Stand, browser: Any) -> None:
    stand, all_then, acme_then = busy, calls(busy), calls(busy, customer="acme")
    then = stand.db.watermark()
    time.sleep(0.01)
    moment_us = micros(dt.datetime.now(dt.UTC))
    time.sleep(0.01)
    more = [{**place(endpoints.ENDPOINTS[0]), "ts": START_US, "resp_time_us": 9}]
    stand.db.append("invocations", more)
    browser.get(f"{stand.address}#range=5m&as_of={moment_us}")
    until(browser, lambda: shown(browser, "#status-text") == "the past")
    assert shown(browser, "#snapshot") == f"{then:,}"
    assert shown(browser, "#total-count") == f"{all_then:,}"
    assert "it does not change" in shown(browser, "#past")
    stand.db.append("invocations", more)
    browser.execute_script("document.querySelector('#children button[data-key=acme]').click()")  # also further down
    until(browser, lambda: shown(browser, "#total-count") == f"{acme_then:,}")
    assert f"as_of={moment_us}" in browser.current_url
    browser.find_element("id", "to-live").click()
    until(browser, lambda: shown(browser, "#total-count") == f"{acme_then + 2:,}")
    assert shown(browser, "#status-text") == "live"
    assert not browser.find_element("id", "past").is_displayed()

    # What no moment of a table could be: said once, and not asked for again.
    browser.get(f"{stand.address}#range=5m&customer=acme&application=shop&server=shop-1&endpoint_id=255")
    until(browser, lambda: "Choose another place" in shown(browser, "#error"))
    assert shown(browser, "#status-text") == "not shown"
    browser.get(f"{stand.address}#range=5m")
    until(browser, lambda: shown(browser, "#total-count") == f"{all_then + 2:,}")
    assert shown(browser, "#newest") == "2024-03-01 17:57:25 UTC"

    # A moment before all, through the form: nothing of another moment stays on the page under its name.
    browser.execute_script("document.getElementById('moment').value = '2001-02-03T04:05:06'")
    browser.find_element("css selector", "#as-of button").click()
    until(browser, lambda: "ask for a later moment" in shown(browser, "#error"))
    assert shown(browser, "#past-when") == "2001-02-03 04:05:06 UTC."
    assert not browser.find_element("id", "total-count").is_displayed()
    assert shown(browser, "#snapshot") == "\N{EN DASH}"


def test_a_clock_that_is_ahead_does_not_take_the_page_away(stand: Stand) -> None:
    """What comes from tomorrow, or from the end of the calendar, is in the store and in no range that ends now."""
    now_us = micros(dt.datetime.now(dt.UTC))
    ahead = [
        {**place(endpoints.ENDPOINTS[0]), "ts": at, "resp_time_us": 5}
        for at in (now_us + 86_400_000_000, MOMENT_MAX_US)
    ]
    stand.db.append("invocations", [{**place(endpoints.ENDPOINTS[0]), "ts": now_us, "resp_time_us": 9}] * 3)
    stand.db.append("invocations", ahead)
    for name in RANGES:
        view = stand.get(f"/api/view?range={name}")
        assert (view["totals"]["count"], view["totals"]["sum"]) == (3, 27)
        assert view["head"]["last"] <= now_us


@pytest.mark.browser
def test_any_name_has_a_row_and_its_own_page(stand: Stand, browser: Any) -> None:
    names = ["", "__proto__", "constructor", "<b>bold</b>", "GET /api/v2/organizations/{organization_id}/members"]
    calls = [
        {"customer": name, "application": name, "server": name, "endpoint_id": n, "ts": START_US, "resp_time_us": 9}
        for n, name in enumerate(names, start=1)
        for _ in range(n)
    ]
    with stand.db.transaction() as tx:
        for n, name in enumerate(names, start=1):
            tx.insert("endpoints", (n,), customer=name, application=name, server=name, name=name)
    stand.db.append("invocations", calls[:-1])
    browser.get(stand.address)
    until(browser, lambda: shown(browser, "#total-count") == f"{len(calls) - 1}")
    stand.db.append("invocations", calls[-1:])  # as a difference, too
    until(browser, lambda: shown(browser, "#total-count") == f"{len(calls)}")
    listed = (
        "[...document.querySelectorAll('#children tbody tr')].map((row) => [row.dataset.child, row.cells[1].innerText])"
    )
    assert sorted(browser.execute_script(f"return {listed}")) == sorted(
        [name, f"{n}"] for n, name in enumerate(names, start=1)
    )
    browser.execute_script("document.querySelector('#children button[data-key=\"\"]').click()")
    until(browser, lambda: shown(browser, "#path").replace("\n", " ").endswith("(no name)"))
    until(browser, lambda: shown(browser, "#total-count") == "1")
    assert browser.current_url.endswith("customer=")
    metrics = {"width": 320, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    path = "&".join(f"{level}={names[-1]}" for level in ("customer", "application", "server"))
    browser.get(f"{stand.address}#{path}&endpoint_id={len(names)}")
    until(browser, lambda: shown(browser, "#total-count") == f"{len(names)}")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 320


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 1280])
def test_nothing_sticks_out(filled: Stand, browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(filled.address)
    until(browser, lambda: shown(browser, "#services tbody"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.browser
def test_the_page_says_that_its_numbers_are_old_and_comes_back(stand: Stand, browser: Any) -> None:
    stand.fill()
    browser.get(stand.address)
    until(browser, lambda: shown(browser, "#total-count") == f"{len(events()):,}")
    stand.server.kill()
    until(browser, lambda: "kivi does not answer" in shown(browser, "#error"))
    assert shown(browser, "#status-text") == "reconnecting"
    assert shown(browser, "#total-count") == f"{len(events()):,}"
    stand.server.start()
    stand.db.append("invocations", [{**place(endpoints.ENDPOINTS[0]), "ts": START_US, "resp_time_us": 9}])
    until(browser, lambda: shown(browser, "#total-count") == f"{len(events()) + 1:,}")
    until(browser, lambda: shown(browser, "#status-text") == "live")
    assert not browser.find_element("id", "error").is_displayed()
    stand.dashboard.kill()
    until(browser, lambda: "cannot be reached" in shown(browser, "#error"))
    assert shown(browser, "#status-text") == "reconnecting"
