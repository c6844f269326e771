from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from pelton.errors import RequestError
from pelton.tokens.detokenizer import Detokenizer, OutputText, TextDelta
from pelton.tokens.tokenizer import Tokenizer, load_tokenizer


def byte_tokenizer(extra: tuple[str, ...] = ()) -> Tokenizer:
    """Ids 0..255 are the bytes; then </s> (256, special), <tool> (257), and `extra`."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letter = {byte: chr(byte) for byte in plain}
    letter |= {byte: chr(256 + at) for at, byte in enumerate(others)}
    tokens = [letter[byte] for byte in range(256)] + ["</s>", "<tool>", *extra]
    return load_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256 + [3, 4] + [1] * len(extra),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 256,
        }
    )


BYTES = byte_tokenizer()


def spm_tokenizer() -> Tokenizer:
    """A Llama 2 like vocabulary: leading space marks, byte fallback."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581Hello", "\u2581world", "ly", "\u2581"]
    vocab = {text: at for at, text in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


SPM = spm_tokenizer()


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = Detokenizer(tokenizer, prompt or [])
    return [*(stream.push([token]) for token in ids), stream.finish()]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("😊".encode(), ["", "", "", "😊", ""]),
        (b"a\x80b", ["a", "\ufffd", "b", ""]),
        (b"\xf0\x9fA", ["", "", "\ufffdA", ""]),
        (b"\xe2\x82", ["", "", "\ufffd"]),
        (b"\xff\xfe", ["\ufffd", "\ufffd", ""]),
        (b"\xc3\xa9\xc3", ["", "é", "", "\ufffd"]),
        (b"\xe0\x80\x80", ["", "\ufffd\ufffd", "\ufffd", ""]),
    ],
)
def test_bytes(raw: bytes, expected: list[str]) -> None:
    """Case 23: whole characters; broken ones are replaced as soon as that is certain."""
    assert pieces_of(BYTES, list(raw)) == expected
    json.dumps("".join(expected)).encode()


def test_half_a_character_before_the_end_token() -> None:
    """Case 23."""
    assert pieces_of(BYTES, [0xF0, 0x9F, 256]) == ["", "", "", "\ufffd"]
    stream = Detokenizer(BYTES, [], skip_special_tokens=False)
    assert stream.push([0xF0, 0x9F, 256]) == "\ufffd</s>"


def test_added_tokens_between_bytes() -> None:
    """Case 23."""
    assert pieces_of(BYTES, [0xC3, 257, 0xA9]) == ["", "\ufffd<tool>", "\ufffd", ""]


@pytest.mark.parametrize("token", [-1, 258, 2**31, 2**40])
@pytest.mark.parametrize("tokenizer", [BYTES, SPM], ids=["bytes", "spm"])
def test_impossible_ids(tokenizer: Tokenizer, token: int) -> None:
    """Case 25: no text and no exception, and the stream goes on."""
    impossible = token if token not in (258,) else tokenizer.vocab_size
    ids = tokenizer.encode("ly").tolist()
    assert "".join(pieces_of(tokenizer, [*ids, impossible, *ids])) == "lyly"


def test_character_begun_by_the_prompt() -> None:
    """The answer shows the whole character, or nothing of it if it stays broken."""
    smile = list("😊".encode())
    assert pieces_of(BYTES, smile[2:], prompt=[65, *smile[:2]]) == ["", "😊", ""]
    assert pieces_of(BYTES, [66], prompt=[65, *smile[:2]]) == ["B", ""]
    assert pieces_of(BYTES, [], prompt=[65, *smile[:2]]) == [""]
    assert pieces_of(BYTES, [256, 66], prompt=[65, *smile[:2]]) == ["", "B", ""]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.integers(-2, 300), st.sampled_from(list("aé😊€".encode()))), max_size=16
    ),
    cuts=st.lists(st.integers(0, 16), max_size=6),
    skip=st.booleans(),
)
def test_pieces_join_to_the_one_shot_text(ids: list[int], cuts: list[int], skip: bool) -> None:
    """Case 23: however the ids are grouped."""
    stream = Detokenizer(BYTES, [65], skip_special_tokens=skip)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    text = ""
    for low, high in pairwise(bounds):
        text += stream.push(np.array(ids[low:high], dtype=np.int32))
        valid_so_far = BYTES.decode(ids[:high], skip_special_tokens=skip)
        assert valid_so_far.startswith(text)
        # One character may be held; half a surrogate (ED A0) is two replacements, and Python's
        # decoder makes sure of it only with the next byte.
        assert len(valid_so_far) - len(text) <= 2
        assert set(valid_so_far[len(text) :]) <= {"\ufffd"}
    assert text + stream.finish() == BYTES.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_real_vocabulary(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Case 23, on random ids of SmolLM2."""
    assert "".join(pieces_of(tokenizer, ids, prompt=[1, 2, 3])) == tokenizer.decode(ids)


def test_leading_space_follows_the_prompt() -> None:
    """A decoder that drops the first space of a text must not drop it inside one."""
    hello, world, suffix = (SPM.backend.token_to_id(text) for text in ("▁Hello", "▁world", "ly"))
    assert pieces_of(SPM, [world, suffix], prompt=[0, hello]) == [" world", "ly", ""]
    assert pieces_of(SPM, [hello, world]) == ["Hello", " world", ""]
    assert pieces_of(SPM, [world], prompt=[0]) == ["world", ""]


def test_byte_fallback() -> None:
    """Case 23 for a decoder that looks at neighbours."""
    byte = SPM.backend.token_to_id("<0x00>")
    hello = SPM.backend.token_to_id("▁Hello")
    smile = [byte + value for value in "😊".encode()]
    assert pieces_of(SPM, [*smile, hello], prompt=[hello]) == ["", "", "", "😊", " Hello", ""]
    assert pieces_of(SPM, [byte + 0xE2, hello], prompt=[hello])[1:] == ["\ufffd Hello", ""]
    assert pieces_of(SPM, smile[:2], prompt=[hello])[:2] == ["", ""]
    assert "".join(pieces_of(SPM, smile[:2], prompt=[hello])).startswith("\ufffd")
    broken = "".join(pieces_of(SPM, [byte + 0x80] * 50 + [hello], prompt=[hello]))
    assert broken.endswith("\ufffd Hello")


def test_window_stays_short() -> None:
    """Constant work per token, also while nothing but broken bytes or empty tokens comes."""
    byte = SPM.backend.token_to_id("<0x80>")
    for token in (byte, 1, SPM.backend.token_to_id("ly")):
        stream = Detokenizer(SPM, [0], skip_special_tokens=False)
        for _ in range(200):
            stream.push([token])
        assert len(stream._stream._window) <= 12  # type: ignore[attr-defined]


PIECES = ("A", "BC", "DEF", "G", "HI", "J", "K")
WORDS = byte_tokenizer(extra=tuple(piece for piece in PIECES if len(piece) > 1))
IDS = [WORDS.backend.token_to_id(piece) for piece in PIECES]


def output(**options: object) -> OutputText:
    return OutputText(WORDS, [65], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("stop", "include", "expected", "matched", "used"),
    [
        (("DEFGHIJ",), False, "ABC", "DEFGHIJ", 6),
        (("DEFGHIJ",), True, "ABCDEFGHIJ", "DEFGHIJ", 6),
        (("GX", "DEFGQ"), False, "ABCDEFGHIJK", None, 7),
        (("C",), False, "AB", "C", 2),
        (("C",), True, "ABC", "C", 2),
        (("FG", "DEFG"), False, "ABC", "DEFG", 4),
        (("\n\n",), False, "ABCDEFGHIJK", None, 7),
        ((), False, "ABCDEFGHIJK", None, 7),
    ],
)
def test_output_text(
    size: int,
    stop: tuple[str, ...],
    include: bool,
    expected: str,
    matched: str | None,
    used: int,
) -> None:
    """Case 22: the same text, stop and number of tokens, however many tokens a step makes."""
    answer = output(stop=stop, include_stop=include)
    text, total, found = "", 0, None
    for low in range(0, len(IDS), size):
        delta = answer.push(np.array(IDS[low : low + size], dtype=np.int32))
        text, total = text + delta.text, total + delta.num_tokens_used
        found = delta.matched_stop or found
    text += answer.finish().text
    assert (text, found, total) == (expected, matched, used)


def test_nothing_follows_a_match() -> None:
    answer = output(stop=("BC",))
    assert answer.push(IDS) == TextDelta("A", "BC", 2)
    assert answer.push(IDS) == TextDelta("", None, 0)
    assert answer.finish() == TextDelta("", None, 0)


@pytest.mark.parametrize("stop", [(), ("ZZ",)])
@pytest.mark.parametrize("end", [256, IDS[2]])
def test_end_token_gives_no_text_but_counts(stop: tuple[str, ...], end: int) -> None:
    """Specification 4.4: EOS or a stop token id; shown only if stop texts are included."""
    answer = output(stop=stop, skip_special_tokens=False)
    assert answer.push([IDS[0], end], ends=True) == TextDelta("A", None, 2)
    answer = output(stop=stop, skip_special_tokens=False, include_stop=True)
    assert answer.push([IDS[0], end], ends=True) == TextDelta("A" + WORDS.token_text(end), None, 2)


def test_held_text_comes_out_at_the_end() -> None:
    answer = output(stop=("KX",))
    assert answer.push(IDS).text == "ABCDEFGHIJ"
    assert answer.finish() == TextDelta("K", None, 0)


def test_half_a_character_may_complete_a_stop_string() -> None:
    answer = output(stop=("A\ufffd",))
    assert answer.push([IDS[0], 0xF0]) == TextDelta("", None, 2)
    assert answer.finish() == TextDelta("", "A\ufffd", 0)


@pytest.mark.parametrize(
    ("min_tokens", "expected", "matched"),
    [(1, "A", "BC"), (2, "A", "BC"), (3, "ABCA", "BC"), (4, "ABCA", "BC"), (5, "ABCABCA", "BC")],
)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_min_tokens(min_tokens: int, expected: str, matched: str, size: int) -> None:
    """A stop string counts if it is complete at token `min_tokens` or later."""
    answer = output(stop=("BC",), min_tokens=min_tokens)
    ids = [IDS[0], IDS[1]] * 3
    text, found = "", None
    for low in range(0, len(ids), size):
        delta = answer.push(ids[low : low + size])
        text, found = text + delta.text, found or delta.matched_stop
    assert (text, found) == (expected, matched)


def test_min_tokens_inside_a_stop_string() -> None:
    """It may begin before `min_tokens`; then nothing of it is shown."""
    answer = output(stop=("CDEFG",), min_tokens=4)
    assert [answer.push([token]).text for token in IDS[:3]] == ["A", "B", ""]
    assert answer.push([IDS[3]]) == TextDelta("", "CDEFG", 1)


def test_long_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="at most 16384"):
        output(stop=("a" * 20_000,))
