"""The console over a real server in a real browser: what it shows, against what the store says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import kivi
from tests.browsers import press, shown, until
from tests.ports import Port
from tests.serverproc import ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.browser

AXE = (Path(__file__).parent / "axe.min.js").read_text()
SLOT_S = 300
ROUTES = {"shop": ["/cart", "/checkout/{id}"], "search": ["/find", '/<b>bold</b>"quoted"']}
MODEL = "claude-sonnet-4"


class Stand:
    """A server that takes spans, and its address."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.address = base(server)
        self.now_s = int(time.time()) // SLOT_S * SLOT_S + 1  # at the beginning of a slot: all spans are in few of them
        self.sent = 0

    def send(
        self, service: str, route: str, ended_s: float, ms: int, *, error: bool = False, model: str = "", **said: Any
    ) -> str:
        """A span, with a call to a database in it, or to a model; the id of its trace."""
        self.sent += 1
        trace = f"{self.sent:032x}"
        end = int(ended_s * 1e9)
        spans = [_span(trace, f"{self.sent:015x}1", 2, end - ms * 10**6, end, error, {"http.route": route, **said})]
        inner = {"gen_ai.operation.name": "chat", "gen_ai.request.model": model, "gen_ai.usage.input_tokens": 1_000}
        attributes = inner if model else {"db.system.name": "postgresql", "db.namespace": "orders"}
        call = _span(trace, f"{self.sent:015x}2", 3, end - ms * 8 * 10**5, end - ms * 10**5, False, attributes)
        self.export(service, [*spans, call | {"parentSpanId": spans[0]["spanId"]}])
        return trace

    def export(self, service: str, spans: list[dict[str, Any]]) -> None:
        place = {"attributes": [_attribute("service.name", service)]}
        body = {"resourceSpans": [{"resource": place, "scopeSpans": [{"spans": spans}]}]}
        assert httpx.post(f"{self.address}/v1/traces", json=body, timeout=60).json() == {}

    def fill(self) -> None:
        for ago_s in (0, SLOT_S, 2 * SLOT_S, 7 * 86_400):
            for service, routes in ROUTES.items():
                for n, route in enumerate(routes):
                    for i in range(n + 2):
                        self.send(service, route, self.now_s - ago_s, 100 * (n + 1) + i, error=i == 2)
        self.send("assistant", "/chat", self.now_s - SLOT_S, 900, model="unpriced")
        with self.server.connect() as db, db.transaction() as tx:
            tx.put("llm_prices", ("", MODEL), input_price="0.000003", output_price="0.000015")
        for _ in range(2):
            self.send("assistant", "/chat", self.now_s, 900, model=MODEL)

    def rolled(self, table: str, **arguments: Any) -> list[dict[str, Any]]:
        with self.server.connect() as db, db.snapshot() as snapshot:
            return [dict(row) for row in snapshot.rollup(table, **arguments)]

    def watermark(self) -> str:
        with self.server.connect() as db:
            return f"{db.watermark():,}"


def _attribute(name: str, value: str | int) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": value}}


def _span(trace: str, span: str, kind: int, start: int, end: int, error: bool, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "traceId": trace,
        "spanId": span,
        "name": "span",
        "kind": kind,
        "startTimeUnixNano": start,
        "endTimeUnixNano": end,
        "status": {"code": 2 if error else 0},
        "attributes": [_attribute(name, value) for name, value in said.items()],
    }


def base(server: ServerProcess) -> str:
    return next(line for line in reversed(server.output) if line.startswith("http on ")).split()[-1]


