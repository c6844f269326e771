"""ModernBERT's weight names. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule

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

MODERNBERT = NameRules(
    rules=tuple(
        rule
        for prefix in ("model.",)
        for rule in (
            Rule(f"{prefix}embeddings.tok_embeddings.weight", "embed.weight"),
            *(
                Rule(f"{prefix}{source}.{of}", f"{target}.{of}")
                for source, target in _NORMS
                for of in ("weight", "bias")
            ),
            *(
                Rule(f"{prefix}layers.{{i}}.{source}.{of}", f"layers.{{i}}.{target}.{of}", part)
                for source, target, part in _PRODUCTS
                for of in ("weight", "bias")
            ),
        )
    )
)
