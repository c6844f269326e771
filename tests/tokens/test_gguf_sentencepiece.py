from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from pelton.checkpoint.gguf_header import read_gguf_header
from pelton.errors import CheckpointError, UnsupportedError
from pelton.tokens.detokenizer import Detokenizer
from pelton.tokens.tokenizer import Tokenizer, load_tokenizer

SPECIALS = ["<unk>", "<s>", "</s>", "<|user|>", "<think>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "",
    " ",
    "   ",
    "Hello, world! The hello of the world.",
    " leading and trailing ",
    "a  b   c\t\td\n\n\ne\r\n",
    "Café déjà vu — 123 😊 \t\n x",
    "日本語のテキスト 한국어 👩‍👩‍👧‍👦",
    "<s><|user|>the the</s>",
    "<|user|> the <|user|>the<think> the",
    "x <unk> y <0x41> \u2581 z",
    "\x00\x7f\ufffd\U0010ffff",
]
CORPUS = [path.read_text() for path in sorted(Path("docs").glob("*.md"))] + TEXTS * 3


def train() -> list[str]:
    """Tokens of a BPE, in the order of their merging."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIALS + BYTES,
        limit_alphabet=80,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    ids = backend.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def write(path: Path, tokens: list[str], architecture: str, **changes: Any) -> Path:
    kinds = [gguf.TokenType.BYTE if text in BYTES else gguf.TokenType.NORMAL for text in tokens]
    kinds[:5] = [
        gguf.TokenType.UNKNOWN,
        *[gguf.TokenType.CONTROL] * 3,
        gguf.TokenType.USER_DEFINED,
    ]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(at) for at in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in changes.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tokens() -> list[str]:
    return train()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, tokens: list[str]) -> dict[str, Any]:
    """Case -> (ours, transformers' from the same file)."""
    folder = tmp_path_factory.mktemp("gguf")
    cases: dict[str, tuple[list[str], str, dict[str, Any]]] = {
        "llama": (tokens, "llama", {}),
        "phi3": (tokens, "phi3", {}),
        "gemma": (
            [
                text.replace("\u2581", " ")
                if text.strip("\u2581") == "" and len(text) > 1
                else text
                for text in tokens
            ],
            "gemma2",
            {"add_space_prefix": False},
        ),
    }
    found = {}
    for name, (listed, architecture, changes) in cases.items():
        path = write(folder / f"{name}.gguf", listed, architecture, **changes)
        ours = load_tokenizer(read_gguf_header(path).metadata)
        found[name] = ours, AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    return found


CASES = ["llama", "phi3", "gemma"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(pairs: dict[str, Any], case: str, text: str) -> None:
    """Case 38."""
    ours, theirs = pairs[case]
    assert ours.encode(text).tolist() == theirs(text)["input_ids"]


pieces = st.one_of(
    st.sampled_from([*SPECIALS, " ", "  ", "\n", "the", " and", "é", "e\u0301", "😊", "\u2581"]),
    st.text(st.characters(codec="utf-8"), max_size=6),
)


@pytest.mark.parametrize("case", CASES)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.lists(pieces, max_size=10))
def test_random_text(pairs: dict[str, Any], case: str, parts: list[str]) -> None:
    """Case 38."""
    ours, theirs = pairs[case]
    text = "".join(parts)
    assert ours.encode(text).tolist() == theirs(text)["input_ids"]


@pytest.mark.parametrize("case", CASES)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ids=st.lists(st.integers(0, 899), max_size=14), skip=st.booleans())
def test_decode_equals_transformers_and_streams(
    pairs: dict[str, Any], case: str, ids: list[int], skip: bool
) -> None:
    ours, theirs = pairs[case]
    whole = ours.decode(ids, skip_special_tokens=skip)
    assert whole == theirs.backend_tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("text", TEXTS[:-1])
def test_streamed_text_is_the_whole_text(pairs: dict[str, Any], case: str, text: str) -> None:
    ours: Tokenizer = pairs[case][0]
    prompt, answer = ours.encode("the").tolist(), ours.encode(text, add_special_tokens=False)
    stream = Detokenizer(ours, prompt)
    streamed = "".join([stream.push([token]) for token in answer.tolist()]) + stream.finish()
    both = ours.decode([*prompt, *answer.tolist()])
    assert ours.decode(prompt) + streamed == both


