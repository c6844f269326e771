"""Tokenizers whose tokens are bytes, so that tests can spell any text, whole or torn."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pelton.tokens.tokenizer import Tokenizer

END, START, TURN = 256, 257, 258
NUM_TOKENS = 259

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token }}{{ message.role }}\n{{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)


def byte_backend() -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes, then </s>, <s> and <turn>, which are special."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>"), AddedToken("<s>"), AddedToken("<turn>")])
    return backend


@functools.cache
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(
        byte_backend(),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_templates={"default": CHAT_TEMPLATE},
    )
