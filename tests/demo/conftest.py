"""A browser for all tests of the demonstration: it takes seconds to start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import require
from tests.demo.dashboards import FLAGS


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