def join_by_score(text: str, tokens: list[str]) -> list[str]:
    """SentencePiece's rule, plainly: join the best-scored neighbours, leftmost first."""
    ids = {token: at for at, token in enumerate(tokens) if at >= len(SPECIALS) + 256}
    parts = list(text)
    while True:
        joint = [(ids[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joint:
            return parts
        at = min(joint)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("text", [*CORPUS[:1], "the", "aaaaaaaaa", "tttthhhheeee  the"])
def test_pieces_are_joined_by_score(pairs: dict[str, Any], tokens: list[str], text: str) -> None:
    """Against the algorithm itself, for text of known letters."""
    known = {token for token in tokens if len(token) == 1}
    words = "".join(letter for letter in text.replace(" ", "\u2581") if letter in known)[:1500]
    ours: Tokenizer = pairs["gemma"][0]
    ids = ours.encode(words.replace("\u2581", " "), add_special_tokens=False).tolist()
    assert [tokens[at] for at in ids] == join_by_score(words, tokens)


def test_unknown_bytes_and_specials(pairs: dict[str, Any], tokens: list[str]) -> None:
    """Case 38: a character that is no token is its bytes; specials are one token each."""
    ours = pairs["llama"][0]
    ids = ours.encode("😊<|user|>").tolist()
    assert [tokens[at] for at in ids] == [
        "<s>",
        "\u2581",
        "<0xF0>",
        "<0x9F>",
        "<0x98>",
        "<0x8A>",
        "<|user|>",
    ]
    assert ours.decode(ids) == "😊"
    assert ours.token_bytes(ids[2]) == b"\xf0"
    assert ours.special_token_ids == {0, 1, 2, 3}
    assert ours.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert (ours.bos_token_id, ours.end_token_ids) == (1, {2})


def test_the_flags_of_the_metadata_are_obeyed(tmp_path: Path, tokens: list[str]) -> None:
    """Case 38."""
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    path = write(tmp_path / "m.gguf", tokens, "llama", **flags)
    ours = load_tokenizer(read_gguf_header(path).metadata)
    assert [tokens[at] for at in ours.encode("x").tolist()] == ["x", "</s>"]
    assert ours.decode(ours.encode(" x")) == " x"


def tiny(**changes: Any) -> dict[str, Any]:
    """Metadata of a small vocabulary; None removes a key."""
    values = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *BYTES, "a", "b", "ab", "bb", "\u2581"],
        "scores": [0.0] * 259 + [-3.0, -4.0, -1.0, -2.0, -5.0],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def test_the_unknown_token_is_found_by_its_type() -> None:
    assert load_tokenizer(tiny()).special_tokens["unk_token"] == "<unk>"


def test_without_byte_tokens_what_is_in_no_token_is_unknown() -> None:
    """As in SentencePiece, one unknown token for a run; nothing is dropped."""
    words = ["<unk>", "<s>", "</s>", "a", "\u2581"]
    small = load_tokenizer(tiny(tokens=words, scores=[0.0] * 5, token_type=[2, 3, 3, 1, 1]))
    assert small.encode("a😊xa").tolist() == [1, 4, 3, 0, 3]


def test_merges_in_the_file_win_over_scores() -> None:
    words = tiny()["tokenizer.ggml.tokens"]
    for merges, wanted in ((None, ["ab", "b"]), (["b b", "a b"], ["a", "bb"])):
        small = load_tokenizer(tiny(merges=merges, add_space_prefix=False, add_bos_token=False))
        assert [words[at] for at in small.encode("abb").tolist()] == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "no tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "scores has 1 entries, tokenizer.ggml.tokens has 264"),
        ({"scores": [0.0] * 263 + [float("nan")]}, "scores holds nan for id 263"),
        ({"token_type": [2, 3, 3, 1] + [6] * 255 + [1] * 5}, "255 byte tokens; .* 256 or none"),
        ({"token_type": [2, 3, 3] + [6] * 257 + [1] * 4}, "holds the byte token 'a'"),
        ({"token_type": [1] * 264}, "unknown_token_id is missing, and there are no byte tokens"),
        ({"bos_token_id": 264}, "bos_token_id=264 .* between 0 and 263"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"merges": ["a zz"]}, "merges does not fit"),
    ],
)
def test_bad_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    """Case 38: key, value and limit."""
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tiny(**changes))


def test_scores_without_an_order_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"scores are all -1000\.0"):
        load_tokenizer(tiny(scores=[-1000.0] * 264))
