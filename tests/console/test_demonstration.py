"""The console on the demonstration's tables, which say by their roles what they are: nothing of them is in the page."""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from apm_demo.endpoints import ENDPOINTS
from apm_demo.tables import LEVELS, ROLES, WIDTHS, create, create_rules, described
from tests.browsers import shown, until
from tests.console.test_console import Stand, cells_of, duration, opened, otlp, table_of

pytestmark = pytest.mark.browser

SLOTS = 6
VIEWS = {"names": "table/endpoints", "anomalies": "table/anomalies_per_endpoint"}
FIND, SUGGEST = (e for e in ENDPOINTS if e.server == "search-1")
SEARCH = {"customer": "acme", "application": "search", "server": "search-1"}
BELOW = "&".join(f"k.{name}={value}" for name, value in SEARCH.items())


def events(began_us: int) -> list[dict[str, Any]]:
    """Of every endpoint, one call more in each slot that has passed. In the last slot but one FIND is slow, and every
    call of SUGGEST fails."""
    return [
        {
            **{name: getattr(e, name) for name in ("customer", "application", "server", "endpoint_id")},
            "ts": began_us + slot * WIDTHS["5s"] + call,
            "duration_us": 10 * e.endpoint_id * (100 if e == FIND and slot == SLOTS - 2 else 1) + call,
            "status": 503 if e == SUGGEST and slot == SLOTS - 2 else 200,
            "trace_id": f"{e.endpoint_id:08x}{slot:08x}{call:016x}",
        }
        for e in ENDPOINTS
        for slot in range(SLOTS)
        for call in range(slot + 1)
    ]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    width = WIDTHS["5s"]
    began_us = (time.time_ns() // 1_000 // width - SLOTS) * width
    with otlp(tmp_path_factory.mktemp("demonstration")) as server, server.connect() as db:
        create(db)
        create_rules(db)
        with db.transaction() as tx:
            for e in ENDPOINTS:
                tx.put("endpoints", (e.endpoint_id,), **described(e))
        found = events(began_us)
        for slot in range(SLOTS):
            db.append("invocations", [e for e in found if (e["ts"] - began_us) // width == slot])
        yield Stand(server)


def test_endpoints_have_their_names_and_what_the_store_says(stand: Stand, browser: Any) -> None:
    opened(browser, stand, f"#/endpoints?range=15m&{BELOW}")
    names = {e.endpoint_id: e.name for e in (FIND, SUGGEST)}
    # Anomalies of the range are asked for once the others have said where it ends.
    until(browser, lambda: {cells[2] for cells in table_of(browser).values()} == {"0", "5"})
    assert table_of(browser).keys() == {*names.values()}
    rolled = stand.rolled("endpoint_5s", by=["server", "endpoint_id"], last="15m")
    listed = table_of(browser)
    for row in (row for row in rolled if row["endpoint_id"] in names):
        cells = listed[names[row["endpoint_id"]]]
        assert cells[0] == f"{row['calls']:,}" == "21"
        assert cells[2] == ("5" if row["endpoint_id"] == FIND.endpoint_id else "0")
        assert cells[3:6] == [duration(row[name]) for name in ("p50_us", "p95_us", "p99_us")]
        assert cells[7:] == [duration(row["slowest_us"]), row["slowest_trace_id"][:8]]
    assert listed[SUGGEST.name][1] == "24 %"
    assert re.search(r"ANOMALIES\s+5\b", shown(browser, ".tiles").upper())
    assert "T = 10 ms" in shown(browser, ".tiles")


def test_one_goes_down_to_an_endpoint_and_up_again(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/services?range=15m")
    until(browser, lambda: table_of(browser).keys() == {e.server for e in ENDPOINTS})
    follow(browser, ".grid tbody a", "search-1")
    until(browser, lambda: FIND.name in table_of(browser))
    follow(browser, ".grid tbody a", FIND.name)
    until(browser, lambda: cells_of(browser, ".path li") == ["Endpoints", *SEARCH.values(), FIND.name])
    until(browser, lambda: len(table_of(browser)) == SLOTS)
    assert browser.title == f"{FIND.name} · kivi"
    follow(browser, ".path a", "acme")
    until(browser, lambda: shown(browser, "h1") == "acme")
    until(browser, lambda: len(cells_of(browser, ".grid tbody tr:not(.space):not([hidden])")) == 6)
    assert "globex" not in shown(browser, "main")


def follow(browser: Any, selector: str, text: str) -> None:
    browser.execute_script(
        "[...document.querySelectorAll(arguments[0])].find((a) => a.textContent === arguments[1]).click()",
        selector,
        text,
    )


def test_anomalies_and_alerts_are_shown(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/rules")
    until(browser, lambda: "Raised into anomalies" in shown(browser, "main"))
    with stand.server.connect() as db, db.snapshot() as snapshot:
        anomalies = list(snapshot.scan("anomalies"))
    assert {row["endpoint_id"] for row in anomalies} == {FIND.endpoint_id} and len(anomalies) == SLOTS - 1
    until(browser, lambda: all(row["trace_id"][:8] in shown(browser, "main") for row in anomalies))
    assert "failing" in shown(browser, "main") and "slow" in shown(browser, "main")


def test_the_trace_of_the_slowest_call_is_opened(stand: Stand, browser: Any) -> None:
    opened(browser, stand, f"#/endpoints?range=15m&{BELOW}&k.endpoint_id={FIND.endpoint_id}")
    until(browser, lambda: shown(browser, "h1") == FIND.name)
    browser.execute_script("document.querySelector('.tiles a').click()")
    until(browser, lambda: len(cells_of(browser, ".spans summary")) == 1)
    assert "251 ms" not in shown(browser, "main") and duration(10 * FIND.endpoint_id * 100 + 4) in shown(
        browser, "main"
    )


def test_a_name_that_changes_is_followed_and_the_past_keeps_the_old_one(stand: Stand, browser: Any) -> None:
    time.sleep(0.01)
    before = stand.watermark().replace(",", "")
    opened(browser, stand, f"#/endpoints?range=15m&{BELOW}")
    until(browser, lambda: FIND.name in table_of(browser))
    call(stand, "GET /found")
    try:
        until(browser, lambda: table_of(browser).keys() == {"GET /found", SUGGEST.name})
        opened(browser, stand, f"#/endpoints?range=15m&{BELOW}&as_of={before}", state="the past")
        until(browser, lambda: table_of(browser).keys() == {FIND.name, SUGGEST.name})
    finally:
        call(stand, FIND.name)


def call(stand: Stand, name: str) -> None:
    with stand.server.connect() as db, db.transaction() as tx:
        tx.put("endpoints", (FIND.endpoint_id,), **{**described(FIND), "name": name})


@pytest.mark.parametrize("view", [*sorted({*ROLES.values()}), "rules"])
def test_every_view_of_them_fits_a_phone(stand: Stand, browser: Any, view: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 320, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    )
    opened(browser, stand, f"#/{VIEWS.get(view, view)}")
    until(browser, lambda: browser.execute_script("return document.querySelector('main h1') !== null"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 320
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_range_is_short_where_slots_are_and_counts_its_own_anomalies_alone(stand: Stand, browser: Any) -> None:
    def ranges() -> list[str]:
        return cells_of(browser, "fieldset.range span")

    with stand.server.connect() as db, db.snapshot() as snapshot:
        (anomaly, *_) = snapshot.scan("anomalies_per_endpoint")
        later = anomaly["slot"] + dt.timedelta(seconds=60)
        call = {
            **{name: anomaly[name] for name in LEVELS["endpoint"]},
            "duration_us": 1,
            "status": 200,
            "trace_id": "a",
        }
        db.append("invocations", [{**call, "ts": later - dt.timedelta(seconds=1)}])
        opened(browser, stand, f"#/endpoints?range=1m&{BELOW}")
        until(browser, lambda: table_of(browser)[FIND.name][2] == "5")  # its slot is the first of this minute
        db.append("invocations", [{**call, "ts": later}])
        until(browser, lambda: table_of(browser)[FIND.name][:3:2] == ["8", "0"])  # six of the slot after it, and two
    assert ranges() == ["1 min", "5 min", "15 min", "1 h", "6 h", "24 h", "7 d", "30 d"]
    opened(browser, stand, f"#/endpoints?range=5m&{BELOW}")
    until(browser, lambda: table_of(browser)[FIND.name][:3:2] == ["23", "5"])
    opened(browser, stand, "#/table/endpoint_5m?range=5m")
    assert (
        ranges()[0] == "15 min"
        and browser.execute_script("return document.querySelector('.range :checked').value") == "15m"
    )
