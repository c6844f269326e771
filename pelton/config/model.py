"""Facts about a model, read from its checkpoint and never guessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Source: arXiv 2104.09864; `llama3` scaling: Llama 3.1's config."""

    rotary_dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, as its checkpoint describes it.

    `max_position` is the context length the checkpoint was made for, in tokens; `checkpoint_dtype`
    is "float32", "bfloat16" or "float16" (a quantised GGUF counts as "float32": that is what its
    values dequantise to).
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position: int
    checkpoint_dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What the checkpoint's authors say of generation; a request's own values win."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    sampling: dict[str, float | int] = field(default_factory=dict)
    """Subset of {temperature, top_p, top_k, min_p}, as the file gives them."""
