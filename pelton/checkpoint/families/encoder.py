"""BERT, RoBERTa and XLM-RoBERTa, and ModernBERT. Defaults are transformers'."""

from __future__ import annotations

from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import layer_kinds, refuse_foreign, scaled_rope
from pelton.checkpoint.limits import (
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCAB,
)
from pelton.config.encoder import EncoderConfig
from pelton.config.model import LayerKind, ModelConfig, RopeConfig
from pelton.errors import CheckpointError

_NO_ROPE = RopeConfig(rotary_dim=0, theta=1.0)


def read_bert(config: ConfigReader, dtype: str) -> ModelConfig:
    return _bert(config, dtype, "BertModel")


def read_roberta(config: ConfigReader, dtype: str) -> ModelConfig:
    """Positions count from behind the padding token's id on. (A padding token within a text counts
    like any other; transformers would not count it.)"""
    pad = config.integer("pad_token_id", 1, low=0)
    return _bert(config, dtype, "RobertaModel", first_position=pad + 1)


def read_modernbert(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("hidden_activation", "gelu")
    config.require("classifier_activation", "gelu")
    config.require("classifier_pooling", "cls", "mean")
    refuse_foreign(config)
    sizes = _sizes(config)
    num_layers, head_dim = sizes["num_layers"], sizes["head_dim"]
    if head_dim % 2:
        raise CheckpointError(f"{config.where}: heads must be of an even size, got {head_dim}.")
    every = config.integer("global_attn_every_n_layers", 3)
    pattern: tuple[LayerKind, ...] = tuple(
        "window" if index % every else "full" for index in range(num_layers)
    )
    kinds = layer_kinds(config, num_layers, pattern)
    # Of both sides together; a token sees half of it on each.
    window = config.integer("local_attention", 128) // 2
    if kinds and window < 1:
        raise config.wrong("local_attention", "at least 2")
    return ModelConfig(
        architecture="ModernBertModel",
        **sizes,
        rms_norm_eps=config.number("norm_eps"),
        hidden_act="gelu",
        rope=_rope(config, "full_attention", "global_rope_theta", 160_000.0, sizes),
        local_rope=_rope(config, "sliding_attention", "local_rope_theta", 10_000.0, sizes)
        if kinds
        else None,
        layer_kinds=kinds,
        window=window if kinds else None,
        tie_word_embeddings=True,
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
        pre_norms=False,
        checkpoint_dtype=dtype,
        has_lm_head=False,
        pooling_method=config.text("classifier_pooling", "cls"),
        encoder=EncoderConfig(
            norms_first=True,
            norm_bias=config.boolean("norm_bias", False),
            is_gated=True,
            classifier_inner="gelu_norm",
            classifier_inner_bias=config.boolean("classifier_bias", False),
        ),
    )


def _bert(
    config: ConfigReader, dtype: str, architecture: str, *, first_position: int = 0
) -> ModelConfig:
    config.require("hidden_act", "gelu")
    config.require("position_embedding_type", "absolute")
    config.require("is_decoder", False)
    refuse_foreign(config)
    sizes = _sizes(config)
    num_positions = sizes["max_position"]
    if num_positions <= first_position:
        raise config.wrong("max_position_embeddings", f"above pad_token_id + 1 = {first_position}")
    sizes["max_position"] = num_positions - first_position
    return ModelConfig(
        architecture=architecture,
        **sizes,
        rms_norm_eps=config.number("layer_norm_eps"),
        hidden_act="gelu",
        rope=_NO_ROPE,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        pre_norms=False,
        checkpoint_dtype=dtype,
        has_lm_head=False,
        pooling_method="cls",
        encoder=EncoderConfig(
            norms_first=False,
            norm_bias=True,
            is_gated=False,
            num_positions=num_positions,
            first_position=first_position,
            num_token_types=config.integer("type_vocab_size", 2, high=MAX_VOCAB),
            classifier_inner="tanh",
            classifier_inner_bias=True,
        ),
    )


def _sizes(config: ConfigReader) -> dict[str, Any]:
    """As ModelConfig's fields. Each head has keys of its own."""
    hidden_size = config.integer("hidden_size", high=MAX_HIDDEN)
    num_heads = config.integer("num_attention_heads", high=MAX_HEADS)
    if hidden_size % num_heads:
        raise config.wrong("num_attention_heads", f"a divisor of hidden_size={hidden_size}")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size", high=MAX_INTERMEDIATE),
        "num_layers": config.integer("num_hidden_layers", high=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "vocab_size": config.integer("vocab_size", high=MAX_VOCAB),
        "max_position": config.integer("max_position_embeddings"),
    }


def _rope(
    config: ConfigReader, kind: str, old_key: str, theta: float, sizes: dict[str, Any]
) -> RopeConfig:
    """transformers 5 has parameters for each kind of layers, earlier files a theta."""
    theta = config.number(old_key, theta)
    config.require("rope_scaling")
    both = config.nested("rope_parameters")
    reader = None if both is None else both.nested(kind)
    if reader is None:
        return RopeConfig(rotary_dim=sizes["head_dim"], theta=theta)
    theta = reader.number("rope_theta", theta)
    return scaled_rope(reader, sizes["head_dim"], theta, sizes["max_position"])
