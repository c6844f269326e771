"""ModernBERT's weight names. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.config.model import Classifier

_PRODUCTS: tuple[tuple[str, str, str | tuple[str, ...] | None], ...] = (
    ("attn.Wqkv", "qkv", ("q", "k", "v")),
    ("attn.Wo", "o", None),
    ("mlp.Wi", "up", ("gate", "up")),
    ("mlp.Wo", "down", None),
)
_NORMS = (
    ("embeddings.norm", "input_norm"),
    ("layers.{i}.attn_norm", "layers.{i}.attention_norm"),
    ("layers.{i}.mlp_norm", "layers.{i}.mlp_norm"),
    ("final_norm", "final_norm"),
)

# pooling_names.py adds those of a checkpoint of the layers alone, without "model.".
MODERNBERT = NameRules(
    rules=(
        Rule("model.embeddings.tok_embeddings.weight", "embed.weight"),
        *(
            Rule(f"model.{source}.{of}", f"{target}.{of}")
            for source, target in _NORMS
            for of in ("weight", "bias")
        ),
        *(
            Rule(f"model.layers.{{i}}.{source}.{of}", f"layers.{{i}}.{target}.{of}", part)
            for source, target, part in _PRODUCTS
            for of in ("weight", "bias")
        ),
    )
)

_CLASSIFIER = tuple(
    Rule(f"{source}.{of}", f"{target}.{of}")
    for source, target in (
        ("head.dense", "inner"),
        ("head.norm", "inner_norm"),
        ("classifier", "classifier"),
    )
    for of in ("weight", "bias")
)
MODERNBERT_CLASSIFIERS: dict[Classifier, tuple[Rule, ...]] = {
    "text": _CLASSIFIER,
    "token": _CLASSIFIER,
}
