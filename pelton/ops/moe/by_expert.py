"""Tokens in the order of their experts, one product per expert that has any. Reads the experts'
counts on the host, so it is for the CPU."""

from __future__ import annotations

import torch

from pelton.ops.moe import MoESignature
from pelton.ops.moe.reference import activate, precise_router, route
from pelton.ops.registry import Kernel


def moe(
    signature: MoESignature,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    router_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> Kernel:
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    top_k, num_experts = signature.top_k, signature.num_experts
    logits_of = precise_router(signature, router, router_bias)

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        weights, experts = route(signature, logits_of(x))
        order = experts.flatten().argsort(stable=True)
        tokens, weights = order // top_k, weights.flatten()[order, None]
        counts = experts.flatten().bincount(minlength=num_experts).tolist()
        total = x.new_zeros(x.shape, dtype=accumulate)
        end = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            start, end = end, end + count
            mine = tokens[start:end]
            inner = _product(x[mine], gate_up[expert])
            if gate_up_bias is not None:
                inner += gate_up_bias[expert]
            result = _product(activate(signature, inner), down[expert])
            if down_bias is not None:
                result += down_bias[expert]
            total.index_add_(0, mine, result * weights[start:end])
        out.copy_(total)

    return kernel


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T; a single row is faster as a vector."""
    return torch.mv(weight, x[0])[None] if x.shape[0] == 1 else torch.mm(x, weight.t())
