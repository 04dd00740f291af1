"""A headless Chromium for tests, one for each folder of them: it takes seconds to start. And what it shows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import require
from tests.waiting import wait_until

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


@pytest.fixture(scope="package")
def _driver() -> Iterator[Any]:
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


@pytest.fixture
def browser(_driver: Any) -> Iterator[Any]:
    """Nothing of the tests before is left in it."""
    _driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    _driver.get_log("browser")
    yield _driver
    _driver.get("about:blank")


# -- what it shows -----------------------------------------------------------------------------------------


def drawn(browser: Any, expression: str, selector: str) -> Any:
    """What a script says of the page once it is drawn: what came before is on it, all at once, as a person sees it."""
    ask = f"const [selector, answer] = arguments; requestAnimationFrame(() => answer({expression}))"
    return browser.execute_async_script(ask, selector)


def shown(browser: Any, selector: str) -> str:
    return str(drawn(browser, "document.querySelector(selector)?.innerText ?? ''", selector)).strip()


def until(browser: Any, condition: Callable[[], Any]) -> Any:
    return wait_until(condition, reason=lambda: f"the page does not show it: {shown(browser, 'body')}", pause_s=0.05)


def press(browser: Any, key: str) -> None:
    """To whatever has the focus, as a person would."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(key).perform()