def otlp(folder: Path) -> ServerProcess:
    return ServerProcess(folder / "data", "--http", "localhost:0")


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with otlp(tmp_path_factory.mktemp("console")) as server:
        made = Stand(server)
        made.fill()
        with server.connect() as db:
            columns = {"ts": "timestamp", "service": "string", "duration_us": "int64", "trace_id": "bytes"}
            db.create_event_table("slow", event_time="ts", columns=columns)
            db.create_rule("slow_calls", source="invocations", where=kivi.col("duration_us") > 2_000_000, into="slow")
            db.create_alert("busy", on="invocations_service_5m", where=kivi.col("calls") > 1_000_000)
            db.create_table("accounts", key={"id": "int64"}, columns={"name": "string", "balance": kivi.sum("int64")})
            db.create_aggregate(
                "by_minute",
                source="invocations",
                group_by=["service", kivi.time_slot("ts", "1m", name="minute")],
                measures={"n": kivi.count(), "longest_us": kivi.max("duration_us"), "q": kivi.quantiles("duration_us")},
                history="1h",
            )
            with db.transaction() as tx:
                tx.insert("accounts", (1,), name="ada", balance=7)
        yield made


def opened(browser: Any, stand: Stand, path: str, *, state: str = "live") -> None:
    """Another document each time: the views before are gone."""
    browser.get("about:blank")
    browser.get(f"{stand.address}/{path}")
    until(browser, lambda: shown(browser, "#status-text") == state)


def duration(us: float) -> str:
    ms = us / 1_000
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms" if ms < 1_000 else f"{ms / 1_000:.2f} s"


def table_of(browser: Any, *, within: str = "main") -> dict[str, list[str]]:
    """The rows of a grid, by the text of their first cell."""
    rows = browser.execute_script(
        "return [...document.querySelectorAll(`${arguments[0]} .grid tbody tr:not(.space):not([hidden])`)]"
        ".map((row) => [...row.cells].filter((cell) => !cell.hidden).map((cell) => cell.innerText.trim()))",
        within,
    )
    return {row[0]: row[1:] for row in rows}


def lists(browser: Any, names: Set[str]) -> bool:
    return table_of(browser).keys() == names


def test_endpoints_are_what_the_store_says_and_are_kept_up(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/endpoints")
    rolled = {row["route"]: row for row in stand.rolled("invocations_endpoint_5m", by=["service", "route"], last="1h")}
    until(browser, lambda: table_of(browser).keys() == rolled.keys())
    for route, cells_ in table_of(browser).items():
        row = rolled[route]
        assert cells_[0] == row["service"]
        assert cells_[1] == f"{row['calls']:,}"  # no column of the method, which none of them says
        assert cells_[3:6] == [duration(row[name]) for name in ("p50_us", "p95_us", "p99_us")]
        assert cells_[8] == row["slowest_trace_id"].hex()[:8]
    (total,) = stand.rolled("invocations_endpoint_5m", last="1h")
    tiles = [line for line in shown(browser, ".tiles").splitlines() if line]
    assert tiles[tiles.index("Calls") + 1].split()[0] == f"{total['calls']:,}"
    assert " · ".join(duration(total[name]) for name in ("p50_us", "p95_us", "p99_us")) in tiles
    assert shown(browser, "#snapshot") == stand.watermark()

    browser.execute_script("window.same = document.querySelector('.grid tbody a')")
    stand.send("shop", "/new", stand.now_s, 1_500)
    until(browser, lambda: table_of(browser).get("/new", [""])[1:2] == ["1"])
    until(browser, lambda: shown(browser, "#snapshot") == stand.watermark())
    assert browser.execute_script("return same.isConnected")  # it was brought up to date, and not made anew
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_down_to_a_trace_by_keyboard(stand: Stand, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, stand, "#/services")
    until(browser, lambda: "search" in table_of(browser))
    browser.execute_script("[...document.querySelectorAll('.grid tbody a')].find((a) => a.text === 'search').focus()")
    press(browser, Keys.ENTER)
    until(browser, lambda: table_of(browser).keys() == {*ROUTES["search"]})
    assert browser.execute_script("return document.activeElement.textContent") == "search"  # where one came to
    route = ROUTES["search"][1]
    browser.execute_script("[...document.querySelectorAll('.grid tbody a')].find((a) => a.text !== '/find').focus()")
    press(browser, Keys.ENTER)
    until(browser, lambda: shown(browser, "h1") == route)
    until(browser, lambda: shown(browser, ".legend b") == "3")  # of the newest slot
    browser.execute_script("document.querySelector('.plot').focus()")
    press(browser, Keys.HOME)
    until(browser, lambda: browser.execute_script("return document.querySelector('.legend').ariaLive") == "polite")
    press(browser, Keys.END)
    until(browser, lambda: shown(browser, ".legend b") == "3")
    browser.execute_script("document.querySelector('.tiles a').click()")
    until(browser, lambda: len(cells_of(browser, ".spans summary")) == 2)
    first, second = cells_of(browser, ".spans summary")
    assert first.startswith(f"search {route}") and "202 ms" in first
    assert second.startswith("level 2: search span") and "orders" in second
    browser.back()
    until(browser, lambda: shown(browser, "h1") == route)


def cells_of(browser: Any, selector: str) -> list[str]:
    return list(
        browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText.replace(/\\s+/g, ' '))",
            selector,
        )
    )


