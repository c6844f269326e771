from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from pelton.errors import CheckpointError, UnsupportedError
from pelton.tokens.tokenizer import Tokenizer, load_tokenizer

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<jupyter_code>"]
TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n x",
    "\t\t\tif x:\n\t\t\t\treturn y\n",
    "Hello, world!",
    " leading space",
    "   three leading spaces",
    "trailing   ",
    "a  b   c    d",
    "I'm sure they'll say we've won; it's DON'T, I'D, you're",
    "The quick brown fox\r\njumps over\r\n",
    "def f(a, b):\n    return a + b  # sum\n\nclass A(B):\n    pass\n",
    "x=>{y[z]!==null&&!(a||b)}",
    "Café déjà vu — naïve façade",
    "Cafe\u0301 de\u0301ja\u0300 vu",
    "Z\u0351\u036b\u0343\u036a\u0302a\u0308",
    "日本語のテキスト、中文文本。한국어",
    "مرحبا بالعالم שלום עולם",
    "Ελληνικά Русский текст हिन्दी ไทย",
    "😊 🎉👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "\u200b\u00a0\u2003\u3000x\ufeff",
    "\x00\x01\x7f\x80\x9f",
    "\U0001f600\U000e0001\U0010ffff\ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c<|im_end|><|im_end|>",
    "<|im_start> <|im_end| <im_start|>",
    "Ġthe Ċ Ã© â",
]
DIGIT_TEXTS = [
    "0",
    "12345",
    "x 1 22 333 4444",
    "  123",
    "a\n\n3",
    "3.14159e-10, 1,000,000 and 0xDEADBEEF",
    "2's ½ ² Ⅷ ٣٤  ٣ x  ²",
    "<|im_start|>7<|im_end|>  8",
    "Café déjà vu — 123 😊 \t\n x",
]


@pytest.fixture(scope="session")
def source_rule(reference: Any) -> tokenizers.Tokenizer:
    """transformers' vocabulary with the pre-tokenizer that SmolLM2's own tokenizer.json has.

    transformers drops the splitting of digits when it reads a GGUF file.
    """
    backend = copy.deepcopy(reference.backend_tokenizer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    """Case 38."""
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == reference(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS + DIGIT_TEXTS)
def test_ids_equal_source_model(
    tokenizer: Tokenizer, source_rule: tokenizers.Tokenizer, text: str
) -> None:
    """Case 38: digits stand alone, as in the model that the file was made from."""
    assert tokenizer.encode(text).tolist() == source_rule.encode(text).ids


def test_spaces_before_a_digit_stay_together(tokenizer: Tokenizer) -> None:
    """Where transformers differs: GPT-2's pattern alone would leave one space to the number."""
    assert tokenizer.encode("  12").tolist() == [
        tokenizer.backend.token_to_id(piece) for piece in ("ĠĠ", "1", "2")
    ]


pieces = st.one_of(
    st.sampled_from([*SPECIALS, " ", "  ", "\n", "\t", "'s", "the", " and", "é", "e\u0301", "😊"]),
    st.text(st.characters(codec="utf-8"), max_size=8),
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.lists(pieces, max_size=12))
def test_random_text(
    tokenizer: Tokenizer,
    reference: Any,
    source_rule: tokenizers.Tokenizer,
    parts: list[str],
) -> None:
    """Case 38."""
    text = "".join(parts)
    ids = tokenizer.encode(text).tolist()
    assert ids == source_rule.encode(text).ids
    if not any(letter.isnumeric() for letter in text):
        assert ids == reference(text)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20), skip=st.booleans())
def test_decode_equals_transformers(
    tokenizer: Tokenizer, reference: Any, ids: list[int], skip: bool
) -> None:
    """Random ids: mostly invalid UTF-8."""
    ours = tokenizer.decode(np.array(ids, dtype=np.int32), skip_special_tokens=skip)
    assert ours == reference.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def test_special_ids(tokenizer: Tokenizer, reference: Any) -> None:
    """Case 38."""
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.end_token_ids == {2}
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert tokenizer.chat_template == reference.chat_template
    for text in SPECIALS:
        assert len(tokenizer.encode(text)) == 1


def tiny(**changes: Any) -> dict[str, Any]:
    """Metadata of a small byte-level vocabulary; None removes a key."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    tokens = ["<s>", "</s>", "<|user|>", "<think>", "Ġ", *letters, "th", "the", "Ã", "©", "Ã©"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "merges": ["t h", "th e", "Ã ©"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def test_user_defined_tokens_are_found_but_not_special() -> None:
    """Case 38."""
    small = load_tokenizer(tiny())
    ids = small.encode("the<|user|>é<think>the").tolist()
    tokens = tiny()["tokenizer.ggml.tokens"]
    assert [tokens[at] for at in ids] == ["the", "<|user|>", "Ã©", "<think>", "the"]
    assert small.decode(ids) == "theé<think>the"


def test_named_ids_are_special_whatever_their_type() -> None:
    """Case 38: a careless converter marks the end token as a normal one."""
    kinds = [1] * len(tiny()["tokenizer.ggml.tokens"])
    small = load_tokenizer(tiny(token_type=kinds))
    assert small.encode("a</s>").tolist()[-1] == 1
    assert small.special_token_ids == {0, 1}


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_bos_and_eos_flags(add_bos: bool, add_eos: bool) -> None:
    """Case 38: flags of the metadata are obeyed."""
    small = load_tokenizer(tiny(add_bos_token=add_bos, add_eos_token=add_eos))
    the = small.backend.token_to_id("the")
    assert small.encode("the").tolist() == [0] * add_bos + [the] + [1] * add_eos
    assert small.encode_chat("<s>the").tolist() == [0, the]


def test_llama3_adds_bos_without_being_told() -> None:
    small = load_tokenizer(tiny(pre="llama-bpe"))
    assert small.encode("the").tolist()[0] == 0


@pytest.mark.parametrize("kind", [3, 4])
@pytest.mark.parametrize("text", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>"])
def test_an_end_of_turn_that_no_key_names_is_known_by_its_text(text: str, kind: int) -> None:
    tokens = ["<s>", "</s>", text, *tiny()["tokenizer.ggml.tokens"][3:]]
    kinds = [3, 3, kind] + [1] * (len(tokens) - 3)
    small = load_tokenizer(tiny(tokens=tokens, token_type=kinds))
    assert small.end_token_ids == {1, 2}
    assert small.encode(f"the{text}").tolist()[-1] == 2
    assert small.decode([2]) == ""
    # A word of the language, spelt alike, ends nothing; and the file's own word counts.
    plain = load_tokenizer(tiny(tokens=tokens, token_type=[3, 3] + [1] * (len(tokens) - 2)))
    assert plain.end_token_ids == {1}
    assert load_tokenizer(tiny(tokens=tokens, token_type=kinds, eot_token_id=1)).end_token_ids == {
        1
    }


def test_a_message_of_gpt_oss_is_not_an_answer() -> None:
    marks = ["<s>", "<|return|>", "<|end|>", "<|call|>"]
    tokens = [*marks, *tiny()["tokenizer.ggml.tokens"][4:]]
    assert load_tokenizer(tiny(tokens=tokens)).end_token_ids == {1, 3}


def test_end_of_turn_tokens_end_an_answer() -> None:
    small = load_tokenizer(tiny(eot_token_id=2))
    assert small.end_token_ids == {1, 2}
    assert 2 in small.special_token_ids


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "DON'T it's 1234 a\n\nb", ["DON", "'", "T", "it", "'s", "1234", "a"]),
        ("smollm", "it's 1234", ["it", "'s", "1", "2", "3", "4"]),
        ("llama-bpe", "DON'T 12345 (x", ["DON", "'T", "123", "45", "(", "x"]),
        ("qwen2", "DON'T 12345 (x", ["DON", "'T", "1", "2", "3", "4", "5", "(", "x"]),
        ("dbrx", "DON'T 12345 (x", ["DON", "'T", "123", "45", "(", "x"]),
        ("gpt-4o", "DON'T McDo 12345 a/\n/b", ["DON'T", "Mc", "Do", "123", "45", "a", "/Ċ/", "b"]),
        ("tekken", "DON'T McDo 123", ["DON", "'T", "Mc", "Do", "1", "2", "3"]),
        ("deepseek-v3", "it's 12345 (x!ab", ["it", "'s", "123", "45", "(", "x", "!ab"]),
    ],
)
def test_words_by_pre_tokenizer(pre: str, text: str, expected: list[str]) -> None:
    """Case 38: the words each rule makes (leading spaces aside)."""
    splitter = load_tokenizer(tiny(pre=pre)).backend.pre_tokenizer
    words = [word.strip("ĠĊ") for word, _ in splitter.pre_tokenize_str(text)]
    assert [word for word in words if word][: len(expected)] == expected


def test_qwen2_composes_accents() -> None:
    """Case 38: accents tokenized as in the source model, whose normalizer is NFC."""
    small = load_tokenizer(tiny(pre="qwen2"))
    assert small.encode("e\u0301").tolist() == small.encode("é").tolist()


@pytest.mark.parametrize("role", ["bos", "eos", "unknown", "padding", "eot"])
@pytest.mark.parametrize("value", [10**6, -1])
def test_ids_beyond_the_vocabulary_are_refused(role: str, value: int) -> None:
    """Cases 26, 38."""
    limit = len(tiny()["tokenizer.ggml.tokens"]) - 1
    with pytest.raises(CheckpointError, match=rf"ggml\.{role}_token_id={value} .* 0 and {limit}"):
        load_tokenizer(tiny(**{f"{role}_token_id": value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": [], "token_type": []}, "tokens is empty"),
        ({"merges": ["t h", "x zzz"]}, "entry 1, 'x zzz', needs the token"),
        ({"merges": ["t h", "th"]}, "entry 1, 'th', is not two tokens"),
        ({"merges": [7]}, "merges must be .* holds 7"),
        ({"token_type": [1]}, "1 entries"),
        ({"token_type": ["a"] * 104}, "token_type must be a list of numbers"),
        ({"token_type": [1, 7] + [1] * 102}, "token_type holds 7; types are integers from 0 to 6"),
        ({"add_bos_token": "yes"}, "add_bos_token='yes' must be true or false"),
        ({"eos_token_id": 1.5}, "eos_token_id=1.5 must be an integer"),
        ({"bos_token_id": True}, "bos_token_id=True must be an integer"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1], "merges": ["a b"]}, "'a' twice"),
    ],
)
def test_bad_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    """Case 38."""
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tiny(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is not supported; supported are 'gpt2'"),
        ({"precompiled_charsmap": np.ones(3, np.uint8)}, r"precompiled_charsmap \(3 bytes\)"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces=true is not"),
        ({"pre": "made-up"}, "tokenizer.ggml.pre='made-up' is not supported"),
        ({"add_space_prefix": True}, "add_space_prefix"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load_tokenizer(tiny(**changes))


def test_named_templates() -> None:
    metadata = tiny() | {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "B",
    }
    assert load_tokenizer(metadata).chat_templates == {"default": "A", "tool_use": "B"}
