"""`pelton embed`, by a model that it loads and by a server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.in_process import in_process
from support.pooled import cosine, hidden_states, tiny_pooled, with_byte_tokens
from support.serving import served_in_thread

from pelton.cli.main import main
from pelton.engine.llm import LLM

TEXTS = ["The sea", "is wide.", "x" * 257, "y"]  # the third one is longer than the context
KEY = "k"


def folder() -> str:
    return str(with_byte_tokens(tiny_pooled("Qwen3")))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = LLM(folder(), num_gpu_blocks_override=64)
    with served_in_thread(lambda: in_process(llm)) as address:
        yield address
    llm.close()


def check(lines: list[dict[str, Any]], size: int) -> None:
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    for text, line in zip(TEXTS, lines):
        if len(text) > 256:
            assert "257" in line["error"]
            assert "embedding" not in line
            continue
        expected = hidden_states(tiny_pooled("Qwen3"), list(text.encode()))[-1][:size]
        assert cosine(np.array(line["embedding"]), expected) > 0.9999


@pytest.mark.parametrize("way", ["engine", "server"])
@pytest.mark.parametrize("source", ["arguments", "input"])
def test_vectors(
    way: str,
    source: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["embed", "--dimensions", "8"]
    words += ["--url", url] if way == "server" else [folder(), "--num-gpu-blocks-override", "64"]
    if source == "arguments":
        words += [word for text in TEXTS for word in ("--text", text)]
    else:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([TEXTS[0], " ", *TEXTS[1:]])))
    assert main(words) == 2
    shown = capsys.readouterr()
    check([json.loads(line) for line in shown.out.splitlines()], 8)
    assert "pelton embed: text 2: " in shown.err
    assert "4 texts in " in shown.err


def test_a_lone_text_that_is_wrong(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([folder(), "--num-gpu-blocks-override", "64"], ["--url", url]):
        assert main(["embed", *words, "--text", TEXTS[2]]) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert "257" in json.loads(line)["error"]
        cut = ["--truncate-prompt-tokens", "-1"]
        assert main(["embed", *words, "--text", TEXTS[2], *cut]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert len(json.loads(line)["embedding"]) == 48


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--url http://x MODEL --text a", "MODEL and --url exclude each other"),
        ("--url http://x --max-model-len 5 --text a", "--max-model-len and --url exclude"),
        ("--api-key k --text a", "--api-key is for a server; add --url"),
        ("--url x --text a", "starts with http:// or https://"),
        ("--dimensions 0 --text a", "dimensions must be an integer from 1"),
    ],
)
def test_what_cannot_be_asked(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["embed", *words.split()])
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    assert sentence in capsys.readouterr().err