def test_a_week_ago_is_beside_now(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/services?compare=1w")
    until(browser, lambda: "a week ago" in shown(browser, ".tiles"))
    tile = shown(browser, ".tiles .tile").splitlines()
    assert tile[-1] == "a week ago: 10"
    assert table_of(browser)["search"][0].endswith("(5)")
    cells = "[...document.querySelectorAll('main tbody tr:not(.space) .both')].filter((each) => each.checkVisibility())"
    assert browser.execute_script(
        f"const all = {cells}; return all.length && all.every((e) => e.scrollWidth <= e.clientWidth)"
    )


def test_any_aggregate_is_charted_and_any_table_shown(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/tables")
    until(browser, lambda: {"accounts", "by_minute", "invocations"} <= table_of(browser).keys())
    assert table_of(browser)["invocations"][:2] == ["event", "traces"]
    opened(browser, stand, "#/table/accounts")
    until(browser, lambda: table_of(browser) == {"1": ["ada", "7"]})
    opened(browser, stand, "#/table/by_minute")
    until(browser, lambda: {"shop", "search"} <= table_of(browser).keys())
    until(browser, lambda: cells_of(browser, ".chart h2") == ["n", "longest"])
    assert browser.execute_script("return document.querySelectorAll('.chart canvas').length") == 2
    opened(browser, stand, "#/models")
    until(browser, lambda: table_of(browser).get(MODEL, [])[1:5] == ["2", "2,000", "0", "0.006"])
    assert table_of(browser)["unpriced"][1:5] == ["1", "1,000", "0", "\N{EN DASH}"]
    assert shown(browser, ".tiles").split()[-5:] == ["Cost", "0.006", "of", "2", "calls"]
    opened(browser, stand, "#/table/llm_costs_5m")
    until(browser, lambda: table_of(browser).get(MODEL, [])[-2:] == ["2", "0.006"])
    assert cells_of(browser, ".chart h2") == ["Calls", "Cost"]


def test_money_is_shown_as_it_is(stand: Stand, browser: Any) -> None:
    """Decimals come as texts, floats as numbers: no digit before the point is a zero that was none."""
    opened(browser, stand, "#/tables")
    found = browser.execute_async_script(
        "const [numbers, done] = arguments; import('/console/format.js').then((by) => done(numbers.map(by.count)))",
        [
            "12345.670000000",
            "12345.000000000",
            "0.000000123",
            "-999.990000000",
            "-0.5",
            "Infinity",
            12345.67,
            0.123456,
            7,
        ],
    )
    assert found == ["12,345.67", "12,345", "0.000000123", "-999.99", "-0.5", "Infinity", "12,346", "0.1235", "7"]


def test_whole_numbers_that_no_double_holds_keep_their_digits(stand: Stand, browser: Any) -> None:
    """Of rows, live and of the past, of totals, of keys and the way down to one, of lists, and of SQL's answers."""
    wide = [2**53 - 1, 2**53 + 1, 2**62 + 1, -(2**53) - 1]
    text = {n: f"{n:,}" for n in wide}
    with stand.server.connect() as db:
        columns: dict[str, Any] = {"ts": "timestamp", "id": "int64", "n": "int64"}
        db.create_table("wide", key={"id": "int64"}, columns={"n": kivi.sum("int64")}, history="1h")
        db.create_event_table("wide_events", event_time="ts", columns=columns)
        measures = {"total": kivi.sum("n"), "most": kivi.largest("n", 2)}
        slots = ["id", kivi.time_slot("ts", "5m", name="slot")]
        db.create_aggregate("wide_5m", source="wide_events", group_by=slots, measures=measures, history="1h")
        db.append("wide_events", [{"ts": stand.now_s * 1_000_000, "id": n, "n": n} for n in wide])
        with db.transaction() as tx:
            for n in wide:
                tx.delta("wide", (n,), n=n)
    opened(browser, stand, "#/table/wide")
    until(browser, lambda: table_of(browser) == {text[n]: [text[n]] for n in wide})
    assert [*table_of(browser)] == [text[n] for n in sorted(wide)]
    with stand.server.connect() as db, db.transaction() as tx:
        tx.delta("wide", (wide[1],), n=2)
    until(browser, lambda: table_of(browser)[text[wide[1]]] == [f"{2**53 + 3:,}"])

    opened(browser, stand, "#/table/wide_5m")
    until(browser, lambda: table_of(browser) == {str(n): [text[n]] for n in wide})
    assert shown(browser, ".tiles").splitlines()[-1] == f"{sum(wide):,}"
    browser.find_element("link text", str(wide[2])).click()
    until(browser, lambda: shown(browser, "h1") == str(wide[2]) and shown(browser, ".tiles").endswith(text[wide[2]]))

    opened(browser, stand, "#/sql", state="ready")
    asked = f"select id, n, [n] as l, id::varchar as v from wide_events where id <> {2**53 - 1} order by id"
    browser.execute_script(
        "document.getElementById('sql').value = arguments[0]; document.querySelector('.sql button').click()", asked
    )
    listed = {text[n]: [text[n], str(n), str(n)] for n in sorted(wide) if n != 2**53 - 1}
    until(browser, lambda: table_of(browser) == listed)
    browser.find_element("css selector", "thead button").click()  # by number, the largest first, and not by text
    until(browser, lambda: [*table_of(browser)] == [text[n] for n in sorted(wide, reverse=True) if n != 2**53 - 1])


def test_sql_rules_and_health(stand: Stand, browser: Any) -> None:
    opened(browser, stand, "#/sql", state="ready")
    asked = {"select name, balance from accounts": ("done", {"ada": ["7"]}), "selec": ("not answered", {})}
    for text, told in asked.items():
        browser.execute_script(
            "document.getElementById('sql').value = arguments[0]; document.querySelector('.sql button').click()", text
        )
        until(browser, partial(lambda told: (shown(browser, "#status-text"), table_of(browser)) == told, told))
    until(browser, lambda: "syntax error" in shown(browser, ".wrong"))

    opened(browser, stand, "#/rules")
    until(browser, lambda: "slow_calls" in shown(browser, "main") and "busy" in shown(browser, "main"))
    trace = stand.send("shop", "/cart", stand.now_s, 2_500)
    until(browser, lambda: trace[:8] in shown(browser, "main") and "2.50 s" in shown(browser, "main"))

    opened(browser, stand, "#/health")
    browser.find_element("css selector", "input[type=search]").send_keys("watermark")
    until(browser, lambda: "well" in shown(browser, ".tiles") and "watermark" in table_of(browser))


def test_the_past_stays_as_it_was(stand: Stand, browser: Any) -> None:
    before, then = stand.rolled("by_minute", by=["service"], last="1h"), stand.watermark()
    time.sleep(0.01)
    moment = time.time()
    time.sleep(0.01)
    stand.send("shop", "/cart", stand.now_s, 60)
    at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(moment))}.{int(moment % 1 * 1e6):06d}Z"
    opened(browser, stand, f"#/table/by_minute?as_of={at}", state="the past")
    until(
        browser,
        lambda: (
            {name: row[0] for name, row in table_of(browser).items()} == {r["service"]: f"{r['n']}" for r in before}
        ),
    )
    assert shown(browser, "#snapshot") == then
    assert "does not change" in shown(browser, "#past")
    browser.execute_script("document.getElementById('to-live').click()")
    until(browser, lambda: shown(browser, "#status-text") == "live")
    until(browser, lambda: shown(browser, "#snapshot") == stand.watermark())
    # What keeps no older versions says so, and nothing of now is shown in its place.
    opened(browser, stand, f"#/endpoints?as_of={at}", state="not shown")
    assert "keeps no history" in shown(browser, "#error")
    assert table_of(browser) == {}


