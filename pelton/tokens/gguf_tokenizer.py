"""The tokenizer that a GGUF file carries in its metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (tokenizer.ggml.*). Supported is
model "gpt2", byte-level BPE. How text is cut before merging is not in the file, only its name
(`tokenizer.ggml.pre`), so each name needs the rule of the source model; others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pelton.errors import CheckpointError, UnsupportedError

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPECIAL_ROLES = ("bos", "eos", "unknown", "padding", "eot", "eom")


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreTokenizer:
    """How a source model cuts text, beyond its vocabulary.

    pattern: regular expression whose matches are the words; None = the pattern of GPT-2.
    splits_digits: every numeric character is its own word, before the pattern is applied.
    ignore_merges: a word that is a token is taken whole.
    nfc: text is brought to Unicode form NFC first.
    adds_bos: what a missing add_bos_token means.
    """

    pattern: str | None = None
    splits_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


def _contractions_words_digits(digits: str) -> str:
    """The family of cl100k: contractions in any case, words with one leading sign, digits, ..."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = _PreTokenizer()
_DIGITS_THEN_GPT2 = _PreTokenizer(splits_digits=True)
_LLAMA3 = _PreTokenizer(
    pattern=_contractions_words_digits(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True
)
_QWEN2 = _PreTokenizer(pattern=_contractions_words_digits(r"\p{N}"), nfc=True)

_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """What the metadata says, checked.

    bos, eos, unknown, padding: ids or None. end_of_turn: further ids that end an answer.
    control, user_defined: ids found in text as one token; control ones count as special.
    """

    tokens: list[str]
    merges: list[str]
    pre: str
    control: list[int]
    user_defined: list[int]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    end_of_turn: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    chat_templates: dict[str, str]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> GgufVocabulary:
        """Check the tokenizer.* keys of a GGUF file.

        Raises CheckpointError naming key, value and limit, UnsupportedError naming what is not
        supported.
        """
        model = _required(metadata, "model")
        if model != "gpt2":
            raise UnsupportedError(
                f"tokenizer.ggml.model={model!r} is not supported yet; supported is 'gpt2' "
                "(byte-level BPE). Give a folder with tokenizer.json as the tokenizer instead."
            )
        pre = _required(metadata, "pre")
        if pre not in _PRE_TOKENIZERS:
            raise UnsupportedError(
                f"tokenizer.ggml.pre={pre!r} is not supported; supported are "
                f"{', '.join(sorted(_PRE_TOKENIZERS))}. Give a folder with tokenizer.json as the "
                "tokenizer instead."
            )
        tokens = _strings(metadata, "tokens")
        merges = _strings(metadata, "merges")
        if not tokens:
            raise CheckpointError("tokenizer.ggml.tokens is empty; the file is damaged.")
        listed = metadata.get(_PREFIX + "token_type")
        kinds = [_NORMAL] * len(tokens) if listed is None else list(listed)
        if len(kinds) != len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.token_type has {len(kinds)} entries, tokenizer.ggml.tokens has "
                f"{len(tokens)}; the file is damaged."
            )
        if _flag(metadata, "add_space_prefix", False):
            raise UnsupportedError(
                "tokenizer.ggml.add_space_prefix=true is not supported for model 'gpt2'."
            )
        special = {role: _token_id(metadata, role, len(tokens)) for role in _SPECIAL_ROLES}
        add_bos = _flag(metadata, "add_bos_token", _PRE_TOKENIZERS[pre].adds_bos)
        add_eos = _flag(metadata, "add_eos_token", False)
        for role, wanted in (("bos", add_bos), ("eos", add_eos)):
            if wanted and special[role] is None:
                raise CheckpointError(
                    f"tokenizer.ggml.add_{role}_token is true, but tokenizer.ggml.{role}_token_id "
                    "is missing."
                )
        named = {token for token in special.values() if token is not None}
        control = [at for at, kind in enumerate(kinds) if kind == _CONTROL or at in named]
        return cls(
            tokens=tokens,
            merges=merges,
            pre=pre,
            control=control,
            user_defined=[
                at for at, kind in enumerate(kinds) if kind == _USER_DEFINED and at not in named
            ],
            bos=special["bos"],
            eos=special["eos"],
            unknown=special["unknown"],
            padding=special["padding"],
            end_of_turn=tuple(
                token for token in (special["eot"], special["eom"]) if token is not None
            ),
            add_bos=add_bos,
            add_eos=add_eos,
            chat_templates=_chat_templates(metadata),
        )


def build_gguf_tokenizer(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """A `tokenizers.Tokenizer` with the ids of the file.

    Raises CheckpointError if tokens repeat or a merge names a token that does not exist.
    """
    rule = _PRE_TOKENIZERS[vocabulary.pre]
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        first = next(at for at, text in enumerate(vocabulary.tokens) if ids[text] != at)
        text = vocabulary.tokens[first]
        raise CheckpointError(
            f"tokenizer.ggml.tokens holds {text!r} twice (ids {first} and {ids[text]})."
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    try:
        model = models.BPE(vocab=ids, merges=pairs, ignore_merges=rule.ignore_merges)  # type: ignore[arg-type]
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}."
        ) from None
    backend = tokenizers.Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    tokens = vocabulary.tokens
    backend.add_special_tokens(
        [AddedToken(tokens[at], normalized=False) for at in vocabulary.control]
    )
    backend.add_tokens([AddedToken(tokens[at], normalized=False) for at in vocabulary.user_defined])
    if vocabulary.add_bos or vocabulary.add_eos:
        backend.post_processor = surround(
            backend,
            bos=None
            if vocabulary.bos is None or not vocabulary.add_bos
            else tokens[vocabulary.bos],
            eos=None
            if vocabulary.eos is None or not vocabulary.add_eos
            else tokens[vocabulary.eos],
        )
    return backend


def surround(
    backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None
) -> processors.TemplateProcessing:
    """Post-processor that puts BOS before and EOS after a text, each if given."""
    used = [text for text in (bos, eos) if text is not None]
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    return processors.TemplateProcessing(
        single=single, special_tokens=[(text, backend.token_to_id(text)) for text in used]
    )


def _pre_tokenizer(rule: _PreTokenizer) -> pre_tokenizers.PreTokenizer:
    if rule.pattern is not None:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not rule.splits_digits:
        return gpt2
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    key = _PREFIX + name
    if metadata.get(key) is None:
        raise CheckpointError(
            f"the GGUF file has no {key}. Convert the model again with a newer converter, or give "
            "a folder with tokenizer.json as the tokenizer."
        )
    return metadata[key]


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = list(_required(metadata, name))
    wrong = next((value for value in values if not isinstance(value, str)), None)
    if wrong is not None:
        raise CheckpointError(f"{_PREFIX}{name} must be a list of strings, but holds {wrong!r}.")
    return values


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name)
    return default if value is None else bool(value)


def _token_id(metadata: Mapping[str, Any], role: str, num_tokens: int) -> int | None:
    key = f"{_PREFIX}{role}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not 0 <= int(value) < num_tokens:
        raise CheckpointError(
            f"{key}={value} is outside the vocabulary; it must be between 0 and {num_tokens - 1}."
        )
    return int(value)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer.chat_template is the default one, tokenizer.chat_template.NAME are others."""
    keys = {"default": "tokenizer.chat_template"} | {
        str(name): f"tokenizer.chat_template.{name}"
        for name in metadata.get("tokenizer.chat_templates") or ()
    }
    templates = {}
    for name, key in keys.items():
        source = metadata.get(key)
        if source is None:
            continue
        if not isinstance(source, str):
            raise CheckpointError(f"{key} must be a string, got {type(source).__name__}.")
        templates[name] = source
    return templates
