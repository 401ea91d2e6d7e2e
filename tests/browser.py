"""A Chromium for tests: `chromium()` finds one, the fixture `browser` starts it.

Tests that need it are skipped where there is none. With the environment variable LLM_ENGINE_BROWSER, which names the program
(a name on the PATH or a file), a missing one is an error instead, so that no check is left out unnoticed.

A test module takes the fixture over by importing it: `from browser import browser`.
"""

import os
import shutil
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def chromium() -> Path | None:
    """The program to use, or None. Raises FileNotFoundError where LLM_ENGINE_BROWSER names one that is not there."""
    if wanted := os.environ.get("LLM_ENGINE_BROWSER"):
        if found := shutil.which(wanted):
            return Path(found)
        raise FileNotFoundError(
            f"LLM_ENGINE_BROWSER names {wanted!r}, which is no program here. Install it "
            "(Debian: apt install chromium), or unset the variable to skip the tests that need it."
        )
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return Path(found) if found else MAC if MAC.exists() else None


@pytest.fixture(scope="module")
def browser():
    """Playwright's browser (synchronous); `browser.new_page()` or `.new_context(...)` from here."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium found; set LLM_ENGINE_BROWSER to its program")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-dev-shm-usage"],  # as root, and in a small container
        )
        yield started
        started.close()
