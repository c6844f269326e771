"""SentencePiece BPE with byte fallback ("llama") from a GGUF vocabulary.

The file has scores and usually no merges. SentencePiece joins the neighbours whose joint piece has
the highest score, so the merges are all ways to cut a piece in two pieces, best score first
(https://github.com/google/sentencepiece, src/bpe_model.cc).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from pelton.errors import CheckpointError, UnsupportedError
from pelton.tokens.gguf_byte_level import bpe, pairs
from pelton.tokens.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, GgufVocabulary

_SPACE = "\u2581"  # stands for a space in pieces
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# Metadata do not say where else than at its start a text gets a space. As transformers has it: the
# Phi-3 models after every special token, too; all others only at the very start.
_SPACE_AFTER_SPECIALS = ("phi3",)
# The Gemma models' scores are not their order of merging; that is the order of the pieces.
_MERGED_BY_PLACE = ("gemma", "gemma2", "gemma3")


def piece_texts(vocabulary: GgufVocabulary) -> list[str]:
    """The tokens as pieces. Gemma's files spell runs of spaces, which are pieces, as spaces."""
    if vocabulary.architecture not in _MERGED_BY_PLACE:
        return vocabulary.tokens
    return [
        text.replace(" ", _SPACE) if len(text) > 1 and not text.strip(" ") else text
        for text in vocabulary.tokens
    ]


def sentencepiece_backend(
    vocabulary: GgufVocabulary, ids: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """Model, normalizer, pre-tokenizer and decoder; no special tokens yet.

    Raises CheckpointError for byte tokens that are not all 256, and for a vocabulary that has
    neither these nor an unknown token; UnsupportedError for scores that give no order.
    """
    _check_bytes(vocabulary)
    unknown = vocabulary.special.get("unk_token")
    backend = tokenizers.Tokenizer(
        bpe(
            ids,
            pairs(vocabulary.merges) or _merges(vocabulary, ids),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if vocabulary.adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    if not vocabulary.adds_space:
        backend.normalizer = spaces
    elif vocabulary.architecture in _SPACE_AFTER_SPECIALS:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme="first", split=False
        )
    return backend


def _check_bytes(vocabulary: GgufVocabulary) -> None:
    found = {
        text for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == BYTE
    }
    wrong = next((text for text in sorted(found) if not _BYTE_PIECE.fullmatch(text)), None)
    if wrong is not None:
        raise CheckpointError(
            f"tokenizer.ggml.tokens holds the byte token {wrong!r}; these are '<0x00>' to '<0xFF>'."
        )
    if found and len(found) < 256:
        raise CheckpointError(
            f"tokenizer.ggml.tokens holds {len(found)} byte tokens; there must be all 256 or none."
        )
    if not found and "unk_token" not in vocabulary.special:
        raise CheckpointError(
            "tokenizer.ggml.unknown_token_id is missing, and there are no byte tokens; text that "
            "is in no token could not be encoded."
        )


def _merges(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> list[tuple[str, ...]]:
    """(left, right), best first. Equal scores: the longer left piece first, as transformers has it.

    Control, unknown and byte tokens are never made by joining.
    """
    by_place = vocabulary.architecture in _MERGED_BY_PLACE
    pieces = {
        text: -at if by_place else vocabulary.scores[at]
        for text, at in ids.items()
        if vocabulary.kinds[at] not in (CONTROL, UNKNOWN, BYTE)
    }
    found: list[tuple[float, int, int, tuple[str, ...]]] = []
    for text, score in pieces.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pieces and right in pieces:
                found.append((-score, -cut, cut - len(text), (left, right)))
    if len(found) > 1 and not by_place and len({score for score, *_ in found}) == 1:
        raise UnsupportedError(
            f"tokenizer.ggml.scores are all {-found[0][0]}, so that they give no order of merging, "
            "and there are no merges. Give a folder with tokenizer.json as the tokenizer instead."
        )
    found.sort(key=itemgetter(0, 1, 2))
    return [merge for *_, merge in found]
