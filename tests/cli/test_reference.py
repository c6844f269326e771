"""The pages of docs/cli: their tables are the parsers', and what they show runs."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import ServeProcess, chat_model, serving

from pelton.cli.bench import KINDS
from pelton.cli.main import COMMANDS
from pelton.cli.reference import PARSERS, commands_in, with_tables

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "cli").glob("*.md"))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_URL = "http://127.0.0.1:8000"
COMMAND = f"{sys.executable} -m pelton"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_parsers(page: Path) -> None:
    text = page.read_text()
    assert with_tables(text) == text, "write them anew: python -m pelton.cli.reference docs/cli"


def test_every_command_has_its_page() -> None:
    told = list(itertools.chain(*(commands_in(page.read_text()) for page in PAGES)))
    assert sorted(told) == sorted(PARSERS)
    words = {f"pelton {name}" for name in COMMANDS if name != "bench"}
    assert {*PARSERS} == words | {"the engine"} | {f"pelton bench {kind}" for kind in KINDS}
    index = (DOCS / "cli.md").read_text()
    for page in PAGES:
        assert f"(cli/{page.name})" in index


def blocks(name: str, language: str, word: str) -> list[str]:
    """The code blocks of a page that hold a word."""
    found = _BLOCK.findall((DOCS / name).read_text())
    chosen = [text for kind, text in found if kind == language and word in text]
    assert chosen, f"{name} has no {language} with {word}"
    return chosen


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with serving(model=chat_model(2048)) as running:
        yield running


def run(command: list[str], folder: Path, *, code: int = 0) -> str:
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=folder
    )
    assert found.returncode == code, found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize("page", ["serving.md", "cli/serve.md"])
def test_curl(page: str, server: ServeProcess, tmp_path: Path) -> None:
    for text in blocks(page, "sh", "curl "):
        answer = run(["bash", "-ec", text.replace(_URL, server.url)], tmp_path)
        assert json.loads(answer)["choices"][0]["finish_reason"] in ("stop", "length"), answer


def test_the_openai_client(server: ServeProcess, tmp_path: Path) -> None:
    for text in blocks("serving.md", "python", "OpenAI("):
        code = text.replace(_URL, server.url)
        assert run([sys.executable, "-c", code], tmp_path)


def test_the_batch_file(tmp_path: Path) -> None:
    (text,) = blocks("serving.md", "sh", "pelton run-batch")
    assert blocks("cli/run_batch.md", "sh", "pelton run-batch") == [text]
    assert "pelton run-batch -i" in text
    text = text.replace("pelton run-batch", f"{COMMAND} run-batch {chat_model(2048)}")
    run(["bash", "-ec", text], tmp_path, code=3)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    codes = {record["custom_id"]: record["response"]["status_code"] for record in records}
    assert codes == {"1": 200, "2": 400}


def test_flags_that_the_pages_show_are_known() -> None:
    """Whatever stands in a command line of a page or the README."""
    pages = [*DOCS.glob("*.md"), *PAGES, DOCS.parent / "README.md"]
    lines = [
        line.split("#")[0]
        for page in pages
        for kind, text in _BLOCK.findall(page.read_text())
        if kind == "sh"
        for line in text.replace("\\\n", " ").splitlines()
        if line.startswith("pelton ")
    ]
    assert len(lines) > 20
    for line in lines:
        words = line.split()
        name = " ".join(words[: 3 if words[1] == "bench" else 2])
        known = PARSERS[name]()._option_string_actions
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in known, line
