"""What the configurations of decoders have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.limits import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCAB,
)
from pelton.config.model import LayerKind, ModelConfig, RopeConfig, RopeKind
from pelton.errors import CheckpointError, UnsupportedError

_KINDS: dict[object, LayerKind] = {"full_attention": "full", "sliding_attention": "window"}


def refuse_foreign(config: ConfigReader, *, quant_method: str | None = None) -> None:
    """Refuse what no family here has: each changes the arithmetic. quant_method: the one in which
    the family's weights may be stored."""
    quantization = config.nested("quantization_config") if quant_method else None
    if quantization is None:
        config.require("quantization_config")
    else:
        quantization.require("quant_method", quant_method)
    config.require("is_encoder_decoder", False)
    config.require("add_cross_attention", False)
    config.require("rope_interleaved", False)
    config.require("pretraining_tp", 1)


def refuse_experts(config: ConfigReader) -> None:
    config.require("num_local_experts")
    config.require("num_experts")


def experts(config: ConfigReader, *, default: int, default_chosen: int) -> dict[str, Any]:
    """How many there are and how many a token uses, as ModelConfig's fields. transformers 5 calls
    num_experts num_local_experts; both may stand there."""
    local = config.integer("num_local_experts", default, low=0, high=MAX_EXPERTS)
    count = config.integer("num_experts", local, low=0, high=MAX_EXPERTS)
    if config.get("num_local_experts") is not None and count != local:
        raise config.wrong("num_experts", f"num_local_experts={local}")
    chosen = config.integer("num_experts_per_tok", default_chosen, high=MAX_EXPERTS)
    if 0 < count < chosen:
        raise config.wrong("num_experts_per_tok", f"at most num_experts={count}")
    return {"num_experts": count, "experts_per_token": chosen if count else 0}


def refuse_softcaps(config: ConfigReader) -> None:
    config.require("attn_logit_softcapping")
    config.require("final_logit_softcapping")


