"""BERT's and RoBERTa's weight names. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.config.model import Classifier

_LAYER = "encoder.layer.{i}"
_PRODUCTS = (
    ("attention.self.query", "qkv", "q"),
    ("attention.self.key", "qkv", "k"),
    ("attention.self.value", "qkv", "v"),
    ("attention.output.dense", "o", None),
    ("intermediate.dense", "up", None),
    ("output.dense", "down", None),
)
_NORMS = (
    ("embeddings.LayerNorm", "input_norm"),
    (f"{_LAYER}.attention.output.LayerNorm", "layers.{i}.attention_norm"),
    (f"{_LAYER}.output.LayerNorm", "layers.{i}.mlp_norm"),
)
# Of a norm's weight and bias; those of TensorFlow stand in old files.
_OF_NORMS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def _body(prefix: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{prefix}embeddings.word_embeddings.weight", "embed.weight"),
        Rule(f"{prefix}embeddings.position_embeddings.weight", "positions.weight"),
        Rule(f"{prefix}embeddings.token_type_embeddings.weight", "token_types.weight"),
        *(
            Rule(f"{prefix}{source}.{of}", f"{target}.{own}")
            for source, target in _NORMS
            for of, own in _OF_NORMS.items()
        ),
        *(
            Rule(f"{prefix}{_LAYER}.{source}.{of}", f"layers.{{i}}.{target}.{of}", part)
            for source, target, part in _PRODUCTS
            for of in ("weight", "bias")
        ),
    )


def _ignored(prefix: str) -> tuple[str, ...]:
    """A buffer that follows from config.json; and the pooler, which predicts the next sentence."""
    return tuple(
        f"{prefix}{name}"
        for name in ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
    )


BERT = NameRules(rules=(*_body(""), *_body("bert.")), ignored=(*_ignored(""), *_ignored("bert.")))
ROBERTA = NameRules(
    rules=(*_body(""), *_body("roberta.")), ignored=(*_ignored(""), *_ignored("roberta."))
)

_OUTPUT = tuple(Rule(f"classifier.{of}", f"classifier.{of}") for of in ("weight", "bias"))
BERT_CLASSIFIERS: dict[Classifier, tuple[Rule, ...]] = {
    "text": (
        *_OUTPUT,
        *(Rule(f"bert.pooler.dense.{of}", f"inner.{of}") for of in ("weight", "bias")),
    ),
    "token": _OUTPUT,
}
ROBERTA_CLASSIFIERS: dict[Classifier, tuple[Rule, ...]] = {
    "text": tuple(
        Rule(f"classifier.{source}.{of}", f"{target}.{of}")
        for source, target in (("out_proj", "classifier"), ("dense", "inner"))
        for of in ("weight", "bias")
    ),
    "token": _OUTPUT,
}
