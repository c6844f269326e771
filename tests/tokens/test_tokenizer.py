from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from pelton.errors import CheckpointError, ConfigError, RequestError
from pelton.tokens.tokenizer import Tokenizer, load_tokenizer


def write_folder(folder: Path, **settings: Any) -> Path:
    """A byte-level tokenizer.json that puts <s> before a text, and tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: at for at, piece in enumerate(["<s>", "</s>", *alphabet, "th"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folder(tmp_path: Path) -> None:
    """Tokens named as string or object; truncation and padding of the file do not apply."""
    folder = write_folder(
        tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, chat_template="T"
    )
    loaded = load_tokenizer(folder)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, None)
    assert loaded.special_token_ids == {0, 1}
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert loaded.chat_template == "T"
    ids = loaded.encode("this thing</s>")
    assert ids.dtype == np.int32
    assert ids.tolist()[0] == 0
    assert ids.tolist()[-1] == 1
    assert len(ids) == 1 + 8 + 1
    assert loaded.decode(ids) == "this thing"
    assert loaded.encode_chat("<s>th").tolist() == [0, loaded.backend.token_to_id("th")]


def test_special_tokens_map_is_the_second_choice(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, eos_token="</s>")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<s>", "bos_token": "<s>"}')
    loaded = load_tokenizer(str(folder))
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 2]),
        ({"add_bos_token": False}, [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 2, 1]),
    ],
)
def test_settings_outrank_the_post_processor(
    tmp_path: Path, settings: dict[str, Any], expected: list[int]
) -> None:
    folder = write_folder(tmp_path, bos_token="<s>", eos_token="</s>", **settings)
    assert load_tokenizer(folder).encode("!").tolist() == expected


def test_added_tokens_of_the_settings(tmp_path: Path) -> None:
    listed = {"259": {"content": "<x>", "special": True}}
    folder = write_folder(tmp_path, added_tokens_decoder=listed)
    loaded = load_tokenizer(folder)
    assert loaded.encode_chat("<x>").tolist() == [259]
    assert loaded.vocab_size == 260
    assert 259 in loaded.special_token_ids
    folder = write_folder(tmp_path, added_tokens_decoder={"300": {"content": "<x>"}})
    with pytest.raises(CheckpointError, match=r"'<x>' id 300, tokenizer.json gives 259"):
        load_tokenizer(folder)


def test_templates_of_a_folder(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = write_folder(tmp_path, chat_template=listed)
    assert load_tokenizer(folder).chat_templates == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.jinja").write_text("C")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("D")
    assert load_tokenizer(folder).chat_templates == {"default": "C", "tool_use": "B", "rag": "D"}
    assert load_tokenizer(write_folder(tmp_path)).chat_template == "C"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing.*only fast tokenizers"):
        load_tokenizer(tmp_path)


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(CheckpointError, match="fast tokenizer"):
        load_tokenizer(tmp_path)
    folder = write_folder(tmp_path, eos_token="<nowhere>")
    with pytest.raises(CheckpointError, match="'<nowhere>'"):
        load_tokenizer(folder)
    write_folder(tmp_path, eos_token=7)
    with pytest.raises(CheckpointError, match=r"eos_token must be .* got 7"):
        load_tokenizer(tmp_path)
    write_folder(tmp_path, chat_template=7)
    with pytest.raises(ConfigError, match="chat_template must be"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", [None, 5, b"x", ["a"]])
def test_encode_refuses_what_is_no_text(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="prompt must be a string") as caught:
        tokenizer.encode(text)
    assert caught.value.field == "prompt"


def test_encode_refuses_lone_surrogates(tokenizer: Tokenizer) -> None:
    r"""JSON can spell them as "\ud800"."""
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_token_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_text(tokenizer.backend.token_to_id("Ġthe")) == " the"
    emoji = tokenizer.encode("🙈").tolist()
    assert len(emoji) > 1
    assert b"".join(map(tokenizer.token_bytes, emoji)) == "🙈".encode()
    assert "\ufffd" in tokenizer.token_text(emoji[-1])


@pytest.mark.parametrize("token", [-1, 49152, 2**31, 2**40])
def test_impossible_ids_have_no_text(tokenizer: Tokenizer, token: int) -> None:
    """Cases 25, 26."""
    assert tokenizer.token_bytes(token) == b""
    assert tokenizer.token_text(token) == ""
    assert tokenizer.decode([token]) == ""
    assert not tokenizer.is_known(token)


def test_token_bytes_of_sentencepiece_tokens() -> None:
    vocab = {"<unk>": 0, "<0xC3>": 1, "\u2581the": 2}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    small = Tokenizer(backend, special_tokens={})
    assert [small.token_bytes(token) for token in range(3)] == [b"<unk>", b"\xc3", b" the"]


def test_needs_no_torch() -> None:
    """Tokens are a torch-free room."""
    code = (
        "import sys, pelton.tokens.tokenizer, pelton.tokens.detokenizer, "
        "pelton.tokens.chat_template; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False"], result.stderr
