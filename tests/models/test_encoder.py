"""BERT, RoBERTa, XLM-RoBERTa and ModernBERT against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.encoders import oracle, pooled, texts_of, tiny_encoder
from support.pooled import cosine
from support.tiny import TinyEngine, checkpoint_of

from pelton.checkpoint.hf_config import read_model_config
from pelton.config.pooling import PoolingParams
from pelton.device.native.library import library
from pelton.errors import UnsupportedError
from pelton.setup.resolve import num_parameters

TOKENS = PoolingParams(task="token_embed", method="all", use_activation=False)
WAYS: dict[str, dict[str, Any]] = {
    "references": {"dtype": "float64"},
    "invariant": {"batch_invariant": True, "attention_backend": "invariant"},
    **({} if library() is None else {"kernels": {}}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "three segments": ("Bert", {"type_vocab_size": 3, "pad_token_id": 0}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "other padding": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 2}),
    "modernbert": ("ModernBert", {"local_attention": 12}),
    "a window that ends nowhere": ("ModernBert", {"local_attention": 256}),
    "biases": (
        "ModernBert",
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "local_attention": 5},
    ),
    "one kind of layers": ("ModernBert", {"global_attn_every_n_layers": 1}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states(name, way):
    family, options = VARIANTS[name]
    folder = tiny_encoder(family, **options)
    texts = texts_of([1, 2, 40, 7, 97])
    engine = TinyEngine(folder, runner="auto", max_num_seqs=5, **WAYS[way])
    for text, found in zip(texts, pooled(engine, texts, TOKENS), strict=True):
        np.testing.assert_allclose(found, oracle(folder, text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_text_of_two_parts(way):
    folder = tiny_encoder("Bert")
    texts, seconds = texts_of([30, 9, 50, 4]), [12, None, 49, 1]
    engine = TinyEngine(folder, runner="auto", max_num_seqs=4, **WAYS[way])
    for text, second, found in zip(
        texts, seconds, pooled(engine, texts, TOKENS, seconds), strict=True
    ):
        np.testing.assert_allclose(found, oracle(folder, text, second), rtol=1e-4, atol=1e-4)
    # A row's next owner has one part again.
    (found,) = pooled(engine, texts[:1], TOKENS)
    np.testing.assert_allclose(found, oracle(folder, texts[0]), rtol=1e-4, atol=1e-4)


CLASSIFIERS = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "modernbert": ("ModernBert", {"classifier_pooling": "mean"}),
    "modernbert with biases": ("ModernBert", {"classifier_bias": True, "norm_bias": True}),
}


@pytest.mark.parametrize("ending", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name, ending):
    family, options = CLASSIFIERS[name]
    folder = tiny_encoder(family, ending, num_labels=3, **options)
    task = "classify" if ending == "ForSequenceClassification" else "token_classify"
    texts = texts_of([20, 1, 33])
    engine = TinyEngine(folder, runner="auto")
    assert engine.config.pooling.tasks[0] == task
    raw = PoolingParams(task=task, use_activation=False)
    for text, found in zip(texts, pooled(engine, texts, raw), strict=True):
        expected = oracle(folder, text, ending=ending)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    (found,) = pooled(engine, texts[:1], PoolingParams(task=task))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


def test_a_cross_encoder_scores_pairs():
    folder = tiny_encoder("Bert", "ForSequenceClassification", num_labels=1)
    text, second = texts_of([24])[0], 11
    engine = TinyEngine(folder, runner="auto")
    (found,) = pooled(engine, [text], PoolingParams(), [second])
    logit = oracle(folder, text, second, ending="ForSequenceClassification")
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logit)), rtol=1e-4)


@pytest.mark.parametrize("method", ["cls", "mean", "last"])
def test_embeddings(method):
    folder = tiny_encoder("Bert")
    texts = texts_of([20, 1, 33, 60])
    engine = TinyEngine(folder, runner="auto")
    assert engine.config.pooling.method == "cls"
    found = pooled(engine, texts, PoolingParams(method=method))
    for text, vector in zip(texts, found, strict=True):
        states = oracle(folder, text)
        expected = {"cls": states[0], "mean": states.mean(0), "last": states[-1]}[method]
        assert cosine(vector, expected) > 0.99999


@pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert"])
def test_parameters_are_counted(family, ending):
    folder = tiny_encoder(family, ending)
    model = TinyEngine(folder, runner="auto").worker.model
    stored = sum(
        int(np.prod(part.source_shape))
        for parameter in model.parameters().values()
        for part in parameter.parts.values()
    )
    assert stored == num_parameters(model.config)


def test_old_names_of_norms_are_read():
    """TensorFlow's gamma and beta, and the prefix of a checkpoint with a head."""
    from pelton.models.bert import Bert

    rules = Bert.names_for("")
    sources = {rule.source: rule.target for rule in rules.rules}
    assert sources["bert.embeddings.LayerNorm.gamma"] == "input_norm.weight"
    assert sources["encoder.layer.{i}.output.LayerNorm.beta"] == "layers.{i}.mlp_norm.bias"
    assert "bert.pooler.dense.weight" in rules.ignored
    assert "bert.pooler.dense.weight" not in Bert.names_for("text").ignored


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("Bert", "hidden_act", "relu"),
        ("Bert", "position_embedding_type", "relative_key"),
        ("Bert", "is_decoder", True),
        ("ModernBert", "hidden_activation", "silu"),
        ("ModernBert", "classifier_pooling", "max"),
        ("ModernBert", "rope_scaling", {"factor": 2}),
    ],
)
def test_what_is_refused(family, key, value):
    checkpoint = checkpoint_of(tiny_encoder(family))
    with pytest.raises(UnsupportedError, match=key):
        read_model_config(checkpoint, {key: value})


def test_an_encoder_does_not_generate():
    with pytest.raises(UnsupportedError, match="has no head for tokens"):
        TinyEngine(tiny_encoder("Bert"))
