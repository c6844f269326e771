"""The chat page in a browser: what people do with it."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect
from support.browser import site
from support.scripted_engine import text_script

ANSWER = "Water turns **the wheel**.\n\n```python\nprint('turn')\n```\n"


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_an_answer_streams_with_its_numbers(page: Page) -> None:
    with site(text_script(ANSWER * 5), delay=0.01) as server:
        page.goto(server.url)
        expect(page.locator("#model")).not_to_be_empty()
        say(page, "Tell me <b>more</b>.")
        answer = page.locator("article.assistant")
        expect(answer).to_have_attribute("aria-busy", "true")
        expect(page.locator("article.user .text")).to_have_text("Tell me <b>more</b>.")
        expect(answer.locator("strong").first).to_have_text("the wheel")
        expect(answer).to_have_attribute("aria-busy", "true")
        expect(answer).not_to_have_attribute("aria-busy", "true")
        expect(answer.locator(".code code")).to_have_count(5)
        expect(answer.locator(".numbers")).to_have_text(
            re.compile(r"^\d+ tokens · [\d.]+ tokens/s · first after \d\.\d\d s · prompt \d+")
        )
        expect(page.locator("#status")).to_have_text("The answer is complete.")
        say(page, "And then?")
        expect(page.locator("article.assistant")).to_have_count(2)
        roles = [m["role"] for m in _last_messages(page, server.url)]
        assert roles[-3:] == ["user", "assistant", "user"]


def _last_messages(page: Page, url: str) -> list[dict[str, str]]:
    page.locator("article[aria-busy]").wait_for(state="detached")
    with page.expect_request("**/v1/chat/completions") as found:
        page.locator("article:last-child .again").click()
    return list(found.value.post_data_json["messages"])
