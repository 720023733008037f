"""The site of the pages: it builds without a warning, and its search works when it is opened from disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.viz.browser import browser, console_errors

__all__ = ["browser"]

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `make docs` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site):
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()


@pytest.mark.browser
def test_search_works_from_disk(site: Path, browser: Any) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get_log("browser")
    browser.get((site / "index.html").as_uri())
    wait = WebDriverWait(browser, 20)
    field = browser.find_element("css selector", "[data-md-component=search-query]")
    wait.until(lambda _: field.is_displayed())  # the page shows it once its scripts run
    field.send_keys("epilogue")
    found = wait.until(
        lambda driver: driver.execute_script(
            "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        )
    )
    assert any(address.startswith((site / "glossary.html").as_uri()) for address in found)
    assert console_errors(browser) == []
