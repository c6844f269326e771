"""Sizes as people write them, in each place where they can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pelton.cli import serve
from pelton.config.engine import EngineArgs
from pelton.config.server import ServerArgs
from pelton.config.sizes import parse_size
from pelton.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("4096", "tokens", 4096),
        ("32_768", "tokens", 32768),
        ("32k", "tokens", 32_000),
        ("32K", "tokens", 32_768),
        ("25.6k", "tokens", 25_600),
        ("1.5M", "tokens", 1_572_864),
        ("1m", "tokens", 1_000_000),
        ("0", "tokens", 0),
        ("4G", "bytes", 4 * 2**30),
        ("4g", "bytes", 4 * 10**9),
        ("4 GiB", "bytes", 4 * 2**30),
        ("4gib", "bytes", 4 * 2**30),
        ("4Gi", "bytes", 4 * 2**30),
        ("4GB", "bytes", 4 * 10**9),
        ("512MiB", "bytes", 2**29),
        ("1.5T", "bytes", 3 * 2**39),
        ("17B", "bytes", 17),
    ],
)
def test_what_is_taken(text: str, unit: str, number: int) -> None:
    assert parse_size(text, unit) == number


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        *(("", "tokens"), ("k", "tokens"), ("-1", "tokens"), ("1e5", "tokens"), ("0x10", "tokens")),
        *(
            ("32,768", "tokens"),
            ("4GiB", "tokens"),
            ("4Gi", "tokens"),
            ("5B", "tokens"),
            ("auto", "tokens"),
        ),
        *(("4x", "bytes"), ("4kk", "bytes"), ("4GG", "bytes"), ("4iB", "bytes"), ("٣k", "bytes")),
    ],
)
def test_what_is_not(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=f"must be a number of {unit} such as .*, got "):
        parse_size(text, unit)


def test_parts_of_a_token_are_refused() -> None:
    with pytest.raises(ValueError, match=r"whole number of tokens, and '25.6K' is 26214.4"):
        parse_size("25.6K", "tokens")


GIVEN = {
    "max_model_len": ("2k", 2000),
    "max_num_batched_tokens": ("4K", 4096),
    "long_prefill_token_threshold": ("1k", 1000),
    "kv_cache_memory_bytes": ("1.5GiB", 3 * 2**29),
    "mamba_block_size": ("1K", 1024),
    "max_cudagraph_capture_size": ("1k", 1000),
    "max_body_bytes": ("64MiB", 2**26),
}


def test_each_place_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, a file, and Python: the same numbers."""
    seen: list[dict[str, Any]] = []

    def fake_serve(engine: EngineArgs, server: ServerArgs) -> int:
        both = vars(engine) | vars(server)
        seen.append({name: both[name] for name in GIVEN})
        return 0

    monkeypatch.setattr("pelton.server.serve.serve", fake_serve)
    pairs = [("--" + name.replace("_", "-"), text) for name, (text, _) in GIVEN.items()]
    serve.run(serve.parse([word for pair in pairs for word in pair]))
    file = tmp_path / "serve.yaml"
    file.write_text("".join(f"{name}: {text}\n" for name, (text, _) in GIVEN.items()))
    serve.run(serve.parse(["--config", str(file)]))
    texts = {name: text for name, (text, _) in GIVEN.items()}
    body = {"max_body_bytes": texts.pop("max_body_bytes")}
    fake_serve(EngineArgs(**texts), ServerArgs(**body))  # type: ignore[arg-type]
    assert seen == [{name: number for name, (_, number) in GIVEN.items()}] * 3


def test_auto_leaves_a_field_out(tmp_path: Path) -> None:
    assert EngineArgs(max_model_len="auto").max_model_len is None  # type: ignore[arg-type]
    file = tmp_path / "serve.yaml"
    file.write_text("max-model-len: 64\n")
    options = serve.parse(["--config", str(file), "--max-model-len", "auto"])
    assert options.max_model_len is None
    with pytest.raises(ConfigError, match="max_body_bytes must be a number of bytes"):
        ServerArgs(max_body_bytes="auto")  # type: ignore[arg-type]


def test_mistakes_name_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len must be .*, or auto, got '32x'\.$"):
        EngineArgs(max_model_len="32x")  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        serve.parse(["--max-model-len", "-1"])
    assert "--max-model-len: must be a number of tokens such as 4096" in capsys.readouterr().err
