from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_engine import smollm2
from support.texts import byte_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pelton.tokens.byte_bound import lost_bytes, max_bytes_per_token
from pelton.tokens.tokenizer import Tokenizer


def fallback_tokenizer(normalizer: object = None, **token: bool) -> Tokenizer:
    """As Llama 2's: space marks, and bytes for what has no token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "aa"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: place for place, word in enumerate(words)},
            merges=[("\u2581", "a"), ("a", "a")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizer or normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<turn>", **token)])
    return Tokenizer(backend, special_tokens={})


def nfc_tokenizer() -> Tokenizer:
    backend = byte_tokenizer().backend
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.normalizer = normalizers.NFC()
    return Tokenizer(copy, special_tokens={})


CERTAIN = [byte_tokenizer(), fallback_tokenizer(), nfc_tokenizer(), smollm2()[2]]
KNOWN = [(each, max_bytes_per_token(each), lost_bytes(each)) for each in CERTAIN]


@pytest.mark.parametrize(("tokenizer", "width", "lost"), KNOWN)
@settings(deadline=None)
@given(
    text=st.text(
        st.sampled_from(
            [*"a \n", "\u1112", "\u1161", "\u11ab", "\u0323", "\u0302", "\u00e9", "\U0001f60a"]
        )
        | st.characters(exclude_categories=["Cs"])
    )
)
def test_no_text_has_fewer_tokens_than_its_bytes_say(
    tokenizer: Tokenizer, width: int | None, lost: bytes, text: str
) -> None:
    assert width is not None
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert num_tokens * width >= len(text.encode().translate(None, lost))


def test_bytes_without_a_token_vanish() -> None:
    """SmolLM2 has none for U+0016; a text of it may be as long as it likes."""
    assert [lost_bytes(tokenizer) for tokenizer in CERTAIN[:3]] == [b"", b"", b""]
    tokenizer = smollm2()[2]
    lost = lost_bytes(tokenizer)
    assert b"\x16" in lost
    for byte in range(128):
        ids = tokenizer.encode(chr(byte), add_special_tokens=False)
        assert (len(ids) == 0) == (byte in lost), byte


def test_widths() -> None:
    assert [max_bytes_per_token(tokenizer) for tokenizer in CERTAIN[:3]] == [6, 6, 24]


def with_parts(**parts: object) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend, special_tokens={})


@pytest.mark.parametrize(
    "tokenizer",
    [
        with_parts(normalizer=normalizers.NFKC()),
        with_parts(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        with_parts(normalizer=normalizers.Replace("aaaa", "b")),
        with_parts(normalizer=normalizers.Replace(Regex(" +"), " ")),
        with_parts(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        with_parts(model=models.WordLevel({"a": 0}, unk_token="a")),
        fallback_tokenizer(lstrip=True),
        fallback_tokenizer(rstrip=True),
    ],
)
def test_nothing_is_certain_where_text_may_vanish(tokenizer: Tokenizer) -> None:
    assert max_bytes_per_token(tokenizer) is None