VIEWS = ["services", "endpoints?compare=1w", "endpoints?k.namespace=&k.service=shop&k.route=/cart&k.method=", "models"]
VIEWS += ["traces", f"trace/{1:032x}", "rules", "tables", "table/accounts", "table/by_minute", "sql", "health"]


@pytest.mark.story
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (320, "dark")])
def test_nothing_sticks_out_and_axe_finds_nothing(stand: Stand, browser: Any, width: int, scheme: str) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        for view in VIEWS:
            opened(browser, stand, f"#/{view}", state="ready" if view == "sql" else "live")
            until(browser, lambda: browser.execute_script("return document.querySelector('main h1') !== null"))
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, view
            if (width, view) == (1280, "services"):  # whose hidden columns, of namespaces, take no room
                over = "const grid = document.querySelector('.scroll'); return grid.scrollWidth - grid.clientWidth"
                assert browser.execute_script(over) == 0
            if view == "traces":  # of what a span does not say nothing is shown
                assert "(empty)" not in shown(browser, "main") and "/cart" in shown(browser, "main")
            browser.execute_script(AXE)
            found = browser.execute_async_script("axe.run().then((found) => arguments[0](found.violations))")
            assert [(each["id"], [node["html"][:200] for node in each["nodes"]][:3]) for each in found] == [], view
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_server_that_goes_away_is_said_and_come_back_from(tmp_path: Path, browser: Any) -> None:
    port = Port()
    with ServerProcess(tmp_path / "data", "--http", f"localhost:{port.number}") as server:
        stand = Stand(server)
        opened(browser, stand, "#/tables")
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" in shown(browser, "main") or "invocations" in shown(browser, "main")
        stand.send("shop", "/cart", stand.now_s, 100)
        opened(browser, stand, "#/endpoints")
        until(browser, lambda: table_of(browser).keys() == {"/cart"})
        server.kill()
        until(browser, lambda: shown(browser, "#status-text") == "reconnecting")
        assert "cannot be reached" in shown(browser, "#error") or "lost" in shown(browser, "#error")
        assert table_of(browser).keys() == {"/cart"}  # marked as old
        server.start()
        stand.send("shop", "/new", stand.now_s, 100)
        until(browser, lambda: table_of(browser).keys() == {"/cart", "/new"})
        assert shown(browser, "#status-text") == "live" and shown(browser, "#error") == ""


def test_a_trace_is_a_tree(stand: Stand, browser: Any) -> None:
    """Of several services and tables; what is part of a span that is not here begins anew, and so does a circle."""
    end, trace = int((stand.now_s - 3 * 86_400) * 1e9), "7e" * 16
    made = [  # name, kind, parent, when it begins and ends of 100
        ("root", 2, None, 0, 100), ("late", 3, "root", 50, 90), ("call", 3, "root", 10, 40),
        ("answer", 2, "call", 15, 35), ("orphan", 3, "inside", 20, 30), ("tail", 3, "head", 60, 70),
        ("head", 3, "tail", 55, 75),
    ]  # fmt: skip
    ids = {name: f"{n:016x}" for n, name in enumerate(["inside", *(each[0] for each in made)], 1)}
    spans = []
    for name, kind, parent, begins, ends in made:
        at = end - 100_000_000
        span = _span(trace, ids[name], kind, at + begins * 10**6, at + ends * 10**6, False, {"http.route": name})
        spans.append(span | ({} if parent is None else {"parentSpanId": ids[parent]}))
    stand.export("shop", spans)
    opened(browser, stand, f"#/trace/{trace}")
    until(browser, lambda: len(browser.find_elements("css selector", ".spans summary")) == len(made))
    assert cells_of(browser, ".spans .what") == [
        "shop root", "level 2: shop call", "level 3: shop answer", "level 2: shop late", "shop orphan", "shop head",
        "level 2: shop tail",
    ]  # fmt: skip
    script = "return [...document.querySelectorAll('.spans .what b')].map((each) => each.getBoundingClientRect().left)"
    lefts = browser.execute_script(script)
    assert lefts[0] < lefts[1] < lefts[2] and lefts[3] == lefts[1] and lefts[4] == lefts[0]
    browser.find_elements("css selector", ".spans summary")[1].click()
    stand.export("shop", [span | {"spanId": f"{99:016x}"}])
    until(browser, lambda: len(browser.find_elements("css selector", ".spans summary")) == len(made) + 1)
    opened_ = "return [...document.querySelectorAll('.spans details')].map((each) => each.open)"
    assert browser.execute_script(opened_)[:3] == [False, True, False], "what is read is not shut by a span that comes"


