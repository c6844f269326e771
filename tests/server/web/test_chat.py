"""The chat page in a browser: what people do with it."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Browser, Page, expect
from support.browser import site
from support.processes import serving
from support.scripted_engine import ScriptedEngine, echo_script, text_script

from pelton.messages.from_engine import Fault
from pelton.messages.to_engine import Abort, AddRequest

ANSWER = "Water turns **the wheel**.\n\n```python\nprint('turn')\n```\n"
NUMBERS = re.compile(r"^\d+ tokens? · [\d.]+ tokens/s · first after \d+\.\d\d s · prompt \d+")


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def done(page: Page) -> None:
    """The answer has ended."""
    page.locator("article.assistant:last-child:not([aria-busy])").wait_for()
    expect(page.locator("#stop")).to_be_hidden()


def body_of(page: Page, text: str) -> dict[str, Any]:
    """The request that asking `text` makes."""
    with page.expect_request("**/v1/chat/completions") as found:
        say(page, text)
    done(page)
    body: dict[str, Any] = found.value.post_data_json
    return body


def test_a_conversation_with_a_real_server(page: Page) -> None:
    """A model that writes random bytes: whatever comes is shown, counted and drawn."""
    with serving("--max-model-len", "256") as server:
        page.goto(server.url)
        expect(page.locator("#model")).to_have_text("tiny-chat")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("Max tokens").fill("40")
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Close settings").click()
        say(page, "Hi")
        numbers = page.locator("article.assistant .numbers")
        expect(numbers).to_have_text(NUMBERS)
        done(page)
        page.get_by_role("tab", name="Engine").click()
        expect(page.locator("#facts")).to_contain_text("tiny-chat")
        expect(page.locator("#facts")).to_contain_text(re.compile(r"Generated[1-9]\d? tokens"))
        expect(page.locator("#now-ttft")).to_have_text(re.compile(r"^\d+ ms|^\d+\.\d s"))
        page.get_by_role("tab", name="Chat").click()
        say(page, "x" * 300)
        expect(page.locator("article .error")).to_contain_text(re.compile("context|tokens"))


def test_an_answer_streams_with_its_numbers(page: Page) -> None:
    with site(text_script(ANSWER * 5), delay=0.01) as server:
        page.goto(server.url)
        say(page, "Tell me <b>more</b>.")
        answer = page.locator("article.assistant")
        expect(answer).to_have_attribute("aria-busy", "true")
        expect(page.locator("article.user .text")).to_have_text("Tell me <b>more</b>.")
        expect(answer.locator("strong").first).to_have_text("the wheel")
        expect(answer).to_have_attribute("aria-busy", "true")
        done(page)
        expect(answer.locator(".code code")).to_have_count(5)
        expect(answer.locator(".numbers")).to_have_text(NUMBERS)
        expect(page.locator("#status")).to_have_text("The answer is complete.")
        messages = body_of(page, "And then?")["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert messages[1]["content"] == ANSWER * 5


def test_stopping(page: Page) -> None:
    """By the button and by Escape: the engine hears of it, and what came stays."""
    with site(echo_script, delay=0.02) as server:

        def num_open(engine: ScriptedEngine) -> int:
            return engine.num_open

        page.goto(server.url)
        for number, stop in enumerate(["button", "key"]):
            say(page, "a b c")
            answer = page.locator("article.assistant").nth(number)
            expect(answer.locator(".numbers")).to_have_text(NUMBERS)
            if stop == "button":
                page.get_by_role("button", name="Stop").click()
            else:
                page.keyboard.press("Escape")
            done(page)
            expect(answer.locator(".numbers")).to_contain_text("stopped by you")
            assert answer.locator(".text").inner_text()
            for _ in range(100):
                if server.do(num_open) == 0:
                    break
                page.wait_for_timeout(10)
            assert server.do(num_open) == 0
            assert isinstance(server.do(lambda engine: engine.sent[-1]), Abort)


def test_once_more_otherwise_and_anew(page: Page) -> None:
    with site(text_script("Yes.")) as server:
        page.goto(server.url)
        say(page, "One?")
        done(page)
        say(page, "Two?")
        done(page)
        expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
        with page.expect_request("**/v1/chat/completions") as again:
            page.get_by_role("button", name="Regenerate").click()
        texts = [message["content"] for message in again.value.post_data_json["messages"]]
        assert texts == ["One?", "Yes.", "Two?"]
        done(page)
        expect(page.locator("article")).to_have_count(4)

        page.reload()
        expect(page.locator("article .text")).to_have_text(["One?", "Yes.", "Two?", "Yes."])
        page.get_by_role("button", name="Edit").first.click()
        expect(page.get_by_label("Message", exact=True)).to_have_value("One?")
        page.keyboard.press("Escape")
        expect(page.get_by_label("Message", exact=True)).to_have_value("")
        page.get_by_role("button", name="Edit").first.click()
        texts = [message["content"] for message in body_of(page, "Three?")["messages"]]
        assert texts == ["Three?"]
        expect(page.locator("article .text")).to_have_text(["Three?", "Yes."])

        page.get_by_role("button", name="New conversation").click()
        expect(page.locator("article")).to_have_count(0)
        page.reload()
        expect(page.locator("#welcome")).to_be_visible()


def test_settings_are_sent_and_remembered(page: Page) -> None:
    with site(text_script("Yes.")) as server:
        page.goto(server.url)
        body = body_of(page, "Hi")
        assert {*body} == {"messages", "stream", "stream_options"}
        page.get_by_role("button", name="Settings", exact=True).click()
        values = {
            "System prompt": "Be brief.",
            "Temperature": "0.5",
            "Top p": "0.9",
            "Top k": "40",
            "Max tokens": "3",
            "Seed": "7",
        }
        for label, value in values.items():
            page.get_by_label(label).fill(value)
        page.reload()
        body = body_of(page, "Hi again")
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
        assert [body[name] for name in names] == [0.5, 0.9, 40, 3, 7]
        sent = server.do(lambda engine: [m for m in engine.sent if isinstance(m, AddRequest)])
        assert sent[-1].params["seed"] == 7

        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("Temperature").fill("-1")
        expect(page.locator("#wrong-temperature")).to_have_text("Must be a number from 0 to 100.")
        page.get_by_role("button", name="Close settings").click()
        say(page, "Wrong")
        expect(page.get_by_label("Temperature")).to_be_focused()
        page.get_by_label("Top k").press_sequentially(".5e")  # what a browser calls no number
        expect(page.locator("#wrong-top_k")).to_contain_text("Must be a whole number")
        expect(page.locator(".wrong:visible")).to_have_count(2)
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_label("Message", exact=True)).to_have_value("Wrong")
        expect(page.locator("article")).to_have_count(4)
        page.get_by_role("button", name="Back to defaults").click()
        expect(page.locator(".wrong:visible")).to_have_count(0)
        body = body_of(page, "Right")
        assert {*body} == {"messages", "stream", "stream_options"}
        now = server.do(lambda engine: [m for m in engine.sent if isinstance(m, AddRequest)])
        assert len(now) == len(sent) + 1


def test_a_question_without_an_answer(page: Page) -> None:
    """It is marked, no part of what follows, and can be asked again, even after a reload."""
    texts = lambda body: [message["content"] for message in body["messages"]]  # noqa: E731
    with site(text_script("Yes."), llm={"max_num_queued_reqs": 0}) as server:
        page.goto(server.url)
        say(page, "One?")
        done(page)
        page.route("**/v1/chat/completions", lambda route: route.abort())
        say(page, "Two?")
        failed = page.locator("article.failed")
        expect(failed.locator(".text")).to_have_text("Two?")
        expect(failed.locator(".error")).to_contain_text("cannot be reached")
        expect(page.locator("article")).to_have_count(3)
        page.unroute("**/v1/chat/completions")
        assert texts(body_of(page, "Three?")) == ["One?", "Yes.", "Three?"]
        page.reload()
        expect(failed.locator(".text")).to_have_text("Two?")
        assert texts(body_of(page, "Four?")) == ["One?", "Yes.", "Three?", "Yes.", "Four?"]
        with page.expect_request("**/v1/chat/completions") as again:
            page.get_by_role("button", name="Try again").click()
        done(page)
        assert texts(again.value.post_data_json)[-3:] == ["Four?", "Yes.", "Two?"]
        expect(failed).to_have_count(0)
        expect(page.locator("article.user .text")).to_have_text(["One?", "Three?", "Four?", "Two?"])
        assert texts(body_of(page, "Five?"))[-3:] == ["Two?", "Yes.", "Five?"]


def test_copying(page: Page) -> None:
    with site(text_script(ANSWER)) as server:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.goto(server.url)
        say(page, "Hi")
        done(page)

        def copied(text: str) -> None:
            page.wait_for_function(
                "(text) => navigator.clipboard.readText().then((now) => now === text)", arg=text
            )

        for may_write in (True, False):
            if not may_write:  # as over plain HTTP from another machine
                page.evaluate(
                    "() => { navigator.clipboard.writeText = () => Promise.reject(Error()); }"
                )
            page.get_by_role("button", name="Copy code").click()
            expect(page.get_by_role("button", name="Copy code")).to_have_text("Copied")
            copied("print('turn')")
            page.get_by_role("button", name="Copy message").last.click()
            copied(ANSWER)


def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page) -> None:
    with site(text_script("Yes."), keys=["secret"]) as server:
        page.goto(server.url)
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        say(page, "Hi")
        expect(page.locator("article .error")).to_contain_text("A valid API key is needed")
        page.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("did not accept")
        page.get_by_label("Key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("article.assistant .text")).to_have_text(["Yes."])
        expect(page.locator("#model")).not_to_be_empty()
        stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
        assert "secret" not in json.dumps(json.loads(stored)[0])
        page.reload()
        expect(page.locator("#model")).not_to_be_empty()
        expect(dialog).to_be_hidden()


def test_faults_are_told_plainly(page: Page) -> None:
    with site(echo_script, delay=0.02, llm={"max_num_queued_reqs": 0}) as server:
        page.goto(server.url)
        say(page, "a b c")
        expect(page.locator(".numbers")).to_have_text(NUMBERS)

        def fail(engine: ScriptedEngine) -> None:
            (request,) = [message for message in engine.sent if isinstance(message, AddRequest)]
            engine.failures[request.request_id] = Fault("failed", "NaN logits")

        server.do(fail)
        expect(page.locator("article .error")).to_contain_text("NaN logits")
        assert page.locator("article.assistant .text").inner_text()

        page.get_by_role("button", name="New conversation").click()
        server.do(lambda engine: setattr(engine, "paused", True))
        page.evaluate(
            """() => {
              const body = JSON.stringify({ prompt: Array(32).fill("x"), max_tokens: 2000 });
              const headers = { "Content-Type": "application/json" };
              fetch("v1/completions", { method: "POST", headers, body }).catch(() => null);
            }"""
        )
        page.wait_for_function(
            "fetch('load').then((r) => r.json()).then((load) => load.server_load > 0)"
        )
        page.wait_for_timeout(200)
        say(page, "Me, too")
        expect(page.locator("article .error")).to_contain_text("Try again in")

        server.do(lambda engine: setattr(engine, "paused", False))
        server.do(lambda engine: engine.die())
        expect(page.locator("#banner")).to_contain_text("The engine has stopped")
        expect(page.locator("#engine.stale #now-running")).to_have_text("–")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("article .error")).to_contain_text("The engine has stopped")
    expect(page.locator("#banner")).to_contain_text("cannot be reached")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("article .error")).to_contain_text("cannot be reached")


def test_dark_and_light(browser: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with site(text_script("Yes.")) as server:
        for scheme, before, after in [
            ("dark", (20, 24, 27), (255,) * 3),
            ("light", (255,) * 3, (20, 24, 27)),
        ]:
            context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(server.url)
            assert page.evaluate(ground) == f"rgb{before}"
            page.get_by_role("button", name="Dark or light").click()
            assert page.evaluate(ground) == f"rgb{after}"
            page.reload()
            assert page.evaluate(ground) == f"rgb{after}"
            context.close()


def test_on_a_phone(browser: Browser) -> None:
    wide = (
        f"{'W' * 300}\n\n```\n{'c' * 300}\n```\n\n{'|wide cell' * 20}|\n{'|-' * 20}|\n"
        f"{'|a' * 20}|\n\nhttps://example.org/{'u' * 200}\n\n- {'l' * 200}"
    )
    with site(text_script(wide)) as server:
        context = browser.new_context(
            viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
        )
        page = context.new_page()
        page.goto(server.url)
        say(page, "y" * 200)
        done(page)
        overflow = """[document.documentElement, document.querySelector("#scroller")]
            .map((one) => one.scrollWidth - one.clientWidth)"""
        assert page.evaluate(overflow) == [0, 0]
        for name in ("New conversation", "Dark or light", "Settings", "Send"):
            box = page.get_by_role("button", name=name, exact=True).bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
            assert box["height"] >= 32
        page.get_by_role("button", name="Settings", exact=True).tap()
        box = page.locator("#settings").bounding_box()
        assert box is not None
        assert box["width"] == 390
        page.get_by_role("button", name="Close settings").tap()
        page.get_by_role("tab", name="Engine").tap()
        expect(page.locator("#chart-ttft")).to_be_visible()
        assert page.evaluate(overflow)[0] == 0
        context.close()


def test_with_the_keyboard_alone(page: Page) -> None:
    with site(text_script("Yes.")) as server:
        page.goto(server.url)
        prompt = page.get_by_label("Message", exact=True)
        expect(prompt).to_be_focused()
        page.keyboard.type("One/two")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("three")
        expect(prompt).to_have_value("One/two\nthree")
        page.keyboard.press("Enter")
        done(page)
        expect(page.locator("article.user .text")).to_have_text("One/two\nthree")
        expect(prompt).to_be_focused()

        names = []
        for _ in range(12):
            page.keyboard.press("Shift+Tab")
            names.append(
                page.evaluate(
                    "document.activeElement.ariaLabel ?? document.activeElement.textContent"
                )
            )
            width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
            assert width == "2px", names
            if names[-1] == "Chat":
                break
        wanted = ["Regenerate", "Copy message", "Edit", "Copy message", "Conversation", "Settings"]
        assert names == [*wanted, "Dark or light", "New conversation", "Chat"]
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Engine")).to_be_focused()
        expect(page.locator("#engine")).to_be_visible()
        expect(page.locator("#chat")).to_be_hidden()
        page.keyboard.press("/")
        expect(prompt).to_be_focused()
        expect(prompt).to_have_value("")

        page.keyboard.type("Again")
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Send")).to_be_focused()
        page.keyboard.press("Enter")
        done(page)
        expect(page.locator("article")).to_have_count(4)


def test_the_engine_live(page: Page) -> None:
    with site(echo_script, delay=0.02) as server:
        page.goto(f"{server.url}#engine")
        expect(page.locator("#engine")).to_be_visible()
        page.evaluate(
            """() => {
              const body = JSON.stringify({ prompt: Array(35).fill("x"), max_tokens: 1900 });
              const headers = { "Content-Type": "application/json" };
              fetch("v1/completions", { method: "POST", headers, body }).catch(() => null);
            }"""
        )
        expect(page.locator("#now-running")).to_have_text("32")
        expect(page.locator("#now-waiting")).to_have_text("3")
        expect(page.locator("#now-kv")).to_have_text("100%")
        expect(page.locator("#now-answers")).to_have_text(re.compile(r"^[1-9][\d,]+$"))
        expect(page.locator("#now-ttft")).to_have_text(re.compile(r"^\d+ ms$|^\d\.\d s$"))
        chart = page.get_by_role("img", name=re.compile("^Requests.* running 32, waiting 3$"))
        expect(chart).to_be_visible()
        before = page.locator("#chart-rate polyline.line0").get_attribute("points")
        page.wait_for_function(
            """(before) => before !==
              document.querySelector("#chart-rate polyline").getAttribute("points")""",
            arg=before,
        )


def test_strings_cannot_become_html(page: Page) -> None:
    """A second lock: even a line that forgets the house rule would throw."""
    with site(echo_script) as server:
        page.goto(server.url)
        thrown = page.evaluate(
            """() => {
              try { document.body.innerHTML = "<b>x</b>"; } catch (error) { return error.name; }
            }"""
        )
        assert thrown == "TypeError"


def test_under_a_prefix(page: Page) -> None:
    """As a proxy serves it that takes /llm away before it asks."""
    with site(text_script("Yes."), root_path="/llm", keys=["secret"]) as server:
        host = server.url.rstrip("/")
        page.route(
            f"{host}/llm/**",
            lambda route: route.continue_(url=route.request.url.replace("/llm/", "/")),
        )
        page.route(re.compile(rf"{host}/(?!llm/)"), lambda route: route.abort())
        page.goto(f"{host}/llm/")
        page.get_by_label("Key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        say(page, "Hi")
        expect(page.locator("article.assistant .text")).to_have_text(["Yes."])
