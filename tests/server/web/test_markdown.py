"""web/markdown.js in a browser: what it shows, what it never does, and that growing text ends as
whole text does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from support.browser import site
from support.scripted_engine import echo_script

SHOWN = {
    "plain": ("a < b & c", "<p>a &lt; b &amp; c</p>"),
    "headings": ("# A\n### B *c*\n#no", "<h3>A</h3><h5>B <em>c</em></h5><p>#no</p>"),
    "emphasis": (
        "**a** *b* __c__ _d_ ***e*** ~~f~~ **g *h* i**",
        "<p><strong>a</strong> <em>b</em> <strong>c</strong> <em>d</em> "
        "<strong><em>e</em></strong> <del>f</del> <strong>g <em>h</em> i</strong></p>",
    ),
    "no emphasis": ("2 * 3 * 4, snake_case_name, ** a **, *b", None),
    "escapes": (r"\*a\* \[b\](c) \d", r"<p>*a* [b](c) \d</p>"),
    "code spans": ("`a *b*` ``c ` d`` `e", "<p><code>a *b*</code> <code>c ` d</code> `e</p>"),
    "lists": (
        "- a\n- b\n  - c\n\n3. d\n4. e",
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul>"
        '<ol start="3"><li><p>d</p></li><li><p>e</p></li></ol>',
    ),
    "tabs and four spaces": (
        "1. a\n\t- b\n2. c\n    - d",
        '<ol start="1"><li><p>a</p><ul><li><p>b</p></li></ul></li>'
        "<li><p>c</p><ul><li><p>d</p></li></ul></li></ol>",
    ),
    "loose lists": (
        "1. a\n\n   more\n\n2. b\nlazy\n\nend",
        '<ol start="1"><li><p>a</p><p>more</p></li><li><p>b\nlazy</p></li></ol><p>end</p>',
    ),
    "quotes": (
        "> a\n> > b\n\nc",
        "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    ),
    "rules": ("a\n\n---\n* * *", "<p>a</p><hr><hr>"),
    "tables": (
        "so:\n| a | b\\|c |\n|:-:|--:|\n| *1* |\n\nd | e",
        '<p>so:</p><div class="wide" tabindex="0"><table><thead><tr><th class="center">a</th>'
        '<th class="right">b|c</th></tr></thead><tbody><tr><td class="center"><em>1</em></td>'
        '<td class="right"></td></tr></tbody></table></div><p>d | e</p>',
    ),
    "a wrapped number": ("It was in\n1987. Then", "<p>It was in\n1987. Then</p>"),
    "nesting has an end": (
        "> " * 30 + "x",
        "<blockquote>" * 8 + "<p>" + "&gt; " * 22 + "x</p>" + "</blockquote>" * 8,
    ),
}

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>\n\n<iframe srcdoc='<script>alert(1)</script>'>",
    "[x](javascript:alert(1)) [x](JaVaScRiPt:alert(1)) [x](java\nscript:alert(1))",
    "[x](&#106;avascript:alert(1)) [x](\x01javascript:alert(1)) [x]( javascript:alert(1) )",
    "[x](data:text/html,<script>alert(1)</script>) [x](vbscript:x) [x](file:///etc/passwd)",
    "[x](//evil.example) [x](/v1/models) [x](?q) [x](blob:https://a/b)",
    "![x](https://evil.example/pixel.png) ![x](javascript:alert(1))",
    '[x](https://a.example/"onmouseover="alert(1)) https://a.example/"><img/onerror=alert(1)>',
    "```<img src=x onerror=alert(1)>\n<b>in code</b>\n",
    '```"><script>alert(1)</script>\n</code></pre><script>alert(1)</script>',
    "| <img src=x onerror=alert(1)> |\n|---|\n| <b onclick=alert(1)>x</b> |",
    "# <style>*{display:none}</style>",
    "- <a href=javascript:alert(1)>x</a>\n  > <svg onload=alert(1)>",
    "<https://ok.example> <javascript:alert(1)>",
]

# Each makes some careless parser take quadratic time, or nest without end.
HUGE = {
    "stars": "*" * 200_000,
    "openers": "*a **b " * 50_000,
    "pairs": "*a_" * 80_000,
    "nested pairs": "**a *b " * 30_000 + "b* a** " * 30_000,
    "brackets": "[" * 200_000,
    "half links": "[a](" * 60_000,
    "long half links": ("[" + "a" * 480 + "](" + "b" * 1500) * 100,
    "ticks": "".join("`" * n + "a" for n in range(1, 600)),
    "quotes": ">" * 200_000,
    "quoted lines": "> > > > > > > > > >\n" * 10_000,
    "items": "- " * 100_000,
    "deep list": "".join("  " * n + "- a\n" for n in range(400)),
    "rule or not": "- - " * 50_000 + "x",
    "pipes": "|" * 200_000 + "\n" + "|-" * 100_000,
    "delimiters": "a|b\n" + "-" * 200_000 + "x",
    "hashes": "# " + "# " * 100_000,
    "one line": "word " * 200_000,
    "one word": "h" * 1_000_000,
    "urls": "https://" * 50_000,
    "parentheses": "https://a.example/" + "(" * 100_000,
    "backslashes": "\\" * 200_000,
    "open fence": "```\n" + "x = 1\n" * 150_000,
    "blank lines": "\n" * 300_000,
    "spaces": " " * 300_000 + "x",
    "table": "a|b\n-|-\n" + "1|2\n" * 5_000,
}

SHOW = """async (source) => {
  const { MarkdownView } = await import("./web/markdown.js");
  const element = document.createElement("div");
  new MarkdownView(element).update(source);
  return element.innerHTML;
}"""

GROW = """async (source) => {
  const { MarkdownView } = await import("./web/markdown.js");
  const grown = document.createElement("div");
  const view = new MarkdownView(grown);
  for (let end = 0; end <= source.length; end++) {
    const whole = document.createElement("div");
    new MarkdownView(whole).update(source.slice(0, end));
    view.update(source.slice(0, end));
    if (grown.innerHTML !== whole.innerHTML) return [source.slice(0, end), grown.innerHTML];
  }
  return null;
}"""

# What stands in the page after hostile text was really inserted, and had time to do harm.
INSERT = """async (source) => {
  const { MarkdownView } = await import("./web/markdown.js");
  const element = document.createElement("div");
  document.body.append(element);
  new MarkdownView(element).update(source);
  await new Promise((resolve) => setTimeout(resolve, 20));
  const all = [...element.querySelectorAll("*")];
  const found = {
    tags: all.map((one) => one.localName),
    attributes: all.flatMap((one) => one.getAttributeNames()),
    links: all.filter((one) => one.localName === "a")
      .map((one) => [one.href, one.rel, one.target]),
    text: element.textContent,
  };
  element.remove();
  return found;
}"""

CODE = (
    '<div class="code"><div class="bar"><span>{language}</span><button type="button" class="quiet" '
    'aria-label="Copy code">Copy</button></div><pre tabindex="0"><code>{text}</code></pre></div>'
)


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    with site(echo_script) as server:
        page = browser.new_page()
        page.on("dialog", lambda dialog: pytest.fail(f"it ran: {dialog.message}"))
        page.goto(server.url)
        yield page
        page.close()


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown(tab: Page, name: str) -> None:
    source, wanted = SHOWN[name]
    assert tab.evaluate(SHOW, source) == (wanted or f"<p>{source}</p>")


def test_fences(tab: Page) -> None:
    for source, language, text in [
        ("```py title=x\na\n\n  b\n```", "py", "a\n\n  b"),
        ("~~~\n```\n~~~", "text", "```"),
        ("````md\n```\n````", "md", "```"),
        ("```\nnever closed <b>", "text", "never closed &lt;b&gt;"),
        ("```\n", "text", ""),
        ("  ```\n  a\n    b\n  ```", "text", "a\n  b"),
    ]:
        assert tab.evaluate(SHOW, source) == CODE.format(language=language, text=text), source
    inside = tab.evaluate(SHOW, "1. a\n   ```\n   b\n\n   c\n   ```\n2. d")
    code = CODE.format(language="text", text="b\n\nc")
    assert inside == f'<ol start="1"><li><p>a</p>{code}</li><li><p>d</p></li></ol>'


def test_links_go_to_the_web_or_nowhere(tab: Page) -> None:
    found = tab.evaluate(
        INSERT,
        "[a](https://a.example/x_(y)?q=1#z) https://b.example/_c_. (http://d.example) "
        "![picture](https://e.example/p.png) **https://f.example** xhttps://no.example",
    )
    assert found["links"] == [
        [url, "noopener noreferrer nofollow", "_blank"]
        for url in (
            "https://a.example/x_(y)?q=1#z",
            "https://b.example/_c",
            "http://d.example/",
            "https://e.example/p.png",
            "https://f.example/",
        )
    ]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_text_stays_text(tab: Page, source: str) -> None:
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    found: dict[str, Any] = tab.evaluate(INSERT, source)
    assert not set(found["tags"]) & {"img", "script", "iframe", "svg", "style", "b", "object"}
    assert {*found["attributes"]} <= {
        *("class", "tabindex", "type", "aria-label", "href", "title", "target", "rel", "start")
    }
    for url, _, _ in found["links"]:
        assert url.startswith(("https://evil.example/pixel", "https://a.example/", "https://ok.ex"))
    assert not [url for url in requests if "evil" in url or url.rpartition("/")[2] == "x"]


@pytest.mark.parametrize("name", HUGE)
def test_huge_and_hostile_text_ends_soon(tab: Page, name: str) -> None:
    """A deadline far above what it takes; quadratic time would be minutes."""
    tab.set_default_timeout(10_000)
    assert tab.evaluate(
        f"(source) => Promise.race([({SHOW})(source).then((x) => x.length), 1])", HUGE[name]
    )


def test_growing_text_ends_as_whole_text(tab: Page) -> None:
    """At every character, not just at the end."""
    sources = [source for source, _ in SHOWN.values()] + HOSTILE
    sources.append("\n\n".join(source for source, _ in SHOWN.values()))
    sources.append(
        "a\n\n```py\nb\n\nc\n```\nd\n- e\n  ```\n  f\n  ```\n\n- g\r\n\r\nh\ni | j\n-|-\n1|2\nk"
    )
    for source in sources:
        assert tab.evaluate(GROW, source) is None
