"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders

from pelton.errors import CheckpointError, ConfigError, RequestError
from pelton.tokens.gguf_tokenizer import build_gguf_tokenizer, surround
from pelton.tokens.gguf_vocabulary import GgufVocabulary

TokenIds = npt.NDArray[np.int32]

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_DEFAULT_TEMPLATE = "default"
_PIECE = 50_000  # ids, about 3 ms


def _byte_level_alphabet() -> dict[int, int]:
    """Code point -> byte of GPT-2's printable byte alphabet (Radford et al., 2019).

    Bytes that print in Latin-1 stand for themselves; the other 68 follow from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {
        0x100 + place: byte for place, byte in enumerate(others)
    }


_BYTE_OF_CODE_POINT = _byte_level_alphabet()


class _PieceBytes(dict[int, bytes]):
    """Token id -> bytes of its text, filled on first use; impossible ids give b""."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __missing__(self, token: int) -> bytes:
        if not 0 <= token < self._tokenizer.vocab_size:
            return b""  # not stored: the engine may be fed any number of such ids
        piece = b"" if token in self._hidden else self._tokenizer._bytes_of(token)
        self[token] = piece
        return piece


class Tokenizer:
    """A tokenizer with its special tokens and chat templates.

    Build one with `load_tokenizer`. Safe to share between threads: nothing changes the backend
    after construction, and encoding lets other Python threads run.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        bos_token_id, eos_token_id, pad_token_id: ids, or None where the model has no such token.
        end_token_ids: every id that ends an answer by itself (EOS, and GGUF's eot / eom).
        special_token_ids: ids that `skip_special_tokens` hides.
        special_tokens: "bos_token", "eos_token", ... -> text; what a chat template sees.
        chat_templates: name -> Jinja source; "default" is the usual one.
        is_byte_level: each token is a fixed run of bytes (byte-level BPE), whatever stands
            around it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        extra_end_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        # Files for embedding models carry these; lengths are the engine's business here.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates or {})
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        end = set(extra_end_token_ids)
        if self.eos_token_id is not None:
            end.add(self.eos_token_id)
        self.end_token_ids = frozenset(end)
        self._added = {
            token: added.content for token, added in backend.get_added_tokens_decoder().items()
        }
        self.special_token_ids = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._pieces = _PieceBytes(self, frozenset())
        self._visible_pieces = _PieceBytes(self, self.special_token_ids)

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template, or None."""
        return self.chat_templates.get(_DEFAULT_TEMPLATE)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's embedding may have more rows than this."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Ids of `text`, int32 [num_tokens].

        Special tokens written out in the text become their single ids. With
        `add_special_tokens` the model's own BOS/EOS rule is applied.

        Raises RequestError if `text` is not a string of whole Unicode characters.
        """
        return _as_array(self._encoded(text, add_special_tokens=add_special_tokens).ids)

    def encode_pair(
        self, first: str, second: str | None = None, *, max_tokens: int | None = None
    ) -> tuple[TokenIds, int | None]:
        """Ids of a text or of two that belong together, with the model's special tokens, and where
        the second one begins: None where the tokenizer gives both the same type.

        max_tokens: longer ones lose their ends, of two first the longer one's, and keep the special
        tokens; transformers calls that truncation "longest_first".

        Raises RequestError as `encode` does, and for a max_tokens that special tokens fill.
        """
        texts = [first] if second is None else [first, second]
        encodings = [self._encoded(text, add_special_tokens=False) for text in texts]
        if max_tokens is not None:
            self._cut(encodings, max_tokens)
        pair = None if second is None else encodings[1]
        whole = self.backend.post_process(encodings[0], pair)
        types = np.array(whole.type_ids, np.int32)
        if not types.any():
            return _as_array(whole.ids), None
        start = int(types.argmax())
        if types.max() > 1 or not types[start:].all():
            raise CheckpointError(
                f"tokenizer.json gives a pair the token types {types.tolist()}; a model has 0 for "
                "the first text and 1 for the second."
            )
        return _as_array(whole.ids), start

    def _cut(self, encodings: Sequence[tokenizers.Encoding], max_tokens: int) -> None:
        num_special = self.backend.num_special_tokens_to_add(len(encodings) == 2)
        room = max_tokens - num_special
        if room < 1:
            raise RequestError(
                f"truncate_prompt_tokens must be above {num_special}, the number of special tokens "
                f"around a text, got {max_tokens}.",
                field="truncate_prompt_tokens",
            )
        lengths = [len(encoding) for encoding in encodings]
        if sum(lengths) <= room:
            return
        if len(lengths) == 2:
            short, long = sorted(lengths)
            long = max(short, room - short)
            if short + long > room:
                short = room // 2
                long = room - short
            is_swapped = lengths[0] > lengths[1]
            kept = [long, short] if is_swapped else [short, long]
        else:
            kept = [room]
        for encoding, length in zip(encodings, kept, strict=True):
            encoding.truncate(length)

    def _encoded(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise RequestError(
                f"prompt must be a string, got {type(text).__name__}.", field="prompt"
            )
        try:
            # Unlike `encode`, the batch call does not hold the GIL while it works.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError:
            raise RequestError(
                "prompt holds a lone surrogate, which is not a Unicode character; "
                "send well-formed UTF-8.",
                field="prompt",
            ) from None

    def encode_chat(self, text: str) -> TokenIds:
        """Ids of text made by a chat template, int32 [num_tokens].

        The template writes BOS itself, so none is added: there is never a second one. Special
        tokens are recognised wherever they stand, also in what a user wrote.
        """
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Never raises: ids outside the vocabulary give no text, invalid UTF-8
        gives U+FFFD (one per maximal invalid run, as Unicode advises)."""
        known = ids.tolist() if isinstance(ids, np.ndarray) else ids
        if self.is_byte_level:
            pieces = self.pieces(skip_special_tokens=skip_special_tokens)
            return b"".join([pieces[token] for token in known]).decode("utf-8", "replace")
        return self.backend.decode(
            [token for token in known if self.is_known(token)],
            skip_special_tokens=skip_special_tokens,
        )

    def is_known(self, token: int) -> bool:
        """Whether the tokenizer has a text for this id."""
        return 0 <= token < self.vocab_size and self.backend.id_to_token(token) is not None

    def pieces(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Token id -> raw bytes; looking up any integer works. Exact if `is_byte_level`."""
        return self._visible_pieces if skip_special_tokens else self._pieces

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of one token, possibly part of a character; b"" for an impossible id."""
        return self._pieces[token]

    def token_text(self, token: int) -> str:
        """One token for display; bytes that are no whole character show as U+FFFD."""
        return self._pieces[token].decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added.encode()
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if self.is_byte_level:
            values = [_BYTE_OF_CODE_POINT.get(ord(letter)) for letter in piece]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else piece.encode()
        if (byte := _BYTE_FALLBACK.fullmatch(piece)) and "ByteFallback" in self._decoder_kinds:
            return bytes([int(byte[1], 16)])
        if "WordPiece" in self._decoder_kinds:
            return piece.removeprefix("##").encode()
        if "\u2581" in self._decoder_kinds:
            piece = piece.replace("\u2581", " ")
        return piece.encode()

    @cached_property
    def _decoder_kinds(self) -> str:
        decoder = self.backend.decoder
        if decoder is None:
            return ""
        return json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)