def test_a_page_that_was_left_holds_no_stream_and_is_live_again_once_one_goes_back(stand: Stand, browser: Any) -> None:
    """A browser keeps what was left for its button, and has six connections to one origin."""
    with stand.server.connect() as db:
        for view in ("services", "endpoints", "tables", "services"):
            opened(browser, stand, f"#/{view}")
        wait_until(lambda: db.stats()["subscriptions"] > 0)
        browser.get("about:blank")
        wait_until(lambda: db.stats()["subscriptions"] == 0, 10, reason=lambda: db.stats()["subscriptions"])
        browser.back()
        until(browser, lambda: shown(browser, "#status-text") == "live" and table_of(browser))
        until(browser, lambda: shown(browser, "#snapshot") == stand.watermark())
        assert db.stats()["subscriptions"] > 0


def test_a_token_is_asked_for_and_kept_in_the_tab(tmp_path: Path, browser: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("root admin\nread reader tables=accounts\nacme reader rows=name:acme\n")
    with ServerProcess(tmp_path / "data", "--http", "localhost:0", "--token-file", str(tokens)) as server:
        with server.connect(access_token="root") as db:
            for name in ("accounts", "secrets"):
                db.create_table(name, key={"id": "int64"}, columns={"name": "string"})
            db.create_event_table("calls", event_time="ts", columns={"name": "string", "ts": "timestamp"})
            newest = f"{db.watermark():,}"
        stand = Stand(server)
        opened(browser, stand, "", state="no access")
        for token, listed in (
            ("nobody", None),
            ("read", {"accounts"}),
            ("acme", {"calls"}),
            ("root", {"accounts", "secrets", "calls"}),
        ):
            until(browser, lambda: browser.execute_script("return document.getElementById('token-dialog').open"))
            browser.execute_script(
                "document.getElementById('token-input').value = arguments[0];"
                "document.getElementById('token-ok').click()",
                token,
            )
            if listed is None:
                until(browser, lambda: "does not know" in shown(browser, "#token-why"))
                continue
            until(browser, partial(lists, browser, listed))
            browser.refresh()
            until(browser, partial(lists, browser, listed))
            until(browser, lambda: shown(browser, "#snapshot") == newest)
            assert shown(browser, "#error") == "" and shown(browser, "#status-text") == "live"
            browser.execute_script("document.getElementById('token').click()")
        assert browser.execute_script("return JSON.stringify(Object.values(localStorage))") == json.dumps([])
        browser.execute_script("sessionStorage.clear()")
