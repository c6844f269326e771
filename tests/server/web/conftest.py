"""One browser for a module's tests, a clean tab for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.browser import ARGS, chromium_path

expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the session: as long as it lives, no event loop can run in this thread."""
    with sync_playwright() as playwright:
        path = chromium_path(playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Fails the test for whatever the page throws, or the policy forbids it."""
    context = browser.new_context(viewport={"width": 1100, "height": 760}, color_scheme="light")
    context.set_default_timeout(15_000)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: faults.append(message.text) if "Security Policy" in message.text else None,
    )
    yield page
    context.close()
    assert faults == []
