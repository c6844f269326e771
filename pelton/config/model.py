"""Facts about a model, read from its checkpoint and never guessed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from pelton.config.encoder import EncoderConfig

Classifier = Literal["", "text", "token"]
Activation = Literal["softmax", "sigmoid", "identity"]
LayerKind = Literal["full", "window", "recurrent"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Source: arXiv 2104.09864; `llama3` scaling: Llama 3.1's config;
    `yarn`: arXiv 2309.00071; `longrope`: arXiv 2402.13753. A rotary_dim of 0 rotates nothing:
    layers without positions (NoPE).

    attention_factor: on cosines and sines. beta_fast, beta_slow, truncate: of yarn. short_factors:
    divisors of longrope's frequencies, as long as a request does not pass original_max_position.
    """

    rotary_dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()

    def context(self, max_position: int) -> int:
        """Tokens that the rotation is good for, where the checkpoint says max_position.

        yarn's files often give the length before it is stretched. longrope turns all tokens of a
        request that passes the original length otherwise, those in the KV cache too: it ends there.
        """
        if self.kind == "yarn":
            return max(max_position, int(self.factor * self.original_max_position))
        if self.kind == "longrope":
            return min(max_position, self.original_max_position)
        return max_position


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config:
    """The recurrent layers of Mamba 2, all alike. Source: arXiv 2405.21060.

    num_heads x head_dim channels, each with a state of state_size numbers; num_groups groups of
    heads, each with keys and queries (B and C) of its own. conv_width: tokens that the convolution
    before the recurrence sees. dt_limits: least and greatest time step.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def projected_size(self) -> int:
        """Rows of the input product: gate, convolved channels, time steps."""
        return self.inner_size + self.conv_channels + self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer or an encoder, as its checkpoint describes it.

    `max_position` is the context length the checkpoint was made for, in tokens; `checkpoint_dtype`
    is "float32", "bfloat16" or "float16" (a quantised GGUF counts as "float32": that is what its
    values dequantise to). hidden_act: "silu" or "gelu_pytorch_tanh", of the gate.

    What some families add, each off by default:
    attention_bias: of the query, key, value and output products; qkv_bias: of the first three.
    qk_norm: an RMS norm over each query and key head, before rotation. joint_qk_norm: one over all
        query heads together instead, and one over all key heads.
    layer_kinds: per layer, () = all "full"; "window" layers see `window` tokens, the query's too;
        "recurrent" layers have no attention, mamba2 says what they are.
    local_rope: rotation of the "window" layers, where it is another.
    attention_scale: factor on scores, None = head_dim ** -0.5.
    attention_softcap, final_softcap: c, where scores or logits x become c * tanh(x / c).
    pre_norms: an RMS norm before attention and before the feed-forward network; on by default.
    post_norms: one behind each of them, before it is added.
    embedding_multiplier: factor on token embeddings. residual_multiplier: factor on what a layer
        adds to the residual stream. logits_divisor: what logits are divided by.
    attention_sinks: each query head has a score that joins the softmax's denominator.
    num_experts: of a sparse layer's feed-forward network, of which a token uses experts_per_token,
        each moe_intermediate_size wide; 0 = all layers are dense. sparse_layers: per layer, () =
        all. norm_topk_prob: the weights of a token's experts sum to one. router_bias, expert_bias:
        of their products. shared_intermediate_size: of a network that all tokens go through beside
        their experts; 0 = none. swiglu_limit, swiglu_alpha: of the experts' clamped activation
        (ops/moe).
    has_lm_head: whether it ends in logits of tokens, as an engine that generates needs it; else in
        hidden states, or in a classifier of whole texts or of their tokens, into num_labels classes
        (a "token" one has a bias), whose scores become probabilities by label_activation.
    encoder: what an encoder has beside this, or None. Its "window" layers see `window` tokens on
        each side of a token, and its hidden_act may be "gelu", the exact one.
    is_bidirectional: of a decoder's layers, whether tokens also see those behind them.
    pooling_method: how a text is pooled, unless sentence-transformers' files say.
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
    qkv_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    layer_kinds: tuple[LayerKind, ...] = ()
    window: int | None = None
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    pre_norms: bool = True
    post_norms: bool = False
    embedding_multiplier: float = 1.0
    attention_sinks: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    sparse_layers: tuple[bool, ...] = ()
    norm_topk_prob: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    encoder: EncoderConfig | None = None
    is_bidirectional: bool = False
    pooling_method: str = "last"
    mamba2: Mamba2Config | None = None
    has_lm_head: bool = True
    classifier: Classifier = ""
    num_labels: int = 0
    label_activation: Activation = "softmax"

    def layer_kind(self, index: int) -> LayerKind:
        return self.layer_kinds[index] if self.layer_kinds else "full"

    @property
    def keeps_kv(self) -> bool:
        """Whether later steps need anything of earlier ones' tokens: not where all tokens of a text
        see each other, in one step."""
        return self.encoder is None and not self.is_bidirectional

    @property
    def num_segments(self) -> int:
        """Parts of a text that the model tells from one another."""
        return 1 if self.encoder is None else max(self.encoder.num_token_types, 1)

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer has state."""
        return "recurrent" in self.layer_kinds

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return self.num_experts > 0 and (not self.sparse_layers or self.sparse_layers[index])

    def for_length(self, max_model_len: int) -> ModelConfig:
        """Without a window that no request outgrows: that is full attention."""
        if self.window is not None and self.window >= max_model_len:
            return replace(self, window=None)
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What the checkpoint's authors say of generation; a request's own values win."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    sampling: dict[str, float | int] = field(default_factory=dict)
    """Subset of {temperature, top_p, top_k, min_p, repetition_penalty}, as the file gives them."""
