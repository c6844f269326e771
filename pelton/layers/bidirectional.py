"""Self-attention among all tokens of a text, which are in one step: three calls, no cache."""

from __future__ import annotations

import torch

from pelton.config.model import ModelConfig
from pelton.layers.attention import qkv_parts
from pelton.layers.context import BuildContext, StepContext
from pelton.layers.linear import LinearAdd, NormLinear, vector
from pelton.layers.parameter import Parameter
from pelton.ops import bidirectional_attention
from pelton.ops.bidirectional_attention import BidirectionalSignature
from pelton.ops.registry import bind


class BidirectionalAttention:
    """norm, qkv, rotation, attention and output product into the residual stream: an encoder's, or
    a decoder's whose tokens also see those behind them."""

    def __init__(self, build: BuildContext, config: ModelConfig, index: int) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        parts = qkv_parts(build, config)
        self.qkv = NormLinear(
            build,
            hidden,
            parts,
            norm_eps=config.rms_norm_eps if config.pre_norms else None,
            has_bias=config.attention_bias or config.qkv_bias,
        )
        self.out = LinearAdd(
            build,
            config.num_heads * head_dim,
            hidden,
            unit=head_dim,
            has_bias=config.attention_bias,
            post_norm_eps=config.rms_norm_eps if config.post_norms else None,
            multiplier=config.residual_multiplier,
        )
        self.norms: dict[str, Parameter] = {}
        if config.qk_norm:
            self.norms = {name: vector(build, head_dim) for name in ("q_norm", "k_norm")}
        is_window = config.layer_kind(index) == "window"
        # The model state has a table for local_rope behind the main one.
        self._rope = int(is_window and config.local_rope is not None)
        rope = config.local_rope if self._rope else config.rope
        assert rope is not None
        self._index = index
        self.num_heads = config.num_heads // build.size
        self._signature = BidirectionalSignature(
            num_heads=self.num_heads,
            num_kv_heads=parts["k"].size // head_dim,
            head_dim=head_dim,
            scale=config.attention_scale or head_dim**-0.5,
            dtype=build.dtype,
            device_type=build.device.type,
            window=config.window if is_window else None,
            rotary_dim=rope.rotary_dim,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            batch_invariant=build.batch_invariant,
        )

    def widths(self) -> dict[str, int]:
        """Columns that this layer needs of step buffers, by name."""
        return {
            "qkv": self.qkv.out_features,
            "attention": self.num_heads * self._signature.head_dim,
        }

    def bind(self) -> None:
        self.qkv.bind()
        self.out.bind()
        self._attend = bind(
            "bidirectional_attention",
            bidirectional_attention.CANDIDATES,
            self._signature,
            **{name: norm.tensor for name, norm in self.norms.items()},
        )

    def run(self, ctx: StepContext, x: torch.Tensor | None = None) -> None:
        """x: [T, H], what is read; None: the residual stream."""
        buffers, rope = ctx.buffers, ctx.ropes[self._rope]
        x = buffers.hidden if x is None else x
        self.qkv.run(ctx.num_tokens, x, buffers.qkv, buffers.qkv)
        self._attend(
            ctx.num_tokens,
            buffers.qkv,
            rope.cos,
            rope.sin,
            ctx.metadata[self._index],
            buffers.attention,
        )
        self.out.run(buffers.attention, ctx)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        return {
            **self.qkv.parameters(f"{prefix}.qkv", f"{prefix}.input_norm"),
            **{f"{prefix}.{name}.weight": norm for name, norm in self.norms.items()},
            **self.out.parameters(f"{prefix}.o", f"{prefix}.attention_out_norm"),
        }
