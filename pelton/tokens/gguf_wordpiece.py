"""WordPiece ("bert") from a GGUF vocabulary.

Files spell a piece that begins a word with U+2581 before it and one inside a word as it is; the
source model spells the former as it is and the latter with "##" before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pelton.errors import CheckpointError
from pelton.tokens.gguf_vocabulary import GgufVocabulary

_BEGINS_WORD = "\u2581"
_MAX_WORD = 100  # characters; a longer word is unknown (Devlin et al., 2018, reference code)


def wordpiece_texts(vocabulary: GgufVocabulary) -> list[str]:
    """The tokens as the source model spells them.

    Raises CheckpointError when no token begins a word.
    """
    control = set(vocabulary.control)
    if not any(text.startswith(_BEGINS_WORD) for text in vocabulary.tokens):
        raise CheckpointError(
            "tokenizer.ggml.tokens has none that begins with U+2581, as those of model 'bert' that "
            "begin a word do."
        )
    return [
        text
        if at in control
        else text.removeprefix(_BEGINS_WORD)
        if text.startswith(_BEGINS_WORD)
        else "##" + text
        for at, text in enumerate(vocabulary.tokens)
    ]


def wordpiece_backend(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """Model, normalizer, pre-tokenizer and decoder; no special tokens yet.

    Files do not say whether text is put in small letters. It is (and loses its accents, as in the
    source) unless a token has a capital, which could never be found otherwise.
    """
    unknown = vocabulary.tokens[vocabulary.special["unk_token"]]
    control = set(vocabulary.control)
    has_capitals = any(text != text.lower() for text, at in ids.items() if at not in control)
    backend = tokenizers.Tokenizer(
        models.WordPiece(
            dict(ids),
            unk_token=unknown,
            max_input_chars_per_word=_MAX_WORD,
            continuing_subword_prefix="##",
        )
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=not has_capitals)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend
