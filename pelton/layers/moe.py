"""The feed-forward network of a decoder layer in which each token uses a few experts of many."""

from __future__ import annotations

import torch

from pelton.config.model import ModelConfig
from pelton.layers.context import BuildContext, StepContext
from pelton.layers.linear import vector
from pelton.layers.mlp import GatedMLP
from pelton.layers.parameter import Parameter, Part, PartName, shard, whole
from pelton.ops import moe
from pelton.ops.moe import MoESignature
from pelton.ops.registry import bind
from pelton.ops.step_kernels import step_kernel


class Experts:
    """Router and experts: normed hidden states [T, H] -> this rank's part of their sum [T, H].

    Every rank has the whole router, and a share of the inner rows of every expert; the biases of
    the down products are added on rank 0 alone. The parts of expert n are "gate.n", "up.n", and "n"
    for its down product.
    """

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        rank, size = build.rank, build.size
        local = shard((inner, hidden), rank, size).size
        self.router = Parameter(build.weight(count, hidden), {None: whole((count, hidden))})
        gate_up: dict[PartName, Part] = {}
        gate_up_bias: dict[PartName, Part] = {}
        down: dict[PartName, Part] = {}
        down_bias: dict[PartName, Part] = {}
        for expert in range(count):
            for offset, name in enumerate(("gate", "up")):
                at = (2 * expert + offset) * local
                part = f"{name}.{expert}"
                gate_up[part] = shard((inner, hidden), rank, size, dst_start=at)
                gate_up_bias[part] = shard((inner,), rank, size, dst_start=at)
            at, part = expert * hidden, str(expert)
            down[part] = shard((hidden, inner), rank, size, dim=1, dst_start=at)
            down_bias[part] = whole((hidden,), dst_start=at)
        self.gate_up = Parameter(build.weight(count * 2 * local, hidden), gate_up)
        self.down = Parameter(build.weight(count * hidden, local), down)
        self.router_bias = vector(build, count) if config.router_bias else None
        self.gate_up_bias = self.down_bias = None
        if config.expert_bias:
            self.gate_up_bias = Parameter(build.weight(count * 2 * local), gate_up_bias)
            self.down_bias = Parameter(build.weight(count * hidden), down_bias)
        self._signature = MoESignature(
            hidden_size=hidden,
            intermediate_size=local,
            num_experts=count,
            top_k=config.experts_per_token,
            dtype=build.dtype,
            device_type=build.device.type,
            normalise_chosen=config.norm_topk_prob,
            has_router_bias=config.router_bias,
            has_gate_up_bias=config.expert_bias,
            has_down_bias=config.expert_bias and rank == 0,
            swiglu_limit=config.swiglu_limit,
            swiglu_alpha=config.swiglu_alpha,
            batch_invariant=build.batch_invariant,
        )

    def bind(self) -> None:
        """Choose kernels; call when the weights are loaded."""
        count = self._signature.num_experts
        weights = {
            "router": self.router.tensor,
            "gate_up": self.gate_up.tensor.view(count, -1, self._signature.hidden_size),
            "down": self.down.tensor.view(count, self._signature.hidden_size, -1),
        }
        if self.router_bias is not None:
            weights["router_bias"] = self.router_bias.tensor
        if self.gate_up_bias is not None:
            weights["gate_up_bias"] = self.gate_up_bias.tensor.view(count, -1)
        if self.down_bias is not None and self._signature.has_down_bias:
            weights["down_bias"] = self.down_bias.tensor.view(count, -1)
        self.kernel = bind("moe", moe.CANDIDATES, self._signature, **weights)

    def run(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x, out: [T, H]."""
        self.kernel(x.shape[0], x, out)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        optional = {
            f"{prefix}.router.bias": self.router_bias,
            f"{prefix}.gate_up.bias": self.gate_up_bias,
            f"{prefix}.down.bias": self.down_bias,
        }
        return {
            f"{prefix}.router.weight": self.router,
            f"{prefix}.gate_up.weight": self.gate_up,
            f"{prefix}.down.weight": self.down,
            **{name: bias for name, bias in optional.items() if bias is not None},
        }


class SparseMLP:
    """norm, router and experts into the residual stream.

    With a network that all tokens share, both read the same norm of the same hidden states.
    """

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        assert config.pre_norms, "no family has experts without a norm before them"
        assert not config.post_norms, "no family has both"
        self.experts = Experts(build, config)
        self.shared: GatedMLP | None = None
        self.gate_up_width = 0  # how wide a token's experts are, the op alone knows
        if config.shared_intermediate_size:
            self.shared = GatedMLP(build, config, config.shared_intermediate_size)
            self.gate_up_width = self.shared.gate_up_width
        shared_norm = None if self.shared is None else self.shared.norm
        self.norm = vector(build, config.hidden_size) if shared_norm is None else shared_norm
        self._norm_eps = config.rms_norm_eps
        self._rms_norm = step_kernel("rms_norm", build.device.type)
        self._multiplier = config.residual_multiplier
        self.sums_apart = self.norms_apart = True

    def bind(self) -> None:
        self.experts.bind()
        if self.shared is not None:
            self.shared.bind()

    def run(self, ctx: StepContext) -> None:
        hidden, normed, partial = ctx.buffers.hidden, ctx.buffers.normed, ctx.buffers.partial
        self._rms_norm(hidden, self.norm.tensor, self._norm_eps, normed)
        # First, since it may use the same memory, which the experts' sum keeps until it is added.
        if self.shared is not None:
            self.shared.run(ctx)
        self.experts.run(normed, partial)
        ctx.communicator.all_reduce(partial)
        hidden.add_(partial, alpha=self._multiplier)

    def parameters(self, prefix: str) -> dict[str, Parameter]:
        shared = {} if self.shared is None else self.shared.parameters(prefix)
        return {
            f"{prefix}.post_norm.weight": self.norm,
            **shared,
            **self.experts.parameters(f"{prefix}.experts"),
        }
