"""Texts and pairs with special tokens, cut as the tokenizers library cuts them."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from support.minilm import minilm, needs_minilm
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import RobertaProcessing

from pelton.errors import RequestError
from pelton.tokens.tokenizer import Tokenizer, load_tokenizer

FIRST, SECOND = "how many people live in berlin ?", "berlin has 3.5 million inhabitants"


@pytest.fixture(scope="module")
def bert():
    return load_tokenizer(minilm())


def roberta() -> Tokenizer:
    """Two special tokens between the texts, and one type for both."""
    vocab = {word: at for at, word in enumerate(["<s>", "</s>", "<unk>", *"abcdefgh"])}
    backend = tokenizers.Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = RobertaProcessing(("</s>", 1), ("<s>", 0))
    return Tokenizer(backend, special_tokens={})


def library(tokenizer: Tokenizer, pair: tuple[str, ...], most: int | None) -> tokenizers.Encoding:
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if most is not None:
        backend.enable_truncation(most)
    return backend.encode(*pair)


@needs_minilm
@pytest.mark.parametrize("pair", [(FIRST,), (FIRST, SECOND), (SECOND, FIRST), ("", SECOND)])
def test_as_the_library_has_it(bert, pair):
    for most in (None, *range(4, 22)):
        ids, second = bert.encode_pair(*pair, max_tokens=most)
        expected = library(bert, pair, most)
        assert ids.tolist() == expected.ids
        assert ids.dtype == np.int32
        types = expected.type_ids
        assert second == (types.index(1) if 1 in types else None)
    # What was cut is nobody else's matter.
    assert len(bert.encode(FIRST)) == len(library(bert, (FIRST,), None).ids)


def test_two_texts_of_one_type():
    tokenizer = roberta()
    for most in (None, 6, 7, 9):
        ids, second = tokenizer.encode_pair("a b c", "d e f g", max_tokens=most)
        assert ids.tolist() == library(tokenizer, ("a b c", "d e f g"), most).ids
        assert second is None
    assert tokenizer.encode_pair("a b", "c")[0].tolist() == [0, 3, 4, 1, 1, 5, 1]


def test_what_is_refused():
    with pytest.raises(RequestError, match="must be above 4, the number of special tokens"):
        roberta().encode_pair("a", "b", max_tokens=4)
    with pytest.raises(RequestError, match="must be a string"):
        roberta().encode_pair("a", 5)