def _as_array(ids: list[int]) -> TokenIds:
    """Piece by piece: other threads would wait for a conversion of millions at once."""
    array = np.empty(len(ids), dtype=np.int32)
    for start in range(0, len(ids), _PIECE):
        array[start : start + _PIECE] = ids[start : start + _PIECE]
    return array


def load_tokenizer(source: str | Path | Mapping[str, Any]) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: a folder with tokenizer.json (and tokenizer_config.json, special_tokens_map.json,
            chat_template.jinja where present), or the metadata of a GGUF file, key -> value,
            with the standard tokenizer.* keys.

    Raises:
        CheckpointError: a file or key is missing, broken, or names what does not exist.
        UnsupportedError: a GGUF tokenizer model or pre-tokenizer that is not supported.
    """
    if isinstance(source, Mapping):
        return _from_gguf(source)
    return _from_folder(Path(source))


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = GgufVocabulary.read(metadata)
    return Tokenizer(
        build_gguf_tokenizer(vocabulary),
        special_tokens={name: vocabulary.tokens[at] for name, at in vocabulary.special.items()},
        extra_end_token_ids=vocabulary.end_of_turn,
        chat_templates=vocabulary.chat_templates,
    )


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing. Pelton reads only fast tokenizers (tokenizer.json); make one with "
            f"transformers: AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{file} cannot be read as a fast tokenizer ({error}); download it again."
        ) from None
    settings = _read_json(folder / "special_tokens_map.json")
    settings |= _read_json(folder / "tokenizer_config.json")
    _add_missing_tokens(backend, settings.get("added_tokens_decoder"), folder)
    special = _special_tokens(settings, folder)
    absent = [text for text in special.values() if backend.token_to_id(text) is None]
    if absent:
        raise CheckpointError(
            f"{folder}: special token {absent[0]!r} is named in tokenizer_config.json but is not "
            "in tokenizer.json; the two files do not belong together."
        )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special.values()])
    if "add_bos_token" in settings or "add_eos_token" in settings:
        # Settings outrank tokenizer.json, as in transformers 5.
        backend.post_processor = surround(
            backend,
            bos=special.get("bos_token") if settings.get("add_bos_token") else None,
            eos=special.get("eos_token") if settings.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend, special_tokens=special, chat_templates=_folder_templates(folder, settings)
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download it again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(content).__name__}.")
    return content


def _special_tokens(settings: Mapping[str, Any], folder: Path) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None and value is None:
            continue
        if not isinstance(text, str) or not text:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: {name} must be a string or an object with "
                f"'content', got {value!r}."
            )
        found[name] = text
    return found


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, listed: Mapping[str, Any] | None, folder: Path
) -> None:
    """Add what tokenizer_config.json lists and tokenizer.json lacks; the ids must agree."""
    for token, entry in sorted((int(key), value) for key, value in (listed or {}).items()):
        text = entry["content"]
        if backend.token_to_id(text) is None:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            added = AddedToken(text, **{flag: bool(entry.get(flag, False)) for flag in flags})
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])
        if backend.token_to_id(text) != token:
            raise CheckpointError(
                f"{folder}: added_tokens_decoder gives token {text!r} id {token}, tokenizer.json "
                f"gives {backend.token_to_id(text)}; the two files do not belong together."
            )


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Files win over tokenizer_config.json, as in transformers."""
    listed = settings.get("chat_template")
    if listed is None:
        templates = {}
    elif isinstance(listed, str):
        templates = {_DEFAULT_TEMPLATE: listed}
    elif isinstance(listed, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in listed
    ):
        templates = {entry["name"]: entry["template"] for entry in listed}
    else:
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of "
            f"objects with name and template, got {type(listed).__name__}."
        )
    if (file := folder / "chat_template.jinja").is_file():
        templates[_DEFAULT_TEMPLATE] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates
