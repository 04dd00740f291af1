"""What a person has to be able to read: names beside numbers, whole labels, and no number for another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import kivi
from tests.browsers import shown, until
from tests.console.test_console import Stand, _span, cells_of, opened, otlp, table_of

ENDPOINT = "endpoints?k.namespace=&k.service=shop&k.route=/cart&k.method=GET"


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with otlp(tmp_path_factory.mktemp("clarity")) as server:
        made = Stand(server)
        said: dict[str, Any] = {"http.request.method": "GET"}
        for slots_ago in (0, 4, 8):  # with nothing between them
            made.send("shop", "/cart", made.now_s - 300 * slots_ago, 1_000, **said)
        for number in range(150):
            made.send("shop", "/almost", made.now_s - 600, 10, error=number > 0, **said)
        made.send("shop", "/slow", made.now_s, 5_400_000, **said)
        yield made


def sized(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("view", ["endpoints", "endpoints?compare=1w", ENDPOINT])
def test_what_a_row_is_of_has_room(stand: Stand, browser: Any, view: str, width: int) -> None:
    sized(browser, width)
    opened(browser, stand, f"#/{view}")
    until(browser, lambda: table_of(browser))
    if "compare" in view:
        until(browser, lambda: "(" in shown(browser, "main table"))
    name = "const cell = document.querySelector('main tbody th'); return [cell.clientWidth, cell.scrollWidth]"
    room, wanted = browser.execute_script(name)
    assert room >= max(wanted, 100), "a short name or a time of day is cut"
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_most_is_not_all_and_durations_go_over_to_the_next_unit(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/endpoints")
    until(browser, lambda: table_of(browser).keys() == {"/cart", "/almost", "/slow"})
    assert "99.3 %" in table_of(browser)["/almost"]
    script = "return import('/console/format.js').then(({ duration }) => arguments[0].map(duration))"
    times = [999, 9_949, 9_960, 999_700, 9_996_000, 59_970_000]
    assert browser.execute_script(script, times) == ["999 µs", "9.9 ms", "10 ms", "1.00 s", "10.0 s", "1.0 min"]


def test_a_chart_has_whole_labels_and_every_value(stand: Stand, browser: Any) -> None:
    """Labels are drawn on a canvas, so what is drawn there is written down."""
    browser.get("about:blank")
    write = (
        "const draw = CanvasRenderingContext2D.prototype.fillText; window.texts = [];"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {"
        "const left = new DOMMatrix(this.getTransform()).transformPoint({ x, y }).x;"
        "const width = this.measureText(text).width; const at = this.textAlign;"
        "texts.push([text, left - (at === 'right' || at === 'end' ? width : at === 'center' ? width / 2 : 0)]);"
        "return draw.call(this, text, x, y, ...more); };"
        "const arc = Path2D.prototype.arc; window.dots = 0;"
        "Path2D.prototype.arc = function (...all) { dots += 1; return arc.apply(this, all); };"
    )
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": write})
    try:
        opened(browser, stand, "#/endpoints?k.namespace=&k.service=shop&k.route=/slow&k.method=GET")
        until(browser, lambda: browser.execute_script("return texts.some(([text]) => text.endsWith('min'))"))
        texts = dict(browser.execute_script("return texts"))
        assert {"20 min", "40 min", "60 min"} <= texts.keys() or {"30 min", "60 min", "90 min"} <= texts.keys()
        assert min(texts.values()) >= 0, "a label is cut"
        opened(browser, stand, f"#/{ENDPOINT}")
        until(browser, lambda: table_of(browser))
        assert browser.execute_script("return dots") >= 4 * 3, "slots without neighbours: the rate and three quantiles"
        opened(browser, stand, "#/endpoints?range=7d")
        until(browser, lambda: table_of(browser))
        days = [
            text for text, _ in browser.execute_script("return texts") if re.fullmatch("[A-Z][a-z]{2} [0-9]+", text)
        ]
        assert len({*days}) >= 3, "the axis has the range, of which nothing came but in the last hour"
        assert not [text for text, _ in browser.execute_script("return texts") if re.match("[0-9]{4}-", text)]
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_the_view_that_is_shown_is_in_sight_and_a_long_trace_is_not_taken_for_whole(stand: Stand, browser: Any) -> None:
    end = int((stand.now_s - 30) * 1e9)
    spans = [
        _span("ab" * 16, f"{n:016x}", 2, end, end + n * 1_000, False, {"http.route": "/x"}) for n in range(1, 1_002)
    ]
    body = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    assert httpx.post(f"{stand.address}/v1/traces", json=body, timeout=60).json() == {}
    sized(browser, 320)
    opened(browser, stand, f"#/trace/{'ab' * 16}")
    until(browser, lambda: shown(browser, "main .soft").startswith("Only those that ended first: 1,000 spans"))
    edges = "const { left, right } = document.querySelector('#views [aria-current]').getBoundingClientRect()"
    left, right = browser.execute_script(f"{edges}; return [left, right]")
    assert left >= 0 and right <= 320
    opened(browser, stand, f"#/trace/{1:032x}")
    until(browser, lambda: shown(browser, "main .soft").startswith("2 spans"))


def test_numbers_and_names_are_such_as_one_says(stand: Stand, browser: Any) -> None:
    browser.get(stand.address)
    script = (
        "const [[name, ...given], done] = arguments;"
        "import('/console/format.js').then((all) => done(all[name](...given)))"
    )
    hour, day = 3_600e6, 86_400e6
    for asked, said in (
        (["rate", 7_200, hour], "2 /s"), (["rate", 5_000_000, hour], "1,389 /s"), (["rate", 12, hour], "0.2 /min"),
        (["rate", 19, day], "0.79 /h"), (["rate", 1, day], "1 /day"), (["rate", 0, day], "0 /day"),
        (["withMethod", "GET", "/x"], "GET /x"), (["withMethod", "GET", "GET"], "GET"),
        (["withMethod", "", "/x"], "/x"), (["withMethod", "GET", "GETTING"], "GET GETTING"),
    ):  # fmt: skip
        assert browser.execute_async_script(script, asked) == said


def test_a_range_that_ended_long_ago_says_so_and_an_address_that_is_none_shows_something(
    stand: Stand, browser: Any
) -> None:
    for route, says in (("/almost", True), ("/cart", False)):
        opened(browser, stand, f"#/endpoints?k.namespace=&k.service=shop&k.route={route}&k.method=GET")
        until(browser, lambda: table_of(browser))
        assert ("Nothing has come since" in shown(browser, "main > .soft")) is says, route
    opened(browser, stand, "#/table/100%")
    assert shown(browser, "h1") == "Tables"


def test_an_aggregate_has_the_quantiles_that_it_has(stand: Stand, browser: Any) -> None:
    with stand.server.connect() as db:
        calls = {"calls": kivi.count(), "latency": kivi.quantiles("duration_us")}
        keys = ["service", kivi.time_slot("ts", "5m")]
        derived = {"p99_us": "quantile(latency, 0.99)"}
        db.create_aggregate("tails", source="invocations", group_by=keys, measures=calls, derived=derived)
    opened(browser, stand, "#/table/tails")
    until(browser, lambda: table_of(browser))
    assert cells_of(browser, ".tile h2") == ["Calls", "p99"]
    assert shown(browser, ".chart:last-child .legend").split()[2] == "p99"
    assert cells_of(browser, ".path li") == ["Tables", "tails"]


def test_a_question_in_sql_is_stopped(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/sql", state="ready")
    box = browser.find_element("id", "sql")
    box.clear()
    box.send_keys("select count(*) from range(3000000000) a, range(1000) b where (a.range * b.range) % 7 = 3")
    run, stop = browser.find_elements("css selector", ".sql button")
    assert not stop.is_displayed()
    run.click()
    until(browser, stop.is_displayed)
    stop.click()
    until(browser, lambda: shown(browser, "main > .soft") == "Stopped.")
    assert not stop.is_displayed() and shown(browser, "#status-text") == "stopped"
    for text, is_answered in (("select 1 as one", True), ("selec", False)):
        box.clear()
        box.send_keys(text)
        run.click()
        until(browser, lambda: shown(browser, "#status-text") == ("done" if is_answered else "not answered"))  # noqa: B023
        assert bool(table_of(browser)) is is_answered, "the answer to another question"


def test_an_endpoint_is_named_and_times_have_their_zone(stand: Stand, browser: Any) -> None:
    opened(browser, stand, f"#/{ENDPOINT}")
    until(browser, lambda: table_of(browser))
    assert browser.title == "GET /cart · kivi"
    assert cells_of(browser, ".path li") == ["Endpoints", "shop", "GET /cart"]
    assert all(text.endswith(" UTC") for text in cells_of(browser, ".when"))
    assert cells_of(browser, "main thead th")[0].startswith("slot UTC")


def test_the_past_is_offered_where_there_is_one(stand: Stand, browser: Any) -> None:
    for view, is_offered in (("endpoints", False), ("table/invocations_service_5m", False), ("traces", True)):
        opened(browser, stand, f"#/{view}")
        until(browser, lambda: table_of(browser))
        assert bool(browser.find_elements("id", "moment")) is is_offered, view
    opened(browser, stand, "#/endpoints?as_of=2020-01-01T00:00:00Z", state="not shown")
    assert browser.find_elements("id", "moment")  # another moment can be chosen


def test_what_no_commit_is_remembered_of_and_what_is_no_moment(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/endpoints?as_of=2020-01-01T00:00:00Z", state="not shown")
    assert "load the page again" not in shown(browser, "#error")
    for view in ("endpoints", "traces"):
        opened(browser, stand, f"#/{view}?as_of=yesterday", state="not shown")
        assert shown(browser, "#error") == '"yesterday" is no moment: go back to live, and choose one.'
        assert "Loading" not in shown(browser, "main")