def dimensions(config: ConfigReader, *, head_dim: int | None = None) -> dict[str, Any]:
    """The sizes of a decoder, as ModelConfig's fields. head_dim: the family's default, if it is not
    hidden_size / num_attention_heads."""
    hidden_size = config.integer("hidden_size", high=MAX_HIDDEN)
    num_heads = config.integer("num_attention_heads", high=MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if head_dim is None:
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise config.wrong(
                "num_attention_heads",
                f"a divisor of hidden_size={hidden_size} (head_dim is absent)",
            )
        head_dim = hidden_size // num_heads
    head_dim = config.integer("head_dim", head_dim, high=MAX_HEAD_DIM)
    if head_dim % 2:
        raise CheckpointError(f"{config.where}: head_dim must be even, got {head_dim}.")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size", high=MAX_INTERMEDIATE),
        "num_layers": config.integer("num_hidden_layers", high=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": config.integer("vocab_size", high=MAX_VOCAB),
        "rms_norm_eps": config.number("rms_norm_eps"),
        "max_position": config.integer("max_position_embeddings"),
    }


def swiglu_decoder(
    config: ConfigReader,
    dtype: str,
    architecture: str,
    *,
    may_have_biases: bool = False,
    allow_partial_rope: bool = False,
) -> ModelConfig:
    """What Llama and its next of kin share: SwiGLU layers, all with full attention, without experts
    and softcaps. may_have_biases: whether the family knows attention_bias and mlp_bias;
    allow_partial_rope: whether it knows partial_rotary_factor."""
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_experts(config)
    refuse_softcaps(config)
    biases: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
    for name in biases:
        if may_have_biases:
            biases[name] = config.boolean(name, False)
        else:
            config.require(name, False)
    sizes = dimensions(config)
    return ModelConfig(
        architecture=architecture,
        **sizes,
        hidden_act=config.text("hidden_act"),
        rope=rope(
            config, sizes["head_dim"], sizes["max_position"], allow_partial=allow_partial_rope
        ),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        **biases,
        checkpoint_dtype=dtype,
    )


def with_window(model: ModelConfig, window: int | None) -> ModelConfig:
    """All layers see `window` tokens; None: all of them."""
    kind: LayerKind = "window"
    kinds = (kind,) * model.num_layers
    return model if window is None else replace(model, layer_kinds=kinds, window=window)


def window_of(config: ConfigReader, absent: int | None) -> int | None:
    """sliding_window: null means none, and `absent` holds where the file says nothing."""
    if config.get("sliding_window") is None and (
        absent is None or "sliding_window" in config.values
    ):
        return None
    return config.integer("sliding_window", absent)


def layer_kinds(
    config: ConfigReader, num_layers: int, default: tuple[LayerKind, ...] = ()
) -> tuple[LayerKind, ...]:
    """From layer_types; () when all are "full". default: what its absence means."""
    values = config.get("layer_types")
    kinds = default
    if values is not None:
        if not isinstance(values, list) or len(values) != num_layers:
            raise config.wrong("layer_types", f"a list of num_hidden_layers={num_layers} names")
        for value in values:
            if value not in _KINDS:
                raise UnsupportedError(
                    f"{config.where}: layer_types has {value!r}, which is not supported; it may "
                    f"have {' and '.join(map(repr, _KINDS))}."
                )
        kinds = tuple(_KINDS[value] for value in values)
    return kinds if "window" in kinds else ()


def rope(
    config: ConfigReader,
    head_dim: int,
    max_position: int,
    *,
    theta: float = 10000.0,
    allow_partial: bool = False,
    default: Mapping[str, Any] | None = None,
) -> RopeConfig:
    """From transformers 5's rope_parameters, or rope_theta and rope_scaling of before.

    theta: the family's default. allow_partial: whether the family knows partial_rotary_factor.
    default: the parameters where the file has none.
    """
    theta = config.number("rope_theta", theta)
    parameters, scaling = config.nested("rope_parameters"), config.nested("rope_scaling")
    reader = parameters or scaling
    if parameters is not None and scaling is not None and parameters.values != scaling.values:
        raise CheckpointError(
            f"{config.where}: rope_parameters and rope_scaling contradict each other."
        )
    if reader is None and default is not None:
        reader = ConfigReader(default, f"{config.where}: rope_parameters")
    rotary_dim = head_dim
    if allow_partial:
        factor = config.number("partial_rotary_factor", 1.0)
        if reader is not None:
            factor = reader.number("partial_rotary_factor", factor)
        rotary_dim = int(head_dim * factor)
        if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
            raise CheckpointError(
                f"{config.where}: partial_rotary_factor={factor:g} rotates {rotary_dim} of "
                f"head_dim={head_dim} elements; it must be an even number of them."
            )
    else:
        config.require("partial_rotary_factor", 1.0, 1)
        if reader is not None:
            reader.require("partial_rotary_factor", 1.0, 1)
    if reader is None:
        return RopeConfig(rotary_dim=rotary_dim, theta=theta)
    theta = reader.number("rope_theta", theta)
    if config.get("original_max_position_embeddings") is not None:
        original = config.integer("original_max_position_embeddings")
        return scaled_rope(reader, rotary_dim, theta, max_position, original)
    return scaled_rope(reader, rotary_dim, theta, max_position)


def scaled_rope(
    reader: ConfigReader,
    rotary_dim: int,
    theta: float,
    max_position: int,
    original: int | None = None,
) -> RopeConfig:
    """The rotation that one object of rope parameters describes. original: the length before
    scaling, where it stands outside the object; it goes first then."""
    key = (
        "type"
        if reader.get("rope_type") is None and reader.get("type") is not None
        else "rope_type"
    )
    kind = reader.text(key, "default")
    # Dynamic scaling begins past max_position, where no request gets to.
    if kind in ("default", "dynamic"):
        return RopeConfig(rotary_dim=rotary_dim, theta=theta)
    if kind == "linear":
        return RopeConfig(
            rotary_dim=rotary_dim, theta=theta, kind="linear", factor=reader.number("factor")
        )
    own = reader.integer("original_max_position_embeddings", max_position)
    original = original or own
    if kind == "yarn":
        return _yarn(reader, rotary_dim, theta, max_position, original)
    if kind in ("longrope", "su"):
        return _longrope(reader, rotary_dim, theta, max_position, original)
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        if low >= high:
            raise reader.wrong("low_freq_factor", f"below high_freq_factor={high:g}")
        return RopeConfig(
            rotary_dim=rotary_dim,
            theta=theta,
            kind=cast(RopeKind, kind),
            factor=reader.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original,
        )
    raise UnsupportedError(
        f'{reader.where}: {key}="{kind}" is not supported; it must be "default", "linear", '
        '"dynamic", "llama3", "yarn" or "longrope".'
    )


def _yarn(
    reader: ConfigReader, rotary_dim: int, theta: float, max_position: int, original: int
) -> RopeConfig:
    factor = reader.number("factor", max_position / original)
    fast, slow = reader.number("beta_fast", 32.0), reader.number("beta_slow", 1.0)
    if fast < slow:
        raise reader.wrong("beta_fast", f"at least beta_slow={slow:g}")
    multipliers = [1.0]
    if reader.get("mscale") is not None and reader.get("mscale_all_dim") is not None:
        multipliers = [reader.number("mscale"), reader.number("mscale_all_dim")]
    scales = [1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0 for m in multipliers]
    implied = scales[0] / scales[1] if len(scales) == 2 else scales[0]
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=reader.number("attention_factor", implied),
        beta_fast=fast,
        beta_slow=slow,
        truncate=reader.boolean("truncate", True),
    )


def _longrope(
    reader: ConfigReader, rotary_dim: int, theta: float, max_position: int, original: int
) -> RopeConfig:
    factor = reader.number("factor", max_position / original)
    implied = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = reader.get("short_factor")
    if (
        not isinstance(factors, list)
        or len(factors) != rotary_dim // 2
        or any(type(one) not in (int, float) or not 0 < one < math.inf for one in factors)
    ):
        raise reader.wrong("short_factor", f"a list of {rotary_dim // 2} numbers above 0")
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=theta,
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=reader.number("attention_factor", implied),
        short_factors=tuple(float(one) for one in factors),
    )
