"""What a GGUF file's metadata say about its tokenizer, checked.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (tokenizer.ggml.*).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pelton.errors import CheckpointError, UnsupportedError
from pelton.tokens.gguf_byte_level import PRE_TOKENIZERS

_PREFIX = "tokenizer.ggml."
_NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_MODELS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece BPE",
    "bert": "WordPiece",
}
_ELSE = "Give a folder with tokenizer.json as the tokenizer instead."
# Name of a special token, as transformers has it -> its key, <key>_token_id.
_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "cls_token": "cls",
    "sep_token": "seperator",  # spelt so in the format
    "mask_token": "mask",
}
_ENDS_OF_TURN = ("eot", "eom")
# Many files of chat models name EOS and no end of turn, so it is known by its text, as llama.cpp
# does it: Llama 3, ChatML (Qwen and others), Gemma, Phi-3.
_TURN_END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
# In a vocabulary with this token, "<|end|>" ends a message and not an answer (gpt-oss).
_ANSWER_END_TEXTS = ("<|return|>", "<|call|>")
_BERT_TEXTS = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """model: "gpt2", "llama" or "bert". architecture: general.architecture, or "".

    tokens, kinds: one each per id; kinds are those of ggml (1 normal, 2 unknown, 3 control, 4
        user-defined, 5 unused, 6 byte). scores: one per id, or empty. merges: "left right", in
        order, or empty. pre: the rule that cuts text, for "gpt2".
    special: "bos_token", "eos_token", ... -> id. end_of_turn: further ids that end an answer; by
        their texts, where the file names none.
    control, user_defined: ids found in text as one token; control ones count as special.
    first, last: ids put before and after a text, or None.
    adds_space: a space is put before a text ("llama").
    """

    model: str
    architecture: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[str]
    pre: str
    special: dict[str, int]
    control: list[int]
    user_defined: list[int]
    end_of_turn: tuple[int, ...]
    first: int | None
    last: int | None
    adds_space: bool
    chat_templates: dict[str, str]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> GgufVocabulary:
        """Check the tokenizer.* keys of a GGUF file.

        Raises CheckpointError naming key, value and limit, UnsupportedError naming what is not
        supported.
        """
        model = _required(metadata, "model")
        if model not in _MODELS:
            known = ", ".join(f"{name!r} ({what})" for name, what in _MODELS.items())
            raise UnsupportedError(
                f"tokenizer.ggml.model={model!r} is not supported; supported are {known}. {_ELSE}"
            )
        pre = _pre(metadata) if model == "gpt2" else ""
        _refuse_what_is_not_implemented(metadata, model)
        tokens = _strings(metadata, "tokens")
        if not tokens:
            raise CheckpointError("tokenizer.ggml.tokens is empty; the file is damaged.")
        has_merges = model == "gpt2" or (
            model == "llama" and metadata.get(_PREFIX + "merges") is not None
        )
        kinds = _kinds(metadata, len(tokens))
        special = _special(metadata, model, tokens, kinds)
        end_of_turn = _end_of_turn(metadata, tokens, kinds)
        named = {*special.values(), *end_of_turn}
        first, last = _surroundings(metadata, model, pre, special)
        return cls(
            model=model,
            architecture=str(metadata.get("general.architecture", "")),
            tokens=tokens,
            kinds=kinds,
            scores=_scores(metadata, len(tokens)) if model == "llama" and not has_merges else [],
            merges=_strings(metadata, "merges") if has_merges else [],
            pre=pre,
            special=special,
            control=[at for at, kind in enumerate(kinds) if kind == CONTROL or at in named],
            user_defined=[
                at for at, kind in enumerate(kinds) if kind == USER_DEFINED and at not in named
            ],
            end_of_turn=end_of_turn,
            first=first,
            last=last,
            adds_space=model == "llama" and _flag(metadata, "add_space_prefix", True),
            chat_templates=_chat_templates(metadata),
        )


def _pre(metadata: Mapping[str, Any]) -> str:
    pre = _required(metadata, "pre")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"tokenizer.ggml.pre={pre!r} is not supported; supported are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. {_ELSE}"
        )
    return str(pre)


def _refuse_what_is_not_implemented(metadata: Mapping[str, Any], model: str) -> None:
    if model != "llama" and _flag(metadata, "add_space_prefix", False):
        raise UnsupportedError(
            f"tokenizer.ggml.add_space_prefix=true is not supported for model {model!r}."
        )
    if _flag(metadata, "remove_extra_whitespaces", False):
        raise UnsupportedError(
            f"tokenizer.ggml.remove_extra_whitespaces=true is not supported. {_ELSE}"
        )
    charsmap = metadata.get(_PREFIX + "precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        raise UnsupportedError(
            f"tokenizer.ggml.precompiled_charsmap ({len(charsmap)} bytes) is not supported. {_ELSE}"
        )


def _kinds(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    listed = metadata.get(_PREFIX + "token_type")
    if listed is None:
        return [_NORMAL] * num_tokens
    kinds = _numbers(listed, "token_type", num_tokens)
    wrong = next((kind for kind in kinds if not 0 <= kind <= BYTE or kind != int(kind)), None)
    if wrong is not None:
        raise CheckpointError(
            f"tokenizer.ggml.token_type holds {wrong}; types are integers from 0 to {BYTE}."
        )
    return [int(kind) for kind in kinds]


def _scores(metadata: Mapping[str, Any], num_tokens: int) -> list[float]:
    scores = _numbers(_required(metadata, "scores"), "scores", num_tokens)
    wrong = next((at for at, score in enumerate(scores) if not math.isfinite(score)), None)
    if wrong is not None:
        raise CheckpointError(
            f"tokenizer.ggml.scores holds {scores[wrong]} for id {wrong}; scores must be finite."
        )
    return scores


def _numbers(listed: Any, name: str, num_tokens: int) -> list[float]:
    values = listed.tolist() if hasattr(listed, "tolist") else listed
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        raise CheckpointError(f"{_PREFIX}{name} must be a list of numbers.")
    if len(values) != num_tokens:
        raise CheckpointError(
            f"{_PREFIX}{name} has {len(values)} entries, tokenizer.ggml.tokens has {num_tokens}; "
            "the file is damaged."
        )
    return values


def _special(
    metadata: Mapping[str, Any], model: str, tokens: Sequence[str], kinds: Sequence[int]
) -> dict[str, int]:
    found = {name: _token_id(metadata, key, len(tokens)) for name, key in _ROLES.items()}
    if model == "llama" and found["unk_token"] is None and UNKNOWN in kinds:
        found["unk_token"] = kinds.index(UNKNOWN)
    if model == "bert":
        # Converters have named some of these by other keys, or by none.
        texts = {text: at for at, text in enumerate(tokens)}
        for name, text in _BERT_TEXTS.items():
            if found[name] is None:
                found[name] = texts.get(text)
    return {name: token for name, token in found.items() if token is not None}


def _end_of_turn(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[int, ...]:
    named = [_token_id(metadata, role, len(tokens)) for role in _ENDS_OF_TURN]
    if named[0] is None:
        marks = {
            text: at
            for at, text in enumerate(tokens)
            if kinds[at] in (CONTROL, USER_DEFINED) and text[:1] == "<"
        }
        texts = _ANSWER_END_TEXTS if _ANSWER_END_TEXTS[0] in marks else _TURN_END_TEXTS
        named += [marks.get(text) for text in texts]
    return tuple(dict.fromkeys(token for token in named if token is not None))


def _surroundings(
    metadata: Mapping[str, Any], model: str, pre: str, special: Mapping[str, int]
) -> tuple[int | None, int | None]:
    """Ids put before and after a text."""
    first, last = "bos_token", "eos_token"
    if model == "bert":
        first, last = "cls_token", "sep_token"
        for name in (first, last, "unk_token"):
            if name not in special:
                raise CheckpointError(
                    f"tokenizer.ggml.{_ROLES[name]}_token_id is missing, and no token is "
                    f"{_BERT_TEXTS[name]!r}; model 'bert' needs one."
                )
        adds_first, adds_last = True, True
    else:
        adds_first = model == "llama" and first in special
        adds_first = adds_first or (model == "gpt2" and PRE_TOKENIZERS[pre].adds_bos)
        adds_last = False
    chosen: list[int | None] = []
    for name, key, default in ((first, "bos", adds_first), (last, "eos", adds_last)):
        wanted = _flag(metadata, f"add_{key}_token", default)
        if wanted and name not in special:
            raise CheckpointError(
                f"tokenizer.ggml.add_{key}_token is true, but tokenizer.ggml.{_ROLES[name]}"
                "_token_id is missing."
            )
        chosen.append(special[name] if wanted else None)
    return chosen[0], chosen[1]


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
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{_PREFIX}{name}={value!r} must be true or false.")
    return value


def _token_id(metadata: Mapping[str, Any], role: str, num_tokens: int) -> int | None:
    key = f"{_PREFIX}{role}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int:
        raise CheckpointError(f"{key}={value!r} must be an integer.")
    if not 0 <= value < num_tokens:
        raise CheckpointError(
            f"{key}={value} is outside the vocabulary; it must be between 0 and {num_tokens - 1}."
        )
    return value


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
