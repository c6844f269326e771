"""The rule behind every `tokenizer.ggml.pre`, against the table that transformers has of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers
from tokens.test_gguf_tokenizer import DIGIT_TEXTS, TEXTS, pieces, tiny
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from pelton.tokens.gguf_byte_level import PRE_TOKENIZERS
from pelton.tokens.tokenizer import load_tokenizer

CASE = "Café déjà vu — 123 😊 \t\n x"
# What transformers' table leaves out: the rules of these models' own tokenizer.json.
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_OWN = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
}
# Known from its tokenizer.json alone; its words are tested in test_gguf_tokenizer.py.
_WITHOUT_ORACLE = {"deepseek-v3"}
NAMES = sorted(set(PRE_TOKENIZERS) - _WITHOUT_ORACLE)


def source_rule(pre: str) -> Any:
    if pre in _OWN:
        return _OWN[pre]
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize("pre", NAMES)
def test_words_are_the_source_models(pre: str) -> None:
    """Case 38."""
    ours = load_tokenizer(tiny(pre=pre)).backend.pre_tokenizer
    for text in [*TEXTS, *DIGIT_TEXTS, CASE]:
        assert ours.pre_tokenize_str(text) == source_rule(pre).pre_tokenize_str(text), text


@pytest.mark.parametrize("pre", NAMES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.lists(pieces, max_size=10))
def test_words_of_random_text(pre: str, parts: list[str]) -> None:
    """Case 38."""
    ours = load_tokenizer(tiny(pre=pre)).backend.pre_tokenizer
    text = "".join(parts)
    assert ours.pre_tokenize_str(text) == source_rule(pre).pre_tokenize_str(text)


@pytest.fixture(scope="module")
def metadata(gguf_metadata: dict[str, Any]) -> dict[str, Any]:
    """A vocabulary of 49,152 tokens, with "<|user|>" among the control tokens."""
    key = "tokenizer.ggml.tokens"
    tokens = ["<|user|>" if text == "<jupyter_code>" else text for text in gguf_metadata[key]]
    return {**gguf_metadata, key: tokens, "tokenizer.ggml.add_bos_token": True}


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_the_cases_text(pre: str, metadata: dict[str, Any], reference: Any) -> None:
    """Case 38: specials are one token each, BOS of the metadata comes first, accents survive, and
    the ids are those of the source model's rule on the same vocabulary."""
    ours = load_tokenizer({**metadata, "tokenizer.ggml.pre": pre})
    user = ours.backend.token_to_id("<|user|>")
    bos = metadata["tokenizer.ggml.bos_token_id"]
    text = f"<|im_start|><|user|>{CASE}"
    ids = ours.encode(text).tolist()
    assert ids[:3] == [bos, ours.backend.token_to_id("<|im_start|>"), user]
    assert ids.count(user) == 1
    assert ours.decode(ids[1:], skip_special_tokens=False) == text
    if pre in NAMES:
        assert ids[3:] == theirs(pre, reference).encode(CASE).ids
        decomposed = normalizers.NFD().normalize_str(CASE)
        assert ours.encode(decomposed).tolist()[1:] == theirs(pre, reference).encode(decomposed).ids


def theirs(pre: str, reference: Any) -> tokenizers.Tokenizer:
    backend = copy.deepcopy(reference.backend_tokenizer)
    backend.pre_tokenizer = source_rule(pre)
    # Facts of Llama 3's and Mistral's tokenizer.json, and of Qwen's.
    backend.model.ignore_merges = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend
