"""The tokenizer that a GGUF file carries in its metadata."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, processors

from pelton.errors import CheckpointError
from pelton.tokens.gguf_byte_level import byte_level_backend
from pelton.tokens.gguf_sentencepiece import piece_texts, sentencepiece_backend
from pelton.tokens.gguf_vocabulary import GgufVocabulary
from pelton.tokens.gguf_wordpiece import wordpiece_backend, wordpiece_texts


def build_gguf_tokenizer(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """A `tokenizers.Tokenizer` with the ids of the file.

    Raises CheckpointError if tokens repeat or a merge names a token that does not exist, and as
    the three backends do.
    """
    if vocabulary.model == "llama":
        texts = piece_texts(vocabulary)
        backend = sentencepiece_backend(vocabulary, _ids(texts))
    elif vocabulary.model == "bert":
        texts = wordpiece_texts(vocabulary)
        backend = wordpiece_backend(vocabulary, _ids(texts))
    else:
        texts = vocabulary.tokens
        backend = byte_level_backend(_ids(texts), vocabulary.merges, vocabulary.pre)
    backend.add_special_tokens(
        [AddedToken(texts[at], normalized=False) for at in vocabulary.control]
    )
    backend.add_tokens(
        [
            AddedToken(texts[at], normalized=False)
            for at in vocabulary.user_defined
            # A respelt piece is made by merging; as an added token it would match U+2581 in text.
            if texts[at] == vocabulary.tokens[at]
        ]
    )
    if vocabulary.first is not None or vocabulary.last is not None:
        backend.post_processor = surround(
            backend,
            bos=None if vocabulary.first is None else texts[vocabulary.first],
            eos=None if vocabulary.last is None else texts[vocabulary.last],
        )
    return backend


def _ids(texts: list[str]) -> dict[str, int]:
    ids = {text: token for token, text in enumerate(texts)}
    if len(ids) != len(texts):
        first = next(at for at, text in enumerate(texts) if ids[text] != at)
        text = texts[first]
        raise CheckpointError(
            f"tokenizer.ggml.tokens holds {text!r} twice (ids {first} and {ids[text]})."
        )
    return ids


def surround(
    backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None
) -> processors.TemplateProcessing:
    """Post-processor that puts BOS before and EOS after a text, each if given."""
    used = [text for text in (bos, eos) if text is not None]
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    return processors.TemplateProcessing(
        single=single, special_tokens=[(text, backend.token_to_id(text)) for text in used]
    )
