"""How little text a token must stand for, so that a text can be too long before it is tokenized."""

from __future__ import annotations

import json

from pelton.tokens.tokenizer import Tokenizer


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """Bytes of UTF-8 that the longest token stands for, so that n bytes of text are n / this tokens
    at least; None where nothing is certain.

    It is certain for byte-level tokenizers, whose tokens are the text's bytes, one after another,
    unless something changes the text before, or a special token swallows the space around it.
    """
    state = json.loads(tokenizer.backend.to_str())
    if not tokenizer.is_byte_level or state["normalizer"] is not None:
        return None
    if any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None
    if "Removed" in json.dumps(state["pre_tokenizer"]) or state["model"]["type"] != "BPE":
        return None
    longest = max(map(len, state["model"]["vocab"]), default=0)  # a letter stands for a byte
    added = max((len(token["content"].encode()) for token in state["added_tokens"]), default=0)
    return max(longest, added, 1)
