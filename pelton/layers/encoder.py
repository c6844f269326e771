"""The layers of encoders: LayerNorms, attention among all tokens of a text, and products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pelton.config.encoder import EncoderConfig
from pelton.config.model import ModelConfig
from pelton.layers.bidirectional import BidirectionalAttention
from pelton.layers.context import BuildContext, StepContext
from pelton.layers.linear import LinearAdd, NormLinear, vector
from pelton.layers.parameter import Parameter, Part, PartName, shard
from pelton.ops.bidirectional_attention import BidirectionalMetadata
from pelton.ops.product import Activation
from pelton.ops.step_kernels import step_kernel

_GATED: dict[str, Activation] = {"gelu": "gelu_mul", "silu": "silu_mul"}
_PLAIN: dict[str, Activation] = {"gelu": "gelu"}


class LayerNorm:
    """out = the norm of x, row by row; out may be x."""

    def __init__(self, build: BuildContext, size: int, *, eps: float, has_bias: bool) -> None:
        self.weight = vector(build, size)
        self.bias = vector(build, size) if has_bias else None
        self._eps = eps
        self._norm = step_kernel("layer_norm", build.device.type)

    def run(self, x: torch.Tensor, out: torch.Tensor) -> None:
        bias = None if self.bias is None else self.bias.tensor
        self._norm(x, self.weight.tensor, bias, self._eps, out)

    def parameters(self, name: str) -> dict[str, Parameter]:
        named = {f"{name}.weight": self.weight}
        if self.bias is not None:
            named[f"{name}.bias"] = self.bias
        return named


class EncoderMLP:
    """Product, activation (of a gate, if there is one), product into the residual stream."""

    def __init__(self, build: BuildContext, config: ModelConfig, encoder: EncoderConfig) -> None:
        hidden, width = config.hidden_size, config.intermediate_size
        gate = shard((width, hidden), build.rank, build.size)
        parts: dict[PartName, Part] = {None: gate}
        if encoder.is_gated:
            up = shard((width, hidden), build.rank, build.size, dst_start=gate.dst_size)
            parts = {"gate": gate, "up": up}
        self.is_gated = encoder.is_gated
        self.up = NormLinear(
            build,
            hidden,
            parts,
            norm_eps=None,
            has_bias=config.mlp_bias,
            activation=(_GATED if encoder.is_gated else _PLAIN)[config.hidden_act],
        )
        self.width = gate.dst_size
        self.down = LinearAdd(build, width, hidden, unit=1, has_bias=config.mlp_bias)

    def bind(self) -> None:
        self.up.bind()
        self.down.bind()

    def run(self, ctx: StepContext, x: torch.Tensor) -> None:
        buffers = ctx.buffers
        scratch = buffers.gate_up if self.is_gated else buffers.activation
        self.up.run(ctx.num_tokens, x, buffers.activation, scratch)
        self.down.run(buffers.activation, ctx)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        return {**self.up.parameters(f"{prefix}.up", ""), **self.down.parameters(f"{prefix}.down")}


class EncoderLayer:
    """Attention, then a feed-forward network, each added to the residual stream and with a norm:
    of what goes in, or of the sum."""

    def __init__(
        self, build: BuildContext, config: ModelConfig, encoder: EncoderConfig, index: int
    ) -> None:
        def norm() -> LayerNorm:
            return LayerNorm(
                build, config.hidden_size, eps=config.rms_norm_eps, has_bias=encoder.norm_bias
            )

        self._norms_first = encoder.norms_first
        self.attention = BidirectionalAttention(build, config, index)
        self.mlp = EncoderMLP(build, config, encoder)
        # The first layer reads what the embeddings' norm has made.
        self.attention_norm = None if encoder.norms_first and index == 0 else norm()
        self.mlp_norm = norm()

    def bind(self) -> None:
        self.attention.bind()
        self.mlp.bind()

    def run(self, ctx: StepContext) -> None:
        hidden, normed = ctx.buffers.hidden, ctx.buffers.normed
        if not self._norms_first:
            assert self.attention_norm is not None
            self.attention.run(ctx, hidden)
            self.attention_norm.run(hidden, hidden)
            self.mlp.run(ctx, hidden)
            self.mlp_norm.run(hidden, hidden)
            return
        if self.attention_norm is None:
            self.attention.run(ctx, hidden)
        else:
            self.attention_norm.run(hidden, normed)
            self.attention.run(ctx, normed)
        self.mlp_norm.run(hidden, normed)
        self.mlp.run(ctx, normed)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        named = self.attention.parameters(prefix) | self.mlp.parameters(prefix)
        if self.attention_norm is not None:
            named |= self.attention_norm.parameters(f"{prefix}.attention_norm")
        return named | self.mlp_norm.parameters(f"{prefix}.mlp_norm")


@dataclass(slots=True, kw_only=True)
class EncoderMetadata(BidirectionalMetadata):
    """Of a step's tokens: positions [T] int64 in their texts, token_types [T] int64, or None where
    all are of the first."""

    positions: torch.Tensor
    token_types: torch.Tensor | None
