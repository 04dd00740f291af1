"""The console with ten thousand endpoints and a hundred commits a second: it shows real states, and stays smooth."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from apm_demo.tables import WIDTHS, create
from tests.browsers import shown, until
from tests.console.test_console import Stand, opened, otlp

ENDPOINTS = 10_000
PER_S = 100
SECONDS = 10.0
PLACE = {"customer": "acme", "application": "shop", "server": "shop-1"}
BELOW = "&".join(f"k.{name}={value}" for name, value in PLACE.items())

# Notes which totals were put into the page, and how long each frame took.
WATCH = """
window.seen = []; window.frames = []; let last = performance.now();
new MutationObserver(() => seen.push(document.querySelector(".tiles").innerText))
  .observe(document.querySelector(".tiles"), { childList: true, characterData: true, subtree: true });
const frame = (now) => { frames.push(now - last); last = now; requestAnimationFrame(frame); };
requestAnimationFrame(frame);
"""


def thread_s(browser: Any) -> float:
    """What the page's main thread has worked, by its own clock: what it waited for a processor is not in it."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


@pytest.mark.story
@pytest.mark.browser
def test_ten_thousand_endpoints_and_a_hundred_commits_a_second(tmp_path: Path, browser: Any) -> None:
    rng = random.Random(7)
    now_us = time.time_ns() // 1_000 // WIDTHS["5s"] * WIDTHS["5s"]

    def event(endpoint: int, us: int) -> dict[str, Any]:
        call = {"endpoint_id": endpoint, "ts": now_us, "duration_us": us, "status": 200, "trace_id": f"{us:032x}"}
        return {**PLACE, **call}

    with otlp(tmp_path) as server, server.connect() as db:
        create(db)
        db.append("invocations", [event(i, 1_000 + i) for i in range(ENDPOINTS)])
        opened(browser, Stand(server), f"#/endpoints?range=15m&{BELOW}")
        until(browser, lambda: f"{ENDPOINTS:,}" in shown(browser, ".tiles"))
        browser.execute_script(WATCH)
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        ticks, busy_s, began = -db.stats()["subscription_ticks"], -thread_s(browser), time.monotonic()

        def write() -> None:
            for n in range(int(SECONDS * PER_S)):
                time.sleep(max(0.0, began + n / PER_S - time.monotonic()))
                db.append("invocations", [event(rng.randrange(ENDPOINTS), rng.randrange(1_000, 60_000_000))])

        writer = threading.Thread(target=write)
        writer.start()
        writer.join()
        took_s = time.monotonic() - began
        last = ENDPOINTS + int(SECONDS * PER_S)
        until(browser, lambda: f"{last:,}" in shown(browser, ".tiles"))
        busy_s += thread_s(browser)
        ticks += db.stats()["subscription_ticks"]
        tiles, frames = browser.execute_script("return [seen, frames.sort((a, b) => a - b)]")
        calls = [int(tile.split()[1].replace(",", "")) for tile in tiles]
        seen = len(set(calls))
        calls = calls[calls.count(ENDPOINTS) :]  # the page may show once more what it began with
        print(
            f"{seen} states in {ticks:.0f} ticks, of {last - ENDPOINTS:,} commits in {took_s:.1f} s; page: "
            f"{busy_s / seen * 1e3:.0f} "
            f"ms for each; frames: median {frames[len(frames) // 2]:.0f} ms, 99 of 100 within "
            f"{frames[int(len(frames) * 0.99)]:.0f} ms, longest {frames[-1]:.0f} ms"
        )
        rows = browser.execute_script("return document.querySelectorAll('.grid tbody tr').length")
        assert rows < 100  # those in sight
        assert calls == sorted(calls) and calls[0] > ENDPOINTS and calls[-1] == last
        assert seen > ticks / 3  # it goes from state to state as the server does; how often that is, is printed
        assert busy_s / seen < 0.1  # in the page's own time: on a busy machine frames also wait for a processor
