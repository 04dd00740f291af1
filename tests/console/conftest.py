"""A browser for all tests of the console."""

from __future__ import annotations

from tests.browsers import _driver, browser

__all__ = ["_driver", "browser"]
