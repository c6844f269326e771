"""Byte-level BPE ("gpt2") from a GGUF vocabulary.

How text is cut before merging is not in the file, only its name (`tokenizer.ggml.pre`), so each
name needs the rule of the source model's tokenizer.json; other names are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from pelton.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """How a source model cuts text, beyond its vocabulary.

    patterns: regular expressions, applied one after the other, whose matches (and what lies
        between them) are the words; none = the pattern of GPT-2.
    splits_digits: every numeric character is its own word, before the pattern is applied.
    ignore_merges: a word that is a token is taken whole.
    nfc: text is brought to Unicode form NFC first.
    adds_bos: what a missing add_bos_token means.
    """

    patterns: tuple[str, ...] = ()
    splits_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words_and_digits(digits: str) -> str:
    """The family of cl100k: contractions in any case, words with one leading sign, digits, ..."""
    return (
        _CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_words_and_digits(after_word: str, digits: str) -> str:
    """The family of o200k: a word is capitals and then small letters, a sign before it."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    sign = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{sign}{upper}*{lower}+{after_word}|{sign}{upper}+{lower}*{after_word}|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = PreTokenizer()
_DIGITS_THEN_GPT2 = PreTokenizer(splits_digits=True)
_CL100K = PreTokenizer(patterns=(_words_and_digits(r"\p{N}{1,3}"),))
_LLAMA3 = PreTokenizer(
    patterns=(_words_and_digits(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True
)
_QWEN2 = PreTokenizer(patterns=(_words_and_digits(r"\p{N}"),), nfc=True)
_O200K = PreTokenizer(patterns=(_cased_words_and_digits(_CONTRACTIONS + "?", r"\p{N}{1,3}"),))
_TEKKEN = PreTokenizer(
    patterns=(_cased_words_and_digits("", r"\p{N}"),), ignore_merges=True, adds_bos=True
)
_DEEPSEEK3 = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "dbrx": _CL100K,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK3,
}


def byte_level_backend(
    ids: Mapping[str, int], merges: Sequence[str], pre: str
) -> tokenizers.Tokenizer:
    """Model, normalizer, pre-tokenizer and decoder; no special tokens yet.

    Raises CheckpointError if a merge names a token that does not exist.
    """
    rule = PRE_TOKENIZERS[pre]
    backend = tokenizers.Tokenizer(bpe(ids, pairs(merges), ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    return backend


def pairs(merges: Sequence[str]) -> list[tuple[str, ...]]:
    """Each "left right" as (left, right)."""
    return [tuple(merge.split(" ", 1)) for merge in merges]


def bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, ...]], **options: object) -> models.BPE:
    """A BPE model. Raises CheckpointError if a merge names a token that does not exist."""
    try:
        return models.BPE(vocab=dict(ids), merges=merges, **options)  # type: ignore[arg-type]
    except Exception:  # the library raises bare Exception, in words of its own
        raise CheckpointError(
            f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {_misfit(ids, merges)}."
        ) from None


def _misfit(ids: Mapping[str, int], merges: Sequence[tuple[str, ...]]) -> str:
    """The first merge that cannot be, and why."""
    for number, pair in enumerate(merges):
        if len(pair) != 2:
            return f"entry {number}, {pair[0]!r}, is not two tokens with a space between them"
        for piece in (*pair, "".join(pair)):
            if piece not in ids:
                return f"entry {number}, {' '.join(pair)!r}, needs the token {piece!r}"
    return "they contradict each other"


def _pre_tokenizer(rule: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    if rule.patterns:
        return pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(p), behavior="isolated") for p in rule.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not rule.splits_digits:
        return gpt2
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
