"""How little text a token must stand for, so that a text can be too long before it is tokenized."""

from __future__ import annotations

import json
from typing import Any

from pelton.tokens.tokenizer import Tokenizer

_NFC_FACTOR = 4
"""Canonical composition (Unicode, UAX 15) makes at most three bytes one: Hangul syllables do."""


def lost_bytes(tokenizer: Tokenizer) -> bytes:
    """Those that a byte-level vocabulary has no token for: they vanish from a text. (SmolLM2's has
    none for some control characters.)"""
    if not tokenizer.is_byte_level:
        return b""
    vocabulary = json.loads(tokenizer.backend.to_str())["model"]["vocab"]
    known = {tokenizer.token_bytes(i) for token, i in vocabulary.items() if len(token) == 1}
    return bytes(byte for byte in range(256) if bytes([byte]) not in known)


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """Bytes of UTF-8 that the longest token stands for, so that n bytes of text, `lost_bytes` not
    counted, are n / this tokens at least; None where nothing is certain.

    It is certain for tokenizers whose tokens are pieces of the text, one after another and without
    gaps: BPE over bytes, and BPE that falls back to bytes. Nothing is where the text may lose bytes
    before, a special token swallows the space around it, or unknown characters become one token.
    """
    state = json.loads(tokenizer.backend.to_str())
    model, added = state["model"], state["added_tokens"]
    factor = _normaliser_factor(state["normalizer"])
    if factor is None or model["type"] != "BPE":
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if "Removed" in json.dumps(state["pre_tokenizer"]):
        return None
    vocabulary = model["vocab"]
    falls_back = model["byte_fallback"] and all(f"<0x{b:02X}>" in vocabulary for b in range(256))
    if not (tokenizer.is_byte_level or falls_back):
        return None
    # Each letter of a byte-level token is a byte of text, and two bytes or one of its own name.
    longest = max((len(token.encode()) for token in vocabulary), default=1)
    return factor * max(longest, *(len(token["content"].encode()) for token in added), 1)


def _normaliser_factor(normaliser: dict[str, Any] | None) -> int | None:
    """How many times shorter, in bytes, it makes a text at most."""
    if normaliser is None:
        return 1
    kind = normaliser["type"]
    if kind == "Sequence":
        factor = 1
        for one in normaliser["normalizers"]:
            part = _normaliser_factor(one)
            if part is None:
                return None
            factor *= part
        return factor
    if kind == "NFC":
        return _NFC_FACTOR
    if kind == "Prepend":
        return 1
    if kind == "Replace":
        pattern = normaliser["pattern"].get("String")
        if pattern and len(normaliser["content"].encode()) >= len(pattern.encode()):
            return 1
    return None
