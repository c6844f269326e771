from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer

from pelton.checkpoint.gguf_header import read_gguf_header
from pelton.errors import CheckpointError
from pelton.tokens.detokenizer import Detokenizer
from pelton.tokens.tokenizer import load_tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "",
    " ",
    "Hello, World! It's the engine's step.",
    "  spaces   and\ttabs\nand lines  ",
    "Café déjà vu — 123 😊 \t\n x",
    "日本語のテキスト 한국어",
    "a [MASK] b [SEP] c[CLS]",
    "x" * 101,
    "un\x00know\ufffdn \u200b\u00a0\u2581 ##ab",
]
CORPUS = [path.read_text() for path in sorted(Path("docs").glob("*.md"))] + TEXTS * 3


def train(lowercase: bool) -> list[str]:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=700, special_tokens=SPECIALS, limit_alphabet=70, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    ids = backend.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def spelt(text: str) -> str:
    """As converters write a token."""
    if text in SPECIALS:
        return text
    return text[2:] if text.startswith("##") else "\u2581" + text


def metadata(folder: Path, tokens: list[str], **changes: Any) -> dict[str, Any]:
    writer = gguf.GGUFWriter(folder / "m.gguf", "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list([spelt(text) for text in tokens])
    writer.add_token_types([3 if text in SPECIALS else 1 for text in tokens])
    writer.add_unk_token_id(1)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    listed = dict(read_gguf_header(folder / "m.gguf").metadata)
    return listed | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """Lower case or not -> (ours, transformers' from the same vocabulary)."""
    found = {}
    for lowercase in (True, False):
        tokens = train(lowercase)
        ours = load_tokenizer(metadata(tmp_path_factory.mktemp("gguf"), tokens))
        ids = {text: at for at, text in enumerate(tokens)}
        found[lowercase] = ours, BertTokenizer(vocab=ids, do_lower_case=lowercase)
    return found


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(pairs: dict[bool, Any], lowercase: bool, text: str) -> None:
    """Case 38."""
    ours, theirs = pairs[lowercase]
    ids = ours.encode(text).tolist()
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.backend_tokenizer.decode(ids)
    stream = Detokenizer(ours, [])
    streamed = "".join([stream.push([token]) for token in ids]) + stream.finish()
    assert streamed.split() == ours.decode(ids).split()


@pytest.mark.parametrize("lowercase", [True, False])
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from([*SPECIALS, " ", "The", "ing", "é", "e\u0301", "中", "😊", "'s"]),
            st.text(st.characters(codec="utf-8"), max_size=6),
        ),
        max_size=10,
    )
)
def test_random_text(pairs: dict[bool, Any], lowercase: bool, parts: list[str]) -> None:
    """Case 38."""
    ours, theirs = pairs[lowercase]
    text = "".join(parts)
    assert ours.encode(text).tolist() == theirs(text)["input_ids"]


def test_special_tokens(pairs: dict[bool, Any]) -> None:
    ours = pairs[True][0]
    assert ours.special_token_ids == {0, 1, 2, 3, 4}
    assert ours.special_tokens["cls_token"] == "[CLS]"
    assert ours.special_tokens["mask_token"] == "[MASK]"
    assert ours.pad_token_id == 0
    assert ours.encode("", add_special_tokens=False).tolist() == []


def test_faults_are_refused(tmp_path: Path) -> None:
    """Case 38."""
    for tokens, changes, says in (
        ([*SPECIALS, "a"], {"seperator_token_id": 6}, "seperator_token_id=6 .* between 0 and 5"),
        (["[UNK]", "[UNK2]", "a", "b"], {}, r"cls_token_id is missing, and no token is '\[CLS\]'"),
        ([*SPECIALS, "##a"], {}, r"none that begins with U\+2581"),
        ([*SPECIALS, "a", "##\u2581a"], {}, "'a' twice"),
    ):
        with pytest.raises(CheckpointError, match=says):
            load_tokenizer(metadata(tmp_path, tokens, **changes))
