"""Pages in a headless Chromium: one browser for a test session, and what it logged.

`tests/viz/conftest.py` offers the fixture `browser` to all tests of this folder. Those that use it are marked `browser`
and are skipped, with the reason, where selenium, Chromium or its driver is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)
WIDE = (1440, 900)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The driver of a headless Chromium of 1440 x 900, with a profile of its own."""
    driver = start_browser(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()


def start_browser(profile: Path) -> Any:
    """A driver that has started; skips the test if something is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip(f"needs {'Chromium' if program is None else 'chromedriver'}; it is not on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (*ARGUMENTS, f"--window-size={WIDE[0]},{WIDE[1]}", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def open_page(driver: Any, path: Path, *, dark: bool = False, hash: str = "") -> None:
    """Load a page from disk and wait until it stands; messages of pages before are forgotten."""
    from selenium.webdriver.support.wait import WebDriverWait

    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")  # another hash alone would not load the page again
    driver.get_log("browser")
    driver.get(path.resolve().as_uri() + hash)
    WebDriverWait(driver, 20).until(lambda d: d.execute_script("return document.documentElement.dataset.ready"))


def console_errors(driver: Any) -> list[str]:
    """What the page has logged as warnings or errors since the last call; its own failures and refused loads."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]


def open_tab(driver: Any, name: str) -> Any:
    """Open a tab by its id, such as "graph", and give its panel."""
    driver.find_element("id", f"tab-{name}").click()
    return driver.find_element("id", f"panel-{name}")
