"""A real browser for the tests of pages, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

BROWSER = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
DRIVER = shutil.which("chromedriver")
try:
    import selenium
except ImportError:
    selenium = None

needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None or selenium is None,
    reason="no browser here: install chromium, chromium-driver (Debian's names) and selenium to test pages in one",
)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()
