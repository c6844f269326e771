"""The gated feed-forward network of a decoder layer: two calls."""

from __future__ import annotations

from pelton.config.model import ModelConfig
from pelton.layers.context import BuildContext, StepContext
from pelton.layers.linear import LinearAdd, NormLinear
from pelton.layers.parameter import Parameter, shard
from pelton.ops.product import Activation

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}


class GatedMLP:
    """norm, gate and up products, act(gate) * up, down product into the residual stream.

    width: of the inner layer, config.intermediate_size if it is None.
    """

    def __init__(self, build: BuildContext, config: ModelConfig, width: int | None = None) -> None:
        hidden, width = config.hidden_size, width or config.intermediate_size
        gate = shard((width, hidden), build.rank, build.size)
        up = shard((width, hidden), build.rank, build.size, dst_start=gate.dst_size)
        self.gate_up = NormLinear(
            build,
            hidden,
            {"gate": gate, "up": up},
            norm_eps=config.rms_norm_eps if config.pre_norms else None,
            has_bias=config.mlp_bias,
            activation=_ACTIVATIONS[config.hidden_act],
        )
        self.gate_up_width = self.gate_up.out_features
        self.norm = self.gate_up.norm
        self.down = LinearAdd(
            build,
            width,
            hidden,
            unit=1,
            has_bias=config.mlp_bias,
            post_norm_eps=config.rms_norm_eps if config.post_norms else None,
            multiplier=config.residual_multiplier,
        )
        self.sums_apart, self.norms_apart = self.down.sums_apart, self.down.norms_apart

    def bind(self) -> None:
        self.gate_up.bind()
        self.down.bind()

    def run(self, ctx: StepContext) -> None:
        buffers = ctx.buffers
        self.gate_up.run(ctx.num_tokens, buffers.hidden, buffers.activation, buffers.gate_up)
        self.down.run(buffers.activation, ctx)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        return {
            **self.gate_up.parameters(f"{prefix}.gate_up", f"{prefix}.post_norm"),
            **self.down.parameters(f"{prefix}.down", f"{prefix}.mlp_out_norm"),
        }
